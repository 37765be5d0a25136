"""Draws for operators that move data: views, joins, indexing."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

from backend.ops.registry import FLOATS
from tests.ops.draw import DIMS, Arguments, Draw, draws

# --- views ------------------------------------------------------------------------------------------------------------


@draws("view.default", "view_copy.default", "reshape.default", "_unsafe_view.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    merged = list(shape)
    if len(merged) > 1 and d.flag():
        at = d.int(0, len(merged) - 2)
        merged[at : at + 2] = [merged[at] * merged[at + 1]]
    merged.insert(d.int(0, len(merged)), 1)
    if math.prod(shape) and d.flag():
        merged[d.int(0, len(merged) - 1)] = -1
    return (d.tensor(shape, d.dtype()), merged), {}


@draws("unsqueeze.default", "unsqueeze_copy.default")
def _(d: Draw) -> Arguments:
    shape = d.shape(0, 4)
    return (d.tensor(shape, d.dtype()), d.axis(len(shape) + 1)), {}


@draws("squeeze.dim", "squeeze_copy.dim", "squeeze.dims", "squeeze_copy.dims", "unbind.int", "unbind_copy.int")
def _(d: Draw) -> Arguments:
    shape = d.like(d.shape(1))
    shape = shape or (1,)
    axis = d.axes(len(shape)) if d.op.endswith("dims") else d.axis(len(shape))
    return (d.tensor(shape, d.dtype()), axis), {}


@draws("flatten.using_ints")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    first = d.int(0, max(len(shape) - 1, 0))
    last = d.int(first, max(len(shape) - 1, 0))
    return (d.tensor(shape, d.dtype()), first, last - max(len(shape), 1) if d.flag() else last), {}


@draws("permute.default", "permute_copy.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    order = d.data.draw(st.permutations(range(len(shape))))
    return (d.tensor(shape, d.dtype()), [axis - len(shape) if d.flag() else axis for axis in order]), {}


@draws("transpose.int", "transpose_copy.int")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    return (d.tensor(shape, d.dtype()), d.axis(len(shape)), d.axis(len(shape))), {}


@draws("expand.default", "expand_copy.default", "broadcast_to.default", "expand_as.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    x = d.tensor(d.like(shape), d.dtype())
    if d.op.startswith("aten.expand_as"):
        return (x, d.tensor(shape, d.dtype())), {}
    lead = len(shape) - x.dim()
    return (x, [-1 if at >= lead and d.seldom() and x.shape[at - lead] == s else s for at, s in enumerate(shape)]), {}


@draws("slice.Tensor", "slice_copy.Tensor")
def _(d: Draw) -> Arguments:
    shape = d.shape(1)
    bounds = [None if d.seldom() else d.int(-20, 20) for _ in range(2)]
    if d.seldom():
        bounds[1] = 2**63 - 1
    return (d.tensor(shape, d.dtype()), d.axis(len(shape)), *bounds, d.int(1, 4)), {}


@draws("select.int", "select_copy.int")
def _(d: Draw) -> Arguments:
    shape = d.shape(1, smallest=1)
    axis = d.axis(len(shape))
    return (d.tensor(shape, d.dtype()), axis, d.axis(shape[axis])), {}


@draws("narrow.default", "narrow_copy.default")
def _(d: Draw) -> Arguments:
    shape = d.shape(1)
    axis = d.axis(len(shape))
    start = d.int(0, shape[axis])
    return (d.tensor(shape, d.dtype()), axis, start, d.int(0, shape[axis] - start)), {}


@draws("flip.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    return (d.tensor(shape, d.dtype()), d.axes(len(shape))), {}


@draws("split.Tensor", "split_copy.Tensor")
def _(d: Draw) -> Arguments:
    shape = d.shape(1)
    return (d.tensor(shape, d.dtype()), d.int(1, 5), d.axis(len(shape))), {}


@draws("split_with_sizes.default", "split_with_sizes_copy.default")
def _(d: Draw) -> Arguments:
    shape = d.shape(1)
    axis = d.axis(len(shape))
    first = d.int(0, shape[axis])
    return (d.tensor(shape, d.dtype()), [first, 0, shape[axis] - first], axis), {}


@draws("repeat.default")
def _(d: Draw) -> Arguments:
    shape = d.shape(0, 3)
    return (d.tensor(shape, d.dtype()), [d.int(0, 3) for _ in range(len(shape) + d.int(0, 1))]), {}


@draws("repeat_interleave.self_int")
def _(d: Draw) -> Arguments:
    shape = d.shape(0, 3)
    return (d.tensor(shape, d.dtype()), d.int(0, 4)), {"dim": None if d.seldom() or not shape else d.axis(len(shape))}


# --- joins ------------------------------------------------------------------------------------------------------------


@draws("cat.default", "concat.default", "stack.default")
def _(d: Draw) -> Arguments:
    stack, dtype = "stack" in d.op, d.dtype()
    shape = d.shape(0 if stack else 1, 4)
    axis = d.axis(len(shape) + stack)
    parts = []
    for _ in range(d.int(1, 11 if d.seldom() else 4)):
        own = list(shape)
        if not stack:
            own[axis] = d.one(DIMS[:7])
        parts.append(d.tensor([0] if d.seldom() and not stack else own, d.dtype() if d.seldom() else dtype))
    return (parts, axis), {}


@draws("constant_pad_nd.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype()
    pads = [d.int(-min(1, size), 3) for size in reversed(shape) for _ in range(2)][: 2 * d.int(0, len(shape))]
    value = d.scalar(dtype) if dtype != "uint8" else 3
    return (d.tensor(shape, dtype), pads, value), {}


@draws("slice_scatter.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(1), d.dtype()
    axis = d.axis(len(shape))
    start, end, step = d.int(-5, 5), d.int(-5, 20), d.int(1, 3)
    own = list(shape)
    own[axis] = len(range(*slice(start, end, step).indices(shape[axis])))
    return (d.tensor(shape, dtype), d.tensor(own, dtype), axis, start, end, step), {}


@draws("select_scatter.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(1, smallest=1), d.dtype()
    axis = d.axis(len(shape))
    own = [size for at, size in enumerate(shape) if at != axis % len(shape)]
    return (d.tensor(shape, dtype), d.tensor(own, dtype), axis, d.axis(shape[axis])), {}


# --- by index ---------------------------------------------------------------------------------------------------------


@draws("embedding.default")
def _(d: Draw) -> Arguments:
    rows = d.int(1, 40)
    return (d.tensor((rows, d.one(DIMS)), d.dtype(FLOATS)), d.indices(d.shape(0, 3), rows)), {}


@draws("index_select.default")
def _(d: Draw) -> Arguments:
    shape = d.shape(smallest=1)
    axis = d.axis(len(shape))
    return (d.tensor(shape, d.dtype()), axis, d.indices((d.one(DIMS),), shape[axis] if shape else 1)), {}


@draws("gather.default")
def _(d: Draw) -> Arguments:
    shape = d.shape(smallest=1)
    axis = d.axis(len(shape))
    own = [d.int(0, size) for size in shape]
    if shape:
        own[axis] = d.one(DIMS)
    index = d.indices(own, shape[axis] if shape else 1).long()
    return (d.tensor(shape, d.dtype()), axis, index), {}


def _index_list(d: Draw, shape: tuple[int, ...], distinct: bool) -> list[Any]:
    """Indices for some axes, broadcast with one another; distinct: no place twice."""
    count = d.int(1, min(len(shape), 3))
    axes = sorted(d.data.draw(st.permutations(range(len(shape))))[:count])
    common = d.shape(0, 2)
    places = math.prod(shape[axis] for axis in axes)
    indices: list[Any] = [None] * (axes[-1] + 1)
    if distinct:
        number = min(math.prod(common) or 1, places)
        flat = d.distinct(number, places)
        for axis, index in zip(axes, torch.unravel_index(flat, [shape[axis] for axis in axes]), strict=True):
            indices[axis] = index - shape[axis] if d.flag() else index
    else:
        for axis in axes:
            indices[axis] = d.indices(d.like(common), shape[axis], negative=d.flag())
    return indices


@draws("index.Tensor")
def _(d: Draw) -> Arguments:
    shape = d.shape(1, smallest=1)
    return (d.tensor(shape, d.dtype()), _index_list(d, shape, False)), {}


@draws("index_put.default", "_unsafe_index_put.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(1, smallest=1), d.dtype()
    accumulate = d.seldom()
    indices = _index_list(d, shape, not accumulate)
    x = d.tensor(shape, dtype, special=not accumulate)
    own = d.like(tuple(torch.ops.aten.index.Tensor(x, indices).shape))
    return (x, indices, d.tensor(own, dtype, special=not accumulate), accumulate), {}


@draws("index_copy.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(1, smallest=1), d.dtype()
    axis = d.axis(len(shape))
    own = list(shape)
    own[axis] = d.int(0, shape[axis])
    return (d.tensor(shape, dtype), axis, d.distinct(own[axis], shape[axis]), d.tensor(own, dtype)), {}


@draws("scatter.src", "scatter.value")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(1, smallest=1), d.dtype()
    axis = d.axis(len(shape))
    own = [d.int(0, size) for size in shape]
    generator = torch.Generator().manual_seed(d.int(0, 2**16))
    order = torch.rand(shape, generator=generator).argsort(axis)
    index = order[tuple(slice(0, size) for size in own)]
    new: Any = d.scalar(dtype if dtype != "uint8" else "bool")
    if d.op.endswith("src"):
        new = d.tensor([size + d.int(0, 2) for size in own], dtype)
    return (d.tensor(shape, dtype), axis, index, new), {}
