"""Choosing the next token on the host, in numpy. Each rule is that of transformers' logits processor of its name.

They apply in transformers' order: repetition penalty, temperature, top-k, top-p, min-p; then one draw. The methods of
choose.py follow the same rules on the GPU, as far as they can (`Sampling.method`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from recipes.recipe import UserError

_COLDEST = 1e-30  # for float32, temperatures below are this one, and those above its inverse that


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the likeliest token; `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "min_p", "seed"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise UserError(f"{_words(name)} must be a number of at least 0, not {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p must be above 0 and at most 1, not {self.top_p}")
        if self.min_p > 1:
            raise UserError(f"min-p must be at most 1, not {self.min_p}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise UserError(f"the repetition penalty must be above 0, not {self.repetition_penalty}")

    def method(self, candidates: int) -> str | None:
        """The method of the program that chooses so, of those that look at `candidates` tokens; None: none does."""
        if self.repetition_penalty != 1:
            return None
        if self.temperature == 0:
            return "likeliest"
        return "draw" if 0 < self.top_k <= candidates else None


def _words(name: str) -> str:
    return {"top_k": "top-k", "min_p": "min-p"}.get(name, f"the {name}")


class Sampler:
    """Draws tokens by one `Sampling`; the same seed draws the same tokens from the same logits."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self._rng = np.random.default_rng(sampling.seed)

    def choose(self, logits: np.ndarray, seen: Iterable[int]) -> int:
        """The next token. logits `[V]`; `seen`: the tokens of the text so far, for the repetition penalty."""
        scores = penalised(logits, seen, self.sampling.repetition_penalty)
        if self.sampling.temperature == 0:
            return int(scores.argmax())
        tokens, probabilities = distribution(scores, self.sampling)
        cumulative = probabilities.cumsum()
        drawn = np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right")
        return int(tokens[min(drawn, len(tokens) - 1)])

    def inputs(self) -> tuple[np.ndarray, ...]:
        """What the method that chooses so takes after the logits, for the next token."""
        chosen = self.sampling
        if chosen.temperature == 0:
            return ()
        temperature = min(max(chosen.temperature, _COLDEST), 1 / _COLDEST)
        settings = (temperature, 1 - chosen.top_p, chosen.min_p, self._rng.random())
        return np.array([chosen.top_k]), np.array(settings, dtype=np.float32)


def penalised(logits: np.ndarray, seen: Iterable[int], penalty: float) -> np.ndarray:
    """Logits in float64, those of tokens seen before divided by the penalty (multiplied where negative)."""
    scores = np.array(logits, dtype=np.float64)
    tokens = np.fromiter(set(seen), dtype=np.int64) if penalty != 1 else np.empty(0, dtype=np.int64)
    if tokens.size:
        values = scores[tokens]
        scores[tokens] = np.where(values < 0, values * penalty, values / penalty)
    return scores


def distribution(scores: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that may be drawn, the likeliest first, and their probabilities. scores `[V]` float64, penalised."""
    tokens = np.arange(len(scores))
    if 0 < sampling.top_k < len(scores):
        limit = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        tokens = tokens[scores >= limit]
    tokens = tokens[np.argsort(-scores[tokens], kind="stable")]
    # Less the greatest before the division: a low temperature must not take scores beyond any number.
    with np.errstate(over="ignore"):
        scores = (scores - scores[tokens[0]]) / sampling.temperature
    if sampling.top_p < 1:
        # From the least likely up: those whose sum stays within 1 - top_p go, the likeliest never does.
        gone = _softmax(scores[tokens])[::-1].cumsum()[::-1] <= 1 - sampling.top_p
        gone[0] = False
        tokens = tokens[~gone]
    if sampling.min_p > 0:
        probabilities = _softmax(scores[tokens])
        tokens = tokens[probabilities >= sampling.min_p * probabilities.max()]
    return tokens, _softmax(scores[tokens])


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    total: np.ndarray = powers / powers.sum()
    return total
