"""Reading `.pte` files without ExecuTorch: `read_program(path)` gives methods, delegate blobs and named data.

Layout (ExecuTorch's `schema/program.fbs`): a flatbuffer with an extended header spliced in after its first 8 bytes,
then segments, which hold delegate blobs, named data and constants. The file is mapped, and what is handed out are
views of it. Files are not trusted: each mistake in one is a `ProgramError`.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from backend.graph import BACKEND_ID, ShapeError
from backend.runtime.device_tensor import DeviceTensor
from backend.runtime.flatbuffer import FlatbufferError, Reader, Table

# ExecuTorch's scalar types that numpy has, and the names of others.
_NAMED = {11: "bool", 27: "uint16", 28: "uint32", 29: "uint64"}
_NUMBERED = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
SCALAR_TYPES: Mapping[int, np.dtype] = {code: np.dtype(name) for code, name in (*enumerate(_NUMBERED), *_NAMED.items())}
_OTHER_TYPES = {15: "bfloat16"}

_IDENTIFIER = b"ET12"
_SCHEMA_VERSION = 0
_EXTENDED_HEADER = struct.Struct("<4sIQQQ")  # magic, header length, flatbuffer bytes, segment base, segment bytes
_SHORT_HEADER_BYTES = 24  # older files end before the segment bytes

# Field numbers of program.fbs.
_VERSION, _PLANS, _CONSTANT_BUFFER, _INLINE_BLOBS, _SEGMENTS, _CONSTANT_SEGMENT, _NAMED_DATA = 0, 1, 2, 3, 4, 5, 7
_NAME, _VALUES, _INPUTS, _OUTPUTS, _CHAINS, _OPERATORS, _DELEGATES, _PLANNED_BYTES = 0, 2, 3, 4, 5, 6, 7, 8
_NULL, _INT, _BOOL, _DOUBLE, _TENSOR = 1, 2, 3, 4, 5
_KERNEL_CALL, _DELEGATE_CALL, _FREE_CALL = 1, 2, 5
_MOST_PLANNED_BYTES = 2**44
_DYNAMISM = ("static", "bounded", "unbounded")


class ProgramError(ValueError):
    """The file is not a `.pte`, is truncated or damaged, or is newer than this reader."""


@dataclass(frozen=True)
class TensorMeta:
    """A tensor value. `sizes` are upper bounds when `dynamism` is "bounded". `constant`: its bytes, if it has any."""

    dtype: str
    sizes: tuple[int, ...]
    dim_order: tuple[int, ...]
    dynamism: str = "static"
    constant: memoryview | None = field(default=None, repr=False)

    @property
    def is_contiguous(self) -> bool:
        return self.dim_order == tuple(range(len(self.sizes)))

    def array(self) -> np.ndarray:
        """The constant's contents, read-only. Raises `ProgramError` when it is none."""
        if self.constant is None or not self.is_contiguous:
            raise ProgramError("the value is no constant in contiguous memory order")
        return np.frombuffer(self.constant, np.dtype(self.dtype)).reshape(self.sizes)


Value = TensorMeta | int | float | bool | None


@dataclass(frozen=True)
class DelegateCall:
    """One call of a delegate; `inputs` and `outputs` are indices into the method's values, in the delegate's order."""

    backend_id: str
    blob: memoryview = field(repr=False)
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class MethodInfo:
    """A method. `inputs` and `outputs` index `values`, which holds these and the delegates' arguments only.

    `undelegated`: why the method needs ExecuTorch's runtime; None when our delegates do all its work.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    values: Mapping[int, Value]
    calls: tuple[DelegateCall, ...]
    undelegated: str | None

    def check_inputs(self, arrays: Sequence[np.ndarray | DeviceTensor]) -> None:
        """Raises `ShapeError`, naming input and dimension, unless `arrays` are within what the file says.

        ExecuTorch itself compares element counts only. Lower bounds and dims tied to each other are the delegate's.
        """
        if len(arrays) != len(self.inputs):
            raise ShapeError(f"{self.name}: {len(arrays)} inputs given, the method takes {len(self.inputs)}")
        for position, (index, array) in enumerate(zip(self.inputs, arrays, strict=True)):
            meta = self.values[index]
            where = f"{self.name}: input {position}"
            if not isinstance(meta, TensorMeta):
                if array.ndim:
                    raise ShapeError(f"{where} has {array.ndim} dimensions, expected a number")
                continue
            if array.dtype.name != meta.dtype:
                raise ShapeError(f"{where} is {array.dtype.name}, expected {meta.dtype}")
            if array.ndim != len(meta.sizes):
                raise ShapeError(f"{where} has {array.ndim} dimensions, expected {len(meta.sizes)}")
            for axis, (size, bound) in enumerate(zip(array.shape, meta.sizes, strict=True)):
                if meta.dynamism == "static" and size != bound:
                    raise ShapeError(f"{where}, dimension {axis} is {size}, expected {bound}")
                if meta.dynamism == "bounded" and size > bound:
                    raise ShapeError(f"{where}, dimension {axis} is {size}, allowed up to {bound}")


class ProgramFile:
    """A `.pte` file. The views that it hands out keep the mapping alive."""

    def __init__(self, methods: dict[str, MethodInfo], named_data: dict[str, memoryview]) -> None:
        self.methods = methods
        self._named_data = named_data

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._named_data)

    def get_data(self, key: str) -> memoryview:
        """The bytes stored under `key`, without a copy. Raises `KeyError` when there are none."""
        return self._named_data[key]


def read_program(source: str | os.PathLike[str] | bytes | bytearray | memoryview) -> ProgramFile:
    """Reads and checks a program, from a path (mapped) or from memory (kept alive by the result).

    Raises `ProgramError` for anything but a whole, sound file, and `OSError` when the path cannot be read.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = memoryview(source).cast("B").toreadonly()
    else:
        with open(source, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ProgramError("not a .pte file: it is empty")
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    flatbuffer, segment_base = _split(data)
    try:
        return _Parser(data, flatbuffer, segment_base).program()
    except FlatbufferError as error:
        raise ProgramError(f"damaged: {error}") from error


def _split(data: memoryview) -> tuple[memoryview, int]:
    """The flatbuffer part and the offset at which segments start, by the extended header (older files have none)."""
    identifier = bytes(data[4:8])
    if len(data) < 8 or identifier[:2] != _IDENTIFIER[:2]:
        raise ProgramError("not a .pte file")
    if identifier != _IDENTIFIER:
        shown = identifier.decode("ascii", "replace")
        raise ProgramError(f"written for another version of ExecuTorch (format {shown}, this one reads ET12)")
    if len(data) < 8 + _EXTENDED_HEADER.size:
        raise ProgramError(f"truncated: {len(data)} bytes")
    magic, length, size, base, segment_bytes = _EXTENDED_HEADER.unpack_from(data, 8)
    if magic != b"eh00":
        return data, 0
    if length < _SHORT_HEADER_BYTES:
        raise ProgramError(f"damaged: its header says that it has {length} bytes")
    whole = max(size, base + segment_bytes if length > _SHORT_HEADER_BYTES else size)
    if whole > len(data):
        raise ProgramError(f"truncated: {len(data)} of {whole} bytes")
    return data[:size], base


class _Parser:
    def __init__(self, data: memoryview, flatbuffer: memoryview, segment_base: int) -> None:
        self._root = Reader(flatbuffer).root()
        self._segments: list[memoryview] = []
        version = self._root.number(_VERSION, "I")
        if version > _SCHEMA_VERSION:
            raise ProgramError(f"newer than this reader: schema version {version}, at most {_SCHEMA_VERSION} is known")
        for table in self._root.tables(_SEGMENTS):
            start, size = segment_base + table.number(0, "Q"), table.number(1, "Q")
            if start + size > len(data):
                raise ProgramError(f"truncated: a segment ends at {start + size}, the file at {len(data)}")
            self._segments.append(data[start : start + size])

    def program(self) -> ProgramFile:
        named = {item.string(0): self._segment(item.number(1, "I")) for item in self._root.tables(_NAMED_DATA)}
        methods = {}
        for plan in self._root.tables(_PLANS):
            method = self._method(plan)
            methods[method.name] = method
        if not methods:
            raise ProgramError("damaged: it has no methods")
        return ProgramFile(methods, named)

    def _segment(self, index: int) -> memoryview:
        if index >= len(self._segments):
            raise ProgramError(f"damaged: segment {index} of {len(self._segments)}")
        return self._segments[index]

    def _method(self, plan: Table) -> MethodInfo:
        self._check_plan(plan)
        inputs, outputs = plan.numbers(_INPUTS, "i"), plan.numbers(_OUTPUTS, "i")
        # Values of undelegated parts are many and nobody here asks for them.
        values = {index: self._value(plan.item(_VALUES, index)) for index in {*inputs, *outputs}}
        known = {*inputs, *(index for index, value in values.items() if _has_contents(value))}
        calls: list[DelegateCall] = []
        outside: dict[str, None] = {}  # an ordered set
        for chain in plan.tables(_CHAINS):
            for instruction in chain.tables(2):
                kind, call = instruction.number(0, "B"), instruction.table(1)
                if kind == _DELEGATE_CALL and call is not None:
                    delegate = self._delegate_call(plan, call, values, known)
                    calls.append(delegate)
                    known.update(delegate.outputs)
                    if delegate.backend_id != BACKEND_ID:
                        outside[f"a delegate of {delegate.backend_id}"] = None
                elif kind == _KERNEL_CALL and call is not None:
                    outside[self._operator(plan, call.number(0, "i"))] = None
                    known.update(call.numbers(1, "i"))
                elif kind != _FREE_CALL:
                    outside["control flow"] = None
        reason = f"runs outside of {BACKEND_ID}: {', '.join(outside)}" if outside else None
        if reason is None and not {*outputs} <= known:
            reason = "an output is written by no delegate"
        # A number that a delegate is given may be one that it writes: the file does not say which.
        given = {index for delegate in calls for index in (*delegate.inputs, *delegate.outputs)} - {*inputs}
        if reason is None and any(not isinstance(values[index], TensorMeta) for index in given & {*outputs}):
            reason = "an output is a number that a delegate may compute"
        if reason is None:
            reason = next((why for value in values.values() if (why := _unreadable(value))), None)
        return MethodInfo(plan.string(_NAME), tuple(inputs), tuple(outputs), values, tuple(calls), reason)

    def _check_plan(self, plan: Table) -> None:
        """What ExecuTorch uses unchecked, so that damage to it would end the process."""
        planned = plan.numbers(_PLANNED_BYTES, "q")
        # The first one is reserved and empty.
        if not planned or planned[0] != 0 or not all(0 <= size < _MOST_PLANNED_BYTES for size in planned):
            raise ProgramError("damaged: the sizes of its planned memory make no sense")
        for delegate in plan.tables(_DELEGATES):
            if not delegate.has(0) or not all(spec.has(0) and spec.has(1) for spec in delegate.tables(2)):
                raise ProgramError("damaged: a delegate's description is incomplete")

    def _delegate_call(self, plan: Table, call: Table, values: dict[int, Value], known: set[int]) -> DelegateCall:
        delegate = plan.item(_DELEGATES, call.number(0, "i"))
        args = call.numbers(1, "i")
        for index in args:
            if index not in values:
                values[index] = self._value(plan.item(_VALUES, index))
                if _has_contents(values[index]):
                    known.add(index)
        # Arguments are the inputs, then the outputs, without a mark between them: an output is new at this point.
        split = next((place for place, index in enumerate(args) if index not in known), len(args))
        blob = self._blob(delegate.table(1))
        return DelegateCall(delegate.string(0), blob, tuple(args[:split]), tuple(args[split:]))

    def _blob(self, reference: Table | None) -> memoryview:
        if reference is None:
            raise ProgramError("damaged: a delegate has no blob")
        index = reference.number(1, "I")
        if reference.number(0, "b") == 1:
            return self._segment(index)
        return self._root.item(_INLINE_BLOBS, index).data(0)

    def _operator(self, plan: Table, index: int) -> str:
        operator = plan.item(_OPERATORS, index)
        return ".".join(filter(None, (operator.string(0), operator.string(1))))

    def _value(self, table: Table) -> Value:
        kind, value = table.number(0, "B"), table.table(1)
        if value is None:
            raise ProgramError("damaged: a value is missing")
        if kind == _TENSOR:
            return self._tensor(value)
        if kind == _INT:
            return value.number(0, "q")
        if kind == _BOOL:
            return bool(value.number(0, "B"))
        if kind == _DOUBLE:
            return value.float64(0)
        if kind == _NULL:
            return None
        raise ProgramError(f"a value is neither a tensor nor a number (type {kind})")

    def _tensor(self, table: Table) -> TensorMeta:
        code, sizes = table.number(0, "b"), tuple(table.numbers(2, "i"))
        dim_order, dynamism = tuple(table.numbers(3, "B")), table.number(8, "b")
        if any(size < 0 for size in sizes) or sorted(dim_order) != list(range(len(sizes))):
            raise ProgramError(f"damaged: a tensor has sizes {sizes} in the order {dim_order}")
        if not 0 <= dynamism < len(_DYNAMISM):
            raise ProgramError(f"damaged: a tensor has shape dynamism {dynamism}")
        dtype = SCALAR_TYPES.get(code)
        name = dtype.name if dtype is not None else _OTHER_TYPES.get(code, f"scalar type {code}")
        index = table.number(5, "I")
        constant = None
        # With a place in planned memory, the data is only what a mutable buffer starts with.
        if index and dtype is not None and not table.has(6):
            constant = self._constant(table, index, math.prod(sizes) * dtype.itemsize)
        return TensorMeta(name, sizes, dim_order, _DYNAMISM[dynamism], constant)

    def _constant(self, tensor: Table, index: int, nbytes: int) -> memoryview | None:
        extra = tensor.table(9)
        if extra is not None and extra.number(2, "b") == 1:
            return None  # kept outside of the file
        where = self._root.table(_CONSTANT_SEGMENT)
        offsets = where.numbers(1, "Q") if where is not None else []
        if where is None or not offsets:
            data = self._root.item(_CONSTANT_BUFFER, index).data(0)
        elif index < len(offsets):
            data = self._segment(where.number(0, "I"))[offsets[index] :]
        else:
            raise ProgramError(f"damaged: constant {index} of {len(offsets)}")
        if nbytes > len(data):
            raise ProgramError(f"damaged: a constant of {nbytes} bytes in {len(data)}")
        return data[:nbytes]


def _has_contents(value: Value) -> bool:
    return not isinstance(value, TensorMeta) or value.constant is not None


def _unreadable(value: Value) -> str | None:
    if not isinstance(value, TensorMeta):
        return None
    if not value.is_contiguous:
        return f"a tensor is stored in the memory order {value.dim_order}"
    if value.dtype not in {dtype.name for dtype in SCALAR_TYPES.values()}:
        return f"numpy has no type for {value.dtype}"
    return None
