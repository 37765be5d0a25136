"""`zoo run florence2`: a picture and a task through an exported program to an answer, without torch.

Where the program's results can stay on the GPU, nothing is waited for before the first token's logits: they are the
first thing that comes back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from backend.graph import ShapeError
from backend.runtime.errors import DeviceError
from recipes.florence2 import answers
from recipes.florence2.generate import Decoder, generate, search_of
from recipes.florence2.tasks import task_input
from recipes.recipe import Runnable, UserError
from zoo.pictures import as_square
from zoo.program import keep


@dataclass
class Answer:
    """What the model said. `result`: text, or a dict of boxes, polygons and labels, as the reference processor's."""

    task: str
    width: int
    height: int
    text: str = ""  # as generated, with location tokens
    result: Any = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0  # of all tokens but the first
    first_seconds: float = 0.0  # until the first logits, from the picture on where it is the first answer about it
    end: str = ""  # stop, or length: `max_tokens` were reached

    def json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "image": {"width": self.width, "height": self.height},
            "text": self.text,
            "result": self.result,
            "tokens": self.tokens,
            "end": self.end,
        }

    def __str__(self) -> str:
        more = self.tokens - 1
        rate = f", {more} more at {more / self.seconds:.1f} tokens/s" if more > 0 and self.seconds > 0 else ""
        cut = "; stopped at --max-tokens" if self.end == "length" else ""
        return f"first token after {self.first_seconds:.2f} s{rate}{cut}"


class Florence:
    """One loaded program. `assets` is the folder beside the `.pte`. A picture is seen once and asked about often."""

    def __init__(self, program: Runnable, assets: Path):
        from tokenizers import Tokenizer

        try:
            self.metadata: dict[str, Any] = json.loads((assets / "recipe.json").read_text(encoding="utf-8"))
            self.tokenizer = Tokenizer.from_file(str(assets / "tokenizer.json"))
        except Exception as error:  # the tokenizers library raises plain Exception for every fault of a file
            raise UserError(f"cannot read what belongs to the program in {assets}: {error}; export again") from error
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self._program = program
        self._size: tuple[int, int] | None = None
        self._picture_seconds = 0.0
        self.answer = Answer("", 0, 0)  # the last one

    def see(self, pixels: np.ndarray) -> None:
        """Takes a picture, uint8 `[H, W, 3]`, to be asked about.

        Does not wait for the GPU where the program's results can stay on it: what goes wrong there is told with the
        first answer. Raises `UserError` for a program of an older version.
        """
        started = time.perf_counter()
        self._size = None
        try:
            keep(self._program, "vision", as_pixels(pixels, self.metadata["picture"]))
        except ShapeError as error:  # it took normalised floats
            raise UserError("the program is one of an older version: export again") from error
        self._size = (pixels.shape[1], pixels.shape[0])
        self._picture_seconds = time.perf_counter() - started

    def prompt(self, task: str, text: str | None = None) -> np.ndarray:
        """The encoder's tokens `[P]` after the picture's. Raises `UserError` for a text that is wrong or too long."""
        if self._size is None:
            raise UserError("there is no picture yet")
        words = self.metadata["tasks"][task]["prompt"].replace("{input}", task_input(task, text, *self._size))
        marked = f"{self.metadata['bos_token']}{words}{self.metadata['eos_token']}"
        if self.metadata["image_token"] in words:
            raise UserError(f"{self.metadata['image_token']} stands for the picture: it cannot be in --text")
        ids = np.array(self.tokenizer.encode(marked, add_special_tokens=False).ids)
        if len(ids) > self.metadata["max_prompt"]:
            raise UserError(f"--text is too long: {len(ids)} tokens, the model reads {self.metadata['max_prompt']}")
        return ids

    def ask(
        self, task: str, text: str | None = None, beams: int | None = None, max_tokens: int | None = None
    ) -> Iterator[str]:
        """Pieces of the answer about the picture that was seen last, as they are certain; then `answer` is whole.

        Defaults are the checkpoint's. What is wrong with the arguments is raised here and now. The pieces raise
        `DeviceError` when the GPU fails, after which no picture was seen.
        """
        search = search_of(self.metadata, beams, max_tokens)
        ids = self.prompt(task, text)
        assert self._size is not None
        self.answer = Answer(task, *self._size)
        return self._pieces(ids, search)

    def _pieces(self, ids: np.ndarray, search: Any) -> Iterator[str]:
        try:
            yield from self._said(ids, search)
        except DeviceError:
            self._size = None  # it may not have been seen, and a new device has nothing of it
            raise

    def _said(self, ids: np.ndarray, search: Any) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        answer, generation = self.answer, self.metadata["generation"]
        started = time.perf_counter() - self._picture_seconds
        self._picture_seconds = 0.0
        keep(self._program, "encode", ids[None])
        decoder = Decoder(self._program, self.metadata["slots"], self.metadata["image_tokens"] + len(ids))
        stream = DecodeStream(skip_special_tokens=False)
        marks = {self.metadata["bos_token"], self.metadata["eos_token"]}
        hidden = {self.tokenizer.token_to_id(mark) for mark in marks}
        tokens: list[int] = []
        for token in generate(decoder, search, generation["start_id"], generation["stop_ids"]):
            tokens.append(token)
            piece = None if token in hidden else stream.step(self.tokenizer, token)
            if piece:
                yield piece
        answer.first_seconds, answer.tokens = decoder.began - started, len(tokens)
        answer.seconds = time.perf_counter() - decoder.began
        is_forced = len(tokens) == search.max_new_tokens
        answer.end = "stop" if tokens[-1] in generation["stop_ids"] and not is_forced else "length"
        answer.text = self.tokenizer.decode([generation["start_id"], *tokens], skip_special_tokens=False)
        kind = self.metadata["tasks"][answer.task]["answer"]
        banned = self.metadata["banned_phrases"]
        answer.result = answers.parse(kind, answer.text, (answer.width, answer.height), banned)


def as_pixels(picture: np.ndarray, settings: Mapping[str, Any]) -> np.ndarray:
    """A picture, uint8 `[H, W, 3]`, as `vision` takes it: uint8 `[1, side, side, 3]`, resized as by the processor."""
    return as_square(picture, settings["side"], Image.Resampling(settings["resample"]))


def lines(answer: Answer) -> str:
    """An answer for a terminal: a text, or a line for each thing that was found."""
    if isinstance(answer.result, str):
        return answer.result + "\n"
    rows = [f"{label or '(no label)'}: {_places(place)}" for label, place in found(answer)]
    return "".join(f"{row}\n" for row in rows) or "nothing found\n"


def found(answer: Answer) -> Iterator[tuple[str, list[Any]]]:
    """(label, place) of everything in an answer: a place is 4 or 8 numbers (box, quad) or a list of rings."""
    if isinstance(answer.result, str):
        return
    for places, labels in (
        ("bboxes", "labels"), ("bboxes", "bboxes_labels"), ("quad_boxes", "labels"),
        ("polygons", "labels"), ("polygons", "polygons_labels"),
    ):  # fmt: skip
        if places in answer.result and labels in answer.result:
            yield from zip(answer.result[labels], answer.result[places], strict=True)


def _places(place: list[Any]) -> str:
    if place and isinstance(place[0], list):
        return "; ".join(_places(ring) for ring in place)
    return " ".join(f"{x},{y}" for x, y in zip(place[::2], place[1::2], strict=True))
