"""Arguments and options that several subcommands of `zoo` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recipes.recipe import ExportRequest, Recipe
from zoo.targets import TARGETS

Model = Annotated[str, typer.Argument(help="A model of `zoo list`.", metavar="MODEL")]
BackendOption = Annotated[str, typer.Option("--backend", "-b", help=f"One of {', '.join(TARGETS)}.")]
Weights = Annotated[
    str, typer.Option(help="auto (local cache or hub), synthetic (seeded), tiny (for tests), a path or a hub id.")
]
Dtype = Annotated[str, typer.Option(help="Precision of weights and activations.")]
Qlinear = Annotated[str, typer.Option(help="Quantization mode of linear layers; `zoo list` names them.")]
Qembedding = Annotated[str, typer.Option(help="Quantization mode of embedding tables; `zoo list` names them.")]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="An option of this model alone, NAME=VALUE; may be given more than once.", metavar="NAME=VALUE"
    ),
]
Pte = Annotated[Path | None, typer.Option(help="Use this exported file instead of exporting.")]
Runtime = Annotated[str, typer.Option(help="executorch, or direct: without torch and ExecuTorch.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def make_request(
    recipe: Recipe, backend: str, weights: str, dtype: str, qlinear: str, qembedding: str, settings: list[str] | None
) -> ExportRequest:
    """The request that the options stand for. Raises `UserError` for what the recipe does not have."""
    from zoo import export

    options = export.parse_options(settings or ())
    return export.make_request(
        recipe, backend, weights=weights, dtype=dtype, qlinear=qlinear, qembedding=qembedding, options=options
    )
