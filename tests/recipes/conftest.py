"""Fixtures of the recipe tests: tiny models, built once a session; copies of checkpoints; no hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from phonon_support import Ready, make_processor
from real_esrgan_support import Nearest
from sam2_support import PICTURE
from support import write_assets

from recipes.eager import EagerProgram
from recipes.phonon import standin
from recipes.phonon.build import build
from recipes.real_esrgan import runner
from recipes.recipe import Bundle, ExportRequest, UserError
from recipes.sam2.build import build as sam2_build
from recipes.sam2.runner import Segmenter


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    bundle = build(ExportRequest("portable", "tiny"))
    return Ready(bundle, write_assets(bundle, tmp_path_factory.mktemp("phonon") / "assets"), EagerProgram(bundle))


@pytest.fixture(scope="session")
def processor() -> Any:
    return make_processor(standin.tiny())


@pytest.fixture(scope="session")
def sam2_bundle() -> Bundle:
    return sam2_build(ExportRequest("webgpu", "tiny"))


@pytest.fixture(scope="session")
def sam2_eager(sam2_bundle: Bundle) -> EagerProgram:
    return EagerProgram(sam2_bundle, torch.float32)


@pytest.fixture(scope="session")
def sam2_assets(sam2_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(sam2_bundle, tmp_path_factory.mktemp("sam2") / "assets")


@pytest.fixture
def segmenter(sam2_eager: EagerProgram, sam2_assets: Path) -> Segmenter:
    """A tiny SAM 2 in eager PyTorch that sees `PICTURE`."""
    segmenter = Segmenter(sam2_eager, sam2_assets)
    segmenter.look(PICTURE)
    return segmenter


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of a test module's own saved checkpoint, to be changed."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(hub_id: str, files: Sequence[str]) -> Path:
        raise UserError(f"{hub_id} is not in the local cache and the hub gave: no network")

    monkeypatch.setattr("zoo.weights.fetch", fetch)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small wait longer for other threads than they compute."""
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
