"""What strategies for operators are made of: named draws of shapes, axes and tensors (see `draws.py`).

The first choice of every draw is the plainest, so that failures shrink to plain cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import executorch.exir.passes.dim_order_ops_registry  # noqa: F401 - declares dim_order_ops to torch
import torch
from hypothesis import strategies as st

from backend.ops.registry import ALL, INTS

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
    "zoo.round_tensor": "no aten operator; tests/ops/test_decomposed.py",
    "zoo.rope": "no aten operator; tests/passes/test_patterns.py",
    "zoo.rope_cache": "no aten operator; tests/ops/test_rope.py",
    "zoo.sdpa": "no aten operator; tests/ops/test_attention.py",
    "zoo.swiglu": "no aten operator; tests/ops/test_normed.py",
    "aten._embedding_bag.default": "a kernel for its first output only; tests/ops/test_index.py",
    "aten._embedding_bag_forward_only.default": "a kernel for its first output only; tests/ops/test_index.py",
    "dim_order_ops._empty_dim_order.default": "contents are not defined",
    "aten.empty.memory_format": "contents are not defined",
    "aten.empty_like.default": "contents are not defined",
    "aten.new_empty.default": "contents are not defined",
}


def draws(*names: str) -> Callable[[Strategy], Strategy]:
    """The strategy of `aten.<name>` for each of the names; raises for one that has a strategy."""

    def add(strategy: Strategy) -> Strategy:
        for name in names:
            full = name if name.startswith(("dim_order_ops.", "quantized_decomposed.")) else f"aten.{name}"
            assert full not in STRATEGIES, f"{full} has a strategy already"
            STRATEGIES[full] = strategy
        return strategy

    return add
