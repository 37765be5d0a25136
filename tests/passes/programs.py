"""Modules through export, partition and both runtimes, for the tests of this folder."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx import Node as FxNode

from backend.partitioner import Refusal, WebGPUPartitioner
from zoo.program import Program

RUNTIMES = ("direct", "executorch")


@dataclass
class Method:
    module: torch.nn.Module
    args: tuple[Any, ...]
    dynamic: Any = None


@dataclass
class Lowered:
    """A program after partitioning. `outside`: operators of each method that no delegate took."""

    path: Path
    refusals: list[Refusal]
    delegates: dict[str, int]
    outside: dict[str, list[str]]

    @property
    def reasons(self) -> dict[str, str]:
        return {refusal.op: refusal.reason for refusal in self.refusals}


def lower(path: Path, methods: Mapping[str, Method] | Method) -> Lowered:
    """Exports to `path` as the zoo does: non-strict, one partitioner a method."""
    from executorch.exir import to_edge_transform_and_lower

    if isinstance(methods, Method):
        methods = {"forward": methods}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = {
            name: torch.export.export(m.module.eval(), m.args, dynamic_shapes=m.dynamic, strict=False)
            for name, m in methods.items()
        }
        partitioners = {name: WebGPUPartitioner() for name in methods}
        edge = to_edge_transform_and_lower(exported, partitioner={name: [p] for name, p in partitioners.items()})
        delegates, outside = {}, {}
        for name in methods:
            calls = [node for node in edge.exported_program(name).graph.nodes if node.op == "call_function"]
            delegates[name] = sum("executorch_call_delegate" in str(node.target) for node in calls)
            outside[name] = [_name(node) for node in calls if not _is_glue(node)]
        path.write_bytes(edge.to_executorch().buffer)
    return Lowered(path, [r for p in partitioners.values() for r in p.refusals], delegates, outside)


def _name(node: FxNode) -> str:
    return getattr(node.target, "_name", None) or getattr(node.target, "__name__", str(node.target))


def _is_glue(node: FxNode) -> bool:
    """A delegate's call, its outputs taken apart, and sizes."""
    return (
        "delegate" in str(node.target)
        or "getitem" in str(node.target)
        or not isinstance(node.meta.get("val"), torch.Tensor)
    )


def check(
    lowered: Lowered, module: torch.nn.Module, calls: Sequence[tuple[Any, ...]], atol: float = 1e-5, rtol: float = 0.0
) -> None:
    """The calls in turn, through both runtimes, against eager."""
    golden = []
    with torch.no_grad():
        for call in calls:
            result = module(*call)
            golden.append(result if isinstance(result, (tuple, list)) else (result,))
    for runtime in RUNTIMES:
        with Program.load(lowered.path, runtime=runtime) as program:
            for call, wanted in zip(calls, golden, strict=True):
                got = program.run("forward", *(arg.numpy() for arg in call))
                assert len(got) == len(wanted)
                for actual, expected in zip(got, wanted, strict=True):
                    compare(actual, expected.numpy(), atol, rtol)


def compare(actual: np.ndarray, expected: np.ndarray, atol: float, rtol: float = 0.0) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol if expected.dtype.kind == "f" else 0)
