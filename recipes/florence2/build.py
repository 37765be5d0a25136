"""`build`: a checkpoint to the three exported methods, their metadata and the assets of the torch-free runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

from recipes.florence2 import checkpoint as checkpoints
from recipes.florence2.checkpoint import Checkpoint
from recipes.florence2.modules import EncodeMethod, EncoderInputs, StepMethod, VisionMethod, half_linears, make_caches
from recipes.florence2.tasks import TASKS
from recipes.normalize import Normalize
from recipes.recipe import Bundle, ExportRequest, Method, UserError
from recipes.transformer import Vocabulary

MAX_BEAMS = 8
SLOT_BEAMS = 3  # slots for so many texts of full length that share nothing; the reference's number of beams
# Defaults of transformers where the generation config says nothing
_GENERATION: dict[str, Any] = {
    "num_beams": 1, "early_stopping": False, "no_repeat_ngram_size": 0, "length_penalty": 1.0,
    "forced_bos_token_id": None, "forced_eos_token_id": None,
}  # fmt: skip
# Settings that change which tokens are allowed, with the value at which they do nothing
_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "min_length": 0,
    "min_new_tokens": 0, "bad_words_ids": None, "sequence_bias": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "num_beam_groups": 1,
}  # fmt: skip


def build(request: ExportRequest) -> Bundle:
    """The methods of the checkpoint that `request` names, in its precision."""
    return make_bundle(checkpoints.load(request.weights), request.dtype)


def make_bundle(checkpoint: Checkpoint, dtype: str = "fp32") -> Bundle:
    """The bundle of a checkpoint, which gives up its modules to it."""
    model = checkpoint.model
    metadata = make_metadata(checkpoint)
    model.requires_grad_(False)
    # Written out: what transformers puts around torch's own attention depends on the strides that a trace finds.
    model.set_attn_implementation("eager")
    text = model.config.text_config
    tokens, slots, side = metadata["image_tokens"], metadata["slots"], metadata["picture"]["side"]
    pictures = checkpoint.processor.image_processor
    normalize = Normalize(pictures.image_mean, pictures.image_std, pictures.rescale_factor)
    inputs = EncoderInputs(text.max_position_embeddings, text.d_model)
    shared = model.model.language_model.shared.weight
    vocabulary = Vocabulary(shared, shared if text.tie_word_embeddings else model.lm_head.weight)
    caches = make_caches(model, slots)
    modules = {
        "vision": VisionMethod(model, inputs, tokens, normalize),
        "encode": EncodeMethod(model, vocabulary, caches, inputs, tokens),
        "step": StepMethod(model, vocabulary, caches),
    }
    for module in modules.values():
        module.eval()
        if dtype == "fp16":
            half_linears(module)
    rows, prompt = Dim("rows", min=1, max=MAX_BEAMS), Dim("prompt", min=2, max=metadata["max_prompt"])
    three = torch.arange(3)
    mask = torch.zeros(3, slots, dtype=torch.bool)
    mask[three, three] = True
    methods = {
        "vision": Method(modules["vision"], (torch.zeros(1, side, side, 3, dtype=torch.uint8),)),
        "encode": Method(modules["encode"], (torch.zeros(1, 7, dtype=torch.int64),), ({1: prompt},)),
        "step": Method(
            modules["step"],
            (three[None], torch.zeros_like(three), three, mask, torch.tensor([tokens + 7])),
            ({1: rows}, {0: rows}, {0: rows}, {0: rows}, None),
        ),
    }

    def write_assets(folder: Path) -> None:
        checkpoint.processor.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))

    return Bundle(methods=methods, metadata=metadata, write_assets=write_assets, notices=checkpoint.notices)


def make_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the runner must know, and the sizes that the program is exported for."""
    processor, config = checkpoint.processor, checkpoint.model.config
    text, positions = config.text_config, config.text_config.max_position_embeddings
    picture = _picture(processor.image_processor)
    tokens = (picture["side"] // 32) ** 2 + 1
    if tokens != processor.num_image_tokens or processor.num_additional_image_tokens:
        raise UserError(
            f"the processor stands {processor.num_image_tokens} tokens for a picture, the model makes {tokens}"
        )
    tokenizer = processor.tokenizer
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        raise UserError("the checkpoint's tokenizer rewrites spaces when it decodes, which the runner does not")
    if json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]["type"] != "ByteLevel":
        raise UserError("the checkpoint's tokenizer is not a byte-level one, as Florence-2's is")
    return {
        "picture": picture,
        "image_tokens": tokens,
        "image_token": processor.image_token,
        "bos_token": str(tokenizer.bos_token),
        "eos_token": str(tokenizer.eos_token),
        "max_prompt": positions - tokens,
        "max_positions": positions,
        "slots": SLOT_BEAMS * positions,
        "max_beams": MAX_BEAMS,
        "vocab_size": text.vocab_size,
        "generation": _generation(checkpoint),
        "tasks": _tasks(processor),
        "banned_phrases": sorted(processor.post_processor.banned_grounding_tokens),
        "is_trained": checkpoint.is_trained,
    }


def _picture(processor: Any) -> dict[str, Any]:
    """How pictures are resized. Raises `UserError` for settings that the runner and `vision` do not know."""
    side, width = (getattr(processor.size, name, None) for name in ("height", "width"))
    steps = (processor.do_resize, processor.do_rescale, processor.do_normalize, not processor.do_center_crop)
    if not all(steps) or side is None or side != width:
        raise UserError("the processor does not make a normalized square of a picture, as Florence-2's does")
    if side % 32:
        raise UserError(f"pictures of {side} pixels a side: Florence-2 takes multiples of 32")
    return {"side": side, "resample": int(processor.resample)}


def _generation(checkpoint: Checkpoint) -> dict[str, Any]:
    """How texts are generated, by the checkpoint's generation config."""
    config = checkpoint.model.generation_config
    stated = {name: getattr(config, name, None) for name in _GENERATION}
    found = {name: default if stated[name] is None else stated[name] for name, default in _GENERATION.items()}
    for name, neutral in _NEUTRAL.items():
        if getattr(config, name, None) not in (None, neutral):
            raise UserError(f"the generation config sets {name}, which is not supported")
    ends = config.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not ends or config.decoder_start_token_id is None:
        raise UserError("the generation config names no token that starts or ends an answer")
    return {**found, "start_id": config.decoder_start_token_id, "stop_ids": ends}


def _tasks(processor: Any) -> dict[str, dict[str, Any]]:
    """Prompt and kind of answer of every task, as the processor has them."""
    rules = (processor.post_processor_config or {}).get("ocr", {})
    if rules.get("PATTERN") or rules.get("AREA_THRESHOLD"):
        raise UserError("the checkpoint's processor has rules of its own for regions of text, which are not supported")
    prompts = {**processor.task_prompts_without_inputs, **processor.task_prompts_with_input}
    if unknown := set(TASKS) - set(prompts):
        raise UserError(f"the processor has no task {min(unknown)}")
    return {
        task: {"prompt": prompts[task], "answer": processor.tasks_answer_post_processing_type[task]} for task in TASKS
    }
