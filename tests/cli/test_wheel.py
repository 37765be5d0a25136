"""pytest tests/cli/test_wheel.py: an installed wheel has its shaders and the shim's source, and works elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.harness import ROOT

PACKAGES = ("zoo", "recipes", "backend", "shaders")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources (building writes beside them), unpacked into an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.parametrize(
    ("package", "pattern"),
    [
        ("shaders", "*.wgsl"),
        ("backend", "*.c"),
        ("backend", "*.cpp"),
        ("backend", "*.h"),
        *((package, "*.py") for package in PACKAGES),
    ],
)
def test_wheel_holds_what_the_checkout_holds(unpacked: Path, package: str, pattern: str) -> None:
    def files(root: Path) -> set[Path]:
        return {path.relative_to(root) for path in (root / package).rglob(pattern)}

    assert files(unpacked) == files(ROOT)


def test_wheel_holds_no_built_library(unpacked: Path) -> None:
    # One machine's library would be loaded on another.
    assert not list(unpacked.rglob("*.so"))


def test_wheel_works_from_another_folder(unpacked: Path, tmp_path: Path) -> None:
    script = (
        "import backend.runtime, recipes, shaders, sys, zoo\n"
        f"here = [module.__file__.startswith({str(unpacked)!r}) for module in (backend, recipes, shaders, zoo)]\n"
        "assert all(here), zoo.__file__\n"
        "sys.argv = ['zoo', 'list', '--json']\n"
        "from zoo.cli import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert '"models"' in done.stdout
