"""From a weights argument to a checkpoint in memory: the model and its processor.

`auto | synthetic | tiny | PATH | HUB_ID`. A PATH is a folder in the hub's layout, as `save_pretrained` of the model
and of its processor write it: config.json, model.safetensors, processor_config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.recipe import UserError
from zoo import weights as source

HUB_ID = "nvidia/Nemotron-3-Diarization"
_HUB_FILES = ("*.json", "model*.safetensors")


@dataclass
class Checkpoint:
    """Everything that is loaded for one export."""

    model: Any  # Nemotron3DiarizationForAudioFrameClassification, float32
    processor: Any  # Nemotron3DiarizationProcessor
    is_trained: bool = True
    notices: tuple[str, ...] = field(default=())


def load(weights: str) -> Checkpoint:
    """The checkpoint that `weights` names. Raises `UserError` for one that is missing, unreadable or damaged."""
    from recipes.nemotron_diarization import standin

    loaded: Checkpoint = source.load_single(weights, HUB_ID, _HUB_FILES, load_folder, standin)
    return loaded


def load_folder(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`. Raises `UserError` with the file that is missing or damaged."""
    from transformers import Nemotron3DiarizationForAudioFrameClassification, Nemotron3DiarizationProcessor

    config = source.read_json(folder / "config.json")
    if config.get("model_type") != "nemotron3_diarization":
        raise UserError(
            f"{folder / 'config.json'} describes a {config.get('model_type')!r} model, not a Nemotron diarization model"
        )
    with source.readable(folder, "the model"):
        model = source.pretrained(Nemotron3DiarizationForAudioFrameClassification, folder)
    with source.readable(folder, "the processor"):
        processor = Nemotron3DiarizationProcessor.from_pretrained(folder, local_files_only=True)
        extractor = processor.feature_extractor
        sizes = {
            "feature_size": (extractor.feature_size, model.config.audio_config.num_mel_bins),
            "subsampling_factor": (processor.subsampling_factor, model.config.audio_config.subsampling_factor),
        }
        for name, (of_processor, of_model) in sizes.items():
            if of_processor != of_model:
                raise ValueError(f"its {name} is {of_processor}, the model's {of_model}")
    return Checkpoint(model, processor)
