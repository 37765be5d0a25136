"""What an export leaves on disk: `<stem>.pte` and, beside it, `<stem>.assets/` with `recipe.json`.

`recipe.json` is the recipe's metadata (read by its runner) with one more entry, "export": what was asked, from
which weights and which code, and what came out. It is how a later run knows that the file still fits. Nothing here
imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.recipe import FULL_PRECISION, ExportRequest, Recipe, UserError
from zoo import __version__

SIDECAR = "recipe.json"
ENTRY = "export"
FORMAT = 1
_LIBRARIES = ("torch", "executorch", "torchao", "transformers")
# What decides the content of a `.pte`: a change in any of these files makes an old one stale.
_CODE = (
    "recipes/normalize.py", "recipes/recipe.py", "recipes/transformer.py", "zoo/export.py", "zoo/quantize.py",
    "zoo/targets.py", "zoo/weights.py", "backend/*.py",
)  # fmt: skip
_CODE_FOLDERS = ("backend/ops", "backend/passes")


def assets_of(pte: Path) -> Path:
    """The assets folder that belongs to `pte`."""
    return pte.with_name(f"{pte.stem}.assets")


def default_path(recipe: Recipe, request: ExportRequest) -> Path:
    """`out/<model>/<model>-<backend>-<dtype>[-<qlinear>][-<option>=<value>…][-<weights>].pte`, in the current folder.

    The mode of the embeddings comes among the options, as `embedding=<mode>`.
    """
    parts = [recipe.name, request.backend, request.dtype]
    if request.qlinear != FULL_PRECISION:
        parts.append(request.qlinear)
    if request.qembedding != FULL_PRECISION:
        parts.append(f"embedding={request.qembedding}")
    parts += [f"{name}={value}" for name, value in request.options]
    if request.weights in ("synthetic", "tiny"):
        parts.append(request.weights)
    elif request.weights != "auto":
        # Two checkpoints may share the last part of their names; the digest of the whole keeps them apart.
        tag = re.sub(r"[^A-Za-z0-9_.]+", "_", Path(request.weights).name)[:40]
        parts.append(f"{tag}_{_digest(request.weights.encode())[:8]}")
    return Path("out") / recipe.name / f"{'-'.join(parts)}.pte"


def metadata(pte: Path) -> dict[str, Any]:
    """The content of `recipe.json` beside `pte`. Raises `UserError` when it is missing or unreadable."""
    path = assets_of(pte) / SIDECAR
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{pte} has no {assets_of(pte).name}/ beside it: export it again with `zoo export`") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get(ENTRY), dict):
        raise UserError(f"{path} was not written by `zoo export`: export again")
    return value


def open_artifact(pte: Path, model: str | None = None) -> dict[str, Any]:
    """Checks a `.pte` that exists and returns its metadata.

    Raises `UserError` for a file that is missing, cut short or of another model.
    """
    if not pte.is_file():
        raise UserError(f"no such file: {pte}")
    value = metadata(pte)
    entry = value[ENTRY]
    size = pte.stat().st_size
    if size != entry.get("bytes"):
        raise UserError(f"{pte} is damaged: it holds {size} bytes, export wrote {entry.get('bytes')}; export it again")
    if model is not None and entry["key"].get("model") != model:
        raise UserError(f"{pte} is a program of {entry['key'].get('model')}, not of {model}")
    return value


def reusable(pte: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The metadata of `pte` when it is whole and was exported with `key`, else None."""
    try:
        value = open_artifact(pte)
    except UserError:
        return None
    return value if value[ENTRY].get("key") == key else None


def key(recipe: Recipe, request: ExportRequest) -> dict[str, Any]:
    """Everything that decides what an export of `request` holds, as JSON."""
    return {
        "format": FORMAT,
        "project": __version__,
        "model": recipe.name,
        "backend": request.backend,
        "dtype": request.dtype,
        "qlinear": request.qlinear,
        **({"qembedding": request.qembedding} if request.qembedding != FULL_PRECISION else {}),
        **({"options": dict(request.options)} if request.options else {}),
        "weights": request.weights,
        "weights_id": weights_identity(recipe, request.weights),
        "code": code_identity(recipe.name),
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
    }


def weights_identity(recipe: Recipe, weights: str) -> str:
    """What a weights argument stands for at this moment: a seed, files and their times, or a hub revision.

    A hub checkpoint that is not in the local cache counts as absent; it gets its revision once it was fetched.
    """
    if recipe.identity is not None:
        return recipe.identity(weights)
    if weights in ("synthetic", "tiny"):
        return weights
    path = Path(weights)
    if weights != "auto" and path.exists():
        return files_identity(path)
    from huggingface_hub import try_to_load_from_cache

    repository = recipe.checkpoint if weights == "auto" else weights
    try:
        cached = try_to_load_from_cache(repository, "config.json")
    except ValueError:  # not the form of a hub id
        return "absent"
    return f"hub {Path(cached).parent.name}" if isinstance(cached, str) else "absent"


def files_identity(path: Path) -> str:
    """Of a file, or of every file of a folder: sizes and times."""
    lines = [f"{file}:{(stat := file.stat()).st_size}:{stat.st_mtime_ns}" for file in _files(path.resolve())]
    return "files " + _digest("\n".join(lines).encode())


def code_identity(model: str) -> str:
    """A digest of the sources that decide what `model` exports to."""
    import recipes

    root = Path(__file__).resolve().parent.parent
    found = [path for pattern in _CODE for path in root.glob(pattern)]
    found += [path for folder in _CODE_FOLDERS for path in (root / folder).rglob("*.py")]
    module = model.replace("-", "_")
    for folder in map(Path, recipes.__path__):
        found += [folder / f"{module}.py"] if (folder / f"{module}.py").is_file() else []
        found += (folder / module).rglob("*.py")
    return _digest(*(path.name.encode() + b"\0" + path.read_bytes() for path in sorted(found)))


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from sorted(file for file in path.rglob("*") if file.is_file())


def _digest(*chunks: bytes) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(len(chunk).to_bytes(8, "little") + chunk)
    return digest.hexdigest()[:32]
