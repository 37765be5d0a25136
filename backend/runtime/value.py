"""Lazy values: pointwise expressions that become part of the kernel before or after them.

A `Value` has a shape, a dtype and an expression. Its leaves read tensors through strides (so broadcasting and views
move strides, never data), count (`Iota`), hold scalars, or stand for the result of a kernel that has not been
dispatched yet (`Pending`): pointwise work on top of a pending kernel is done in that kernel's store. The builder
decides when a value is realised into memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from backend.runtime.tensor import COMPUTE, Tensor, contiguous_strides, reshape_strides


@dataclass(frozen=True, eq=False)
class Load:
    """`tensor` read at sum(coordinate × stride) + offset; strides belong to the value's own shape."""

    tensor: Tensor

    @property
    def dtype(self) -> str:
        return self.tensor.dtype


@dataclass(frozen=True, eq=False)
class Iota:
    """start + step × (sum(coordinate × stride) + offset): arange, and every view of it."""

    dtype: str
    start: int | float
    step: int | float
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Scalar:
    """A constant, passed as a uniform: one pipeline serves every constant, and inf and NaN keep their bits."""

    dtype: str
    value: int | float | bool


@dataclass(frozen=True, eq=False)
class Apply:
    """`code` is a WGSL expression with `{0}`, `{1}`… for the arguments, each of the compute type of its dtype."""

    code: str
    args: tuple[Expression, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class Pending:
    """The result of a kernel not yet dispatched, at the same linear index as the value."""

    launch: Any
    dtype: str


Expression = Load | Iota | Scalar | Apply | Pending


@dataclass(eq=False)
class Value:
    shape: tuple[int, ...]
    dtype: str
    root: Expression

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor behind a value that needs no computing."""
        return self.root.tensor if isinstance(self.root, Load) else None

    @property
    def pending(self) -> Pending | None:
        return next((leaf for leaf in leaves(self.root) if isinstance(leaf, Pending)), None)


def of_tensor(tensor: Tensor) -> Value:
    return Value(tensor.shape, tensor.dtype, Load(tensor))


def scalar(value: int | float | bool, dtype: str, shape: Sequence[int] = ()) -> Value:
    return Value(tuple(shape), dtype, Scalar(dtype, value))


def leaves(root: Expression) -> Iterator[Expression]:
    """Every distinct leaf, in order of first use."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Apply):
            stack.extend(reversed(node.args))
        else:
            yield node


def cost(root: Expression) -> int:
    """Number of distinct computations in the expression, casts included."""
    seen: set[int] = set()
    stack = [root]
    count = 0
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Apply):
            count += 1
            stack.extend(node.args)
    return count


def map_leaves(root: Expression, change: Callable[[Expression], Expression]) -> Expression:
    """The expression with each leaf replaced; sharing is kept."""
    done: dict[int, Expression] = {}

    def visit(node: Expression) -> Expression:
        if id(node) not in done:
            if isinstance(node, Apply):
                args = tuple(visit(arg) for arg in node.args)
                done[id(node)] = Apply(node.code, args, node.dtype)
            else:
                done[id(node)] = change(node)
        return done[id(node)]

    return visit(root)


ViewFn = Callable[[tuple[int, ...], int], tuple[tuple[int, ...], int]]


def restride(value: Value, shape: Sequence[int], view: ViewFn) -> Value:
    """The same expression under another shape: `view(strides, offset)` gives each leaf's new strides and offset.

    Not for values with a pending kernel: those move only by `reshape`.
    """
    shape = tuple(shape)

    def change(leaf: Expression) -> Expression:
        if isinstance(leaf, Load):
            strides, offset = view(leaf.tensor.strides, leaf.tensor.offset)
            return Load(leaf.tensor.with_view(shape, strides, offset))
        if isinstance(leaf, Iota):
            strides, offset = view(leaf.strides, leaf.offset)
            return Iota(leaf.dtype, leaf.start, leaf.step, strides, offset)
        assert not isinstance(leaf, Pending), "a pending kernel's result is read at its own index only"
        return leaf

    return Value(shape, value.dtype, map_leaves(value.root, change))


def permute(value: Value, dims: Sequence[int]) -> Value:
    return restride(value, [value.shape[d] for d in dims], lambda s, o: (tuple(s[d] for d in dims), o))


def expand(value: Value, shape: Sequence[int]) -> Value:
    """Broadcast to `shape` by torch's rules (aligned at the last axis)."""
    shape = tuple(shape)
    lead = len(shape) - value.rank
    assert lead >= 0, f"cannot broadcast {value.shape} to {shape}"
    for own, wanted in zip(value.shape, shape[lead:], strict=True):
        assert own in (1, wanted), f"cannot broadcast {value.shape} to {shape}"
    if shape == value.shape:
        return value

    def view(strides: tuple[int, ...], offset: int) -> tuple[tuple[int, ...], int]:
        kept = (0 if own == 1 else step for own, step in zip(value.shape, strides, strict=True))
        return (0,) * lead + tuple(kept), offset

    return restride(value, shape, view)


def slice_(value: Value, axis: int, start: int, length: int, step: int = 1) -> Value:
    shape = list(value.shape)
    shape[axis] = length

    def view(strides: tuple[int, ...], offset: int) -> tuple[tuple[int, ...], int]:
        return (*strides[:axis], strides[axis] * step, *strides[axis + 1 :]), offset + start * strides[axis]

    return restride(value, shape, view)


def reshape(value: Value, shape: Sequence[int]) -> Value | None:
    """The value under a new shape of as many elements; None when a leaf's strides do not allow it."""
    shape = tuple(shape)
    if shape == value.shape:
        return value
    # Strides would tell for a tensor in memory alone: pending kernels and scalars have none.
    assert math.prod(shape) == value.numel, f"cannot reshape {value.shape} to {shape}"
    changed: dict[int, Expression] = {}
    for leaf in leaves(value.root):
        if isinstance(leaf, Load):
            strides = reshape_strides(value.shape, leaf.tensor.strides, shape)
            if strides is None:
                return None
            changed[id(leaf)] = Load(leaf.tensor.with_view(shape, strides, leaf.tensor.offset))
        elif isinstance(leaf, Iota):
            strides = reshape_strides(value.shape, leaf.strides, shape)
            if strides is None:
                return None
            changed[id(leaf)] = Iota(leaf.dtype, leaf.start, leaf.step, strides, leaf.offset)
    return Value(shape, value.dtype, map_leaves(value.root, lambda leaf: changed.get(id(leaf), leaf)))


def iota(length: int, start: int | float, step: int | float, dtype: str) -> Value:
    return Value((length,), dtype, Iota(dtype, start, step, contiguous_strides((length,))))


def cast(value: Value, dtype: str) -> Value:
    """torch's `.to(dtype)`: float to int truncates, anything to bool is `!= 0`, small ints wrap."""
    if dtype == value.dtype:
        return value
    return Value(value.shape, dtype, cast_expression(value.root, dtype))


def cast_expression(root: Expression, dtype: str) -> Expression:
    if root.dtype == dtype:
        return root
    if isinstance(root, Scalar):
        convert = {"f32": float, "i32": int, "bool": bool}[COMPUTE[dtype]]
        return Scalar(dtype, wrap_int(convert(root.value), dtype))
    source, target = COMPUTE[root.dtype], COMPUTE[dtype]
    if target == "bool":
        code = {"f32": "({0} != 0.0 || is_nan({0}))", "i32": "({0} != 0)"}[source]
    elif source == "bool":
        code = {"f32": "select(0.0, 1.0, {0})", "i32": "select(0, 1, {0})"}[target]
    elif source == target:
        code = "{0}"
    else:
        code = f"{target}({{0}})"
    if dtype in WRAP:
        code = WRAP[dtype].format(code)
    if dtype == "float16" and source != "bool":
        code = f"to_half({code})"
    return Apply(code, (root,), dtype)


# Small integers live in i32 and wrap as torch's do.
WRAP = {"uint8": "(({}) & 255)", "int8": "((({}) << 24u) >> 24u)", "int16": "((({}) << 16u) >> 16u)"}


def wrap_int(value: Any, dtype: str) -> Any:
    bits = {"uint8": 8, "int8": 8, "int16": 16}.get(dtype)
    if bits is None:
        return value
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype != "uint8" and value >> (bits - 1) else value
