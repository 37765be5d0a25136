"""From a recipe to a `.pte`: build, quantize, export, lower, serialize, and count what was delegated.

    1. recipe.build(request)           checkpoint → methods
    2. zoo.quantize.apply_request      linears and embeddings → torchao tensors, when a mode was asked for
    3. torch.export.export             each method → ATen graph
    4. to_edge_transform_and_lower     every method at once → edge graphs with delegates (zoo.targets)
    5. count                           partitions, nodes left outside, reasons
    6. to_executorch, write            `.pte` and its assets folder appear together, or not at all

Importing this module does not import torch.
"""

from __future__ import annotations

import json
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.recipe import FULL_PRECISION, Bundle, ExportRequest, Method, Recipe, UserError
from zoo import artifact, quantize
from zoo.console import notice, quiet_libraries, say, step, table
from zoo.files import check_output, staged
from zoo.targets import check_target

if TYPE_CHECKING:
    from torch.fx import Node


@dataclass(frozen=True)
class MethodReport:
    """Of one method: delegates, operators left outside them, operators in all."""

    partitions: int
    undelegated: int
    ops: int


@dataclass(frozen=True)
class Refusal:
    """Operators of one kind that stayed outside the delegates of a method, for one reason."""

    method: str
    op: str
    reason: str
    count: int


@dataclass
class ExportReport:
    """What an export made. `json()` is what `zoo export --json` prints."""

    model: str
    backend: str
    dtype: str
    qlinear: str
    path: Path
    bytes: int
    methods: dict[str, MethodReport]
    refusals: list[Refusal] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)  # linears in full precision under a mode, and why
    qembedding: str = FULL_PRECISION
    bytes_before: int | None = None  # of the same program without its mode: the size less what quantization saved

    def json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "backend": self.backend,
            "dtype": self.dtype,
            "qlinear": self.qlinear,
            **({} if self.qembedding == FULL_PRECISION else {"qembedding": self.qembedding}),
            "path": str(self.path),
            "bytes": self.bytes,
            **({} if self.bytes_before is None else {"bytes_before": self.bytes_before}),
            "methods": {name: asdict(report) for name, report in self.methods.items()},
        }


class NotDelegated(UserError):
    """The recipe promises full delegation on this backend and operators stayed outside."""

    def __init__(self, message: str, refusals: list[Refusal]) -> None:
        super().__init__(message)
        self.refusals = refusals


def make_request(
    recipe: Recipe,
    backend: str,
    *,
    weights: str = "auto",
    dtype: str = "fp32",
    qlinear: str = FULL_PRECISION,
    qembedding: str = FULL_PRECISION,
    options: Mapping[str, str] | None = None,
) -> ExportRequest:
    """The request, checked against the recipe's tables. Raises `UserError` that names what can be chosen."""
    check_target(backend)
    if backend in recipe.excluded:
        raise UserError(f"{recipe.name} cannot be exported for {backend}: {recipe.excluded[backend]}")
    if dtype not in recipe.dtypes:
        raise UserError(f"unknown dtype {dtype!r} for {recipe.name}: choose one of {', '.join(recipe.dtypes)}")
    if not weights.strip():
        raise UserError("--weights is empty: give auto, synthetic, tiny, a path or a hub id")
    quantize.check_mode(recipe, backend, qlinear)
    quantize.check_mode(recipe, backend, qembedding, "embedding")
    chosen = _options(recipe, options or {})
    # `check_target` has seen that it is a `Backend`, which a look-up does not tell the type checker.
    return ExportRequest(backend, weights, dtype, qlinear, qembedding, chosen)  # type: ignore[arg-type]


def parse_options(settings: Iterable[str]) -> dict[str, str]:
    """`NAME=VALUE` strings as a dict. Raises `UserError` for another form and for a name that is given twice."""
    parsed: dict[str, str] = {}
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not (name and equals and value):
            raise UserError(f"--set {setting!r}: give NAME=VALUE")
        if name in parsed:
            raise UserError(f"--set gives {name} twice: {parsed[name]} and {value}")
        parsed[name] = value
    return parsed


def _options(recipe: Recipe, options: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Options that differ from the recipe's defaults, sorted, so that equal requests are equal."""
    for name, value in options.items():
        if name not in recipe.options:
            raise UserError(f"{recipe.name} has no option {name!r}: it has {', '.join(recipe.options) or 'none'}")
        if value not in recipe.options[name]:
            raise UserError(f"{name} {value!r} of {recipe.name}: choose one of {', '.join(recipe.options[name])}")
    return tuple(sorted((name, value) for name, value in options.items() if value != recipe.options[name][0]))


def ensure_exported(recipe: Recipe, request: ExportRequest, pte: Path | None = None) -> Path:
    """The path of a `.pte` that fits `request`, exported now if there is none yet.

    `pte`: use this file as it is, made earlier with `zoo export --output`; it must be whole and of this model.
    The notices of the export (weights that are not real, for one) are repeated on stderr each time.
    """
    if pte is not None:
        entry = artifact.open_artifact(pte, recipe.name)[artifact.ENTRY]
    else:
        pte = artifact.default_path(recipe, request)
        found = artifact.reusable(pte, artifact.key(recipe, request))
        if found is None:
            return export(recipe, request).path
        entry = found[artifact.ENTRY]
    for line in entry.get("notices", ()):
        notice(line)
    return pte


def export(recipe: Recipe, request: ExportRequest, output: Path | None = None) -> ExportReport:
    """Exports `recipe` as `request` says to `output` (default: `zoo.artifact.default_path`) and its assets folder.

    Raises `UserError` for what the user can put right, before the long work where it can be known before;
    `NotDelegated` when the recipe promises full delegation and an operator stayed outside.
    """
    path = _prepare_path(recipe, request, output)
    if missing := check_target(request.backend).missing():
        raise UserError(f"exporting for {request.backend} needs {missing}")
    with quiet_libraries():
        return _export(recipe, request, path)


def _export(recipe: Recipe, request: ExportRequest, path: Path) -> ExportReport:
    with step(f"{recipe.name}: building the model ({request.weights} weights, {request.dtype})"):
        bundle = recipe.build(request)
    for line in bundle.notices:
        notice(line)
    quantized = _prepare_modules(recipe, request, bundle.methods)
    edge, refused = _lower(recipe, request, bundle.methods)
    methods, refusals = _count(edge, refused, request.backend)
    outside = {name: report.undelegated for name, report in methods.items() if report.undelegated}
    if outside and request.backend in recipe.full_delegation:
        raise NotDelegated(
            f"{recipe.name} promises to run whole on {request.backend}, but operators stayed outside: "
            + ", ".join(f"{name} {count}" for name, count in outside.items()),
            refusals,
        )
    with step(f"{recipe.name}: writing {path}"):
        size = _write(recipe, request, bundle, edge, methods, path)
    return ExportReport(
        recipe.name,
        request.backend,
        request.dtype,
        request.qlinear,
        path,
        size,
        methods,
        refusals,
        quantized.kept,
        request.qembedding,
        size + quantized.saved if quantized.changed else None,
    )


def print_refusals(refusals: Iterable[Refusal]) -> None:
    """Prints operators that stayed outside as a table on stderr: op × reason × count, most frequent first."""
    rows = sorted(refusals, key=lambda row: (row.method, -row.count, row.op))
    if not rows:
        say("every operator is inside a delegate")
        return
    columns = ("method", "operator", "count", "reason")
    table(columns, [(row.method, row.op, row.count, row.reason) for row in rows], to_stderr=True)


def _prepare_path(recipe: Recipe, request: ExportRequest, output: Path | None) -> Path:
    if output is None:
        path = artifact.default_path(recipe, request)
        # Its folder is made when there is something to write, so that a failed build leaves no empty one.
        there = next(folder for folder in path.absolute().parents if folder.exists())
        check_output(there / path.name)
        return path
    if output.suffix != ".pte":
        raise UserError(f"{output}: the name of an exported program must end in .pte")
    check_output(output)
    return output


def _prepare_modules(recipe: Recipe, request: ExportRequest, methods: dict[str, Method]) -> quantize.Quantized:
    """Evaluation mode, half precision and quantization, in place; returns what quantization did."""
    for method in methods.values():
        method.module.eval().requires_grad_(False)
    if request.dtype == "fp16":
        _halve(methods)
    asked = {"linears": request.qlinear, "embeddings": request.qembedding}
    told = [f"{what} ({quantize.MODES[mode].what})" for what, mode in asked.items() if mode != FULL_PRECISION]
    if not told:
        return quantize.Quantized()
    with step(f"{recipe.name}: quantizing {', '.join(told)}"):
        return quantize.apply_request(recipe, request, methods)


def _halve(methods: dict[str, Method]) -> None:
    import torch

    held = (tensor for method in methods.values() for tensor in method.module.state_dict().values())
    # A recipe that made its own choice of precision (some f16 inside) keeps it.
    if any(tensor.dtype == torch.float16 for tensor in held):
        return
    for name, method in methods.items():
        method.module.half()
        inputs = tuple(value.half() if value.is_floating_point() else value for value in method.example_inputs)
        methods[name] = Method(method.module, inputs, method.dynamic_shapes)


def _lower(recipe: Recipe, request: ExportRequest, methods: dict[str, Method]) -> tuple[Any, dict[str, list[Any]]]:
    """Exports and lowers all methods; returns the edge program manager and each method's partitioners."""
    import torch
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    programs = {}
    # While it traces, torch chooses a CPU kernel for every convolution, by sizes where oneDNN is in the choice: the
    # answer for the example's sizes would become a bound on all sizes.
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        for name, method in methods.items():
            with step(f"{recipe.name}: exporting {name}"):
                programs[name] = torch.export.export(
                    method.module, method.example_inputs, dynamic_shapes=method.dynamic_shapes, strict=False
                )
        # One set of partitioners a method: what each refused is then known by method.
        target = check_target(request.backend)
        partitioners = {name: target.partitioners(name, request.qlinear) for name in programs}
        with step(f"{recipe.name}: lowering to {request.backend}"):
            try:
                edge = to_edge_transform_and_lower(
                    programs,
                    partitioner=partitioners,
                    # Recipes keep whole operators that are not core ATen; the check would refuse them.
                    compile_config=EdgeCompileConfig(_check_ir_validity=False),
                )
            except Exception as error:
                if request.backend == "webgpu":
                    raise
                raise UserError(
                    f"ExecuTorch's own {request.backend} backend fails on {recipe.name} ({_root(error)}); "
                    f"export it for another backend: see zoo list"
                ) from error
    return edge, partitioners


def _root(error: BaseException) -> str:
    """The first line of the exception that all others came of."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _count(
    edge: Any, partitioners: dict[str, list[Any]], backend: str
) -> tuple[dict[str, MethodReport], list[Refusal]]:
    from executorch.exir.lowered_backend_module import get_lowered_submodules

    methods: dict[str, MethodReport] = {}
    refusals: list[Refusal] = []
    for name in sorted(edge.methods):
        module = edge.exported_program(name).graph_module
        outside = [node for node in module.graph.nodes if _is_op(node)]
        delegates = [delegate for _, delegate, _ in get_lowered_submodules(module)]
        inside = sum(_is_op(node) for delegate in delegates for node in delegate.original_module.graph.nodes)
        methods[name] = MethodReport(len(delegates), len(outside), len(outside) + inside)
        refusals += _reasons(name, outside, partitioners[name], backend)
    return methods, refusals


def _is_op(node: Node) -> bool:
    """True for a node that computes a tensor: no delegate call, no picking of a result, no arithmetic on sizes."""
    import torch

    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if node.target is torch.ops.higher_order.executorch_call_delegate:
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(item, torch.Tensor) for item in values)


def _reasons(method: str, outside: list[Node], partitioners: list[Any], backend: str) -> list[Refusal]:
    """Why each operator stayed outside: the partitioner's own reasons where it keeps them."""
    counts = Counter(str(getattr(node.target, "__name__", node.target)) for node in outside)
    told = [row for partitioner in partitioners for row in getattr(partitioner, "refusals", ())]
    if told:
        # Rows end in op, reason, count; a partitioner may put the method before them.
        return [Refusal(method, str(op), str(reason), int(count)) for *_, op, reason, count in map(_as_row, told)]
    why = "no partitioner: portable kernels" if not partitioners else f"not taken by the {backend} partitioner"
    return [Refusal(method, op, why, count) for op, count in counts.items()]


def _as_row(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row.op, row.reason, row.count)


def _write(
    recipe: Recipe,
    request: ExportRequest,
    bundle: Bundle,
    edge: Any,
    methods: dict[str, MethodReport],
    path: Path,
) -> int:
    """Serializes, then writes program and assets under temporary names and renames both. Returns the bytes."""
    program = _to_executorch(recipe, request, edge)
    made = _make_folders(path.parent)
    try:
        with staged(path, artifact.assets_of(path)) as (pte, assets):
            with open(pte, "wb") as file:
                program.write_to_file(file)
            size = pte.stat().st_size
            assets.mkdir()
            bundle.write_assets(assets)
            entry = {
                # After the build: a checkpoint that it fetched is in the cache by now.
                "key": artifact.key(recipe, request),
                "bytes": size,
                "notices": list(bundle.notices),
                "methods": {name: asdict(report) for name, report in methods.items()},
            }
            text = json.dumps({**bundle.metadata, artifact.ENTRY: entry}, indent=2)
            (assets / artifact.SIDECAR).write_text(text + "\n", encoding="utf-8")
    except BaseException:
        for folder in reversed(made):
            if not any(folder.iterdir()):
                folder.rmdir()
        raise
    return size


def _make_folders(folder: Path) -> list[Path]:
    """Makes `folder` and what is missing above it; returns the ones that were made, outermost first."""
    made: list[Path] = []
    try:
        for part in [*reversed(folder.parents), folder]:
            if not part.exists():
                part.mkdir()
                made.append(part)
    except OSError as error:
        raise UserError(f"cannot make folder {folder}: {error.strerror}") from error
    return made


def _to_executorch(recipe: Recipe, request: ExportRequest, edge: Any) -> Any:
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    # Buffers that methods mutate and no delegate owns: the host runtime gives the methods of a program one arena
    # for their intermediate values, so state planned into it is lost between calls. Shared, it has its own.
    stateful = any(edge.exported_program(name).graph_signature.buffers_to_mutate for name in edge.methods)
    config = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=stateful))
    try:
        return edge.to_executorch(config)
    except RuntimeError as error:
        if "Missing out variants" not in str(error):
            raise
        ops = ", ".join(sorted(set(re.findall(r"[\w:.]+::[\w.]+", str(error))))) or str(error)
        raise UserError(
            f"{recipe.name} for {request.backend}: ExecuTorch has no kernel for operators outside the delegates ({ops})"
        ) from error
