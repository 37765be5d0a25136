"""Fixtures of the recipe tests: tiny models, built once a session."""

from __future__ import annotations

from typing import Any

import pytest
from phonon_support import Ready, make_processor, write_assets

from recipes.phonon import standin
from recipes.phonon.build import build
from recipes.phonon.check import EagerProgram
from recipes.recipe import ExportRequest


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    bundle = build(ExportRequest("portable", "tiny"))
    return Ready(bundle, write_assets(bundle, tmp_path_factory.mktemp("phonon") / "assets"), EagerProgram(bundle))


@pytest.fixture(scope="session")
def processor() -> Any:
    return make_processor(standin.tiny())
