"""`build`: a checkpoint to the two exported methods, their metadata and the assets of the torch-free runner."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import Dim

from recipes.nemotron_diarization import checkpoint as checkpoints
from recipes.nemotron_diarization.checkpoint import Checkpoint
from recipes.nemotron_diarization.modules import EncodeMethod, StackMethod
from recipes.recipe import Bundle, ExportRequest, Method

LENGTH_MULTIPLE = 16  # frames of a call are padded to it: a stream then needs few plans, and rows are whole tiles
OFFLINE_FIELDS = ("chunk_length", "chunk_right_context", "chunk_left_context")
FIFO_FIELDS = ("fifo_length", "speaker_cache_update_period")


def build(request: ExportRequest) -> Bundle:
    """The methods `stack` and `encode` of the checkpoint that `request` names, in its precision."""
    return make_bundle(checkpoints.load(request.weights), request.dtype)


def make_bundle(checkpoint: Checkpoint, dtype: str = "fp32") -> Bundle:
    """Methods in the dtype of the checkpoint's weights, or in half precision; it gives up its modules to them."""
    model = checkpoint.model.requires_grad_(False)
    metadata = make_metadata(checkpoint)
    stack = StackMethod(model).eval()
    encode = EncodeMethod(model, metadata["max_frames"]).eval()
    if dtype == "fp16":
        metadata["input_dtype"] = "float16"
        stack.half()
        encode.half()
    kind = stack.projection.weight.dtype
    factor, multiple = metadata["subsampling_factor"], metadata["length_multiple"]
    groups = Dim("groups", min=1, max=metadata["max_stack"])
    length = Dim("length", min=1, max=metadata["max_frames"])
    # The longest step of a stream in its default mode: what `zoo bench` times.
    frames = -(-metadata["stream_frames"] // multiple) * multiple
    features = torch.zeros(1, metadata["stream_chunk"], factor, metadata["num_mel_bins"], dtype=kind)
    embeds = torch.zeros(1, frames, model.config.audio_config.hidden_size, dtype=kind)
    lengths = torch.tensor([metadata["stream_frames"], metadata["stream_frames"]])
    silence = model.silence_embeds.detach().double().numpy()
    arrays = {"silence": silence, **feature_constants(checkpoint.processor.feature_extractor)}

    def write_assets(folder: Path) -> None:
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)

    return Bundle(
        methods={
            "stack": Method(stack, (features,), ({1: groups},)),
            "encode": Method(encode, (embeds, lengths), ({1: length}, None)),
        },
        metadata=metadata,
        write_assets=write_assets,
        notices=checkpoint.notices,
    )


def feature_constants(extractor: Any) -> dict[str, np.ndarray]:
    """The window and the filter bank, rounded as the feature extractor rounds them."""
    kind = getattr(torch, extractor.mel_filters_dtype)
    window = torch.hann_window(extractor.win_length, periodic=False).to(kind).float()
    return {"window": window.numpy(), "mel_filters": extractor.mel_filters.to(kind).float().numpy()}


def make_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the runner must know, and the sizes that the program is exported for."""
    from transformers.models.nemotron_asr_streaming import feature_extraction_nemotron_asr_streaming as features

    config, processor = checkpoint.model.config, checkpoint.processor
    extractor = processor.feature_extractor
    policy = config.streaming_config
    modes = {name: [int(size) for size in sizes] for name, sizes in processor.streaming_modes.items()}
    longest = max(sum(sizes) for sizes in modes.values())
    offline = sum(getattr(config, name) for name in OFFLINE_FIELDS)
    cached = policy.speaker_cache_length
    most = cached + max(config.fifo_length + offline, policy.fifo_length + longest)
    chunk = sum(modes[processor.streaming_mode])
    return {
        "sampling_rate": extractor.sampling_rate,
        "hop_length": extractor.hop_length,
        "n_fft": extractor.n_fft,
        "win_length": extractor.win_length,
        "preemphasis": extractor.preemphasis,
        "log_guard": features.LOG_ZERO_GUARD_VALUE,
        "num_mel_bins": config.audio_config.num_mel_bins,
        "num_speakers": config.head_config.num_speakers,
        "subsampling_factor": config.audio_config.subsampling_factor,
        "offline": {name: getattr(config, name) for name in OFFLINE_FIELDS + FIFO_FIELDS},
        "streaming": {name: value for name, value in policy.to_dict().items() if isinstance(value, int | float)},
        "streaming_modes": modes,
        "streaming_mode": processor.streaming_mode,
        "length_multiple": LENGTH_MULTIPLE,
        "max_frames": math.ceil(most / LENGTH_MULTIPLE) * LENGTH_MULTIPLE,
        "max_stack": config.chunk_length + config.chunk_right_context,
        "stream_frames": cached + policy.fifo_length + chunk,
        "stream_chunk": chunk,
        "input_dtype": "float32",
        "is_trained": checkpoint.is_trained,
    }
