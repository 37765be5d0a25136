"""Quantized weights: the modes that have kernels, and how codes lie in memory.

A weight is `(code - zero point) * scale`, codes of 4 or 8 bits, one scale (and zero point) for `group` codes along K or
for a whole row. Export stores codes a byte each; `pack` makes words of 32 bits of them, ahead of time, so that a
program holds 4-bit weights in 4 bits. Packed codes are named data of their own, under a key that says of what.

    8 bits: byte i of a word is the code of k = 4 j + i, two's complement
    4 bits: byte i of a word is the code of k = 8 j + i in its low half and of k = 8 j + 4 + i in its high half, each
            with 8 added, so that four neighbours unpack at once
    Rows are padded to CHUNK codes, so that vectors of words never straddle rows.

shaders/codes.wgsl reads this layout. Neither torch nor wgpu is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CHUNK = 32


@dataclass(frozen=True)
class Mode:
    """`bits` a weight. Dynamic modes round the activations to 8 bits, row by row, at run time."""

    bits: int
    dynamic: bool


# Of linear layers.
MODES: Mapping[str, Mode] = {
    "4w": Mode(4, False),
    "8w": Mode(8, False),
    "8da4w": Mode(4, True),
    "8da8w": Mode(8, True),
}
EMBEDDING_MODES = tuple(name for name, mode in MODES.items() if not mode.dynamic)  # a table has no activations
RANGES: Mapping[int, tuple[int, int]] = {4: (-8, 7), 8: (-128, 127)}


def bits_of(low: float, high: float) -> int | None:
    """The narrowest layout that holds codes from `low` to `high`, or None."""
    return next((bits for bits, (least, most) in RANGES.items() if least <= low <= high <= most), None)


def row_words(depth: int, bits: int) -> int:
    """32-bit words of a packed row of `depth` codes."""
    return -(-depth // CHUNK) * CHUNK * bits // 32


def group_refusal(depth: int, bits: int, group: int) -> str | None:
    """Why no kernel takes this group size, or None."""
    if depth <= 0 or group <= 0 or depth % group:
        return f"{bits}-bit weight needs a group size that divides K"
    if group != depth and group % CHUNK:
        return f"{bits}-bit weight needs groups of a multiple of {CHUNK}, or one scale a row"
    return None


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """int8 or uint8 codes [N, K] as int32 words [N, row_words]. Raises `ValueError` for a code that does not fit.

    Of uint8 codes, `unsigned_offset` is subtracted first: the zero points must follow.
    """
    low, high = RANGES[bits]
    if codes.dtype not in (np.int8, np.uint8) or codes.ndim != 2:
        raise ValueError(f"codes are {codes.dtype} of rank {codes.ndim}, expected int8 or uint8 of rank 2")
    if codes.dtype == np.uint8:
        codes = codes.astype(np.int16) - unsigned_offset(bits)
    if codes.size and not (low <= codes.min() and codes.max() <= high):
        raise ValueError(f"codes run from {codes.min()} to {codes.max()}, {bits} bits hold {low} to {high}")
    rows, depth = codes.shape
    words = row_words(depth, bits)
    padded = np.zeros((rows, words * 32 // bits), dtype=np.int8)
    padded[:, :depth] = codes
    if bits == 4:
        halves = (padded + 8).astype(np.uint8).reshape(rows, -1, 2, 4)
        padded = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, -1)
    return np.ascontiguousarray(padded).view("<i4").reshape(rows, words)


def unpack(words: np.ndarray, bits: int, depth: int) -> np.ndarray:
    """int8 codes [N, depth] of the int32 words that `pack` made."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        quads = packed.reshape(len(words), -1, 1, 4)
        packed = np.concatenate([quads & 15, quads >> 4], 2).reshape(len(words), -1) - np.uint8(8)
    return packed.view(np.int8)[:, :depth]


def unsigned_offset(bits: int) -> int:
    """How far codes from 0 up are above those of `RANGES`."""
    return -RANGES[bits][0]


def packed_key(source: str, bits: int) -> str:
    """Named data of the packed form of the codes stored under `source`."""
    return f"packed{bits}:{source}"


def packed_source(key: str) -> tuple[str, int] | None:
    """(key of the codes, bits) when `key` names packed codes."""
    head, _, source = key.partition(":")
    return next(((source, bits) for bits in RANGES if head == f"packed{bits}"), None)


def joined_key(sources: Sequence[str]) -> str:
    """Named data of several constants, one after the other."""
    return "+".join(sources)


def joined_sources(key: str) -> list[str]:
    """The keys of what is joined under `key`; of a constant by itself, its own."""
    return key.split("+")
