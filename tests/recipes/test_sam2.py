"""SAM 2 in eager PyTorch on tiny weights: the methods, prompts, conversations, everything.

Run: pytest tests/recipes/test_sam2.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sam2_support import HEIGHT, PICTURE, WIDTH, normalized

from recipes import recipe as registry
from recipes.eager import EagerProgram
from recipes.recipe import ExportRequest, UserError
from recipes.sam2 import RECIPE, standin
from recipes.sam2.bench import Reference, workloads
from recipes.sam2.blocks import Block
from recipes.sam2.build import build
from recipes.sam2.check import overlap, prompts
from recipes.sam2.checkpoint import Checkpoint
from recipes.sam2.modules import EncodeMethod, Features, PromptMethod
from recipes.sam2.prompts import Prompt
from recipes.sam2.runner import Answer, Segmenter
from zoo.check import compare

pytestmark = pytest.mark.usefixtures("one_thread")


# the methods against transformers


def reference(prompt: Prompt, multimask: bool = True) -> Any:
    """transformers' answer, prompted as its processor would: boxes apart from points, in pixels of the square."""
    model = standin.tiny().model
    program = Reference(Checkpoint(model))
    program.keep(normalized(PICTURE, 128))
    scale = torch.tensor([128 / WIDTH, 128 / HEIGHT])
    given: dict[str, Any] = {}
    if prompt.points:
        given["input_points"] = (torch.tensor(prompt.points).float() * scale)[None, None]
        given["input_labels"] = torch.tensor(prompt.labels)[None, None]
    if prompt.box is not None:
        given["input_boxes"] = (torch.tensor(prompt.box).float().reshape(2, 2) * scale).reshape(1, 1, 4)
    if prompt.mask is not None:
        given["input_masks"] = torch.from_numpy(prompt.mask.copy())[None, None]
    with torch.no_grad():
        return model(image_embeddings=list(program._features), multimask_output=multimask, **given)


@pytest.mark.parametrize("kind", prompts(WIDTH, HEIGHT, 32))
def test_m2_any_prompt_is_as_the_reference(kind: str, segmenter: Segmenter) -> None:
    """1, 2 and 5 points, a point that is none, a box, a box with points, a mask, a mask with a point."""
    prompt = prompts(WIDTH, HEIGHT, 32)[kind]
    answer, wanted = segmenter.ask(prompt), reference(prompt)
    # float32 in another order of sums
    np.testing.assert_allclose(answer.logits[1:], wanted.pred_masks[0, 0].numpy(), atol=2e-5)
    np.testing.assert_allclose(answer.scores[1:], wanted.iou_scores[0, 0].numpy(), atol=2e-6)
    np.testing.assert_allclose(answer.object_score, wanted.object_score_logits.item(), atol=1e-5)
    single = reference(prompt, multimask=False)
    (chosen,) = answer.choice(False, segmenter.metadata["stability"])
    np.testing.assert_allclose(answer.logits[chosen], single.pred_masks[0, 0, 0].numpy(), atol=2e-5)
    np.testing.assert_allclose(answer.scores[chosen], single.iou_scores[0, 0, 0].numpy(), atol=2e-6)


def test_padding_changes_nothing_but_is_not_nothing(segmenter: Segmenter) -> None:
    """-10 pads as the reference's processor does: a token of zeros, which attention does see."""
    points = np.array([[[[40, 50], [0, 0]]]], np.float32)
    padded = segmenter.run(points, np.array([[[1, -10]]]))[0]
    model = standin.tiny().model
    with torch.no_grad():
        wanted = model(
            input_points=torch.from_numpy(points),
            input_labels=torch.tensor([[[1, -10]]]),
            image_embeddings=[torch.from_numpy(np.array(map)) for map in _maps(segmenter)],
        )
    np.testing.assert_allclose(padded.logits[1:], wanted.pred_masks[0, 0].numpy(), atol=2e-5)


def _maps(segmenter: Segmenter) -> list[np.ndarray]:
    features = segmenter._program._methods["prompt"].features  # type: ignore[attr-defined]
    return [map.numpy() for map in features.maps()[::-1]]


def test_objects_at_once_are_as_alone(segmenter: Segmenter) -> None:
    points = np.random.default_rng(0).uniform(0, 128, (1, 5, 3, 2)).astype(np.float32)
    labels = np.array([[[1, 0, -1], [1, 1, 1], [2, 3, 1], [0, -1, 1], [1, -10, -10]]])
    together = segmenter.run(points, labels)
    for index, one in enumerate(together):
        (alone,) = segmenter.run(points[:, index : index + 1], labels[:, index : index + 1])
        np.testing.assert_allclose(one.logits, alone.logits, atol=2e-5)
        np.testing.assert_allclose(one.scores, alone.scores, atol=2e-6)


def test_stability_rule_is_the_references(segmenter: Segmenter) -> None:
    decoder = standin.tiny().model.mask_decoder
    rng = np.random.default_rng(1)
    taken = set()
    for steepness in (0.1, 1.0, 2.0, 4.0, 50.0):
        for _ in range(4):
            logits = (steepness * rng.standard_normal((4, 16, 16))).astype(np.float32)
            scores = rng.random(4).astype(np.float32)
            masks, ious = decoder._dynamic_multimask_via_stability(
                torch.from_numpy(logits)[None, None], torch.from_numpy(scores)[None, None]
            )
            (index,) = Answer(logits, scores, 0.0).choice(False, segmenter.metadata["stability"])
            taken.add(index)
            np.testing.assert_array_equal(masks[0, 0, 0].numpy(), logits[index])
            assert ious.item() == scores[index]
    assert taken == {0, 1, 2, 3}
    nothing = Answer(np.full((4, 8, 8), -9, np.float32), np.arange(4.0), 0.0)
    assert nothing.choice(False, segmenter.metadata["stability"]) == [0]
    assert nothing.choice(True, segmenter.metadata["stability"]) == [3, 2, 1]
    assert nothing.choice(False, {"use": False}) == [0]


def test_every_kind_of_block() -> None:
    """Windows that fit and that stand over, pooled or not, global ones, and linears that are split."""
    from transformers.models.sam2.modeling_sam2 import Sam2MultiScaleBlock

    model = standin.tiny().model
    seen = set()
    for source in model.vision_encoder.backbone.blocks:
        assert isinstance(source, Sam2MultiScaleBlock)
        for height, limit in ((24, 128 * 2**20), (22, 128 * 2**20), (22, 2**18)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("recipes.sam2.blocks.MAX_BYTES", limit)
                block = Block(source, height, 2 * height)
            seen.add((block.window, any(block.padding), block.stride is not None, len(block.qkv), len(block.mlp.wide)))
            x = torch.randn(1, height, 2 * height, source.dim, generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                np.testing.assert_allclose(block(x).numpy(), source(x).numpy(), atol=2e-5)
    # windows that fit or not, pooled or not
    assert {row[1:3] for row in seen if row[0]} == {(True, True), (True, False), (False, True), (False, False)}
    assert any(row[0] == 0 for row in seen) and {row[3] for row in seen} == {1, 3} and max(row[4] for row in seen) > 1


def test_half_precision_keeps_places(sam2_assets: Path) -> None:
    bundle = build(ExportRequest("webgpu", "tiny", "fp16"))
    encode, prompt = (bundle.methods[name].module for name in ("encode", "prompt"))
    assert isinstance(encode, EncodeMethod) and isinstance(prompt, PromptMethod)
    assert encode.features is prompt.features and encode.features.embedding.dtype == torch.float16
    assert prompt.points.projection.dtype == torch.float32 and prompt.tokens.dtype == torch.float16
    assert encode.normalize.offset.dtype == torch.float32
    outputs = EagerProgram(bundle).run("encode", np.zeros((1, 128, 128, 3), np.uint8))
    assert all(output.dtype == np.float32 for output in outputs)


def test_features_of_the_real_size() -> None:
    """What a prompt needs of a picture of 1024 × 1024 pixels: 16 MiB."""
    shapes = [tuple(map.shape) for map in Features(256, 64).maps()]
    assert shapes == [(1, 256, 64, 64), (1, 64, 128, 128), (1, 32, 256, 256)]


# declaration, check, bench


def test_declaration() -> None:
    assert registry.load("sam2") is RECIPE
    assert RECIPE.modes("webgpu") == ("none", "4w", "8w", "8da4w", "8da8w")
    assert RECIPE.modes("xnnpack") == ("none", "8da4w", "8da8w")
    assert all(bound.why for bounds in RECIPE.tolerances.values() for bound in bounds.values())
    exact = RECIPE.tolerances["webgpu", "fp32", "none"]
    assert {exact[name].bound(100.0) for name in ("maps", "masks", "scores", "object")} == {1e-4}
    assert exact["iou"].bound(1.0) == 1e-3


def test_check_of_eager_passes(sam2_eager: EagerProgram) -> None:
    rows = RECIPE.check(sam2_eager, ExportRequest("webgpu", "tiny"))
    outcomes = {row.name: compare(row) for row in rows}
    assert all(outcome.passed for outcome in outcomes.values()), outcomes
    assert {"chelsea.box.choice", "astronaut.high_0", "8 objects.masks"} <= set(outcomes)
    logits = [row.golden for row in rows if row.name.endswith(".masks")]
    shares = np.concatenate([(golden > 0).mean((-1, -2)).ravel() for golden in logits])
    assert ((shares > 0.02) & (shares < 0.98)).mean() > 0.9  # masks have an inside and an outside


@pytest.mark.parametrize("fault", ["first picture stays", "mask is ignored", "corners are points"])
def test_check_sees_faults(fault: str, sam2_eager: EagerProgram) -> None:
    request = ExportRequest("portable", "tiny")
    program = sam2_eager
    encoded: list[list[np.ndarray]] = []

    class Faulty:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            if method == "encode" and fault == "first picture stays":
                if not encoded:
                    encoded.append(program.run(method, *arrays))
                return encoded[0]
            if method == "prompt" and fault == "mask is ignored":
                arrays = (*arrays[:3], np.array([False]))
            if method == "prompt" and fault == "corners are points":
                arrays = (arrays[0], np.minimum(arrays[1], 1), *arrays[2:])
            return program.run(method, *arrays)

    failed = {row.name for row in RECIPE.check(Faulty(), request) if not compare(row).passed}
    expected = {
        "first picture stays": {"astronaut.embedding", "astronaut.point.masks"},
        "mask is ignored": {"chelsea.mask.masks", "chelsea.mask and point.masks"},
        "corners are points": {"chelsea.box.masks", "astronaut.box and points.masks"},
    }[fault]
    assert expected <= failed and (fault == "first picture stays" or "chelsea.point.masks" not in failed)


def test_overlap() -> None:
    a = np.arange(10) < 6
    assert overlap(a, a[::-1]) == 0.2 and overlap(a, a) == overlap(a & ~a, a & ~a) == 1.0


def test_workloads(sam2_eager: EagerProgram) -> None:
    found = workloads({"webgpu": sam2_eager, "xnnpack": sam2_eager}, ExportRequest("webgpu", "tiny"))
    assert [(workload.name, workload.unit, workload.amount) for workload in found] == [
        ("encode", "picture", 1),
        ("prompt, 1 at once", "prompt", 1),
        ("prompt, 8 at once", "prompt", 8),
    ]
    for workload in found:
        assert list(workload.calls) == ["webgpu", "xnnpack", "eager", "eager-cuda"]
        for side in ("webgpu", "xnnpack", "eager"):
            workload.calls[side]()
        if not torch.cuda.is_available():
            with pytest.raises(UserError, match="CUDA"):
                workload.calls["eager-cuda"]()
