"""Nemotron 3 diarization: who spoke when, up to 8 speakers (`Nemotron3DiarizationForAudioFrameClassification`).

    audio.py ─► samples ─ runner.py, features.py ─► log-mel frames ─ `stack` ─► encoder frames
    cache.py, topk.py: cached frames + chunk + look-ahead ─ `encode` ─► probabilities ─ segments.py ─► who, when

checkpoint.py, standin.py   weights          modules.py   the two exported methods
build.py                    the bundle       check.py     against float64 eager
session.py                  `zoo run`        bench.py     `zoo bench`
plot.py                     the picture      voices.py    an invented conversation
This file is the declaration and is read without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recipes.command import (
    BackendOption,
    DtypeOption,
    PteOption,
    QlinearOption,
    RuntimeOption,
    WeightsOption,
    opened,
)
from recipes.nemotron_diarization.checkpoint import HUB_ID
from recipes.recipe import (
    FULL_PRECISION,
    Recipe,
    Tolerance,
    deferred,
    quant_modes,
    tolerance_table,
)

KEEPS = {
    "stack.projection": "log-mel values are not normalized (-17 to 8): their grid would be coarser than speech is soft",
    "encode.proj": "192 wide, and all that the decisions are made from passes here: 0.1% of the weights",
    "encode.upsampler": "10 ms frames differ by what it adds to their neighbours: 1% of the weights",
    "encode.classifier": "its outputs meet a threshold: an error there moves the ends of every segment",
}


QUANTIZATION = {
    "xnnpack": quant_modes("8da4w", "8da8w", keeps=KEEPS),
    "webgpu": quant_modes("4w", "8w", "8da4w", "8da8w", keeps=KEEPS),
    "cuda": quant_modes("4w", "8w", keeps=KEEPS),
    "mlx": quant_modes("4w", "8w", keeps=KEEPS),
}


def tolerances(backend: str, dtype: str, mode: str) -> dict[str, Tolerance]:
    """The bound of every kind of output. `probabilities` are those of one call, `recording` those of a whole run.

    Quantized weights are the same on both sides of the check; whole runs are compared in float32 only, where both
    sides can be expected to keep the same frames in their speaker caches.
    """
    embeds = (1e-5, "one projection in float32 against float64")
    probabilities = (1e-4, "float32 through 31 layers, in another order of sums than eager's float64")
    if dtype == "fp16":
        embeds = (2e-3, "half precision keeps 11 bits (5e-4)")
        probabilities = (5e-2, "half precision at every operation: 2% was measured over 31 layers")
    if dtype == "fp16" and backend == "xnnpack":
        # Checked by adding up one call's products in half precision: 0.54% of the scale, XNNPACK 0.55%.
        embeds = (2e-2, "XNNPACK also adds up in half precision: the error grows with the 1024 terms of a sum")
        probabilities = (1e-1, "XNNPACK adds up in half precision: 4.5% was measured over 2 layers, 31 not yet")
    if "da" in mode:
        probabilities = (
            2e-1,
            "activations that lie between two of 256 codes are rounded apart, and so on, over 31 layers",
        )
    bounds = {"embeds": Tolerance(0, *embeds), "probabilities": Tolerance(probabilities[0], 0, probabilities[1])}
    if dtype == "fp32" and mode == FULL_PRECISION:
        bounds["recording"] = Tolerance(1e-4, 0, "each chunk hears frames that were chosen by the chunks before it")
        bounds["decisions"] = Tolerance(0, 0, "no frame further than 1e-4 from the threshold may be decided otherwise")
    return bounds


def run(
    audio: Annotated[
        Path | None, typer.Argument(help="An audio file: WAV, FLAC, OGG, MP3, any rate, any channels.")
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Say who speaks as it is heard; without a file, from s16le PCM on stdin.")
    ] = False,
    latency: Annotated[
        str | None, typer.Option(help="Streaming mode of the checkpoint (with --stream); an unknown one lists them.")
    ] = None,
    rate: Annotated[int, typer.Option(help="Of the samples on stdin, in Hz.")] = 16000,
    channels: Annotated[int, typer.Option(help="Of the samples on stdin, interleaved.")] = 1,
    rttm: Annotated[Path | None, typer.Option(help="Write an RTTM file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG): a timeline per speaker.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print segments as JSON lines, times in seconds.")] = False,
    threshold: Annotated[float, typer.Option(help="Speech begins above this probability.")] = 0.5,
    release: Annotated[float | None, typer.Option(help="Speech lasts while above this; default: --threshold.")] = None,
    min_speech: Annotated[float, typer.Option(help="Drop segments shorter than this many seconds.")] = 0.0,
    min_gap: Annotated[float, typer.Option(help="Join segments with pauses shorter than this many seconds.")] = 0.0,
    example: Annotated[
        bool, typer.Option("--example", help="First write an invented conversation of two voices to AUDIO.")
    ] = False,
    backend: BackendOption = "webgpu",
    weights: WeightsOption = "auto",
    dtype: DtypeOption = "fp32",
    qlinear: QlinearOption = FULL_PRECISION,
    runtime: RuntimeOption = "executorch",
    pte: PteOption = None,
) -> None:
    """Say who speaks when: segments on stdout, as RTTM, as JSON lines or as a picture."""
    from recipes.nemotron_diarization.segments import Decision
    from recipes.nemotron_diarization.session import Outputs, Source, diarize, prepare
    from zoo.artifact import assets_of

    # What can be known to be wrong is said before the export, which takes minutes.
    decision = Decision(threshold, release, min_speech, min_gap)
    source = Source(audio, stream, latency, rate, channels)
    outputs = Outputs(rttm, plot, as_json)
    prepare(source, outputs, example)
    opening = opened(RECIPE, backend=backend, weights=weights, dtype=dtype, qlinear=qlinear, runtime=runtime, pte=pte)
    with opening as (program, path):
        diarize(program, assets_of(path), source, decision, outputs, f"{path.name}, {runtime}")


RECIPE = Recipe(
    name="nemotron-diarization",
    summary="who spoke when, up to 8 speakers, whole recordings or streaming",
    checkpoint=HUB_ID,
    methods=("stack", "encode"),
    dtypes=("fp32", "fp16"),
    quantization=QUANTIZATION,
    excluded={"vulkan": "the wheel's pass for rotary embeddings fails on this model's"},
    tolerances=tolerance_table(tolerances, ("fp32", "fp16"), QUANTIZATION),
    build=deferred("recipes.nemotron_diarization.build:build"),
    check=deferred("recipes.nemotron_diarization.check:check"),
    workloads=deferred("recipes.nemotron_diarization.bench:workloads"),
    run=run,
    sample_arguments=("{out}.wav", "--example", "--rttm", "{out}.rttm", "--plot", "{out}.png", "--min-speech", "0.1"),
)
