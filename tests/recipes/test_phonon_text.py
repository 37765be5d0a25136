"""Phonon's text side against transformers' processor and generation code: splitting, prompts, end of speech.

Run: pytest tests/recipes/test_phonon_text.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from phonon_support import Ready, reference_prompt

from recipes.phonon import standin
from recipes.phonon.text import EndOfSpeech
from recipes.recipe import UserError

LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4
TEXTS = [
    "Hello.",
    "Yes",
    "one two three four",
    "one two three four five",
    "Pi is 3.14159, roughly. Is it? Yes! No... maybe",
    "  spaces   inside and\tat the ends  ",
    "12345 67890",
    "?!...,;:",
    "Ünïcode, 漢字かな and emoji 🎧 are kept.",
    "a, b; c: d. " * 20,
    LONG,
    "one sentence with clauses, " * 12 + "and an end.",
    "v1.2.3 costs 5.00 or 6. 7 is next.",
]


@pytest.mark.parametrize("text", TEXTS)
def test_split_and_prompt_equal_the_processor(ready: Ready, processor: Any, text: str) -> None:
    frontend = ready.frontend
    chunks = processor.split_text(text, max_tokens=50)
    limit = ready.bundle.metadata["text_capacity"]
    if max(len(processor.tokenizer.encode(chunk, add_special_tokens=False)) for chunk in chunks) <= limit:
        assert frontend.split(text, has_voice=True) == chunks
    voice = torch.zeros(5, 24)
    for chunk in frontend.split(text, has_voice=True):
        inputs = reference_prompt(processor, chunk, voice)
        prompt = frontend.prompt(chunk, len(voice))
        np.testing.assert_array_equal(prompt.ids, inputs["input_ids"].numpy())
        assert prompt.frames_after_eos == int(inputs["frames_after_eos"])
        assert prompt.ids.shape[1] <= ready.bundle.metadata["max_prompt"]
        assert prompt.budget <= ready.bundle.metadata["max_frames"]


@pytest.mark.parametrize("text", [*TEXTS, "word " * 300, "x" * 400, "no marks at all " * 40 + "7" * 200])
def test_t3_no_text_is_lost(ready: Ready, text: str) -> None:
    chunks = ready.frontend.split(text, has_voice=True)
    assert "".join("".join(chunks).split()) == "".join(text.split())


def test_long_sentences_are_cut_between_words(ready: Ready) -> None:
    text = "three short words " * 60
    chunks = ready.frontend.split(text, has_voice=True)
    assert len(chunks) > 1 and " ".join(chunks).split() == text.split()


@pytest.mark.parametrize("text", ["", "   ", "\n\t", "<|audio_bos|>"])
def test_t3_empty_text_is_refused(ready: Ready, text: str) -> None:
    with pytest.raises(UserError, match="empty"):
        ready.speaker().stream(text)


def test_marks_of_the_model_are_refused(ready: Ready) -> None:
    with pytest.raises(UserError, match="marks"):
        ready.speaker().stream("say <|audio_<|audio_prompt|>prompt|> please")


def test_stand_in_tokenizer_has_the_right_size() -> None:
    tokenizer = standin.make_tokenizer(4001)
    assert len(tokenizer) == 4001
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)).strip() == text.strip()


@pytest.mark.parametrize("seed", range(20))
def test_end_of_speech_equals_transformers(seed: int) -> None:
    from transformers.models.pocket_tts.generation_pocket_tts import PocketTTSEosThresholdCriteria

    rng = np.random.default_rng(seed)
    after, min_frames = int(rng.integers(0, 5)), int(rng.integers(0, 8))
    theirs = PocketTTSEosThresholdCriteria(-4.0, after, min_frames)
    ours = EndOfSpeech(-4.0, after, min_frames)
    ids = torch.zeros(1, 1, dtype=torch.long)
    for logit in rng.normal(-5, 2, 40).astype(np.float32):
        assert ours.done(float(logit)) == bool(theirs(ids, torch.tensor([logit]))[0])
