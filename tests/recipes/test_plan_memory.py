"""pytest tests/recipes/test_plan_memory.py -m slow: GPU memory of every method beside what is live at once.

Each model is exported in its tiny configuration: about two minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import recipe as registry
from zoo.export import export, make_request
from zoo.plan import plan

MODELS = ("florence2", "nemotron-diarization", "phonon", "qwen3", "real-esrgan", "sam2")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_buffers_are_near_what_is_live_at_once(tmp_path: Path, model: str) -> None:
    """1.15 of the bound. The bound itself is out of reach where a kernel must not write to a buffer that it reads."""
    recipe = registry.load(model)
    request = make_request(recipe, "webgpu", weights="tiny")
    path = tmp_path / "model.pte"
    export(recipe, request, path)
    for name, method in plan(recipe, request, pte=path).items():
        assert 0 < method.bound_bytes <= method.buffer_bytes, name
        assert method.times_bound <= 1.15, f"{name}: {method.buffer_bytes} bytes, {method.bound_bytes} live at once"
