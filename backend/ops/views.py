"""Views, copies and casts: none of them moves data unless strides cannot express the result."""

from __future__ import annotations

from typing import Any

from backend.graph import Call
from backend.ops.registry import ALL, anything, is_static, normalize_axes, normalize_axis, register
from backend.runtime import value as values
from backend.runtime.value import Value

# --- shape only -------------------------------------------------------------------------------------------------------


def _lower_reshape(call: Call, b: Any) -> Value:
    """view, unsqueeze, squeeze, flatten: the output's spec says it all."""
    return b.reshape(call["self"], call.outputs[0].shape)


register(
    [
        *(
            f"aten.{name}.default"
            for name in ("view_copy", "view", "reshape", "_unsafe_view", "unsqueeze_copy", "unsqueeze")
        ),
        *(f"aten.{name}" for name in ("squeeze_copy.default", "squeeze_copy.dim", "squeeze_copy.dims")),
        *(f"aten.{name}" for name in ("squeeze.default", "squeeze.dim", "squeeze.dims", "flatten.using_ints")),
    ],
    accepts=anything,
    lower=_lower_reshape,
)


# Tensors here are whole and row-major to their readers: a clone changes nothing.
register(
    (
        "aten.clone.default",
        "aten.alias_copy.default",
        "aten.alias.default",
        "aten.contiguous.default",
        "aten.detach_copy.default",
        "aten.detach.default",
        "aten.lift_fresh_copy.default",
        "aten.dropout.default",
        "dim_order_ops._clone_dim_order.default",
    ),
    accepts=lambda call: "dropout is for training" if call.get("train") else None,
    lower=lambda call, b: call["self"] if "self" in call.args else call["input"],
)


def _accepts_cast(call: Call) -> str | None:
    return None if call.outputs[0].dtype in ALL else f"no kernel for {call.outputs[0].dtype}"


def _lower_cast(call: Call, b: Any) -> Value:
    return values.cast(call["self"], call.outputs[0].dtype)


register(
    (
        "aten._to_copy.default",
        "dim_order_ops._to_dim_order_copy.default",
        "aten.to.dtype",
    ),
    accepts=_accepts_cast,
    lower=_lower_cast,
)

# --- strides ----------------------------------------------------------------------------------------------------------


def _permute(call: Call, b: Any) -> Value:
    x = b.movable(call["self"])
    return values.permute(x, [normalize_axis(dim, x.rank) for dim in call["dims"]])


def _transpose(call: Call, b: Any) -> Value:
    x = b.movable(call["self"])
    dims = list(range(x.rank))
    if x.rank:
        first, second = normalize_axis(call["dim0"], x.rank), normalize_axis(call["dim1"], x.rank)
        dims[first], dims[second] = dims[second], dims[first]
    return values.permute(x, dims)


def _t(call: Call, b: Any) -> Value:
    x = b.movable(call["self"])
    return values.permute(x, list(range(x.rank))[::-1])


register(("aten.permute_copy.default", "aten.permute.default"), accepts=anything, lower=_permute)
register(("aten.transpose_copy.int", "aten.transpose.int"), accepts=anything, lower=_transpose)
register(("aten.t_copy.default", "aten.t.default"), accepts=anything, lower=_t)


def _expand(call: Call, b: Any) -> Value:
    return values.expand(b.movable(call["self"]), call.outputs[0].shape)


register(
    ("aten.expand_copy.default", "aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default"),
    accepts=anything,
    lower=_expand,
)


def _slice_bounds(start: Any, end: Any, step: int, size: int) -> tuple[int, int]:
    """First index and length, by Python's rules for slices."""
    first, last, step = slice(start, end, step).indices(size)
    return first, max(0, -(-(last - first) // step))


def _slice(call: Call, b: Any) -> Value:
    x = b.movable(call["self"])
    axis = normalize_axis(call.get("dim", 0), x.rank)
    step = call.get("step", 1)
    start, length = _slice_bounds(call.get("start"), call.get("end"), step, x.shape[axis])
    return values.slice_(x, axis, start, length, step)


def _accepts_slice(call: Call) -> str | None:
    step = call.get("step", 1)
    return None if isinstance(step, int) and step > 0 else f"slice: step {step}"


register(("aten.slice_copy.Tensor", "aten.slice.Tensor"), accepts=_accepts_slice, lower=_slice)


def _select(call: Call, b: Any) -> Value:
    x = b.movable(call["self"])
    axis = normalize_axis(call["dim"], x.rank)
    index = call["index"]
    index = index + x.shape[axis] if index < 0 else index
    taken = values.slice_(x, axis, index, 1)
    return values.restride(
        taken, taken.shape[:axis] + taken.shape[axis + 1 :], lambda s, o: (s[:axis] + s[axis + 1 :], o)
    )


register(("aten.select_copy.int", "aten.select.int"), accepts=anything, lower=_select)


def _narrow(call: Call, b: Any) -> Value:
    x = b.movable(call["self"])
    axis = normalize_axis(call["dim"], x.rank)
    start = call["start"] + x.shape[axis] if call["start"] < 0 else call["start"]
    return values.slice_(x, axis, start, call["length"])


register(("aten.narrow_copy.default", "aten.narrow.default"), accepts=anything, lower=_narrow)


def _flip(call: Call, b: Any) -> Value:
    x = b.movable(call["self"])
    for axis in normalize_axes(call["dims"], x.rank) if call["dims"] else []:
        if x.rank and x.shape[axis]:
            x = values.slice_(x, axis, x.shape[axis] - 1, x.shape[axis], -1)
    return x


register("aten.flip.default", accepts=anything, lower=_flip)


# --- several outputs --------------------------------------------------------------------------------------------------


def _pieces(call: Call, b: Any, lengths: list[int]) -> tuple[Value | None, ...]:
    x = b.movable(call["self"])
    axis = normalize_axis(call.get("dim", 0), x.rank)
    starts = [sum(lengths[:position]) for position in range(len(lengths))]
    return tuple(values.slice_(x, axis, start, length) for start, length in zip(starts, lengths, strict=True))


def _split_sizes(call: Call, b: Any) -> tuple[Value | None, ...]:
    return _pieces(call, b, list(call["split_sizes"]))


def _split_even(call: Call, b: Any) -> tuple[Value | None, ...]:
    x = call["self"]
    size = x.shape[normalize_axis(call.get("dim", 0), x.rank)]
    step = call["split_size"]
    return _pieces(call, b, [min(step, size - start) for start in range(0, size, step)] or [0])


def _accepts_split(call: Call) -> str | None:
    x = call["self"]
    size = x.shape[normalize_axis(call.get("dim", 0), x.rank)]
    return None if is_static(size) or "split_sizes" in call.args else "split: the number of pieces depends on the shape"


def _unbind(call: Call, b: Any) -> tuple[Value | None, ...]:
    x = b.movable(call["self"])
    axis = normalize_axis(call.get("dim", 0), x.rank)
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    return tuple(
        values.restride(values.slice_(x, axis, index, 1), shape, lambda s, o: (s[:axis] + s[axis + 1 :], o))
        for index in range(x.shape[axis])
    )


register(("aten.split_with_sizes_copy.default", "aten.split_with_sizes.default"), accepts=anything, lower=_split_sizes)
register(("aten.split_copy.Tensor", "aten.split.Tensor"), accepts=_accepts_split, lower=_split_even)
register(("aten.unbind_copy.int", "aten.unbind.int"), accepts=_accepts_split, lower=_unbind)


# --- repeats ----------------------------------------------------------------------------------------------------------


def _repeat(call: Call, b: Any) -> Value:
    """x[None, s0, None, s1…] expanded to [r0, s0, r1, s1…], then flattened pairwise."""
    repeats = list(call["repeats"])
    x = b.movable(call["self"])
    x = b.reshape(x, (1,) * (len(repeats) - x.rank) + x.shape)
    shape = x.shape
    paired = b.reshape(x, [size for s in shape for size in (1, s)])
    wide = values.expand(b.movable(paired), [size for r, s in zip(repeats, shape, strict=True) for size in (r, s)])
    return b.reshape(wide, call.outputs[0].shape)


register("aten.repeat.default", accepts=anything, lower=_repeat)


def _repeat_interleave(call: Call, b: Any) -> Value:
    x = b.movable(call["self"])
    axis = call.get("dim")
    if axis is None:
        x, axis = b.movable(b.reshape(x, (x.numel,))), 0
    axis = normalize_axis(axis, x.rank)
    split = b.reshape(x, (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]))
    wide = values.expand(b.movable(split), (*x.shape[: axis + 1], call["repeats"], *x.shape[axis + 1 :]))
    return b.reshape(wide, call.outputs[0].shape)


register("aten.repeat_interleave.self_int", accepts=anything, lower=_repeat_interleave, preserve=True)
