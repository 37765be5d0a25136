"""Real-ESRGAN: whole programs and runs of the command, on small networks.

pytest tests/recipes/test_real_esrgan.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from real_esrgan_support import Nearest, eager, needs_package, needs_pictures, program_of

from recipes.real_esrgan import RECIPE, runner
from recipes.real_esrgan.networks import Pixels, Upscale
from recipes.real_esrgan.pictures import Picture
from recipes.real_esrgan.variants import VARIANTS
from recipes.recipe import ExportRequest
from tests.cli.harness import environ, one_error_line
from tests.passes.programs import Method, lower
from zoo import artifact
from zoo.artifact import assets_of
from zoo.program import Program

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("weights", ["x4plus:tiny", "x2plus:tiny", "general-x4v3:tiny"])
def test_30_sizes_equal_eager(weights: str, elsewhere: Path) -> None:
    """From 1 to 97, primes among them, one program and one delegate for all."""
    path = program_of(weights, "webgpu")
    one_delegate(path)
    loaded, run = eager(weights, torch.float64)
    multiple, rng = loaded.architecture.multiple, np.random.default_rng(5)
    sizes = [(1, 1), (97, 1), (2, 89), (31, 37), *map(tuple, rng.integers(1, 98, (26, 2)).tolist())]
    with Program.load(path, "direct") as program:
        for height, width in sizes:
            pixels = rng.random((1, 3, multiple * -(-height // multiple), multiple * -(-width // multiple)), np.float32)
            (result,) = program.run("upscale", pixels)
            expected = run(pixels)
            assert result.shape == expected.shape
            np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)
            if "pixels" in program.methods:
                made, broken = program.run("pixels", pixels)
                np.testing.assert_array_equal(made[0], finished(result))
                assert not broken and made.dtype == np.uint8


def finished(result: np.ndarray) -> np.ndarray:
    """Pixels of 8 bits from what `upscale` gives, on the host."""
    picture = Picture(np.zeros((1, 1, 3), np.uint8))
    out = picture.empty(*result.shape[2:])
    picture.finish(result[0].transpose(1, 2, 0), out)
    return out


def test_pixels_are_rounded_as_on_the_host(tmp_path: Path) -> None:
    """Every tie and its neighbours, what is out of range, and numbers that a GPU may take for 0."""
    near = ((np.arange(256) + 0.5) / 255).astype(np.float32)
    steps = [near]
    for _ in range(3):
        steps = [np.nextafter(steps[0], np.float32(-1)), *steps, np.nextafter(steps[-1], np.float32(2))]
    values = np.concatenate([*steps, np.float32([-0.0, -3, 1, 1.25, 3e38, -3e38, 1e-45, 1e-38])])
    assert (near * np.float32(255) % 1 == 0.5).sum() > 128  # ties are among them: half goes to even
    values = np.resize(np.random.default_rng(0).permutation(values), (1, 3, 160, 150))  # large enough to be packed
    method = Method(Pixels(Upscale(torch.nn.Identity(), torch.float32)), (torch.from_numpy(values),))
    with Program.load(lower(tmp_path / "pixels.pte", {"pixels": method}).path, "direct") as program:
        made, broken = program.run("pixels", values)
        np.testing.assert_array_equal(made[0], finished(values))
        assert not broken
        for wrong in (np.nan, np.inf, -np.inf):
            spoilt = values.copy()
            spoilt[0, 2, 159, 149] = wrong
            assert program.run("pixels", spoilt)[1]


@pytest.mark.parametrize(("mode", "dtype"), [("RGB", "fp32"), ("RGB", "fp16"), ("L", "fp32")])
def test_tiles_ahead_are_tiles_in_turn(mode: str, dtype: str, elsewhere: Path) -> None:
    """The same file by either runtime, and by a program from before there were pixels."""
    path = program_of("general-x4v3:tiny", "webgpu", dtype)
    noise = np.random.default_rng(0).integers(0, 256, (70, 90, 3), np.uint8)
    Image.fromarray(noise).convert(mode).save("in.png")
    made = []
    for runtime in ("direct", "executorch"):
        with Program.load(path, runtime) as program:
            for methods in (program.methods, ("upscale",)):
                program.methods = methods
                for tile, tiles in (("24", 12), ("45", 4)):  # of the larger ones, bytes are packed on the GPU
                    done = runner.Upscaler(program, assets_of(path), tile).file(Path("in.png"), Path("out.png"))
                    assert done.tiles == tiles
                    made.append((tile, Path("out.png").read_bytes()))
    assert len(made) == 8 and len(set(made)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_one_delegate_for_every_variant(name: str, elsewhere: Path) -> None:
    """In the real size, in both precisions; the small ones above stand for these in every run."""
    for dtype in RECIPE.dtypes:
        one_delegate(program_of(f"{name}:synthetic", "webgpu", dtype))


def one_delegate(path: Path) -> None:
    methods = artifact.metadata(path)[artifact.ENTRY]["methods"]
    is_small = "animevideov3" in path.name or "general" in path.name
    expected = ("upscale", "pixels") if is_small else ("upscale",)
    found = {name: (row["partitions"], row["undelegated"]) for name, row in methods.items()}
    assert found == dict.fromkeys(expected, (1, 0))


@pytest.mark.parametrize("weights", ["x4plus:tiny", "general-x4v3:tiny"])
def test_half_precision(weights: str, elsewhere: Path) -> None:
    path = program_of(weights, "webgpu", "fp16")
    request = ExportRequest("webgpu", weights, "fp16")
    with Program.load(path) as program:
        rows = RECIPE.check(program, request)
        assert sum(row.name.startswith("pixels") for row in rows) == (5 if weights == "general-x4v3:tiny" else 0)
        for row in rows:
            assert np.isfinite(row.actual).all() and abs(row.actual - row.golden).max() <= row.tolerance.atol, row.name


def test_check_on_the_cpu(elsewhere: Path) -> None:
    path = program_of("general-x4v3:tiny", "xnnpack")
    with Program.load(path) as program:
        rows = RECIPE.check(program, ExportRequest("xnnpack", "general-x4v3:tiny"))
    assert {"picture", "picture.rmse"} <= {row.name for row in rows}
    for row in rows:
        assert abs(row.actual - row.golden).max() <= row.tolerance.atol, row.name
    metadata = runner.Upscaler(Nearest(), assets_of(path)).metadata
    assert (metadata["scale"], metadata["radius"], metadata["variant"]) == (4, 3, "general-x4v3")
    assert not metadata["is_real"]


@needs_package
@needs_pictures
def test_real_weights_on_webgpu(elsewhere: Path) -> None:
    """The accuracy that the recipe states, ncnn's own output included where its library runs."""
    path = program_of("animevideov3", "webgpu")
    with Program.load(path) as program:
        for row in RECIPE.check(program, ExportRequest("webgpu", "animevideov3")):
            assert abs(row.actual - row.golden).max() <= row.tolerance.atol, row.name


def zoo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from zoo.cli import main; main()", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environ(), capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )


def test_mistakes_are_told_before_the_export(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "empty").mkdir()
    for arguments, part in (
        (("b.png", "-o", "c.png"), "b.png"),
        (("a.png", "-o", "c.bmp"), "ending"),
        (("a.png", "-o", "c.png", "--tile", "x"), "--tile"),
        (("a.png", "-o", "c.png", "--variant", "x9"), "x4plus-anime"),
        (("a.png", "-o", "c.png", "--denoise", "2"), "0"),
        (("empty", "-o", "out"), "no pictures"),
    ):
        one_error_line(zoo("run", "real-esrgan", *arguments, cwd=tmp_path), part)
    assert not (tmp_path / "out").exists()


def test_folder_run(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    Image.new("RGB", (7, 5), (200, 10, 10)).save(source / "a.png")
    (source / "b.png").write_bytes(b"broken")
    arguments = ("in", "-o", "large", "--weights", "tiny", "--variant", "x2plus", "--runtime", "direct", "--tile", "2")
    done = zoo("run", "real-esrgan", *arguments, cwd=tmp_path)
    assert done.returncode == 1 and "b.png" in done.stderr and "1 of 2" in done.stderr, done.stderr
    assert os.listdir(tmp_path / "large") == ["a.png"] and Image.open(tmp_path / "large" / "a.png").size == (14, 10)
    assert "NOTICE" in done.stderr and "MEANINGLESS" in done.stderr
