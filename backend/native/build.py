"""Compiles `shim.cpp` against the installed ExecuTorch wheel: `ensure_built()` gives the path of the library.

The library's name carries a hash of its sources, the flags and ExecuTorch's version, so a stale one is never loaded
and a finished one is never built again. It lies beside the source, or in the user's cache folder where the
installation is read-only. `python -m backend.native.build` builds it by hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SOURCE_FOLDER = Path(__file__).parent
_SOURCES = ("shim.cpp", "python_abi.h")
_STEM = "zoo_shim"
_TIMEOUT_S = 300
_GET_COMPILER = {
    "linux": "install one, for example `apt-get install g++`",
    "darwin": "install one with `xcode-select --install`",
}


class BuildError(RuntimeError):
    """The shim cannot be built; the message says what is missing and how to get it."""


def ensure_built() -> Path:
    """The up-to-date shared library, compiled first if need be. Raises `BuildError`."""
    wheel = _wheel()
    flags = _flags(wheel)
    name = f"{_STEM}-{_fingerprint(flags)}.so"
    folders = [_SOURCE_FOLDER, _cache_folder()]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    for folder in folders:
        if _is_writable(folder):
            return _compile(flags, folder / name)
    raise BuildError(f"no folder to put the native shim in: neither {' nor '.join(map(str, folders))} is writable")


def _wheel() -> Path:
    """Folder of the installed ExecuTorch package, checked to hold what the shim is compiled and linked against."""
    spec = importlib.util.find_spec("executorch")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not locations:
        raise BuildError("executorch is not installed: `pip install executorch==1.5.1`")
    wheel = Path(locations[0])
    library = wheel / "lib" / ("libexecutorch.dylib" if sys.platform == "darwin" else "libexecutorch.so")
    for path in (wheel / "include" / "executorch" / "runtime" / "backend" / "interface.h", library):
        if not path.is_file():
            raise BuildError(
                f"this ExecuTorch wheel has no {path.name} to build the native shim with: use the direct runtime"
            )
    return wheel


def _flags(wheel: Path) -> list[str]:
    include = wheel / "include"
    portable = include / "executorch" / "runtime" / "core" / "portable_type" / "c10"
    return [
        *("-std=c++17", "-O2", "-shared", "-fPIC", "-Wall"),
        "-DC10_USING_CUSTOM_GENERATED_MACROS",
        # The wheel's headers come as system headers: their warnings are not ours to fix.
        *("-isystem", str(include), "-isystem", str(portable)),
        *(f"-L{wheel / 'lib'}", "-lexecutorch", f"-Wl,-rpath,{wheel / 'lib'}"),
        # The interpreter that loads the shim provides Python's symbols.
        *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
    ]


def _fingerprint(flags: list[str]) -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((_SOURCE_FOLDER / name).read_bytes())
    version = importlib.metadata.version("executorch")
    digest.update("\0".join([version, sys.platform, platform.machine(), *flags]).encode())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "webgpu-zoo"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "webgpu-zoo"


def _is_writable(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK)
    return False


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    if chosen:
        command = shlex.split(chosen)
        if command and shutil.which(command[0]):
            return command
        raise BuildError(f"the C++ compiler named by CXX, {chosen!r}, was not found: unset CXX or correct it")
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    hint = _GET_COMPILER.get(sys.platform, "install one")
    raise BuildError(f"no C++ compiler found (looked for g++ and clang++): {hint}, or name yours in CXX")


def _compile(flags: list[str], target: Path) -> Path:
    command = _compiler()
    with _temporary(target) as partial:
        full = [*command, str(_SOURCE_FOLDER / _SOURCES[0]), *flags, "-o", str(partial)]
        try:
            result = subprocess.run(full, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"building the native shim with {command[0]} failed: {error}") from error
        if result.returncode != 0:
            raise BuildError(
                f"building the native shim with {command[0]} failed (exit code {result.returncode}):\n"
                f"{result.stderr.strip()[-2000:]}"
            )
        partial.chmod(0o755)  # mkstemp gave it to its owner alone
        # Atomic: another process sees the whole library or none.
        os.replace(partial, target)
    # Only beside this source: the cache folder may hold the libraries of other installations.
    for stale in _SOURCE_FOLDER.glob(f"{_STEM}-*.so"):
        if stale != target:
            with contextlib.suppress(OSError):
                stale.unlink()
    return target


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(prefix=f".{_STEM}-", suffix=".tmp", dir=target.parent)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


if __name__ == "__main__":
    try:
        print(ensure_built())
    except BuildError as error:
        sys.exit(str(error))
