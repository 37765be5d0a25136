"""Pictures as models take them: pytest tests/cli/test_pictures.py"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recipes.recipe import UserError
from zoo.pictures import read_rgb, sample_path

GREY = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5


def saved(path: Path, image: Image.Image, **options: object) -> np.ndarray:
    image.save(path, **options)  # type: ignore[arg-type]
    return read_rgb(path)


def test_kinds_of_pictures(tmp_path: Path) -> None:
    """Grey, palette, one bit, 16 bits and float come out as RGB of 8 bits."""
    grey = Image.fromarray(GREY)
    wanted = np.repeat(GREY[..., None], 3, 2)
    np.testing.assert_array_equal(saved(tmp_path / "l.png", grey), wanted)
    np.testing.assert_array_equal(saved(tmp_path / "p.png", grey.convert("P")), wanted)
    np.testing.assert_array_equal(saved(tmp_path / "rgb.png", grey.convert("RGB")), wanted)
    assert set(np.unique(saved(tmp_path / "1.png", grey.convert("1")))) <= {0, 255}
    deep = Image.fromarray(GREY.astype(np.uint16) * 257)
    np.testing.assert_array_equal(saved(tmp_path / "16.png", deep), wanted)
    np.testing.assert_array_equal(saved(tmp_path / "f.tiff", Image.fromarray(GREY.astype(np.float32) / 255)), wanted)
    cmyk = saved(tmp_path / "cmyk.tiff", Image.new("CMYK", (4, 3), (0, 255, 255, 0)))
    assert cmyk.shape == (3, 4, 3) and cmyk[0, 0, 0] > 200 and cmyk[0, 0, 1] < 60
    with pytest.raises(UserError, match="expected from 0 to 1"):
        saved(tmp_path / "big.tiff", Image.fromarray(GREY.astype(np.float32)))


def test_alpha_is_laid_on_white(tmp_path: Path) -> None:
    pixels = np.zeros((2, 3, 4), np.uint8)
    pixels[..., 0] = 255
    pixels[0, :, 3] = (0, 128, 255)  # red under alpha: hidden, half, whole
    found = saved(tmp_path / "a.png", Image.fromarray(pixels))
    assert found[0, 0].tolist() == [255, 255, 255] and found[0, 2].tolist() == [255, 0, 0]
    assert found[0, 1, 0] == 255 and abs(int(found[0, 1, 1]) - 127) <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = saved(tmp_path / "e.png", Image.fromarray(GREY), exif=exif)
    sides = (8, 6) if orientation >= 5 else (6, 8)
    assert found.shape[:2] == sides
    corner = {1: 0, 2: 7, 3: 47, 4: 40, 5: 0, 6: 40, 7: 47, 8: 7}[orientation]  # which pixel is at the top left
    assert found[0, 0, 0] == GREY.reshape(-1)[corner]


def test_one_pixel_and_a_hundred_million(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert saved(tmp_path / "one.jpg", Image.new("RGB", (1, 1), (9, 9, 9))).shape == (1, 1, 3)
    assert saved(tmp_path / "large.png", Image.new("L", (12000, 9000), 3), compress_level=1).shape == (9000, 12000, 3)
    assert not recwarn.list
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    with pytest.raises(UserError, match=r"cannot read .*bomb\.png"):
        read_rgb(tmp_path / "bomb.png")


def test_what_is_no_picture_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_rgb(tmp_path / "none.png")
    (tmp_path / "text.png").write_text("not a picture")
    with pytest.raises(UserError, match="not a picture that can be read"):
        read_rgb(tmp_path / "text.png")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:2000])
    with pytest.raises(UserError, match=r"cannot read .*cut\.jpg") as caught:
        read_rgb(tmp_path / "cut.jpg")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("skimage") is None, reason="no scikit-image")
def test_samples() -> None:
    assert read_rgb(sample_path("sample:astronaut")).shape == (512, 512, 3)
    with pytest.raises(UserError, match=r"choose one of .*astronaut"):
        sample_path("sample:nothing")
