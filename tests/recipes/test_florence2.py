"""Florence-2: the methods and the searches against transformers, the runner, the declaration.

Run: pytest tests/recipes/test_florence2.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from florence2_support import PICTURE, Ready, Recorded, Scripted
from support import write_assets

from recipes import recipe as registry
from recipes.eager import EagerProgram
from recipes.florence2 import RECIPE, standin
from recipes.florence2.build import build, make_bundle
from recipes.florence2.generate import Decoder, Search, generate
from recipes.florence2.runner import as_pixels
from recipes.florence2.tasks import TASKS, task_name
from recipes.recipe import ExportRequest, UserError
from zoo.check import compare

STOPS = [2, *range(300, 1000, 7)]  # so many that the stand-in's texts end by themselves


@pytest.fixture(scope="module")
def reference() -> Any:
    """The stand-in as transformers has it, with the inputs of a question about `PICTURE`."""
    source = standin.tiny()
    source.inputs = source.processor(text="<OD>", images=PICTURE, return_tensors="pt")  # type: ignore[attr-defined]
    return source


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    bundle = build(ExportRequest("portable", "tiny"))
    return Ready(bundle, write_assets(bundle, tmp_path_factory.mktemp("florence2") / "assets"), EagerProgram(bundle))


# the methods


def test_methods_equal_transformers(reference: Any) -> None:
    """Features, encoding, and logits of a text whose tokens come one by one, at any slots, or all at once."""
    source = standin.tiny()
    model, inputs = source.model.double(), reference.inputs
    bundle = make_bundle(standin.tiny())
    for method in bundle.methods.values():
        method.module.double()
    picture = as_pixels(PICTURE, bundle.metadata["picture"])
    pixels = bundle.methods["vision"].module.normalize(torch.from_numpy(picture.copy()))
    program, tokens, slots = EagerProgram(bundle), bundle.metadata["image_tokens"], bundle.metadata["slots"]
    text = torch.tensor([[2, 0, 500, 700, 600]])
    with torch.no_grad():
        features = model.model.get_image_features(pixels).pooler_output
        expected = model(input_ids=inputs["input_ids"], pixel_values=pixels, decoder_input_ids=text)
    close: dict[str, Any] = {"atol": 1e-6, "rtol": 0}  # the sum of two float32 position tables
    np.testing.assert_allclose(program.run("vision", picture)[0], features, **close)
    program.run("encode", np.arange(60)[None])  # something longer, which must leave no trace
    prompt = inputs["input_ids"][:, tokens:].numpy()
    encoded = program.run("encode", prompt)[0]
    np.testing.assert_allclose(encoded, expected.encoder_last_hidden_state, **close)
    length = np.array([encoded.shape[1]])
    order = np.array([7, 3, 0, 400, 5])
    visible = np.zeros((1, slots), bool)
    for position, (token, slot) in enumerate(zip(text[0].numpy(), order, strict=True)):
        visible[0, slot] = True
        (logits,) = program.run(
            "step", token.reshape(1, 1), np.array([position]), order[position:][:1], visible, length
        )
        np.testing.assert_allclose(logits[0], expected.logits[0, position], **close)
    causal = np.zeros((5, slots), bool)
    causal[:, :5] = np.tril(np.ones((5, 5), bool))
    (logits,) = program.run("step", text.numpy(), np.arange(5), np.arange(5), causal, length)
    np.testing.assert_allclose(logits, expected.logits[0], **close)


def test_half_precision_keeps_norms_and_ties() -> None:
    methods = build(ExportRequest("portable", "tiny", "fp16")).methods
    step: Any = methods["step"].module
    assert step.vocabulary.tables[0].weight is step.vocabulary.heads[0].weight
    assert step.vocabulary.heads[0].weight.dtype == step.caches[0].keys.dtype == torch.float16
    assert step.norm.weight.dtype == torch.float32
    linears = [
        module
        for method in methods.values()
        for module in method.module.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    assert len(linears) > 40 and all(linear.weight.dtype == torch.float16 for linear in linears)


# the searches


@pytest.mark.parametrize(
    ("beams", "length", "early", "penalty", "ngram", "stops"),
    [
        (1, 12, True, 1.0, 3, [2]),
        (1, 20, True, 1.0, 0, STOPS),
        (3, 12, True, 1.0, 3, [2]),
        (3, 1, True, 1.0, 3, [2]),
        (3, 20, True, 1.0, 3, STOPS),
        (3, 20, False, 1.0, 0, STOPS),
        (2, 16, "never", 2.0, 3, STOPS),
        (4, 12, False, -0.5, 3, STOPS),
    ],
)
def test_search_equals_generate(
    reference: Any,
    tiny: Ready,
    beams: int,
    length: int,
    early: bool | str,
    penalty: float,
    ngram: int,
    stops: list[int],
) -> None:
    expected = reference.model.generate(
        **reference.inputs, num_beams=beams, max_new_tokens=length, early_stopping=early, length_penalty=penalty,
        no_repeat_ngram_size=ngram or None, eos_token_id=stops,
    )[0]  # fmt: skip
    florence = tiny.florence()
    prompt = florence.prompt("<OD>")
    tiny.program.run("encode", prompt[None])
    decoder = Decoder(tiny.program, tiny.bundle.metadata["slots"], tiny.bundle.metadata["image_tokens"] + len(prompt))
    search = Search(beams, length, ngram, 0, 2, early, penalty)
    assert [2, *generate(decoder, search, 2, stops)] == expected.tolist()


def test_answer_equals_the_reference_pipeline(reference: Any, tiny: Ready) -> None:
    """From pixels to boxes with the checkpoint's own search: prompt, tokens, text, result."""
    florence = tiny.florence()
    prompt = reference.inputs["input_ids"][0, tiny.bundle.metadata["image_tokens"] :]
    assert florence.prompt("<OD>").tolist() == prompt.tolist()
    pieces = list(florence.ask("<OD>", max_tokens=40))
    ids = reference.model.generate(**reference.inputs, max_new_tokens=40)
    text = reference.processor.batch_decode(ids, skip_special_tokens=False)[0]
    expected = reference.processor.post_process_generation(text, task="<OD>", image_size=(70, 50))
    answer = florence.answer
    assert answer.text == text and {"<OD>": answer.result} == expected and expected["<OD>"]["bboxes"]
    assert "".join(pieces) == text.replace("<s>", "").replace("</s>", "").rstrip("\ufffd") and len(pieces) > 1
    assert (answer.tokens, answer.end) == (ids.shape[1] - 1, "length")


def test_slots_are_used_again(tiny: Ready) -> None:
    """Beams share what they have in common and leave what no beam needs: never more slots than rows times length."""
    florence = tiny.florence(program := Recorded(tiny.program))
    list(florence.ask("<CAPTION>", beams=3, max_tokens=30))
    assert program.methods == ["vision", "encode", *["step"] * 30]
    assert max(slots.max() for slots in program.slots) < 3 * 30
    full = Decoder(Scripted([1]), slots=4, encoded=1)
    full.step([0, 0, 0], [1, 1, 1])
    full.step([2, 2, 2], [1, 1, 1])  # one past for all three: two slots were free again
    with pytest.raises(UserError, match="caches are full"):
        full.step([0, 1, 2], [1, 1, 1])


def test_a_picture_is_seen_once(tiny: Ready) -> None:
    florence = tiny.florence(program := Recorded(tiny.program))
    answers = []
    for task, text in (("<OD>", None), ("<OPEN_VOCABULARY_DETECTION>", "a cat"), ("<OD>", None)):
        list(florence.ask(task, text, 1, 8))
        answers.append(florence.answer.text)
    assert program.methods.count("vision") == 1 and program.methods.count("encode") == 3
    assert answers[0] == answers[2] != answers[1]


# pictures and prompts


@pytest.mark.parametrize("size", [(1, 1), (50, 70), (1, 300), (720, 1280)])
def test_pixels_equal_the_processor(reference: Any, tiny: Ready, size: tuple[int, int]) -> None:
    picture = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    expected = reference.processor.image_processor(picture, return_tensors="np", input_data_format="channels_last")
    pixels = as_pixels(picture, tiny.bundle.metadata["picture"])
    assert pixels.dtype == np.uint8
    values = tiny.bundle.methods["vision"].module.normalize(torch.from_numpy(pixels.copy()))
    # The processor rounds x / 255, its difference to the mean and the quotient by std; values go up to 2.7.
    np.testing.assert_allclose(values.numpy(), expected["pixel_values"], rtol=0, atol=6e-7)


def test_prompts_of_all_tasks_equal_the_processor(reference: Any, tiny: Ready) -> None:
    """The tasks are the processor's, all of them."""
    processor, florence = reference.processor, tiny.florence()
    assert {task for task, needs in TASKS.items() if needs == "nothing"} == set(processor.task_prompts_without_inputs)
    assert {task for task, needs in TASKS.items() if needs != "nothing"} == set(processor.task_prompts_with_input)
    assert set(TASKS) == set(processor.tasks_answer_post_processing_type)
    texts = {"nothing": None, "text": " a naïve cat ", "region": "<loc_1><loc_2><loc_30><loc_999>"}
    for task, needs in TASKS.items():
        expected = processor(text=task + (texts[needs] or ""), images=PICTURE, return_tensors="np")["input_ids"][0]
        ours = florence.prompt(task, texts[needs])
        assert ours.tolist() == expected[tiny.bundle.metadata["image_tokens"] :].tolist(), task
    # a region in pixels is quantized as the processor does
    box = torch.tensor([[7.0, 0.0, 70.0, 25.0]])
    bins = processor.post_processor.quantize(box, (70, 50))[0].tolist()
    expected = "".join(f"<loc_{value}>" for value in bins)
    region = "<REGION_TO_OCR>"
    assert florence.prompt(region, "7, 0, 70, 25").tolist() == florence.prompt(region, expected).tolist()


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("<OD>", "cat", "takes no --text"),
        ("<OPEN_VOCABULARY_DETECTION>", None, "needs --text: a phrase"),
        ("<OPEN_VOCABULARY_DETECTION>", "  ", "needs --text: a phrase"),
        ("<REGION_TO_CATEGORY>", None, "needs --text: a region"),
        ("<REGION_TO_CATEGORY>", "1,2,3", "is no region"),
        ("<REGION_TO_CATEGORY>", "0,0,71,50", "not within the picture of 70×50"),
        ("<REGION_TO_CATEGORY>", "9,0,9,50", "not within the picture"),
        ("<OPEN_VOCABULARY_DETECTION>", "word " * 200, "too long: "),
        ("<OPEN_VOCABULARY_DETECTION>", "an <image>", "stands for the picture"),
    ],
)
def test_bad_questions_are_one_line(tiny: Ready, task: str, text: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny.florence().ask(task, text)


def test_bad_arguments_are_one_line(tiny: Ready) -> None:
    assert task_name(" od") == "<OD>" and task_name("region-to-ocr") == "<REGION_TO_OCR>"
    with pytest.raises(UserError, match=r"unknown task '<FLY>': choose one of <CAPTION>, .*<REGION_TO_OCR>"):
        task_name("<FLY>")
    for beams, tokens, message in ((0, 5, "1 to 8"), (9, 5, "1 to 8"), (1, 0, "1 to 160"), (1, 161, "1 to 160")):
        with pytest.raises(UserError, match=message):
            tiny.florence().ask("<OD>", None, beams, tokens)

    class Broken:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            return [output * np.nan for output in tiny.program.run(method, *arrays)]

    with pytest.raises(UserError, match="not finite"):
        list(tiny.florence(Broken()).ask("<OD>"))


def test_runner_works_without_torch(tiny: Ready) -> None:
    """In a process where torch, transformers and executorch cannot be imported: from pixels to a drawn answer."""
    code = """
import sys
for name in ("torch", "transformers", "executorch"):
    sys.modules[name] = None
sys.path.insert(0, "tests/recipes")
import numpy as np
from pathlib import Path
import recipes.florence2
from recipes.florence2.draw import draw
from recipes.florence2.runner import Florence
class Fake:
    def run(self, method, *arrays):
        logits = np.zeros((arrays[0].shape[-1], 1408), np.float32)
        script = [0, 70, *(380 + n for n in (0, 0, 999, 999)), 2]
        if method == "step":
            logits[:, script[int(arrays[1][0])]] = 50
        return [logits]
florence = Florence(Fake(), Path(sys.argv[1]))
florence.see(np.zeros((50, 70, 3), np.uint8))
pieces = list(florence.ask("<OD>", beams=1))
print(florence.answer.result["bboxes"][0], draw(np.zeros((50, 70, 3), np.uint8), florence.answer).height > 50)
"""
    run = [sys.executable, "-c", code, str(tiny.assets)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0, 0, 69, 49] True"


# declaration, check


def test_declaration() -> None:
    assert registry.load("florence2") is RECIPE
    assert RECIPE.modes("webgpu") == ("none", "4w", "8w", "8da4w", "8da8w")
    assert RECIPE.modes("xnnpack") == ("none", "8da4w", "8da8w")
    assert all(bound.why for bounds in RECIPE.tolerances.values() for bound in bounds.values())
    assert RECIPE.tolerances["webgpu", "fp32", "none"]["logits"].bound(100.0) == 1e-4


@pytest.mark.parametrize("fault", ["none", "forgets", "shifted"])
def test_check_sees_faults_of_the_caches(fault: str) -> None:
    """Caches that are empty at every step; positions that are one off in the steps; and no fault."""
    request = ExportRequest("portable", "tiny")
    program = EagerProgram(bundle := build(request))

    class Faulty:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            if fault == "forgets" and method == "step":
                for name, buffer in bundle.methods["step"].module.named_buffers():
                    if name.endswith(("keys", "values")):
                        buffer.zero_()
            elif fault == "shifted" and method == "step":
                arrays = (arrays[0], arrays[1] + 1, *arrays[2:])
            return program.run(method, *arrays)

    failed = {row.name for row in RECIPE.check(Faulty(), request) if not compare(row).passed}
    assert failed >= {"greedy.logits", "beams.logits"} if fault != "none" else not failed


def test_workloads_run_on_every_side(tiny: Ready) -> None:
    for workload in RECIPE.workloads({"webgpu": tiny.program}, ExportRequest("webgpu", "tiny")):  # type: ignore[misc]
        assert set(workload.calls) == {"webgpu", "eager", "eager-cuda"} and workload.amount >= 1
        workload.calls["webgpu"]()
        workload.calls["eager"]()
        if not torch.cuda.is_available():
            with pytest.raises(UserError, match="no NVIDIA GPU"):
                workload.calls["eager-cuda"]()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "weights"), [("base", 231_443_968), ("large", 770_213_888)])
def test_synthetic_is_the_real_configuration(size: str, weights: int) -> None:
    source = standin.synthetic(size, "test")
    assert sum(weight.numel() for weight in source.model.parameters()) == weights
    tokenizer = source.processor.tokenizer
    assert len(tokenizer) == 51290 and tokenizer.convert_tokens_to_ids("<loc_0>") == 50269
