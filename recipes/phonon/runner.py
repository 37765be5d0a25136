"""Speech from an exported Phonon, without torch: text in, frames of 80 ms out as soon as each is decoded.

A text becomes chunks (text.py), each an utterance of its own as in transformers: its prompt at position 0, its
audio stream from frame 0. A frame is two calls of the program, `frame` and `decode` (modules.py). The samples of
a text are its frames one after the other, whoever consumes them: streamed and whole-file output are the same.

Noise: `numpy.random.default_rng(seed)`, one draw of standard normal float32 `[1, latent_dim]` a frame, in order
over all chunks, times `sqrt(temperature)` (temperature is the variance, as in transformers).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from recipes.phonon.text import EndOfSpeech, Prompt, TextFrontend
from recipes.recipe import UserError


class Runnable(Protocol):
    """What runs the exported methods: a `zoo.program.Program`."""

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]: ...


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


class Speaker:
    """Speaks with one loaded program. One utterance at a time: the program's state is the speaker's.

    `assets` is the folder beside the `.pte`. `warn` gets the line of an utterance that hit its frame budget.
    `dtype` is the float type of the program's inputs; only the float64 reference of the accuracy check changes it.
    """

    def __init__(
        self,
        program: Runnable,
        assets: Path,
        warn: Callable[[str], None] = _warn,
        dtype: type[np.floating[Any]] = np.float32,
    ):
        try:
            self.metadata: dict[str, Any] = json.loads((assets / "recipe.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {assets / 'recipe.json'}: {error}; export again") from error
        self.sample_rate: int = self.metadata["sampling_rate"]
        self.voices: tuple[str, ...] = tuple(self.metadata["voices"])
        self._program = program
        self._assets = assets
        self._warn = warn
        self._dtype = dtype
        self._text = TextFrontend(assets, self.metadata)
        length = int(self.metadata["processor"]["fade_in_duration"] * self.sample_rate)
        self._fade = np.linspace(0, 1, length, dtype=np.float32).astype(dtype)

    def stream(
        self, text: str, voice: str | None = None, seed: int = 0, temperature: float | None = None
    ) -> Iterator[np.ndarray]:
        """Frames of `text`, float32 `[frame_size]` each. What is wrong with the arguments is raised here and now.

        Raises `UserError` for a text without words, an unknown voice, a negative seed or temperature.
        """
        generation = self.metadata["generation"]
        if temperature is None:
            temperature = generation["temperature"]
        if not (math.isfinite(temperature) and temperature >= 0):
            raise UserError(f"the temperature must be a number of at least 0, not {temperature}")
        if seed < 0:
            raise UserError(f"the seed must be at least 0, not {seed}")
        latents = self._voice(voice)
        chunks = self._text.split(text, has_voice=len(latents) > 0)
        prompts = [self._text.prompt(chunk, len(latents)) for chunk in chunks]
        rng = np.random.default_rng(seed)
        scale = np.float32(math.sqrt(temperature))

        def noise() -> np.ndarray:
            drawn = rng.standard_normal((1, self.metadata["latent_dim"]), dtype=np.float32) * scale
            return drawn.astype(self._dtype)

        return (frame for prompt in prompts for frame in self._utterance(prompt, latents, noise))

    def _voice(self, name: str | None) -> np.ndarray:
        """Latents of the voice `[frames, voice_dim]`; no rows for a checkpoint that ships no voice."""
        if name is None:
            name = self.metadata["default_voice"]
            if name is None:
                return np.zeros((0, self.metadata["voice_dim"]), dtype=self._dtype)
        if name not in self.voices:
            known = ", ".join(self.voices) or "none"
            raise UserError(f"unknown voice {name!r}: this model has {known}")
        path = self._assets / "voices" / f"{name}.npy"
        try:
            return np.load(path, allow_pickle=False).astype(self._dtype)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read voice {path}: {error}; export again") from error

    def _utterance(self, prompt: Prompt, voice: np.ndarray, noise: Callable[[], np.ndarray]) -> Iterator[np.ndarray]:
        meta = self.metadata
        voice_dim, length = meta["voice_dim"], prompt.ids.shape[1]
        if length > meta["max_prompt"]:
            raise UserError(f"a prompt of {length} positions; the program was exported for {meta['max_prompt']}")
        ids = prompt.ids
        features = np.zeros((1, length, voice_dim + meta["latent_dim"]), dtype=self._dtype)
        features[0, ids[0] == meta["audio_prompt_id"], :voice_dim] = voice
        end = EndOfSpeech(
            meta["generation"]["eos_threshold"], prompt.frames_after_eos, meta["generation"]["min_frames_before_eos"]
        )
        position = 0
        for frame in range(prompt.budget):
            latent, logit = self._program.run("frame", ids, features, np.array([position]), noise())
            (samples,) = self._program.run("decode", latent, np.array([frame]))
            samples = np.array(samples, dtype=self._dtype).reshape(-1)
            if not (np.isfinite(latent).all() and np.isfinite(samples).all()):
                raise UserError("the program produced samples that are not finite: nothing more is spoken")
            self._fade_in(samples, frame)
            yield samples
            if end.done(float(logit[0, 0])):
                return
            position += ids.shape[1]
            ids = np.array([[meta["audio_latent_id"]]])
            features = np.zeros((1, 1, features.shape[2]), dtype=self._dtype)
            features[0, 0, voice_dim:] = latent[0]
        self._warn(
            f"stopped at the frame budget of {prompt.budget} frames ({prompt.budget / meta['frame_rate']:.1f} s): "
            f"the model gave no end of speech for {prompt.text!r}"
        )

    def _fade_in(self, samples: np.ndarray, frame: int) -> None:
        """Fades the start of an utterance in place: a fresh decoder state starts with a small step, a click."""
        fade = self._fade[frame * len(samples) :][: len(samples)]
        samples[: len(fade)] *= fade
