"""`zoo plan`: what the GPU runtime decided for each method, at the recipe's example shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.runtime.program import ProgramError
from recipes.recipe import ExportRequest, Recipe, UserError
from zoo import artifact
from zoo.console import quiet_libraries, step
from zoo.export import ensure_exported


@dataclass(frozen=True)
class MethodPlan:
    """`buffer_bytes`: inputs and intermediate values, in memory that the methods share; `bound_bytes`: the most of them
    that are live at one time; `kernels`: the variant chosen for each dispatch, in order.
    """

    partitions: int
    dispatches: int
    buffer_bytes: int
    bound_bytes: int
    weight_bytes: int
    kernels: tuple[str, ...]

    @property
    def times_bound(self) -> float:
        """Buffer memory as a multiple of what no plan can do without; 1 where nothing is stored."""
        return self.buffer_bytes / self.bound_bytes if self.bound_bytes else 1.0


def plan(recipe: Recipe, request: ExportRequest, *, pte: Path | None = None) -> dict[str, MethodPlan]:
    """Exports if needed and plans every method on this adapter. Raises `DeviceError` without one."""
    path = ensure_exported(recipe, request, pte)
    exported = artifact.metadata(path)[artifact.ENTRY]["methods"]
    with step(f"{recipe.name}: planning"), quiet_libraries():
        import backend.runtime

        try:
            program = backend.runtime.load(path)
        except ProgramError as error:  # operators outside the delegates, for one: the planner does not see those
            raise UserError(f"cannot plan {path}: {error}") from error
        plans = {}
        for name, method in recipe.build(request).methods.items():
            told = program.plan(name, *(tensor.numpy() for tensor in method.example_inputs))
            plans[name] = MethodPlan(
                partitions=exported[name]["partitions"],
                dispatches=told["dispatches"],
                buffer_bytes=told["buffer_bytes"],
                bound_bytes=told["bound_bytes"],
                weight_bytes=told["weight_bytes"],
                kernels=tuple(told["kernels"]),
            )
    return plans


def as_json(plans: Mapping[str, MethodPlan]) -> dict[str, Any]:
    """The document of `zoo plan --json`."""
    return {
        "methods": {
            name: {
                "dispatches": method.dispatches,
                "buffer_bytes": method.buffer_bytes,
                "bound_bytes": method.bound_bytes,
                "times_bound": round(method.times_bound, 4),
                "weight_bytes": method.weight_bytes,
                "kernels": list(method.kernels),
            }
            for name, method in plans.items()
        }
    }
