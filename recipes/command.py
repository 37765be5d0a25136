"""What every `zoo run MODEL` has in common: the options that choose an export, and the program that they stand for.

Read without torch, as the declarations are that use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipes.recipe import FULL_PRECISION, Recipe

if TYPE_CHECKING:
    from zoo.program import Program

BackendOption = Annotated[str, typer.Option("--backend", "-b", help="webgpu, xnnpack or portable.")]
WeightsOption = Annotated[str, typer.Option("--weights", help="auto, synthetic, tiny, a path or a hub id.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="fp32 or fp16.")]
QlinearOption = Annotated[str, typer.Option("--qlinear", help="Quantization mode; `zoo list` names them.")]
QembeddingOption = Annotated[str, typer.Option("--qembedding", help="The same for embedding tables.")]
RuntimeOption = Annotated[str, typer.Option("--runtime", help="executorch, or direct: without torch and ExecuTorch.")]
PteOption = Annotated[Path | None, typer.Option("--pte", help="Use this exported file instead of exporting.")]


@contextmanager
def opened(
    recipe: Recipe,
    *,
    backend: str,
    weights: str,
    dtype: str,
    qlinear: str = FULL_PRECISION,
    qembedding: str = FULL_PRECISION,
    options: Mapping[str, str] | None = None,
    runtime: str = "executorch",
    pte: Path | None = None,
) -> Iterator[tuple[Program, Path]]:
    """The loaded program, exported first where that is needed, and the path of its file.

    Raises `UserError` for what the recipe does not declare, and for backends that do not run here.
    """
    from zoo.export import ensure_exported, make_request
    from zoo.program import Program
    from zoo.targets import check_target

    check_target(backend, to_run=True)
    request = make_request(
        recipe, backend, weights=weights, dtype=dtype, qlinear=qlinear, qembedding=qembedding, options=options
    )
    path = ensure_exported(recipe, request, pte)
    with Program.load(path, runtime) as program:
        yield program, path
