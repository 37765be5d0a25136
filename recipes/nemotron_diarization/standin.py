"""Stand-in checkpoints for machines that reach no hub: the model's structure on seeded weights. Not a diarization.

`synthetic` is the real configuration of 31 layers; `tiny` keeps every structure at a size that exports in seconds.

Initial weights would make parts invisible: the upsampler repeats frames, the silence embedding is zero, and every
probability is about a half. Both are drawn at random here, and the last linear layer is fitted to one invented
conversation, so that speech and silence come out apart: thresholds, the speaker cache and its compression work on
probabilities like a real model's. What it says of real voices means nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    Nemotron3DiarizationConfig,
    Nemotron3DiarizationForAudioFrameClassification,
    Nemotron3DiarizationProcessor,
    NemotronAsrStreamingFeatureExtractor,
)

from recipes.nemotron_diarization import voices
from recipes.nemotron_diarization.checkpoint import Checkpoint

NOTICE = "SYNTHETIC WEIGHTS ({why}): the model has the right structure and size, but who it hears means nothing"
SEED = 20260921
# What the last layer is fitted to: seconds and seed of invented conversations, or silence. One chunk each.
PIECES = ((3.0, None), (2.0, None), (26.0, 1), (3.0, 2), (8.0, 3))
SILENCE_WEIGHT = 4.0  # of its frames: silence must come out silent
SPEECH, SILENCE = 4.0, -5.0  # logits that the last layer is fitted to
RIDGE = 3e-6  # of the largest singular value, so that no weight is large and rounding stays small

TINY_CONFIG: dict[str, Any] = {
    "audio_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_mel_bins": 32,
        "initializer_range": 0.1,
    },
    "head_config": {"hidden_size": 128, "audio_hidden_size": 64},
    "initializer_range": 0.1,
}


def synthetic(why: str) -> Checkpoint:
    """The real configuration on seeded weights; `why` is told to the user."""
    return _make({}, NOTICE.format(why=why))


def tiny() -> Checkpoint:
    """The smallest configuration that keeps every structure, for tests."""
    return _make(TINY_CONFIG, NOTICE.format(why="tiny, for tests"))


def _make(settings: dict[str, Any], notice: str) -> Checkpoint:
    config: Any = Nemotron3DiarizationConfig(**settings)
    # The extractor's defaults are those of a speech recognizer; a mel bin count is all that differs here.
    extractor = NemotronAsrStreamingFeatureExtractor(
        feature_size=config.audio_config.num_mel_bins, return_attention_mask=True
    )
    processor = Nemotron3DiarizationProcessor(extractor, subsampling_factor=config.audio_config.subsampling_factor)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED)
        model = Nemotron3DiarizationForAudioFrameClassification(config).eval()
        torch.nn.init.normal_(model.silence_embeds, std=0.5)
        conv = model.model.upsampler.conv
        conv.weight.add_(0.3 * torch.randn_like(conv.weight) * conv.weight.shape[1] ** -0.5)
        conv.bias.normal_(std=0.1)
        _fit(model, processor)
    return Checkpoint(model, processor, is_trained=False, notices=(notice,))


def _fit(model: Any, processor: Any) -> None:
    """Ridge regression of the last layer on invented conversations and silences, speakers numbered by voice."""
    factor, speakers = processor.subsampling_factor, model.config.head_config.num_speakers
    hidden: list[torch.Tensor] = []
    hook = model.classifier.out_proj.register_forward_pre_hook(lambda _module, inputs: hidden.append(inputs[0][0]))
    rows: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for seconds, seed in PIECES:
        turns: list[voices.Turn] = []
        samples = np.zeros(round(seconds * voices.RATE), np.float32)
        if seed is not None:
            samples, turns = voices.conversation(seconds, voices=3, seed=seed)
        model(**processor(samples, sampling_rate=voices.RATE))
        target = torch.full((-(-len(hidden[-1]) // factor) * factor, speakers), SILENCE, dtype=torch.float64)
        for turn in turns:
            target[round(100 * turn.start) : round(100 * turn.end), turn.voice] = SPEECH
        weight = SILENCE_WEIGHT if seed is None else 1.0
        rows.append(_with_one(hidden.pop()) * weight)
        targets.append(target * weight)
    hook.remove()
    given = torch.cat(rows)
    gram = given.T @ given
    ridge = RIDGE * torch.linalg.matrix_norm(gram, 2) * torch.eye(len(gram), dtype=torch.float64)
    solved = torch.linalg.solve(gram + ridge, given.T @ torch.cat(targets))
    model.classifier.out_proj.weight.copy_(solved[:-1].T)
    model.classifier.out_proj.bias.copy_(solved[-1])


def _with_one(hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([hidden.double(), torch.ones(len(hidden), 1, dtype=torch.float64)], 1)
