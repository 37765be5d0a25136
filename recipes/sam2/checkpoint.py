"""From a weights argument to a checkpoint in memory: the model and how its image processor prepares a picture.

`auto | synthetic[:SIZE] | tiny | PATH | HUB_ID`. A PATH is a folder in the hub's layout: config.json,
model.safetensors, and preprocessor_config.json or processor_config.json. Checkpoints of the video model
(`model_type: sam2_video`, which the published ones are) hold the image model: their memory is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.recipe import UserError
from zoo.weights import load_sized, pretrained, read_json, readable, sized

SIZES = ("tiny", "small", "base-plus", "large")  # the first is the default
HUB_IDS = {size: f"facebook/sam2.1-hiera-{size}" for size in SIZES}
HUB_ID = HUB_IDS[SIZES[0]]
_HUB_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "model*.safetensors*")
_MODEL_TYPES = ("sam2", "sam2_video")
_BILINEAR = 2  # Pillow's number, which image processors store


@dataclass
class Checkpoint:
    """Everything that is loaded for one export. `mean` and `std`: of the colours, in units of 1 = white."""

    model: Any  # Sam2Model, float32
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    is_trained: bool = True
    notices: tuple[str, ...] = ()


def weights_argument(weights: str, size: str | None) -> str:
    """`--weights` and `--size` as one weights argument. Raises `UserError` when they disagree."""
    return sized(weights, size, HUB_IDS)


def load(weights: str) -> Checkpoint:
    """The checkpoint that `weights` names. Raises `UserError` for one that is missing, unreadable or damaged."""
    from recipes.sam2 import standin

    found: Checkpoint = load_sized(weights, HUB_IDS, _HUB_FILES, load_folder, standin)
    return found


def load_folder(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`. Raises `UserError` with the file that is missing or damaged."""
    from transformers import Sam2Model

    described = read_json(folder / "config.json").get("model_type")
    if described not in _MODEL_TYPES:
        raise UserError(f"{folder / 'config.json'} describes a {described!r} model, not SAM 2")
    with readable(folder, "the model"):
        model = pretrained(Sam2Model, folder, attn_implementation="sdpa")
    settings = _picture_settings(folder)
    size = model.config.prompt_encoder_config.image_size
    checks = {
        "size": (settings.get("size"), {"height": size, "width": size}),
        "resample": (settings.get("resample", _BILINEAR), _BILINEAR),
        "rescale_factor": (settings.get("rescale_factor", 1 / 255), 1 / 255),
        **{name: (settings.get(name, True), True) for name in ("do_resize", "do_rescale", "do_normalize")},
    }
    for name, (found, wanted) in checks.items():
        if found != wanted:
            raise UserError(f"{folder}: the image processor's {name} is {found}; only {wanted} is supported")
    with readable(folder, "the image processor's image_mean and image_std"):
        mean, std = (tuple(float(value) for value in settings[name]) for name in ("image_mean", "image_std"))
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise UserError(f"{folder}: the image processor's image_mean and image_std must be three numbers each")
    return Checkpoint(model, mean, std)


def _picture_settings(folder: Path) -> dict[str, Any]:
    """The image processor's settings: a file of their own, or, as newer versions save them, within the processor's."""
    own, shared = folder / "preprocessor_config.json", folder / "processor_config.json"
    if own.is_file():
        return read_json(own)
    if shared.is_file() and isinstance(settings := read_json(shared).get("image_processor"), dict):
        return settings
    raise UserError(f"no such file: {own} (the image processor's settings)")
