"""`build`: a checkpoint to the two exported methods, their metadata and the assets of the torch-free runner."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import Dim

from recipes.phonon import checkpoint as checkpoints
from recipes.phonon.checkpoint import Checkpoint
from recipes.phonon.codec import DecodeMethod
from recipes.phonon.modules import FrameMethod
from recipes.phonon.text import frame_budget
from recipes.recipe import Bundle, ExportRequest, Method, UserError

CHUNK_TOKENS = 50  # the processor's limit: sentences are grouped up to it
# What a chunk may really hold: a joined chunk is tokenized again and gains a few tokens, and a sentence that is
# a little longer stays whole. Prompts, frame budget and caches are sized by it.
TEXT_CAPACITY = 64
# transformers' defaults where the checkpoint's generation config says nothing (generation_pocket_tts.py)
GENERATION = {"num_flow_steps": 1, "eos_threshold": -4.0, "min_frames_before_eos": 6}


def build(request: ExportRequest) -> Bundle:
    """The methods `frame` and `decode` of the checkpoint that `request` names, in its precision."""
    checkpoint = checkpoints.load(request.weights)
    bundle = make_bundle(checkpoint)
    if request.dtype == "fp16":
        for method in bundle.methods.values():
            method.module.half()
    return bundle


def make_bundle(checkpoint: Checkpoint) -> Bundle:
    """Methods in the dtype of the checkpoint's weights; it gives up its modules to them."""
    metadata = make_metadata(checkpoint)
    model, codec = checkpoint.model, checkpoint.codec
    model.requires_grad_(False)
    codec.requires_grad_(False)
    dtype = model.eos_head.weight.dtype
    steps = _generation(model)["num_flow_steps"]
    frame = FrameMethod(model, metadata["capacity"], steps).eval()
    decode = DecodeMethod(codec, model.latent_mean, model.latent_std, metadata["max_frames"]).eval()
    length, width = min(7, metadata["max_prompt"]), metadata["voice_dim"] + metadata["latent_dim"]
    positions = Dim("positions", min=1, max=metadata["max_prompt"])
    latent, zero = torch.zeros(1, metadata["latent_dim"], dtype=dtype), torch.zeros(1, dtype=torch.int64)
    inputs = (torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, length, width, dtype=dtype), zero, latent)

    def write_assets(folder: Path) -> None:
        checkpoint.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(checkpoint.chat_template, encoding="utf-8")
        (folder / "voices").mkdir()
        for name, latents in checkpoint.voices.items():
            np.save(folder / "voices" / f"{name}.npy", latents)

    return Bundle(
        methods={
            "frame": Method(frame, inputs, ({1: positions}, {1: positions}, None, None)),
            "decode": Method(decode, (latent, zero)),
        },
        metadata=metadata,
        write_assets=write_assets,
        notices=checkpoint.notices,
    )


def make_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the runner must know, and the sizes that the program is exported for."""
    config, codec, tokenizer = checkpoint.model.config, checkpoint.codec.config, checkpoint.tokenizer
    if codec.frame_rate != config.frame_rate:
        raise UserError(f"the model makes {config.frame_rate} latents a second, its codec takes {codec.frame_rate}")
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        raise UserError("the checkpoint's tokenizer rewrites spaces when it decodes, which the runner does not")
    voice_frames = max((len(latents) for latents in checkpoint.voices.values()), default=0)
    max_prompt = voice_frames + TEXT_CAPACITY + 1  # and the first audio position
    max_frames = frame_budget(TEXT_CAPACITY, config.frame_rate)
    generation = _generation(checkpoint.model)
    sampled = checkpoint.model.generation_config.do_sample
    temperature = checkpoint.model.generation_config.temperature
    return {
        "sampling_rate": codec.sampling_rate,
        "frame_size": codec.frame_size,
        "frame_rate": config.frame_rate,
        "latent_dim": config.latent_dim,
        "voice_dim": config.audio_prompt_dim,
        "chunk_tokens": CHUNK_TOKENS,
        "text_capacity": TEXT_CAPACITY,
        "max_prompt": max_prompt,
        "max_frames": max_frames,
        # positions of the KV cache (the last frame of the budget is never fed back), to whole rows of 16 for kernels
        "capacity": math.ceil((max_prompt + max_frames - 1) / 16) * 16,
        "audio_prompt_id": config.audio_prompt_token_id,
        "audio_latent_id": config.audio_latent_token_id,
        "audio_bos_id": config.audio_bos_token_id,
        "generation": {
            # transformers' default for a config that samples without naming a temperature
            "temperature": float(1.0 if temperature is None else temperature) if sampled else 0.0,
            "num_flow_steps": generation["num_flow_steps"],
            "eos_threshold": generation["eos_threshold"],
            "min_frames_before_eos": generation["min_frames_before_eos"],
        },
        "processor": vars(checkpoint.processor),
        "tokens": {
            "audio_prompt": str(tokenizer.audio_prompt_token),
            "placeholders": [
                str(token)
                for token in (tokenizer.audio_prompt_token, tokenizer.audio_bos_token, tokenizer.audio_latent_token)
            ],
            "unk_id": tokenizer.unk_token_id,
            "special_tokens_map": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        },
        "voices": sorted(checkpoint.voices),
        "default_voice": _default_voice(checkpoint),
        "is_speech": checkpoint.is_speech,
    }


def _generation(model: Any) -> dict[str, Any]:
    stated = {name: getattr(model.generation_config, name, None) for name in GENERATION}
    return {name: default if stated[name] is None else stated[name] for name, default in GENERATION.items()}


def _default_voice(checkpoint: Checkpoint) -> str | None:
    return "default" if "default" in checkpoint.voices else min(checkpoint.voices, default=None)
