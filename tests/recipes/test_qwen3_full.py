"""Qwen3 at the size of the published 0.6B model, on seeded weights: pytest tests/recipes/test_qwen3_full.py -m slow

Some 12 GB of memory: the golden alone is the model in float64.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.qwen3 import RECIPE
from recipes.qwen3.check import PROMPT, STEPS
from zoo.check import check
from zoo.export import export, make_request


@pytest.mark.slow
def test_a_long_prompt_and_greedy_steps_are_those_of_float64(tmp_path: Path) -> None:
    """A prompt of 512 tokens and 128 steps: logits within 1e-3 of float64 eager, and the same tokens."""
    assert (PROMPT, STEPS) == (512, 128)
    request = make_request(RECIPE, "webgpu", weights="synthetic", options={"context": "1024"})
    report = export(RECIPE, request, tmp_path / "qwen3.pte")
    assert (report.methods["step"].partitions, report.methods["step"].undelegated) == (1, 0)
    checked = check(RECIPE, request, pte=report.path)
    assert checked.passed, checked
    assert checked.outputs["greedy.tokens"].max_abs == 0
    for name in ("prompt.logits", "steps.logits", "end.logits", "stepwise[33].logits"):
        assert checked.outputs[name].tolerance == 1e-3, name
