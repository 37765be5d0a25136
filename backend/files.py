"""Where files of the user's are kept, and writing them so that others see the whole file or none."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def cache_folder() -> Path:
    """The user's, for what this project keeps; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "webgpu-zoo"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "webgpu-zoo"


def temporary(path: Path) -> Path:
    """A name for what is to become `path`, in its folder."""
    # Hidden and random: neither a glob for results nor a second run of the same command meets it.
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name under which the block writes a file: it becomes `path` when the block ends well, and goes otherwise.

    Raises `OSError` for what the system refuses.
    """
    part = temporary(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        with suppress(OSError):  # what went wrong before says more
            part.unlink()
