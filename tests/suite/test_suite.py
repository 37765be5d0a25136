"""pytest tests/suite: a sampled tenth of ExecuTorch's backend operator suite through our backend.

Every eleventh test, float16 ones included, that the suite itself does not skip and that is not long; all of them by
`make test-suite`. They pass with every operator delegated.
"""

from __future__ import annotations

import pytest

from tests.suite.flow import FLOW, Outcome, cases, flow, run_case
from tests.suite.run import markdown

LEFT_OUT = ("float64", "edge_cases", "inplace", "lstm")
SAMPLE = [test for test in cases() if not any(part in test for part in LEFT_OUT)][7::11]


def test_flow_and_number_of_tests() -> None:
    assert flow(FLOW).name == FLOW
    assert sum("[" not in test for test in cases()) == 467


@pytest.mark.parametrize("test", SAMPLE)
def test_operator(test: str) -> None:
    outcome = run_case(test)
    if outcome.result == "skipped" and not outcome.reasons:
        pytest.skip(outcome.error)  # by the suite itself, or eager cannot run it
    assert outcome.result == "delegated", f"{outcome.error} {outcome.reasons} {outcome.outside}"


def test_float64_is_refused_with_a_reason() -> None:
    outcome = run_case("abs/test_abs_dtype[float64]")
    assert outcome.result == "outside"
    assert outcome.reasons == ["aten.abs.default: no kernel for float64"]


def test_table() -> None:
    outcomes = [
        Outcome("abs/test_a", FLOW, "delegated", error_max=1e-6),
        Outcome("abs/test_b", FLOW, "failed", "Output Mismatch: a | b"),
        Outcome("abs/test_a", "portable", "outside"),
    ]
    text = markdown(outcomes)
    assert f"| {FLOW} | 2 | 1 | 0 | 0 | 1 | 0 | 50.0 % |" in text
    assert "| abs | 1 | 0 | 0 | 1 | 0 | 1.0e-06 |" in text
    assert "| abs/test_b | failed | Output Mismatch: a \\| b |" in text
