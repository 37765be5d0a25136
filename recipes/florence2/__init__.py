"""Florence-2: a picture described, searched, read and cut out, by a task prompt (`Florence2ForConditionalGeneration`).

    picture ─ runner.py ─► `vision` ─┐ features, on the GPU
    task, text ─ tasks.py ─► prompt ─┴► `encode` ─► keys and values, on the GPU
    generate.py: greedy or beams ─ `step` ─► tokens ─ answers.py ─► boxes, polygons, text ─ draw.py ─► picture

checkpoint.py, standin.py   weights          modules.py   the exported methods
build.py                    the bundle       check.py     against float64 eager      bench.py   workloads
This file is the declaration and is read without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recipes.command import BackendOption, DtypeOption, PteOption, QlinearOption, RuntimeOption, WeightsOption, opened
from recipes.florence2.checkpoint import HUB_ID, SIZES, weights_argument
from recipes.recipe import FULL_PRECISION, Recipe, Tolerance, UserError, deferred, quant_modes, tolerance_table

KEEPS = {
    "vision.projection": "every picture token passes here, once a picture: 0.3% of the weights",
}


QUANTIZATION = {
    "xnnpack": quant_modes("8da4w", "8da8w", keeps=KEEPS),
    "webgpu": quant_modes("4w", "8w", "8da4w", "8da8w", keeps=KEEPS),
    "vulkan": quant_modes("4w", "8da4w", keeps=KEEPS),
    "cuda": quant_modes("4w", "8w", keeps=KEEPS),
    "mlx": quant_modes("4w", "8w", keeps=KEEPS),
}
DTYPES = ("fp32", "fp16")


def tolerances(_backend: str, dtype: str, mode: str) -> dict[str, Tolerance]:
    """The bounds of the check. Weights have the same values on both sides, rounded or quantized as they are."""
    outputs = ("features", "encoded", "logits")
    if "da" in mode:
        why = "activations that lie between two of 256 codes are rounded apart, and so on: 15% was measured"
        return {name: Tolerance(0, 0.2, why) for name in outputs}
    if dtype == "fp16":
        why = "linears and caches keep 11 bits (5e-4), through all layers"
        return {name: Tolerance(0, 2e-2, why) for name in outputs}
    why = "float32 in another order of sums than eager's float64"
    bounds = {name: Tolerance(1e-4, 0, why) for name in outputs}
    if mode == FULL_PRECISION:
        bounds["tokens"] = Tolerance(0, 0, "within 1e-4 of float64 no likeliest token changes")
    return bounds


def run(
    picture: Annotated[str, typer.Argument(help="A picture file; sample:NAME is one of scikit-image's.")],
    task: Annotated[str, typer.Option(help="Task prompt, such as <OD> or <CAPTION>; a wrong one lists all.")],
    text: Annotated[
        str | None, typer.Option(help="What the task is about: a phrase, or a region as X0,Y0,X1,Y1 in pixels.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The answer drawn on the picture: .png, .jpg or .webp.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The answer as JSON on stdout.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print tokens as they come.")] = False,
    beams: Annotated[int | None, typer.Option(help="1: greedy; default: the checkpoint's, 3.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of the answer at most.")] = None,
    size: Annotated[str | None, typer.Option(help=f"{', '.join(SIZES)}.")] = None,
    backend: BackendOption = "webgpu",
    weights: WeightsOption = "auto",
    dtype: DtypeOption = "fp32",
    qlinear: QlinearOption = FULL_PRECISION,
    runtime: RuntimeOption = "executorch",
    pte: PteOption = None,
) -> None:
    """Describe a picture, find things in it, read its text."""
    from recipes.florence2.draw import check_output, save
    from recipes.florence2.runner import Florence, lines
    from recipes.florence2.tasks import check_text, task_input, task_name
    from zoo.artifact import assets_of
    from zoo.console import own_stdout, say
    from zoo.pictures import read_rgb, sample_path

    # What can be known to be wrong is said before the export, which takes minutes.
    task = task_name(task)
    check_text(task, text)
    if stream and as_json:
        raise UserError("choose one of --stream and --json: both are for stdout")
    pixels = read_rgb(sample_path(picture))
    task_input(task, text, pixels.shape[1], pixels.shape[0])
    if output is not None:
        check_output(output, pixels)
    with (
        opened(
            RECIPE, backend=backend, weights=weights_argument(weights, size), dtype=dtype, qlinear=qlinear,
            runtime=runtime, pte=pte,
        ) as (program, path),
        own_stdout() as stdout,
    ):  # fmt: skip
        florence = Florence(program, assets_of(path))
        florence.see(pixels)
        pieces = florence.ask(task, text, beams, max_tokens)
        for piece in pieces:
            if stream:
                stdout.write(piece.encode())
        answer = florence.answer
        if output is not None:
            save(output, pixels, answer)
        if as_json:
            stdout.write_json(answer.json())
        else:
            stdout.write(("\n" if stream else lines(answer)).encode())
        say(f"{answer}; {path.name}, {runtime}{'' if florence.metadata['is_trained'] else NOT_TRAINED}")


NOT_TRAINED = "; NOT A TRAINED MODEL: the answer means nothing"

RECIPE = Recipe(
    name="florence2",
    summary="pictures described, searched and read by a task prompt: captions, boxes, polygons, text",
    checkpoint=HUB_ID,
    methods=("vision", "encode", "step"),
    dtypes=DTYPES,
    quantization=QUANTIZATION,
    tolerances=tolerance_table(tolerances, DTYPES, QUANTIZATION),
    build=deferred("recipes.florence2.build:build"),
    check=deferred("recipes.florence2.check:check"),
    workloads=deferred("recipes.florence2.bench:workloads"),
    run=run,
    sample_arguments=(
        "sample:astronaut", "--task", "<OD>", "--max-tokens", "64", "--stream", "-o", "{out}.png",
    ),
)  # fmt: skip
