"""Greedy and beam search over an exported decoder, as transformers' `generate` does them, without torch.

A beam's past is a row of a mask over the slots of the program's caches: going on with a beam, twice or not at all, is a
choice of rows, and a slot that no row sees is free again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recipes.recipe import Runnable, UserError

_NEVER = np.float32(-1e9)  # what transformers adds to a score that must not be chosen


@dataclass(frozen=True)
class Search:
    """How a text is generated; the fields have transformers' names and meaning. `beams` of 1 is greedy."""

    beams: int = 1
    max_new_tokens: int = 1024
    no_repeat_ngram_size: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    early_stopping: bool | str = False
    length_penalty: float = 1.0


class Decoder:
    """The rows of one text in the program's caches. `encoded`: positions of the last `encode`.

    `began`: when the first logits came, by `time.perf_counter`.
    """

    def __init__(self, program: Runnable, slots: int, encoded: int):
        self._program = program
        self._encoded = np.array([encoded])
        self._visible = np.zeros((1, slots), dtype=bool)
        self._length = 0
        self.began = 0.0

    def step(self, parents: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Puts each of `tokens` after the row in `parents`, which makes the new rows; their next logits `[R, V]`.

        Raises `UserError` when the caches are full, or for logits that are not finite.
        """
        visible = self._visible[list(parents)]
        slots = np.flatnonzero(~visible.any(0))[: len(visible)]
        if len(slots) < len(visible):
            raise UserError("the caches are full: fewer --beams or --max-tokens need less of them")
        visible[np.arange(len(visible)), slots] = True
        positions = np.full(len(visible), self._length)
        (logits,) = self._program.run("step", np.array([tokens]), positions, slots, visible, self._encoded)
        self.began = self.began or time.perf_counter()
        if not np.isfinite(logits).all():
            raise UserError("the program produced logits that are not finite: nothing more is written")
        self._visible, self._length = visible, self._length + 1
        return logits.astype(np.float32)


@dataclass
class _Beams:
    """Texts `[B, length]` and scores `[B]`, running and finished; a finished one counts where `done` `[B]`."""

    running: np.ndarray
    scores: np.ndarray
    finished: list[list[int]] = field(default_factory=list)
    finished_scores: np.ndarray = field(default_factory=lambda: np.empty(0))
    done: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=bool))

    def agreed(self) -> list[int]:
        """What all texts that may still be the answer start with."""
        texts = [
            *self.running.tolist(),
            *(text for text, is_done in zip(self.finished, self.done, strict=True) if is_done),
        ]
        shortest = min(texts, key=len)
        return next(
            (shortest[:at] for at in range(len(shortest)) if any(text[at] != shortest[at] for text in texts)), shortest
        )


def generate(decoder: Decoder, search: Search, start: int, stops: Sequence[int]) -> Iterator[int]:
    """The tokens after `start`, a stop token included, each as soon as it is certain to be in the answer."""
    return (_greedy if search.beams == 1 else _beam_search)(decoder, search, start, stops)


def _greedy(decoder: Decoder, search: Search, start: int, stops: Sequence[int]) -> Iterator[int]:
    text = [start]
    while len(text) <= search.max_new_tokens:
        logits = decoder.step([0], text[-1:])
        text.append(int(_allowed(logits, np.array([text]), search)[0].argmax()))
        yield text[-1]
        if text[-1] in stops:
            return


def _beam_search(decoder: Decoder, search: Search, start: int, stops: Sequence[int]) -> Iterator[int]:
    count = search.beams
    # All beams are alike at first: only the first one's continuations count.
    beams = _Beams(np.full((count, 1), start), np.full(count, _NEVER, dtype=np.float32))
    beams.scores[0] = 0
    beams.finished = [[start]] * count
    beams.finished_scores = np.full(count, _NEVER, dtype=np.float32)
    beams.done = np.zeros(count, dtype=bool)
    parents, told, goes_on, can_improve = np.zeros(count, dtype=np.int64), 1, True, True
    while goes_on:
        logits = decoder.step(parents.tolist(), beams.running[:, -1].tolist())
        scores = _allowed(_log_softmax(logits), beams.running, search) + beams.scores[:, None]
        # So many that enough stay when every beam's best continuation is an end.
        best = _top(scores.reshape(-1), max(2, 1 + len(stops)) * count)
        from_beam, tokens = np.divmod(best, scores.shape[1])
        found = scores.reshape(-1)[best]
        texts = np.concatenate([beams.running[from_beam], tokens[:, None]], 1)
        length = texts.shape[1]
        ends = np.isin(tokens, stops) | (length > search.max_new_tokens)
        _finish(beams, texts, found, ends, search, can_improve)
        chosen = _top(found + ends * _NEVER, count)
        beams.running, beams.scores, parents = texts[chosen], (found + ends * _NEVER)[chosen], from_beam[chosen]
        can_improve = can_improve and _can_improve(beams, length, search)
        is_full = beams.done.all() and search.early_stopping is True
        goes_on = can_improve and not is_full and not ends.all()
        certain = beams.agreed() if goes_on else beams.finished[0]
        yield from certain[told:]
        told = max(told, len(certain))


def _finish(
    beams: _Beams, texts: np.ndarray, scores: np.ndarray, ends: np.ndarray, search: Search, can_improve: bool
) -> None:
    """Takes the texts that end into the finished ones, if they are among the best."""
    count = search.beams
    counts = ends & (np.arange(len(ends)) < count)  # the others are there to go on with
    scores = scores / np.float32((texts.shape[1] - 1) ** search.length_penalty)
    for closed in (beams.done.all() and search.early_stopping is True, not can_improve, ~counts):
        scores = scores + np.float32(1) * closed * _NEVER
    all_scores = np.concatenate([beams.finished_scores, scores])
    kept = _top(all_scores, count)
    all_texts = [*beams.finished, *texts.tolist()]
    beams.finished = [all_texts[index] for index in kept]
    beams.finished_scores, beams.done = all_scores[kept], np.concatenate([beams.done, counts])[kept]


def _can_improve(beams: _Beams, length: int, search: Search) -> bool:
    """Whether a running beam may yet end with a better score than the worst finished one, by transformers' guess."""
    longest = search.early_stopping == "never" and search.length_penalty > 0
    generated = search.max_new_tokens if longest else length - 1
    possible = beams.scores[0] / np.float32(generated**search.length_penalty)
    worst = np.where(beams.done, beams.finished_scores.min(), _NEVER)
    return bool((possible > worst).any())


def _allowed(scores: np.ndarray, texts: np.ndarray, search: Search) -> np.ndarray:
    """Scores `[B, V]` after `texts` `[B, length]`, -inf where a token would repeat an n-gram or another is forced."""
    size, length = search.no_repeat_ngram_size, texts.shape[1]
    scores = scores.copy()
    if 0 < size <= length:
        for row, text in zip(scores, texts, strict=True):
            grams = np.lib.stride_tricks.sliding_window_view(text, size)
            row[grams[(grams[:, :-1] == text[length - size + 1 :]).all(1), -1]] = -np.inf
    forced = search.forced_bos_token_id if length == 1 else None
    if length == search.max_new_tokens and search.forced_eos_token_id is not None:
        forced = search.forced_eos_token_id
    if forced is not None:
        scores[:] = -np.inf
        scores[:, forced] = 0
    return scores


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def _top(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` highest, best first, the first of equal ones first."""
    likely = np.argpartition(-scores, count - 1)[:count] if count < len(scores) else np.arange(len(scores))
    limit = scores[likely].min()
    candidates = np.flatnonzero(scores >= limit)
    result: np.ndarray = candidates[np.argsort(-scores[candidates], kind="stable")][:count]
    return result


def search_of(metadata: dict[str, Any], beams: int | None, max_new_tokens: int | None) -> Search:
    """The checkpoint's own search, with what is asked for in its place. Raises `UserError` for what cannot be."""
    stated = dict(metadata["generation"])
    limit, most = metadata["max_beams"], metadata["max_positions"]
    beams = int(stated["num_beams"]) if beams is None else beams
    if not 1 <= beams <= limit:
        raise UserError(f"--beams {beams}: the program takes 1 to {limit}")
    max_new_tokens = most if max_new_tokens is None else max_new_tokens
    if not 1 <= max_new_tokens <= most:
        raise UserError(f"--max-tokens {max_new_tokens}: the model writes 1 to {most}")
    names = (
        "no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id", "early_stopping", "length_penalty",
    )  # fmt: skip
    return Search(beams, max_new_tokens, **{name: stated[name] for name in names})
