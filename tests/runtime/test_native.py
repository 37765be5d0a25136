"""The native shim with toy delegates in numpy: `pytest tests/runtime/test_native.py`."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_programs import DTYPES, Toy, build

from backend import native
from backend.graph import BACKEND_ID, BlobError, ShapeError
from backend.native import build as native_build
from zoo.program import Program


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory)


@pytest.fixture(autouse=True)
def toy_delegates() -> Iterator[None]:
    native.set_delegate_factory(Toy, dict)
    before = Toy.alive
    yield
    native.set_delegate_factory()
    native.take_error()
    gc.collect()
    assert Toy.alive == before, "a delegate was not closed"


def rows(count: int, start: float = 0.0) -> np.ndarray:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3) + np.float32(start)


def test_backend_is_registered_once() -> None:
    from executorch.runtime import Runtime

    native.register()
    native.register()
    names = Runtime.get().backend_registry.registered_backend_names
    assert names.count(BACKEND_ID) == 1
    assert Runtime.get().backend_registry.is_available(BACKEND_ID)


@pytest.mark.parametrize("name", ["add", "mixed"])
def test_outputs_have_their_live_shape(programs: Path, name: str) -> None:
    factor = 2 if name == "mixed" else 1
    with Program.load(programs / f"{name}.pte") as program:
        # Small before large: an output that keeps the sizes of the last call must still grow.
        for count in (7, 1, 64, 33, 64, 2):
            (out,) = program.run("forward", rows(count), rows(count, 0.5))
            np.testing.assert_array_equal(out, factor * (rows(count) + rows(count, 0.5)))


def test_zero_rows(programs: Path) -> None:
    with Program.load(programs / "add.pte") as program:
        (out,) = program.run("forward", rows(0), rows(0))
        assert out.shape == (0, 3)
        (out,) = program.run("forward", rows(2), rows(2))
        np.testing.assert_array_equal(out, 2 * rows(2))


def test_dtypes(programs: Path) -> None:
    inputs = [np.array([1, 0, 1, 1, 0]).astype(name) for name in DTYPES]
    inputs[2] = np.array([0, -1, 5, 2**31 - 1, 2**40])
    inputs[0][0] = np.nan
    with Program.load(programs / "dtypes.pte") as program:
        outputs = program.run("forward", *inputs)
    for given, out in zip(inputs, outputs, strict=True):
        assert out.dtype == given.dtype
        np.testing.assert_array_equal(out, given[::-1])


def test_inputs_need_not_be_plain_arrays(programs: Path) -> None:
    frozen, reverse = rows(4), rows(4)[::-1]
    frozen.flags.writeable = False
    with Program.load(programs / "add.pte") as program:
        (out,) = program.run("forward", frozen, reverse)
    np.testing.assert_array_equal(out, frozen + reverse)


def test_outputs_are_not_overwritten_by_later_calls(programs: Path) -> None:
    with Program.load(programs / "add.pte") as program:
        (first,) = program.run("forward", rows(5), rows(5))
        program.run("forward", rows(5, 100), rows(5, 100))
        np.testing.assert_array_equal(first, 2 * rows(5))
    gc.collect()
    np.testing.assert_array_equal(first, 2 * rows(5))


def test_number_among_a_delegates_inputs(programs: Path) -> None:
    seen = []

    class Watch(Toy):
        def execute(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
            seen.append([(array.dtype.name, array.shape) for array in inputs])
            return super().execute(inputs)

    native.set_delegate_factory(Watch, dict)
    with Program.load(programs / "symint.pte") as program:
        (out,) = program.run("forward", rows(5))
    np.testing.assert_array_equal(out, rows(5).reshape(-1))
    assert seen == [[("float32", (5, 3)), ("int64", ())]]


def test_named_data_is_mapped_and_outlives_init(programs: Path) -> None:
    kept = []

    class Keep(Toy):
        def __init__(self, blob: Any, get_data: Any, states: Any) -> None:
            super().__init__(blob, get_data, states)
            kept.append((blob, get_data("bias"), get_data))
            with pytest.raises(BlobError, match="no data named 'nothing'"):
                get_data("nothing")

    native.set_delegate_factory(Keep, dict)
    program = Program.load(programs / "bias.pte")
    (out,) = program.run("forward", np.zeros((2, 3), np.float32))
    np.testing.assert_array_equal(out, [[0, 1, 2]] * 2)
    program.close()
    gc.collect()
    blob, data, get_data = kept[0]
    assert data.readonly and blob.readonly
    np.testing.assert_array_equal(np.frombuffer(data, np.float32), [0, 1, 2])
    assert bytes(blob) == b"bias:1"
    with pytest.raises(BlobError):
        get_data("bias")  # the program is gone


# --- state ----------------------------------------------------------------------------------------------------------


def read(program: Program) -> float:
    return float(program.run("read", np.zeros(4, np.float32))[0][0])


def test_methods_share_state_and_loads_do_not(programs: Path) -> None:
    first, second = (Program.load(programs / "state.pte") for _ in range(2))
    assert read(first) == read(second) == -1
    first.run("write", np.full(4, 7, np.float32))
    assert (read(first), read(second)) == (7, -1)
    second.run("write", np.full(4, 9, np.float32))
    assert (read(first), read(second)) == (7, 9)
    first.close()
    assert read(second) == 9
    second.close()


def test_state_goes_with_its_program(programs: Path) -> None:
    # ExecuTorch gives a later load the address of an earlier one sooner or later.
    stores: list[dict[str, np.ndarray]] = []

    def new_states() -> dict[str, np.ndarray]:
        stores.append({})
        return stores[-1]

    native.set_delegate_factory(Toy, new_states)
    for _ in range(50):
        with Program.load(programs / "state.pte") as program:
            assert read(program) == -1
            program.run("write", np.full(4, 7, np.float32))
            assert read(program) == 7
    assert len(stores) == 50
    assert not native._registry.programs


def test_programs_without_named_data_share_nothing(programs: Path) -> None:
    with Program.load(programs / "unnamed.pte") as first, Program.load(programs / "unnamed.pte") as second:
        first.run("write", np.full(4, 7, np.float32))
        assert read(second) == -1


def test_failed_init_gives_its_state_back(programs: Path) -> None:
    class Failing(Toy):
        def __init__(self, blob: Any, get_data: Any, states: Any) -> None:
            raise BlobError("made by a later version")

    native.set_delegate_factory(Failing, dict)
    with Program.load(programs / "state.pte") as program, pytest.raises(BlobError):
        read(program)
    assert not native._registry.programs


# --- errors ---------------------------------------------------------------------------------------------------------


def failing(error: BaseException | type[BaseException]) -> type[Toy]:
    class Failing(Toy):
        def execute(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
            if inputs[0].flat[0] < 0:
                raise error
            return super().execute(inputs)

    return Failing


@pytest.mark.parametrize(
    "error", [ShapeError("input 0, dimension 1 is 6"), RuntimeError("device lost: ß"), KeyboardInterrupt()], ids=repr
)
def test_exception_of_a_delegate_reaches_the_caller(
    programs: Path, error: BaseException, capfd: pytest.CaptureFixture[str]
) -> None:
    native.set_delegate_factory(failing(error), dict)
    with Program.load(programs / "add.pte") as program:
        capfd.readouterr()  # what importing ExecuTorch prints
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                program.run("forward", rows(2, -5), rows(2))
            assert caught.value is error
            (out,) = program.run("forward", rows(2), rows(2))
            np.testing.assert_array_equal(out, 2 * rows(2))
    assert native.take_error() is None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("kind", "code"), [(BlobError, "0x30"), (ValueError, "0x12"), (OSError, "0x1"), (MemoryError, "0x21")]
)
def test_error_codes(programs: Path, kind: type[Exception], code: str) -> None:
    import torch
    from executorch.runtime import Runtime

    def fail(*args: Any) -> Any:
        raise kind

    native.set_delegate_factory(fail, dict)
    native.register()
    program = Runtime.get().load_program(programs / "add.pte")
    with pytest.raises(RuntimeError, match=rf"{code}\b|{code.replace('0x', '0x:')}\b"):
        program.load_method("forward")
    assert type(native.take_error()) is kind
    native.set_delegate_factory(failing(kind), dict)
    with pytest.raises(RuntimeError):
        program.load_method("forward").execute([torch.full((2, 3), -1.0)] * 2)
    assert type(native.take_error()) is kind


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([np.zeros((65, 3), np.float32)], r"output 0: .* sizes \[65, 3\]"),
        ([np.zeros(3, np.float32)], r"output 0: .* sizes \[3\]"),
        ([np.zeros((2, 3))], "scalar type 7"),
        ([np.zeros((2, 3), np.complex64)], "complex64"),
        ([], "returned 0 outputs"),
        ([np.zeros((2, 3), np.float32)] * 2, "returned 2 outputs"),
    ],
)
def test_wrong_outputs_are_refused(programs: Path, outputs: list[np.ndarray], message: str) -> None:
    class Wrong(Toy):
        def execute(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
            return outputs

    native.set_delegate_factory(Wrong, dict)
    with Program.load(programs / "add.pte") as program, pytest.raises((ValueError, TypeError), match=message):
        program.run("forward", rows(2), rows(2))


def test_delegate_that_takes_more_than_it_gets(programs: Path) -> None:
    class Greedy(Toy):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.graph.inputs = [None] * 9

    native.set_delegate_factory(Greedy, dict)
    with Program.load(programs / "add.pte") as program, pytest.raises(TypeError, match="takes 9 inputs"):
        program.run("forward", rows(2), rows(2))


def test_no_interrupt_is_lost(programs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C is raised wherever Python looks next, the entry of the shim's own functions included."""
    chance = random.Random(0)
    with Program.load(programs / "add.pte") as program:
        program.run("forward", rows(2), rows(2))
        capfd.readouterr()  # what importing ExecuTorch prints
        for _ in range(100):
            timer = threading.Timer(chance.random() / 200, signal.raise_signal, [signal.SIGINT])
            deadline = time.monotonic() + 5
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while time.monotonic() < deadline:
                    program.run("forward", rows(2), rows(2))
            timer.join()
    assert capfd.readouterr().err == ""


def test_error_belongs_to_its_thread(programs: Path) -> None:
    native.set_delegate_factory(failing(ValueError("mine")), dict)

    def fail() -> str:
        with Program.load(programs / "add.pte") as program, pytest.raises(ValueError) as caught:
            program.run("forward", rows(2, -5), rows(2))
        return str(caught.value)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(fail).result() == "mine"
    assert native.take_error() is None


# --- lifetime and threads -------------------------------------------------------------------------------------------


def test_four_threads_with_four_programs_each(programs: Path) -> None:
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        barrier.wait()
        loaded = [Program.load(programs / "add.pte") for _ in range(4)]
        for turn in range(25):
            for number, program in enumerate(loaded):
                count = (seed + turn + number) % 64 + 1
                (out,) = program.run("forward", rows(count, seed), rows(count, number))
                np.testing.assert_array_equal(out, rows(count, seed) + rows(count, number))
        for program in loaded:
            program.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_one_program_in_four_threads(programs: Path) -> None:
    with Program.load(programs / "add.pte") as program, ThreadPoolExecutor(4) as pool:

        def work(count: int) -> bool:
            (out,) = program.run("forward", rows(count), rows(count, count))
            return bool(np.array_equal(out, rows(count) + rows(count, count)))

        assert all(pool.map(work, [1 + index % 64 for index in range(100)]))


def test_closing_frees_the_delegates(programs: Path) -> None:
    made: list[weakref.ref[Toy]] = []

    class Tracked(Toy):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(weakref.ref(self))

    native.set_delegate_factory(Tracked, dict)
    program = Program.load(programs / "add.pte")
    program.run("forward", rows(2), rows(2))
    alive = Toy.alive
    program.close()
    program.close()
    assert Toy.alive == alive - 1
    assert [reference() for reference in made] == [None]
    with pytest.raises(ValueError, match="closed"):
        program.run("forward", rows(2), rows(2))


def test_program_loaded_from_bytes_that_executorch_holds(programs: Path) -> None:
    import torch
    from executorch.runtime import Runtime

    native.register()
    program = Runtime.get().load_program((programs / "bias.pte").read_bytes())
    method = program.load_method("forward")
    gc.collect()
    junk = [os.urandom(2000) for _ in range(1000)]
    np.testing.assert_array_equal(method.execute([torch.zeros(2, 3)])[0].numpy(), [[0, 1, 2]] * 2)
    del junk


def test_programs_open_at_exit_do_no_harm(programs: Path) -> None:
    code = (
        "import sys, numpy as np; sys.path.insert(0, 'tests/runtime')\n"
        "from toy_programs import Toy\nfrom backend import native\nfrom zoo.program import Program\n"
        "native.set_delegate_factory(Toy, dict)\n"
        f"p = Program.load({str(programs / 'add.pte')!r})\n"
        "x = np.ones((2, 3), np.float32); print(p.run('forward', x, x)[0].sum())\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "12.0\n"), done.stderr


# --- building -------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources in a folder of their own, with a cache folder of its own."""
    source = tmp_path / "source"
    source.mkdir()
    for name in native_build.SHIM.sources:
        (source / name).write_bytes((Path(native_build.__file__).parent / name).read_bytes())
    monkeypatch.setattr(native_build, "_SOURCE_FOLDER", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return source


def test_built_once_and_again_when_the_source_changes(elsewhere: Path) -> None:
    first = native_build.ensure_built()
    assert first.parent == elsewhere
    stamp = first.stat().st_mtime_ns
    assert native_build.ensure_built() == first
    assert first.stat().st_mtime_ns == stamp
    with open(elsewhere / "shim.cpp", "a") as file:
        file.write("// changed\n")
    second = native_build.ensure_built()
    assert second != first and second.is_file() and not first.exists()
    assert {path.name for path in elsewhere.iterdir()} == {*native_build.SHIM.sources, second.name}


def test_built_in_the_cache_where_the_installation_is_read_only(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "_is_writable", lambda folder: folder != elsewhere and _mkdir(folder))
    assert native_build.ensure_built().parent == elsewhere.parent / "cache" / "webgpu-zoo"


def _mkdir(folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    return True


@pytest.mark.parametrize(("compiler", "message"), [("", r"no C\+\+ compiler found .*g\+\+"), ("nope++ -O3", "nope")])
def test_missing_compiler_is_named(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, message: str
) -> None:
    monkeypatch.setenv("PATH", str(elsewhere))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(native.BuildError, match=message):
        native_build.ensure_built()
    assert {path.name for path in elsewhere.iterdir()} == set(native_build.SHIM.sources)


def test_failed_build_leaves_nothing(elsewhere: Path) -> None:
    (elsewhere / "shim.cpp").write_text("#error broken\n")
    with pytest.raises(native.BuildError, match="broken"):
        native_build.ensure_built()
    assert {path.name for path in elsewhere.iterdir()} == set(native_build.SHIM.sources)
