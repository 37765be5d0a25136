"""`zoo bench`: time of one call of each method, on the recipe's example inputs.

Methods and backends take turns, one call each a round, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from recipes.recipe import ExportRequest, Recipe, UserError
from zoo.console import quiet_libraries, step
from zoo.doctor import adapter_name
from zoo.export import ensure_exported
from zoo.targets import check_target


def bench(
    recipe: Recipe, requests: Sequence[ExportRequest], *, runs: int = 20, warmup: int = 3, runtime: str = "executorch"
) -> dict[str, Any]:
    """Times every method of `recipe` under each of `requests`; returns the JSON of `zoo bench --json`.

    A call is timed from numpy arrays in to numpy arrays out, upload and readback included.
    Raises `UserError` for a backend that only exports or a count of runs below 1.
    """
    from zoo.program import Program

    if runs < 1:
        raise UserError("--runs must be at least 1")
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for request in requests:
        check_target(request.backend, to_run=True)
        program = Program.load(ensure_exported(recipe, request), runtime)
        with step(f"{recipe.name}: example inputs"), quiet_libraries():
            methods = recipe.build(request).methods
        for name, method in methods.items():
            inputs = [tensor.numpy() for tensor in method.example_inputs]
            calls[name, request.backend] = functools.partial(program.run, name, *inputs)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    with step(f"{recipe.name}: {warmup} + {runs} rounds"):
        for turn in range(warmup + runs):
            for key, call in calls.items():
                start = time.perf_counter()
                call()
                if turn >= warmup:
                    times[key].append(1e3 * (time.perf_counter() - start))
    results = [
        {
            "model": recipe.name,
            "method": method,
            "backend": backend,
            "median_ms": statistics.median(spent),
            "min_ms": min(spent),
            "runs": runs,
        }
        for (method, backend), spent in times.items()
    ]
    return {"adapter": adapter_name(), "results": results}


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
            rows = [
                {"kernel": calls[0][0], "gpu_us": statistics.median(spent for _, spent in calls) / 1e3}
                for calls in zip(*traced, strict=True)
            ]
            results.append({"model": recipe.name, "method": name, "kernels": rows})
    except ProgramError as error:
        raise UserError(f"cannot trace {path}: {error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
    return {"adapter": adapter_name(), "traces": results}


def trace_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
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
