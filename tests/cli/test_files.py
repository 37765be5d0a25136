"""pytest tests/cli/test_files.py: nothing is ever left half-written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from recipes.recipe import UserError
from zoo import files
from zoo.files import atomic_file, staged


def test_file_appears_only_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with atomic_file(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, ValueError, BrokenPipeError])
def test_failure_leaves_the_old_file(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(failure), atomic_file(path) as file:
        file.write(b"new")
        raise failure
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.bin: No space left"), atomic_file(tmp_path / "a.bin") as file:
        file.write(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_at_the_last_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is written fits the buffer, so that only the flush at the end meets the full disk.
    real = tmp_path / "part"
    real.symlink_to("/dev/full")
    monkeypatch.setattr(files, "temporary", lambda path: real)
    with pytest.raises(UserError, match="No space left"), atomic_file(tmp_path / "a.bin") as file:
        file.write(b"some")
    assert os.listdir(tmp_path) == []


def test_missing_folder_and_folder_as_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"folder .*gone does not exist"), atomic_file(tmp_path / "gone" / "a.bin"):
        pass
    with pytest.raises(UserError, match="is a folder"), atomic_file(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def _write_pair(parts: tuple[Path, ...], text: str) -> None:
    parts[0].write_text(text)
    parts[1].mkdir()
    (parts[1] / "inner").write_text(text)


def test_a_file_and_its_folder_are_replaced_together(tmp_path: Path) -> None:
    program, assets = tmp_path / "m.pte", tmp_path / "m.assets"
    for text in ("one", "two"):
        with staged(program, assets) as parts:
            _write_pair(parts, text)
        assert program.read_text() == (assets / "inner").read_text() == text
    assert sorted(os.listdir(tmp_path)) == ["m.assets", "m.pte"]


def test_a_failed_rename_brings_both_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, assets = tmp_path / "m.pte", tmp_path / "m.assets"
    with staged(program, assets) as parts:
        _write_pair(parts, "old")
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        # Only the new folder fails to take its place; its program is there by then.
        if target == assets and (source / "inner").read_text() == "new":
            raise OSError(errno.EIO, "input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(UserError, match="input/output error"), staged(program, assets) as parts:
        _write_pair(parts, "new")
    assert program.read_text() == (assets / "inner").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["m.assets", "m.pte"]
