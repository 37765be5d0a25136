"""Pictures from files as models take them: RGB, 8 bits, upright; and the sample pictures of scikit-image. No torch.

Any kind that Pillow reads: grey, palette, CMYK, Lab, 16 bits (the high 8 are kept), alpha (laid on white, as a viewer
shows it, so that a colour hidden under alpha 0 is never seen), EXIF orientation (applied). Of several frames the first
is taken.
"""

from __future__ import annotations

import importlib.util
import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps

from recipes.recipe import UserError

SAMPLE = "sample:"  # `sample:astronaut` is a picture that scikit-image ships
# What Pillow's decoders raise for a damaged file.
_DAMAGE = (
    OSError, SyntaxError, ValueError, TypeError, EOFError, IndexError, KeyError, OverflowError, NotImplementedError,
    struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip


def read_rgb(path: Path) -> np.ndarray:
    """The picture in a file, uint8 `[H, W, 3]`.

    Raises `UserError` for a file that is missing, damaged, not a picture, or of more pixels than Pillow decodes (179
    million, its guard against files that unpack to more than the memory).
    """
    with opened(path) as image:
        image.load()  # what stands behind the pixels in the file, like a PNG's EXIF, is known after this
        ImageOps.exif_transpose(image, in_place=True)
        return np.array(_rgb(image, path))


def _rgb(image: Image.Image, path: Path) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Image.fromarray(_deep_grey(image, path)).convert("RGB")
    if image.mode in ("CMYK", "LAB"):
        return to_srgb(image, image.info.get("icc_profile"))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _deep_grey(image: Image.Image, path: Path) -> np.ndarray:
    """Grey of more than 8 bits as uint8: integers up to 65535, floats up to 1."""
    values = np.asarray(image).astype(np.float32)
    top = 1.0 if image.mode == "F" else 65535.0
    if values.min(initial=0) < 0 or values.max(initial=0) > top or np.isnan(values).any():
        raise UserError(f"{path}: values of a {image.mode!r} picture are expected from 0 to {top:g}")
    grey: np.ndarray = np.rint(values * (255 / top)).astype(np.uint8)
    return grey


def as_square(picture: np.ndarray, side: int, resample: Image.Resampling) -> np.ndarray:
    """A picture uint8 `[H, W, 3]` as encoders take it: uint8 `[1, side, side, 3]`, stretched to the square.

    With antialiasing on 8 bits, as image processors resize.
    """
    return np.asarray(Image.fromarray(picture).resize((side, side), resample))[None]


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """A picture file in Pillow; what is wrong with it, then or in the block, becomes a `UserError` of one line."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of large pictures, which are fine here, and refuses twice as large ones.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                _fix_grey_key(image)
                yield image
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except Image.UnidentifiedImageError:
        raise UserError(f"{path} is not a picture that can be read") from None
    except _DAMAGE as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"cannot read {path}: {reason}") from error


def _fix_grey_key(image: Image.Image) -> None:
    """Pillow spreads grey of 2 and 4 bits over 8, but not the grey value that a PNG names as transparent."""
    tiles, key = getattr(image, "tile", ()), image.info.get("transparency")
    if image.format == "PNG" and tiles and isinstance(key, int):
        image.info["transparency"] = key * {"L;2": 85, "L;4": 17}.get(str(tiles[0][3]), 1)


def to_srgb(image: Image.Image, icc: bytes | None) -> Image.Image:
    """CMYK or Lab to sRGB, by the picture's own profile where it has one that works."""
    if icc is not None:
        try:
            source, target = ImageCms.ImageCmsProfile(io.BytesIO(icc)), ImageCms.createProfile("sRGB")
            converted = ImageCms.profileToProfile(image, source, target, outputMode="RGB")
            if converted is not None:
                return converted
        except (ImageCms.PyCMSError, OSError, ValueError):
            pass
    return image.convert("RGB")


def sample_path(text: str) -> Path:
    """`sample:NAME` as the path of a picture in scikit-image, anything else as the path that it is."""
    if not text.startswith(SAMPLE):
        return Path(text).expanduser()
    spec = importlib.util.find_spec("skimage")  # found, not imported
    if spec is None or spec.origin is None:
        raise UserError(f"{text}: sample pictures come with scikit-image: pip install scikit-image")
    folder = Path(spec.origin).parent / "data"
    for ending in (".png", ".jpg"):
        if (path := folder / (text.removeprefix(SAMPLE) + ending)).is_file():
            return path
    names = sorted(path.stem for path in folder.iterdir() if path.suffix in (".png", ".jpg"))
    raise UserError(f"scikit-image ships no picture {text.removeprefix(SAMPLE)!r}: choose one of {', '.join(names)}")
