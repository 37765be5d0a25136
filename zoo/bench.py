"""`zoo bench`: the work of a recipe on several backends and beside other implementations of the model, in one run.

Sides take turns, one call each a round, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.recipe import ExportRequest, Recipe, UserError, Workload
from zoo import artifact
from zoo.console import quiet_libraries, say, step
from zoo.doctor import adapter_name
from zoo.export import ensure_exported
from zoo.peak import peak_bytes
from zoo.targets import check_target

if TYPE_CHECKING:
    from zoo.program import Program


LONG_SECONDS = 60  # a workload that takes longer gets fewer rounds: as many as fit, and FEW_ROUNDS at least
FEW_ROUNDS = 3


def bench(
    recipe: Recipe,
    requests: Sequence[ExportRequest],
    *,
    runs: int = 20,
    warmup: int = 3,
    runtime: str = "executorch",
    against: Sequence[str] | None = None,
    memory: bool = True,
) -> dict[str, Any]:
    """Times the recipe's workloads under each of `requests`; returns the JSON of `zoo bench --json`.

    A call is timed from numpy arrays in to numpy arrays out, upload and readback included. `against` names the other
    sides to time, all that the recipe has by default. `memory` runs the recipe's sample once more on every backend, in
    a process of its own, for its peak resident bytes.
    Raises `UserError` for a backend that only exports, a count of runs below 1 and a side that no workload has.
    """
    from zoo.program import Program

    if runs < 1:
        raise UserError("--runs must be at least 1")
    for request in requests:
        check_target(request.backend, to_run=True)
    paths = {request.backend: ensure_exported(recipe, request) for request in requests}
    programs = {backend: Program.load(path, runtime) for backend, path in paths.items()}
    with step(f"{recipe.name}: inputs"), quiet_libraries():
        workloads = (recipe.workloads or functools.partial(_methods, recipe))(programs, requests[0])
    sides = {side for workload in workloads for side in workload.calls}
    if unknown := set(against or ()) - sides:
        raise UserError(f"{recipe.name} has no side {', '.join(unknown)} to bench against: {', '.join(sorted(sides))}")
    kept = sides if against is None else {*programs, *against}
    results = []
    for workload in workloads:
        results += _time(recipe, workload, kept, runs, warmup)
    report: dict[str, Any] = {"adapter": adapter_name(), "results": results}
    if "webgpu" in programs and any(workload.weight_bytes for workload in workloads):
        report["copy_gb_s"] = _add_copy_times(results, workloads)
    report["programs"] = [_describe(recipe, request, paths[request.backend], memory) for request in requests]
    for program in programs.values():
        program.close()
    return report


def _add_copy_times(results: list[dict[str, Any]], workloads: Sequence[Workload]) -> float:
    """Says beside each time on the GPU how long its weights take at the copy bandwidth in GB/s, which it returns."""
    from backend.runtime.device import get_device
    from zoo.bench_kernels import copy_bandwidth

    with step("copy bandwidth of the adapter"):
        bandwidth = copy_bandwidth(get_device())
    sizes = {workload.name: workload.weight_bytes for workload in workloads}
    for row in results:
        if row["side"] == "webgpu" and "missing" not in row and (size := sizes[row["workload"]]):
            row |= {"weight_bytes": size, "weight_copy_ms": size / bandwidth / 1e6}
    return bandwidth


def _methods(recipe: Recipe, programs: Mapping[str, Program], request: ExportRequest) -> list[Workload]:
    """One call of each method on its example inputs, by every program and by eager."""
    import torch

    def eager(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        with torch.no_grad():
            module(*inputs)

    found = []
    for name, method in recipe.build(request).methods.items():
        arrays = [tensor.numpy() for tensor in method.example_inputs]
        calls: dict[str, Callable[[], object]] = {
            backend: functools.partial(program.run, name, *arrays) for backend, program in programs.items()
        }
        module = method.module.eval()
        calls["eager"] = functools.partial(eager, module, method.example_inputs)
        found.append(Workload(name, "call", 1, calls))
    return found


def _time(recipe: Recipe, workload: Workload, kept: set[str], runs: int, warmup: int) -> list[dict[str, Any]]:
    calls = {side: call for side, call in workload.calls.items() if side in kept}
    times: dict[str, list[float]] = {side: [] for side in calls}
    missing: dict[str, str] = {}
    with step(f"{recipe.name}, {workload.name}: {warmup} + {runs} rounds of {', '.join(calls)}"), quiet_libraries():
        began = time.perf_counter()
        for _ in range(warmup):
            for side in [side for side in calls if side not in missing]:
                try:
                    calls[side]()
                except UserError as error:
                    missing[side] = str(error)
            if time.perf_counter() - began > LONG_SECONDS / 3:
                break
        began = time.perf_counter()
        for turn in range(runs):
            for side in [side for side in calls if side not in missing]:
                start = time.perf_counter()
                calls[side]()
                times[side].append(time.perf_counter() - start)
            if turn + 1 >= FEW_ROUNDS and time.perf_counter() - began > LONG_SECONDS:
                break
    for side, reason in missing.items():
        say(f"{workload.name}: {side} left out: {reason}")
    medians = {side: statistics.median(spent) for side, spent in times.items() if spent}
    ours = next(iter(medians.values()), None)
    return [
        {
            "model": recipe.name,
            "workload": workload.name,
            "side": side,
            "median_ms": 1e3 * median,
            "min_ms": 1e3 * min(times[side]),
            "runs": len(times[side]),
            "unit": workload.unit,
            "s_per_unit": median / workload.amount,
            "units_per_s": workload.amount / median,
            "times_first": median / ours if ours else None,
        }
        for side, median in medians.items()
    ] + [
        {"model": recipe.name, "workload": workload.name, "side": side, "missing": reason}
        for side, reason in missing.items()
    ]


def _describe(recipe: Recipe, request: ExportRequest, path: Path, memory: bool) -> dict[str, Any]:
    """What the program is: its size, partitions, dispatches (WebGPU) and the peak memory of a run of the sample."""
    exported = artifact.metadata(path)[artifact.ENTRY]
    described: dict[str, Any] = {"backend": request.backend, "bytes": exported["bytes"], "methods": exported["methods"]}
    if request.backend == "webgpu":
        from zoo.plan import as_json, plan

        for name, row in as_json(plan(recipe, request))["methods"].items():
            described["methods"][name] |= {key: value for key, value in row.items() if key != "kernels"}
    if memory and recipe.sample_arguments:
        # Without torch where that is possible, which is how a program is deployed.
        alone = "direct" if request.backend == "webgpu" else "executorch"
        with tempfile.TemporaryDirectory(prefix="zoo-bench-") as folder, step(f"{recipe.name}: peak memory of a run"):
            out = str(Path(folder) / recipe.name)
            sample = [part.replace("{out}", out) for part in recipe.sample_arguments]
            choice = ["--backend", request.backend, "--pte", str(path), "--runtime", alone]
            described |= {"runtime": alone, "peak_bytes": peak_bytes(["run", recipe.name, *sample, *choice])}
    return described


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The results as a table; see `COLUMNS`."""
    return [
        (
            row["workload"],
            row["side"],
            *(f"{row[key]:.2f}" for key in ("median_ms", "min_ms")),
            f"{row['s_per_unit']:.4g} s a {row['unit']}",
            f"{row['times_first']:.2f}",
            f"{100 * row['weight_copy_ms'] / row['median_ms']:.0f}%" if "weight_copy_ms" in row else "",
        )
        for row in report["results"]
        if "missing" not in row
    ]


COLUMNS = ("workload", "side", "median ms", "min ms", "", "× first", "of copy")


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
