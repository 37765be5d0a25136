"""pytest -m slow tests/recipes/test_qwen3_dispatches.py: what a transformer layer of real size costs in dispatches.

Of plans for a GPU, made without one: those of four layers less those of two, halved. Layers of the tiny model are
counted in test_qwen3_webgpu.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.blob import from_blob
from backend.graph import Graph
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities
from backend.runtime.program import read_program
from recipes.qwen3 import RECIPE, standin
from zoo.export import export, make_request

GPU = Capabilities(
    features=frozenset({"shader-f16"}),
    max_storage_buffers=10,
    max_workgroup_bytes=32768,
    max_invocations=1024,
)
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}  # 0.6B
# A sum in parts, which keeps a large GPU busy with few rows, is added in a dispatch of its own: of the heads' product,
# of gate and up (gated there), and of down.
MOST = {1: 7, 64: 9, 128: 10, 192: 10, 256: 10, 384: 9, 512: 8}


def graph(folder: Path, layers: int, qlinear: str, monkeypatch: pytest.MonkeyPatch) -> Graph:
    config = standin.TINY_CONFIG | SIZES | {"head_dim": 128, "num_hidden_layers": layers}
    monkeypatch.setattr(standin, "TINY_CONFIG", config)
    monkeypatch.setattr(standin, "TINY_CONTEXT", 4096)
    path = folder / f"{layers}.pte"
    export(RECIPE, make_request(RECIPE, "webgpu", weights="tiny", qlinear=qlinear), path)
    (call,) = read_program(path).methods["step"].calls
    return from_blob(call.blob)


def dispatches(of: Graph, positions: int) -> int:
    return len(lower_graph(of, of.bind([(1, positions), (1,)], ()), GPU).dispatches)


@pytest.mark.slow
@pytest.mark.parametrize("qlinear", ["none", "4w"])
def test_a_layer(tmp_path: Path, qlinear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (graph(tmp_path, layers, qlinear, monkeypatch) for layers in (2, 4))
    found = {positions: (dispatches(many, positions) - dispatches(few, positions)) / 2 for positions in MOST}
    assert all(found[positions] <= most for positions, most in MOST.items()), found
