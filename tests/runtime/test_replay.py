"""pytest tests/runtime/test_replay.py: the compiled dispatch loop and Python's, and mappings of results."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import wgpu

from backend.blob import to_blob
from backend.native import build as native_build
from backend.runtime import replay
from backend.runtime.delegate import Delegate
from backend.runtime.device import WRITE, get_device
from backend.runtime.replay import Copy, Step, Table, record, submit
from tests.passes.make import Maker


@pytest.fixture(params=["native", "python"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(replay, "native_loop", lambda: (None, "switched off"))
    elif replay.native_loop()[0] is None:
        pytest.skip(replay.native_loop()[1])
    return request.param


def chain(steps: int) -> Delegate:
    """x, then exp and reversal in turns: kernels that do not fuse, of two pipelines."""
    m = Maker()
    y = m.input(3, 5)
    for _ in range(steps):
        y = m("flip.default", self=m("sigmoid.default", self=y), dims=[0])
        y = m("cumsum.default", self=y, dim=1)
    m.graph.outputs = [y.value]
    return Delegate(to_blob(m.graph), {}.__getitem__)


@pytest.mark.parametrize("is_cpu", [False, True])
def test_both_loops_give_the_same(loop: str, is_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over more dispatches than one submit takes on a GPU of its own."""
    monkeypatch.setattr(get_device(), "is_cpu", is_cpu)
    delegate = chain(80)
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    assert len(delegate.plan([(3, 5)]).steps) > 72
    expected = x.astype(np.float64)
    for _ in range(80):
        expected = np.cumsum((1 / (1 + np.exp(-expected)))[::-1], 1)
    for _ in range(2):
        np.testing.assert_allclose(delegate.execute([x])[0], expected, rtol=1e-5)
    delegate.close()


def adding(number: int) -> tuple[list[Step], wgpu.GPUBuffer]:
    """Steps that write `10 out + i` for i below `number`, each with a pipeline of its own, and `out`."""
    device = get_device()
    out = device.buffer(8)
    group = device.bind_group([WRITE], [(out, 0, 8)])
    code = (
        "@group(0) @binding(0) var<storage, read_write> out: array<u32>;\n"
        "@compute @workgroup_size(1)\n"
        "fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>) {{\n"
        "  if (all(id == vec3(0u))) {{ out[0] = 10 * out[0] + {}; out[1] = n.x + 10 * n.y + 100 * n.z; }} }}"
    )
    pipelines = [device.pipeline(code.format(i), [WRITE], "adding") for i in range(number)]
    return [Step("", "", pipeline, group, (1, 2, 3)) for pipeline in pipelines], out


def test_a_part_of_a_table_between_copies(loop: str) -> None:
    device = get_device()
    steps, out = adding(5)
    kept = [device.buffer(8) for _ in range(2)]
    device.write(kept[0], np.uint32([7, 0]).view(np.uint8))
    commands = record(device, Table(steps), 1, 3, [Copy(kept[0], 0, out, 0, 4)], [Copy(out, 0, kept[1], 4, 4)])
    submit(device, commands)
    assert np.frombuffer(device.read(out, 8), np.uint32).tolist() == [7123, 321]
    assert np.frombuffer(device.read(kept[1], 8), np.uint32).tolist() == [0, 7123]


def test_copies_alone(loop: str) -> None:
    device = get_device()
    first, second = device.buffer(8), device.buffer(8)
    device.write(first, np.uint32([3, 4]).view(np.uint8))
    submit(device, record(device, Table([]), 0, 0, [Copy(first, 0, second, 0, 8)]))
    assert np.frombuffer(device.read(second, 8), np.uint32).tolist() == [3, 4]


def test_what_the_library_refuses_is_raised(loop: str) -> None:
    device = get_device()
    steps, out = adding(1)
    too_many = Step("", "", steps[0].pipeline, steps[0].bind_group, (2**20, 1, 1))
    with pytest.raises(wgpu.GPUError, match="dispatch"):
        record(device, Table([too_many]), 0, 1)
    with pytest.raises(wgpu.GPUError):
        record(device, Table([]), 0, 0, [Copy(out, 0, out, 0, 64)])
    submit(device, record(device, Table(steps), 0, 1))  # and the next one works


def test_nothing_is_left_behind(loop: str) -> None:
    device = get_device()
    steps, _ = adding(2)
    table = Table(steps)

    def objects() -> dict[str, int]:
        device.flush()
        gc.collect()
        counts = wgpu.diagnostics.wgpu_native_counts.get_dict()
        return {name: counts[name]["count"] for name in ("CommandBuffer", "BindGroup")}

    submit(device, record(device, table, 0, 2))
    before = objects()
    for _ in range(20):
        submit(device, record(device, table, 0, 2))
    assert objects() == before


# --- without the compiled loop -------------------------------------------------------------------------------------


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The source in a folder of its own, nothing built yet and nothing remembered."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "replay.c").write_bytes((Path(native_build.__file__).parent / "replay.c").read_bytes())
    monkeypatch.setattr(native_build, "_SOURCE_FOLDER", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    replay.native_loop.cache_clear()
    yield source
    replay.native_loop.cache_clear()


def runs() -> bool:
    delegate = chain(2)
    made = delegate.execute([np.zeros((3, 5), np.float32)])[0].shape == (3, 5)
    delegate.close()
    return made


def test_without_a_compiler(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(unbuilt))
    loop, reason = replay.native_loop()
    assert loop is None and "no C compiler found (looked for cc, gcc and clang)" in reason
    assert runs()


def test_a_loop_that_does_not_build(unbuilt: Path) -> None:
    (unbuilt / "replay.c").write_text("#error broken\n")
    loop, reason = replay.native_loop()
    assert loop is None and "building the native dispatch loop" in reason and "\n" not in reason
    assert runs()


def test_a_library_that_does_not_load(unbuilt: Path) -> None:
    try:
        path = native_build.ensure_built(native_build.REPLAY)
    except native_build.BuildError as error:
        pytest.skip(str(error))
    path.write_bytes(b"not a library")
    loop, reason = replay.native_loop()
    assert loop is None and reason and "\n" not in reason
    assert runs()


def test_a_read_only_installation(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache folder, and in Python where that cannot be written either."""
    writable = native_build._is_writable
    monkeypatch.setattr(native_build, "_is_writable", lambda folder: folder != unbuilt and writable(folder))
    loop, path = replay.native_loop()
    if loop is not None:  # a machine without a C compiler has none anywhere
        assert Path(path).parent == unbuilt.parent / "cache" / "webgpu-zoo"
    replay.native_loop.cache_clear()
    for built in (unbuilt.parent / "cache" / "webgpu-zoo").glob("*.so"):
        built.unlink()
    monkeypatch.setattr(native_build, "_is_writable", lambda folder: False)
    loop, reason = replay.native_loop()
    assert loop is None and ("writable" in reason or "compiler" in reason)
    assert runs() and {path.name for path in unbuilt.iterdir()} == {"replay.c"}
