"""`zoo bench --trace`: GPU time of each kernel of each method, by the adapter's own clock."""

from __future__ import annotations

import statistics
from typing import Any

from recipes.recipe import ExportRequest, Recipe, UserError
from zoo.bench import machine
from zoo.console import quiet_libraries, step
from zoo.export import ensure_exported


def trace(recipe: Recipe, request: ExportRequest, *, runs: int = 5) -> dict[str, Any]:
    """GPU time of each kernel of each method, the median of `runs`; returns the JSON of `zoo bench --trace --json`.

    Raises `UserError` on an adapter without timestamp queries, and for programs with operators outside the delegates.
    """
    import backend.runtime
    from backend.runtime.program import ProgramError

    if runs < 1:
        raise UserError("--runs must be at least 1")
    path = ensure_exported(recipe, request)
    results = []
    with step(f"{recipe.name}: example inputs"), quiet_libraries():
        methods = recipe.build(request).methods
    try:
        program = backend.runtime.load(path)
        for name, method in methods.items():
            inputs = [tensor.numpy() for tensor in method.example_inputs]
            with step(f"{name}: {runs} traced calls"):
                traced = [program.profile(name, *inputs) for _ in range(runs)]
            timed = [
                {"kernel": calls[0][0], "gpu_us": statistics.median(spent for _, spent in calls) / 1e3}
                for calls in zip(*traced, strict=True)
            ]
            results.append({"model": recipe.name, "method": name, "kernels": timed})
    except ProgramError as error:
        raise UserError(f"cannot trace {path}: {error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
    described = machine.describe()
    return {
        "adapter": (described["adapter"] or {}).get("device"),
        "model": recipe.name,
        "machine": described,
        "traces": results,
    }


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The traces as a table: kernels of one label together, longest first."""
    table: list[tuple[str, ...]] = []
    for method in report["traces"]:
        total = sum(row["gpu_us"] for row in method["kernels"])
        labels: dict[str, list[float]] = {}
        for row in method["kernels"]:
            labels.setdefault(row["kernel"], []).append(row["gpu_us"])
        for label, spent in sorted(labels.items(), key=lambda item: -sum(item[1])):
            share = f"{100 * sum(spent) / max(total, 1e-9):.0f}%"
            table.append((method["method"], label, str(len(spent)), f"{sum(spent):.1f}", share))
    return table


COLUMNS = ("method", "kernel", "dispatches", "gpu us", "share")
