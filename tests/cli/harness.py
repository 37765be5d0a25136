"""What the command line's tests share: `zoo` as a command line with a toy model, and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOYS = Path(__file__).parent / "toy_recipes"
ROOT = Path(__file__).resolve().parents[2]
# The console script with the toy's folder added to the registry.
SCRIPT = f"import recipes; recipes.__path__.append({str(TOYS)!r}); from zoo.cli import main; main()"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT, *arguments]


def environ() -> dict[str, str]:
    """An environment that finds this checkout from any folder and never asks a hub."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def one_error_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Exit code 2, and stderr is one `error:` line that holds all of `parts`."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1] == lines[0]
    for part in parts:
        assert part in lines[0], lines[0]
