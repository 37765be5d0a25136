"""From text to prompts, without torch: what `PocketTTSProcessor` and the generation code of transformers do.

`split` is `PocketTTSProcessor.split_text`; `prompt` is the chat template and the processor's `__call__` with a
voice given as latents; the frame budget and the end-of-speech rule are those of `PocketTTSGenerationMixin.generate`
and `PocketTTSEosThresholdCriteria`. The tests compare each with transformers' own on many texts.

One addition: transformers leaves a sentence without any clause mark as long as it is, and a KV cache of fixed
capacity cannot. A chunk of more than `text_capacity` tokens is cut between words (inside a word that is longer
than that by itself); below it, chunks are exactly those of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from recipes.recipe import UserError

SENTENCE_ENDS = (".", "!", "...", "?")
CLAUSE_ENDS = (",", ";", ":")


@dataclass(frozen=True)
class Prompt:
    """One chunk of text, ready to speak. ids `[1, S]` int64, with a placeholder id for every voice frame."""

    text: str
    ids: np.ndarray
    frames_after_eos: int
    budget: int  # frames at most


def frame_budget(text_tokens: int, frame_rate: float) -> int:
    """The most frames that a text of so many tokens may take, tail included."""
    return math.ceil((text_tokens / 3 + 2) * frame_rate)


class EndOfSpeech:
    """The end-of-speech rule of one utterance: `done(logit)` once a frame, in order."""

    def __init__(self, threshold: float, frames_after_eos: int, min_frames: int):
        self._threshold = threshold
        self._after = frames_after_eos
        self._min_frames = min_frames
        self._frame = 0
        self._remaining = -1  # frames left; -1 until the logit has crossed the threshold

    def done(self, logit: float) -> bool:
        """True when the frame of this logit is the last one."""
        can_end = self._frame >= self._min_frames
        self._frame += 1
        if self._remaining < 0 and can_end and logit > self._threshold:
            self._remaining = self._after
        done = self._remaining == 0
        if self._remaining > 0:
            self._remaining -= 1
        return done


class TextFrontend:
    """Tokenizer and chat template of one exported program, from its assets folder."""

    def __init__(self, assets: Path, metadata: dict[str, Any]):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(assets / "tokenizer.json"))
            template = (assets / "chat_template.jinja").read_text(encoding="utf-8")
        except Exception as error:  # the tokenizers library raises plain Exception for every fault of a file
            raise UserError(f"cannot read the tokenizer in {assets}: {error}; export again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._render = _compile(template)
        self._metadata = metadata
        self._tokens: dict[str, Any] = metadata["tokens"]
        self._placeholders: list[str] = self._tokens["placeholders"]
        self._placeholder_ids = {self._token_id(token) for token in self._placeholders}

    def _token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return self._tokens["unk_id"] if token_id is None else token_id

    def _encode(self, text: str, special: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def _decode(self, ids: list[int], skip_special: bool = False) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    def rendered(self, text: str, has_voice: bool) -> str:
        """`text` laid out by the chat template, with one placeholder for the voice."""
        content = [{"type": "audio", "audio": "voice"}] if has_voice else []
        content.append({"type": "text", "text": text})
        return self._render([{"role": "user", "content": content}], self._tokens["special_tokens_map"])

    def split(self, text: str, has_voice: bool = False) -> list[str]:
        """Chunks of `text`, cut after sentences, of at most `chunk_tokens` tokens where sentences and clauses allow.

        Raises `UserError` for a text without anything to say.
        """
        chunks = self._sentence_chunks(text) if text.strip() else []
        limit: int = self._metadata["text_capacity"]
        fitting: list[str] = []
        for chunk in chunks:
            fits = self._text_tokens(chunk, has_voice) <= limit
            fitting += [chunk] if fits else self._cut(chunk, has_voice)
        if not any(fitting):
            raise UserError("the text is empty: there is nothing to say")
        return [chunk for chunk in fitting if chunk]

    def _sentence_chunks(self, text: str) -> list[str]:
        # As PocketTTSProcessor.split_text.
        prompt = self.rendered(text, has_voice=False)
        for token in self._placeholders:
            prompt = prompt.replace(token, "")
        tokens = self._encode(prompt)
        limit: int = self._metadata["chunk_tokens"]
        segments: list[list[int]] = []
        for sentence in self._split_after(tokens, SENTENCE_ENDS, skip_decimal_points=True):
            segments += self._split_after(sentence, CLAUSE_ENDS) if len(sentence) > limit else [sentence]
        chunks: list[str] = []
        chunk, length = "", 0
        for segment in segments:
            if chunk and length + len(segment) > limit:
                chunks.append(chunk.strip())
                chunk, length = "", 0
            piece = self._decode(segment)
            chunk = f"{chunk} {piece}" if chunk else piece
            length += len(segment)
        if chunk:
            chunks.append(chunk.strip())
        return chunks

    def _split_after(
        self, tokens: list[int], marks: tuple[str, ...], skip_decimal_points: bool = False
    ) -> list[list[int]]:
        """`tokens` cut after each run of `marks`."""
        ids = {self._token_id(mark) for mark in marks} - {self._tokens["unk_id"]}
        starts = [0] + [
            index
            for index in range(1, len(tokens))
            if tokens[index - 1] in ids
            and tokens[index] not in ids
            and not (skip_decimal_points and self._is_decimal_point(tokens, index))
        ]
        return [tokens[start:end] for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)]

    def _is_decimal_point(self, tokens: list[int], index: int) -> bool:
        before, after = self._decode(tokens[:index]), self._decode(tokens[index:])
        return len(before) >= 2 and before[-1] == "." and before[-2].isdigit() and after[:1].isdigit()

    def _text_tokens(self, text: str, has_voice: bool) -> int:
        ids = self._encode(self.rendered(text, has_voice), special=True)
        return sum(token not in self._placeholder_ids for token in ids)

    def _cut(self, chunk: str, has_voice: bool) -> list[str]:
        """`chunk` cut between words into parts of at most `chunk_tokens` tokens, the longest first."""
        limit: int = self._metadata["chunk_tokens"]

        def fitting(pieces: Sequence[str], joint: str) -> int:
            """How many of `pieces`, joined, make at most `limit` tokens."""
            return _longest(len(pieces), lambda n: self._text_tokens(joint.join(pieces[:n]), has_voice) <= limit)

        parts: list[str] = []
        words = chunk.split()
        while words:
            if count := fitting(words, " "):
                parts.append(" ".join(words[:count]))
                words = words[count:]
            else:  # one word that is too long by itself
                count = max(1, fitting(words[0], ""))
                parts.append(words[0][:count])
                words[0] = words[0][count:]
        return parts

    def prompt(self, text: str, voice_frames: int) -> Prompt:
        """The prompt of one chunk that `split` gave."""
        voice: str = self._tokens["audio_prompt"]
        rendered = self.rendered(text, voice_frames > 0).replace(voice, voice * voice_frames)
        ids = self._encode(rendered, special=True)
        if not ids or ids[-1] != self._metadata["audio_bos_id"]:
            raise UserError("the checkpoint's chat template does not end the prompt with the first audio position")
        if ids.count(self._metadata["audio_prompt_id"]) != voice_frames:
            raise UserError(f"the text must not hold the model's own marks ({', '.join(self._placeholders)})")
        settings = self._metadata["processor"]
        words = len(self._decode(ids, skip_special=True).split())
        short = words <= settings["short_text_max_words"]
        text_tokens = sum(token not in self._placeholder_ids for token in ids)
        return Prompt(
            text=text,
            ids=np.asarray([ids], dtype=np.int64),
            frames_after_eos=settings["frames_after_eos_short_text" if short else "frames_after_eos"],
            budget=frame_budget(text_tokens, self._metadata["frame_rate"]),
        )


def _longest(count: int, fits: Callable[[int], bool]) -> int:
    """The largest n up to `count` with `fits(n)`, by bisection; 0 when none fits."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _compile(template: str) -> Callable[[list[dict[str, Any]], dict[str, Any]], str]:
    """A chat template as a function, in the environment that transformers gives it (sandboxed: hub code)."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def fail(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = fail
    environment.filters["tojson"] = tojson
    compiled = environment.from_string(template)

    def render(messages: list[dict[str, Any]], special_tokens: dict[str, Any]) -> str:
        try:
            return compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=False, **special_tokens
            )
        except jinja2.exceptions.TemplateError as error:
            raise UserError(f"the checkpoint's chat template refuses this text: {error}") from error

    return render
