"""What the Phonon tests share: a tiny bundle in eager PyTorch with its assets, and transformers' own processor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.eager import EagerProgram
from recipes.phonon.checkpoint import Checkpoint
from recipes.phonon.runner import Speaker
from recipes.phonon.text import TextFrontend
from recipes.recipe import Bundle


@dataclass
class Ready:
    """A tiny bundle with its assets on disk, run in eager PyTorch."""

    bundle: Bundle
    assets: Path
    program: EagerProgram

    def speaker(self, **options: Any) -> Speaker:
        return Speaker(self.program, self.assets, **options)

    @property
    def frontend(self) -> TextFrontend:
        return TextFrontend(self.assets, self.bundle.metadata)


def make_processor(source: Checkpoint) -> Any:
    from transformers import PocketTTSFeatureExtractor, PocketTTSProcessor

    return PocketTTSProcessor(
        PocketTTSFeatureExtractor(), source.tokenizer, source.codec, chat_template=source.chat_template
    )


def reference_prompt(processor: Any, text: str, voice: torch.Tensor) -> Any:
    conversation = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": text}]}]
    prompt = processor.apply_chat_template(conversation)
    return processor(text=prompt, audio_prompt_latents=[voice], return_tensors="pt")
