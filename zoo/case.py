"""A delegate's graph and the inputs of one call: which of its operators goes wrong on the GPU.

1. the graph runs in stretches, each on what the GPU gave for those before it; every intermediate is read back, and each
   operator is computed again in float64 from the very operands that the GPU gave it: its own error, whatever came
   before
2. where no operator is at fault alone, but an output is, kernels are wrong that were fused: by halves, the first value
   is found that is wrong when the graph ends there
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend.blob import to_blob
from backend.graph import Graph, Node
from backend.runtime.delegate import Delegate
from backend.runtime.program import ProgramFile
from recipes.recipe import UserError
from zoo.console import progress
from zoo.eager import DTYPES, compute
from zoo.reproducer import constant, static, write_reproducer

# Relative to the largest value of an operator's result: sums of thousands of terms in float32, one rounding to half.
BOUNDS = {"float32": 1e-4, "float16": 4e-3}
_STEPS = {"zoo.round_rows": 1 / 127}  # a code that differs by one is no error: the quotient may lie halfway
_READ_BYTES = 256 << 20  # of intermediates at a time
_BLOCK = 1 << 15  # elements compared at a time: few enough for the processor's caches, and for one thread
_PROBES = 16  # values that are kept in float64 at a time while fused kernels are searched


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

    def text(self) -> str:
        first = self.first
        if first is None:
            worst = max((row.error for row in self.rows), default=0.0)
            return f"{self.method}: {len(self.rows)} operators right, the worst off by {worst:.2g}"
        how = "where kernels are fused" if self.fused else "by itself"
        where = self.reproducer / "run.py" if self.reproducer else "too large to write"
        what = f"operator {first.position}, {first.op} {first.shapes},"
        return f"{self.method}: {what} is off by {first.error:.2g} {how}\n  alone: {where}"

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


class Case:
    """One delegate's graph, or a stretch of it, with the inputs of one call; `offset` is its first node's position."""

    def __init__(
        self, method: str, graph: Graph, inputs: Sequence[np.ndarray], file: ProgramFile, offset: int = 0
    ) -> None:
        self.method, self.inputs, self.offset, self._file = method, list(inputs), offset, file
        given = dict(zip(graph.inputs, self.inputs, strict=True))
        env = graph.bind([array.shape for array in self.inputs], [int(given[index]) for index in graph.sizes])
        self.graph = static(graph, env)
        self._made = {out: at for at, node in enumerate(self.graph.nodes) for out in _outs(node)}
        self._last = {ref: at for at, node in enumerate(self.graph.nodes) for ref in node.refs()}
        self._faulty: dict[int, np.ndarray] = {}  # what the first operator at fault was given

    def outputs(self) -> list[np.ndarray]:
        return self._run(self.graph.outputs)

    def between(self, first: int, end: int) -> Case:
        """The operators from first to before end, on what the GPU gives them."""
        kept = {*self.graph.outputs, *self.graph.mutations.values()}
        made = [out for node in self.graph.nodes[first:end] for out in _outs(node)]
        part = self._part(first, end, [out for out in made if out in kept or self._last.get(out, -1) >= end])
        given = dict(zip(self.graph.inputs, self.inputs, strict=True))
        computed = [index for index in part.inputs if index not in given]
        given.update(zip(computed, self._run(computed) if computed else [], strict=True))
        return Case(self.method, part, [given[index] for index in part.inputs], self._file, self.offset + first)

    def find(self, folder: Path) -> Finding:
        truth: dict[int, torch.Tensor] = {}
        rows = tuple(self._walk(truth))
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
        first = self._first_fused(rows)
        return Finding(self.method, first, self._write(folder, first, alone=False), rows, fused=True)

    # --- each operator by itself --------------------------------------------------------------------------------------

    def _walk(self, truth: dict[int, torch.Tensor]) -> Iterator[Row]:
        """A row for each operator. Afterwards `truth` has the outputs in float64 all the way from the inputs."""
        found = dict(zip(self.graph.inputs, self.inputs, strict=True))
        truth.update({index: _double(torch.from_numpy(np.array(array))) for index, array in found.items()})
        self._faulty = {}
        with progress(f"{self.method} against float64", len(self.graph.nodes), "operator") as advance:
            for start, end in self._stretches():
                outs = [out for node in self.graph.nodes[start:end] for out in _outs(node)]
                part = self._part(start, end, outs)
                found.update(zip(outs, self._execute(part, [found[index] for index in part.inputs]), strict=True))
                for position in range(start, end):
                    row = self._row(position, found, truth)
                    if row.jumps and not self._faulty:
                        refs = self.graph.nodes[position].refs()
                        self._faulty = {ref: found[ref] for ref in refs if ref in found}
                    yield row
                    self._drop(truth, position, self.graph.outputs)
                    advance()
                for index in [index for index in found if self._last.get(index, -1) < end]:
                    del found[index]
        truth.update((index, self._stored(index)) for index in self.graph.outputs if index not in truth)

    def _row(self, position: int, found: Mapping[int, np.ndarray], truth: dict[int, torch.Tensor]) -> Row:
        node = self.graph.nodes[position]
        stored = {ref: self._stored(ref) for ref in node.refs() if self._is_stored(ref)}
        operands = {ref: _double(torch.from_numpy(found[ref])) for ref in node.refs() if ref not in stored}
        golden = self._exact(node, {**operands, **stored})
        if set(operands) <= set(self.graph.inputs):
            exact = golden
        else:
            exact = self._exact(node, {**{ref: truth[ref] for ref in operands}, **stored})
        errors = [(0.0, 0.0, BOUNDS["float32"])]
        for out, expected, total in zip(node.outputs, golden, exact, strict=True):
            if out is not None:
                truth[out] = total
                bound = _STEPS.get(node.op, BOUNDS.get(self.graph.values[out].dtype, 0.0))
                own = _error(found[out], expected)
                errors.append((own, own if total is expected else _error(found[out], total), bound))
        error, total_error, bound = max(errors, key=lambda item: item[0] - item[2])
        return Row(self.method, self.offset + position, node.op, self._shapes(node), error, total_error, bound)

    def _stretches(self) -> Iterator[tuple[int, int]]:
        """Positions (first, end) of operators whose results are read back together: staging memory is bounded."""
        start = size = 0
        for position, node in enumerate(self.graph.nodes):
            size += sum(4 * math.prod(self._spec_shape(out)) for out in _outs(node))
            if size > _READ_BYTES:
                yield start, position + 1
                start, size = position + 1, 0
        if start < len(self.graph.nodes):
            yield start, len(self.graph.nodes)

    def _exact(self, node: Node, operands: Mapping[int, torch.Tensor]) -> tuple[Any, ...]:
        try:
            return compute(node, operands, {}, double=True)
        except (RuntimeError, AttributeError, KeyError) as error:
            raise UserError(f"{self.method}: {node.op} has no float64 form: {error}") from error

    def _drop(self, held: dict[int, torch.Tensor], position: int, kept: Collection[int]) -> None:
        """Forgets what no operator after `position` reads."""
        node = self.graph.nodes[position]
        for index in {*node.refs(), *_outs(node)}:
            if index in held and index not in kept and self._last.get(index, -1) <= position:
                del held[index]

    # --- kernels that are fused ---------------------------------------------------------------------------------------

    def _first_fused(self, rows: Sequence[Row]) -> Row:
        """The first operator whose result is wrong where the graph ends with it; the last is taken to be."""

        def is_wrong(position: int) -> bool:
            outs = _outs(self.graph.nodes[position])
            return any(
                not _error(actual, truth[out]) <= self._allowed(out, rows)
                for out, actual in zip(outs, self._run(outs), strict=True)
            )

        low, high = 0, len(rows) - 1
        while low < high:
            probes = sorted({low + (high - low) * part // _PROBES for part in range(_PROBES)})
            truth = self._truth(probes)
            wrong = _first(is_wrong, probes)
            low, high = probes[wrong - 1] + 1 if wrong else low, probes[wrong] if wrong < len(probes) else high
        outs = _outs(self.graph.nodes[low])
        truth = self._truth([low])
        worst = max(_error(actual, truth[out]) for out, actual in zip(outs, self._run(outs), strict=True))
        return replace(rows[low], error=worst)

    def _truth(self, positions: Sequence[int]) -> dict[int, torch.Tensor]:
        """The results of the operators at these positions in float64 all the way from the inputs."""
        wanted = {out for position in positions for out in _outs(self.graph.nodes[position])}
        held = {
            index: _double(torch.from_numpy(np.array(array)))
            for index, array in zip(self.graph.inputs, self.inputs, strict=True)
        }
        for position, node in enumerate(self.graph.nodes[: max(positions) + 1]):
            stored = {ref: self._stored(ref) for ref in node.refs() if self._is_stored(ref)}
            for out, tensor in zip(node.outputs, self._exact(node, {**held, **stored}), strict=True):
                if out is not None:
                    held[out] = tensor
            self._drop(held, position, wanted)
        return held

    def _allowed(self, value: int, rows: Sequence[Row]) -> float:
        """Errors may add up on the way: what the values have when each is computed by itself, and a margin."""
        total = rows[self._made[value]].total if value in self._made else 0.0
        return max(4 * total, BOUNDS.get(self.graph.values[value].dtype, 0.0))

    # --- parts of the graph -------------------------------------------------------------------------------------------

    def _part(self, first: int, end: int, outputs: Sequence[int]) -> Graph:
        """The nodes from first to before end; its inputs are those of their operands that come from elsewhere."""
        nodes = self.graph.nodes[first:end]
        made = {out for node in nodes for out in _outs(node)}
        taken = dict.fromkeys(ref for node in nodes for ref in node.refs())
        return replace(
            self.graph,
            nodes=nodes,
            inputs=[ref for ref in taken if ref not in made and not self._is_stored(ref)],
            outputs=list(outputs),
            mutations={state: value for state, value in self.graph.mutations.items() if value in made},
        )

    def _run(self, outputs: Sequence[int]) -> list[np.ndarray]:
        """The graph on the GPU up to these values, fused as ever, on states as they are at the start."""
        end = 1 + max((self._made[value] for value in outputs if value in self._made), default=-1)
        part = replace(self._part(0, end, outputs), inputs=self.graph.inputs)
        return self._execute(part, self.inputs)

    def _execute(self, part: Graph, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        delegate = Delegate(to_blob(part.compacted()), self._file.get_data)
        try:
            return delegate.execute(inputs)
        finally:
            delegate.close()

    def _is_stored(self, index: int) -> bool:
        spec = self.graph.values[index]
        return spec.constant is not None or spec.state is not None

    def _stored(self, index: int) -> torch.Tensor:
        """A constant, or a state as it is at the start."""
        spec = self.graph.values[index]
        if spec.constant is None:
            return _double(torch.zeros(self._spec_shape(index), dtype=DTYPES[spec.dtype]))
        return _double(constant(spec, self._file.get_data))

    def _spec_shape(self, index: int) -> tuple[int, ...]:
        return self.graph.values[index].concrete({})

    def _shapes(self, node: Node) -> str:
        values = self.graph.values
        taken = ", ".join(f"{values[ref].dtype}{list(self._spec_shape(ref))}" for ref in node.refs())
        made = ", ".join(f"{values[out].dtype}{list(self._spec_shape(out))}" for out in _outs(node))
        return f"({taken}) -> {made}"

    def _write(self, folder: Path, row: Row, alone: bool) -> Path | None:
        """The operator on what it was given, or the graph up to it; see `write_reproducer`."""
        position = row.position - self.offset
        part = self._part(position if alone else 0, position + 1, _outs(self.graph.nodes[position]))
        given = {**dict(zip(self.graph.inputs, self.inputs, strict=True)), **(self._faulty if alone else {})}
        values = list(self.graph.values)
        if alone:  # a state as it was given, so that the case can be changed
            states = [ref for ref in dict.fromkeys(part.nodes[0].refs()) if values[ref].state is not None]
            for ref in states:
                given[ref] = self._stored(ref).to(DTYPES[values[ref].dtype]).numpy()
                values[ref] = replace(values[ref], state=None, constant=None)
            part = replace(part, inputs=[*part.inputs, *states])
        part = replace(part, values=values, mutations={})
        place = folder / f"{row.method}-{row.position}-{row.op.split('.')[1]}"
        inputs = [given[index] for index in part.inputs]
        return write_reproducer(place, part, inputs, self._file.get_data, f"{row.op}: {row.shapes}")


def _outs(node: Node) -> list[int]:
    return [out for out in node.outputs if out is not None]


def _first(holds: Callable[[int], bool], numbers: Sequence[int]) -> int:
    """The place of the first of `numbers` for which it holds, and holds for all after it; their count when for none."""
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(numbers[middle]) else (middle + 1, high)
    return low


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _error(actual: np.ndarray, golden: torch.Tensor) -> float:
    """Largest difference relative to the largest finite golden value; infinite where NaN or infinities differ."""
    if actual.shape != tuple(golden.shape):
        return math.inf
    worst = scale = 0.0
    blocks = zip(torch.from_numpy(actual).reshape(-1).split(_BLOCK), golden.reshape(-1).split(_BLOCK), strict=True)
    for found, expected in ((found.double(), expected.double()) for found, expected in blocks):
        if not found.numel():
            continue
        difference, size = (found - expected).abs_().max(), expected.abs().max()
        if not (difference.isfinite() and size.isfinite()):
            finite = expected.isfinite()
            same = torch.equal(found[~finite].nan_to_num(1.5), expected[~finite].nan_to_num(1.5))
            if not same or not found[finite].isfinite().all():
                return math.inf
            if not finite.any():
                continue
            difference, size = (found - expected)[finite].abs().max(), expected[finite].abs().max()
        worst, scale = max(worst, float(difference)), max(scale, float(size))
    return worst / scale if scale else worst


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
