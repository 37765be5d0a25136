"""Qwen3's sampling against transformers' logits processors: pytest tests/recipes/test_qwen3_sampling.py"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as theirs

from recipes.qwen3.choose import CANDIDATES, NOT_FINITE, RANDOM, DrawMethod, LikeliestMethod
from recipes.qwen3.sampling import Sampler, Sampling, distribution, penalised
from recipes.recipe import UserError

SEEN = [3, 5, 5, 11]
CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3, "top_k": 20, "top_p": 0.95},
    {"top_k": 1},
    {"top_k": 5000},
    {"top_p": 1e-6},
    {"top_p": 0.5, "temperature": 2.0},
    {"min_p": 0.1},
    {"min_p": 1.0, "top_k": 7},
    {"repetition_penalty": 1.7, "top_p": 0.8},
    {"repetition_penalty": 0.5, "min_p": 0.02, "top_k": 40, "top_p": 0.9, "temperature": 0.7},
]


def reference(logits: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Probabilities as transformers computes them, in the order of its `_get_logits_processor`."""
    processors = theirs.LogitsProcessorList(
        [
            theirs.RepetitionPenaltyLogitsProcessor(options.get("repetition_penalty", 1.0)),
            theirs.TemperatureLogitsWarper(options.get("temperature", 1.0)),
            *([theirs.TopKLogitsWarper(options["top_k"])] if "top_k" in options else []),
            *([theirs.TopPLogitsWarper(options["top_p"])] if "top_p" in options else []),
            *([theirs.MinPLogitsWarper(options["min_p"])] if "min_p" in options else []),
        ]
    )
    scores = processors(torch.tensor([SEEN]), torch.from_numpy(logits.astype(np.float64))[None])
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize("options", CASES)
def test_distribution_equals_transformers(options: dict[str, Any]) -> None:
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(0, 3, 300).astype(np.float32)
        sampling = Sampling(**{"temperature": 1.0, **options})
        tokens, probabilities = distribution(penalised(logits, SEEN, sampling.repetition_penalty), sampling)
        ours = np.zeros(300)
        ours[tokens] = probabilities
        np.testing.assert_allclose(ours, reference(logits, options), atol=1e-12)


def drawn_by_method(logits: np.ndarray, sampling: Sampling, random: float) -> int:
    top_k, settings = Sampler(sampling).inputs()
    settings[RANDOM] = random
    method = DrawMethod(len(logits))
    return int(method(torch.from_numpy(logits)[None], torch.from_numpy(top_k), torch.from_numpy(settings)))


@pytest.mark.parametrize("options", [{"top_k": 20}, *({**options, "top_k": 50} for options in CASES[:-2])])
def test_the_exported_draw_follows_the_same_rules(options: dict[str, Any]) -> None:
    """Every token that may be drawn, in the middle of its part of [0, 1), and the same one where the host draws."""
    sampling = Sampling(**{"temperature": 1.0, **options})
    for seed in range(3):
        rng = np.random.default_rng(seed)
        logits = rng.normal(0, 3, 300).astype(np.float32)
        tokens, chances = distribution(logits.astype(np.float64), sampling)
        starts = chances.cumsum() - chances
        for token, start, chance in zip(tokens, starts, chances, strict=True):
            if chance > 1e-5:  # float32 has room for a middle
                assert drawn_by_method(logits, sampling, start + chance / 2) == token
        assert drawn_by_method(logits, sampling, 0) == tokens[0] == logits.argmax()
        assert drawn_by_method(logits, sampling, 1) == tokens[-1]  # what a random number may be rounded to


def test_extremes_of_the_exported_choice() -> None:
    logits = np.random.default_rng(0).normal(0, 3, 300).astype(np.float32)
    for temperature in (1e-300, 1e-40, 1e30):
        assert drawn_by_method(logits, Sampling(temperature, top_k=9), 0) == logits.argmax()
    assert drawn_by_method(logits, Sampling(1e-40, top_k=9), 0.999) == logits.argmax()
    assert drawn_by_method(np.float32([3e38, -3e38, 0]), Sampling(0.1, top_k=3), 0.99) == 0
    equal = np.zeros(300, dtype=np.float32)
    # As on the host, equal ones stay together at the limit, as far as there are candidates.
    picked = {drawn_by_method(equal, Sampling(1.0, top_k=1), random) for random in np.arange(64) / 64 + 1 / 128}
    assert len(picked) == CANDIDATES and len(distribution(equal.astype(np.float64), Sampling(1.0, top_k=1))[0]) == 300
    for bad in (np.nan, np.inf, -np.inf):
        wrong = logits.copy()
        wrong[7] = bad
        assert drawn_by_method(wrong, Sampling(1.0, top_k=9), 0.5) == NOT_FINITE
        assert int(LikeliestMethod()(torch.from_numpy(wrong)[None])) == NOT_FINITE
    assert int(LikeliestMethod()(torch.tensor([[1.0, 3.0, 3.0]]))) == 1


def test_extreme_temperatures_on_the_host() -> None:
    logits = np.random.default_rng(0).normal(0, 3, 300).astype(np.float32)
    for temperature in (1e-320, 1e-30):
        for options in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {}):
            assert Sampler(Sampling(temperature, **options)).choose(logits, ()) == logits.argmax()  # type: ignore[arg-type]
    for temperature in (1e300, 1e-320):
        _, settings = Sampler(Sampling(temperature, top_k=5)).inputs()
        assert np.isfinite(settings).all() and settings[0] > 0


def test_which_method_chooses() -> None:
    assert Sampling().method(64) == Sampling(top_k=100, top_p=0.5).method(64) == "likeliest"
    assert Sampling(0.6, top_k=64).method(64) == "draw"
    for none in (
        Sampling(0.6),
        Sampling(0.6, top_k=65),
        Sampling(repetition_penalty=1.1),
        Sampling(0.6, 20, 1.0, 0, 2),
    ):
        assert none.method(64) is None


def test_draws_follow_the_distribution_and_the_seed() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    drawn = [[Sampler(Sampling(1.0, seed=seed)).choose(logits, ())] for seed in range(3)]
    assert drawn == [[Sampler(Sampling(1.0, seed=seed)).choose(logits, ())] for seed in range(3)]
    sampler = Sampler(Sampling(1.0, seed=4))
    counts = np.bincount([sampler.choose(logits, ()) for _ in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.2], atol=0.03)


def test_greedy_takes_the_first_likeliest_after_the_penalty() -> None:
    logits = np.array([1, 3, 3, -4], dtype=np.float32)
    assert Sampler(Sampling()).choose(logits, [1]) == 1
    assert Sampler(Sampling(repetition_penalty=1.5)).choose(logits, [1, 2]) == 1
    assert Sampler(Sampling(repetition_penalty=4.0)).choose(logits, [1, 2]) == 0
    assert Sampler(Sampling(1.0, top_p=1e-9)).choose(np.array([-np.inf, 0, -1], dtype=np.float32), ()) == 1


def test_defaults_are_the_checkpoint_s() -> None:
    from recipes.qwen3.build import _sampling

    config = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    assert Sampling(**_sampling(config)) == Sampling(0.6, 20, 0.95)  # type: ignore[arg-type]
    assert Sampling(**_sampling(GenerationConfig(do_sample=False))).temperature == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top-k"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.5}, "top-p"),
        ({"min_p": 1.5}, "min-p"),
        ({"repetition_penalty": 0.0}, "repetition penalty"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_values_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**options)
