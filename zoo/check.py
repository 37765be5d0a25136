"""`zoo check`: every output of a recipe against float64 eager, under the recipe's tolerances."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.recipe import Comparison, ExportRequest, Recipe, UserError
from zoo.console import quiet_libraries, step
from zoo.export import ensure_exported
from zoo.targets import check_target


@dataclass(frozen=True)
class Outcome:
    """How far one output is from golden. `max_rel` is relative to the output's scale, max |golden|.

    Both are NaN when the outputs cannot be compared: `problem` says why.
    """

    max_abs: float
    max_rel: float
    tolerance: float
    passed: bool
    problem: str = ""


@dataclass(frozen=True)
class CheckReport:
    model: str
    backend: str
    outputs: dict[str, Outcome]

    @property
    def passed(self) -> bool:
        return bool(self.outputs) and all(outcome.passed for outcome in self.outputs.values())

    def json(self) -> dict[str, Any]:
        outputs = {
            name: {
                "max_abs": _number(outcome.max_abs),
                "max_rel": _number(outcome.max_rel),
                "tolerance": outcome.tolerance,
                "passed": outcome.passed,
                **({"problem": outcome.problem} if outcome.problem else {}),
            }
            for name, outcome in self.outputs.items()
        }
        return {"model": self.model, "backend": self.backend, "passed": self.passed, "outputs": outputs}


def check(
    recipe: Recipe, request: ExportRequest, *, pte: Path | None = None, runtime: str = "executorch"
) -> CheckReport:
    """Exports if needed, loads the program and compares what the recipe's check returns.

    `tolerance` in the report is absolute: the recipe's bound at the scale of that output. Raises `UserError` for a
    backend that only exports, or a recipe that compares nothing (an empty check must not pass).
    """
    from zoo.program import Program

    check_target(request.backend, to_run=True)
    path = ensure_exported(recipe, request, pte)
    with step(f"{recipe.name}: comparing with float64 eager"), quiet_libraries():
        program = Program.load(path, runtime)
        comparisons = recipe.check(program, request)
    if not comparisons:
        raise UserError(f"{recipe.name} compares nothing on {request.backend}: its check returned no outputs")
    names = [comparison.name for comparison in comparisons]
    if len(set(names)) < len(names):
        raise ValueError(f"recipe {recipe.name} names an output twice: {names}")
    return CheckReport(recipe.name, request.backend, {row.name: compare(row) for row in comparisons})


def compare(row: Comparison) -> Outcome:
    """The difference of one output. Shapes must be equal; NaN and infinities must stand in the same places."""
    actual = np.asarray(row.actual)
    golden = np.asarray(row.golden)
    nan = float("nan")
    if actual.shape != golden.shape:
        problem = f"shape {actual.shape}, golden {golden.shape}"
        return Outcome(nan, nan, row.tolerance.bound(0.0), False, problem)
    actual, golden = actual.astype(np.float64), golden.astype(np.float64)
    finite = np.isfinite(golden)
    scale = float(np.abs(golden[finite]).max(initial=0.0))
    bound = row.tolerance.bound(scale)
    # Where golden is not finite, only the same value is right: no distance to it means anything.
    if not np.array_equal(actual[~finite], golden[~finite], equal_nan=True):
        return Outcome(nan, nan, bound, False, "NaN or infinity in other places than golden")
    max_abs = float(np.abs(actual[finite] - golden[finite]).max(initial=0.0))
    if not math.isfinite(max_abs):
        return Outcome(nan, nan, bound, False, "NaN or infinity where golden is finite")
    max_rel = max_abs / scale if scale else max_abs
    return Outcome(max_abs, max_rel, bound, max_abs <= bound)


def _number(value: float) -> float | None:
    # Strict JSON has no NaN.
    return value if math.isfinite(value) else None
