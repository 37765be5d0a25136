"""`zoo bench kernels`: single kernels on the present adapter, as TFLOP/s or GB/s beside its measured copy bandwidth.

Operands stay on the GPU, ours and those of peers that can keep them there. Of a quantized weight the peers get what its
codes stand for: the same product, by the weight in float32. `gpu_ms` is the time between two GPU
timestamps around repeated dispatches, divided by their number; `wall_ms` is the same work seen from the host, as the
peers' times are (CUDA's by its own events). All in one run and in turns.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from backend.blob import to_blob
from backend.runtime.delegate import Delegate
from backend.runtime.device import Device, get_device
from recipes.recipe import UserError, deferred
from zoo.bench import machine
from zoo.bench.cases import Case, draw, graph_of, table
from zoo.bench.timing import TARGET_SECONDS, Timer, copy_bandwidth, is_small
from zoo.console import quiet_libraries, say, step
from zoo.peers.apart import Workers
from zoo.peers.table import PATIENCE, PEERS, Peer, choose, one_line

if TYPE_CHECKING:
    from zoo.peers.graph import Graphs
    from zoo.peers.session import Session

ROUNDS = 7
WARM_SECONDS = 0.4  # a GPU that was idle takes a while to reach its clocks
EAGER = Peer("eager", "PyTorch eager on the CPU", ("torch",), deferred("zoo.peers.pytorch:eager"))


def bench_kernels(
    *, runs: int = ROUNDS, only: str = "", against: Sequence[str] | None = None, patience: float = PATIENCE
) -> dict[str, Any]:
    """Times the kernels whose names contain `only`; returns the JSON of `zoo bench kernels --json`.

    against: names of peers; all that are installed by default, eager on the CPU among them where there is no CUDA.
    Raises `UserError` for a name that no kernel or no peer has, and for a peer that cannot run here.
    """
    if runs < 1:
        raise UserError("--runs must be at least 1")
    peers = _choose(against)
    device = get_device()
    chosen = [case for case in table(is_small(device), "shader-f16" in device.features) if only in case.name]
    if not chosen:
        raise UserError(f"no kernel is called {only!r}")
    with step("copy bandwidth of the adapter"):
        copied = copy_bandwidth(device)
    results = []
    workers = Workers(patience)
    try:
        for case in chosen:
            with step(f"{case.name}: {', '.join(['webgpu', *(peer.name for peer in peers)])}"):
                results.append(_measure(case, device, runs, peers, workers))
    finally:
        workers.close()
    for row in results:
        for name, reason in row["peers_missing"].items():
            say(f"{row['kernel']}: {name} left out: {reason}")
    return {
        "adapter": device.name,
        "model": "kernels",
        "machine": machine.describe(),
        "copy_gb_s": copied,
        "results": results,
    }


def _choose(against: Sequence[str] | None) -> list[Peer]:
    if against is None:
        installed = choose(None)
        return installed if any(peer.name == "cuda" for peer in installed) else [EAGER, *installed]
    known = {EAGER.name, *PEERS}
    if unknown := [name for name in against if name not in known]:
        raise UserError(f"no side {', '.join(unknown)} to bench kernels against: {', '.join(sorted(known))}")
    return [*([EAGER] if EAGER.name in against else []), *choose(against)]


def _measure(case: Case, device: Device, runs: int, peers: Sequence[Peer], workers: Workers) -> dict[str, Any]:
    operands = draw(case)
    graph, feeds, data = graph_of(case, operands)
    delegate = Delegate(to_blob(graph), data.__getitem__, keep_inputs=True)
    others = _Others(case, operands, feeds, peers, workers)
    try:
        outputs = [np.array(array) for array in delegate.execute(feeds)]
        plan = delegate.plan([array.shape for array in feeds])
        others.open(outputs)
        ours = Timer(device, plan.steps)
        gpu, wall = [], []
        warm = time.perf_counter() + WARM_SECONDS
        while time.perf_counter() < warm:
            ours.run()
        for _ in range(runs):
            on_gpu, seen = ours.run()
            gpu.append(on_gpu)
            wall.append(seen)
            others.run()
        kernels = [step.template for step in plan.steps]
    finally:
        delegate.close()
        others.close()
    best = statistics.median(gpu if not math.isnan(gpu[0]) else wall)
    row: dict[str, Any] = {"kernel": case.name, "templates": kernels, "gpu_ms": None, "wall_ms": _ms(wall)}
    if not math.isnan(gpu[0]):
        row["gpu_ms"] = _ms(gpu)
    row["gb_s"] = case.moved / best / 1e9
    if case.flops:
        row["tflop_s"] = case.flops / best / 1e12
    row["peers_ms"] = {name: _ms(times) for name, times in others.times.items() if times}
    row["peers_max_abs_diff"] = others.diffs
    row["peers_missing"] = others.missing
    return row


def _ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


class _Others:
    """The peers of one kernel: made ready, timed in turns, closed."""

    def __init__(
        self,
        case: Case,
        operands: dict[str, np.ndarray],
        feeds: Sequence[np.ndarray],
        peers: Sequence[Peer],
        workers: Workers,
    ) -> None:
        self._workers = workers
        self._case, self._operands, self._feeds, self._peers = case, operands, feeds, peers
        self._sessions: list[Session] = []
        self._graphs: Graphs | None = None
        self._timers: dict[str, Callable[[], float]] = {}
        self.times: dict[str, list[float]] = {}
        self.diffs: dict[str, float] = {}
        self.missing: dict[str, str] = {}

    def open(self, outputs: Sequence[np.ndarray]) -> None:
        """`outputs`: what ours gave, to compare with."""
        for peer in self._peers:
            try:
                with quiet_libraries():
                    self._open(peer, outputs)
            except UserError as error:
                self.missing[peer.name] = str(error)
            except Exception as error:
                self.missing[peer.name] = one_line(error)

    def _open(self, peer: Peer, outputs: Sequence[np.ndarray]) -> None:
        from zoo.peers.graph import Graphs
        from zoo.peers.replay import difference

        if self._graphs is None:
            self._graphs = Graphs({"kernel": _module(self._case, self._operands)}, workers=self._workers)
        session = peer.open(self._graphs.at("kernel", self._feeds))
        self._sessions.append(session)
        diff = difference(outputs, session.fetch(session.prepare(self._feeds)()))
        run = session.repeated(self._feeds)
        run(3)
        repeats = max(1, min(200, int(TARGET_SECONDS / max(1e-6, run(1)))))
        self.diffs[peer.name] = diff
        self.times[peer.name] = []
        self._timers[peer.name] = lambda: run(repeats) / repeats

    def run(self) -> None:
        for name, timer in list(self._timers.items()):
            try:
                self.times[name].append(timer())
            except UserError as error:
                self.missing[name] = str(error)
                del self._timers[name], self.times[name], self.diffs[name]

    def close(self) -> None:
        for session in self._sessions:
            session.close()
        if self._graphs is not None:
            self._graphs.close()


def _module(case: Case, operands: dict[str, np.ndarray]) -> Any:
    """The case in torch: constants are parameters, the other operands inputs, in order."""
    import torch

    names = [name for name, array in case.arrays.items() if not array.constant]

    class Kernel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, array in case.arrays.items():
                if array.constant:
                    weight = torch.from_numpy(operands[name])
                    self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = case.torch(torch, {**self._parameters, **dict(zip(names, inputs, strict=True))})
            return result

    return Kernel()


def best_ms(row: Mapping[str, Any]) -> float:
    """Ours, of a row of the report: by the GPU's clock where it has one."""
    return float(row["gpu_ms"] or row["wall_ms"])


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The report as a table: kernel, GPU and wall time, rate, share of the copy bandwidth, ratio to each peer."""
    lines: list[tuple[str, ...]] = []
    for row in report["results"]:
        time_ms = best_ms(row)
        rate = f"{row['tflop_s']:.3f} TFLOP/s" if "tflop_s" in row else f"{row['gb_s']:.1f} GB/s"
        peers = ", ".join(
            f"{name} {ms:.4f} ms ({ms / time_ms:.2f}x, off by {row['peers_max_abs_diff'][name]:.1g})"
            for name, ms in row["peers_ms"].items()
        )
        share = f"{100 * row['gb_s'] / report['copy_gb_s']:.0f}%"
        lines.append(
            (row["kernel"], f"{time_ms:.4f}", f"{row['wall_ms']:.4f}", rate, share, peers, "+".join(row["templates"]))
        )
    return lines


COLUMNS = ("kernel", "gpu ms", "wall ms", "rate", "of copy", "peers", "templates")
