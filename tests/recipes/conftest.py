"""Fixtures of the recipe tests: tiny models, built once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from phonon_support import Ready, make_processor, write_assets
from real_esrgan_support import Nearest

from recipes.phonon import standin
from recipes.phonon.build import build
from recipes.phonon.check import EagerProgram
from recipes.real_esrgan import runner
from recipes.recipe import ExportRequest


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    bundle = build(ExportRequest("portable", "tiny"))
    return Ready(bundle, write_assets(bundle, tmp_path_factory.mktemp("phonon") / "assets"), EagerProgram(bundle))


@pytest.fixture(scope="session")
def processor() -> Any:
    return make_processor(standin.tiny())


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Convolutions this small wait longer for other threads than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def upscaler(tmp_path: Path) -> runner.Upscaler:
    assets = tmp_path / "nearest.assets"
    assets.mkdir()
    (assets / "recipe.json").write_text(
        '{"scale": 4, "multiple": 1, "radius": 2, "max_side": 512, "pixel_bytes": 256, "is_real": true}'
    )
    return runner.Upscaler(Nearest(), assets, "16")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
