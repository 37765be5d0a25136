"""Writing files so that a failure, Ctrl-C or a full disk leaves nothing half-written.

Everything is written under a temporary name in the folder of its destination and renamed when it is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from backend.files import temporary
from recipes.recipe import UserError


def check_output(path: Path) -> None:
    """Raises `UserError` when a file at `path` cannot be written; called before the work, not after it."""
    folder = path.parent
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it")
    if not folder.exists():
        raise UserError(f"folder {folder} does not exist")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"folder {folder} is not writable")


def remove(path: Path) -> None:
    """Removes a file or a folder; nothing happens when it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an `OSError` of the block into a `UserError` that names `path` and the system's reason.

    A closed pipe is not a failed write of `path` and passes as it is.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def staged(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Yields a temporary name for each of `paths`; the block writes a file or makes a folder under each.

    When the block ends well, all of them replace their destinations, in order; the old ones are put aside
    first and come back if a rename fails. When it does not, what it wrote is removed and the old stays.
    Raises `UserError` for a write that the system refuses.
    """
    parts = tuple(temporary(path) for path in paths)
    try:
        with writing(paths[0]):
            yield parts
            _replace(parts, paths)
    finally:
        for part in parts:
            remove(part)


def _replace(parts: tuple[Path, ...], paths: tuple[Path, ...]) -> None:
    # One plain file is renamed over the old one in a single step. A group, or a folder, cannot be: the old
    # ones step aside, so that a process killed in between leaves a missing file, never a mixed pair.
    if len(parts) == 1 and parts[0].is_file():
        os.replace(parts[0], paths[0])
        return
    aside = tuple(temporary(path) for path in paths)
    placed: list[Path] = []
    try:
        for path, old in zip(paths, aside, strict=True):
            if path.exists():
                os.replace(path, old)
        for part, path in zip(parts, paths, strict=True):
            os.replace(part, path)
            placed.append(path)
    except BaseException:
        for path in placed:
            remove(path)
        for path, old in zip(paths, aside, strict=True):
            if old.exists():
                os.replace(old, path)
        raise
    for old in aside:
        remove(old)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file, seekable, that appears as `path` when the block ends well and not at all otherwise.

    Raises `UserError` when the folder is missing or not writable, or the disk is full.
    """
    check_output(path)
    with staged(path) as (part,), open(part, "w+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
