"""The `zoo` command: one thin function a subcommand; failures.py has its exit codes.

With `--json`, stdout holds one JSON document and nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.main
from typer.core import TyperGroup

from recipes import recipe as registry
from recipes.recipe import FULL_PRECISION, ExportRequest, Recipe, UserError
from zoo import __version__
from zoo.console import own_stdout, say, table
from zoo.failures import guarded
from zoo.options import (
    BackendOption,
    Dtype,
    Json,
    Model,
    Pte,
    Qembedding,
    Qlinear,
    Runtime,
    Setting,
    Weights,
    make_request,
)
from zoo.peers.table import PATIENCE
from zoo.targets import check_target

if TYPE_CHECKING:
    from zoo.check import Outcome

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_debug = bool(os.environ.get("ZOO_DEBUG"))


class _Models(TyperGroup):
    """The subcommands of `zoo run`: one a recipe, and only the recipe that is asked for is imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(registry.names())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        recipe = registry.load(cmd_name)
        single = typer.Typer(add_completion=False, context_settings=_SETTINGS)
        single.command(name=recipe.name)(recipe.run)
        return typer.main.get_command(single)


app = typer.Typer(
    name="zoo", add_completion=False, context_settings=_SETTINGS, help="Real PyTorch models on any GPU through WebGPU."
)
run_app = typer.Typer(
    cls=_Models, context_settings=_SETTINGS, help="Run a model: `zoo run MODEL --help` for its options."
)
app.add_typer(run_app, name="run")


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    global _debug
    _debug = _debug or debug
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@run_app.callback(invoke_without_command=True)
def _run(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def doctor(as_json: Json = False) -> None:
    """Adapter, driver, limits, features, versions; what is missing and how to get it."""
    from zoo.doctor import examine

    with own_stdout() as stdout:
        findings = examine()
        if as_json:
            stdout.write_json(findings.json())
    if not as_json:
        if findings.adapter:
            table(("adapter", ""), list(findings.adapter.items()))
            table(("limit", ""), list(findings.limits.items()))
            table(("feature", ""), [(name, "yes" if has else "no") for name, has in findings.features.items()])
        others = [adapter["device"] for adapter in findings.adapters if adapter != findings.adapter]
        if others:
            typer.echo(f"other adapters (choose with ZOO_ADAPTER): {', '.join(others)}")
        table(("version", ""), [(name, value or "missing") for name, value in findings.versions.items()])
        table(("native shim", ""), list(findings.shim.items()))
        table(("dispatch loop", ""), list(findings.dispatch_loop.items()))
        table(("matrix products", ""), list(findings.products.items()))
    for missing in findings.missing:
        say(f"missing: {missing.what}; get it: {missing.get}")
    if not findings.ok:
        raise typer.Exit(1)


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """Models, their methods and options, and the quantization modes of each on each backend."""
    from zoo import catalog

    recipes = [registry.load(name) for name in registry.names()]
    if as_json:
        with own_stdout() as stdout:
            stdout.write_json({"models": [catalog.describe(recipe) for recipe in recipes]})
        return
    for recipe in recipes:
        typer.echo(f"{recipe.name}: {recipe.summary} ({recipe.checkpoint}); methods: {', '.join(recipe.methods)}")
        for name, choices in recipe.options.items():
            typer.echo(f"    --set {name}={'|'.join(choices)}")
    table(catalog.COLUMNS, catalog.rows(recipes))


@app.command()
def export(
    model: Model,
    backend: BackendOption = "webgpu",
    weights: Weights = "auto",
    dtype: Dtype = "fp32",
    qlinear: Qlinear = FULL_PRECISION,
    qembedding: Qembedding = FULL_PRECISION,
    settings: Setting = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The .pte to write; default: out/MODEL/….pte")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show operators outside the delegates, and why.")] = False,
    as_json: Json = False,
) -> None:
    """Export a model to one .pte, with what its runner needs in a folder beside it."""
    from zoo.export import NotDelegated, print_refusals
    from zoo.export import export as run_export

    recipe = registry.load(model)
    request = make_request(recipe, backend, weights, dtype, qlinear, qembedding, settings)
    with own_stdout() as stdout:
        try:
            report = run_export(recipe, request, output)
        except NotDelegated as error:
            print_refusals(error.refusals)
            raise
        for name, why in report.kept.items():
            say(f"{name} stays in full precision: {why}")
        if explain:
            print_refusals(report.refusals)
        if as_json:
            stdout.write_json(report.json())
    if not as_json:
        before = report.bytes_before
        saved = "" if before is None else f", in full precision about {before / 1e6:.1f} MB"
        typer.echo(f"{report.path}: {report.bytes / 1e6:.1f} MB{saved}")
        rows = [(name, row.partitions, row.undelegated, row.ops) for name, row in report.methods.items()]
        table(("method", "partitions", "undelegated", "ops"), rows)


@app.command()
def check(
    model: Model,
    backend: BackendOption = "webgpu",
    weights: Weights = "auto",
    dtype: Dtype = "fp32",
    qlinear: Qlinear = FULL_PRECISION,
    qembedding: Qembedding = FULL_PRECISION,
    settings: Setting = None,
    pte: Pte = None,
    runtime: Runtime = "executorch",
    bisected: Annotated[
        bool, typer.Option("--bisect", help="Find the first operator that goes wrong, and write a case of it (WebGPU).")
    ] = False,
    method: Annotated[str | None, typer.Option(help="With --bisect: in this method alone.")] = None,
    operators: Annotated[
        str | None,
        typer.Option(help="With --bisect: from one position of the method to before another.", metavar="FIRST:END"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare every method and the end-to-end output with float64 eager PyTorch; exit code 1 when out of bounds."""
    from zoo.check import check as run_check

    recipe = registry.load(model)
    request = make_request(recipe, backend, weights, dtype, qlinear, qembedding, settings)
    if bisected:
        _bisect(recipe, request, pte, method, operators, as_json)
        return
    if method is not None or operators is not None:
        raise UserError("--method and --operators go with --bisect")
    with own_stdout() as stdout:
        report = run_check(recipe, request, pte=pte, runtime=runtime)
        if as_json:
            stdout.write_json(report.json())
    if not as_json:
        rows = [
            (name, *(f"{value:.3g}" for value in (row.max_abs, row.max_rel, row.tolerance)), _verdict(row))
            for name, row in report.outputs.items()
        ]
        table(("output", "max abs", "max rel", "tolerance", ""), rows)
        typer.echo(f"{model} on {backend}: {'passed' if report.passed else 'FAILED'}")
    if not report.passed:
        raise typer.Exit(1)


def _bisect(
    recipe: Recipe, request: ExportRequest, pte: Path | None, method: str | None, operators: str | None, as_json: bool
) -> None:
    from zoo.bisect import bisect, positions

    span = None if operators is None else positions(operators)
    folder = Path("out") / recipe.name / "bisect"
    with own_stdout() as stdout:
        findings = bisect(recipe, request, pte=pte, folder=folder, method=method, operators=span)
        if as_json:
            stdout.write_json({"model": recipe.name, "findings": [finding.json() for finding in findings]})
    for finding in findings if not as_json else []:
        typer.echo(finding.text())
    if any(finding.first for finding in findings):
        raise typer.Exit(1)


def _verdict(row: Outcome) -> str:
    return row.problem or ("passed" if row.passed else "FAILED")


@app.command()
def plan(
    model: Model,
    weights: Weights = "auto",
    dtype: Dtype = "fp32",
    qlinear: Qlinear = FULL_PRECISION,
    qembedding: Qembedding = FULL_PRECISION,
    settings: Setting = None,
    pte: Pte = None,
    as_json: Json = False,
) -> None:
    """Per method: dispatches, the kernels chosen, and buffer memory on this adapter (WebGPU)."""
    from zoo.plan import as_json as plan_json
    from zoo.plan import plan as run_plan

    recipe = registry.load(model)
    request = make_request(recipe, "webgpu", weights, dtype, qlinear, qembedding, settings)
    with own_stdout() as stdout:
        plans = run_plan(recipe, request, pte=pte)
        if as_json:
            stdout.write_json(plan_json(plans))
    if not as_json:
        for name, row in plans.items():
            typer.echo(
                f"{name}: {row.partitions} partitions, {row.dispatches} dispatches, {row.buffer_bytes / 1e6:.2f} MB "
                f"buffers ({row.times_bound:.2f} × what is live at once), {row.weight_bytes / 1e6:.2f} MB weights"
            )
            for kernel in row.kernels:
                typer.echo(f"  {kernel}")


@app.command()
def bench(
    model: Annotated[
        str, typer.Argument(help="A model of `zoo list`, `encoder` or `kernels`.", metavar="MODEL|encoder|kernels")
    ],
    backend: Annotated[list[str] | None, typer.Option("--backend", "-b", help="May be given more than once.")] = None,
    weights: Weights = "auto",
    dtype: Dtype = "fp32",
    qlinear: Qlinear = FULL_PRECISION,
    qembedding: Qembedding = FULL_PRECISION,
    settings: Setting = None,
    runs: Annotated[int, typer.Option(help="Timed rounds at most; fewer where they take long.")] = 20,
    runtime: Runtime = "executorch",
    traced: Annotated[bool, typer.Option("--trace", help="GPU time of every kernel instead (WebGPU).")] = False,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Other sides to time: the recipe's own and installed peers by default; `none` for none."),
    ] = None,
    memory: Annotated[bool, typer.Option(help="Also run the sample on each backend for its peak memory.")] = True,
    only: Annotated[str, typer.Option(help="The workloads or kernels whose names contain this.")] = "",
    patience: Annotated[
        float, typer.Option(help="Seconds that a peer may take to get ready, all graphs together.")
    ] = PATIENCE,
    as_json: Json = False,
) -> None:
    """Time the work of a model on each backend and beside other implementations, or single kernels."""
    from zoo.bench import encoder, kernels, models, trace
    from zoo.bench.show import show

    others = None if against is None else [side for side in against if side != "none"]
    with own_stdout() as stdout:
        if model == "kernels":
            report = kernels.bench_kernels(runs=runs, only=only, against=others, patience=patience)
        else:
            recipe = encoder.RECIPE if model == encoder.NAME else registry.load(model)
            requests = [
                make_request(recipe, name, weights, dtype, qlinear, qembedding, settings)
                for name in (["webgpu"] if traced else backend or ["webgpu"])
            ]
            if traced:
                report = trace.trace(recipe, requests[0])
            else:
                report = models.bench(
                    recipe,
                    requests,
                    runs=runs,
                    runtime=runtime,
                    against=others,
                    memory=memory,
                    only=only,
                    patience=patience,
                )
        if as_json:
            stdout.write_json(report)
    if not as_json:
        show(report)


@app.command()
def tune(
    clear: Annotated[bool, typer.Option("--clear", help="Go back to the shipped rule.")] = False,
    as_json: Json = False,
) -> None:
    """Measure the tiles of matrix products on this adapter, and choose by that from now on (WebGPU)."""
    from zoo import tune as tuning

    with own_stdout() as stdout:
        if clear:
            path, there = tuning.clear()
            found: dict[str, Any] = {"path": str(path), "removed": there}
        else:
            result = tuning.tune()
            found = result.json()
        if as_json:
            stdout.write_json(found)
    if as_json:
        return
    if clear:
        typer.echo(f"{path}: {'removed' if there else 'there was none'}")
        return
    table(tuning.COLUMNS, tuning.rows(result), title=f"adapter: {result.adapter}; held-out products")
    kept = f"written to {result.path}" if result.path else "the shipped rule is as good, and stays"
    typer.echo(f"{result.gain:.2f}x as fast on average, in {result.seconds:.0f} s: {kept}")


@app.command()
def report(
    reports: Annotated[list[Path], typer.Argument(help="Files that `zoo bench … --json` wrote.", metavar="JSON…")],
    page: Annotated[Path, typer.Option("--page", help="The folder that gets results.md and its plots.")],
    plots: Annotated[bool, typer.Option(help="Draw a plot a model, with matplotlib.")] = True,
) -> None:
    """Make one page of benchmark reports, which may be of several machines."""
    from zoo.bench.report import write_page

    typer.echo(write_page(reports, page, plots=plots))


@app.command(hidden=True)
def sample(model: Model, backend: BackendOption = "webgpu") -> None:
    """Run a model on the recipe's sample input: what `make MODEL-BACKEND` does."""
    recipe = registry.load(model)
    check_target(backend, to_run=True)
    out = Path("out") / recipe.name
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make folder {out}: {error.strerror}") from error
    arguments = [part.replace("{out}", str(out / f"{recipe.name}-{backend}")) for part in recipe.sample_arguments]
    command: Any = _Models(name="run").get_command(None, model)
    command.main([*arguments, "--backend", backend], prog_name=f"zoo run {model}", standalone_mode=False)


def main() -> NoReturn:
    """The console script: runs the command of `sys.argv` and exits."""
    # The GPU loader complains on stderr where a session has no such folder, as in a container.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    # A polite kill cleans up temporary files as Ctrl-C does.
    signal.signal(signal.SIGTERM, _terminate)
    # Not standalone: usage errors come here too, and become one line like all others.
    code = guarded(lambda: typer.main.get_command(app).main(prog_name="zoo", standalone_mode=False), lambda: _debug)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at exit; into the void, so that it does not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)
