"""pytest tests/cli/test_bench.py: peers, their outputs beside ours, and kernels. No peer has to be installed."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backend.blob import to_blob
from backend.runtime.delegate import Delegate
from recipes.recipe import Recipe, UserError
from tests.cli.harness import command, one_error_line
from zoo.bench import cases, encoder, kernels, models
from zoo.check import check
from zoo.export import make_request
from zoo.peers import onnx_runtime, replay
from zoo.peers.apart import Workers
from zoo.peers.graph import Graph, Graphs, _Stateless, _unchanged
from zoo.peers.pytorch import Torch, eager
from zoo.peers.session import OnnxGraph, Session
from zoo.peers.table import PEERS, Peer, choose, one_line


class _Wrong(Torch):
    """Twice what it should be."""

    def fetch(self, result: Any) -> list[np.ndarray]:
        return [2 * array for array in super().fetch(result)]


class _Transposed(Torch):
    def fetch(self, result: Any) -> list[np.ndarray]:
        return [array[None] for array in super().fetch(result)]


def _broken(graph: Graph) -> Session:
    raise RuntimeError("no kernel for this\nand much more")


def _failing(graph: Graph) -> Session:
    def fail(*arrays: Any) -> None:
        raise RuntimeError("device lost")

    session = eager(graph)
    session._module = fail  # type: ignore[assignment]
    return session


FAKES: dict[str, Callable[[Graph], Session]] = {
    "right": eager,
    "wrong": lambda graph: _Wrong(graph.module("wrong")),
    "transposed": lambda graph: _Transposed(graph.module("transposed")),
    "broken": _broken,
    "failing": _failing,
    "apart": lambda graph: graph.owner.workers.open(graph, "tests.cli.fake_peer:Fake"),
}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers made of eager PyTorch, and one that adds, in a process of its own."""
    for name in list(PEERS):
        monkeypatch.delitem(PEERS, name)
    for name, opener in FAKES.items():
        monkeypatch.setitem(PEERS, name, Peer(name, "", (), opener))
    monkeypatch.setitem(PEERS, "absent", Peer("absent", "", ("no_such_module",), eager))
    monkeypatch.setattr(Graph, "_export", _exported)


def _exported(graph: Graph) -> OnnxGraph:
    """What the exporter writes, without the file: its name is what the fake peer goes by."""
    states = graph.owner.states(graph.method)
    return OnnxGraph(Path(graph.method), tuple(states), tuple(state.name for state in states))


def _onnxruntime(given: Sequence[str] = (onnx_runtime.WEBGPU,), whole: bool = True) -> Any:
    """A package whose sessions run on `given`; without `whole`, one operator has no kernel there."""

    class Options:
        def __init__(self) -> None:
            self.entries: dict[str, str] = {}

        def add_session_config_entry(self, key: str, value: str) -> None:
            self.entries[key] = value

    class InferenceSession:
        def __init__(self, path: str, options: Options, providers: list[str], enable_fallback: int) -> None:
            assert not enable_fallback
            if not whole and options.entries.get("session.disable_cpu_ep_fallback") == "1":
                raise RuntimeError("an operator was left to the CPU")

        def get_providers(self) -> list[str]:
            return list(given)

    module: Any = types.ModuleType("onnxruntime")
    module.__spec__ = importlib.machinery.ModuleSpec("onnxruntime", None)
    module.get_available_providers = lambda: [onnx_runtime.WEBGPU, onnx_runtime.CPU]
    module.SessionOptions, module.InferenceSession = Options, InferenceSession
    return module


def test_peers_beside_ours(toy: Recipe, fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong ones, those that fail and those that refuse, on a method with state and one without."""
    monkeypatch.chdir(tmp_path)
    requests = [make_request(toy, "portable", weights="tiny")]
    report = models.bench(toy, requests, runs=3, warmup=1, memory=False)
    rows = {(row["workload"], row["side"]): row for row in report["results"]}
    assert {side for _, side in rows} == {"portable", "eager", *FAKES}
    for method in ("scale", "count"):
        # State too: every side has done the same calls when outputs are compared.
        for side in ("right", "eager"):
            row = rows[method, side]
            assert row["max_abs_diff"] < 1e-6 and row["runs"] == 3 and row["times_first"] > 0
        assert rows[method, "portable"]["first_ms"] > 0 and "first_ms" not in rows[method, "right"]  # which came later
        assert rows[method, "wrong"]["max_abs_diff"] == pytest.approx(rows[method, "wrong"]["max_abs_ours"], rel=1e-5)
        assert rows[method, "broken"]["missing"] == "RuntimeError: no kernel for this"
        assert rows[method, "failing"]["missing"] == "RuntimeError: device lost"
        assert "outputs have shapes" in rows[method, "transposed"]["missing"]
    assert rows["count", "wrong"]["max_abs_ours"] == 2 * 2  # the second turn of a counter of ones
    assert rows["count", "apart"]["max_abs_diff"] == 0 and rows["count", "apart"]["note"] == "with total"
    assert rows["scale", "apart"]["missing"] == "NotImplementedError: no operator scale"
    assert report["programs"][0]["load_ms"] > 0
    assert report["machine"]["versions"]["torch"] == torch.__version__
    with pytest.raises(UserError, match=r"no side sorcery .*apart, .*eager"):
        models.bench(toy, requests, runs=1, against=["sorcery", "eager"])
    one = models.bench(toy, requests, runs=1, warmup=1, memory=False, against=["right"], only="cal")
    assert [(row["workload"], row["side"]) for row in one["results"]] == [("scale", "portable"), ("scale", "right")]
    with pytest.raises(UserError, match="no workload is called 'sorcery': scale, count"):
        models.bench(toy, requests, runs=1, only="sorcery")


def test_a_peer_that_is_not_installed(fakes: None, tmp_path: Path) -> None:
    assert [peer.name for peer in choose(None)] == list(FAKES)
    assert choose([]) == [] and choose(["eager"]) == []
    with pytest.raises(UserError, match=r"absent is not installed \(no module no_such_module\): pip install"):
        choose(["right", "absent"])


@pytest.mark.parametrize("what", ["toy", "kernels"])
def test_a_peer_that_is_asked_for_and_not_installed(environment: dict[str, str], tmp_path: Path, what: str) -> None:
    gone = (
        "import zoo.peers.table as table; from dataclasses import replace; "
        "table.PEERS['tinygrad'] = replace(table.PEERS['tinygrad'], modules=('no_such_module',)); "
    )
    script = command()[2].replace("main()", gone + "main()")
    done = subprocess.run(
        [sys.executable, "-c", script, "bench", what, "--against", "tinygrad"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    one_error_line(done, "tinygrad is not installed", "pip install 'webgpu-zoo[bench]'")
    assert list(tmp_path.iterdir()) == []


def test_onnx_runtime_that_leaves_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = OnnxGraph(Path("graph.onnx"))

    def opened(fake: Any) -> onnx_runtime.OnnxRuntime:
        monkeypatch.setitem(sys.modules, "onnxruntime", fake)
        return onnx_runtime.on_webgpu(graph, {})

    assert opened(_onnxruntime()).note == ""
    assert opened(_onnxruntime(whole=False)).note == "some operators run on the CPU"
    with pytest.raises(UserError, match=r"fell back from WebGpu\w+ to CPUExecutionProvider"):
        opened(_onnxruntime([onnx_runtime.CPU]))
    plain = _onnxruntime()
    plain.get_available_providers = lambda: [onnx_runtime.CPU]
    with pytest.raises(UserError, match=r"has no WebGpu\w+: pip uninstall onnxruntime, then"):
        opened(plain)


def test_differences() -> None:
    nan, inf = np.float32("nan"), np.float32("inf")
    a = np.array([1, nan, inf], np.float32)
    assert replay.difference([a], [a]) == 0
    assert replay.difference([np.uint8([250])], [np.uint8([3])]) == 247
    assert replay.largest([a, np.array([-3.0])]) == 3 and replay.largest([]) == 0
    for other in ([1, 2, inf], [1, nan, 5], [1, nan, -inf]):
        with pytest.raises(UserError, match="not finite"):
            replay.difference([a], [np.array(other, np.float32)])
    with pytest.raises(UserError, match="shapes"):
        replay.difference([a], [])
    assert one_line(ValueError("\n")) == "ValueError: no message"
    long = one_line(ValueError(f"begin {'x' * 999} end"))
    assert long.startswith("ValueError: begin x") and long.endswith("x end") and len(long) < 260


def test_state_that_methods_share_is_shared_on_another_device() -> None:
    shared = torch.nn.Buffer(torch.zeros(2))

    class Writes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = shared
            self.weight = torch.nn.Parameter(torch.ones(2))

    graphs = Graphs({"write": Writes(), "read": Writes()})
    there = graphs.copied("peer", "meta")
    assert there["write"].state is there["read"].state and there["write"].state.device.type == "meta"
    assert isinstance(there["write"].weight, torch.nn.Parameter)
    here = graphs.copied("another", "cpu")
    here["write"].state += 1
    assert here["read"].state.sum() == 2 and shared.sum() == 0


def test_every_weight_arrives_on_another_device() -> None:
    """Of a module that two methods share: what is freed on the way makes room for others at the same address."""
    module = torch.nn.ModuleList(torch.nn.Linear(1 + index, 2) for index in range(300))
    there = Graphs({"one": module, "two": module}).copied("peer", "meta")
    assert there["one"] is there["two"]
    wanted = [parameter.shape for parameter in module.parameters()]
    assert [parameter.shape for parameter in there["one"].parameters()] == wanted


class _Cache(torch.nn.Module):
    """Writes a row of a cache, or reads the cache in a way that makes it a state of the reader too."""

    def __init__(self, cache: torch.nn.Buffer, writes: bool) -> None:
        super().__init__()
        self.cache, self.writes = cache, writes
        self.scale = torch.nn.Buffer(torch.full((2,), 3.0))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.cache.index_copy_(0, at, x * self.scale)
        else:
            self.cache.copy_(self.cache.clone())
        return self.cache.sum(0) + x[0]


def test_states_as_inputs_and_outputs() -> None:
    cache = torch.nn.Buffer(torch.arange(8.0).reshape(4, 2))
    x, at = torch.ones(1, 2), torch.tensor([2])
    modules: dict[str, torch.nn.Module] = {"write": _Cache(cache, True), "read": _Cache(cache, False)}
    graphs = Graphs({**modules, "other": torch.nn.Linear(2, 2)}, dict.fromkeys(modules, (x, at)))
    try:
        (state,) = graphs.states("write")
        assert state.name == "cache" and graphs.states("read") == [state] and graphs.states("other") == []
        np.testing.assert_array_equal(state.initial(), cache.numpy())
        given = (x, at, torch.from_numpy(state.initial()))
        writes, reads = (
            torch.export.export(_Stateless(modules[name], ["cache"], ["cache"]), given) for name in modules
        )
        assert _unchanged(writes, 1) == set() and _unchanged(reads, 1) == {0}
        output, written = writes.module()(*given)
        assert cache[2].tolist() == [4, 5]  # the module's own stays as it was
        eager = graphs.copied("eager", "cpu")
        torch.testing.assert_close(output, eager["write"](x, at))
        torch.testing.assert_close(written, eager["write"].cache)
        again, _ = reads.module()(x, at, written)
        torch.testing.assert_close(again, eager["read"](x, at))
    finally:
        graphs.close()


def test_a_peer_that_crashes_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "_export", _exported)
    x = np.ones(4, np.float32)
    modules = {name: torch.nn.Identity() for name in ("crash", "hang", "add")}
    graphs = Graphs(modules, workers=Workers(60))
    side = replay.Side(Peer("apart", "", (), FAKES["apart"]), graphs)
    calls = {name: [replay.Call(name, (x,), (2 * x,))] for name in modules}
    try:
        for _ in range(2):
            with pytest.raises(UserError, match=r"its process ended by SIGSEGV: about to crash \(in crash\)"):
                side.replay(calls["crash"])
        # It goes on with what it can do, in a new process, until it is out of time.
        assert side.replay(calls["add"]).run().seconds < 60
        graphs.workers.patience = 0.1 + graphs.workers._spent["tests.cli.fake_peer:Fake"]
        with pytest.raises(UserError, match=r"not ready within .* s: stopped at run"):
            side.replay(calls["hang"])
        with pytest.raises(UserError, match="not ready within"):
            side.replay(calls["add"])
    finally:
        side.close()
        graphs.workers.close()
        graphs.close()


_ASKING = """
import pathlib
import numpy
from zoo.peers.apart import Workers, _Apart
from zoo.peers.session import OnnxGraph

if __name__ == "__main__":
    workers = Workers(60)
    graph = type("Graph", (), {"onnx": lambda self: OnnxGraph(pathlib.Path("hang"))})()
    session = workers.open(graph, "tests.cli.fake_peer:Fake")
    call = session.prepare([numpy.ones(4, numpy.float32)])
    print(session._worker._folder.name, flush=True)
    call()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a process is ended there without a signal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_peer_that_hangs_leaves_nothing_when_its_parent_is_ended(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "asking.py"
    script.write_text(_ASKING)
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        folder = Path(asking.stdout.readline().strip())
        deadline = time.monotonic() + 60
        while "hanging" not in (folder / "log").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        asking.send_signal(number)
        assert asking.wait(10) == -number
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not folder.exists()


def test_outputs_of_a_state_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer answers from a state that it could not write is no result."""
    cache = torch.nn.Buffer(torch.zeros(4, 2))
    x, at = torch.ones(1, 2), torch.tensor([2])
    modules: dict[str, torch.nn.Module] = {"write": _Cache(cache, True), "read": _Cache(cache, False)}
    graphs = Graphs(modules, dict.fromkeys(modules, (x, at)))
    ours = graphs.copied("ours", "cpu")
    calls = [replay.Call(name, (x.numpy(), at.numpy()), (ours[name](x, at).numpy(),)) for name in modules]

    def opener(graph: Graph) -> Session:
        return _broken(graph) if graph.method == "write" else Torch(graph.module("reader"))

    side = replay.Side(Peer("reader", "", (), opener), graphs)
    with pytest.raises(UserError, match="no kernel for this"):
        side.replay(calls[:1])
    with pytest.raises(UserError, match=r"its state is not what ours is.*no kernel for this"):
        side.replay(calls[1:])
    graphs.close()


def test_a_kernel_and_its_peers(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def delegate(*given: Any, **options: Any) -> Delegate:
        made.append(options)
        return Delegate(*given, **options)

    monkeypatch.setattr(kernels, "Delegate", delegate)
    report = kernels.bench_kernels(runs=2, only="gemv 1x1024")
    assert made == [{"keep_inputs": True}]  # dispatches are repeated without an upload
    (row,) = report["results"]
    assert list(row["peers_ms"]) == ["eager", "right", "wrong"] and min(row["peers_ms"].values()) > 0
    assert row["wall_ms"] > 0 and row["gb_s"] > 0 and row["tflop_s"] > 0 and row["templates"]
    assert row["peers_max_abs_diff"]["eager"] < 1e-4 < row["peers_max_abs_diff"]["wrong"]
    assert set(row["peers_missing"]) == {"transposed", "broken", "failing", "apart"}
    assert len(kernels.rows(report)) == 1 and report["copy_gb_s"] > 0
    with pytest.raises(UserError, match="no kernel is called"):
        kernels.bench_kernels(only="sorcery", against=[])
    with pytest.raises(UserError, match="no side sorcery"):
        kernels.bench_kernels(against=["sorcery"])


@pytest.mark.parametrize("small", [True, False])
def test_table_of_kernels(small: bool) -> None:
    table = cases.table(small, half=True)
    assert len({case.name for case in table}) == len(table) > 12
    assert all(case.flops or case.moved for case in table)
    # One of them as a graph: what is a weight is no input, and operands are the same at every draw.
    case = next(case for case in table if case.name.startswith("gemv"))
    operands = cases.draw(case)
    graph, feeds, data = cases.graph_of(case, operands)
    assert set(data) == {"weight", "bias"} and len(graph.inputs) == len(feeds) == 1
    np.testing.assert_array_equal(feeds[0], cases.draw(case)["input"])
    wanted = ("gemm tall", "gemm thin", "gemv", "gemv 4w", "gemv 8w", "gemm 4w", "conv", "softmax", "rms_norm", "silu")
    attentions = ("attention", "attention step", "attention window", "attention channel")
    for name in wanted + attentions:
        assert any(case.name.startswith(f"{name} ") or case.name.startswith(f"{name}(") for case in table), name


@pytest.mark.parametrize("mode", ["4w", "8w"])
@pytest.mark.parametrize("rows", [1, 20])
def test_a_quantized_kernel_computes_what_its_peers_get(mode: str, rows: int) -> None:
    case = cases.quantized("gemv", mode, rows, 96, 24)
    operands = cases.draw(case)
    graph, feeds, data = cases.graph_of(case, operands)
    assert set(data) == {"weight", "weight_scale"} and len(data["weight"]) == 24 * 96 * int(mode[0]) // 8
    delegate = Delegate(to_blob(graph), data.__getitem__)
    try:
        (ours,) = delegate.execute(feeds)
        golden = case.torch(torch, {name: torch.from_numpy(array).double() for name, array in operands.items()})
        # Float32 sums of 96 products of size 1 / sqrt(96).
        np.testing.assert_allclose(ours, golden.numpy(), rtol=0, atol=3e-6)
    finally:
        delegate.close()


def test_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = make_request(encoder.RECIPE, "webgpu", weights="tiny")
    report = models.bench(encoder.RECIPE, [request], runs=1, warmup=1, memory=False, against=["eager"])
    row = next(row for row in report["results"] if row["side"] == "eager")
    assert row["max_abs_diff"] < 1e-5 < row["max_abs_ours"]
    assert check(encoder.RECIPE, request).passed
    with pytest.raises(UserError, match="no checkpoint"):
        encoder.RECIPE.build(dataclasses.replace(request, weights="nobody/encoder"))
    # The sizes that are timed are those that the name says.
    layers, width, heads, inner, positions = encoder.SIZES["encode_6x512_at_256"]
    assert (layers, width, heads, inner, positions) == (6, 512, 8, 2048, 256)
