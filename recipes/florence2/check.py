"""`zoo check`: every method, and greedy and beam search, against the same modules in float64 eager PyTorch.

Both sides are given the same tokens, rows and slots, those of float64's searches, so that one early difference does not
make all later rows meaningless; in full precision the program's own searches must find the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recipes.eager import EagerProgram, in_float64
from recipes.florence2.build import build
from recipes.florence2.generate import Decoder, Search, generate, search_of
from recipes.florence2.runner import as_pixels
from recipes.recipe import Bundle, Comparison, ExportRequest, Runnable, Tolerance, UserError
from zoo.pictures import SAMPLE, read_rgb, sample_path

SEED = 11
PICTURES = ("astronaut", "coffee")
STEPS, BEAM_STEPS = 64, 24


class Recorded:
    """A program that keeps the calls of `step` and what they gave."""

    def __init__(self, program: Runnable):
        self.calls: list[tuple[np.ndarray, ...]] = []
        self.logits: list[np.ndarray] = []
        self._program = program

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        outputs = self._program.run(method, *arrays)
        self.calls.append(arrays)
        self.logits.append(outputs[0])
        return outputs


def golden_bundle(request: ExportRequest) -> Bundle:
    """The methods in float64 on the values that the program's weights stand for, rounded or quantized as they are."""
    from recipes.florence2 import RECIPE

    return in_float64(RECIPE, request, build(request))


def check(program: Runnable, request: ExportRequest) -> list[Comparison]:
    """Rows of two pictures; of prompts from the longest to the shortest; of a greedy and a beam search after them."""
    from recipes.florence2 import tolerances

    bounds = tolerances(request.backend, request.dtype, request.qlinear)
    bundle = golden_bundle(request)
    golden, meta = EagerProgram(bundle), bundle.metadata
    rng = np.random.default_rng(SEED)
    rows = []
    for name in PICTURES:
        pixels = as_pixels(_picture(name, rng), meta["picture"])
        rows.append(_row(f"vision[{name}].features", "vision", (pixels,), program, golden, bounds["features"]))
    # Longest first: what follows must not see what earlier prompts left in the caches.
    for length in (meta["max_prompt"], 2, 9):
        ids = rng.integers(0, meta["vocab_size"], (1, length))
        rows.append(_row(f"encode[{length}].encoded", "encode", (ids,), program, golden, bounds["encoded"]))
        if length == 2:
            rows += _search_rows("beams", search_of(meta, 3, BEAM_STEPS), length, meta, (program, golden), bounds)
    return rows + _search_rows("greedy", search_of(meta, 1, STEPS), 9, meta, (program, golden), bounds)


def _picture(name: str, rng: np.random.Generator) -> np.ndarray:
    """A photograph; without scikit-image, noise of several sizes. uint8 `[H, W, 3]`."""
    try:
        return read_rgb(sample_path(SAMPLE + name))
    except UserError:
        coarse = rng.random((40, 60, 3)).repeat(8, 0).repeat(8, 1)
        return np.rint(255 * (0.8 * coarse + 0.2 * rng.random(coarse.shape))).astype(np.uint8)


def _row(
    name: str, method: str, inputs: tuple[np.ndarray, ...], program: Runnable, golden: Runnable, bound: Tolerance
) -> Comparison:
    return Comparison(name, program.run(method, *inputs)[0], golden.run(method, *inputs)[0], bound)


def _search_rows(
    name: str,
    search: Search,
    prompt: int,
    meta: dict[str, Any],
    sides: tuple[Runnable, Runnable],
    bounds: Mapping[str, Tolerance],
) -> list[Comparison]:
    """The logits of every step of float64's search, and, where they must be equal, the tokens of both searches."""
    program, golden = sides
    recorded = Recorded(golden)
    theirs = _tokens(recorded, search, prompt, meta)
    actual = [program.run("step", *call)[0] for call in recorded.calls]
    rows = [
        Comparison(f"{name}.logits", np.concatenate(actual), np.concatenate(recorded.logits), bounds["logits"]),
    ]
    if "tokens" in bounds:
        ours = _tokens(program, search, prompt, meta)
        rows.append(Comparison(f"{name}.tokens", np.array(ours), np.array(theirs), bounds["tokens"]))
    return rows


def _tokens(program: Runnable, search: Search, prompt: int, meta: dict[str, Any]) -> list[int]:
    """A search that goes on to its last step: no token stops it, so that all of them are compared."""
    decoder = Decoder(program, meta["slots"], meta["image_tokens"] + prompt)
    return list(generate(decoder, search, meta["generation"]["start_id"], (-1,)))
