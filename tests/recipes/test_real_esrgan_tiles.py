"""Real-ESRGAN: receptive fields, tiles and resampling (E1).

pytest tests/recipes/test_real_esrgan_tiles.py
"""

from __future__ import annotations

import dataclasses
import io
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from real_esrgan_support import eager, limits_of
from rich.console import Console

import zoo.console
from recipes.real_esrgan import build, resample, runner, tiling
from recipes.real_esrgan.variants import VARIANTS
from recipes.recipe import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("weights", ["x4plus:tiny", "x2plus:tiny", "general-x4v3:tiny"])
def test_radius_is_how_far_the_network_sees(weights: str) -> None:
    loaded, run = eager(weights, torch.float64)
    radius, scale = loaded.architecture.radius, loaded.architecture.scale
    size, edge = 4 * radius + 16, 2 * radius + 8
    rng = np.random.default_rng(0)
    plain = rng.random((1, 3, size, 8))
    below, above = plain.copy(), plain.copy()
    below[:, :, edge:] += 1.0
    above[:, :, :edge] += 1.0
    rows = [np.flatnonzero(abs(run(other) - run(plain)).max((0, 1, 3))) for other in (below, above)]
    seen = max(edge - rows[0][0] // scale, rows[1][-1] // scale - (edge - 1))
    assert radius - loaded.architecture.multiple < seen <= radius


def test_radii_of_the_published_networks() -> None:
    radii = {name: variant.architecture.radius for name, variant in VARIANTS.items()}
    assert radii == {"x4plus": 349, "x4plus-anime": 94, "x2plus": 698, "animevideov3": 18, "general-x4v3": 34}


SIZES = [(1, 1), (3, 5), (15, 17), (16, 16), (17, 17), (31, 33), (101, 67)]
NETWORKS = ["x4plus:tiny", "x2plus:tiny", "general-x4v3:tiny"]
CASES = [*((weights, size) for weights in NETWORKS for size in SIZES), ("general-x4v3:tiny", (323, 264))]


@pytest.mark.parametrize(("weights", "size"), CASES)
def test_e1_tiled_equals_untiled(weights: str, size: tuple[int, int]) -> None:
    loaded, run = eager(weights, torch.float64)
    limits = limits_of(loaded.architecture)
    picture = np.random.default_rng(0).random((3, *size))

    def enlarge(tile: int, overlap: int | None = None) -> np.ndarray:
        layout, steps = tiling.plan(*size, tile, limits, overlap), []
        bands = tiling.upscale(
            lambda y0, y1, x0, x1: picture[:, y0:y1, x0:x1], tiling.in_turn(run), layout, limits,
            lambda rows, columns: np.empty((rows, columns, 3)), lambda part, out: np.copyto(out, part),
            lambda: steps.append(1),
        )  # fmt: skip
        result = np.concatenate(list(bands))
        assert len(steps) == layout.tiles and layout.exact == (layout.tiles == 1 or layout.overlap >= limits.radius)
        return result

    whole = enlarge(0)
    assert whole.shape == (limits.scale * size[0], limits.scale * size[1], 3)
    for tile in (16, 5) if max(size) < 40 else (16 if max(size) < 200 else 64,):
        np.testing.assert_allclose(enlarge(tile, limits.radius), whole, rtol=0, atol=1e-12)
    assert abs(enlarge(16) - whole).max() < 1e-2  # its own choice of overlap: near, where it does not cover


def test_tiles_are_of_one_size_and_cover_once() -> None:
    limits = limits_of(VARIANTS["animevideov3"].architecture)
    layout = tiling.plan(3000, 4000, 476, limits)
    # As many as of 512 × 512, and no more of the picture twice than the 36 of each seam and what does not divide.
    assert (layout.rows, layout.columns, layout.overlap, layout.exact) == (460, 477, 18, True)
    assert (len(layout.tops), len(layout.lefts)) == (7, 9)
    for starts, side, size in ((layout.tops, layout.rows, 3000), (layout.lefts, layout.columns, 4000)):
        assert len(starts) * (side - 36) + 36 - size < len(starts)
        kept = list(tiling._kept(starts, side, 18))
        assert [start for _, start, _ in kept] == [0, *(end for _, _, end in kept[:-1])] and kept[-1][2] == size
        assert all(start == 0 or first - start >= 18 for start, first, _ in kept)
    with pytest.raises(ValueError, match="larger"):
        tiling.plan(3000, 4000, 0, limits)


def test_a_tile_is_begun_before_the_one_before_is_waited_for() -> None:
    """And no more than that: what is in flight is memory."""
    limits = limits_of(VARIANTS["animevideov3"].architecture)
    layout = tiling.plan(40, 100, 30, limits, overlap=2)
    assert (len(layout.tops), len(layout.lefts)) == (2, 4)
    events: list[str] = []
    count = 0

    def begin(window: np.ndarray) -> Callable[[], np.ndarray]:
        nonlocal count
        name, count = str(count), count + 1
        events.append(f"begin {name}")

        def wait() -> np.ndarray:
            events.append(f"wait {name}")
            return window[0].transpose(1, 2, 0).repeat(4, 0).repeat(4, 1)

        return wait

    alive: list[weakref.ref[np.ndarray]] = []

    def empty(rows: int, columns: int) -> np.ndarray:
        assert not any(band() is not None for band in alive)
        band = np.empty((rows, columns, 3), np.float32)
        alive.append(weakref.ref(band))
        return band

    picture = np.random.default_rng(0).random((3, 40, 100), dtype=np.float32)
    bands = tiling.upscale(
        lambda y0, y1, x0, x1: picture[:, y0:y1, x0:x1], begin, layout, limits, empty,
        lambda part, out: np.copyto(out, part),
    )  # fmt: skip
    made = [next(bands).copy()]
    assert events == ["begin 0", *(what for n in range(4) for what in (f"begin {n + 1}", f"wait {n}"))]
    made.append(next(bands).copy())
    assert events[-3:] == ["begin 7", "wait 6", "wait 7"] and len(alive) == 2
    np.testing.assert_array_equal(np.concatenate(made), picture.transpose(1, 2, 0).repeat(4, 0).repeat(4, 1))


def test_automatic_tile_keeps_to_its_budget() -> None:
    for variant in VARIANTS.values():
        limits = limits_of(variant.architecture)
        for budget in (2**24, 2**27, 2**31):
            layout = tiling.plan(3000, 4000, tiling.auto_tile(limits, budget), limits)
            assert max(layout.rows, layout.columns) <= limits.max_side
            assert layout.exact == (limits.radius <= layout.overlap)
            if budget > 2**24:
                assert layout.rows * layout.columns * limits.pixel_bytes <= min(budget, tiling.MAX_BUDGET)
                assert 4 * layout.overlap <= layout.rows + 2


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_results_fit_in_the_budget_too(dtype: str) -> None:
    """Float32, or an int32 for a byte, whatever the network computes in."""
    for variant in VARIANTS.values():
        limits = build.limits_of(variant.architecture, "webgpu", dtype)
        layout = tiling.plan(3000, 4000, tiling.auto_tile(limits, 2**27), limits)
        assert layout.rows * layout.columns * limits.scale**2 * 3 * 4 <= 2**27


@pytest.mark.parametrize("sizes", [(40, 60, 20, 30), (40, 44, 30, 33), (7, 5, 28, 20), (1, 1, 4, 4), (300, 8, 225, 6)])
def test_resampling_is_pillows_lanczos(sizes: tuple[int, int, int, int]) -> None:
    height, width, rows, columns = sizes
    plane = np.random.default_rng(0).random((height, width), dtype=np.float32)
    expected = np.asarray(Image.fromarray(plane).resize((columns, rows), Image.Resampling.LANCZOS))
    bands = iter([plane[top : top + 13, :, None] for top in range(0, height, 13)])
    made = list(resample.Resizer(*sizes).stream(bands))
    np.testing.assert_allclose(np.concatenate(made)[..., 0], expected, rtol=0, atol=1e-6)


def test_tiles_that_do_not_cover_say_so_and_how_long_it_takes(
    tmp_path: Path, upscaler: runner.Upscaler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (100, 90)).save(tmp_path / "in.png")
    monkeypatch.setattr(zoo.console, "LINE_EVERY", 0)
    upscaler.file(tmp_path / "in.png", tmp_path / "out.png")
    said = capsys.readouterr().err
    assert "overlap" not in said and "in.png: tile 1 of 36, " in said and " left" in said
    upscaler.limits = dataclasses.replace(upscaler.limits, radius=100)
    for _ in range(2):
        upscaler.file(tmp_path / "in.png", tmp_path / "out.png")
    # Once, not for every picture of a folder.
    said = capsys.readouterr().err
    assert said.count("tiles overlap by 32 pixels and the network sees 100: the result is not quite") == 1
    upscaler._tile = 0
    with pytest.raises(UserError, match="--tile 0: a window of 600×20 is larger"):
        Image.new("L", (600, 20)).save(tmp_path / "wide.png")
        upscaler.file(tmp_path / "wide.png", tmp_path / "out.png")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(zoo.console, "stderr", lambda: console)
    with zoo.console.progress("a[b].png", 3, "tile") as advance:
        for _ in range(3):
            advance()
    assert "a[b].png" in console.file.getvalue() and "3/3" in console.file.getvalue()
