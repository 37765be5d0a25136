"""`zoo check`: both methods and a whole utterance against the same modules in float64 eager PyTorch."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recipes.eager import EagerProgram, in_float64
from recipes.phonon import checkpoint as checkpoints
from recipes.phonon.build import make_bundle
from recipes.phonon.runner import Speaker
from recipes.recipe import FULL_PRECISION, Bundle, Comparison, ExportRequest, Runnable, Tolerance

TEXT = "The train leaves at 9:45, so be there on time."
SEED = 7
LENGTHS = (1, 2, 7, 50)  # of prompts, besides the longest that the program takes


def golden_bundle(request: ExportRequest) -> Bundle:
    """The methods of a checkpoint in float64, derived constants (times, folded scales) included.

    A quantized request gets the values that its weights stand for after quantization, so that the check sees the
    errors of the kernels and of quantized activations, and not those of the weights' grid.
    """
    checkpoint = checkpoints.load(request.weights)
    if request.qlinear == FULL_PRECISION:
        checkpoint.model.double()
        checkpoint.codec.double()
        return make_bundle(checkpoint)
    from recipes.phonon import RECIPE

    return in_float64(RECIPE, request, make_bundle(checkpoint))


def check(program: Runnable, request: ExportRequest) -> list[Comparison]:
    """Rows of `frame` and `decode` over lengths and steps; in full precision also a free-running utterance."""
    from recipes.phonon import tolerances

    bounds = tolerances(request.backend, request.dtype, request.qlinear)
    bundle = golden_bundle(request)
    golden = EagerProgram(bundle)
    rows = [*_frame_rows(program, golden, bundle.metadata, bounds), *_decode_rows(program, golden, bundle, bounds)]
    if request.dtype == "fp32" and request.qlinear == FULL_PRECISION:
        rows += _utterance_rows(program, golden, bundle, bounds)
    return rows


def _frame_rows(
    program: Runnable, golden: Runnable, meta: dict[str, Any], bounds: Mapping[str, Tolerance]
) -> list[Comparison]:
    """A prompt of each length from position 0, then steps on latents that both sides are given."""
    rng = np.random.default_rng(SEED)
    rows = []
    for length in (*(n for n in LENGTHS if n < meta["max_prompt"]), meta["max_prompt"]):
        calls = [_frame_inputs(rng, meta, length, 0)]
        calls += [_frame_inputs(rng, meta, 1, length + step) for step in range(3)]
        if length == meta["max_prompt"]:
            # up to the last position of the cache, in prompts of many positions
            while (position := calls[-1][2][0] + calls[-1][0].shape[1]) < meta["capacity"]:
                calls.append(_frame_inputs(rng, meta, min(33, meta["capacity"] - position), position))
        pairs = [(_run32(program, "frame", call), golden.run("frame", *call)) for call in calls]
        for index, output in enumerate(("latent", "eos_logit")):
            actual, expected = (np.concatenate([pair[side][index] for pair in pairs]) for side in (0, 1))
            rows.append(Comparison(f"frame[{length}].{output}", actual, expected, bounds[output]))
    return rows


def _frame_inputs(rng: np.random.Generator, meta: dict[str, Any], length: int, position: int) -> list[np.ndarray]:
    """Inputs like those of the runner: a third voice, the rest text, the first audio position; or one latent."""
    voice_dim, latent_dim = meta["voice_dim"], meta["latent_dim"]
    features = np.zeros((1, length, voice_dim + latent_dim))
    if position and length == 1:
        ids = np.array([[meta["audio_latent_id"]]])
        features[..., voice_dim:] = rng.standard_normal(latent_dim)
    else:
        ids = rng.integers(meta["audio_latent_id"] + 1, 256, (1, length))
        voice = length // 3
        ids[:, :voice] = meta["audio_prompt_id"]
        ids[:, -1] = meta["audio_bos_id"]
        features[:, :voice, :voice_dim] = rng.standard_normal((voice, voice_dim))
    return [ids, features, np.array([position]), rng.standard_normal((1, latent_dim))]


def _decode_rows(
    program: Runnable, golden: Runnable, bundle: Bundle, bounds: Mapping[str, Tolerance]
) -> list[Comparison]:
    """A stream that is longer than the attention window, then a new one on the same state."""
    codec: Any = bundle.methods["decode"].module.codec
    long = math.ceil((codec.past + 1) / codec.stride) + 4
    rng = np.random.default_rng(SEED)
    rows = []
    for name, frames in (("stream", long), ("restart", 3)):
        outputs: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for frame in range(frames):
            inputs = [rng.standard_normal((1, bundle.metadata["latent_dim"])), np.array([frame])]
            outputs[0].append(_run32(program, "decode", inputs)[0])
            outputs[1].append(golden.run("decode", *inputs)[0])
        actual, expected = (np.concatenate(side, axis=-1) for side in outputs)
        rows.append(Comparison(f"decode[{name}].samples", actual, expected, bounds["samples"]))
    return rows


def _utterance_rows(
    program: Runnable, golden: Runnable, bundle: Bundle, bounds: Mapping[str, Tolerance]
) -> list[Comparison]:
    """The same text and noise on both sides, each feeding on its own latents."""
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder)
        bundle.write_assets(assets)
        (assets / "recipe.json").write_text(json.dumps(bundle.metadata), encoding="utf-8")
        sides = ((program, np.float32), (golden, np.float64))
        actual, expected = (
            list(Speaker(side, assets, warn=lambda line: None, dtype=dtype).stream(TEXT, seed=SEED))
            for side, dtype in sides
        )
    frames = (np.array([len(actual)]), np.array([len(expected)]))
    return [
        Comparison("utterance.frames", *frames, bounds["frames"]),
        Comparison("utterance.samples", np.concatenate(actual), np.concatenate(expected), bounds["utterance"]),
    ]


def _run32(program: Runnable, method: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
    inputs = (array.astype(np.float32) if array.dtype == np.float64 else array for array in arrays)
    return program.run(method, *inputs)
