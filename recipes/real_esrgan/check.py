"""`zoo check`: the exported method against the network in float64 eager, and against the ncnn package's own output."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from recipes.real_esrgan import checkpoint as checkpoints
from recipes.real_esrgan import reference
from recipes.real_esrgan.checkpoint import Checkpoint
from recipes.real_esrgan.pictures import open_picture
from recipes.recipe import Comparison, ExportRequest, Runnable, UserError
from zoo.console import say
from zoo.pictures import SAMPLE, sample_path

SEED = 0
SIZES = ((1, 1), (2, 1), (5, 3), (17, 29), (33, 16))  # height and width, in multiples of what the network takes
PICTURE, CROP = "chelsea", (80, 130)  # the cat's eye: edges, fur and a dark pupil
SIDES = {"rrdb": (40, 48), "compact": (96, 112)}  # height and width of the crop: float64 takes its time


def check(program: Runnable, request: ExportRequest) -> list[Comparison]:
    """Rows of noise in several sizes, of a real picture, and of ncnn on that picture where it can run."""
    from recipes.real_esrgan import tolerances

    bounds = tolerances(request.dtype)
    checkpoint = checkpoints.load(request.weights)
    multiple = checkpoint.architecture.multiple
    network = checkpoint.network.double()
    rng = np.random.default_rng(SEED)

    def golden(pixels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            result: np.ndarray = network(torch.from_numpy(pixels.astype(np.float64))).numpy()
        return result

    def actual(pixels: np.ndarray) -> np.ndarray:
        return program.run("upscale", pixels)[0]

    def as_pixels(name: str, pixels: np.ndarray, expected: np.ndarray) -> list[Comparison]:
        """Of the method that gives 8 bits, where the program has it."""
        if "pixels" not in getattr(program, "methods", ()):
            return []
        made, broken = program.run("pixels", pixels)
        wanted = 255 * np.clip(expected, 0, 1).transpose(0, 2, 3, 1)
        return [Comparison(name, np.where(broken, np.nan, made), wanted, bounds["pixels"])]

    rows = []
    for height, width in SIZES:
        pixels = rng.random((1, 3, multiple * height, multiple * width), dtype=np.float32)
        name = f"upscale[{pixels.shape[2]}×{pixels.shape[3]}]"
        expected = golden(pixels)
        rows.append(Comparison(name, actual(pixels), expected, bounds["upscale"]))
        rows += as_pixels(name.replace("upscale", "pixels"), pixels, expected)
    height, width = SIDES[checkpoint.architecture.kind]
    picture = crop(multiple * height, multiple * width, rng)
    pixels = as_input(picture)
    enlarged, expected = actual(pixels), golden(pixels)
    rows.append(Comparison("picture", enlarged, expected, bounds["upscale"]))
    rows += as_pixels("picture.pixels", pixels, expected)
    rows.append(Comparison("picture.rmse", rmse(enlarged, expected), np.zeros(1), bounds["rmse"]))
    if (row := _ncnn(actual, checkpoint, picture)) is not None:
        rows.append(Comparison("picture.ncnn.rmse", row, np.zeros(1), bounds["ncnn"]))
    return rows


def crop(height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """A part of a photograph, uint8 `[height, width, 3]`; without scikit-image, noise of several sizes."""
    try:
        colour = open_picture(sample_path(SAMPLE + PICTURE)).colour
        top, left = CROP
        return colour[top : top + height, left : left + width]
    except UserError:
        coarse = rng.random((-(-height // 8), -(-width // 8), 3)).repeat(8, 0).repeat(8, 1)[:height, :width]
        return np.rint(255 * (0.8 * coarse + 0.2 * rng.random(coarse.shape))).astype(np.uint8)


def as_input(picture: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(picture.transpose(2, 0, 1)[None], dtype=np.float32) / np.float32(255)


def rmse(actual: np.ndarray, golden: np.ndarray) -> np.ndarray:
    """Of what is seen: both clipped to [0, 1]."""
    difference = np.clip(actual.astype(np.float64), 0, 1) - np.clip(golden, 0, 1)
    return np.sqrt(np.mean(np.square(difference))).reshape(1)


def _ncnn(run: Callable[[np.ndarray], np.ndarray], checkpoint: Checkpoint, picture: np.ndarray) -> np.ndarray | None:
    """The difference from ncnn on its own weights, on the same pixels mirrored at the border as ncnn does."""
    if (pair := checkpoint.ncnn) is None:
        return None
    scale, border = checkpoint.architecture.scale, reference.BORDER
    try:
        with reference.opened(pair, picture, scale) as ncnn:
            made = ncnn.result()
    except UserError as error:
        say(f"note: not compared with ncnn: {error}")
        return None
    padded = np.pad(picture, ((border, border), (border, border), (0, 0)), mode="reflect")
    inside = slice(scale * border, -scale * border)
    return rmse(run(as_input(padded))[..., inside, inside], as_input(made))
