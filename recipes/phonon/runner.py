"""Speech from an exported Phonon, without torch: text in, frames of 80 ms out as soon as each is decoded.

A text becomes chunks (text.py), each an utterance of its own as in transformers: its prompt at position 0, its
audio stream from frame 0. A frame is two calls of the program, `frame` and `decode` (modules.py). The samples of
a text are its frames one after the other, whoever consumes them: streamed and whole-file output are the same.

Where results can stay on the GPU (the direct runtime), latents never come back to it from the host, and the next
frame is at work there while this one's samples are on their way. What was begun beyond the last frame is dropped:
the samples are those of one call after the other, bit for bit.

Noise: `numpy.random.default_rng(seed)`, one draw of standard normal float32 `[1, latent_dim]` a frame, in order
over all chunks, times `sqrt(temperature)` (temperature is the variance, as in transformers).
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from backend.runtime.device_tensor import DeviceTensor
from recipes.phonon.text import EndOfSpeech, Prompt, TextFrontend
from recipes.recipe import Runnable, Starting, UserError, keeps_on_device

_Frame = tuple[np.ndarray, np.ndarray, np.ndarray]  # latent, end-of-speech logit, samples


class _Noise:
    """A draw a frame, in order; one that a frame did not use after all is the next one's."""

    def __init__(self, draw: Callable[[], np.ndarray]):
        self._draw = draw
        self._unused: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        return self._unused.pop() if self._unused else self._draw()

    def give_back(self, noise: np.ndarray) -> None:
        self._unused.append(noise)


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


class Speaker:
    """Speaks with one loaded program. One utterance at a time: the program's state is the speaker's.

    `assets` is the folder beside the `.pte`. `warn` gets the line of an utterance that hit its frame budget.
    `dtype` is the float type of the program's inputs; only the float64 reference of the accuracy check changes it.
    `ahead=False` makes one call after the other also where the program keeps results on the GPU.
    """

    def __init__(
        self,
        program: Runnable,
        assets: Path,
        warn: Callable[[str], None] = _warn,
        dtype: type[np.floating[Any]] = np.float32,
        ahead: bool = True,
    ):
        try:
            self.metadata: dict[str, Any] = json.loads((assets / "recipe.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {assets / 'recipe.json'}: {error}; export again") from error
        self.sample_rate: int = self.metadata["sampling_rate"]
        self.voices: tuple[str, ...] = tuple(self.metadata["voices"])
        self._program = program
        self.works_ahead: bool = ahead and keeps_on_device(program)
        self._assets = assets
        self._warn = warn
        self._dtype = dtype
        self._text = TextFrontend(assets, self.metadata)
        length = int(self.metadata["processor"]["fade_in_duration"] * self.sample_rate)
        self._fade = np.linspace(0, 1, length, dtype=np.float32).astype(dtype)

    def stream(
        self, text: str, voice: str | None = None, seed: int = 0, temperature: float | None = None
    ) -> Generator[np.ndarray]:
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

        def draw() -> np.ndarray:
            drawn = rng.standard_normal((1, self.metadata["latent_dim"]), dtype=np.float32) * scale
            return drawn.astype(self._dtype)

        noise = _Noise(draw)
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

    def _utterance(self, prompt: Prompt, voice: np.ndarray, noise: _Noise) -> Iterator[np.ndarray]:
        meta = self.metadata
        length = prompt.ids.shape[1]
        if length > meta["max_prompt"]:
            raise UserError(f"a prompt of {length} positions; the program was exported for {meta['max_prompt']}")
        end = EndOfSpeech(
            meta["generation"]["eos_threshold"], prompt.frames_after_eos, meta["generation"]["min_frames_before_eos"]
        )
        made = (self._made_ahead if self.works_ahead else self._made_in_turn)(prompt, voice, noise)
        with contextlib.closing(made):
            for frame, (latent, logit, samples) in enumerate(made):
                samples = np.array(samples, dtype=self._dtype).reshape(-1)
                if not (np.isfinite(latent).all() and np.isfinite(samples).all()):
                    raise UserError("the program produced samples that are not finite: nothing more is spoken")
                self._fade_in(samples, frame)
                yield samples
                if end.done(float(logit[0, 0])):
                    return
        self._warn(
            f"stopped at the frame budget of {prompt.budget} frames ({prompt.budget / meta['frame_rate']:.1f} s): "
            f"the model gave no end of speech for {prompt.text!r}"
        )

    def _made_in_turn(self, prompt: Prompt, voice: np.ndarray, noise: _Noise) -> Generator[_Frame]:
        features: Any = self._features(prompt, voice)
        for frame in range(prompt.budget):
            inputs = self._inputs(prompt, frame, features)
            latent, logit, features = self._outputs(self._program.run("frame", *inputs, noise.take()))
            (samples,) = self._program.run("decode", latent, np.array([frame]))
            yield latent, logit, samples

    def _made_ahead(self, prompt: Prompt, voice: np.ndarray, noise: _Noise) -> Generator[_Frame]:
        """A frame further than what was asked for, but for the first: nothing may delay that one."""
        program = cast(Starting, self._program)
        taken: dict[int, np.ndarray] = {}
        features: Any = self._features(prompt, voice)

        def begin(frame: int) -> list[DeviceTensor]:
            taken[frame] = noise.take()
            started = program.start("frame", *self._inputs(prompt, frame, features), taken[frame], fetch=(0, 1))
            return self._outputs(started)

        following = None
        try:
            for frame in range(prompt.budget):
                latent, logit, features = following or begin(frame)
                (samples,) = program.start("decode", latent, np.array([frame]), fetch=(0,))
                following = begin(frame + 1) if 0 < frame < prompt.budget - 1 else None
                del taken[frame]
                yield latent.numpy(), logit.numpy(), samples.numpy()
        finally:
            for unused in taken.values():
                noise.give_back(unused)

    def _features(self, prompt: Prompt, voice: np.ndarray) -> np.ndarray:
        """Of the prompt, `[1, S, V + L]`: the voice at its places."""
        meta = self.metadata
        features = np.zeros((1, prompt.ids.shape[1], meta["voice_dim"] + meta["latent_dim"]), dtype=self._dtype)
        features[0, prompt.ids[0] == meta["audio_prompt_id"], : meta["voice_dim"]] = voice
        return features

    def _inputs(self, prompt: Prompt, frame: int, features: Any) -> tuple[Any, Any, Any]:
        """ids, features and position of a call of `frame`: the prompt, or the latent of the frame before."""
        if frame == 0:
            return prompt.ids, features, np.array([0])
        return np.array([[self.metadata["audio_latent_id"]]]), features, np.array([prompt.ids.shape[1] + frame - 1])

    def _outputs(self, outputs: list[Any]) -> list[Any]:
        if len(outputs) != 3:
            raise UserError("the program is one of an older version: export again")
        return outputs

    def _fade_in(self, samples: np.ndarray, frame: int) -> None:
        """Fades the start of an utterance in place: a fresh decoder state starts with a small step, a click."""
        fade = self._fade[frame * len(samples) :][: len(samples)]
        samples[: len(fade)] *= fade
