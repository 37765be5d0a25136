"""A toy model for the command line's tests: `toy` in this process, `zoo` as a command in another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import recipes
from recipes import recipe as registry
from recipes.recipe import Recipe
from tests.cli.harness import TOYS, command, environ


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recipe]:
    """The toy recipe, registered for one test."""
    monkeypatch.setattr(recipes, "__path__", [*recipes.__path__, str(TOYS)])
    yield registry.load("toy")
    sys.modules.pop("recipes.toy", None)


@pytest.fixture
def environment() -> dict[str, str]:
    return environ()


@pytest.fixture
def zoo(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `zoo ARGUMENTS` in an empty folder and returns the finished process."""

    def run(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments),
            cwd=tmp_path,
            env={**environ(), **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            **options,
        )

    return run
