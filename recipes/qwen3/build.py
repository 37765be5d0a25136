"""`build`: a checkpoint to the exported methods, its metadata and the assets of the torch-free runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

from recipes.qwen3 import checkpoint as checkpoints
from recipes.qwen3.checkpoint import Checkpoint
from recipes.qwen3.choose import DrawMethod, LikeliestMethod
from recipes.qwen3.modules import StepMethod
from recipes.recipe import Bundle, ExportRequest, Method, UserError

MAX_PROMPT = 512  # positions of one call: a longer prompt is read in parts, which bounds the memory that a call takes
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def build(request: ExportRequest) -> Bundle:
    """The methods of the checkpoint that `request` names, in its precision."""
    return make_bundle(checkpoints.load(request.weights), request)


def make_bundle(checkpoint: Checkpoint, request: ExportRequest) -> Bundle:
    """The bundle of a checkpoint, which gives up its modules to it."""
    cache_dtype = request.option("kv-dtype", request.dtype)
    metadata = make_metadata(checkpoint, request)
    checkpoint.model.requires_grad_(False)
    step = StepMethod(checkpoint.model, metadata["capacity"], DTYPES[cache_dtype]).eval()
    if request.dtype == "fp16":
        step.half_linears()
    ids = torch.zeros(1, min(7, metadata["max_prompt"]), dtype=torch.int64)
    positions = Dim("positions", min=1, max=metadata["max_prompt"])

    def write_assets(folder: Path) -> None:
        checkpoint.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(checkpoint.chat_template, encoding="utf-8")

    logits, draw = torch.zeros(1, metadata["vocab_size"]), DrawMethod(metadata["vocab_size"])
    metadata["candidates"] = draw.candidates
    settings = torch.tensor([1.0, 0.0, 0.0, 0.5])
    return Bundle(
        methods={
            "step": Method(step, (ids, torch.zeros(1, dtype=torch.int64)), ({1: positions}, None)),
            "likeliest": Method(LikeliestMethod(), (logits,)),
            "draw": Method(draw, (logits, torch.ones(1, dtype=torch.int64), settings)),
        },
        metadata=metadata,
        write_assets=write_assets,
        notices=checkpoint.notices,
    )


def make_metadata(checkpoint: Checkpoint, request: ExportRequest) -> dict[str, Any]:
    """What the runner must know, and the sizes that the program is exported for."""
    config, tokenizer = checkpoint.model.config, checkpoint.tokenizer
    if json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]["type"] != "ByteLevel":
        raise UserError("the checkpoint's tokenizer is not a byte-level one, as Qwen3's is")
    limit = config.max_position_embeddings
    asked = request.option("context", None)
    capacity = min(checkpoint.context, limit) if asked is None else int(asked)
    if capacity > limit:
        raise UserError(f"a context of {capacity} tokens, but the model was made for {limit}")
    return {
        "capacity": capacity,
        "max_prompt": min(MAX_PROMPT, capacity // 4),
        "vocab_size": config.vocab_size,
        "stop_ids": _stop_ids(checkpoint),
        "sampling": _sampling(checkpoint.model.generation_config),
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "is_language": checkpoint.is_language,
    }


def _stop_ids(checkpoint: Checkpoint) -> list[int]:
    """Tokens that end an answer: those of the generation config and the tokenizer's own."""
    sources = (checkpoint.model.generation_config.eos_token_id, checkpoint.tokenizer.eos_token_id)
    stops: set[int] = set()
    for source in sources:
        stops.update(source if isinstance(source, list) else [] if source is None else [source])
    if not stops:
        raise UserError("neither the generation config nor the tokenizer names a token that ends an answer")
    return sorted(stops)


def _sampling(config: Any) -> dict[str, float]:
    """The fields of `Sampling` that the generation config states, with transformers' meaning of what it does not."""

    def stated(name: str, default: float) -> float:
        value = getattr(config, name, None)
        return default if value is None else value

    return {
        "temperature": float(stated("temperature", 1.0)) if config.do_sample else 0.0,
        "top_k": int(stated("top_k", 50)),
        "top_p": float(stated("top_p", 1.0)),
        "min_p": float(stated("min_p", 0.0)),
        "repetition_penalty": float(stated("repetition_penalty", 1.0)),
    }
