"""What the tests of several recipes share; fixtures are in conftest.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.runtime import plan as plans
from backend.runtime.device import Device
from recipes.recipe import Bundle, UserError


def write_assets(bundle: Bundle, folder: Path) -> Path:
    """The folder beside a `.pte`, as an export writes it."""
    folder.mkdir(exist_ok=True)
    bundle.write_assets(folder)
    (folder / "recipe.json").write_text(json.dumps(bundle.metadata), encoding="utf-8")
    return folder


def change(path: Path, **values: Any) -> None:
    """Other values in a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


class Takes(torch.nn.Module):
    """In place of a picture's method of an older version: it takes normalised floats."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels + 1


def readbacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the bytes of every call whose results come to the host."""
    sizes: list[int] = []
    read = plans.Mapping.__init__

    def mapped(mapping: Any, device: Any, buffer: Any, size: int, submission: int) -> None:
        sizes.append(size)
        read(mapping, device, buffer, size, submission)

    monkeypatch.setattr(plans.Mapping, "__init__", mapped)
    return sizes


def lose(device: Device, elsewhere: bool) -> None:
    """The device is lost: a call elsewhere noticed that, or nobody yet."""
    if elsewhere:
        device.lost = "device lost"
    else:
        device.handle.destroy()


def check_same_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Bit for bit. Results may differ in their last bits: BLAS takes other paths for memory aligned otherwise."""
    states = ours.state_dict(), theirs.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name]), name


def check_damage(load: Callable[[str], Any], folder: Path, file: Path, kind: str) -> None:
    """With `file` of `folder` missing or cut in half, loading is an error of one line that names the folder."""
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError) as caught:
        load(str(folder))
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
