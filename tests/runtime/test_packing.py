"""pytest tests/runtime/test_packing.py: elements of a byte that cross between host and GPU four to a word."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backend.runtime import plan as plans
from backend.runtime.device import Device
from backend.runtime.device_tensor import DeviceTensor
from backend.runtime.packing import FROM, is_packed
from recipes.normalize import Normalize
from tests.passes.programs import Method, lower
from zoo.program import Program

DTYPES = ("uint8", "int8", "bool")
SHAPE = (1, 128, 176, 3)  # no power of two; rows of four are rows of words, columns are not
assert np.prod(SHAPE) >= FROM


class Reads(nn.Module):
    """As it is, in rows of four; permuted, sliced, flipped, broadcast; raw, by a kernel of its own; with floats."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x32 = x.to(torch.int32)
        return (
            x32 + 1,
            x.permute(0, 3, 1, 2).to(torch.float32) * 0.5,
            x32[:, 1::3, 2:, 1:] - 2,
            x32.flip(1),
            x32[:, :, :1] * torch.ones(1, 1, 5, 1, dtype=torch.int32),
            x.to(torch.float32).sum((1, 2)),
        )


class Bytes(nn.Module):
    """An output of bytes, and one that is its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(x.to(torch.int32) > 3, x, torch.zeros_like(x)), x.flip(2)


def drawn(dtype: str, shape: Sequence[int] = SHAPE) -> np.ndarray:
    """Every byte."""
    raw = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return raw > 127 if dtype == "bool" else raw.view(dtype)


def test_what_crosses_packed() -> None:
    assert is_packed("uint8", FROM) and is_packed("bool", FROM + 4) and is_packed("int8", 2**22)
    assert not is_packed("uint8", FROM - 4) and not is_packed("uint8", FROM + 2) and not is_packed("int32", FROM)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPE, (1, 127, 173, 3)])
def test_inputs_are_read_as_they_are(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Of a size that crosses in words and of one that does not, through either runtime."""
    given = drawn(dtype, shape)
    path = lower(tmp_path / "reads.pte", Method(Reads(), (torch.from_numpy(given),))).path
    expected = Reads()(torch.from_numpy(given))
    for runtime in ("direct", "executorch"):
        with Program.load(path, runtime) as program:
            for ours, theirs in zip(program.run("forward", given), expected, strict=True):
                np.testing.assert_array_equal(ours, theirs.numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_go_up_and_stay_bytes(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the words is written, copied and read, from call to call and to the host."""
    written: list[int] = []
    staged: list[int] = []
    writing, staging = Device.write, plans._create_staging

    def write(device: Device, buffer: Any, data: Any, offset: int = 0) -> None:
        written.append(memoryview(data).nbytes)
        writing(device, buffer, data, offset)

    def create_staging(device: Device, nbytes: int) -> Any:
        staged.append(nbytes)
        return staging(device, nbytes)

    monkeypatch.setattr(Device, "write", write)
    monkeypatch.setattr(plans, "_create_staging", create_staging)
    given = drawn(dtype)
    path = lower(tmp_path / "bytes.pte", Method(Bytes(), (torch.from_numpy(given),))).path
    with Program.load(path, "direct") as program:
        program.run("forward", given)
        written.clear()
        staged.clear()
        results: list[Any] = [given, None]
        for _ in range(3):
            results = program.start("forward", results[0])
        assert isinstance(results[0], DeviceTensor) and results[0].buffer.size == given.size
        expected = torch.from_numpy(given)
        for _ in range(3):
            expected, flipped = Bytes()(expected)
        for ours, theirs in zip(results, (expected, flipped), strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
            assert ours.numpy().dtype == given.dtype
    assert written == [given.size] and staged == [given.size] * 2


def test_a_picture_is_normalised_in_one_dispatch(tmp_path: Path) -> None:
    """Bytes are taken apart, turned into colours and laid out for the first convolution at once."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normalize = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
            self.conv = nn.Conv2d(3, 16, 7, 4, 3)

        def forward(self, picture: Tensor) -> Tensor:
            return self.conv(self.normalize(picture))

    module, given = First().requires_grad_(False), drawn("uint8", (1, 192, 192, 3))
    path = lower(tmp_path / "first.pte", Method(module, (torch.from_numpy(given),))).path
    with Program.load(path, "direct") as program:
        kernels = program._engine.plan("forward", given)["kernels"]  # type: ignore[attr-defined]
        (ours,) = program.run("forward", given)
    assert len(kernels) == 2 and "pointwise" in kernels[0] and "conv" in kernels[1], kernels
    np.testing.assert_allclose(ours, module(torch.from_numpy(given)).numpy(), atol=1e-5)
