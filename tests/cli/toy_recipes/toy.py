"""A model small enough to export in a second: a linear layer, a counter with state, and a tone as its speech."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from recipes.recipe import Bundle, Comparison, ExportRequest, Method, QuantMode, Recipe, Tolerance, UserError
from zoo.audio import open_sink

TOLERANCE = Tolerance(1e-6, 1e-5, "one matmul of 64 terms in f32")
KEEPS = {"*.head": "its one output is a threshold"}


def _build(request: ExportRequest) -> Bundle:
    import torch

    if request.weights not in ("auto", "tiny", "synthetic"):
        raise UserError(f"cannot read weights {request.weights}")

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(64, 32)
            self.head = torch.nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.body(x)))

    class Count(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x)
            return self.total * 2

    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=2, max=16)
    return Bundle(
        methods={
            "scale": Method(Scale(), (torch.randn(3, 64),), ({0: rows},)),
            "count": Method(Count(), (torch.ones(4),)),
        },
        metadata={"sample_rate": 24000},
        write_assets=lambda folder: (folder / "words.txt").write_text("toy") and None,
        notices=("toy weights are random",),
    )


def _check(program: Any, request: ExportRequest) -> list[Comparison]:
    x = np.linspace(-1, 1, 5 * 64, dtype=np.float32).reshape(5, 64)
    module = _build(request).methods["scale"].module.double()
    import torch

    golden = module(torch.from_numpy(x).double()).detach().numpy()
    given = x.astype(np.float16 if request.dtype == "fp16" else np.float32)
    # Far too tight for f16, on purpose: a check that does not pass.
    return [Comparison("scale", program.run("scale", given)[0], golden, TOLERANCE)]


def _run(
    frames: Annotated[int, typer.Option(help="Frames to play.")] = 3,
    output: Annotated[Path | None, typer.Option()] = None,
    stream: Annotated[bool, typer.Option("--stream")] = False,
    backend: Annotated[str, typer.Option()] = "portable",
    delay: Annotated[float, typer.Option(help="Seconds between frames.")] = 0.0,
) -> None:
    """Plays a tone, 1.5 times too loud."""
    with open_sink(output, stream, 24000) as sink:
        for frame in range(frames):
            print("a library that prints to stdout")
            phase = np.arange(frame * 1920, (frame + 1) * 1920, dtype=np.float64)
            sink.write((1.5 * np.sin(2 * math.pi * 440 / 24000 * phase)).astype(np.float32))
            time.sleep(delay)


RECIPE = Recipe(
    name="toy",
    summary="a toy",
    checkpoint="nobody/toy",
    methods=("scale", "count"),
    dtypes=("fp32", "fp16"),
    quantization={
        "xnnpack": (QuantMode("8da4w", KEEPS), QuantMode("8da8w", KEEPS)),
        "portable": (QuantMode("8w", KEEPS),),
        "webgpu": (QuantMode("4w", KEEPS),),
        "cuda": (QuantMode("4w", KEEPS),),
        "vulkan": (QuantMode("4w", KEEPS), QuantMode("8da4w", KEEPS)),
    },
    tolerances={("portable", "fp32", "none"): {"scale": TOLERANCE}},
    build=_build,
    check=_check,
    run=_run,
    sample_arguments=("--frames", "2", "--output", "{out}.wav"),
)
