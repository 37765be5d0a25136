"""Our backend as one more flow of ExecuTorch's backend test suite, and what one of its tests found.

The suite's tests are functions of a runner; `run_case` gives them one of ours, which calls the suite's own `run_test`
and keeps its summary. No part of the suite is copied or changed.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import unittest
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from executorch.backends.test.harness import Tester
from executorch.backends.test.harness.stages import StageType, ToEdgeTransformAndLower
from executorch.backends.test.suite import operators
from executorch.backends.test.suite.flow import TestFlow
from executorch.backends.test.suite.reporting import TestCaseSummary, TestResult
from executorch.backends.test.suite.runner import run_test

from backend import native
from backend.partitioner import WebGPUPartitioner

FLOW = "webgpu_zoo"
# The suite runs its dtype tests in float32 alone; these are added, for our flow, where the adapter has them.
MORE_DTYPES = {"float16": torch.float16, "float64": torch.float64}


class _Lower(ToEdgeTransformAndLower):
    """With our partitioner, kept to be asked what it refused."""

    def __init__(self) -> None:
        super().__init__(WebGPUPartitioner)


class WebGPUTester(Tester):
    """The suite's tester for this backend: its default stages around our partitioner, run by ExecuTorch's runtime."""

    def __init__(self, module: torch.nn.Module, example_inputs: Any, **kwargs: Any) -> None:
        native.register()
        stages = {**Tester.default_stage_classes(), StageType.TO_EDGE_TRANSFORM_AND_LOWER: _Lower}
        super().__init__(module, example_inputs, stages, **kwargs)


@functools.cache
def flow(name: str) -> TestFlow:
    """Ours, or those of the suite that other backends are compared by. Raises `ValueError` for an unknown name."""
    if name == FLOW:
        return TestFlow(FLOW, backend=FLOW, tester_factory=WebGPUTester)
    if name == "xnnpack":
        from executorch.backends.test.suite.flows.xnnpack import XNNPACK_TEST_FLOW

        return XNNPACK_TEST_FLOW
    if name == "portable":
        from executorch.backends.test.suite.flows.portable import PORTABLE_TEST_FLOW

        return PORTABLE_TEST_FLOW
    raise ValueError(f"unknown flow {name!r}")


@functools.cache
def cases() -> dict[str, str]:
    """Every test of the suite: `op/test` → the module that holds it. A dtype test of ours is `op/test[float16]`."""
    found = {}
    for module in sorted(pkgutil.iter_modules(operators.__path__), key=lambda item: item.name):
        if not module.name.startswith("test_"):
            continue
        path = f"{operators.__name__}.{module.name}"
        for name, function in vars(importlib.import_module(path)).items():
            if not name.startswith("test_") or not callable(function):
                continue
            test = f"{module.name.removeprefix('test_')}/{name}"
            found[test] = path
            if getattr(function, "pytestmark", None):  # parametrized by dtype
                found.update({f"{test}[{dtype}]": path for dtype in MORE_DTYPES})
    return found


@dataclass
class Outcome:
    """Of one test: `delegated` (every operator in the delegate), `partly`, `outside`, `failed`, or `skipped`.

    `skipped` is the suite's own verdict: what stayed outside has no portable kernel, or eager cannot run it. `outside`
    counts operators by name that were left to ExecuTorch, `reasons` says why; `error_max` is the worst absolute error.
    """

    test: str
    flow: str
    result: str
    error: str = ""
    outside: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    error_max: float = 0.0

    @property
    def op(self) -> str:
        return self.test.partition("/")[0]

    @property
    def passed(self) -> bool:
        return self.result in ("delegated", "partly", "outside")

    def json(self) -> dict[str, Any]:
        return asdict(self)


class _Runner:
    """What the suite's tests call; the attributes are those that they read."""

    def __init__(self, test: str, flow: TestFlow) -> None:
        self._flow = flow
        self._test_name = test
        self._test_base_name = test.partition("/")[2].partition("[")[0]
        self.outcome = Outcome(test, flow.name, "delegated")
        self._subtest = 0

    def lower_and_run_model(
        self, model: torch.nn.Module, inputs: Any, generate_random_test_inputs: bool = True, dynamic_shapes: Any = None
    ) -> None:
        testers: list[Tester] = []

        def factory(*args: Any, **kwargs: Any) -> Tester:
            testers.append(self._flow.tester_factory(*args, **kwargs))
            return testers[-1]

        recorded = TestFlow(self._flow.name, self._flow.backend, factory, is_delegated=self._flow.is_delegated)
        summary = run_test(
            model,
            inputs,
            recorded,
            self._test_name,
            self._test_base_name,
            self._subtest,
            None,
            generate_random_test_inputs=generate_random_test_inputs,
            dynamic_shapes=dynamic_shapes,
        )
        self._subtest += 1
        self._add(summary, _refusals(testers))

    def _add(self, summary: TestCaseSummary, reasons: list[str]) -> None:
        """The worst of the test's models counts for the test."""
        outside = {str(op): int(count) for op, count in (summary.undelegated_op_counts or {}).items()}
        if summary.result == TestResult.SKIPPED:
            result = "skipped"
        elif not summary.result.is_success():
            result = "failed"
        elif not summary.is_delegated():
            result = "outside"
        else:
            result = "partly" if outside else "delegated"
        ranks = ("delegated", "partly", "outside", "skipped", "failed")
        self.outcome.result = max(self.outcome.result, result, key=ranks.index)
        self.outcome.outside.update(outside)
        self.outcome.reasons += [reason for reason in reasons if reason not in self.outcome.reasons]
        errors = [stats.error_max for stats in summary.tensor_error_statistics if stats.error_max is not None]
        self.outcome.error_max = max([self.outcome.error_max, *errors])
        if summary.error is not None and not self.outcome.error:
            hidden = native.take_error()
            text = str(hidden or summary.error)
            self.outcome.error = f"{summary.result.to_detail_str()}: {text}".strip(": ")[:400]


def _refusals(testers: list[Tester]) -> list[str]:
    found = []
    for tester in testers:
        stage = tester.stages.get(StageType.TO_EDGE_TRANSFORM_AND_LOWER)
        for partitioner in getattr(stage, "partitioners", None) or []:
            found += [f"{item.op}: {item.reason}" for item in getattr(partitioner, "refusals", [])]
    return found


def run_case(test: str, flow_name: str = FLOW) -> Outcome:
    """Runs one test of `cases()`. What the test itself raises is a failure of it, not ours to raise."""
    name, _, dtype = test.removesuffix("]").partition("[")
    runner = _Runner(test, flow(flow_name))
    function = getattr(importlib.import_module(cases()[test]), name.partition("/")[2])
    torch.manual_seed(0)
    native.take_error()
    takes_dtype = getattr(function, "pytestmark", None)
    try:
        function(runner, *([MORE_DTYPES.get(dtype, torch.float32)] if takes_dtype else []))
    except unittest.SkipTest as skip:
        runner.outcome.result, runner.outcome.error = "skipped", str(skip)
    except Exception as error:
        runner.outcome.result = "failed"
        runner.outcome.error = f"{type(error).__name__}: {error}"[:400]
    if runner._subtest == 0 and not runner.outcome.error:
        runner.outcome.result, runner.outcome.error = "failed", "the test ran no model"
    return runner.outcome
