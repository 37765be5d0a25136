"""`zoo bench`: the work of a recipe on several backends and beside other implementations of the model, in one run.

Sides take turns, one call each a round, so that a machine that slows down slows all of them. They are the exported
programs, what the recipe brings (eager, a library of its own) and the generic peers of `zoo.peers`, which run the
method calls behind each workload.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.recipe import FULL_PRECISION, ExportRequest, Recipe, UserError, Workload
from zoo import artifact
from zoo.bench import machine
from zoo.console import quiet_libraries, say, step
from zoo.export import ensure_exported
from zoo.peak import peak_bytes
from zoo.peers.session import Seconds
from zoo.peers.table import PATIENCE, PEERS, Peer, choose
from zoo.targets import check_target

if TYPE_CHECKING:
    import numpy as np

    from zoo.peers.replay import Call, Listener, Side


LONG_SECONDS = 60  # a workload that takes longer gets fewer rounds: as many as fit, and FEW_ROUNDS at least
FEW_ROUNDS = 3
# The turn of the warm-up whose method calls the peers are timed with. In the first a side may make things ready that
# need no doing again; peers do its calls too, so that state is at the same point on all sides.
LISTENED = 1


def bench(
    recipe: Recipe,
    requests: Sequence[ExportRequest],
    *,
    runs: int = 20,
    warmup: int = 3,
    runtime: str = "executorch",
    against: Sequence[str] | None = None,
    memory: bool = True,
    only: str = "",
    patience: float = PATIENCE,
) -> dict[str, Any]:
    """Times the recipe's workloads under each of `requests`; returns the JSON of `zoo bench --json`.

    A call is timed from numpy arrays in to numpy arrays out, upload and readback included, where a row has no note that
    says otherwise; one whose results a program only keeps for others (a recipe's `bench.py` says which) until the GPU
    is done. `against` names the other sides to time: by default all that the recipe has, and the peers that are
    installed. `memory` runs the recipe's sample once more on every backend, in a process of its own, for its peak
    resident bytes. How long loading a program took and each side's first call, with all that it makes ready, stands
    beside. `only`: the workloads whose names contain it. `patience`: seconds that each peer with a process of
    its own may take to get ready for all of them.
    Raises `UserError` for a backend that only exports, runs or seconds below 1, a side that no workload has, a
    peer that cannot run here and an `only` that no name contains.
    """
    from zoo.peers.replay import Listener
    from zoo.program import Program

    if runs < 1:
        raise UserError("--runs must be at least 1")
    if patience < 1:
        raise UserError("--patience must be at least 1")
    for request in requests:
        check_target(request.backend, to_run=True)
    peers = choose(against)
    paths = {request.backend: ensure_exported(recipe, request) for request in requests}
    programs: dict[str, Listener] = {}
    load_ms: dict[str, float] = {}
    for backend, path in paths.items():
        start = time.perf_counter()
        programs[backend] = Listener(Program.load(path, runtime))
        load_ms[backend] = 1e3 * (time.perf_counter() - start)
    with step(f"{recipe.name}: inputs"), quiet_libraries():
        workloads = (recipe.workloads or functools.partial(_methods, recipe))(programs, requests[0])
    if not (chosen := [workload for workload in workloads if only in workload.name]):
        raise UserError(f"no workload is called {only!r}: {', '.join(workload.name for workload in workloads)}")
    workloads = chosen
    sides = {side for workload in workloads for side in workload.calls}
    if unknown := set(against or ()) - sides - set(PEERS):
        known = ", ".join(sorted(sides | set(PEERS)))
        raise UserError(f"{recipe.name} has no side {', '.join(sorted(unknown))} to bench against: {known}")
    kept = sides if against is None else {*programs, *against}
    results = []
    with _beside(recipe, requests[0], peers, patience) as others:
        for workload in workloads:
            results += _time(recipe, workload, kept, programs[requests[0].backend], others, runs, warmup)
    described = machine.describe()
    report: dict[str, Any] = {
        "adapter": (described["adapter"] or {}).get("device"),
        "model": recipe.name,
        "request": {
            "weights": requests[0].weights,
            "dtype": requests[0].dtype,
            "qlinear": requests[0].qlinear,
            "qembedding": requests[0].qembedding,
            "options": dict(requests[0].options),
        },
        "machine": described,
        "results": results,
    }
    if "webgpu" in programs and any(workload.weight_bytes for workload in workloads):
        report["copy_gb_s"] = _add_copy_times(results, workloads)
    report["programs"] = [
        {**_describe(recipe, request, paths[request.backend], memory), "load_ms": load_ms[request.backend]}
        for request in requests
    ]
    for program in programs.values():
        program.close()
    return report


def _add_copy_times(results: list[dict[str, Any]], workloads: Sequence[Workload]) -> float:
    """Says beside each time on the GPU how long its weights take at the copy bandwidth in GB/s, which it returns."""
    from backend.runtime.device import get_device
    from zoo.bench.timing import copy_bandwidth

    with step("copy bandwidth of the adapter"):
        bandwidth = copy_bandwidth(get_device())
    sizes = {workload.name: workload.weight_bytes for workload in workloads}
    for row in results:
        if row["side"] == "webgpu" and "missing" not in row and (size := sizes[row["workload"]]):
            row |= {"weight_bytes": size, "weight_copy_ms": size / bandwidth / 1e6}
    return bandwidth


@contextmanager
def _beside(recipe: Recipe, request: ExportRequest, peers: Sequence[Peer], patience: float) -> Iterator[list[Side]]:
    """The peers, on the methods of `request` without its quantization: they get the weights as PyTorch has them."""
    if not peers:
        yield []
        return
    from zoo.peers.apart import Workers
    from zoo.peers.graph import Graphs
    from zoo.peers.replay import Side

    plain = replace(request, qlinear=FULL_PRECISION, qembedding=FULL_PRECISION)
    with step(f"{recipe.name}: modules for {', '.join(peer.name for peer in peers)}"), quiet_libraries():
        methods = recipe.build(plain).methods
        modules = {name: method.module for name, method in methods.items()}
        graphs = Graphs(modules, {name: method.example_inputs for name, method in methods.items()}, Workers(patience))
    sides = [Side(peer, graphs) for peer in peers]
    try:
        yield sides
    finally:
        for side in sides:
            side.close()
        graphs.workers.close()
        graphs.close()


def _methods(recipe: Recipe, programs: Mapping[str, Listener], request: ExportRequest) -> list[Workload]:
    """One call of each method on its example inputs, by every program and by eager."""
    import torch

    def eager(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
        with torch.no_grad():
            outputs = torch.utils._pytree.tree_leaves(module(*inputs))
        return [output.numpy() for output in outputs]

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


@dataclass
class _Turns:
    """One workload's sides. `calls`: those that still take part; `missing`: why the others do not."""

    calls: dict[str, Callable[[], object]]
    missing: dict[str, str] = field(default_factory=dict)
    told: dict[str, dict[str, Any]] = field(default_factory=dict)  # more of a side's row
    given: dict[str, object] = field(default_factory=dict)  # what it returned last

    def round(self) -> dict[str, float]:
        """One call of each side that can; seconds by side."""
        spent = {}
        for side, call in list(self.calls.items()):
            start = time.perf_counter()
            try:
                result = call()
            except UserError as error:
                self.drop(side, str(error))
                continue
            spent[side] = result.seconds if isinstance(result, Seconds) else time.perf_counter() - start
            if result is not None:
                self.given[side] = result
        return spent

    def drop(self, side: str, reason: str) -> None:
        self.calls.pop(side, None)
        self.missing[side] = reason


def _time(
    recipe: Recipe,
    workload: Workload,
    kept: set[str],
    program: Listener,
    others: Sequence[Side],
    runs: int,
    warmup: int,
) -> list[dict[str, Any]]:
    turns = _Turns({side: call for side, call in workload.calls.items() if side in kept})
    first = next(iter(turns.calls))
    title = f"{recipe.name}, {workload.name}"
    with step(f"{title}: warm-up of {', '.join(turns.calls)}"), quiet_libraries():
        began = time.perf_counter()
        least = LISTENED + 1 if others else 1
        heard: list[list[Call]] = []
        for turn in range(max(warmup, least)):
            program.calls = [] if others and turn <= LISTENED else None
            taken = turns.round()
            if turn == 0:
                for side, seconds in taken.items():
                    turns.told.setdefault(side, {})["first_ms"] = 1e3 * seconds
            if program.calls is not None:
                heard.append(program.calls)
                program.calls = None
            if others and turn == LISTENED:
                for other in others:
                    _add(turns, other, *heard)
                heard.clear()
            if turn + 1 >= least and time.perf_counter() - began > LONG_SECONDS / 3:
                break
        _compare(turns, first)
    times: dict[str, list[float]] = {side: [] for side in turns.calls}
    with step(f"{title}: {runs} rounds of {', '.join(times)}"), quiet_libraries():
        began = time.perf_counter()
        for turn in range(runs):
            for side, spent in turns.round().items():
                times[side].append(spent)
            if turn + 1 >= FEW_ROUNDS and time.perf_counter() - began > LONG_SECONDS:
                break
    for side, reason in turns.missing.items():
        say(f"{workload.name}: {side} left out: {reason}")
    medians = {side: statistics.median(times[side]) for side in turns.calls if times[side]}
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
            **turns.told.get(side, {}),
        }
        for side, median in medians.items()
    ] + [
        {"model": recipe.name, "workload": workload.name, "side": side, "missing": reason}
        for side, reason in turns.missing.items()
    ]


def _add(turns: _Turns, other: Side, before: Sequence[Call], calls: Sequence[Call]) -> None:
    """A peer to the turns, checked against what ours gave in `calls`, which followed on `before`."""
    from zoo.peers.replay import largest

    name = other.peer.name
    try:
        ready = other.replay(calls, before)
    except UserError as error:
        turns.drop(name, str(error))
        return
    turns.calls[name] = ready.run
    turns.told[name] = {
        "max_abs_diff": ready.max_abs_diff,
        "max_abs_ours": max((largest(call.outputs) for call in calls), default=0.0),
        **({"note": ready.note} if ready.note else {}),
    }


def _compare(turns: _Turns, first: str) -> None:
    """Says of the recipe's own sides how far what they return is from ours, where both return arrays."""
    from zoo.peers.replay import difference, largest

    ours = _arrays(turns.given.get(first))
    for side in turns.calls:
        theirs = _arrays(turns.given.get(side))
        told = turns.told.setdefault(side, {})
        if side == first or "max_abs_diff" in told or not ours or not theirs:
            continue
        try:
            told |= {"max_abs_diff": difference(ours, theirs), "max_abs_ours": largest(ours)}
        except UserError as error:
            told["note"] = str(error)


def _arrays(result: object) -> list[np.ndarray]:
    import numpy as np

    items = list(result) if isinstance(result, (list, tuple)) else [result]
    arrays = [item for item in items if isinstance(item, np.ndarray)]
    return arrays if len(arrays) == len(items) else []


def _describe(recipe: Recipe, request: ExportRequest, path: Path, memory: bool) -> dict[str, Any]:
    """What the program is: its size, partitions, dispatches (WebGPU) and the peak memory of a run of the sample."""
    exported = artifact.metadata(path)[artifact.ENTRY]
    described: dict[str, Any] = {"backend": request.backend, "bytes": exported["bytes"], "methods": exported["methods"]}
    if request.backend == "webgpu":
        from zoo.plan import as_json, plan

        for name, row in as_json(plan(recipe, request, pte=path))["methods"].items():
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
            f"{row['max_abs_diff']:.1e}" if "max_abs_diff" in row else "",
            f"{100 * row['weight_copy_ms'] / row['median_ms']:.0f}%" if "weight_copy_ms" in row else "",
        )
        for row in report["results"]
        if "missing" not in row
    ]


COLUMNS = ("workload", "side", "median ms", "min ms", "", "× first", "off by", "of copy")
