"""`zoo check`: both methods, and whole recordings through the speaker cache, against float64 eager PyTorch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recipes.eager import EagerProgram, in_float64
from recipes.nemotron_diarization import checkpoint as checkpoints
from recipes.nemotron_diarization import voices
from recipes.nemotron_diarization.build import make_bundle
from recipes.nemotron_diarization.runner import OFFLINE, Diarizer
from recipes.recipe import FULL_PRECISION, Bundle, Comparison, ExportRequest, Runnable, Tolerance

SEED = 11
SECONDS = 180.0  # of the recording: seven chunks of offline mode, the speaker cache compressed at each
STREAM_SECONDS = 50.0  # of the stream: until its speaker cache was compressed
SHORT_SECONDS = 4.0  # of the stream where a step takes seconds: the real configuration on a CPU
FEW_LAYERS = 4
EDGE = 1e-4  # decisions are compared where the probability is further than this from the threshold
THRESHOLD = 0.5


def golden_bundle(request: ExportRequest) -> Bundle:
    """The methods of a checkpoint in float64.

    A quantized request gets the values that its weights stand for after quantization, so that the check sees the
    errors of the kernels and of quantized activations, and not those of the weights' grid.
    """
    checkpoint = checkpoints.load(request.weights)
    if request.qlinear == FULL_PRECISION:
        checkpoint.model.double()
        return make_bundle(checkpoint)
    from recipes.nemotron_diarization import RECIPE

    return in_float64(RECIPE, request, make_bundle(checkpoint))


def check(program: Runnable, request: ExportRequest) -> list[Comparison]:
    """Rows of `stack` and `encode` over lengths; in float32 also a recording and a stream from end to end."""
    from recipes.nemotron_diarization import tolerances

    bounds = tolerances(request.backend, request.dtype, request.qlinear)
    bundle = golden_bundle(request)
    golden = EagerProgram(bundle)
    kind = np.float16 if request.dtype == "fp16" else np.float32
    rows = [*_stack_rows(program, golden, bundle.metadata, bounds, kind)]
    rows += _encode_rows(program, golden, bundle, bounds, kind)
    if "recording" in bounds:
        layers = len(list(bundle.methods["encode"].module.get_submodule("layers").children()))
        stream = STREAM_SECONDS if layers <= FEW_LAYERS else SHORT_SECONDS
        with tempfile.TemporaryDirectory() as folder:
            assets = Path(folder)
            bundle.write_assets(assets)
            (assets / "recipe.json").write_text(json.dumps(bundle.metadata), encoding="utf-8")
            for mode, seconds in ((OFFLINE, SECONDS), (bundle.metadata["streaming_mode"], stream)):
                rows += _recording_rows(program, golden, assets, mode, seconds, bounds)
    return rows


def _stack_rows(
    program: Runnable, golden: Runnable, meta: dict[str, Any], bounds: Mapping[str, Tolerance], kind: Any
) -> list[Comparison]:
    rng = np.random.default_rng(SEED)
    rows = []
    for groups in (1, 2, 13, meta["max_stack"]):
        shape = (1, groups, meta["subsampling_factor"], meta["num_mel_bins"])
        features = rng.normal(-8, 4, shape).astype(kind)
        (actual,), (expected,) = program.run("stack", features), golden.run("stack", features.astype(np.float64))
        rows.append(Comparison(f"stack[{groups}].embeds", actual, expected, bounds["embeds"]))
    return rows


def _encode_rows(
    program: Runnable, golden: Runnable, bundle: Bundle, bounds: Mapping[str, Tolerance], kind: Any
) -> list[Comparison]:
    """Lengths up to the longest, with padding, a masked frame, and none to attend to; long before short (D1)."""
    meta = bundle.metadata
    rng = np.random.default_rng(SEED)
    width = bundle.methods["encode"].example_inputs[0].shape[2]
    mel = rng.normal(-8, 4, (1, meta["max_stack"], meta["subsampling_factor"], meta["num_mel_bins"]))
    # Two copies, so that there are as many frames as the longest call takes.
    pool = np.concatenate([golden.run("stack", mel)[0][0]] * 2)
    assert pool.shape[1] == width
    longest, multiple = meta["max_frames"], meta["length_multiple"]
    rows = []
    for attended, frames in (
        (longest, longest),
        (12, 13),
        (1, 1),
        (33, 33),
        (0, 1),
        (longest // 2 - 3, longest // 2 - 2),
    ):
        size = -(-frames // multiple) * multiple
        # What is in the padding must not matter.
        inputs = pool[rng.permutation(len(pool))[:size]].astype(kind)[None]
        lengths = np.array([attended, frames], np.int64)
        actual = program.run("encode", inputs, lengths)[0]
        expected = golden.run("encode", inputs.astype(np.float64), lengths)[0]
        keep = frames * meta["subsampling_factor"]
        name = f"encode[{attended} of {frames}].probabilities"
        rows.append(Comparison(name, actual[:, :keep], expected[:, :keep], bounds["probabilities"]))
    return rows


def _recording_rows(
    program: Runnable, golden: Runnable, assets: Path, mode: str, seconds: float, bounds: Mapping[str, Tolerance]
) -> list[Comparison]:
    """The same audio on both sides, each with its own speaker cache."""
    samples, _ = voices.conversation(seconds, voices=3, seed=SEED)
    actual, expected = (
        np.concatenate([*(diarizer := Diarizer(side, assets, mode, dtype)).feed(samples), *diarizer.finish()])
        for side, dtype in ((program, None), (golden, np.float64))
    )
    clear = np.abs(expected - THRESHOLD) >= EDGE
    wrong = int((((actual > THRESHOLD) != (expected > THRESHOLD)) & clear).sum())
    return [
        Comparison(f"{mode}[{seconds:g} s].probabilities", actual, expected, bounds["recording"]),
        Comparison(f"{mode}[{seconds:g} s].decisions", np.array([wrong]), np.array([0]), bounds["decisions"]),
    ]
