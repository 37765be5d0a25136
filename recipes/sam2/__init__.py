"""SAM 2: masks of objects in pictures, from points, boxes and masks (`Sam2Model` in transformers).

    picture ─ masks.py ─► encode ─ kept by the program ─► prompt(points, labels, mask) → logits, IoU ─ masks.py ─► masks

checkpoint.py, standin.py   weights              modules.py, blocks.py   the exported methods
build.py                    the bundle           check.py                against float64 eager
prompts.py, runner.py       from prompt to mask  everything.py           a grid of points
session.py, outputs.py      what `zoo run` does  bench.py                what `zoo bench` times
This file is the declaration and is read without torch.
"""

from __future__ import annotations

import sys
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
from recipes.recipe import FULL_PRECISION, Recipe, Tolerance, UserError, deferred, quant_modes, tolerance_table
from recipes.sam2.checkpoint import HUB_ID, SIZES, weights_argument

# No linear is kept. What is no linear stays: convolutions, norms, and the places of points.
QUANTIZATION = {
    "xnnpack": quant_modes("8da4w", "8da8w"),
    "cuda": quant_modes("4w", "8w"),
    "vulkan": quant_modes("4w", "8da4w"),
    "webgpu": quant_modes("4w", "8w", "8da4w", "8da8w"),
    "mlx": quant_modes("4w", "8w"),
}
DTYPES = ("fp32", "fp16")


def tolerances(backend: str, dtype: str, mode: str) -> dict[str, Tolerance]:
    """The bounds of a request. Weights have the same values on both sides.

    `maps`: what is kept of a picture; `masks`: logits; `scores`: predicted IoU, 0 to 1; `object`: a logit; `iou`: one
    less the overlap of the masks at the picture's size; `choice`: which mask answers.
    """
    if dtype == "fp32" and "da" not in mode:
        order = "float32 in another order of sums than eager's float64"
        return {
            "maps": Tolerance(1e-4, 0, order),
            "masks": Tolerance(1e-4, 0, order),
            "scores": Tolerance(1e-4, 0, order),
            "object": Tolerance(1e-4, 0, order),
            "iou": Tolerance(1e-3, 0, "pixels whose logit is within 1e-4 of 0 may fall on either side"),
            "choice": Tolerance(0, 0, "within 1e-4 of float64 no other mask is chosen"),
        }
    if "da" in mode:
        why = "activations that lie between two of 256 codes are rounded apart"
        return {
            "maps": Tolerance(0, 0.06, why + ": 1.5% was measured over 6 blocks, the largest model has 48"),
            "masks": Tolerance(0, 0.08, why + ", of the encoder and of the decoder after it: 1.8% was measured"),
            "scores": Tolerance(2e-2, 0, why),
            "object": Tolerance(0.1, 0, why),
            "iou": Tolerance(0.2, 0, "logits of untrained weights lie near 0 in large parts of a picture"),
        }
    why = "half precision keeps 11 bits (5e-4) at every operation"
    return {
        "maps": Tolerance(0, 1e-2, why + ": 0.1% was measured over 6 blocks, the largest model has 48"),
        "masks": Tolerance(0, 2e-2, why),
        "scores": Tolerance(3e-3, 0, why),
        "object": Tolerance(1e-2, 0, why),
        "iou": Tolerance(
            5e-2, 0, "logits of untrained weights lie near 0 in large parts of a picture: 2.3% was measured"
        ),
    }


def run(
    picture: Annotated[
        str | None, typer.Argument(help="A picture; sample:NAME is one of scikit-image's. Optional with --interactive.")
    ] = None,
    point: Annotated[list[str] | None, typer.Option(help="A point of the object, x,y in pixels. Repeatable.")] = None,
    negative: Annotated[list[str] | None, typer.Option(help="A point of the background, x,y. Repeatable.")] = None,
    box: Annotated[list[str] | None, typer.Option(help="A box around the object, x1,y1,x2,y2.")] = None,
    mask: Annotated[
        Path | None, typer.Option(help="A picture of an earlier mask to refine: light is the object.")
    ] = None,
    multimask: Annotated[
        bool, typer.Option("--multimask", help="The three masks of an ambiguous prompt, best first.")
    ] = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Prompts from stdin, answers on stdout: a JSON object a line.")
    ] = False,
    everything: Annotated[bool, typer.Option("--everything", help="All that a grid of points finds.")] = False,
    grid: Annotated[int, typer.Option(help="With --everything: points a side.")] = 32,
    min_iou: Annotated[float, typer.Option(help="With --everything: least predicted IoU of a mask.")] = 0.88,
    min_stability: Annotated[float, typer.Option(help="With --everything: least stability of a mask.")] = 0.95,
    max_overlap: Annotated[float, typer.Option(help="With --everything: most overlap (IoU) of two boxes.")] = 0.7,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A .png: the mask; with --everything numbers of masks."),
    ] = None,
    overlay: Annotated[
        Path | None, typer.Option(help="The picture with the masks over it: a .png, .jpg or .webp file.")
    ] = None,
    rle: Annotated[Path | None, typer.Option(help="Masks as COCO's run lengths: a .json file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what --rle writes.")] = False,
    size: Annotated[str | None, typer.Option("--size", "--checkpoint", help=f"{', '.join(SIZES)}.")] = None,
    backend: BackendOption = "webgpu",
    weights: WeightsOption = "auto",
    dtype: DtypeOption = "fp32",
    qlinear: QlinearOption = FULL_PRECISION,
    runtime: RuntimeOption = "executorch",
    pte: PteOption = None,
) -> None:
    """Find an object in a picture, by points, a box or a mask; or all that there is."""
    from recipes.sam2.everything import Limits
    from recipes.sam2.outputs import Outputs
    from recipes.sam2.prompts import from_options, read_mask
    from recipes.sam2.runner import Segmenter
    from recipes.sam2.session import Conversation, Task, converse, run_once
    from zoo.artifact import assets_of
    from zoo.console import own_stdout
    from zoo.pictures import read_rgb, sample_path

    # What can be known to be wrong is said before the export, which takes minutes.
    prompt = from_options(point or [], negative or [], box or [])
    asked = prompt is not None or mask is not None
    outputs = Outputs(output, overlay, rle)
    if interactive and (asked or everything or outputs.paths or as_json or multimask):
        raise UserError("--interactive takes prompts and outputs from its lines, not from options")
    if everything and (asked or multimask):
        raise UserError("--everything asks by itself: leave out --point, --negative, --box, --mask and --multimask")
    if picture is None and not interactive:
        raise UserError("give a picture")
    if not interactive and not everything and not asked:
        raise UserError("nothing is asked: give --point x,y, --box x1,y1,x2,y2, --mask FILE, or --everything")
    if not interactive and not outputs.paths and not as_json:
        raise UserError("nothing would be written: give -o MASK.png, --overlay, --rle or --json")
    limits = Limits(grid, min_iou, min_stability, max_overlap)
    outputs.check()
    if picture is not None and sample_path(picture).absolute() in [path.absolute() for path in outputs.paths]:
        raise UserError(f"{picture} would be overwritten: name another file")
    pixels = None if picture is None else read_rgb(sample_path(picture))
    if pixels is not None:
        height, width = pixels.shape[:2]
        outputs.check(width, height)
        if prompt is not None:
            prompt.check(width, height, MOST_POINTS)
        if mask is not None:
            read_mask(mask, width, height)
    opening = opened(
        RECIPE,
        backend=backend,
        weights=weights_argument(weights, size),
        dtype=dtype,
        qlinear=qlinear,
        runtime=runtime,
        pte=pte,
    )
    with opening as (program, path), own_stdout() as stdout:
        segmenter = Segmenter(program, assets_of(path))
        if interactive:
            converse(Conversation(segmenter, pixels), iter(sys.stdin.readline, ""), stdout)
            return
        assert pixels is not None
        task = Task(prompt, mask, multimask, limits if everything else None, outputs, as_json)
        untrained = "" if segmenter.metadata["is_trained"] else NOT_TRAINED
        run_once(segmenter, pixels, task, stdout, f"{path.name}, {runtime}{untrained}")


MOST_POINTS = 1024  # of a prompt
NOT_TRAINED = "; MEANINGLESS: the weights are not a trained model's"

RECIPE = Recipe(
    name="sam2",
    summary=f"masks of objects in pictures, by points and boxes: hiera {', '.join(SIZES)}",
    checkpoint=HUB_ID,
    methods=("encode", "prompt"),
    dtypes=DTYPES,
    quantization=QUANTIZATION,
    tolerances=tolerance_table(tolerances, DTYPES, QUANTIZATION),
    build=deferred("recipes.sam2.build:build"),
    check=deferred("recipes.sam2.check:check"),
    workloads=deferred("recipes.sam2.bench:workloads"),
    run=run,
    sample_arguments=(
        "sample:chelsea", "--point", "220,160", "--output", "{out}.png", "--overlay", "{out}-overlay.png",
        "--rle", "{out}.json",
    ),
)  # fmt: skip
