"""`zoo check --bisect`: which operator of a delegate first goes wrong, and a case of it that runs alone.

1. the recipe's own check runs, and the largest call of each method is kept
2. every intermediate of that call is read back, and each operator is computed again in float64 from the very
   operands that the GPU gave it: its own error, whatever came before
3. where no operator is at fault alone, but an output is, kernels are wrong that were fused: by halves, the first
   value is found that is wrong when the graph ends there
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend.graph import BACKEND_ID, Graph, Node, from_blob, to_blob
from backend.runtime.delegate import Delegate
from backend.runtime.program import ProgramFile, TensorMeta, read_program
from recipes.recipe import ExportRequest, Recipe, UserError
from zoo.console import quiet_libraries, step
from zoo.eager import compute, everything, interpret
from zoo.export import ensure_exported
from zoo.files import staged

# Relative to the largest value of an operator's result: sums of thousands of terms in float32, one rounding to half.
BOUNDS = {"float32": 1e-4, "float16": 4e-3}
_STEPS = {"zoo.round_rows": 1 / 127}  # a code that differs by one is no error: the quotient may lie halfway
_READ_BYTES = 256 << 20  # of intermediates at a time
_KEPT_BYTES = 512 << 20  # of a reproducer


@dataclass(frozen=True)
class Row:
    """One operator: `error` is its own, `total` that of its result against float64 all the way from the inputs."""

    method: str
    position: int
    op: str
    shapes: str
    error: float
    total: float
    bound: float

    @property
    def jumps(self) -> bool:
        return not self.error <= self.bound


@dataclass(frozen=True)
class Finding:
    """The first operator at fault in a method, or None; where its case was written; and all that was measured."""

    method: str
    first: Row | None
    reproducer: Path | None
    rows: tuple[Row, ...]
    fused: bool = False  # right alone, wrong where kernels are fused

    def json(self) -> dict[str, Any]:
        first = self.first
        return {
            "method": self.method,
            "operators": len(self.rows),
            "first": first
            and {
                "position": first.position,
                "op": first.op,
                "shapes": first.shapes,
                "error": _number(first.error),
                "bound": first.bound,
                "fused": self.fused,
            },
            "reproducer": self.reproducer and str(self.reproducer),
        }


class Recorder:
    """A program that keeps, of every method, the inputs of its largest call."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.methods = program.methods
        self.calls: dict[str, list[np.ndarray]] = {}

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        inputs = [np.array(array) for array in arrays]
        size = sum(array.size for array in inputs)
        if size > sum(array.size for array in self.calls.get(method, ())):
            self.calls[method] = inputs
        outputs: list[np.ndarray] = self._program.run(method, *arrays)
        return outputs


def bisect(recipe: Recipe, request: ExportRequest, *, pte: Path | None = None, folder: Path) -> list[Finding]:
    """A finding for each delegate of the program; reproducers go to new folders in `folder`.

    States start as they do when a program is loaded. Raises `UserError` for another backend than WebGPU, and where a
    delegate's operator cannot be computed by torch.
    """
    from zoo.program import Program

    if request.backend != "webgpu":
        raise UserError(f"--bisect looks into delegates of webgpu, not of {request.backend}")
    path = ensure_exported(recipe, request, pte)
    with step(f"{recipe.name}: recording the calls of the check"), quiet_libraries(), Program.load(path) as program:
        recorder = Recorder(program)
        recipe.check(recorder, request)
    file = read_program(path)
    findings = []
    for method, inputs in recorder.calls.items():
        info = file.methods[method]
        values: dict[int, Any] = dict(zip(info.inputs, inputs, strict=True))
        delegates = [call for call in info.calls if call.backend_id == BACKEND_ID]
        for number, call in enumerate(delegates):
            missing = [index for index in call.inputs if index not in values]
            for index in missing:
                meta = info.values[index]
                values[index] = meta.array() if isinstance(meta, TensorMeta) else np.asarray(meta)
            if info.undelegated and number:
                raise UserError(
                    f"{method}: delegates after operators that run elsewhere cannot be fed: {info.undelegated}"
                )
            graph = from_blob(call.blob)
            case = Case(method, graph, [np.asarray(values[index]) for index in call.inputs], file)
            with step(f"{method}: {len(graph.nodes)} operators against float64"):
                findings.append(case.find(folder))
            values.update(zip(call.outputs, case.outputs(), strict=True))
    return findings


class Case:
    """One delegate's graph with the inputs of one call."""

    def __init__(self, method: str, graph: Graph, inputs: Sequence[np.ndarray], file: ProgramFile) -> None:
        self.method, self.graph, self.inputs, self.get_data = method, graph, list(inputs), file.get_data
        self.data = {
            spec.constant: constant(spec.dtype, spec.concrete({}), self.get_data(spec.constant))
            for spec in graph.values
            if spec.constant is not None
        }
        self.env = graph.bind([array.shape for array in inputs])

    def outputs(self) -> list[np.ndarray]:
        return self._run(self.graph.outputs)

    def find(self, folder: Path) -> Finding:
        tensors = [torch.from_numpy(np.array(array)) for array in self.inputs]
        try:
            truth = everything(self.graph, tensors, self.data, double=True)
        except (RuntimeError, AttributeError, KeyError) as error:
            raise UserError(f"{self.method}: an operator has no float64 form: {error}") from error
        rows = tuple(self._rows(truth))
        first = next((row for row in rows if row.jumps), None)
        if first is not None:
            return Finding(self.method, first, self._write(folder, first, alone=True), rows)
        wrong = [
            value
            for value, actual in zip(self.graph.outputs, self.outputs(), strict=True)
            if not _error(actual, truth[value]) <= self._allowed(value, rows)
        ]
        if not wrong:
            return Finding(self.method, None, None, rows)
        first = self._first_fused(truth, rows)
        return Finding(self.method, first, self._write(folder, first, alone=False), rows, fused=True)

    def _rows(self, truth: Mapping[int, torch.Tensor]) -> Iterator[Row]:
        wanted = [out for node in self.graph.nodes for out in node.outputs if out is not None]
        actual: dict[int, np.ndarray] = {}
        for part in self._parts(wanted):
            actual.update(zip(part, self._run(part), strict=True))
        stored = {index: self.data[spec.constant] for index, spec in enumerate(self.graph.values) if spec.constant}
        held = {**truth, **stored, **{index: torch.from_numpy(array) for index, array in actual.items()}}
        held.update(zip(self.graph.inputs, map(torch.from_numpy, self.inputs), strict=True))
        for position, node in enumerate(self.graph.nodes):
            operands = {ref: _double(held[ref]) for ref in node.refs()}
            golden = compute(node, operands, self.env, double=True)
            errors = [(0.0, 0.0, BOUNDS["float32"])]
            for out, expected in zip(node.outputs, golden, strict=True):
                if out is not None:
                    found = actual[out]
                    bound = _STEPS.get(node.op, BOUNDS.get(self.graph.values[out].dtype, 0.0))
                    errors.append((_error(found, expected), _error(found, truth[out]), bound))
            error, total, bound = max(errors, key=lambda item: item[0] - item[2])
            yield Row(self.method, position, node.op, self._shapes(node), error, total, bound)

    def _parts(self, wanted: Sequence[int]) -> Iterator[list[int]]:
        """Values to read back together: staging memory is bounded."""
        part: list[int] = []
        size = 0
        for value in wanted:
            part.append(value)
            size += 4 * math.prod(self.graph.values[value].concrete(self.env))
            if size > _READ_BYTES:
                yield part
                part, size = [], 0
        if part:
            yield part

    def _run(self, outputs: Sequence[int]) -> list[np.ndarray]:
        """The graph on the GPU with other outputs, on states as they are at the start."""
        graph = replace(self.graph, outputs=list(outputs))
        delegate = Delegate(to_blob(graph), self.get_data)
        try:
            return delegate.execute(self.inputs)
        finally:
            delegate.close()

    def _allowed(self, value: int, rows: Sequence[Row]) -> float:
        """Errors may add up on the way: what the values have when each is computed by itself, and a margin."""
        position = next((i for i, node in enumerate(self.graph.nodes) if value in node.outputs), None)
        total = rows[position].total if position is not None else 0.0
        return max(4 * total, BOUNDS.get(self.graph.values[value].dtype, 0.0))

    def _first_fused(self, truth: Mapping[int, torch.Tensor], rows: Sequence[Row]) -> Row:
        def is_wrong(position: int) -> bool:
            outs = [out for out in self.graph.nodes[position].outputs if out is not None]
            return any(
                not _error(actual, truth[out]) <= self._allowed(out, rows)
                for out, actual in zip(outs, self._run(outs), strict=True)
            )

        low, high = 0, len(rows) - 1  # an output is wrong, so the last is taken to be
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_wrong(middle) else (middle + 1, high)
        outs = [out for out in self.graph.nodes[low].outputs if out is not None]
        worst = max(_error(actual, truth[out]) for out, actual in zip(outs, self._run(outs), strict=True))
        return replace(rows[low], error=worst)

    def _shapes(self, node: Node) -> str:
        def shape(index: int) -> str:
            spec = self.graph.values[index]
            return f"{spec.dtype}{list(spec.concrete(self.env))}"

        taken = ", ".join(shape(ref) for ref in node.refs())
        return f"({taken}) -> {', '.join(shape(out) for out in node.outputs if out is not None)}"

    def _write(self, folder: Path, row: Row, alone: bool) -> Path | None:
        """A folder with the graph, its inputs and data, and a script; None where that would be too large."""
        node = self.graph.nodes[row.position]
        graph = replace(self.graph, outputs=[out for out in node.outputs if out is not None], mutations={})
        inputs = dict(zip(self.graph.inputs, self.inputs, strict=True))
        if alone:
            operands = [ref for ref in dict.fromkeys(node.refs()) if self.graph.values[ref].constant is None]
            inputs = dict(zip(operands, self._operands(operands, inputs), strict=True))
            values = list(self.graph.values)
            for index in operands:
                values[index] = replace(values[index], state=None)
            graph = replace(graph, values=values, nodes=[node], inputs=operands, sizes={})
        graph = static(graph, self.env).compacted()
        arrays = list(inputs.values())
        data = {spec.constant: self.data[spec.constant] for spec in graph.values if spec.constant is not None}
        if sum(array.nbytes for array in [*arrays, *(tensor.numpy() for tensor in data.values())]) > _KEPT_BYTES:
            return None
        golden = interpret(graph, [torch.from_numpy(np.array(array)) for array in arrays], data, double=True)
        place = folder / f"{row.method}-{row.position}-{row.op.split('.')[1]}"
        folder.mkdir(parents=True, exist_ok=True)
        with staged(place) as (made,):
            made.mkdir()
            (made / "graph.zwg").write_bytes(to_blob(graph))
            np.savez(made / "inputs.npz", *arrays)
            stored: dict[str, Any] = {name: tensor.numpy() for name, tensor in data.items()}
            np.savez(made / "data.npz", **stored)
            np.savez(made / "golden.npz", *(tensor.numpy() for tensor in golden))
            (made / "run.py").write_text(_SCRIPT.format(op=row.op, shapes=row.shapes))
        return place

    def _operands(self, wanted: Sequence[int], inputs: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        computed = [index for index in wanted if index not in inputs and self.graph.values[index].state is None]
        found = dict(zip(computed, self._run(computed), strict=True)) if computed else {}
        zeros = {
            index: np.zeros(self.graph.values[index].concrete({}), self.graph.values[index].dtype)
            for index in wanted
            if self.graph.values[index].state is not None
        }
        return [{**zeros, **inputs, **found}[index] for index in wanted]


_SCRIPT = '''"""{op}: {shapes}

python run.py, where `backend` can be imported: numpy and wgpu are enough.
"""

from pathlib import Path

import numpy as np

from backend.runtime.delegate import Delegate

here = Path(__file__).resolve().parent
data, inputs, golden = (np.load(here / name) for name in ("data.npz", "inputs.npz", "golden.npz"))
delegate = Delegate((here / "graph.zwg").read_bytes(), lambda key: np.ascontiguousarray(data[key]).tobytes())
outputs = delegate.execute([inputs[name] for name in inputs.files])
for actual, name in zip(outputs, golden.files):
    expected = golden[name]
    error = np.abs(actual.astype(np.float64) - expected)
    print("largest difference", np.max(error, initial=0), "of values up to", np.max(np.abs(expected), initial=0))
'''


def static(graph: Graph, env: Mapping[str, int]) -> Graph:
    """The graph at one set of sizes."""
    from backend.expr import Expr, evaluate

    def settle(arg: Any) -> Any:
        if isinstance(arg, Expr):
            return evaluate(arg, env)
        return [settle(item) for item in arg] if isinstance(arg, (list, tuple)) else arg

    values = [replace(spec, shape=spec.concrete(env)) for spec in graph.values]
    nodes = [replace(node, args={name: settle(arg) for name, arg in node.args.items()}) for node in graph.nodes]
    return replace(graph, values=values, nodes=nodes, symbols={}, sizes={})


def constant(dtype: str, shape: tuple[int, ...], data: Any) -> torch.Tensor:
    """Named data as a tensor."""
    view = memoryview(data).cast("B")[: math.prod(shape) * np.dtype(dtype).itemsize]
    return torch.from_numpy(np.frombuffer(view, dtype).reshape(shape).copy())


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _error(actual: np.ndarray, golden: torch.Tensor) -> float:
    """Largest difference relative to the largest finite golden value; infinite where NaN or infinities differ."""
    found, expected = actual.astype(np.float64), golden.to(torch.float64).numpy()
    if found.shape != expected.shape:
        return math.inf
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True) or not np.isfinite(found[finite]).all():
        return math.inf
    scale = float(np.abs(expected[finite]).max(initial=0))
    worst = float(np.abs(found[finite] - expected[finite]).max(initial=0))
    return worst / scale if scale else worst


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
