"""Arguments for every declared operator, drawn at random: what `test_registry.py` runs against float64 eager.

`STRATEGIES` maps an operator to a function of a `Draw` that returns its positional and keyword arguments.
`WITHOUT` lists the operators that have none, and why. A strategy draws what torch takes; whether the backend takes
it too is for the registry to say. The first choice of every draw is the plainest, so that failures shrink to plain
cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import executorch.exir.passes.dim_order_ops_registry  # noqa: F401 - declares dim_order_ops to torch
import torch
from hypothesis import strategies as st

from backend.ops import registry
from backend.ops.registry import ALL, FLOATS, INTS
from tests.ops.harness import overload

T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Strategy = Callable[["Draw"], Arguments]
DIMS = (3, 2, 1, 5, 4, 7, 0, 11, 13, 64, 37)
MOST_ELEMENTS = 6000
SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0, 0.5, -0.5, 2.5, 65504.0, 1e-4)
EDGES = {"int32": 2**31 - 1, "int16": 2**15 - 1, "int8": 127, "uint8": 255}


class Draw:
    """Named draws on top of hypothesis."""

    def __init__(self, data: st.DataObject, op: str):
        self.data, self.op = data, op

    def one(self, items: Sequence[T]) -> T:
        return self.data.draw(st.sampled_from(list(items)))

    def int(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def flag(self) -> bool:
        return self.data.draw(st.booleans())

    def seldom(self) -> bool:
        return self.one((False, False, False, True))

    def shape(self, low: int = 0, high: int = 5, smallest: int = 0) -> tuple[int, ...]:
        dims: list[int] = []
        for _ in range(self.one([rank for rank in (2, 1, 3, 0, 4, 5) if low <= rank <= high])):
            room = MOST_ELEMENTS // max(math.prod(dims), 1)
            dims.append(self.one([dim for dim in DIMS if smallest <= dim <= room]))
        return tuple(dims)

    def like(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts with `shape`: ones in some places, sometimes fewer or more axes."""
        dims = [1 if self.seldom() else size for size in shape]
        if dims and self.seldom():
            dims = dims[self.int(1, len(dims)) :]
        return tuple(dims)

    def dtype(self, allowed: Sequence[str] = ALL) -> str:
        return self.one(allowed)

    def tensor(
        self,
        shape: Sequence[int],
        dtype: str = "float32",
        low: int | None = None,
        high: int | None = None,
        scale: float | None = None,
        special: bool = True,
    ) -> torch.Tensor:
        """Whole numbers lie in low…high (small ones by default), fractions are normal unless `low` is given."""
        generator = torch.Generator().manual_seed(self.int(0, 2**16))
        kind = getattr(torch, dtype)
        shape = tuple(shape)
        if dtype == "bool":
            return torch.randint(0, 2, shape, generator=generator).bool()
        if dtype in INTS:
            floor = (0 if dtype == "uint8" else -20) if low is None else low
            tensor = torch.randint(floor, (20 if high is None else high) + 1, shape, generator=generator).to(kind)
            if low is None and dtype in EDGES and tensor.numel() and self.seldom():
                tensor.view(-1)[0] = EDGES[dtype]
                tensor.view(-1)[-1] = -EDGES[dtype] - 1 if dtype != "uint8" else 0
            return tensor
        if low is not None:
            assert high is not None
            return (torch.rand(shape, generator=generator) * (high - low) + low).to(kind)
        tensor = torch.randn(shape, generator=generator) * (self.one((1.0, 10.0, 0.01)) if scale is None else scale)
        if special and self.seldom():
            picked = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), shape, generator=generator)]
            tensor = torch.where(torch.rand(shape, generator=generator) < 0.3, picked, tensor)
        return tensor.to(kind)

    def scalar(self, dtype: str = "float32") -> Any:
        whole = (2, 1, 0, -1, 3, 7, 100, -5)
        if dtype == "bool":
            return self.one((True, False))
        return self.one(whole) if dtype in INTS else self.one((0.5, *whole, -1.5, 1e-3, 1e4, math.inf, -math.inf))

    def axis(self, rank: int) -> int:
        rank = max(rank, 1)
        return self.int(-rank, rank - 1)

    def axes(self, rank: int) -> list[int]:
        """Different axes, any order, some negative; sometimes none, which often means all."""
        count = self.int(0, rank)
        chosen = self.data.draw(st.permutations(range(rank)))[:count]
        return [axis - rank if self.flag() else axis for axis in chosen]

    def indices(self, shape: Sequence[int], size: int, negative: bool = False) -> torch.Tensor:
        return self.tensor(shape, self.dtype(("int64", "int32")), -size if negative else 0, max(size - 1, 0))

    def distinct(self, count: int, size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.int(0, 2**16))
        return torch.randperm(size, generator=generator)[:count]


STRATEGIES: dict[str, Strategy] = {}
WITHOUT = {
    "zoo.quantized_embedding": "no aten operator; tests/ops/test_quantized.py",
    "zoo.quantized_linear": "no aten operator; tests/ops/test_quantized.py",
    "zoo.round_rows": "no aten operator; tests/ops/test_quantized.py",
    "zoo.rope": "no aten operator; tests/ops/test_attention.py",
    "zoo.sdpa": "no aten operator; tests/ops/test_attention.py",
    "aten.empty.memory_format": "contents are not defined",
    "aten.empty_like.default": "contents are not defined",
    "aten.new_empty.default": "contents are not defined",
}


def draws(*names: str) -> Callable[[Strategy], Strategy]:
    """The strategy of `aten.<name>` for each of the names; raises for one that has a strategy."""

    def add(strategy: Strategy) -> Strategy:
        for name in names:
            full = f"aten.{name}" if not name.startswith("dim_order_ops.") else name
            assert full not in STRATEGIES, f"{full} has a strategy already"
            STRATEGIES[full] = strategy
        return strategy

    return add


# --- one tensor, two operands -----------------------------------------------------------------------------------------


def _unary(d: Draw) -> Arguments:
    rank = 2 if ".t." in d.op or ".t_copy." in d.op else 5
    return (d.tensor(d.shape(0, rank), d.dtype()),), {}


def _binary(d: Draw) -> Arguments:
    """Tensors of any two dtypes that broadcast either way; or one and a number, on either side."""
    shape, dtype = d.shape(), d.dtype()
    tensors = [d.tensor(shape, dtype), d.tensor(d.like(shape), d.dtype() if d.seldom() else dtype)]
    if d.seldom():
        tensors.reverse()
    if "shift" in d.op:
        tensors = [tensors[0], tensors[1].abs() % 40 if tensors[1].dtype != torch.bool else tensors[1]]
    arguments: list[Any] = []
    for position, argument in enumerate(overload(d.op)._schema.arguments[:2]):
        is_tensor = str(argument.type) == "Tensor"
        number = d.int(0, 40) if "shift" in d.op else d.scalar(dtype if dtype in INTS or d.flag() else "int64")
        arguments.append(tensors[position] if is_tensor else number)
    keywords: dict[str, Any] = {}
    names = [argument.name for argument in overload(d.op)._schema.arguments]
    if "alpha" in names and d.seldom():
        keywords["alpha"] = d.scalar("int64")
    if "rounding_mode" in names:
        keywords["rounding_mode"] = d.one((None, "floor", "trunc"))
    return tuple(arguments), keywords


def _automatic(name: str) -> Strategy | None:
    """For operators whose schema says it all: one tensor, or two operands."""
    arguments = overload(name)._schema.arguments
    tensors = [argument for argument in arguments if "Tensor" in str(argument.type)]
    needed = [argument.name for argument in arguments if not argument.has_default_value()]
    if needed in (["self", "other"], ["self", "exponent"], ["self", "other", "rounding_mode"]):
        return _binary
    if len(tensors) == 1 and needed == ["self"] and len(arguments) - len(needed) == 0:
        return _unary
    return None


@draws("clamp.default", "clamp_min.default", "clamp_max.default")
def _(d: Draw) -> Arguments:
    dtype = d.dtype(FLOATS + INTS)
    bounds = [d.scalar(dtype if d.flag() else "int64") for _ in range(1 if "_m" in d.op else 2)]
    if len(bounds) == 2 and d.seldom():
        bounds[d.int(0, 1)] = None
    return (d.tensor(d.shape(), dtype), *bounds), {}


@draws("clamp.Tensor")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype(FLOATS + INTS)
    low, high = (None if d.seldom() else d.tensor(d.like(shape), dtype) for _ in range(2))
    return (d.tensor(shape, dtype), low, high), {}


@draws("leaky_relu.default", "celu.default", "hardshrink.default", "softshrink.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype(FLOATS)), *([d.one((0.5, 0.01, 1.5, 2))] if d.flag() else [])), {}


@draws("elu.default", "softplus.default", "hardtanh.default", "threshold.default")
def _(d: Draw) -> Arguments:
    if "threshold" not in d.op and d.flag():
        return (d.tensor(d.shape(), d.dtype(FLOATS)),), {}
    low = d.one((1.0, 0.5, 2.0, 1))
    return (d.tensor(d.shape(), d.dtype(FLOATS)), low, low + d.one((1.0, 0.25, 3.0))), {}


@draws("gelu.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype(FLOATS)),), {"approximate": d.one(("none", "tanh"))}


@draws("logit.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype(FLOATS), 0, 1), d.one((None, 1e-3, 0.1))), {}


@draws("nan_to_num.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype()), *(d.one((None, 0.0, -2.5, 1e4)) for _ in range(3))), {}


@draws("prelu.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype(FLOATS)
    channels = 1 if len(shape) < 2 or d.flag() else shape[1]
    return (d.tensor(shape, dtype), d.tensor((channels,), dtype)), {}


@draws("_prelu_kernel.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(2), d.dtype(FLOATS)
    return (d.tensor(shape, dtype), d.tensor((1, shape[1], *(1,) * (len(shape) - 2)), dtype)), {}


@draws("glu.default")
def _(d: Draw) -> Arguments:
    shape = list(d.shape(1, 4))
    axis = d.axis(len(shape))
    shape[axis] *= 2
    return (d.tensor(shape, d.dtype(FLOATS)), axis), {}


@draws("lerp.Scalar", "lerp.Tensor")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype(FLOATS)
    weight = d.one((0.25, 0.5, 0.75, 2.0)) if "Scalar" in d.op else d.tensor(d.like(shape), dtype)
    return (d.tensor(shape, dtype), d.tensor(d.like(shape), dtype), weight), {}


@draws("addcmul.default", "addcdiv.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype(FLOATS + INTS if "mul" in d.op else FLOATS)
    parts = (d.tensor(shape, dtype), d.tensor(d.like(shape), dtype), d.tensor(d.like(shape), dtype))
    return parts, {"value": d.one((1, 2, -3))}


@draws("where.self", "where.Scalar", "where.ScalarOther", "where.ScalarSelf")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype()
    sides: list[Any] = [d.tensor(d.like(shape), dtype), d.tensor(d.like(shape), d.dtype() if d.seldom() else dtype)]
    for position, name in enumerate(("self", "other")):
        if str(overload(d.op)._schema.arguments[1 + position].type) != "Tensor":
            sides[position] = d.scalar(d.one((dtype, "int64")))
        del name
    return (d.tensor(shape, "bool"), *sides), {}


@draws("masked_fill.Scalar", "masked_fill.Tensor")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(), d.dtype()
    number = d.scalar(dtype)
    value = number if "Scalar" in d.op else torch.tensor(number, dtype=getattr(torch, dtype))
    return (d.tensor(shape, dtype), d.tensor(d.like(shape), "bool"), value), {}


# --- casts and copies -------------------------------------------------------------------------------------------------


@draws("_to_copy.default", "dim_order_ops._to_dim_order_copy.default", "to.dtype")
def _(d: Draw) -> Arguments:
    source, target = d.dtype(), d.dtype()
    # Fractions beyond the target's range, and NaN, as whole numbers are undefined.
    low = 0 if target == "uint8" else -100
    whole = target in INTS and source in FLOATS
    x = d.tensor(d.shape(), source, low, 100) if whole else d.tensor(d.shape(), source)
    kind = getattr(torch, target)
    return ((x, kind), {}) if d.op == "aten.to.dtype" else ((x,), {"dtype": kind})


@draws("clone.default", "contiguous.default", "dim_order_ops._clone_dim_order.default")
def _(d: Draw) -> Arguments:
    return _unary(d)


@draws("dropout.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype(FLOATS)), 0.5, d.seldom()), {}


@draws("copy.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    return (d.tensor(shape, d.dtype(FLOATS)), d.tensor(d.like(shape), d.dtype())), {}


# --- tensors from nothing ---------------------------------------------------------------------------------------------


@draws("arange.default", "arange.start", "arange.start_step")
def _(d: Draw) -> Arguments:
    dtype = d.dtype(("float32", "int64", "int32", "float16", "int16", "uint8", "int8"))
    low, high = 0, d.int(0, 100)
    if "start" in d.op:
        low = d.int(0 if dtype == "uint8" else -20, high)
    number = (lambda x: x) if dtype in INTS or d.flag() else float
    bounds = [high] if "start" not in d.op else [low, high]
    if "step" in d.op:
        bounds.append(d.int(1, 5))
        if d.seldom():
            bounds = [high, low, -bounds[2]]
    return tuple(number(bound) for bound in bounds), {"dtype": getattr(torch, dtype)}


@draws("linspace.default")
def _(d: Draw) -> Arguments:
    bounds = d.one((-1.0, 0, 3.5)), d.one((1.0, 10, -7.25))
    return (*bounds, d.int(0, 50)), {"dtype": getattr(torch, d.dtype(FLOATS))}


@draws("eye.default", "eye.m")
def _(d: Draw) -> Arguments:
    sizes = [d.one(DIMS) for _ in range(2 if d.op.endswith(".m") else 1)]
    return tuple(sizes), {"dtype": getattr(torch, d.dtype())}


@draws("full.default", "full_like.default", "new_full.default", "scalar_tensor.default", "fill.Scalar", "fill.Tensor")
def _(d: Draw) -> Arguments:
    dtype, shape = d.dtype(), d.shape()
    number = d.scalar(dtype if dtype != "uint8" else "bool")
    kind = {"dtype": getattr(torch, dtype)}
    x = d.tensor(d.shape(), dtype)
    if "scalar_tensor" in d.op:
        return (number,), kind
    if "fill." in d.op:
        return (x, number if "Scalar" in d.op else torch.tensor(number, **kind)), {}
    first = {"aten.full.default": (list(shape),), "aten.full_like.default": (x,)}.get(d.op, (x, list(shape)))
    return (*first, number), kind


@draws("zeros.default", "ones.default")
def _(d: Draw) -> Arguments:
    return (list(d.shape()),), {"dtype": getattr(torch, d.dtype())}


@draws("zeros_like.default", "ones_like.default")
def _(d: Draw) -> Arguments:
    return _unary(d)


@draws("new_zeros.default", "new_ones.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype()), list(d.shape())), {}


@draws("tril.default", "triu.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(2), d.dtype()), d.int(-8, 8)), {}


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


# --- reductions -------------------------------------------------------------------------------------------------------


@draws("all.dim", "any.dim", "max.dim", "min.dim", "argmax.default", "argmin.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    axis = None if "arg" in d.op and d.seldom() else d.axis(len(shape))
    return (d.tensor(shape, d.dtype()), axis, d.flag()), {}


@draws("all.dims", "any.dims", "amax.default", "amin.default", "logsumexp.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    axes = d.axes(len(shape))
    return (d.tensor(shape, d.dtype(FLOATS if "log" in d.op else ALL)), axes, d.flag()), {}


@draws("sum.default", "mean.default", "prod.default")
def _(d: Draw) -> Arguments:
    small = {"low": -2, "high": 2} if "prod" in d.op else {}
    return (d.tensor(d.shape(), d.dtype(), **small),), _result_dtype(d)


@draws("sum.dim_IntList", "mean.dim", "prod.dim_int")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    axes = d.axis(len(shape)) if "prod" in d.op else None if d.seldom() else d.axes(len(shape))
    small = {"low": -2, "high": 2} if "prod" in d.op else {}
    return (d.tensor(shape, d.dtype(), **small), axes, d.flag()), _result_dtype(d)


def _result_dtype(d: Draw) -> dict[str, Any]:
    return {"dtype": getattr(torch, d.dtype(("float32", "float16", "int64", "int32")))} if d.seldom() else {}


@draws("cumsum.default", "cumprod.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    small = {"low": -2, "high": 2} if "prod" in d.op else {}
    return (d.tensor(shape, d.dtype(), **small), d.axis(len(shape))), _result_dtype(d)


@draws("var.default", "std.default")
def _(d: Draw) -> Arguments:
    return (d.tensor(d.shape(), d.dtype(FLOATS)), d.flag()), {}


@draws("var.dim", "std.dim")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    return (d.tensor(shape, d.dtype(FLOATS)), d.axes(len(shape)), d.flag(), d.flag()), {}


@draws("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    keywords = {"correction": d.one((None, 0, 1, 2, 0.5)), "keepdim": d.flag()}
    return (d.tensor(shape, d.dtype(FLOATS)), d.axes(len(shape))), keywords


@draws("linalg_vector_norm.default", "norm.ScalarOpt_dim")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    order = d.one((2, 1, 0, math.inf, -math.inf, 2.0, 3))
    return (d.tensor(shape, d.dtype(FLOATS)), order, d.axes(len(shape)), d.flag()), {}


@draws("softmax.int", "log_softmax.int", "_softmax.default", "_log_softmax.default")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    whole = d.op.endswith(".int") and d.seldom()
    last = (torch.float32 if whole else d.one((None, torch.float32))) if d.op.endswith(".int") else False
    return (d.tensor(shape, "int64" if whole else d.dtype(FLOATS)), d.axis(len(shape)), last), {}


@draws("sort.default", "sort.stable")
def _(d: Draw) -> Arguments:
    shape = d.shape()
    keywords = {"dim": d.axis(len(shape)), "descending": d.flag()}
    return (d.tensor(shape, d.dtype()),), keywords | ({"stable": True} if "stable" in d.op else {})


@draws("topk.default")
def _(d: Draw) -> Arguments:
    """Of distinct elements: which of equal ones eager takes is its own choice."""
    shape = d.shape()
    axis = d.axis(len(shape))
    x = d.distinct(math.prod(shape), math.prod(shape)).reshape(shape).to(getattr(torch, d.dtype(FLOATS + INTS[:3])))
    return (x, d.int(0, shape[axis] if shape else 1), axis, d.flag(), True), {}


# --- normalisation ----------------------------------------------------------------------------------------------------


def _maybe(d: Draw, shape: Sequence[int], dtype: str) -> torch.Tensor | None:
    return None if d.seldom() else d.tensor(shape, dtype, special=False)


@draws("layer_norm.default", "native_layer_norm.default", "rms_norm.default", "_fused_rms_norm.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(1), d.dtype(FLOATS)
    own = list(shape[d.int(0, len(shape) - 1) :])
    eps = d.one((1e-5, 1e-3))
    x, weight = d.tensor(shape, dtype, special=False), _maybe(d, own, dtype)
    if "rms" in d.op:
        return (x, own, weight, None if d.seldom() and dtype == "float32" else eps), {}
    return (x, own, weight, _maybe(d, own, dtype), eps), {}


@draws("group_norm.default", "native_group_norm.default")
def _(d: Draw) -> Arguments:
    batch, groups, each = d.one((2, 1, 3)), d.int(1, 4), d.int(1, 5)
    shape, dtype = (batch, groups * each, *d.shape(0, 3, smallest=1)), d.dtype(FLOATS)
    x = d.tensor(shape, dtype, special=False)
    weight, bias = _maybe(d, shape[1:2], dtype), _maybe(d, shape[1:2], dtype)
    if "native" in d.op:
        return (x, weight, bias, batch, shape[1], math.prod(shape[2:]), groups, 1e-5), {}
    return (x, groups, weight, bias, 1e-5), {}


@draws("batch_norm.default", "_native_batch_norm_legit_no_training.default")
def _(d: Draw) -> Arguments:
    shape, dtype = d.shape(2), d.dtype(FLOATS)
    own = shape[1:2]
    x = d.tensor(shape, dtype, special=False)
    parts = (
        _maybe(d, own, dtype),
        _maybe(d, own, dtype),
        d.tensor(own, dtype, special=False),
        d.tensor(own, dtype, 1, 3),
    )
    return (x, *parts, *(() if "native" in d.op else (False,)), 0.1, 1e-5, *(() if "native" in d.op else (True,))), {}


# --- pictures ---------------------------------------------------------------------------------------------------------


def _picture(d: Draw, dims: int, smallest: int = 1, largest: int = 12) -> tuple[int, ...]:
    lead = (d.int(1, 4),) if d.seldom() else (d.int(1, 2), d.int(1, 4))
    return (*lead, *(d.int(smallest, largest) for _ in range(dims)))


def _dims(op: str) -> int:
    return next((dims for dims in (1, 2, 3) if f"{dims}d" in op), 2)


@draws(*(f"{kind}.default" for n in (2, 3) for kind in (f"avg_pool{n}d", f"max_pool{n}d_with_indices")))
def _(d: Draw) -> Arguments:
    dims = _dims(d.op)
    kernel = [d.int(1, 4) for _ in range(dims)]
    padding = [d.int(0, size // 2) for size in kernel]
    stride = [] if d.seldom() else [d.int(1, 3) for _ in range(dims)]
    x = d.tensor(_picture(d, dims, 7), d.dtype(FLOATS), special="max" in d.op)
    if "max" in d.op:
        return (x, kernel, stride, padding, d.one((1, [1, 2, 2][:dims], 2)), d.flag()), {}
    return (x, kernel, stride, padding, d.flag(), d.flag(), d.one((None, 3))), {}


@draws(*(f"{kind}_pool{n}d.default" for n in (2, 3) for kind in ("_adaptive_avg", "adaptive_avg", "adaptive_max")))
def _(d: Draw) -> Arguments:
    dims = _dims(d.op)
    x = d.tensor(_picture(d, dims), d.dtype(FLOATS), special="max" in d.op)
    return (x, [d.int(1, 9) for _ in range(dims)]), {}


@draws(*(f"upsample_{kind}.{form}" for kind in ("nearest1d", "nearest2d", "bilinear2d") for form in ("vec", "default")))
def _(d: Draw) -> Arguments:
    dims = _dims(d.op)
    x = d.tensor((d.int(1, 2), d.int(1, 3), *(d.int(1, 9) for _ in range(dims))), d.dtype(FLOATS), special=False)
    size: Any = [d.int(1, 20) for _ in range(dims)]
    corners = [d.flag()] if "linear" in d.op else []
    if d.op.endswith("default"):
        return (x, size, *corners, *(None for _ in range(dims))), {}
    factors = [d.one((2.0, 1.5, 0.5, 3.0)) for _ in range(dims)]
    by_size = d.flag() or any(int(s * f) < 1 for s, f in zip(x.shape[2:], factors, strict=True))
    return (x, size if by_size else None, *corners, None if by_size else factors), {}


@draws(*(f"{kind}_pad{dims}d.default" for kind in ("reflection", "replication") for dims in (1, 2)))
def _(d: Draw) -> Arguments:
    x = d.tensor(_picture(d, _dims(d.op), 3), d.dtype(FLOATS))
    return (x, [d.int(-1, 2) for _ in range(2 * _dims(d.op))]), {}


@draws("pixel_shuffle.default", "pixel_unshuffle.default")
def _(d: Draw) -> Arguments:
    r = d.int(1, 3)
    *lead, channels, height, width = (*d.shape(0, 2, smallest=1), d.int(1, 3), d.int(1, 5), d.int(1, 5))
    shape = (channels * r * r, height, width) if "unshuffle" not in d.op else (channels, height * r, width * r)
    return (d.tensor((*lead, *shape), d.dtype()), r), {}


# --- products ---------------------------------------------------------------------------------------------------------


def _sizes(d: Draw, count: int) -> list[int]:
    return [d.one((3, 1, 5, 8, 17, 2, 0, 64, 70)) for _ in range(count)]


def _factor(d: Draw, shape: Sequence[int], dtype: str) -> torch.Tensor:
    return (
        d.tensor(shape, dtype, -4, 4)
        if dtype in INTS and dtype != "uint8"
        else d.tensor(shape, dtype, *((0, 4) if dtype == "uint8" else ()), special=False, scale=1.0)
    )


@draws("mm.default", "bmm.default", "addmm.default", "baddbmm.default")
def _(d: Draw) -> Arguments:
    m, k, n = _sizes(d, 3)
    lead = (d.int(1, 3),) if "bmm" in d.op else ()
    dtype = d.dtype(("float32", "float16", "int64", "int32"))
    pair = _factor(d, (*lead, m, k), dtype), _factor(d, (*lead, k, n), dtype)
    if "add" not in d.op:
        return pair, {}
    return (_factor(d, d.like((*lead, m, n)), dtype), *pair), {"beta": d.one((1, 0, 2)), "alpha": d.one((1, 3))}


@draws("addmv.default", "mv.default", "dot.default")
def _(d: Draw) -> Arguments:
    m, k = _sizes(d, 2)
    dtype = d.dtype(("float32", "int64", "int32", "float16"))
    vector = _factor(d, (k,), dtype)
    if "dot" in d.op:
        return (_factor(d, (k,), dtype), vector), {}
    added = (_factor(d, (m,), dtype),) if "add" in d.op else ()
    return (*added, _factor(d, (m, k), dtype), vector), {}


@draws("matmul.default")
def _(d: Draw) -> Arguments:
    m, k, n = _sizes(d, 3)
    lead, dtype = d.shape(0, 2), d.dtype(FLOATS)
    left = (k,) if d.seldom() else (*d.like(lead), m, k)
    right = (k,) if d.seldom() else (*d.like(lead), k, n)
    return (_factor(d, left, dtype), _factor(d, right, dtype)), {}


@draws("linear.default")
def _(d: Draw) -> Arguments:
    m, k, n = _sizes(d, 3)
    dtype = d.dtype(FLOATS)
    x = _factor(d, (*d.shape(0, 2), m, k) if d.flag() else (k,), dtype)
    return (x, _factor(d, (n, k), dtype), None if d.seldom() else _factor(d, (n,), dtype)), {}


@draws("scaled_dot_product_attention.default")
def _(d: Draw) -> Arguments:
    batch, heads, dtype = d.int(1, 2), d.int(1, 4), d.dtype(FLOATS)
    queries, keys, size = d.one((5, 1, 7, 17)), d.one((5, 1, 9, 33)), d.one((8, 4, 16, 5))
    causal = d.seldom()
    mask = None
    if not causal and d.flag():
        shape = d.like((batch, heads, queries, keys))
        shape = (1,) * (4 - len(shape)) + shape
        mask = d.tensor(shape, d.one((dtype, "bool")), special=False)
        if mask.dtype == torch.bool:
            mask[..., 0] = True
    parts = (_factor(d, (batch, heads, n, size), dtype) for n in (queries, keys, keys))
    return (*parts, mask, 0.0, causal), {"scale": d.one((None, 0.5))}


# --- convolutions -----------------------------------------------------------------------------------------------------


@draws(
    *(f"conv{dims}d.{form}" for dims in (1, 2) for form in ("default", "padding")),
    *("conv_transpose1d.default", "conv_transpose2d.input", "convolution.default"),
)
def _(d: Draw) -> Arguments:
    dims = _dims(d.op) if "convolution" not in d.op else d.int(1, 2)
    transposed = "transpose" in d.op or ("convolution" in d.op and d.flag())
    groups, each_in, each_out, dtype = d.one((1, 2, 3)), d.int(1, 4), d.int(1, 4), d.dtype(FLOATS)
    kernel, size = [d.int(1, 4) for _ in range(dims)], [d.int(7, 14) for _ in range(dims)]
    stride, dilation, padding = ([d.int(low, 3) for _ in range(dims)] for low in (1, 1, 0))
    extra = [d.int(0, max(stride[at], dilation[at]) - 1) for at in range(dims)] if transposed else [0] * dims
    batch = (d.int(1, 3),) if "convolution" in d.op or not d.seldom() else ()
    x = _factor(d, (*batch, groups * each_in, *size), dtype)
    sides = (groups * each_in, each_out) if transposed else (groups * each_out, each_in)
    weight, bias = _factor(d, (*sides, *kernel), dtype), None if d.seldom() else _factor(d, (groups * each_out,), dtype)
    if "convolution" in d.op:
        return (x, weight, bias, stride, padding, dilation, transposed, extra, groups), {}
    if transposed:
        return (x, weight, bias, stride, padding, extra, groups, dilation), {}
    if d.op.endswith("padding"):
        word = d.one(("valid", "same"))
        return (x, weight, bias, [1] * dims if word == "same" else stride, word, dilation, groups), {}
    return (x, weight, bias, stride, padding, dilation, groups), {}


def strategy(name: str) -> Strategy | None:
    return STRATEGIES.get(name) or (_automatic(name) if name not in WITHOUT else None)


def without_strategy() -> list[str]:
    return [name for name in registry.names() if name not in WITHOUT and strategy(name) is None]
