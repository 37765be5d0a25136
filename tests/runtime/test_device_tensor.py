"""pytest tests/runtime/test_device_tensor.py: results that stay on the GPU and go into other calls."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backend.blob import to_blob
from backend.graph import Graph, Node, Ref, ShapeError, TensorSpec
from backend.runtime import hostdata, load, replay
from backend.runtime import plan as plans
from backend.runtime.delegate import Delegate
from backend.runtime.device import Device, get_device
from backend.runtime.device_tensor import DeviceTensor
from backend.runtime.errors import DeviceError
from recipes.recipe import UserError
from tests.passes.programs import Method, lower
from zoo.program import Program


class Step(nn.Module):
    """state += x; x flipped and twice the state."""

    def __init__(self) -> None:
        super().__init__()
        self.total = nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.total.add_(x.sum(0))
        return x.flip(0), 2 * self.total


class Next(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = torch.export.Dim("rows", min=1, max=64)
    example = torch.zeros(3, 4)
    lowered = lower(
        tmp_path_factory.mktemp("chain") / "chain.pte",
        {"step": Method(Step(), (example,), ({0: rows},)), "next": Method(Next(), (example,), ({0: rows},))},
    )
    assert lowered.outside == {"step": [], "next": []}
    return lowered.path


@pytest.fixture
def program(path: Path) -> Iterator[Program]:
    with Program.load(path, "direct") as loaded:
        yield loaded


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32)


def test_a_chain_is_what_calls_in_turn_are(path: Path) -> None:
    """Of one method into another and into itself, fetched and not."""
    with Program.load(path, "direct") as chained, Program.load(path, "direct") as turns:
        x: np.ndarray | DeviceTensor = rows(3)
        y = rows(3)
        seen, expected = [], []
        for step in range(5):
            x, total = chained.start("step", x, fetch=(1,) if step % 2 else ())
            (moved,) = chained.start("next", x, fetch=(0,))
            seen += [total, moved]
            y, *rest = turns.run("step", y)
            expected += [*rest, *turns.run("next", y)]
            x, y = moved, expected[-1]
        for actual, wanted in zip(seen, expected, strict=True):
            np.testing.assert_array_equal(actual.numpy(), wanted)
        np.testing.assert_array_equal(chained.run("next", x)[0], y + 1)  # and into a call that is waited for


def test_many_in_flight_and_none_overwritten(program: Program) -> None:
    """More than a plan keeps buffers for; read last to first, twice."""
    kept = [program.start("next", rows(5, seed), fetch=(0,) if seed % 3 else ())[0] for seed in range(20)]
    for seed in reversed(range(20)):
        first = kept[seed].numpy()
        np.testing.assert_array_equal(first, rows(5, seed) + 1)
        assert kept[seed].numpy() is first and not first.flags.writeable


def test_memory_of_dropped_tensors_is_used_again_and_harms_nobody(program: Program) -> None:
    (source,) = program.start("next", rows(2))
    for seed in range(12):
        (dropped,) = program.start("next", rows(2, seed), fetch=(0,))
        (kept,) = program.start("next", dropped)
        del dropped  # its values may be on their way
        np.testing.assert_array_equal(kept.numpy(), rows(2, seed) + 1 + 1)
    np.testing.assert_array_equal(source.numpy(), rows(2) + 1)


def test_what_does_not_fit_is_named(program: Program) -> None:
    (tensor,) = program.start("next", rows(3))
    assert (tensor.shape, tensor.dtype, tensor.ndim) == ((3, 4), np.float32, 2)
    with pytest.raises(ShapeError, match="64"):
        program.start("next", rows(65))
    with pytest.raises(ShapeError, match="2 inputs given"):
        program.run("next", tensor, tensor)
    with pytest.raises(KeyError):
        program.start("nothing", tensor)
    with pytest.raises(IndexError):
        program.start("next", tensor, fetch=(1,))
    tensor.close()
    tensor.close()
    for use in (tensor.numpy, lambda: program.run("next", tensor), lambda: program.start("next", tensor)):
        with pytest.raises(ValueError, match="the tensor is closed"):
            use()


def test_dtypes_are_checked_and_kept() -> None:
    """int64 and bool, which the GPU stores in 32 bits, from one delegate into another; not into one of floats."""

    def delegate(op: str, dtype: str) -> Delegate:
        graph = Graph([TensorSpec(dtype, (5,)), TensorSpec(dtype, (5,))], [0], [1])
        graph.nodes = [Node(op, {"self": Ref(0)}, (1,))]
        return Delegate(to_blob(graph), {}.__getitem__)

    for op, values in (("aten.neg.default", np.arange(5)), ("aten.logical_not.default", np.arange(5) % 2 == 0)):
        one = delegate(op, values.dtype.name)
        (tensor,) = one.start([values])
        (back,) = one.start([tensor])
        np.testing.assert_array_equal(back.numpy(), values)
        assert back.numpy().dtype == values.dtype
        with pytest.raises(ShapeError, match=f"input 0 is {values.dtype}, expected float32"):
            delegate("aten.neg.default", "float32").execute([tensor])


def test_empty_results() -> None:
    graph = Graph([TensorSpec("float32", (0, 3)), TensorSpec("float32", (0, 3))], [0], [1])
    graph.nodes = [Node("aten.neg.default", {"self": Ref(0)}, (1,))]
    delegate = Delegate(to_blob(graph), {}.__getitem__)
    (tensor,) = delegate.start([np.zeros((0, 3), np.float32)], (0,))
    assert delegate.start([tensor])[0].numpy().shape == tensor.numpy().shape == (0, 3)


def test_a_closed_program_and_tensors_that_outlive_it(path: Path, program: Program) -> None:
    with load(path) as other:
        fetched, left = other.start("next", rows(3), fetch=(0,))[0], other.start("next", rows(4))[0]
    with pytest.raises(ValueError, match="closed"):
        other.start("next", left)
    gc.collect()
    np.testing.assert_array_equal(fetched.numpy(), rows(3) + 1)
    np.testing.assert_array_equal(program.run("next", left)[0], rows(4) + 1 + 1)


def test_another_device_is_refused(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    (tensor,) = program.start("next", rows(3))
    monkeypatch.setattr("backend.runtime.device._current", Device())
    with pytest.raises(DeviceError, match="input 0 is a tensor of another GPU device, or of one that was lost"):
        program.run("next", tensor)
    np.testing.assert_array_equal(program.run("next", rows(3))[0], rows(3) + 1)


def test_a_device_lost_in_flight(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors say so, at every call; the next call of the program runs on a new device."""
    monkeypatch.setattr("backend.runtime.device._current", lost := Device())
    with load(path) as program:
        (tensor,) = program.start("next", rows(3))
        lost.handle.destroy()
        for _ in range(2):
            with pytest.raises(DeviceError):
                tensor.numpy()
        np.testing.assert_array_equal(program.run("next", rows(3))[0], rows(3) + 1)
        assert get_device() is not lost


def test_ctrl_c_while_waiting_changes_nothing(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    (tensor,) = program.start("next", rows(3), fetch=(0,))
    waiting = plans.Mapping.wait

    def interrupted(mapping: plans.Mapping) -> memoryview:
        raise KeyboardInterrupt

    monkeypatch.setattr(plans.Mapping, "wait", interrupted)
    for call in (tensor.numpy, lambda: program.run("next", rows(2))):
        with pytest.raises(KeyboardInterrupt):
            call()
    monkeypatch.setattr(plans.Mapping, "wait", waiting)
    np.testing.assert_array_equal(program.run("next", rows(2))[0], rows(2) + 1)
    np.testing.assert_array_equal(tensor.numpy(), rows(3) + 1)


class Copiers:
    """In place of `hostdata`'s threads: one that copies when it is let, and Ctrl-C for who waits for it."""

    def __init__(self) -> None:
        self.go, self.threads = threading.Event(), list[threading.Thread]()
        self.copied = threading.Event()

    def map(self, copy: Callable[[int], None], starts: Iterable[int]) -> None:
        def work() -> None:
            self.go.wait(60)
            for start in starts:
                copy(start)
            self.copied.set()

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()
        raise KeyboardInterrupt

    def finish(self) -> None:
        self.go.set()
        for thread in self.threads:
            thread.join()
        assert self.copied.is_set()


@pytest.fixture
def copiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copiers]:
    monkeypatch.setattr(hostdata, "PIECE", 64)
    monkeypatch.setattr(hostdata, "COPIERS", 2)
    held = Copiers()
    monkeypatch.setattr(hostdata, "_copiers", lambda: held)
    yield held
    held.finish()


def test_ctrl_c_leaves_no_thread_that_copies_from_freed_memory(
    program: Program, copiers: Copiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory goes with the last thread that copies from it, when everyone else has let go of it."""
    staging: list[weakref.ref[object]] = []
    made = plans._create_staging

    def create(device: Device, nbytes: int) -> object:
        buffer = made(device, nbytes)
        staging.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(plans, "_create_staging", create)
    with pytest.raises(KeyboardInterrupt):
        program.run("next", rows(64))
    gc.collect()
    assert [ref() is None for ref in staging] == [False]
    copiers.finish()
    copiers.threads.clear()
    gc.collect()
    assert staging[0]() is None


def test_a_second_try_leaves_the_memory_to_threads_of_the_first(
    program: Program, copiers: Copiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[plans.Mapping] = []
    monkeypatch.setattr(plans.Mapping, "close", closed.append)
    (tensor,) = program.start("next", rows(64), fetch=(0,))
    with pytest.raises(KeyboardInterrupt):
        tensor.numpy()
    monkeypatch.setattr(hostdata, "COPIERS", 1)
    np.testing.assert_array_equal(tensor.numpy(), rows(64) + 1)
    assert not closed


def test_ctrl_c_after_the_memory_is_let_go(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read is kept: there is nothing left to read it from again."""
    closing = plans.Mapping.close

    def interrupted(mapping: plans.Mapping) -> None:
        closing(mapping)
        raise KeyboardInterrupt

    (tensor,) = program.start("next", rows(3), fetch=(0,))
    monkeypatch.setattr(plans.Mapping, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tensor.numpy()
    np.testing.assert_array_equal(tensor.numpy(), rows(3) + 1)


def test_ctrl_c_in_the_librarys_answer_does_not_hang(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """It strikes where nobody can catch it: whoever waits gets it, and the answer counts all the same."""
    real, struck = replay._answer, []

    def answer(status: int, message: object, number: object, _: object) -> None:
        struck.append(1)
        raise KeyboardInterrupt

    callback = replay.ffi.callback(
        "void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", answer, onerror=replay._interrupted
    )
    monkeypatch.setattr(replay, "_callback", lambda: callback)
    monkeypatch.setattr(replay, "_answer", real)
    (tensor,) = program.start("next", rows(3), fetch=(0,))
    with pytest.raises(KeyboardInterrupt):
        tensor.numpy()
    assert struck == [1]
    monkeypatch.undo()
    np.testing.assert_array_equal(tensor.numpy(), rows(3) + 1)
    np.testing.assert_array_equal(program.run("next", rows(2))[0], rows(2) + 1)


def test_threads_with_chains_of_their_own(path: Path) -> None:
    def work(seed: int) -> list[bytes]:
        with load(path) as program:
            tensor = program.start("next", rows(6, seed))[0]
            seen = []
            for _ in range(10):
                tensor, total = program.start("step", tensor, fetch=(1,))
                seen.append(total)
            return [total.numpy().tobytes() for total in seen]

    alone = [work(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == alone


def test_one_program_and_one_tensor_in_four_threads(program: Program) -> None:
    shared = program.start("next", rows(7))[0]

    def work(_: int) -> bool:
        (twice,) = program.start("next", shared, fetch=(0,))
        return np.array_equal(twice.numpy(), rows(7) + 1 + 1) and np.array_equal(shared.numpy(), rows(7) + 1)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


def test_executorchs_runtime_refuses_clearly(path: Path, program: Program) -> None:
    (tensor,) = program.start("next", rows(3))
    assert program.keeps_on_device
    with Program.load(path) as other:
        assert not other.keeps_on_device
        for call in (lambda: other.start("next", rows(3)), lambda: other.run("next", tensor)):
            with pytest.raises(UserError, match="--runtime direct"):
                call()
        np.testing.assert_array_equal(other.run("next", rows(3))[0], tensor.numpy())
