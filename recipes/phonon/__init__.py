"""Phonon: Gradium's 31M text-to-speech model (`GradiumPhononTTSForConditionalGeneration` in transformers).

    text ─ text.py ─► prompts ─ runner.py ─► per 80 ms frame:  frame(ids, features, position, noise) → latent, logit
                                                               decode(latent, frame number) → 1920 samples

checkpoint.py, standin.py   weights          modules.py, codec.py   the two exported methods
build.py                    the bundle       check.py               against float64 eager
bench.py                    workloads
This file is the declaration and is read without torch.
"""

from __future__ import annotations

import time
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
from recipes.phonon.checkpoint import HUB_ID
from recipes.recipe import (
    FULL_PRECISION,
    Recipe,
    Tolerance,
    UserError,
    deferred,
    quant_modes,
    tolerance_table,
)

KEEPS = {
    "frame.backbone.input_proj": "voice and audio latents are continuous: an error here is in every later position",
    "frame.flow.input_proj": "the flow's state enters here, 32 values wide: nothing to save, all of the noise to lose",
    "frame.eos_head": "one output decides when speech ends, by a threshold: its error moves the end of every utterance",
    "decode.codec": "its errors are heard as noise in every sample, and convolutions hold most of its weights",
}


QUANTIZATION = {
    "xnnpack": quant_modes("8da4w", "8da8w", keeps=KEEPS),
    "cuda": quant_modes("4w", "8w", keeps=KEEPS),
    "vulkan": quant_modes("4w", "8da4w", keeps=KEEPS),
    "webgpu": quant_modes("4w", "8w", "8da4w", "8da8w", keeps=KEEPS),
    "mlx": quant_modes("4w", "8w", keeps=KEEPS),
}


def tolerances(backend: str, dtype: str, mode: str) -> dict[str, Tolerance]:
    """The bound of every kind of output. `samples` are those of `decode` alone, `utterance` those of a whole run.

    Quantized weights are the same on both sides of the check; an utterance is checked in full precision only,
    where its frames can be expected to stay together.
    """
    exact = (1e-4, "float32 in another order of sums than eager's float64")
    if dtype == "fp16":
        exact = (2e-2, "half precision keeps 11 bits (5e-4), through some 30 layers")
    step = exact
    if "da" in mode:
        step = (6e-2, "activations that lie between two of 256 codes are rounded apart; 2% was measured with XNNPACK")
    bounds = {"latent": Tolerance(0, *step), "eos_logit": Tolerance(0, *step), "samples": Tolerance(0, *exact)}
    if dtype == "fp32" and mode == FULL_PRECISION:
        bounds["frames"] = Tolerance(0, 0, "the end of speech is a threshold: it must fall on the same frame")
        bounds["utterance"] = Tolerance(
            0, 1e-3, "each frame feeds on the rounding of all frames before it: ten times the bound of one call"
        )
    return bounds


def run(
    text: Annotated[str, typer.Option(help="What to say.")],
    voice: Annotated[str | None, typer.Option(help="A voice of the checkpoint; an unknown one lists them.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="WAV file to write.")] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Raw s16le mono PCM at 24 kHz on stdout, as spoken.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the noise: the same seed speaks the same samples.")] = 0,
    temperature: Annotated[
        float | None, typer.Option(help="Variance of the noise; default: the checkpoint's. 0 is flat.")
    ] = None,
    backend: BackendOption = "webgpu",
    weights: WeightsOption = "auto",
    dtype: DtypeOption = "fp32",
    qlinear: QlinearOption = FULL_PRECISION,
    runtime: RuntimeOption = "executorch",
    pte: PteOption = None,
) -> None:
    """Speak a text into a WAV file, or stream it as it is spoken."""
    from recipes.phonon.runner import Speaker
    from zoo.artifact import assets_of
    from zoo.audio import open_sink
    from zoo.console import say
    from zoo.files import check_output

    # What can be known to be wrong is said before the export, which takes minutes.
    if not text.strip():
        raise UserError("the text is empty: there is nothing to say")
    if stream == (output is not None):
        raise UserError("choose one of --output FILE.wav and --stream")
    if output is not None:
        check_output(output)
    opening = opened(RECIPE, backend=backend, weights=weights, dtype=dtype, qlinear=qlinear, runtime=runtime, pte=pte)
    with opening as (program, path):
        speaker = Speaker(program, assets_of(path), warn=lambda line: say(f"warning: {line}"))
        started = time.perf_counter()
        frames = speaker.stream(text, voice, seed, temperature)
        with open_sink(output, stream, speaker.sample_rate) as sink:
            first = None
            for frame in frames:
                sink.write(frame)
                first = first or time.perf_counter() - started
        elapsed = time.perf_counter() - started
    seconds = sink.samples / speaker.sample_rate
    say(
        f"{seconds:.2f} s of audio in {elapsed:.2f} s (real-time factor {elapsed / seconds:.2f}), first audio after "
        f"{1000 * (first or 0):.0f} ms; {path.name}, {runtime}"
        + (f"; {output}" if output is not None else "")
        + ("" if speaker.metadata["is_speech"] else "; NOT SPEECH: the weights are not a trained model's")
    )


RECIPE = Recipe(
    name="phonon",
    summary="text to speech, 24 kHz, streamed in frames of 80 ms",
    checkpoint=HUB_ID,
    methods=("frame", "decode"),
    dtypes=("fp32", "fp16"),
    quantization=QUANTIZATION,
    tolerances=tolerance_table(tolerances, ("fp32", "fp16"), QUANTIZATION),
    build=deferred("recipes.phonon.build:build"),
    check=deferred("recipes.phonon.check:check"),
    workloads=deferred("recipes.phonon.bench:workloads"),
    run=run,
    sample_arguments=("--text", "Hello! This is Phonon, speaking from your own machine.", "--output", "{out}.wav"),
)
