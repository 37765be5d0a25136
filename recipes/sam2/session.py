"""What `zoo run sam2` does once its options are known: one prompt, prompts from stdin, or everything."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.recipe import UserError
from recipes.sam2.everything import Limits, everything
from recipes.sam2.masks import Found
from recipes.sam2.outputs import Outputs, write
from recipes.sam2.prompts import Prompt, check_request, from_json, read_line, read_mask
from recipes.sam2.runner import Answer, Segmenter
from zoo.console import Stdout, say
from zoo.pictures import read_rgb, sample_path


@dataclass(frozen=True)
class Result:
    """Masks of a prompt, best first; `document` is what `--rle` and `--json` write."""

    found: list[Found]
    document: dict[str, Any]


def document(found: list[Found], shape: tuple[int, int], answer: Answer | None) -> dict[str, Any]:
    """`height`, `width`, `masks` as annotations of COCO, and the logit that there is an object at the prompt."""
    entry: dict[str, Any] = {"height": shape[0], "width": shape[1], "masks": [one.annotation for one in found]}
    if answer is not None:
        entry["object_score"] = round(answer.object_score, 6)
    return entry


def answer_prompt(segmenter: Segmenter, prompt: Prompt, multimask: bool) -> tuple[Result, Answer]:
    answer = segmenter.ask(prompt)
    found = segmenter.masks(answer, multimask)
    return Result(found, document(found, segmenter.shape, answer)), answer


def summary(result: Result) -> str:
    height, width = result.document["height"], result.document["width"]
    parts = []
    for mask in result.document["masks"]:
        share = 100 * mask["area"] / (height * width)
        parts.append(f"{mask['area']} pixels ({share:.1f}%), predicted IoU {mask['predicted_iou']:.3f}")
    absent = result.document.get("object_score", 0) < 0
    return "; ".join(parts) + ("; the model sees no object at the prompt" if absent else "")


@dataclass(frozen=True)
class Task:
    """One run: what is asked of `picture` and what becomes of the answer."""

    prompt: Prompt | None
    mask: Path | None
    multimask: bool
    limits: Limits | None  # of --everything
    outputs: Outputs
    as_json: bool


def run_once(segmenter: Segmenter, picture: np.ndarray, task: Task, stdout: Stdout, note: str) -> None:
    """A prompt, or with `task.limits` a grid of them, on one picture."""
    started = time.perf_counter()
    height, width = picture.shape[:2]
    prompt = task.prompt
    if task.mask is not None:
        mask = segmenter.mask_prompt(read_mask(task.mask, width, height))
        prompt = Prompt(mask=mask) if prompt is None else Prompt(prompt.points, prompt.labels, prompt.box, mask)
    if prompt is not None:
        prompt.check(width, height, segmenter.metadata["max_points"])
    segmenter.look(picture)
    if task.limits is not None:
        found = everything(segmenter, task.limits)
        result = Result(found, document(found, (height, width), None))
        told = f"{len(found)} masks"
    else:
        assert prompt is not None
        result, _ = answer_prompt(segmenter, prompt, task.multimask)
        told = summary(result)
    whole = task.limits is not None
    paths = write(task.outputs, picture, result.found, result.document, prompt, labels=whole)
    if task.as_json:
        stdout.write_json(result.document)
    named = ", ".join(str(path) for path in paths)
    say(f"{named + ': ' if named else ''}{told} in {time.perf_counter() - started:.1f} s; {note}")


class Conversation:
    """`--interactive`: a JSON line in, a JSON line out. The picture is encoded once, prompts refer to it."""

    def __init__(self, segmenter: Segmenter, picture: np.ndarray | None):
        self._segmenter = segmenter
        self._picture: np.ndarray | None = None
        self._last: np.ndarray | None = None  # logits of the best mask of the last answer
        if picture is not None:
            self._look(picture)

    def _look(self, picture: np.ndarray) -> None:
        self._picture, self._last = None, None
        self._segmenter.look(picture)
        self._picture = picture

    def answers(self, lines: Iterator[str]) -> Iterator[dict[str, Any]]:
        """An answer for each line that is not empty; `error` in it for one that cannot be answered."""
        for line in lines:
            if not line.strip():
                continue
            request: dict[str, Any] = {}
            try:
                request = read_line(line)
                check_request(request)
                reply = self._reply(request)
            except UserError as error:
                reply = {"error": str(error)}
            yield ({"id": request["id"]} if "id" in request else {}) | reply

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        outputs = Outputs(*(Path(request[name]) if name in request else None for name in ("output", "overlay")))
        if "picture" in request:
            self._look(read_rgb(sample_path(request["picture"])))
            if not any(key in request for key in ("points", "box", "mask")):
                height, width = self._segmenter.shape
                return {"height": height, "width": width, "seconds": round(time.perf_counter() - started, 3)}
        if self._picture is None:
            raise UserError('there is no picture yet: give {"picture": FILE}')
        height, width = self._picture.shape[:2]
        outputs.check(width, height)
        prompt = from_json(request, self._mask(request.get("mask"), width, height))
        result, answer = answer_prompt(self._segmenter, prompt, request.get("multimask", False))
        best = answer.choice(request.get("multimask", False), self._segmenter.metadata["stability"])[0]
        self._last = answer.logits[best].copy()
        paths = write(outputs, self._picture, result.found, result.document, prompt)
        written = {"written": [str(path) for path in paths]} if paths else {}
        return result.document | written | {"seconds": round(time.perf_counter() - started, 3)}

    def _mask(self, given: Any, width: int, height: int) -> np.ndarray | None:
        if given is None:
            return None
        if not isinstance(given, str):
            raise UserError('mask: give "previous" for the best mask of the last answer, or the path of a picture')
        if given != "previous":
            return self._segmenter.mask_prompt(read_mask(sample_path(given), width, height))
        if self._last is None:
            raise UserError("there is no previous mask of this picture yet")
        return self._last


def converse(conversation: Conversation, lines: Iterator[str], stdout: Stdout) -> None:
    for reply in conversation.answers(lines):
        stdout.write((json.dumps(reply, allow_nan=False) + "\n").encode())
