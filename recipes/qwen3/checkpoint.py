"""From a weights argument to a checkpoint in memory: the model and its tokenizer with the chat template.

`auto | synthetic[:SIZE] | tiny | PATH | HUB_ID`. A PATH is a folder in the hub's layout, as `save_pretrained` of the
model and of its tokenizer write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.recipe import UserError
from zoo.weights import load_sized, pretrained, read_json, readable, sized

SIZES = ("0.6B", "1.7B", "4B")  # the first is the default
HUB_IDS = {size: f"Qwen/Qwen3-{size}" for size in SIZES}
HUB_ID = HUB_IDS[SIZES[0]]
_HUB_FILES = ("*.json", "*.jinja", "merges.txt", "model*.safetensors")
# Rotary embeddings whose frequencies do not depend on the length of the text: they fit a table.
_ROPE_TYPES = ("default", "linear", "yarn", "llama3")


@dataclass
class Checkpoint:
    """Everything that is loaded for one export. `context`: positions that the program gets unless it is asked."""

    model: Any  # Qwen3ForCausalLM, float32
    tokenizer: Any  # a fast tokenizer of transformers
    chat_template: str
    context: int = 4096
    is_language: bool = True
    notices: tuple[str, ...] = ()


def weights_argument(weights: str, size: str | None) -> str:
    """`--weights` and `--size` as one weights argument. Raises `UserError` when they disagree."""
    return sized(weights, size, HUB_IDS)


def load(weights: str) -> Checkpoint:
    """The checkpoint that `weights` names. Raises `UserError` for one that is missing, unreadable or damaged."""
    from recipes.qwen3 import standin

    found: Checkpoint = load_sized(weights, HUB_IDS, _HUB_FILES, load_folder, standin)
    return found


def load_folder(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`. Raises `UserError` with the file that is missing or damaged."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    config = read_json(folder / "config.json")
    if config.get("model_type") != "qwen3":
        raise UserError(f"{folder / 'config.json'} describes a {config.get('model_type')!r} model, not Qwen3")
    with readable(folder, "the model"):
        model = pretrained(Qwen3ForCausalLM, folder)
    _check_structure(folder, model.config)
    with readable(folder, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        template = tokenizer.chat_template
        tokenizer.backend_tokenizer.to_str()
    if not isinstance(template, str):
        raise UserError(f"{folder} has no chat template, which lays out the conversation")
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model only {model.config.vocab_size}"
        )
    return Checkpoint(model, tokenizer, template)


def _check_structure(folder: Path, config: Any) -> None:
    """Refuses variants of Qwen3 that the exported method does not compute."""
    if any(kind != "full_attention" for kind in config.layer_types):
        raise UserError(f"{folder}: layers with sliding-window attention are not supported")
    kind = config.rope_parameters["rope_type"]
    if kind not in _ROPE_TYPES:
        raise UserError(f"{folder}: rotary embeddings of type {kind!r} are not supported ({', '.join(_ROPE_TYPES)})")
