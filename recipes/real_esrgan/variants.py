"""The published networks by name, what their architectures need of a picture, and the form of `--weights`.

Read without torch. A weights argument is `[VARIANT[@DENOISE]:]SOURCE` or `VARIANT[@DENOISE]`, which is short for
`VARIANT:auto`; SOURCE is auto, synthetic, tiny, a path or a hub id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from recipes.recipe import UserError

DEFAULT = "x4plus"
# The published checkpoints, byte for byte, under their own file names.
HUB_ID = "nateraw/real-esrgan"
SEEDED = ("synthetic", "tiny")  # sources that need no file


@dataclass(frozen=True)
class Architecture:
    """`rrdb`: `blocks` residual-in-residual dense blocks. `compact`: `blocks` convolutions between first and last."""

    kind: Literal["rrdb", "compact"]
    blocks: int
    scale: int = 4
    features: int = 64
    growth: int = 32

    @property
    def multiple(self) -> int:
        """Height and width must be multiples of this: an rrdb of a smaller scale folds pixels into channels first."""
        return 4 // self.scale if self.kind == "rrdb" else 1

    @property
    def radius(self) -> int:
        """How far away, in pixels of the input, one may be and still count for an output: traced layer by layer."""
        size = 64  # of a square of input pixels; its outputs are traced back to the inputs that they see
        low, high = 0, size * self.scale - 1
        for layer in reversed(self._layers()):
            if layer == "conv":
                low, high = low - 1, high + 1
            elif layer == "fold":
                low, high = low * self.multiple, (high + 1) * self.multiple - 1
            else:  # "up N": each pixel becomes N × N
                low, high = (edge // int(layer[3:]) for edge in (low, high))
        return max(-low, high - (size - 1))

    def _layers(self) -> list[str]:
        if self.kind == "compact":
            return ["conv"] * (self.blocks + 2) + [f"up {self.scale}"]
        # first, 3 × 5 a block, and one after them; two after an enlargement, two more
        return ["fold", *["conv"] * (15 * self.blocks + 2), "up 2", "conv", "up 2", *["conv"] * 3]

    @property
    def pixel_floats(self) -> int:
        """Values of the network's largest intermediate for each pixel of its input."""
        if self.kind == "rrdb":
            widest = self.features + 4 * self.growth  # a dense block's last input, before the picture grows
            return max(self.features * self.scale**2, widest // self.multiple**2)
        return max(self.features, 3 * self.scale**2)


@dataclass(frozen=True)
class Variant:
    """`files`: names of its official checkpoint, of the weaker denoiser that it may be blended with, and of the
    parts of ncnn pairs (`NAME.param`, `NAME.bin`) in packages."""

    architecture: Architecture
    summary: str
    official: str
    weak: str | None = None
    ncnn: tuple[str, ...] = ()


VARIANTS: Mapping[str, Variant] = {
    "x4plus": Variant(
        Architecture("rrdb", 23),
        "photographs, ×4",
        "RealESRGAN_x4plus",
        ncnn=("REALESRGAN_X4PLUS_UP4X", "realesrgan-x4plus"),
    ),
    "x4plus-anime": Variant(
        Architecture("rrdb", 6),
        "drawings, ×4",
        "RealESRGAN_x4plus_anime_6B",
        ncnn=("REALESRGAN_X4PLUSANIME_UP4X", "realesrgan-x4plus-anime"),
    ),
    "x2plus": Variant(Architecture("rrdb", 23, scale=2), "photographs, ×2", "RealESRGAN_x2plus"),
    "animevideov3": Variant(
        Architecture("compact", 16),
        "drawn video, ×4, small and fast",
        "realesr-animevideov3",
        ncnn=("REALESRGAN_ANIMAVIDEOV3_UP4X", "realesr-animevideov3-x4"),
    ),
    "general-x4v3": Variant(
        Architecture("compact", 32),
        "photographs, ×4, small, with a choice of denoising",
        "realesr-general-x4v3",
        weak="realesr-general-wdn-x4v3",
    ),
}


@dataclass(frozen=True)
class Weights:
    """A parsed weights argument. `variant` is None when a file decides; `denoise` when nothing was asked."""

    variant: str | None
    denoise: float | None
    source: str

    def __str__(self) -> str:
        blend = "" if self.denoise is None else f"@{self.denoise:g}"
        return self.source if self.variant is None else f"{self.variant}{blend}:{self.source}"


def parse_weights(text: str) -> Weights:
    """Raises `UserError` for a denoising strength that is not one, or of a variant that has no choice of it."""
    head, colon, source = text.partition(":")
    variant, at, strength = head.partition("@")
    if variant not in VARIANTS:
        return Weights(None, None, text)
    try:
        denoise = float(strength) if at else None
    except ValueError:
        denoise = math.nan
    return checked(Weights(variant, denoise, source if colon else "auto"))


def checked(weights: Weights) -> Weights:
    """`weights`, when its variant and denoising strength fit each other. Raises `UserError`."""
    if weights.variant is not None and weights.variant not in VARIANTS:
        raise UserError(f"unknown variant {weights.variant!r}: choose one of {', '.join(VARIANTS)}")
    if weights.denoise is not None:
        if weights.variant is None or VARIANTS[weights.variant].weak is None:
            able = ", ".join(name for name, variant in VARIANTS.items() if variant.weak)
            raise UserError(f"a denoising strength needs a variant that has a choice of it: {able}")
        if not 0 <= weights.denoise <= 1:
            raise UserError("the denoising strength is a number from 0 (noise is kept) to 1")
    return weights


def variant_of(architecture: Architecture) -> str | None:
    """The first variant of this architecture."""
    return next((name for name, variant in VARIANTS.items() if variant.architecture == architecture), None)
