"""Real-ESRGAN: whole programs and runs of the command, on small networks.

pytest tests/recipes/test_real_esrgan.py
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from real_esrgan_support import Nearest, eager, needs_package, needs_pictures, program_of

from backend.runtime.device_tensor import DeviceTensor
from recipes.real_esrgan import RECIPE, runner, sinks
from recipes.real_esrgan.networks import Pixels, Upscale
from recipes.real_esrgan.pictures import NOT_NUMBERS, Picture
from recipes.real_esrgan.variants import VARIANTS
from recipes.recipe import ExportRequest, UserError
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


class Bright(torch.nn.Module):
    """Leaves pixels alone, but for black: that becomes no number."""

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return torch.where(picture > 0, picture, torch.inf)


class Watched:
    """A program that keeps its results on the GPU, and which of them are still held."""

    keeps_on_device = True

    def __init__(self, program: Program, methods: tuple[str, ...]) -> None:
        self._program, self.methods = program, methods
        self.started: list[list[weakref.ref[DeviceTensor]]] = []

    def start(self, method: str, *inputs: np.ndarray, fetch: Sequence[int]) -> list[DeviceTensor]:
        tensors = self._program.start(method, *inputs, fetch=fetch)
        self.started.append([weakref.ref(tensor) for tensor in tensors])
        return tensors

    def run(self, method: str, *inputs: np.ndarray) -> list[np.ndarray]:
        raise AssertionError("nothing is waited for at once")

    def held(self) -> int:
        tensors = [ref() for refs in self.started for ref in refs]
        return sum(tensor is not None and tensor._buffer is not None for tensor in tensors)


@pytest.fixture(scope="module")
def bright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of both methods for windows of 16 × 17, with its assets: pictures of 28 × 30 are four of them."""
    path = tmp_path_factory.mktemp("bright") / "bright.pte"
    example = (torch.zeros(1, 3, 16, 17),)
    upscale = Upscale(Bright(), torch.float32)
    assert lower(path, {"upscale": Method(upscale, example), "pixels": Method(Pixels(upscale), example)}).refusals == []
    assets_of(path).mkdir()
    (assets_of(path) / "recipe.json").write_text(
        '{"scale": 1, "multiple": 1, "radius": 2, "max_side": 512, "pixel_bytes": 256, "is_real": true}'
    )
    return path


def noise(mode: str) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(1, 256, (28, 30, 3), np.uint8)).convert(mode)


@pytest.mark.parametrize(
    ("mode", "methods"), [("RGB", ("upscale", "pixels")), ("RGB", ("upscale",)), ("L", ("upscale",))]
)
def test_no_number_while_the_next_tile_is_under_way(
    mode: str, methods: tuple[str, ...], bright: Path, elsewhere: Path
) -> None:
    """One error, the old picture, no memory of the tile that had begun; and the next picture is right."""
    good = noise(mode)
    good.save("good.png")
    spoilt = good.copy()
    spoilt.putpixel((28, 3), (0, 0, 0) if mode == "RGB" else 0)  # of the second tile alone
    spoilt.save("spoilt.png")
    Path("out.png").write_bytes(b"the old picture")
    with Program.load(bright, "direct") as program:
        watched = Watched(program, methods)
        upscaler = runner.Upscaler(watched, assets_of(bright), "16")
        said = None
        try:
            upscaler.file(Path("spoilt.png"), Path("out.png"))
        except UserError as error:  # not pytest.raises, which holds the frames and all that is in them
            said = str(error)
        assert said == NOT_NUMBERS
        assert len(watched.started) == 3 and watched.held() == 0
        assert sorted(os.listdir()) == ["good.png", "out.png", "spoilt.png"]
        assert Path("out.png").read_bytes() == b"the old picture"
        upscaler.file(Path("good.png"), Path("out.png"))
        assert len(watched.started) == 7 and watched.held() == 0
    np.testing.assert_array_equal(np.asarray(Image.open("out.png")), np.asarray(good))


def test_bands_that_are_given_up(bright: Path) -> None:
    """Closed by who takes them, or let go: the tile that had begun is let go too, and the next picture is right."""
    picture = Picture(np.asarray(noise("RGB")))
    with Program.load(bright, "direct") as program:
        watched = Watched(program, ("upscale", "pixels"))
        upscaler = runner.Upscaler(watched, assets_of(bright), "16")
        for bands, begun in ((0, 0), (1, 3), (2, 4)):
            watched.started.clear()
            made = runner.enlarge(watched, picture, upscaler.layout(picture), upscaler.limits)
            for _ in range(bands):
                next(made)
            assert len(watched.started) == begun and (watched.held() > 0) == (bands == 1)
            if bands == 1:
                made.close()
                assert next(made, None) is None
            del made
            assert watched.held() == 0 and len(watched.started) == begun
        made = runner.enlarge(watched, picture, upscaler.layout(picture), upscaler.limits)
        np.testing.assert_array_equal(np.concatenate(list(made)), picture.colour)


def test_ctrl_c_between_bands_leaves_nothing(bright: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise("RGB").save("in.png")
    Path("out.png").write_bytes(b"the old picture")
    written = 0

    def interrupted(png: Any, rows: np.ndarray) -> None:
        nonlocal written
        written += 1
        raise KeyboardInterrupt

    monkeypatch.setattr(sinks._Png, "write", interrupted)
    with Program.load(bright, "direct") as program:
        watched = Watched(program, ("upscale", "pixels"))
        with contextlib.suppress(KeyboardInterrupt):
            runner.Upscaler(watched, assets_of(bright), "16").file(Path("in.png"), Path("out.png"))
        assert written == 1 and len(watched.started) == 3 and watched.held() == 0
    assert sorted(os.listdir()) == ["in.png", "out.png"] and Path("out.png").read_bytes() == b"the old picture"


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
