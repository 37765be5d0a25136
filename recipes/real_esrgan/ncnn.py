"""ncnn model pairs: `NAME.param`, a graph as text, and `NAME.bin`, its weights in the order of the layers.

Read without torch and without ncnn. Text: a magic number, counts, then a line a layer:
`Type name inputs outputs blob… key=value…`. Weights of a convolution begin with a tag of 4 bytes that names their
storage; biases and PReLU slopes are plain float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from recipes.recipe import UserError

MAGIC = "7767517"
TAG_FLOAT32, TAG_FLOAT16 = (0, 0x0002C056), 0x01306B47
_SILENT = ("Input", "Split", "Concat", "Eltwise", "BinaryOp", "Interp", "PixelShuffle", "Reorg")  # hold no weights


@dataclass(frozen=True)
class Layer:
    kind: str
    name: str
    params: dict[int, str]
    arrays: list[np.ndarray] = field(default_factory=list)

    def number(self, key: int, default: int = 0) -> int:
        return int(self.params.get(key, default))


def read_pair(path: Path) -> list[Layer]:
    """The layers of a pair, with their weights as float32, given the path of either file.

    Raises `UserError` for a missing half, a layer that is not expected here and weights of another length.
    """
    layers = _read_param(path.with_suffix(".param"))
    binary = path.with_suffix(".bin")
    reader = _Reader(binary, _bytes(binary))
    for layer in layers:
        if layer.kind == "Convolution":
            outputs, count = layer.number(0), layer.number(6)
            kernel = layer.number(1)
            inputs = count // max(1, outputs * kernel * kernel)
            if (kernel, layer.number(3, 1), layer.number(4)) != (3, 1, 1) or outputs * inputs * 9 != count:
                raise UserError(f"{path}: {layer.name} is not a 3×3 convolution of stride 1 with padding")
            layer.arrays.append(reader.tagged(count).reshape(outputs, inputs, 3, 3))
            if layer.number(5):
                layer.arrays.append(reader.plain(outputs))
        elif layer.kind == "PReLU":
            layer.arrays.append(reader.plain(layer.number(0)))
        elif layer.kind not in _SILENT:
            raise UserError(f"{path}: layer {layer.name} of kind {layer.kind} is none of Real-ESRGAN's")
    reader.end()
    return layers


def state_dict(path: Path) -> dict[str, np.ndarray]:
    """The weights of a pair under the official parameter names."""
    layers = read_pair(path)
    if layers[-1].kind == "Interp":
        raise UserError(f"{path.with_suffix('')} shrinks what it enlarged: take the ×4 pair, with `--scale` for less")
    held = [layer for layer in layers if layer.arrays]
    if any(layer.kind == "PReLU" for layer in held):
        names = [f"body.{index}" for index in range(len(held))]
    else:
        blocks, rest = divmod(len(held) - 6, 15)
        if rest or blocks < 1:
            raise UserError(f"{path}: {len(held)} convolutions make no RRDBNet (6, and 15 a block)")
        inside = (f"body.{b}.rdb{r}.conv{c}" for b in range(blocks) for r in (1, 2, 3) for c in (1, 2, 3, 4, 5))
        names = ["conv_first", *inside, "conv_body", "conv_up1", "conv_up2", "conv_hr", "conv_last"]
    return {
        f"{name}.{part}": array
        for name, layer in zip(names, held, strict=True)
        for part, array in zip(("weight", "bias"), layer.arrays, strict=False)
    }


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror} (an ncnn model is a .param and a .bin)") from error


def _read_param(path: Path) -> list[Layer]:
    lines = [line.split() for line in _bytes(path).decode("utf-8", "replace").splitlines() if line.strip()]
    if len(lines) < 3 or lines[0] != [MAGIC]:
        raise UserError(f"{path} is not an ncnn graph: it does not begin with {MAGIC}")
    layers = []
    try:
        for kind, name, inputs, outputs, *rest in lines[2:]:
            pairs = (item.partition("=") for item in rest[int(inputs) + int(outputs) :])
            layers.append(Layer(kind, name, {int(key): value for key, _, value in pairs}))
        if int(lines[1][0]) != len(layers):
            raise ValueError
    except ValueError:
        raise UserError(f"{path} is damaged: {len(layers)} of {lines[1][0]} layers can be read") from None
    return layers


class _Reader:
    def __init__(self, path: Path, data: bytes) -> None:
        self._path, self._data, self._at = path, data, 0

    def _take(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        if len(part) < size:
            raise UserError(f"{self._path} is damaged: it holds {len(self._data)} bytes, too few for its graph")
        self._at += size
        return part

    def plain(self, count: int) -> np.ndarray:
        return np.frombuffer(self._take(4 * count), "<f4").astype(np.float32)

    def tagged(self, count: int) -> np.ndarray:
        tag = int.from_bytes(self._take(4), "little")
        if tag in TAG_FLOAT32:
            return self.plain(count)
        if tag != TAG_FLOAT16:
            raise UserError(f"{self._path} holds weights in a form that is not read here (tag {tag:#010x})")
        values = np.frombuffer(self._take(2 * count), "<f2").astype(np.float32)
        self._take(-2 * count % 4)
        return values

    def end(self) -> None:
        if self._at != len(self._data):
            raise UserError(f"{self._path} holds {len(self._data)} bytes, its graph takes {self._at}")
