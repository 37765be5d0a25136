"""From a weights argument to a checkpoint in memory: the model and its processor.

`auto | synthetic[:SIZE] | tiny | PATH | HUB_ID`. A PATH is a folder in the hub's layout, as `save_pretrained` of the
model and of its processor write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.recipe import UserError
from zoo.weights import load_sized, pretrained, read_json, readable, sized

SIZES = ("base", "large")  # the first is the default
HUB_IDS = {size: f"florence-community/Florence-2-{size}" for size in SIZES}
HUB_ID = HUB_IDS[SIZES[0]]
_HUB_FILES = ("*.json", "*.txt", "model*.safetensors")


@dataclass
class Checkpoint:
    """Everything that is loaded for one export."""

    model: Any  # Florence2ForConditionalGeneration, float32
    processor: Any  # Florence2Processor
    is_trained: bool = True
    notices: tuple[str, ...] = ()


def weights_argument(weights: str, size: str | None) -> str:
    """`--weights` and `--size` as one weights argument. Raises `UserError` when they disagree."""
    return sized(weights, size, HUB_IDS)


def load(weights: str) -> Checkpoint:
    """The checkpoint that `weights` names. Raises `UserError` for one that is missing, unreadable or damaged."""
    from recipes.florence2 import standin

    found: Checkpoint = load_sized(weights, HUB_IDS, _HUB_FILES, load_folder, standin)
    return found


def load_folder(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`. Raises `UserError` with the file that is missing or damaged."""
    from transformers import Florence2ForConditionalGeneration

    config = read_json(folder / "config.json")
    if config.get("model_type") != "florence2":
        raise UserError(
            f"{folder / 'config.json'} describes a {config.get('model_type')!r} model, not Florence-2 as transformers "
            f"has it ({', '.join(HUB_IDS.values())})"
        )
    with readable(folder, "the model"):
        model = pretrained(Florence2ForConditionalGeneration, folder)
    with readable(folder, "the processor"):
        processor = load_processor(folder)
        processor.tokenizer.backend_tokenizer.to_str()
    if len(processor.tokenizer) > model.config.text_config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {len(processor.tokenizer)} tokens, the model only "
            f"{model.config.text_config.vocab_size}"
        )
    return Checkpoint(model, processor)


def load_processor(folder: Path) -> Any:
    """The processor in `folder`, with the image processor that needs Pillow alone."""
    from transformers import AutoTokenizer, Florence2Processor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    # Newer checkpoints keep all in processor_config.json, older ones the pictures' part in a file of its own.
    own = read_json(folder / "processor_config.json")
    pictures = own.get("image_processor")
    if pictures is None:
        pictures = read_json(folder / "preprocessor_config.json")
    return Florence2Processor(
        CLIPImageProcessorPil(**{name: value for name, value in pictures.items() if not name.endswith("_type")}),
        AutoTokenizer.from_pretrained(folder, local_files_only=True),
        num_additional_image_tokens=own.get("num_additional_image_tokens", 0),
        post_processor_config=own.get("post_processor_config"),
    )
