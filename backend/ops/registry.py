"""The registry of operators: each declared once, by name, with what it accepts and how it lowers.

The partitioner calls `refusal` only, the planner `Op.lower` only. What `accepts` takes and `lower` cannot run is a bug.
Names are the edge dialect's (`aten.add.Tensor`); fused operators made by passes are called `zoo.…`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from backend.graph import DTYPES, MAX_RANK, Call, TensorSpec

FLOATS = ("float32", "float16")
INTS = ("int64", "int32", "int16", "int8", "uint8")
WIDE_INTS = ("int64", "int32")
BOOL = ("bool",)
ALL = FLOATS + INTS + BOOL

Accepts = Callable[[Call], str | None]
Lower = Callable[[Call, Any], Any]  # (call with values, Builder) -> Value or a tuple of them


@dataclass(frozen=True)
class Op:
    """`preserve`: torch.export must not decompose this aten operator, because it has a kernel of its own."""

    name: str
    accepts: Accepts
    lower: Lower
    preserve: bool = False


_OPS: dict[str, Op] = {}


def register(names: str | Iterable[str], *, accepts: Accepts, lower: Lower, preserve: bool = False) -> None:
    """Declares one operator under one or more names. Raises `ValueError` for a name declared twice."""
    for name in [names] if isinstance(names, str) else names:
        if name in _OPS:
            raise ValueError(f"operator {name} is declared twice")
        _OPS[name] = Op(name, accepts, lower, preserve)


@functools.cache
def _load_all() -> None:
    package = importlib.import_module("backend.ops")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"backend.ops.{module.name}")


def find(name: str) -> Op | None:
    _load_all()
    return _OPS.get(name)


def get(name: str) -> Op:
    """Raises `KeyError` for an operator that is not declared."""
    _load_all()
    return _OPS[name]


def names() -> list[str]:
    _load_all()
    return sorted(_OPS)


def preserved() -> list[str]:
    """Aten operators to keep whole at export."""
    _load_all()
    return sorted(op.name for op in _OPS.values() if op.preserve and op.name.startswith("aten."))


def refusal(call: Call) -> str | None:
    """Why this operator cannot run here, or None when it can."""
    op = find(call.op)
    if op is None:
        return "no kernel for this operator"
    for spec in [*call.tensors(), *(out for out in call.outputs if out is not None)]:
        if spec.dtype not in DTYPES:
            return f"no kernel for {spec.dtype}"
        if spec.rank > MAX_RANK:
            return f"rank {spec.rank} is above {MAX_RANK}"
    return op.accepts(call)


# --- pieces that declarations are made of -----------------------------------------------------------------------------


def every(*checks: Accepts) -> Accepts:
    """Accepts what all the checks accept; the first reason wins."""

    def accepts(call: Call) -> str | None:
        return next((reason for check in checks if (reason := check(call))), None)

    return accepts


def dtypes(allowed: Iterable[str], *args: str) -> Accepts:
    """The named tensor arguments (all of them when none is named) have one of these dtypes."""
    allowed = tuple(allowed)

    def accepts(call: Call) -> str | None:
        specs = [call.get(name) for name in args] if args else list(call.tensors())
        for spec in specs:
            if isinstance(spec, TensorSpec) and spec.dtype not in allowed:
                return f"no kernel for {spec.dtype}"
        return None

    return accepts


def anything(call: Call) -> str | None:
    return None


def is_static(*dims: Any) -> bool:
    return all(isinstance(dim, int) for dim in dims)


def normalize_axis(axis: int, rank: int) -> int:
    """A non-negative axis; rank 0 counts as 1, as in torch."""
    return axis % max(rank, 1)


def normalize_axes(axes: Any, rank: int) -> list[int]:
    """Sorted non-negative axes; None or empty means all of them."""
    if axes is None or axes == []:
        return list(range(rank))
    return sorted({normalize_axis(axis, rank) for axis in ([axes] if isinstance(axes, int) else axes)})
