"""Compiles the native parts with the system's compiler: `ensure_built(library)` gives the path of one.

`SHIM`, against the installed ExecuTorch wheel, is our backend in ExecuTorch's runtime. `REPLAY`, against nothing, is
the loop over a plan's dispatches, which the torch-free runtime has in Python too.

A library's name carries a hash of its sources, the flags and ExecuTorch's version, so a stale one is never loaded
and a finished one is never built again. It lies beside the source, or in the user's cache folder where the
installation is read-only. `python -m backend.native.build` builds both by hand.
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
from dataclasses import dataclass
from pathlib import Path

from backend.files import cache_folder, replacing

_SOURCE_FOLDER = Path(__file__).parent
_TIMEOUT_S = 300
_GET_COMPILER = {
    "linux": "install one, for example `apt-get install g++`",
    "darwin": "install one with `xcode-select --install`",
}


@dataclass(frozen=True)
class Library:
    """What is compiled: the first source, which includes the others, by a compiler of a language."""

    name: str  # in messages
    stem: str
    sources: tuple[str, ...]
    language: str
    variable: str  # of the environment, names the compiler
    compilers: tuple[str, ...]
    uses_executorch: bool


SHIM = Library(
    "the native shim", "zoo_shim", ("shim.cpp", "python_abi.h"), "C++", "CXX", ("g++", "clang++"), uses_executorch=True
)
REPLAY = Library(
    "the native dispatch loop", "zoo_replay", ("replay.c",), "C", "CC", ("cc", "gcc", "clang"), uses_executorch=False
)


class BuildError(RuntimeError):
    """A library cannot be built; the message says what is missing and how to get it."""


def ensure_built(library: Library = SHIM) -> Path:
    """The up-to-date shared library, compiled first if need be. Raises `BuildError`."""
    flags = _shim_flags(_wheel()) if library.uses_executorch else ["-std=c11", *_FLAGS]
    name = f"{library.stem}-{_fingerprint(library, flags)}.so"
    folders = [_SOURCE_FOLDER, cache_folder()]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    for folder in folders:
        if _is_writable(folder):
            return _compile(library, flags, folder / name)
    raise BuildError(f"no folder to put {library.name} in: neither {' nor '.join(map(str, folders))} is writable")


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


_FLAGS = ("-O2", "-shared", "-fPIC", "-Wall")


def _shim_flags(wheel: Path) -> list[str]:
    include = wheel / "include"
    portable = include / "executorch" / "runtime" / "core" / "portable_type" / "c10"
    return [
        *("-std=c++17", *_FLAGS),
        "-DC10_USING_CUSTOM_GENERATED_MACROS",
        # The wheel's headers come as system headers: their warnings are not ours to fix.
        *("-isystem", str(include), "-isystem", str(portable)),
        *(f"-L{wheel / 'lib'}", "-lexecutorch", f"-Wl,-rpath,{wheel / 'lib'}"),
        # The interpreter that loads the shim provides Python's symbols.
        *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
    ]


def _fingerprint(library: Library, flags: list[str]) -> str:
    digest = hashlib.sha256()
    for name in library.sources:
        digest.update((_SOURCE_FOLDER / name).read_bytes())
    version = importlib.metadata.version("executorch") if library.uses_executorch else ""
    digest.update("\0".join([version, sys.platform, platform.machine(), *flags]).encode())
    return digest.hexdigest()[:16]


def _is_writable(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK)
    return False


def _compiler(library: Library) -> list[str]:
    chosen = os.environ.get(library.variable)
    if chosen:
        command = shlex.split(chosen)
        if command and shutil.which(command[0]):
            return command
        raise BuildError(
            f"the {library.language} compiler named by {library.variable}, {chosen!r}, was not found: "
            f"unset {library.variable} or correct it"
        )
    for name in library.compilers:
        if shutil.which(name):
            return [name]
    hint = _GET_COMPILER.get(sys.platform, "install one")
    looked_for = " and ".join([", ".join(library.compilers[:-1]), library.compilers[-1]])
    raise BuildError(
        f"no {library.language} compiler found (looked for {looked_for}): {hint}, or name yours in {library.variable}"
    )


def _compile(library: Library, flags: list[str], target: Path) -> Path:
    command = _compiler(library)
    with replacing(target) as part:
        full = [*command, str(_SOURCE_FOLDER / library.sources[0]), *flags, "-o", str(part)]
        try:
            result = subprocess.run(full, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"building {library.name} with {command[0]} failed: {error}") from error
        if result.returncode != 0:
            raise BuildError(
                f"building {library.name} with {command[0]} failed (exit code {result.returncode}):\n"
                f"{result.stderr.strip()[-2000:]}"
            )
        part.chmod(0o755)  # who may use the installation may load it, whatever the umask of who built it
    # Only beside this source: the cache folder may hold the libraries of other installations.
    for stale in _SOURCE_FOLDER.glob(f"{library.stem}-*.so"):
        if stale != target:
            with contextlib.suppress(OSError):
                stale.unlink()
    return target


if __name__ == "__main__":
    # Without the loop, programs run through Python's: no failure. The shim is what ExecuTorch's runtime cannot do
    # without.
    failed = False
    for built in (REPLAY, SHIM):
        try:
            print(ensure_built(built))
        except BuildError as error:
            print(error, file=sys.stderr)
            failed = built is SHIM
    sys.exit(failed)
