"""Real-ESRGAN: kinds of pictures in and out (E2).

pytest tests/recipes/test_real_esrgan_pictures.py
"""

from __future__ import annotations

import io
import os
import struct
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms
from real_esrgan_support import enlarged, write_png16

from recipes.real_esrgan import pictures, runner, sinks
from recipes.recipe import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "LA"])
@pytest.mark.parametrize("size", [(1, 1), (33, 20)])
def test_e2_kinds_of_pictures(mode: str, size: tuple[int, int], tmp_path: Path, upscaler: runner.Upscaler) -> None:
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
def test_e2_hidden_colour_never_bleeds(dtype: type, tmp_path: Path) -> None:
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


class Blur:
    """A program whose pixels see 9×9 others, as a network's do."""

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        height, width = arrays[0].shape[2:]
        padded = np.pad(arrays[0], ((0, 0), (0, 0), (4, 4), (4, 4)), mode="edge")
        parts = [padded[:, :, y : y + height, x : x + width] for y in range(9) for x in range(9)]
        return [np.mean(parts, 0).astype(np.float32).repeat(4, 2).repeat(4, 3)]


@pytest.mark.parametrize("scale", [4, 3, 2])
def test_e2_hidden_red_stays_hidden(scale: int, tmp_path: Path, upscaler: runner.Upscaler) -> None:
    """Red under alpha 0 around blue: not through the network, not through Lanczos, not laid on white."""
    pixels = np.zeros((40, 40, 4), np.uint8)
    pixels[..., 0] = 255
    pixels[12:28, 12:28] = (0, 0, 255, 255)
    Image.fromarray(pixels, "RGBA").save(tmp_path / "in.png")
    upscaler._program = Blur()
    result = np.asarray(enlarged(upscaler, tmp_path / "in.png", scale=scale))
    assert result[..., 0].max() <= 1 and result[..., 2].min() >= 254
    assert result[20 * scale, 20 * scale, 3] == 255 and result[2 * scale, 2 * scale, 3] == 0
    on_white = np.asarray(enlarged(upscaler, tmp_path / "in.png", "out.jpg", scale)).astype(int)
    assert (on_white[..., 0] <= on_white[..., 1] + 8).all()  # grey or blue, never red; JPEG rounds


def test_e2_16_bit_ramp(tmp_path: Path, upscaler: runner.Upscaler) -> None:
    """Every step of 16 bits is another value in the result."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256, 1)
    write_png16(tmp_path / "in.png", ramp)
    upscaler.file(tmp_path / "in.png", tmp_path / "out.png")
    colour = pictures.open_picture(tmp_path / "out.png").colour
    np.testing.assert_array_equal(colour, ramp.repeat(4, 0).repeat(4, 1))


def png(bits: int, colour: int, row: bytes, width: int, key: bytes) -> bytes:
    """A PNG of two equal rows with a colour that stands for nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, 2, bits, colour, 0, 0, 0)
    data = zlib.compress((b"\0" + row) * 2)
    chunks = ((b"IHDR", head), (b"tRNS", key), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*item) for item in chunks)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("low", [True, False])
def test_grey_with_a_transparent_value(bits: int, low: bool, tmp_path: Path, upscaler: runner.Upscaler) -> None:
    top = 2**bits - 1
    row = struct.pack(">8H", *[0, top] * 4) if bits == 16 else sum(top << bits * n for n in (0, 2, 4, 6)).to_bytes(bits)
    (tmp_path / "in.png").write_bytes(png(bits, 0, row, 8, struct.pack(">H", 0 if low else top)))
    picture = pictures.open_picture(tmp_path / "in.png")
    most = 65535 if bits == 16 else 255
    assert picture.alpha is not None and picture.limit == most
    assert picture.alpha[0, :2, 0].tolist() == ([0, most] if low else [most, 0])
    assert (picture.colour == (most if low else 0)).all()  # where hidden, what is beside it
    upscaler.file(tmp_path / "in.png", tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as image:
        assert image.size == (32, 8)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_transparent_colour(bits: int, tmp_path: Path) -> None:
    """Compared in all bits: two reds apart in the low byte only are not the same colour."""
    row = np.array([[10, 20, 30], [10, 20, 31], [10 + 256 * (bits == 16), 20, 30]], f">u{bits // 8}")
    (tmp_path / "in.png").write_bytes(png(bits, 2, row.tobytes(), 3, struct.pack(">3H", 10, 20, 30)))
    picture = pictures.open_picture(tmp_path / "in.png")
    assert picture.alpha is not None and picture.alpha[0, :, 0].tolist() == (
        [0, 255, 0] if bits == 8 else [0, 65535, 65535]
    )
    assert picture.colour[0, 1].tolist() == [10, 20, 31]


def test_palette_with_transparency(tmp_path: Path, upscaler: runner.Upscaler) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(0, (0, 0, 4, 8))
    image.save(tmp_path / "in.png", transparency=0)
    result = np.asarray(enlarged(upscaler, tmp_path / "in.png"))
    assert result.shape == (32, 32, 4) and (result[..., :3] == (0, 0, 255)).all()  # no red anywhere
    assert (result[:, :8, 3] < 32).all() and (result[:, -8:, 3] > 223).all()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_e2_16_bits_are_kept(channels: int, tmp_path: Path, upscaler: runner.Upscaler) -> None:
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
def test_e2_exif_orientation(orientation: int, deep: bool, tmp_path: Path, upscaler: runner.Upscaler) -> None:
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


def parts(data: bytes) -> list[tuple[bytes, bytes]]:
    """The chunks of a PNG, by their kinds."""
    found, at = [], 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += length + 12
    return found


def decoded(path: Path, channels: int, deep: bool) -> np.ndarray:
    """`[H, W, channels]` of a PNG by Pillow, which keeps 8 of 16 bits: the bytes of one or two channels of 16 bits are
    those of twice as many of 8, and are read as such."""
    data = path.read_bytes()
    if deep and channels > 2:
        with Image.open(path) as image:
            deep_colour = pictures._deep_colour(image, path)
        assert deep_colour is not None
        return deep_colour
    if deep:
        head = b"IHDR" + data[16:24] + bytes([8, {1: 4, 2: 6}[channels]]) + data[26:29]
        data = data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    return pixels.view(">u2" if deep else "u1").reshape(*pixels.shape[:2], channels)


@pytest.mark.parametrize("width", [1, 7, 700])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_png_in_pieces_is_one_stream(
    width: int, channels: int, dtype: type[np.integer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose checksum holds, and which finds again what an earlier piece held: rows that repeat cost next to nothing."""
    rows = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (20, width, channels), dtype, endpoint=True)
    pixels = np.concatenate([rows[np.random.default_rng(n).permutation(20)] for n in range(10)])
    line, deep = width * channels * rows.itemsize, dtype == np.uint16
    for piece in (1, 3 * line, 2**18):
        monkeypatch.setattr(sinks, "_PIECE", piece)
        path = tmp_path / f"{piece}.png"
        with sinks.open_sink(path, width, len(pixels), channels, deep, None) as sink:
            sink.write(pixels[:61])
            sink.write(pixels[61:])
        stream = b"".join(body for kind, body in parts(path.read_bytes()) if kind == b"IDAT")
        inflate = zlib.decompressobj()
        assert len(inflate.decompress(stream)) == len(pixels) * (1 + line)
        assert inflate.eof and not inflate.unused_data
        np.testing.assert_array_equal(decoded(path, channels, deep), pixels)
    if line == 700:
        assert (tmp_path / f"{3 * line}.png").stat().st_size < 1.2 * (tmp_path / f"{2**18}.png").stat().st_size


@pytest.mark.parametrize("channels", [2, 3])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_png_is_the_same_from_any_number_of_threads(
    channels: int, dtype: type[np.integer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ramp = np.arange(90 * 70 * channels).reshape(90, 70, channels).astype(dtype)
    monkeypatch.setattr(sinks, "_PIECE", 4 * ramp[0].nbytes)
    made = set()
    for threads in (1, 2, 7):
        with ThreadPoolExecutor(threads) as pool:
            monkeypatch.setattr(sinks, "workers", lambda pool=pool: pool)
            with sinks.open_sink(tmp_path / "out.png", 70, 90, channels, dtype == np.uint16, None) as sink:
                sink.write(ramp)
        made.add((tmp_path / "out.png").read_bytes())
    assert len(made) == 1
    np.testing.assert_array_equal(decoded(tmp_path / "out.png", channels, dtype == np.uint16), ramp)


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


def test_one_band_is_held_at_a_time(tmp_path: Path, upscaler: runner.Upscaler, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[np.ndarray]] = []
    plain = pictures.Picture.empty

    def empty(picture: pictures.Picture, rows: int, columns: int) -> np.ndarray:
        assert not any(band() is not None for band in made)
        band = plain(picture, rows, columns)
        made.append(weakref.ref(band))
        return band

    monkeypatch.setattr(pictures.Picture, "empty", empty)
    Image.effect_noise((20, 50), 60).convert("RGB").save(tmp_path / "in.png")
    upscaler.file(tmp_path / "in.png", tmp_path / "out.png")
    assert len(made) == 3


class Spoilt:
    """A program whose last tile holds one value that is no number, told as `pixels` tells it or as it is."""

    def __init__(self, wrong: float, methods: tuple[str, ...]) -> None:
        self.wrong, self.methods, self.called = wrong, methods, 0

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        self.called += 1
        result = arrays[0].repeat(4, 2).repeat(4, 3)
        if method == "pixels":
            return [np.rint(255 * result).astype(np.uint8).transpose(0, 2, 3, 1), np.array(self.called == 4)]
        if self.called == 4:
            result[0, 2, -1, -1] = self.wrong
        return [result]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("methods", [("upscale",), ("upscale", "pixels")])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_no_number_is_no_pixel(
    wrong: float, methods: tuple[str, ...], mode: str, tmp_path: Path, upscaler: runner.Upscaler
) -> None:
    Image.effect_noise((30, 28), 60).convert(mode).save(tmp_path / "in.png")
    upscaler._program = Spoilt(wrong, methods)
    with pytest.raises(UserError, match="pixels that are not numbers"):
        upscaler.file(tmp_path / "in.png", tmp_path / "out.png")
    assert upscaler._program.called == 4 and sorted(os.listdir(tmp_path)) == ["in.png", "nearest.assets"]


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
