"""Writes the WGSL around a kernel template: bindings, uniforms, and the load and store functions that carry fusion.

A template in `shaders/` says what is particular to a kernel and nothing else. For every tensor it reads, `load_<name>`
is generated; for every tensor it writes, `store(i, v)` or `store_<name>(i, v)`. They convert between the stored and the
computed type (f16 is computed in f32, small ints in i32, bool is stored as u32), and they hold the pointwise work that
was fused into the kernel. Sizes, strides, offsets and scalars are uniforms `p.<name>`, so that one pipeline serves
every shape; text varies only with structure.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import jinja2
import numpy as np

from backend.runtime.device import READ, WRITE
from backend.runtime.tensor import COMPUTE, STORAGE, Tensor, merge_dims
from backend.runtime.value import Apply, Expression, Iota, Load, Pending, Scalar, Value, leaves

ENTRY = """@compute @workgroup_size({size})
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>,
        @builtin(local_invocation_index) lid: u32) {{
  let group = wg.x + wg.y * nwg.x;
  if (group >= p.groups) {{ return; }}"""

VECTOR = 4  # elements of a wide load or store
_BITS = {1: ("0u", "1u"), VECTOR: ("vec4(0u)", "vec4(1u)")}  # a bool as it is stored, by width

_WORD = re.compile(r"\w+")


@functools.cache
def _environment() -> jinja2.Environment:
    folder = str(resources.files("shaders"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["entry"] = lambda size: ENTRY.format(size=size)
    return environment


@functools.lru_cache(maxsize=4096)
def _render(template: str, constants: tuple[tuple[str, Any], ...]) -> str:
    """The template's text without its comments, which may name types that the kernel does not use."""
    text = _environment().get_template(f"{template}.wgsl").render(**dict(constants))
    return re.sub(r"\s*//.*", "", text)


@functools.cache
def _library() -> dict[str, tuple[str, frozenset[str]]]:
    """The prelude's functions, in order: name -> (text, every name in it)."""
    pieces = re.split(r"^(?=fn )", _render("prelude", ()), flags=re.MULTILINE)[1:]
    texts = {piece[3 : piece.index("(")]: piece for piece in pieces}
    return {name: (text, frozenset(_WORD.findall(text))) for name, text in texts.items()}


def _prelude(code: str) -> str:
    """The prelude functions that `code` needs: compiling them all for every kernel would take longer than the rest."""
    library = _library()
    needed: set[str] = set()
    found = library.keys() & set(_WORD.findall(code))
    while found:
        needed |= found
        found = {word for name in found for word in library[name][1] if word in library} - needed
    return "\n".join(text for name, (text, _) in library.items() if name in needed)


@dataclass
class Source:
    """One kernel being written. `slots`: (tensor, access) in binding order; the uniform comes last."""

    slots: list[tuple[Tensor, str]] = field(default_factory=list)
    declarations: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    params: list[tuple[str, str, Any]] = field(default_factory=list)
    uses_f16: bool = False
    _bound: dict[tuple[int, str, int], str] = field(default_factory=dict)
    _locals: int = 0

    # -- bindings and uniforms

    def bind(self, tensor: Tensor, access: str, name: str, vector: int = 1) -> str:
        """Binds the tensor's buffer and returns its WGSL name; a buffer read twice in one type is bound once."""
        if tensor.packed:
            assert access == READ, "a packed input is only read"
            vector = 1  # four elements are one word
        key = (id(tensor.buffer), tensor.dtype if access == READ else "", vector)
        if access == READ and key in self._bound:
            return self._bound[key]
        storage = "u32" if tensor.packed else STORAGE[tensor.dtype]
        self.uses_f16 |= storage == "f16"
        element = storage if vector == 1 else f"vec{vector}<{storage}>"
        mode = "read" if access == READ else "read_write"
        self.declarations.append(
            f"@group(0) @binding({len(self.slots)}) var<storage, {mode}> {name}: array<{element}>;"
        )
        self.slots.append((tensor, access))
        if access == READ:
            self._bound[key] = name
        return name

    def param(self, value: Any, name: str = "") -> str:
        """Adds a uniform; int → u32, np.int32 → i32, float → f32. Returns the WGSL expression."""
        name = name or f"q{len(self.params)}"
        kind = "f32" if isinstance(value, float) else "i32" if isinstance(value, np.int32) else "u32"
        self.params.append((name, kind, value))
        return f"p.{name}"

    def param_bytes(self) -> bytes:
        parts = []
        for _, kind, value in self.params:
            if kind == "f32":
                parts.append(np.float32(value).tobytes())
            elif kind == "i32":
                parts.append(struct.pack("<i", int(value)))
            else:
                parts.append(struct.pack("<I", int(value) & 0xFFFFFFFF))
        return b"".join(parts).ljust(16, b"\0")

    def local(self) -> str:
        self._locals += 1
        return f"t{self._locals}"

    # -- reads and writes

    def read_raw(self, name: str, tensor: Tensor, vector: int = 1) -> None:
        """`load_<name>(i)`: element i of the buffer; the kernel walks it with its own stride uniforms.

        With vector 4, `load4_<name>(i)` reads elements 4i to 4i+3 at once.
        """
        bound = self.bind(tensor, READ, f"in_{name}", vector)
        compute = COMPUTE[tensor.dtype]
        code = _element(bound, "i", tensor, vector)
        if vector == 1:
            self.functions.append(f"fn load_{name}(i: u32) -> {compute} {{ return {code}; }}")
        else:
            self.functions.append(f"fn load{vector}_{name}(i: u32) -> vec{vector}<{compute}> {{ return {code}; }}")

    def read_value(self, name: str, value: Value, width: int = 1) -> None:
        """`load_<name>(i)`: element i of the value in row-major order, computed from its expression.

        With width 4, for a value that is `in_vectors`, `load4_<name>(i)` gives elements 4i to 4i+3.
        """
        statements, result = self.expression(value.root, value.shape, "i", None, f"in_{name}", width)
        body = " ".join([*statements, f"return {result};"])
        kind = _vector(COMPUTE[value.dtype], width)
        self.functions.append(f"fn load{_suffix(width)}_{name}(i: u32) -> {kind} {{ {body} }}")

    def write(
        self, name: str, tensor: Tensor, epilogue: Value | None = None, kernel_dtype: str = "", width: int = 1
    ) -> None:
        """`store(i, v)` for `out`, `store_<name>(i, v)` otherwise; `v` has the kernel's compute type.

        With width 4, for an epilogue that is `in_vectors`, `store4…` of elements 4i to 4i+3. Its halves are functions
        too: `finish4…(i, v)` does the pointwise work, `put4…(i, r)` writes what that gave. A kernel that stores several
        finishes all of them first, so that what they read is fetched at one time.
        """
        bound = self.bind(tensor, WRITE, f"out_{name}", width)
        statements: list[str] = []
        result = "v"
        if epilogue is not None:
            statements, result = self.expression(epilogue.root, epilogue.shape, "i", "v", f"ep_{name}", width)
        stored = _to_storage(result, tensor.dtype, width)
        place = f"{bound}[i + {self.offset(tensor, width)}]"
        kind = _vector(COMPUTE[kernel_dtype or tensor.dtype], width)
        suffix = _suffix(width) + ("" if name == "out" else f"_{name}")
        if width == 1:
            body = " ".join([*statements, f"{place} = {stored};"])
            self.functions.append(f"fn store{suffix}(i: u32, v: {kind}) {{ {body} }}")
            return
        kept = _vector(STORAGE[tensor.dtype], width)
        body = " ".join([*statements, f"return {stored};"])
        self.functions += [
            f"fn finish{suffix}(i: u32, v: {kind}) -> {kept} {{ {body} }}",
            f"fn put{suffix}(i: u32, r: {kept}) {{ {place} = r; }}",
            f"fn store{suffix}(i: u32, v: {kind}) {{ put{suffix}(i, finish{suffix}(i, v)); }}",
        ]

    def offset(self, tensor: Tensor, width: int = 1) -> str:
        return self.param(tensor.offset // width) if tensor.offset else "0u"

    # -- expressions

    def expression(
        self,
        root: Expression,
        shape: tuple[int, ...],
        index: str,
        pending: str | None,
        prefix: str,
        width: int = 1,
    ) -> tuple[list[str], str]:
        """WGSL statements that compute the expression at row-major `index`, and the name of the result.

        `pending` is the WGSL of the value of the kernel that this expression follows. With width 4 `index` counts
        vectors: what is in a row in memory is read at once, and each of its elements computed by itself.
        """
        statements: list[str] = []
        walked = [leaf for leaf in leaves(root) if isinstance(leaf, (Load, Iota))]
        strides = [leaf.tensor.strides if isinstance(leaf, Load) else leaf.strides for leaf in walked]
        dims = merge_dims(shape, strides)
        wide = [width > 1 and step == 1 for step in dims[-1][1]] if dims else [False] * len(walked)
        if width > 1:
            dims[-1] = (dims[-1][0] // width, dims[-1][1])
        coordinates = self._coordinates(dims, index, statements)
        names: dict[int, str] = {}
        rows: dict[int, str] = {}  # the vectors
        for position, leaf in enumerate(walked):
            unit = width if wide[position] else 1
            steps = [(coordinates[d], step[position]) for d, (_, step) in enumerate(dims) if step[position]]
            terms = [at if step == 1 else f"{at} * {self.param(step // unit & 0xFFFFFFFF)}" for at, step in steps]
            start = leaf.tensor.offset if isinstance(leaf, Load) else leaf.offset
            if start:
                terms.append(self.param(start // unit & 0xFFFFFFFF))
            where = " + ".join(terms) or "0u"
            name = self.local()
            (rows if unit > 1 else names)[id(leaf)] = name
            if isinstance(leaf, Load):
                bound = self.bind(leaf.tensor, READ, f"{prefix}{position}", unit)
                if leaf.tensor.packed and unit == 1:  # named, for it is needed twice
                    statements.append(f"let {name}_at = {where};")
                    where = f"{name}_at"
                statements.append(f"let {name} = {_element(bound, where, leaf.tensor, unit)};")
            else:
                statements.append(f"let {name} = {self._iota(leaf, where)};")
        names |= {id(leaf): self._scalar(leaf) for leaf in leaves(root) if isinstance(leaf, Scalar)}

        def visit(node: Expression, known: dict[int, str]) -> str:
            if id(node) in known:
                return known[id(node)]
            if isinstance(node, Pending):
                assert pending is not None, "a pending kernel was read outside its own store"
                return pending
            assert isinstance(node, Apply)
            args = [visit(arg, known) for arg in node.args]
            name = known[id(node)] = self.local()
            code = node.code.format(*args)
            self.uses_f16 |= "f16" in code
            statements.append(f"let {name} = {code};")
            return name

        if width == 1:
            return statements, visit(root, names)
        rows |= {id(leaf): pending for leaf in leaves(root) if isinstance(leaf, Pending) and pending is not None}
        lanes = [visit(root, names | {key: f"{name}.{lane}" for key, name in rows.items()}) for lane in "xyzw"]
        return statements, f"{_vector(COMPUTE[root.dtype], width)}({', '.join(lanes)})"

    def _coordinates(self, dims: list[tuple[int, tuple[int, ...]]], index: str, statements: list[str]) -> list[str]:
        used = [any(step) for _, step in dims]
        if not any(used):
            return ["0u"] * len(dims)
        coordinates = [""] * len(dims)
        rest = index
        for d in range(len(dims) - 1, -1, -1):
            if d == 0:
                coordinates[d] = rest
                break
            size = self.param(dims[d][0])
            if used[d]:
                coordinates[d] = self.local()
                statements.append(f"let {coordinates[d]} = {rest} % {size};")
            if any(used[:d]):
                quotient = self.local()
                statements.append(f"let {quotient} = {rest} / {size};")
                rest = quotient
            else:
                break
        return coordinates

    def _iota(self, leaf: Iota, where: str) -> str:
        if COMPUTE[leaf.dtype] == "f32":
            return f"({self.param(float(leaf.start))} + {self.param(float(leaf.step))} * f32(i32({where})))"
        return f"({self.param(np.int32(leaf.start))} + {self.param(np.int32(leaf.step))} * i32({where}))"

    def _scalar(self, node: Scalar) -> str:
        compute = COMPUTE[node.dtype]
        if compute == "f32":
            return self.param(float(node.value))
        if compute == "bool":
            return f"({self.param(int(node.value))} != 0u)"
        if not -(2**31) <= int(node.value) < 2**31:
            raise OverflowError(f"integer {node.value} does not fit the GPU's 32 bits")
        return self.param(np.int32(node.value))

    # -- text

    def text(self, template: str, constants: Mapping[str, Any]) -> str:
        body = _render(template, tuple(sorted(constants.items())))
        fields = ", ".join(f"{name}: {kind}" for name, kind, _ in self.params)
        uniform = f"@group(0) @binding({len(self.slots)}) var<uniform> p: Params;"
        head = ["enable f16;"] if self.uses_f16 or "f16" in _WORD.findall(body) else []
        parts = [
            *head,
            f"struct Params {{ {fields} }}",
            *self.declarations,
            uniform,
            _prelude("\n".join([*self.functions, body])),
            *self.functions,
            body,
        ]
        return "\n".join(parts)


def in_vectors(value: Value, target: Tensor, most_bindings: int) -> bool:
    """Whether `value` can be read, and `target` written, four elements at a time: along the innermost dim each operand
    lies in a row that starts at a multiple of four elements, or does not move. What a pending kernel gives must come
    in such vectors. `most_bindings`: of a kernel that reads nothing else."""
    loads = [leaf for leaf in leaves(value.root) if isinstance(leaf, Load)]
    if any(isinstance(leaf, Iota) for leaf in leaves(value.root)) or target.offset % VECTOR:
        return False
    *outer, (size, inner) = merge_dims(value.shape, [leaf.tensor.strides for leaf in loads]) or [(1, ())]
    if size % VECTOR:
        return False
    for position, (leaf, step) in enumerate(zip(loads, inner, strict=True)):
        starts = [leaf.tensor.offset, *(steps[position] for _, steps in outer)]
        if step not in (0, 1) or (step == 1 and any(start % VECTOR for start in starts)):
            return False
    # A buffer that is read both ways is bound twice.
    return len({(id(leaf.tensor.buffer), step) for leaf, step in zip(loads, inner, strict=True)}) < most_bindings


def _suffix(width: int) -> str:
    return str(width) if width > 1 else ""


def _vector(kind: str, width: int) -> str:
    return f"vec{width}<{kind}>" if width > 1 else kind


def _element(bound: str, at: str, tensor: Tensor, width: int) -> str:
    """Element `at` of a bound buffer, or with width 4 the elements from 4 `at` on, in the compute type."""
    if not tensor.packed:
        return _from_storage(f"{bound}[{at}]", tensor.dtype, width)
    kind = "signed" if tensor.dtype == "int8" else "unsigned"
    code = f"{kind}_bytes({bound}[{at}])" if width > 1 else f"{kind}_byte({bound}[{at} >> 2u], {at})"
    return f"({code} != {_vector('i32', width)}(0))" if tensor.dtype == "bool" else code


def _from_storage(code: str, dtype: str, width: int) -> str:
    if dtype == "bool":
        return f"({code} != {_BITS[width][0]})"
    return f"{_vector('f32', width)}({code})" if dtype == "float16" else code


def _to_storage(code: str, dtype: str, width: int) -> str:
    if dtype == "bool":
        zero, one = _BITS[width]
        return f"select({zero}, {one}, {code})"
    return f"{_vector('f16', width)}({code})" if dtype == "float16" else code
