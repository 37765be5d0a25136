"""Qwen3 on the GPU backend, end to end on tiny weights: pytest tests/recipes/test_qwen3_webgpu.py"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.blob import from_blob
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities
from backend.runtime.device import get_device
from backend.runtime.errors import DeviceError
from backend.runtime.program import read_program
from recipes.qwen3 import RECIPE
from recipes.qwen3.runner import Chat, Turn, Writer
from recipes.qwen3.sampling import Sampling
from recipes.recipe import UserError
from zoo.artifact import assets_of, metadata
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
assert chat.writer.works_ahead
sys.stdout.buffer.write("".join(chat.reply(sys.argv[3], Sampling(), 16)).encode())
"""
QWENS_OWN = Sampling(0.6, top_k=20, top_p=0.95)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ExportReport]]:
    path = tmp_path_factory.mktemp("qwen3") / "qwen3.pte"
    yield path, export(RECIPE, make_request(RECIPE, "webgpu", weights="tiny"), path)


def test_one_partition_and_the_tied_table_once(exported: tuple[Path, ExportReport]) -> None:
    assert [(report.partitions, report.undelegated) for report in exported[1].methods.values()] == [(1, 0)] * 3
    table = 576 * 64 * 4
    layer = (64 * 256 + 128 * 64 + 64 * 192 + 96 * 64) * 4
    tables = 2 * 256 * 32 * 4 + 256 * 8
    assert exported[1].bytes < 2 * layer + table + tables + table / 2
    assert sorted(read_program(exported[0]).methods) == ["draw", "likeliest", "step"]


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


def test_halves(tmp_path: Path) -> None:
    """Linears and caches are float16; what chooses tokens is not, as logits are not. A text is written ahead."""
    request = make_request(RECIPE, "webgpu", weights="tiny", dtype="fp16")
    path = export(RECIPE, request, tmp_path / "qwen3.pte").path
    report = check(RECIPE, request, pte=path)
    assert report.passed and "draw.tokens" in report.outputs, report
    answers = []
    for runtime in ("executorch", "direct"):
        with Program.load(path, runtime) as program:
            chat = Chat(program, assets_of(path))
            answers.append("".join(chat.reply(PROMPT, Sampling(), 8)) + "".join(chat.reply(PROMPT, QWENS_OWN, 8)))
    assert answers[0] == answers[1]


def test_both_runtimes_and_a_process_without_torch_write_the_same(exported: tuple[Path, ExportReport]) -> None:
    path, answers = exported[0], []
    for runtime in ("executorch", "direct"):
        with Program.load(path, runtime) as program:
            answers.append("".join(Chat(program, assets_of(path)).reply(PROMPT, Sampling(), 16)))
    run = [sys.executable, "-c", CHAT_WITHOUT_TORCH, str(path), str(assets_of(path)), PROMPT]
    done = subprocess.run(run, capture_output=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == answers[0] == answers[1] != ""


# steps begun ahead


class Followed:
    """A program whose calls are noted: (method, position, or None)."""

    keeps_on_device = True

    def __init__(self, program: Program):
        self.calls: list[tuple[str, int | None]] = []
        self._program = program

    def start(self, method: str, *inputs: Any, fetch: Any) -> list[Any]:
        self.calls.append((method, int(inputs[1][0]) if method == "step" else None))
        return self._program.start(method, *inputs, fetch=fetch)

    def run(self, method: str, *inputs: Any) -> list[Any]:
        raise AssertionError("a call that waits")


@pytest.fixture
def direct(exported: tuple[Path, ExportReport]) -> Iterator[Program]:
    with Program.load(exported[0], "direct") as program:
        yield program


def write(writer: Writer, ids: list[int], sampling: Sampling, count: int) -> list[int]:
    return list(writer.generate(ids, sampling, count, Turn()))


@pytest.mark.parametrize("sampling", [Sampling(), QWENS_OWN, Sampling(1.2, top_k=64, seed=3), Sampling(1.0, min_p=0.1)])
def test_tokens_are_those_of_one_call_after_the_other(
    exported: tuple[Path, ExportReport], direct: Program, sampling: Sampling
) -> None:
    """Of texts with a common start, and of one that was given up half-way before."""
    meta = metadata(exported[0]) | {"stop_ids": ()}
    ahead, in_turn = Writer(direct, meta), Writer(direct, meta, ahead=False)
    assert ahead.works_ahead and not in_turn.works_ahead
    ids = np.random.default_rng(1).integers(0, 576, 80).tolist()
    for text, count in ((ids, 12), (ids[:40] + ids[:7], 5), (ids[:40], 1)):
        in_turn.cached.clear()
        expected = write(in_turn, text, sampling, count)
        ahead.cached.clear()
        assert write(ahead, text, sampling, count) == expected and len(expected) == count
        assert ahead.cached == text + expected[: len(ahead.cached) - len(text)]
        for taken in range(min(count, 3)):
            started = ahead.generate(text, sampling, count, Turn())
            assert [next(started) for _ in range(taken)] == expected[:taken]
            started.close()
            assert write(ahead, text, sampling, count) == expected


@pytest.mark.parametrize("sampling", [Sampling(), QWENS_OWN])
def test_texts_that_are_written_in_turns(
    exported: tuple[Path, ExportReport], direct: Program, sampling: Sampling
) -> None:
    """Each is what it would be alone, and the caches hold what they are said to."""
    meta = metadata(exported[0]) | {"stop_ids": ()}
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 576, length).tolist() for length in (20, 33)]
    texts.append([*texts[0][:12], 9, 8])
    expected = [write(Writer(direct, meta, ahead=False), text, sampling, 8) for text in texts]
    for pattern in ([0, 1, 2], [0, 0, 1, 2, 2, 2], [0, 0, 0, 1, 0, 2, 1]):
        writer = Writer(direct, meta)
        turns = [writer.generate(text, sampling, 8, Turn()) for text in texts]
        found: list[list[int]] = [[], [], []]
        while any(len(tokens) < 8 for tokens in found):
            for at in pattern:
                found[at] += [token for token in [next(turns[at], None)] if token is not None]
        assert found == expected, pattern
        after = [*writer.cached, 7]
        assert write(writer, after, sampling, 5) == write(Writer(direct, meta, ahead=False), after, sampling, 5)


@pytest.mark.parametrize("runtime", ["direct", "executorch"])
def test_a_lost_gpu_takes_the_text_along(
    exported: tuple[Path, ExportReport], runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = metadata(exported[0]) | {"stop_ids": ()}
    with Program.load(exported[0], runtime) as program:
        writer = Writer(program, meta)
        expected = write(writer, [5, 6, 7, 8], Sampling(), 6)
        tokens = writer.generate([5, 6, 7, 8], Sampling(), 6, Turn())
        next(tokens), next(tokens)
        monkeypatch.setattr(get_device(), "lost", "lost in a test")
        with pytest.raises(DeviceError, match="starts over"):
            list(tokens)
        assert write(writer, [5, 6, 7, 8], Sampling(), 6) == expected


def test_no_step_is_begun_that_nobody_asked_for(exported: tuple[Path, ExportReport], direct: Program) -> None:
    meta = metadata(exported[0]) | {"stop_ids": ()}
    program = Followed(direct)
    writer = Writer(program, meta)
    generated = writer.generate([5] * 70, Sampling(), 4, turn := Turn())
    next(generated)
    # the prompt in two parts, and nothing more before the first token is there
    assert program.calls == [("step", 0), ("step", 64), ("likeliest", None)]
    next(generated)
    one, two, three = ([("step", position), ("likeliest", None)] for position in (70, 71, 72))
    assert program.calls[3:] == [*one, *two]
    assert len(list(generated)) == 2 and program.calls[3:] == [*one, *two, *three]
    assert (turn.tokens, turn.end, turn.read_tokens, turn.prompt_tokens) == (4, "length", 70, 70)
    # the caches end: the token at the last place, and one more, which needs none
    program.calls.clear()
    tokens = list(writer.generate([5] * 254, Sampling(), 100, turn := Turn()))
    assert len(tokens) == 3 and turn.end == "context" and program.calls[-2:] == [("step", 255), ("likeliest", None)]


def test_a_stop_token_ends_the_text_and_the_next_turn_goes_on(
    exported: tuple[Path, ExportReport], direct: Program
) -> None:
    """The step begun after it is dropped: what follows is what a fresh program writes."""
    meta = metadata(exported[0])
    ids = np.random.default_rng(2).integers(0, 576, 20).tolist()
    text = write(Writer(direct, meta | {"stop_ids": ()}), ids, QWENS_OWN, 8)
    at = next(place for place in range(2, 8) if text[place] not in text[:place])
    writer = Writer(direct, meta | {"stop_ids": (text[at],)})
    assert list(writer.generate(ids, QWENS_OWN, 8, turn := Turn())) == text[: at + 1] and turn.end == "stop"
    following = ids + text[: at + 1] + [3, 4]
    with Program.load(exported[0], "direct") as other:
        expected = write(Writer(other, meta | {"stop_ids": ()}), following, Sampling(), 6)
    writer.stop_ids = frozenset()
    assert list(writer.generate(following, Sampling(), 6, turn := Turn())) == expected
    assert 3 <= turn.read_tokens <= 4


def test_logits_that_are_not_finite_end_in_one_error(exported: tuple[Path, ExportReport], direct: Program) -> None:
    class Broken(Followed):
        def start(self, method: str, *inputs: Any, fetch: Any) -> list[Any]:
            if method != "step" and len(self.calls) > 3:
                inputs = (np.full((1, 576), np.nan, dtype=np.float32), *inputs[1:])
            return super().start(method, *inputs, fetch=fetch)

    for sampling in (Sampling(), QWENS_OWN):
        tokens = Writer(Broken(direct), metadata(exported[0]) | {"stop_ids": ()}).generate([1, 2], sampling, 9, Turn())
        with pytest.raises(UserError, match="not finite"):
            list(tokens)


def test_a_program_of_before_chooses_on_the_host(exported: tuple[Path, ExportReport], direct: Program) -> None:
    meta = metadata(exported[0]) | {"stop_ids": ()}
    expected = write(Writer(direct, meta), [1, 2, 3], Sampling(), 4)
    del meta["candidates"]
    before = Writer(direct, meta)
    assert not before.works_ahead and write(before, [1, 2, 3], Sampling(), 4) == expected
