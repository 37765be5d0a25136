"""`zoo check --bisect`: which operator of a delegate first goes wrong, and a case of it that runs alone.

The recipe's own check runs until it has made the largest call of each method, and these are kept; `Case` looks into
the delegates of each.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backend.blob import from_blob
from backend.graph import BACKEND_ID
from backend.runtime.program import MethodInfo, ProgramFile, TensorMeta, read_program
from recipes.recipe import ExportRequest, Recipe, UserError
from zoo.case import Case, Finding
from zoo.console import quiet_libraries, step
from zoo.export import ensure_exported


class _Enough(Exception):
    """Nothing larger can come: the check need not go on."""


class Recorder:
    """A program that keeps, of every method, the inputs of its largest call.

    largest: elements of a method's inputs at most; when all these methods had such a call, `run` raises `_Enough`.
    """

    def __init__(self, program: Any, largest: Mapping[str, int] | None = None) -> None:
        self._program, self._largest = program, largest or {}
        self.methods = program.methods
        self.calls: dict[str, list[np.ndarray]] = {}

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        inputs = [np.array(array) for array in arrays]
        if _elements(inputs) > _elements(self.calls.get(method, ())):
            self.calls[method] = inputs
        if self._largest and all(_elements(self.calls.get(m, ())) >= n for m, n in self._largest.items()):
            raise _Enough
        outputs: list[np.ndarray] = self._program.run(method, *arrays)
        return outputs


def _elements(arrays: Sequence[np.ndarray]) -> int:
    return sum(array.size for array in arrays)


def bisect(
    recipe: Recipe,
    request: ExportRequest,
    *,
    pte: Path | None = None,
    folder: Path,
    method: str | None = None,
    operators: tuple[int, int | None] | None = None,
) -> list[Finding]:
    """A finding for each delegate of the program; reproducers go to new folders in `folder`.

    `method` looks into that one alone, `operators` into those of its positions from the first to before the second
    (None: to the end). States start as they do when a program is loaded. Raises `UserError` for another backend than
    WebGPU, a method or positions that there are not, and where a delegate's operator cannot be computed by torch.
    """
    from zoo.program import Program

    if request.backend != "webgpu":
        raise UserError(f"--bisect looks into delegates of webgpu, not of {request.backend}")
    if operators is not None and method is None:
        raise UserError("positions of operators are those of one method: name it with --method")
    path = ensure_exported(recipe, request, pte)
    file = read_program(path)
    if method is not None and method not in file.methods:
        raise UserError(f"{path} has no method {method!r}; it has {', '.join(file.methods)}")
    wanted = list(file.methods) if method is None else [method]
    with step(f"{recipe.name}: recording the calls of the check"), quiet_libraries(), Program.load(path) as program:
        recorder = Recorder(program, {name: _most_elements(file.methods[name]) for name in wanted})
        with contextlib.suppress(_Enough):
            recipe.check(recorder, request)
    if method is not None and method not in recorder.calls:
        raise UserError(f"the check of {recipe.name} does not call {method}")
    return [
        finding
        for name, inputs in recorder.calls.items()
        if name in wanted
        for finding in _method_findings(file, name, inputs, folder, operators)
    ]


def positions(text: str) -> tuple[int, int | None]:
    """`100:200`, `100:` or `:200` as first and end. Raises `UserError` for anything else, and for none at all."""
    first, colon, end = text.partition(":")
    if not colon or not all(part.isdecimal() or not part for part in (first, end)):
        raise UserError(f"--operators {text}: give positions as FIRST:END, like 100:200")
    span = int(first or 0), int(end) if end else None
    if span[1] is not None and span[1] <= span[0]:
        raise UserError(f"--operators {text}: there is none from {span[0]} to before {span[1]}")
    return span


def _most_elements(info: MethodInfo) -> int:
    metas = (info.values[index] for index in info.inputs)
    return sum(math.prod(meta.sizes) if isinstance(meta, TensorMeta) else 1 for meta in metas)


def _method_findings(
    file: ProgramFile,
    method: str,
    inputs: Sequence[np.ndarray],
    folder: Path,
    operators: tuple[int, int | None] | None,
) -> Iterator[Finding]:
    info = file.methods[method]
    values: dict[int, Any] = dict(zip(info.inputs, inputs, strict=True))
    first, end = operators or (0, None)
    seen = 0  # operators of delegates before
    delegates = [call for call in info.calls if call.backend_id == BACKEND_ID]
    for call in delegates:
        for index in (index for index in call.inputs if index not in values):
            meta = info.values[index]
            values[index] = meta.array() if isinstance(meta, TensorMeta) else np.asarray(meta)
        if info.undelegated and seen:
            raise UserError(f"{method}: delegates after operators that run elsewhere cannot be fed: {info.undelegated}")
        case = Case(method, from_blob(call.blob), [np.asarray(values[index]) for index in call.inputs], file, seen)
        here = range(len(case.graph.nodes))[max(0, first - seen) : None if end is None else max(0, end - seen)]
        seen += len(case.graph.nodes)
        if here:
            yield (case if operators is None else case.between(here.start, here.stop)).find(folder)
        if call is not delegates[-1]:
            values.update(zip(call.outputs, case.outputs(), strict=True))
    if operators is not None and first >= seen:
        raise UserError(f"{method} has {seen} operators: none from {first} on")
