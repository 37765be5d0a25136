"""Data movement by index: embedding, gather, index and their writing counterparts.

Indices are read from GPU buffers, never from shapes. Reads clamp an index that is out of range and writes skip it, so
nothing outside a tensor is ever touched. Where several elements are written to one place, any of them may stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from backend.graph import Call, TensorSpec
from backend.ops.registry import ALL, FLOATS, WIDE_INTS, Accepts, dtypes, every, normalize_axis, register
from backend.ops.rows import reread
from backend.runtime import value as values
from backend.runtime.tensor import COMPUTE, Tensor, contiguous_strides, merge_dims
from backend.runtime.value import Value

WORKGROUP = 256
MOST_ADDED = 65536  # every element looks through all positions that something is added at
# {0} index, {1} size of the axis. Python's negative indices count from the end.
_READ = "clamp({0}, 0, {1} - 1)"
_READ_WRAPPED = "clamp(select({0}, {0} + {1}, {0} < 0), 0, {1} - 1)"
_WRITE = "select(-1, {0}, {0} >= 0 && {0} < {1})"
_WRITE_WRAPPED = "select(-1, select({0}, {0} + {1}, {0} < 0), {0} >= -{1} && {0} < {1})"
_JOIN = "select(-1, {0} * {1} + {2}, {0} >= 0 && {2} >= 0)"


def _position(index: Value, size: int, code: str, b: Any) -> Value:
    """The index made safe by one of the expressions above."""
    return b.pointwise(code, [index, values.scalar(size, "int32")], "int32", index.shape)


def position_to_write(index: Value, size: int, b: Any) -> Value:
    """`index` with -1 for positions that do not exist on an axis of `size`: kernels skip those."""
    return _position(index, size, _WRITE, b)


def _joined(indices: Sequence[Value], sizes: Sequence[int], code: str, b: Any) -> Value:
    """One position from several broadcast indices: their row-major index in `sizes`; -1 where one is out of range."""
    shape = _broadcast([index.shape for index in indices])
    result = _position(indices[0], sizes[0], code, b)
    for index, size in zip(indices[1:], sizes[1:], strict=True):
        at = _position(index, size, code, b)
        result = b.pointwise(_JOIN, [result, values.scalar(size, "int32"), at], "int32", shape)
    return result if result.shape == shape else values.expand(b.movable(result), shape)


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def _gather(x: Value, axes: tuple[int, int, int], index: Value, shape: Sequence[int], b: Any) -> Value:
    """out[o, k, c] = x[o, index, c] with x as [outer, size, inner]; `index` has one position an output element."""
    outer, size, inner = axes
    shape = tuple(shape)
    count = math.prod(shape)
    if count == 0 or x.numel == 0:
        return values.scalar(0, x.dtype, shape)
    if count > x.numel and values.cost(x.root) > 1:
        b.tensor(x)  # elements that are picked more than once are computed once
    return b.launch(
        "gather",
        shape=shape,
        dtype=x.dtype,
        reads={"x": x, "index": index},
        params={"count": count, "inner": inner, "size": size, "out_row": count // outer},
        constants={"workgroup": WORKGROUP},
        groups=-(-count // WORKGROUP),
    )


def _along(index: Value, outer: int, inner: int, b: Any) -> Value:
    """Positions [n] as one an element of [outer, n, inner]."""
    return values.expand(b.movable(b.reshape(index, (1, index.numel, 1))), (outer, index.numel, inner))


def _scatter(
    target: Tensor,
    x: Value,
    strides: Sequence[int],
    b: Any,
    start: int = 0,
    index: Value | None = None,
    step: int = 0,
) -> Value:
    """Writes x at start + coordinates × strides (+ index × step) of the contiguous target."""
    if x.numel:
        dims = merge_dims(x.shape, [tuple(strides)])
        params: dict[str, Any] = {"count": x.numel, "start": start}
        for d, (size, (stride,)) in enumerate(dims):
            params |= {f"size{d}": size, f"stride{d}": stride}
        reads = {"x": x}
        if index is not None:
            reads["index"] = index
            params["step"] = step
        b.launch_into(
            "scatter",
            targets={"out": target},
            reads=reads,
            params=params,
            constants={"workgroup": WORKGROUP, "rank": len(dims), "indexed": index is not None},
            groups=-(-x.numel // WORKGROUP),
        )
    return values.of_tensor(target)


def updatable(value: Value, b: Any, output: int = 0) -> Tensor:
    """The state itself when this node's output may be made of it in place, else a copy of the value."""
    target: Tensor | None = b.in_place(value, output)
    if target is None:
        target = b.temp(value.shape, value.dtype)
        b.write(value, target)
    return target


def _split_at(shape: Sequence[int], axis: int) -> tuple[int, int, int]:
    """(outer, size, inner) around an axis; rank 0 counts as one element."""
    return math.prod(shape[:axis]), shape[axis] if shape else 1, math.prod(shape[axis + 1 :])


# --- reads ------------------------------------------------------------------------------------------------------------


def _lower_embedding(call: Call, b: Any) -> Value:
    table, out = call["weight"], call.outputs[0]
    size, inner = table.shape
    index = _position(call["indices"], size, _READ, b)
    return _gather(table, (1, size, inner), _along(index, 1, inner, b), out.shape, b)


def _lower_index_select(call: Call, b: Any) -> Value:
    x, out = call["self"], call.outputs[0]
    outer, size, inner = _split_at(x.shape, normalize_axis(call["dim"], x.rank))
    index = _position(call["index"], size, _READ, b)
    return _gather(x, (outer, size, inner), _along(index, outer, inner, b), out.shape, b)


def _lower_gather(call: Call, b: Any) -> Value:
    x, index, out = call["self"], call["index"], call.outputs[0]
    axis = normalize_axis(call["dim"], x.rank)
    if index.numel == 0:
        return values.scalar(0, x.dtype, out.shape)
    x, index = _at_least_1d(x, b), _at_least_1d(index, b)
    for other, (size, wanted) in enumerate(zip(x.shape, index.shape, strict=True)):
        if other != axis and size != wanted:
            x = values.slice_(b.movable(x), other, 0, wanted)
    axes = _split_at(x.shape, axis)
    return _gather(x, axes, _position(index, axes[1], _READ, b), out.shape, b)


def _at_least_1d(x: Value, b: Any) -> Value:
    return x if x.rank else b.reshape(x, (1,))


def _indexed_axes(indices: Sequence[Any]) -> tuple[list[int], bool]:
    """Axes that have an index, and whether they are neighbours (else their result comes first)."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    return axes, axes == list(range(axes[0], axes[-1] + 1))


def _lower_index(call: Call, b: Any) -> Value:
    x, out = call["self"], call.outputs[0]
    axes, adjacent = _indexed_axes(call["indices"])
    sizes = [x.shape[axis] for axis in axes]
    index = _joined([call["indices"][axis] for axis in axes], sizes, _READ_WRAPPED, b)
    if not adjacent:
        rest = [axis for axis in range(x.rank) if axis not in axes]
        x = values.permute(b.movable(x), [*axes, *rest])
        axes = list(range(len(axes)))
    outer, inner = math.prod(x.shape[: axes[0]]), math.prod(x.shape[axes[-1] + 1 :])
    return _gather(x, (outer, math.prod(sizes), inner), _along(index, outer, inner, b), out.shape, b)


def _accepts_indices(call: Call) -> str | None:
    present = [index for index in call["indices"] if index is not None]
    if not present:
        return "index: no index"
    masks = [index.dtype for index in present if isinstance(index, TensorSpec) and index.dtype not in WIDE_INTS]
    return f"index: no kernel for a {masks[0]} mask, whose result's size depends on data" if masks else None


def _checks(index: str) -> Accepts:
    return every(dtypes(ALL), dtypes(WIDE_INTS, index))


register("aten.embedding.default", accepts=_checks("indices"), lower=_lower_embedding, preserve=True)
register("aten.index_select.default", accepts=_checks("index"), lower=_lower_index_select)
register("aten.gather.default", accepts=_checks("index"), lower=_lower_gather)
register("aten.index.Tensor", accepts=every(dtypes(ALL), _accepts_indices), lower=_lower_index)


# --- writes -----------------------------------------------------------------------------------------------------------


def _lower_index_copy(call: Call, b: Any) -> Value:
    x, source = call["self"], values.cast(call["source"], call["self"].dtype)
    axis = normalize_axis(call["dim"], x.rank)
    outer, size, inner = _split_at(x.shape, axis)
    target = updatable(x, b)
    index = _along(position_to_write(call["index"], size, b), outer, inner, b)
    source = b.reshape(source, index.shape)
    return _scatter(target, source, (size * inner, 0, 1), b, index=index, step=inner)


def _lower_index_put(call: Call, b: Any) -> Value:
    x, new = call["self"], values.cast(call["values"], call["self"].dtype)
    axes, adjacent = _indexed_axes(call["indices"])
    sizes = [x.shape[axis] for axis in axes]
    index = _joined([call["indices"][axis] for axis in axes], sizes, _WRITE_WRAPPED, b)
    rest = [axis for axis in range(x.rank) if axis not in axes]
    back = None
    accumulate = call.get("accumulate", False)
    target = None
    if adjacent:
        target = None if accumulate else updatable(x, b)
    else:
        order = [*axes, *rest]
        back = [order.index(axis) for axis in range(x.rank)]
        x = values.permute(b.movable(x), order)
        axes = list(range(len(axes)))
        if not accumulate:
            target = b.temp(x.shape, x.dtype)
            b.write(x, target)
    lead, tail = x.shape[: axes[0]], x.shape[axes[-1] + 1 :]
    outer, inner = math.prod(lead), math.prod(tail)
    wanted = (*lead, *index.shape, *tail)
    new = b.reshape(values.expand(b.movable(new), wanted), (outer, index.numel, inner))
    if target is None:
        result = _accumulate(x, index, new, math.prod(sizes), inner, b)
    else:
        index = _along(index, outer, inner, b)
        result = _scatter(target, new, (math.prod(sizes) * inner, 0, 1), b, index=index, step=inner)
    return values.permute(b.movable(result), back) if back is not None else result


def _accumulate(x: Value, index: Value, new: Value, size: int, inner: int, b: Any) -> Value:
    """x, seen as [outer, size, inner], plus new [outer, n, inner] at the positions index [n]."""
    if x.numel == 0 or new.numel == 0:
        return x
    dtype = x.dtype if x.dtype in FLOATS else "int64"
    result = b.launch(
        "accumulate",
        shape=x.shape,
        dtype=dtype,
        reads={"x": x, "index": reread(b.reshape(index, (index.numel,)), b), "new": reread(new, b)},
        params={"count": x.numel, "size": size, "inner": inner, "n": index.numel},
        constants={"workgroup": WORKGROUP, "type": COMPUTE[dtype]},
        groups=-(-x.numel // WORKGROUP),
    )
    return values.cast(result, x.dtype)


def _accepts_index_put(call: Call) -> str | None:
    if call.get("accumulate", False):
        if call["self"].dtype == "bool":
            return "index_put: no kernel for accumulate=True of bool"
        known = [math.prod(dim for dim in spec.shape if isinstance(dim, int)) for spec in call["indices"] if spec]
        if max(known, default=0) > MOST_ADDED:
            return f"index_put: accumulate=True takes at most {MOST_ADDED} positions"
    return _accepts_indices(call)


def _lower_scatter(call: Call, b: Any) -> Value:
    x, index = call["self"], _at_least_1d(call["index"], b)
    axis = normalize_axis(call["dim"], x.rank)
    shape = x.shape or (1,)
    if call.op.endswith("value"):
        new = Value(index.shape, x.dtype, _constant(call["value"], x.dtype))
    else:
        new = _at_least_1d(values.cast(call["src"], x.dtype), b)
        for other, (size, wanted) in enumerate(zip(new.shape, index.shape, strict=True)):
            if size != wanted:
                new = values.slice_(b.movable(new), other, 0, wanted)
    target = updatable(x, b)
    strides = list(contiguous_strides(shape))
    step, strides[axis] = strides[axis], 0
    return _scatter(target, new, strides, b, index=position_to_write(index, shape[axis], b), step=step)


def _constant(item: Any, dtype: str) -> values.Expression:
    source = "bool" if isinstance(item, bool) else "int64" if isinstance(item, int) else "float32"
    return values.cast_expression(values.Scalar(source, item), dtype)


def _accepts_scatter(call: Call) -> str | None:
    value = call.get("value", 0)
    if call["self"].dtype in WIDE_INTS and not -(2**31) <= value < 2**31:
        return f"scatter: {value} does not fit the GPU's 32 bits"
    return None


def _lower_slice_scatter(call: Call, b: Any) -> Value:
    x, new = call["self"], values.cast(call["src"], call["self"].dtype)
    axis = normalize_axis(call.get("dim", 0), x.rank)
    step = call.get("step", 1)
    start = slice(call.get("start"), call.get("end"), step).indices(x.shape[axis])[0]
    strides = list(contiguous_strides(x.shape))
    along, strides[axis] = strides[axis], strides[axis] * step
    return _scatter(updatable(x, b), new, strides, b, start=start * along)


def _accepts_step(call: Call) -> str | None:
    step = call.get("step", 1)
    return None if isinstance(step, int) and step > 0 else f"slice_scatter: step {step}"


def _lower_select_scatter(call: Call, b: Any) -> Value:
    x, new = call["self"], values.cast(call["src"], call["self"].dtype)
    axis = normalize_axis(call["dim"], x.rank)
    index = call["index"] + (x.shape[axis] if call["index"] < 0 else 0)
    strides = list(contiguous_strides(x.shape))
    along = strides.pop(axis)
    return _scatter(updatable(x, b), new, strides, b, start=index * along)


def _lower_copy(call: Call, b: Any) -> Value:
    out = call.outputs[0]
    return values.expand(b.movable(values.cast(call["src"], out.dtype)), out.shape)


register("aten.index_copy.default", accepts=_checks("index"), lower=_lower_index_copy, preserve=True)
register(
    ("aten.index_put.default", "aten._unsafe_index_put.default"),
    accepts=every(dtypes(ALL), _accepts_index_put),
    lower=_lower_index_put,
)
register(
    ("aten.scatter.src", "aten.scatter.value"), accepts=every(_checks("index"), _accepts_scatter), lower=_lower_scatter
)
register("aten.slice_scatter.default", accepts=every(dtypes(ALL), _accepts_step), lower=_lower_slice_scatter)
register("aten.select_scatter.default", accepts=dtypes(ALL), lower=_lower_select_scatter)
register("aten.copy.default", accepts=dtypes(ALL), lower=_lower_copy)
