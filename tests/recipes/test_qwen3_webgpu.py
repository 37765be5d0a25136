"""Qwen3 on the GPU backend, end to end on tiny weights: pytest tests/recipes/test_qwen3_webgpu.py"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.blob import from_blob
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities
from backend.runtime.program import read_program
from recipes.qwen3 import RECIPE
from recipes.qwen3.runner import Chat
from recipes.qwen3.sampling import Sampling
from zoo.artifact import assets_of
from zoo.check import check
from zoo.export import ExportReport, export, make_request
from zoo.program import Program

PROMPT = "Hello, who are you?"
CHAT_WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "executorch"):
    sys.modules[name] = None
from pathlib import Path
from backend.runtime import load
from recipes.qwen3.runner import Chat
from recipes.qwen3.sampling import Sampling
chat = Chat(load(Path(sys.argv[1])), Path(sys.argv[2]))
sys.stdout.buffer.write("".join(chat.reply(sys.argv[3], Sampling(), 16)).encode())
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ExportReport]]:
    path = tmp_path_factory.mktemp("qwen3") / "qwen3.pte"
    yield path, export(RECIPE, make_request(RECIPE, "webgpu", weights="tiny"), path)


def test_one_partition_and_the_tied_table_once(exported: tuple[Path, ExportReport]) -> None:
    report = exported[1].methods["step"]
    assert (report.partitions, report.undelegated) == (1, 0)
    table = 576 * 64 * 4
    layer = (64 * 256 + 128 * 64 + 64 * 192 + 96 * 64) * 4
    tables = 2 * 256 * 32 * 4 + 256 * 8
    assert exported[1].bytes < 2 * layer + table + tables + table / 2
    assert list(read_program(exported[0]).methods) == ["step"]


def test_check_passes(exported: tuple[Path, ExportReport]) -> None:
    report = check(RECIPE, make_request(RECIPE, "webgpu", weights="tiny"), pte=exported[0])
    assert report.passed, report


@pytest.mark.parametrize("positions", [1, 3, 17, 40, 64])
def test_dispatches_of_a_layer(exported: tuple[Path, ExportReport], positions: int) -> None:
    """On a GPU, of a step and of a prompt: from one layer's caches to the next one's. All share what hides keys."""
    (call,) = read_program(exported[0]).methods["step"].calls
    graph = from_blob(call.blob)
    gpu = Capabilities(max_workgroup_bytes=32768)
    lowered = lower_graph(graph, graph.bind([(1, positions), (1,)], ()), gpu)
    templates = [dispatch.template for dispatch in lowered.dispatches if dispatch.template != "attention_seen"]
    first, second = (at for at, template in enumerate(templates) if template == "rope_cache")
    assert second - first <= 7, templates[first:second]


def test_quantized_with_its_tied_table_once(tmp_path: Path) -> None:
    """Of a program with the options that the command takes as --set: against the same codes in float64."""
    request = make_request(
        RECIPE, "webgpu", weights="tiny", qlinear="8da4w", qembedding="4w", options={"kv-dtype": "fp16"}
    )
    report = export(RECIPE, request, tmp_path / "qwen3.pte")
    assert report.methods["step"].undelegated == 0
    (call,) = read_program(report.path).methods["step"].calls
    graph = from_blob(call.blob)
    tables = [node for node in graph.nodes if node.op == "zoo.quantized_embedding"]
    keys = [graph.values[node.args["weight"].value].constant for node in graph.nodes if "bits" in node.args]
    assert len(tables) == 1 and len(keys) == len(set(keys)) + 1  # the head's
    assert report.bytes_before is not None and report.bytes < report.bytes_before / 1.5
    checked = check(RECIPE, request, pte=report.path)
    assert checked.passed, checked


def test_both_runtimes_and_a_process_without_torch_write_the_same(exported: tuple[Path, ExportReport]) -> None:
    path, answers = exported[0], []
    for runtime in ("executorch", "direct"):
        with Program.load(path, runtime) as program:
            answers.append("".join(Chat(program, assets_of(path)).reply(PROMPT, Sampling(), 16)))
    run = [sys.executable, "-c", CHAT_WITHOUT_TORCH, str(path), str(assets_of(path)), PROMPT]
    done = subprocess.run(run, capture_output=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == answers[0] == answers[1] != ""
