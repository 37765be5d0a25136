"""Where checkpoints come from: the hub, its cache, folders; and errors of damaged files as one line.

What is the same for every recipe that loads a transformers checkpoint. Nothing here imports torch until a model is
loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.recipe import UserError


def sized(weights: str, size: str | None, hub_ids: Mapping[str, str]) -> str:
    """`--weights` and `--size` as one weights argument, of a model whose sizes have these hub ids, the default first.

    Raises `UserError` when they disagree.
    """
    if size is None:
        return weights
    if size not in hub_ids:
        raise UserError(f"unknown size {size!r}: choose one of {', '.join(hub_ids)}")
    is_default = size == next(iter(hub_ids))
    if weights == "auto":
        return weights if is_default else hub_ids[size]
    if weights == "synthetic":
        return weights if is_default else f"synthetic:{size}"
    raise UserError(f"--size chooses among the published checkpoints; --weights {weights} has its own size")


def load_single(
    weights: str, hub_id: str, files: Sequence[str], load_folder: Callable[[Path], Any], standin: Any
) -> Any:
    """As `load_sized` for a model of one size: `standin` has `synthetic(why)` and `tiny()`."""
    if weights == "synthetic":
        return standin.synthetic("as asked")
    if weights == "tiny":
        return standin.tiny()
    if weights == "auto":
        try:
            folder = fetch(hub_id, files)
        except UserError as error:
            return standin.synthetic(str(error))
        return load_folder(folder)
    return load_folder(locate(weights, files))


def load_sized(
    weights: str, hub_ids: Mapping[str, str], files: Sequence[str], load_folder: Callable[[Path], Any], standin: Any
) -> Any:
    """What `load_folder` makes of the folder that `weights` stands for, or what `standin` invents.

    `standin` is the recipe's module with `synthetic(size, why)` and `tiny()`; auto comes to it when the hub cannot be
    reached. Raises `UserError` for a folder that is missing.
    """
    default = next(iter(hub_ids))
    name, _, size = weights.partition(":")
    if name == "synthetic" and (not size or size in hub_ids):
        return standin.synthetic(size or default, "as asked")
    if weights == "tiny":
        return standin.tiny()
    if weights == "auto":
        try:
            folder = fetch(hub_ids[default], files)
        except UserError as error:
            return standin.synthetic(default, str(error))
        return load_folder(folder)
    return load_folder(locate(weights, files))


def locate(weights: str, hub_files: Sequence[str]) -> Path:
    """The folder that a path or a hub id names, fetched if needed. Raises `UserError` when there is none."""
    path = Path(weights).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{weights} is a file: --weights takes the folder that holds config.json and model.safetensors")
    if path.is_absolute() or weights.startswith((".", "~")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", weights):
        raise UserError(f"no such folder: {weights} (--weights takes auto, synthetic, tiny, a folder or a hub id)")
    return fetch(weights, hub_files)


def fetch(hub_id: str, files: Sequence[str]) -> Path:
    """The local folder of a hub repository: from the cache when it is complete there, else from the network.

    `files` are the patterns of what is needed: repositories also hold the files of other runtimes.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
        if (folder / "config.json").is_file() and any(folder.glob("model*.safetensors")):
            return folder
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(files), etag_timeout=5))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"{hub_id} is not in the local cache and the hub gave: {first_line(error)}") from error
    except Exception as error:
        # The hub client passes on its HTTP library's own errors, whose types are not part of its interface.
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2", "requests"):
            raise
        raise UserError(f"{hub_id} is not in the local cache and the hub gave: {first_line(error)}") from error


def pretrained(kind: Any, source: Path | str, **options: Any) -> Any:
    """`from_pretrained` in float32 that refuses what transformers only warns of: weights that are not there."""
    import torch

    model, info = kind.from_pretrained(source, dtype=torch.float32, output_loading_info=True, **options)
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise ValueError(f"{len(missing)} weights are missing or of another shape, such as {missing[0]}")
    return model.eval()


@contextmanager
def readable(source: Path | str, what: str) -> Iterator[None]:
    """Turns the errors of a file that is missing, cut short or not what it should be into one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        raise UserError(f"cannot read {what} in {source}: {first_line(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `UserError` when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"cannot read {path}: it holds no JSON object")
    return value


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
