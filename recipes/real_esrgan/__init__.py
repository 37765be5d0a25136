"""Real-ESRGAN: pictures, enlarged 2 or 4 times (RRDBNet and SRVGGNetCompact, with the published weights).

    file ─ pictures.py ─► tiles (tiling.py) ─ upscale(picture) ─► bands (resample.py for --scale) ─ sinks.py ─► file

Programs of small networks have `pixels` too, `upscale` rounded to 8 bits: what the runner calls where that is enough.

variants.py    the published networks; the form of --weights   locate.py, checkpoint.py, ncnn.py   weights
networks.py    the two families                                build.py       the bundle
runner.py      `zoo run real-esrgan`, torch-free               check.py       against float64 eager and ncnn
reference.py   the ncnn package, in a process of its own       bench.py       beside eager and ncnn
This file is the declaration and is read without torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from recipes.command import BackendOption, DtypeOption, PteOption, RuntimeOption, WeightsOption, opened
from recipes.real_esrgan.variants import DEFAULT, HUB_ID, VARIANTS, Weights, checked, parse_weights
from recipes.recipe import Recipe, Tolerance, UserError, deferred, tolerance_table

DTYPES = ("fp32", "fp16")


def tolerances(dtype: str) -> dict[str, Tolerance]:
    """The bounds of the check. `rmse` rows are root mean squares of differences on a real picture, 1 being white:
    10^(-dB/20) of a peak signal-to-noise ratio."""
    ncnn = Tolerance(10 ** (-40 / 20), 0, "40 dB: ncnn rounds to 8 bits, and its kernels to half precision")
    if dtype == "fp16":
        upscale = Tolerance(3e-2, 0, "half precision keeps 11 bits (5e-4), through up to 350 convolutions")
        rmse = Tolerance(10 ** (-50 / 20), 0, "50 dB: under half a step of 8 bits")
    else:
        upscale = Tolerance(1e-4, 0, "float32 in another order of sums than eager's float64")
        rmse = Tolerance(10 ** (-60 / 20), 0, "60 dB")
    pixels = Tolerance(0.5 + 255 * upscale.atol, 0, "steps of 8 bits: half of one, and what upscale may be off by")
    return {"upscale": upscale, "pixels": pixels, "rmse": rmse, "ncnn": ncnn}


def weights_argument(weights: str, variant: str | None, denoise: float | None) -> str:
    """`--weights`, `--variant` and `--denoise` as one weights argument. Raises `UserError` when they disagree."""
    parsed = parse_weights(weights)
    if variant is not None and parsed.variant not in (None, variant):
        raise UserError(f"--variant {variant} and --weights {weights} name two variants")
    if variant is None and parsed.variant is None and denoise is None:
        return weights
    if variant is None and parsed.variant is None:
        variant = next(name for name, entry in VARIANTS.items() if entry.weak)
    if variant is not None:
        parsed = replace(parsed, variant=variant)
    if denoise is not None:
        parsed = replace(parsed, denoise=denoise)
    parsed = checked(parsed)
    # The default keeps one name, and one exported file, with and without --variant.
    return weights if parsed == Weights(DEFAULT, None, "auto") and weights == "auto" else str(parsed)


def run(
    picture: Annotated[
        str, typer.Argument(help="A picture or a folder of them; sample:NAME is one of scikit-image's.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="A .png, .jpg or .webp file; for a folder, a folder.")],
    variant: Annotated[str | None, typer.Option(help=f"{', '.join(VARIANTS)}; default: {DEFAULT}.")] = None,
    scale: Annotated[
        int | None, typer.Option(help="2, 3 or 4: below the network's own, enlarged in full and then shrunk (Lanczos).")
    ] = None,
    denoise: Annotated[
        float | None, typer.Option(help="general-x4v3: 0 keeps noise, 1 removes it; default 0.5 where both parts are.")
    ] = None,
    tile: Annotated[str, typer.Option(help="auto, the side of a tile in pixels, or 0 for the whole picture.")] = "auto",
    backend: BackendOption = "webgpu",
    weights: WeightsOption = "auto",
    dtype: DtypeOption = "fp32",
    runtime: RuntimeOption = "executorch",
    pte: PteOption = None,
) -> None:
    """Enlarge a picture, or every picture of a folder."""
    from recipes.real_esrgan.runner import Upscaler, budget_of, folder_pairs, parse_tile
    from recipes.real_esrgan.sinks import check_picture_output
    from zoo.artifact import assets_of
    from zoo.console import say
    from zoo.pictures import sample_path

    # What can be known to be wrong is said before the export, which takes a while.
    source = sample_path(picture)
    if not source.exists():
        raise UserError(f"no such file or folder: {source}")
    if source.is_dir():
        folder_pairs(source, output)
    else:
        check_picture_output(output, 1, 1)
    parse_tile(tile)
    chosen = weights_argument(weights, variant, denoise)
    with opened(RECIPE, backend=backend, weights=chosen, dtype=dtype, runtime=runtime, pte=pte) as (program, path):
        upscaler = Upscaler(program, assets_of(path), tile, budget_of(backend))
        if source.is_dir():
            done, failed = upscaler.folder(source, output, scale)
        else:
            done, failed = [upscaler.file(source, output, scale)], 0
    seconds, pixels = sum(one.seconds for one in done), sum(one.megapixels for one in done)
    size = f"{done[0].width}×{done[0].height}" if len(done) == 1 else f"{len(done)} pictures"
    say(
        f"{output}: {size}, {pixels:.2f} megapixels in {seconds:.1f} s ({seconds / max(pixels, 1e-9):.2f} s a "
        f"megapixel), {sum(one.tiles for one in done)} tiles; {path.name}, {runtime}"
        + ("" if upscaler.metadata["is_real"] else "; MEANINGLESS: the weights are not a trained model's")
    )
    if failed:
        say(f"{failed} of {failed + len(done)} pictures could not be enlarged")
        raise typer.Exit(1)


RECIPE = Recipe(
    name="real-esrgan",
    summary="pictures enlarged 2 or 4 times: " + ", ".join(VARIANTS),
    checkpoint=HUB_ID,
    methods=("upscale",),
    dtypes=DTYPES,
    quantization={},
    tolerances=tolerance_table(lambda backend, dtype, mode: tolerances(dtype), DTYPES, {}),
    build=deferred("recipes.real_esrgan.build:build"),
    check=deferred("recipes.real_esrgan.check:check"),
    run=run,
    sample_arguments=("sample:chelsea", "--variant", "animevideov3", "--output", "{out}.png"),
    identity=deferred("recipes.real_esrgan.locate:identity"),
    workloads=deferred("recipes.real_esrgan.bench:workloads"),
)
