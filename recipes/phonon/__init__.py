"""Phonon: Gradium's 31M text-to-speech model (`GradiumPhononTTSForConditionalGeneration` in transformers).

    text ─ text.py ─► prompts ─ runner.py ─► per 80 ms frame:  frame(ids, features, position, noise) → latent, logit
                                                               decode(latent, frame number) → 1920 samples

checkpoint.py, standin.py   weights          modules.py, codec.py   the two exported methods
build.py                    the bundle       check.py               against float64 eager
This file is the declaration and is read without torch.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipes.phonon.checkpoint import HUB_ID
from recipes.recipe import (
    BACKENDS,
    FULL_PRECISION,
    Bundle,
    Comparison,
    ExportRequest,
    QuantMode,
    Recipe,
    Tolerance,
    UserError,
)

if TYPE_CHECKING:
    from recipes.phonon.runner import Runnable

KEEPS = {
    "frame.backbone.input_proj": "voice and audio latents are continuous: an error here is in every later position",
    "frame.flow.input_proj": "the flow's state enters here, 32 values wide: nothing to save, all of the noise to lose",
    "frame.eos_head": "one output decides when speech ends, by a threshold: its error moves the end of every utterance",
    "decode.codec": "its errors are heard as noise in every sample, and convolutions hold most of its weights",
}


def _modes(*names: str) -> tuple[QuantMode, ...]:
    return tuple(QuantMode(name, KEEPS) for name in names)


QUANTIZATION = {
    "xnnpack": _modes("8da4w", "8da8w"),
    "cuda": _modes("4w", "8w"),
    "vulkan": _modes("4w", "8da4w"),
    "webgpu": _modes("4w", "8w", "8da4w", "8da8w"),
    "mlx": _modes("4w", "8w"),
}


def tolerances(dtype: str, mode: str) -> dict[str, Tolerance]:
    """The bound of every kind of output. `samples` are those of `decode` alone, `utterance` those of a whole run.

    Quantized weights are the same on both sides of the check; an utterance is checked in full precision only,
    where its frames can be expected to stay together.
    """
    exact = (1e-4, "float32 in another order of sums than eager's float64")
    if dtype == "fp16":
        exact = (2e-2, "half precision keeps 11 bits (5e-4), through some 30 layers")
    step = exact
    if "da" in mode:
        step = (6e-2, "activations of 8 bits (0.4%) at every linear; 2% was measured with XNNPACK")
    bounds = {"latent": Tolerance(0, *step), "eos_logit": Tolerance(0, *step), "samples": Tolerance(0, *exact)}
    if dtype == "fp32" and mode == FULL_PRECISION:
        bounds["frames"] = Tolerance(0, 0, "the end of speech is a threshold: it must fall on the same frame")
        bounds["utterance"] = Tolerance(
            0, 1e-3, "each frame feeds on the rounding of all frames before it: ten times the bound of one call"
        )
    return bounds


def build(request: ExportRequest) -> Bundle:
    from recipes.phonon.build import build as build_bundle

    return build_bundle(request)


def check(program: Runnable, request: ExportRequest) -> list[Comparison]:
    from recipes.phonon.check import check as check_program

    return check_program(program, request)


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
    backend: Annotated[str, typer.Option("--backend", "-b", help="webgpu, xnnpack or portable.")] = "webgpu",
    weights: Annotated[str, typer.Option(help="auto, synthetic, tiny, a folder or a hub id.")] = "auto",
    dtype: Annotated[str, typer.Option(help="fp32 or fp16.")] = "fp32",
    qlinear: Annotated[str, typer.Option(help="Quantization mode; `zoo list` names them.")] = FULL_PRECISION,
    runtime: Annotated[str, typer.Option(help="executorch, or direct: without torch and ExecuTorch.")] = "executorch",
    pte: Annotated[Path | None, typer.Option(help="Use this exported file instead of exporting.")] = None,
) -> None:
    """Speak a text into a WAV file, or stream it as it is spoken."""
    from recipes.phonon.runner import Speaker
    from zoo.artifact import assets_of
    from zoo.audio import open_sink
    from zoo.console import say
    from zoo.export import ensure_exported, make_request
    from zoo.files import check_output
    from zoo.program import Program
    from zoo.targets import check_target

    # What can be known to be wrong is said before the export, which takes minutes.
    if not text.strip():
        raise UserError("the text is empty: there is nothing to say")
    if stream == (output is not None):
        raise UserError("choose one of --output FILE.wav and --stream")
    if output is not None:
        check_output(output)
    check_target(backend, to_run=True)
    path = ensure_exported(RECIPE, make_request(RECIPE, backend, weights=weights, dtype=dtype, qlinear=qlinear), pte)
    with Program.load(path, runtime) as program:
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
    tolerances={
        (backend, dtype, mode): tolerances(dtype, mode)
        for backend in BACKENDS
        for dtype in ("fp32", "fp16")
        for mode in (FULL_PRECISION, *(mode.name for mode in QUANTIZATION.get(backend, ())))
    },
    build=build,
    check=check,
    run=run,
    sample_arguments=("--text", "Hello! This is Phonon, speaking from your own machine.", "--output", "{out}.wav"),
)
