"""Qwen3: the method against transformers, the conversation, the declaration.

Run: pytest tests/recipes/test_qwen3.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import write_assets

from recipes import recipe as registry
from recipes.eager import EagerProgram
from recipes.qwen3 import RECIPE, modules, standin
from recipes.qwen3.bench import workloads
from recipes.qwen3.build import build
from recipes.qwen3.modules import StepMethod, Vocabulary
from recipes.qwen3.runner import Chat, ContextFull, converse
from recipes.qwen3.sampling import Sampling
from recipes.recipe import Bundle, ExportRequest, UserError
from zoo import quantize
from zoo.artifact import default_path, key
from zoo.bench.models import bench as run_bench
from zoo.check import compare
from zoo.export import make_request

GREEDY = Sampling()
PROMPT = "Hello there, how are you? Ünïcödé ☃ 🙂"

# the method


@pytest.mark.parametrize(
    ("changes", "max_bytes"),
    [({}, None), ({"tie_word_embeddings": False, "attention_bias": True}, None), ({"num_key_value_heads": 4}, 40000)],
)
def test_step_equals_transformers(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], max_bytes: int | None
) -> None:
    """A prompt, steps, and another text on the same caches; at last with weights too big for one binding."""
    monkeypatch.setattr(standin, "TINY_CONFIG", {**standin.TINY_CONFIG, **changes})
    reference = standin.tiny().model.double()
    if max_bytes:
        monkeypatch.setattr(modules, "MAX_BYTES", max_bytes)
        monkeypatch.setattr(Vocabulary.__init__, "__defaults__", (max_bytes,))
    step = StepMethod(standin.tiny().model, 64, torch.float32).double()
    assert (len(step.vocabulary.tables) > 1) == (step.layers[0].mlp.gate_up is None) == bool(max_bytes)
    for length, count in ((9, 4), (3, 2), (1, 1)):
        ids = torch.from_numpy(np.random.default_rng(length).integers(0, 576, (1, length + count)))
        with torch.no_grad():
            expected = reference(ids).logits[0, length - 1 :]
            parts = [ids[:, :length], *ids[:, length:].split(1, 1)]
            starts = [0, *range(length, length + count)]
            actual = torch.cat([step(part, torch.tensor([at])) for part, at in zip(parts, starts, strict=True)])
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_tied_weight_is_one_tensor_in_both_precisions() -> None:
    for dtype in ("fp32", "fp16"):
        module: Any = build(ExportRequest("portable", "tiny", dtype)).methods["step"].module
        assert module.vocabulary.tables[0].weight is module.vocabulary.heads[0].weight
        assert module.layers[0].attention.keys.dtype == (torch.float16 if dtype == "fp16" else torch.float32)
        assert module.norm.weight.dtype == torch.float32
    with_options = ExportRequest("portable", "tiny", "fp16", options=(("context", "512"), ("kv-dtype", "fp32")))
    bundle = build(with_options)
    assert bundle.methods["step"].module.layers[0].attention.keys.shape == (1, 2, 512, 32)  # type: ignore
    assert bundle.methods["step"].module.layers[0].attention.keys.dtype == torch.float32  # type: ignore


@pytest.mark.parametrize(
    ("qlinear", "qembedding", "once"),
    [("4w", "4w", True), ("8w", "8w", True), ("8da4w", "4w", True), ("8da8w", "8w", True), ("8w", "4w", False)],
)
def test_a_tied_table_has_the_codes_of_the_head(qlinear: str, qembedding: str, once: bool) -> None:
    """One set of codes is stored where the modes agree; the sizes that export prints know it."""
    request = ExportRequest("webgpu", "tiny", qlinear=qlinear, qembedding=qembedding)
    methods = build(request).methods
    before = quantize.stored_bytes(methods)
    done = quantize.apply_request(RECIPE, request, methods)
    vocabulary: Any = methods["step"].module.vocabulary
    table, head = vocabulary.tables[0].weight, vocabulary.heads[0].weight
    assert torch.equal(table.qdata, head.qdata) == torch.equal(table.scale, head.scale) == once
    assert "step.vocabulary.tables.0" in done.changed and "step.vocabulary.heads.0" in done.changed
    linears = [part for part in methods["step"].module.modules() if isinstance(part, torch.nn.Linear)]
    shapes = [tuple(part.weight.shape) for part in linears]
    saved = sum(4 * n * k - quantize.weight_bytes(n, k, 4, qlinear) for n, k in shapes)
    assert done.saved == before - quantize.stored_bytes(methods)
    assert done.saved == saved - (0 if once else quantize.weight_bytes(576, 64, 4, qembedding))


# the conversation


@dataclass
class Ready:
    bundle: Bundle
    assets: Path
    program: EagerProgram

    def chat(self, program: Any = None, **options: Any) -> Chat:
        return Chat(program or self.program, self.assets, **options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    bundle = build(ExportRequest("portable", "tiny"))
    return Ready(bundle, write_assets(bundle, tmp_path_factory.mktemp("qwen3") / "assets"), EagerProgram(bundle))


class Recorded:
    """A program that records what it read and can be told which token to find likeliest, call by call."""

    def __init__(self, program: EagerProgram, script: Iterable[int] = ()):
        self.calls: list[tuple[int, int]] = []  # position, length
        self._program, self._script = program, iter(script)

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        self.calls.append((int(arrays[1][0]), arrays[0].shape[1]))
        (logits,) = self._program.run(method, *arrays)
        if (token := next(self._script, None)) is not None:
            logits = np.zeros_like(logits)
            logits[0, token] = 1
        return [logits]


def test_greedy_answer_equals_generate(tiny: Ready) -> None:
    source = standin.tiny()
    chat = tiny.chat(system="Be brief.")
    pieces = list(chat.reply(PROMPT, GREEDY, 20))
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    inputs = source.tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, enable_thinking=False, return_tensors="pt", return_dict=True
    )
    assert chat.text.prompt(conversation, False) == inputs["input_ids"][0].tolist()
    out = source.model.generate(**inputs, do_sample=False, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
    assert "".join(pieces) == source.tokenizer.decode(out, skip_special_tokens=True).removesuffix("�")
    assert (chat.turn.tokens, chat.turn.end) == (20, "length")


def test_a_turn_reads_only_what_is_new(tiny: Ready) -> None:
    """Three turns read less than each time all; the last answer is that of a conversation read from the start."""
    program = Recorded(tiny.program)
    chat = tiny.chat(program)
    for question in ("One?", "Two?", "Three?"):
        before = len(program.calls)
        answer = "".join(chat.reply(question, GREEDY, 5))
        start, length = program.calls[before]
        assert (start + length, length) == (chat.turn.prompt_tokens, chat.turn.read_tokens)
        assert (start > 0) == (question != "One?") and program.calls[before + 1] == (start + length, 1)
    fresh = tiny.chat()
    fresh.messages = chat.messages[:-2]
    assert "".join(fresh.reply("Three?", GREEDY, 5)) == answer
    assert fresh.turn.read_tokens == fresh.turn.prompt_tokens > chat.turn.read_tokens


def test_stop_tokens_and_thoughts(tiny: Ready) -> None:
    think, stop = (standin.tiny().tokenizer.convert_tokens_to_ids(token) for token in ("</think>", "<|im_end|>"))
    chat = tiny.chat(Recorded(tiny.program, [70, think, 71, stop]), thinking=True)
    answer = "".join(chat.reply("Hi", GREEDY, 50))
    assert answer.count("</think>") == 1 and "<|im_end|>" not in answer and chat.turn.end == "stop"
    assert chat.turn.tokens == 4
    # the template leaves thoughts of earlier answers out
    assert "</think>" not in chat.text.rendered([*chat.messages, {"role": "user", "content": "And?"}], True)


def test_full_context_ends_clearly(tiny: Ready) -> None:
    """All 256 positions are used, the answer says why it ended, and what does not fit is refused."""
    chat = tiny.chat(program := Recorded(tiny.program, [70] * 1000))
    list(chat.reply("word " * 30, GREEDY, 1000))
    assert chat.turn.end == "context" and "context is full" in str(chat.turn)
    assert chat.turn.prompt_tokens + chat.turn.tokens == 257 and program.calls[-1] == (255, 1)
    with pytest.raises(ContextFull, match=r"context is full.*--context"):
        chat.reply("More?", GREEDY, 5)
    answers: list[str] = []
    ended = converse(
        tiny.chat(),
        iter(["Hi\n", "\n", "word " * 120, "Never asked\n"]),
        lambda pieces: answers.append("".join(pieces)),
        (GREEDY, 3),
    )
    assert len(answers) == 1 and ended is not None and "context is full" in ended
    # a prompt longer than one call is read in parts
    chat = tiny.chat(program := Recorded(tiny.program))
    list(chat.reply("word " * 40, GREEDY, 1))
    assert [length for _, length in program.calls[:-1]] == [64] * (len(program.calls) - 1) and len(program.calls) > 1


def test_bad_arguments_are_one_line(tiny: Ready) -> None:
    with pytest.raises(UserError, match="empty"):
        tiny.chat().reply("  ", GREEDY, 5)
    with pytest.raises(UserError, match="at least 1 token"):
        tiny.chat().reply("Hi", GREEDY, 0)

    class Broken:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            return [output * np.nan for output in tiny.program.run(method, *arrays)]

    with pytest.raises(UserError, match="not finite"):
        list(tiny.chat(Broken()).reply("Hi", GREEDY, 5))


def test_text_comes_in_whole_characters(tiny: Ready) -> None:
    text = tiny.chat().text
    for sample in (PROMPT, "naïve 日本語 👩‍👩‍👧 <think>hm</think>", "\x00\x7f\u0080\ufffd"):
        stream, ids = text.stream(), text.encode(sample)
        pieces = [stream.add(token) for token in ids]
        assert "".join(pieces) == sample and "" in pieces
        for count in range(len(ids)):  # cut anywhere: a start of the text, never half a character
            stream = text.stream()
            assert sample.startswith("".join(stream.add(token) for token in ids[:count]))
    broken = text.stream()
    lead, letter = text.encode("é")[0], text.encode("a")[0]
    assert [broken.add(token) for token in (lead, letter, lead, 575)] == ["", "\ufffda", "", ""]


def test_runner_works_without_torch(tiny: Ready) -> None:
    """In a process where torch, transformers and executorch cannot be imported."""
    code = """
import sys
for name in ("torch", "transformers", "executorch"):
    sys.modules[name] = None
import numpy as np
from pathlib import Path
import recipes.qwen3
from recipes.qwen3.runner import Chat
class Fake:
    def run(self, method, *arrays):
        logits = np.full((1, 576), -9, np.float32)
        logits[0, 65 + arrays[1][0] % 3] = 9
        return [logits]
chat = Chat(Fake(), Path(sys.argv[1]))
print(len("".join(chat.reply("Hello", chat.sampling(seed=1), 10))), chat.turn.tokens)
"""
    run = [sys.executable, "-c", code, str(tiny.assets)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["10", "10"]


# declaration, check


def test_declaration() -> None:
    assert registry.load("qwen3") is RECIPE
    assert RECIPE.modes("webgpu") == ("none", "4w", "8w", "8da4w", "8da8w")
    assert RECIPE.modes("xnnpack") == ("none", "8da4w", "8da8w")
    assert RECIPE.modes("vulkan") == ("none", "4w", "8da4w")
    assert RECIPE.embedding_modes("webgpu") == RECIPE.embedding_modes("mlx") == ("none", "4w", "8w")
    assert RECIPE.embedding_modes("xnnpack") == RECIPE.embedding_modes("vulkan") == ("none",)
    assert all(bound.why for bounds in RECIPE.tolerances.values() for bound in bounds.values())
    assert RECIPE.tolerances["webgpu", "fp32", "none"]["logits"].bound(100.0) == 1e-3


def test_options_are_checked_and_keep_files_apart() -> None:
    plain = make_request(RECIPE, "webgpu", weights="tiny", options={"kv-dtype": "auto"})
    assert plain == make_request(RECIPE, "webgpu", weights="tiny") and "options" not in key(RECIPE, plain)
    half = make_request(RECIPE, "webgpu", weights="tiny", options={"kv-dtype": "fp16", "context": "512"})
    assert half.options == (("context", "512"), ("kv-dtype", "fp16"))
    assert default_path(RECIPE, half) != default_path(RECIPE, plain)
    assert key(RECIPE, half)["options"] == dict(half.options)
    with pytest.raises(UserError, match=r"kv-dtype 'int8' of qwen3: choose one of auto, fp32, fp16"):
        make_request(RECIPE, "webgpu", options={"kv-dtype": "int8"})
    with pytest.raises(UserError, match=r"has no option 'kv'"):
        make_request(RECIPE, "webgpu", options={"kv": "fp16"})


@pytest.mark.parametrize(
    "request_",
    [
        ExportRequest("portable", "tiny"),
        ExportRequest("webgpu", "tiny", "fp16"),
        ExportRequest("webgpu", "tiny", options=(("kv-dtype", "fp16"),)),
    ],
)
def test_check_of_eager_passes(request_: ExportRequest) -> None:
    outcomes = {row.name: compare(row) for row in RECIPE.check(EagerProgram(build(request_)), request_)}
    assert all(outcome.passed for outcome in outcomes.values()), outcomes
    assert ("greedy.tokens" in outcomes) == (request_ == ExportRequest("portable", "tiny"))


@pytest.mark.parametrize("fault", ["forgets", "shifted"])
def test_check_sees_faults_of_the_caches(fault: str) -> None:
    """Caches that are empty at every call; positions that are one off in the steps."""
    request = ExportRequest("portable", "tiny")
    program = EagerProgram(build(request))

    class Faulty:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            if method != "step":
                return program.run(method, *arrays)
            ids, position = arrays
            if fault == "forgets":
                for name, buffer in program._methods["step"].named_buffers():
                    if name.endswith(("keys", "values")):
                        buffer.zero_()
            elif ids.shape[1] == 1 and position[0]:
                position = position - 1
            return program.run(method, ids, position)

    failed = {row.name for row in RECIPE.check(Faulty(), request) if not compare(row).passed}
    assert {"steps.logits", "stepwise[9].logits"} <= failed


@pytest.mark.parametrize("fault", ["likeliest", "draw"])
def test_check_sees_faults_of_the_choice(fault: str) -> None:
    """The token after the one that is to be chosen."""
    request = ExportRequest("portable", "tiny")
    program = EagerProgram(build(request))

    class Faulty:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            return [output + (method == fault) for output in program.run(method, *arrays)]

    assert {row.name for row in RECIPE.check(Faulty(), request) if not compare(row).passed} == {f"{fault}.tokens"}


def test_check_of_a_program_that_cannot_choose() -> None:
    """One of before: the host chooses for it, and there is nothing to compare."""
    request = ExportRequest("portable", "tiny")
    program: Any = EagerProgram(build(request))
    program.methods = ("step",)
    rows = {row.name: compare(row) for row in RECIPE.check(program, request)}
    assert "greedy.tokens" in rows and not {"likeliest.tokens", "draw.tokens"} & rows.keys()
    assert all(row.passed for row in rows.values())


def test_workloads_are_the_same_work_on_every_side() -> None:
    """Tokens by the caches' capacity; a step at the end of a context changes nothing before it.

    On caches that nothing was written to yet: a step reads all positions before it.
    """
    request = ExportRequest("webgpu", "tiny", qlinear="4w")
    fresh = EagerProgram(build(ExportRequest("webgpu", "tiny")))
    found = {work.name: work for work in workloads({"webgpu": fresh}, request)}
    texts = ["64 tokens, greedy", "64 tokens, drawn"]
    assert list(found) == ["prompt of 128", "step at 128", "step at 256", *texts]
    assert [work.amount for work in found.values()] == [128, 1, 1, 64, 64]
    for name, work in found.items():
        assert work.unit == "token" and list(work.calls) == ["webgpu", "eager"]
        for _ in range(2 if name in texts else 1):  # a text is read once and written at every call
            ours, theirs = (np.asarray(call()) for call in work.calls.values())
            assert ours.shape == ((64,) if name in texts else (1, 576))
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
    layer = 64 * 256 + 128 * 64 + 64 * 192 + 96 * 64
    count = 2 * layer + 576 * 64
    assert found["step at 128"].weight_bytes == count // 2 + count // 32 * 4 and not found["prompt of 128"].weight_bytes
    assert found[texts[0]].weight_bytes == 64 * found["step at 128"].weight_bytes


def test_bench_says_what_copying_the_weights_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recipes.qwen3.bench.PROMPTS", (4,))
    monkeypatch.setattr("recipes.qwen3.bench.CONTEXTS", (128,))
    requests = [make_request(RECIPE, "webgpu", weights="tiny", options={"kv-dtype": "fp16"})]
    report = run_bench(RECIPE, requests, runs=2, warmup=1, memory=False)
    rows = {(row["workload"], row["side"]): row for row in report["results"]}
    row = rows["step at 128", "webgpu"]
    assert row["weight_copy_ms"] == pytest.approx(row["weight_bytes"] / report["copy_gb_s"] / 1e6)
    assert row["units_per_s"] == pytest.approx(1 / row["s_per_unit"]) and report["copy_gb_s"] > 0
    read_once = {("prompt of 4", "webgpu"), *(key for key in rows if key[1] != "webgpu")}
    assert all(("weight_bytes" not in row) == (key in read_once) for key, row in rows.items())


@pytest.mark.slow
def test_synthetic_is_the_real_configuration() -> None:
    model = standin.synthetic("0.6B", "test").model
    assert sum(weight.numel() for weight in model.parameters()) == 596_049_920
    assert len(standin.make_tokenizer(151643)) == 151648
