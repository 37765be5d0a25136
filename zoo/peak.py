"""The peak memory of a `zoo` command, measured in a process of its own.

    python -m zoo.peak FILE run phonon --text …      the command, then its peak resident bytes into FILE

The child reports on itself: what the operating system keeps of a child that ended may count the parent it came from.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from recipes.recipe import UserError


def peak_bytes(arguments: Sequence[str]) -> int:
    """Runs `zoo ARGUMENTS` in another process; its peak resident memory in bytes. Raises `UserError` when it fails."""
    with tempfile.TemporaryDirectory(prefix="zoo-peak-") as folder:
        told = Path(folder) / "bytes"
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, str(told), *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
            raise UserError(f"`zoo {' '.join(arguments)}` failed: {lines[-1].removeprefix('error: ')}")
        return int(told.read_text())


def own_peak() -> int:
    """Of this process, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return size if sys.platform == "darwin" else 1024 * size
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    from zoo.cli import main

    told = Path(sys.argv.pop(1))
    try:
        main()
    finally:
        told.write_text(str(own_peak()))
