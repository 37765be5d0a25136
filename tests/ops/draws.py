"""Arguments for every declared operator, drawn at random: what `test_registry.py` runs against float64 eager.

A strategy (in `draws_*.py`, by name) is a function of a `Draw` that returns an operator's positional and keyword
arguments; operators whose schema says it all share two. It draws what torch takes; whether the backend takes it too is
for the registry to say. `WITHOUT` (in `draw.py`) lists the operators that have no strategy, and why.
"""

from __future__ import annotations

from backend.ops import registry
from tests.ops import draws_movement, draws_pointwise, draws_quantized, draws_sums  # noqa: F401 - they fill STRATEGIES
from tests.ops.draw import STRATEGIES, WITHOUT, Draw, Strategy
from tests.ops.draws_pointwise import binary, unary
from tests.ops.harness import overload

__all__ = ["WITHOUT", "Draw", "strategy", "without_strategy"]


def _automatic(name: str) -> Strategy | None:
    """For operators whose schema says it all: one tensor, or two operands."""
    arguments = overload(name)._schema.arguments
    tensors = [argument for argument in arguments if "Tensor" in str(argument.type)]
    needed = [argument.name for argument in arguments if not argument.has_default_value()]
    if needed in (["self", "other"], ["self", "exponent"], ["self", "other", "rounding_mode"]):
        return binary
    if len(tensors) == 1 and needed == ["self"] and len(arguments) - len(needed) == 0:
        return unary
    return None


def strategy(name: str) -> Strategy | None:
    return STRATEGIES.get(name) or (_automatic(name) if name not in WITHOUT else None)


def without_strategy() -> list[str]:
    return [name for name in registry.names() if name not in WITHOUT and strategy(name) is None]
