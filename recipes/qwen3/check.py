"""`zoo check`: prompt and steps against the same module in float64 eager PyTorch.

Both sides are given the same tokens, those that float64 chooses, so that one early difference does not make all later
rows meaningless; in full precision the program must choose the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recipes.eager import EagerProgram, in_float64
from recipes.qwen3.build import build
from recipes.qwen3.choose import NOT_FINITE, RANDOM
from recipes.qwen3.sampling import Sampler, Sampling, distribution
from recipes.recipe import Bundle, Comparison, ExportRequest, Runnable, Tolerance

SEED = 7
PROMPT, STEPS = 512, 128  # of a context that is large enough
LENGTHS = (1, 2, 9, 33)  # prompts read at once, besides the longest of one call
SAMPLINGS = (
    Sampling(0.6, top_k=20, top_p=0.95),  # Qwen3's own
    Sampling(1.0, top_k=64),
    Sampling(1.5, top_k=40, top_p=0.8, min_p=0.02),
    Sampling(1e-40, top_k=5),
)
DRAWS = 5  # of each, with other logits


def golden_bundle(request: ExportRequest) -> Bundle:
    """The method in float64 on the values that the program's weights stand for, rounded or quantized as they are.

    So the check sees the errors of the arithmetic, of the caches and of quantized activations, and not those of the
    weights' grid.
    """
    from recipes.qwen3 import RECIPE

    return in_float64(RECIPE, request, build(request))


def check(program: Runnable, request: ExportRequest) -> list[Comparison]:
    """Rows of the greedy text, other lengths, one token at a time, the end of the context, and of chosen tokens."""
    from recipes.qwen3 import tolerances

    bounds = tolerances(request.backend, request.dtype, request.qlinear, request.option("kv-dtype", request.dtype))
    bundle = golden_bundle(request)
    golden = EagerProgram(bundle)
    rng = np.random.default_rng(SEED)
    # The end first, while both sides have caches of zeros before it.
    rows = [_end_row(program, golden, bundle.metadata, bounds, rng)]
    rows += _greedy_rows(program, golden, bundle.metadata, bounds, rng)
    rows += _length_rows(program, golden, bundle.metadata, bounds, rng)
    rows += _choice_rows(program, bundle.metadata, bounds["choice"], rng)
    return rows


def _call(program: Runnable, ids: np.ndarray, position: int, meta: dict[str, Any]) -> np.ndarray:
    """Logits `[1, V]` after `ids` `[S]` from `position` on, in calls that the program takes."""
    for first in range(0, len(ids), meta["max_prompt"]):
        part = ids[None, first : first + meta["max_prompt"]]
        (logits,) = program.run("step", part, np.array([position + first]))
    return np.array(logits)


def _tokens(rng: np.random.Generator, count: int, meta: dict[str, Any]) -> np.ndarray:
    return rng.integers(0, meta["vocab_size"], count)


def _greedy_rows(
    program: Runnable, golden: Runnable, meta: dict[str, Any], bounds: Mapping[str, Tolerance], rng: np.random.Generator
) -> list[Comparison]:
    """A long prompt, then the tokens that float64 finds likeliest, one by one."""
    prompt = _tokens(rng, min(PROMPT, meta["capacity"] // 2), meta)
    actual, expected = [_call(program, prompt, 0, meta)], [_call(golden, prompt, 0, meta)]
    for step in range(min(STEPS, meta["capacity"] // 4)):
        token = expected[-1].argmax(-1)
        for side, logits in ((program, actual), (golden, expected)):
            logits.append(_call(side, token, len(prompt) + step, meta))
    rows = [
        Comparison("prompt.logits", actual[0], expected[0], bounds["logits"]),
        Comparison("steps.logits", np.concatenate(actual[1:]), np.concatenate(expected[1:]), bounds["logits"]),
    ]
    if "tokens" in bounds:
        ours, theirs = (np.concatenate(side).argmax(-1) for side in (actual, expected))
        rows.append(Comparison("greedy.tokens", ours, theirs, bounds["tokens"]))
    return rows


def _length_rows(
    program: Runnable, golden: Runnable, meta: dict[str, Any], bounds: Mapping[str, Tolerance], rng: np.random.Generator
) -> list[Comparison]:
    """New texts on used caches, at once and token by token, both against float64 at once."""
    rows = []
    for length in (*(n for n in LENGTHS if n < meta["max_prompt"]), meta["max_prompt"]):
        ids = _tokens(rng, length, meta)
        expected = _call(golden, ids, 0, meta)
        rows.append(Comparison(f"prompt[{length}].logits", _call(program, ids, 0, meta), expected, bounds["logits"]))
        if 1 < length < meta["max_prompt"]:
            for position in range(length):
                last = _call(program, ids[position : position + 1], position, meta)
            rows.append(Comparison(f"stepwise[{length}].logits", last, expected, bounds["logits"]))
    return rows


def _end_row(
    program: Runnable, golden: Runnable, meta: dict[str, Any], bounds: Mapping[str, Tolerance], rng: np.random.Generator
) -> Comparison:
    """The last positions of the context: five at once, then the very last."""
    ids = _tokens(rng, 6, meta)
    first = meta["capacity"] - len(ids)
    sides = [
        np.concatenate([_call(side, ids[:5], first, meta), _call(side, ids[5:], first + 5, meta)])
        for side in (program, golden)
    ]
    return Comparison("end.logits", sides[0], sides[1], bounds["logits"])


def _choice_rows(
    program: Runnable, meta: dict[str, Any], bound: Tolerance, rng: np.random.Generator
) -> list[Comparison]:
    """Tokens that the program chooses from logits, against the rules in float64; and what it says of a NaN. No rows for
    a program of before, which leaves that to the host."""
    if "draw" not in getattr(program, "methods", ("draw",)):
        return []
    likeliest: list[tuple[int, int]] = []
    drawn: list[tuple[int, int]] = []

    def chosen(method: str, *inputs: np.ndarray) -> int:
        (token,) = program.run(method, *inputs)
        return int(token[0, 0])

    for _ in range(DRAWS):
        logits = rng.normal(0, 3, (1, meta["vocab_size"])).astype(np.float32)
        likeliest.append((chosen("likeliest", logits), int(logits.argmax())))
        for sampling in SAMPLINGS:
            tokens, chances = distribution(logits[0].astype(np.float64), sampling)
            # The middle of a token's part of [0, 1): no rounding reaches its bounds.
            place = rng.choice(np.flatnonzero(chances > 1e-3))
            top_k, settings = Sampler(sampling).inputs()
            settings[RANDOM] = chances[:place].sum() + chances[place] / 2
            drawn.append((chosen("draw", logits, top_k, settings), int(tokens[place])))
    broken = np.full((1, meta["vocab_size"]), np.nan, dtype=np.float32)
    broken[0, 0] = 1.0
    likeliest.append((chosen("likeliest", broken), NOT_FINITE))
    drawn.append((chosen("draw", broken, *Sampler(SAMPLINGS[0]).inputs()), NOT_FINITE))
    return [
        Comparison(f"{name}.tokens", np.array([a for a, _ in pairs]), np.array([b for _, b in pairs]), bound)
        for name, pairs in (("likeliest", likeliest), ("draw", drawn))
    ]
