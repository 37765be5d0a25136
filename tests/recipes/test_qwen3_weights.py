"""Qwen3's checkpoints: folders that transformers saved, damaged ones, sizes, and the stand-ins.

Run: pytest tests/recipes/test_qwen3_weights.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import change, check_damage, check_same_weights

from recipes.eager import EagerProgram
from recipes.qwen3 import checkpoint, standin
from recipes.qwen3.build import build, make_bundle, make_metadata
from recipes.recipe import ExportRequest, UserError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the hub's layout, written by transformers' own `save_pretrained`."""
    folder = tmp_path_factory.mktemp("checkpoint") / "qwen3"
    source = standin.tiny()
    source.model.save_pretrained(folder)
    source.tokenizer.save_pretrained(folder)
    return folder


def test_saved_checkpoint_is_the_same_model(saved: Path, tmp_path: Path) -> None:
    request = ExportRequest("portable", str(saved), options=(("context", "256"),))
    loaded, tiny = checkpoint.load(str(saved)), standin.tiny()
    assert loaded.is_language and not loaded.notices
    assert make_metadata(loaded, request) == make_metadata(tiny, request) | {"is_language": True}
    text = "One token, two tokens: 日本 <|im_end|>"
    assert loaded.tokenizer(text)["input_ids"] == tiny.tokenizer(text)["input_ids"]
    check_same_weights(loaded.model, tiny.model)
    inputs = (np.arange(9)[None], np.array([0]))
    ours, theirs = (EagerProgram(make_bundle(source, request)).run("step", *inputs) for source in (loaded, tiny))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=0, atol=1e-5)  # of logits up to 3, in float32


def test_untied_head_is_read(copy: Path) -> None:
    """`tie_word_embeddings` false without a head of its own in the file: refused, not invented."""
    change(copy / "config.json", tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        checkpoint.load(str(copy))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["missing", "cut"])
def test_damaged_checkpoint_is_one_line(copy: Path, name: str, kind: str) -> None:
    check_damage(checkpoint.load, copy, copy / name, kind)


def test_what_the_method_does_not_compute_is_refused(copy: Path) -> None:
    kept = (copy / "config.json").read_text()
    change(copy / "config.json", layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(UserError, match="sliding-window"):
        checkpoint.load(str(copy))
    (copy / "config.json").write_text(kept)
    rope = {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}
    change(copy / "config.json", rope_parameters=rope)
    with pytest.raises(UserError, match="rotary"):
        checkpoint.load(str(copy))
    change(copy / "config.json", model_type="llama")
    with pytest.raises(UserError, match="'llama' model, not Qwen3"):
        checkpoint.load(str(copy))


def test_context_beyond_the_model_is_refused(copy: Path) -> None:
    change(copy / "config.json", max_position_embeddings=300)
    with pytest.raises(UserError, match="a context of 512 tokens, but the model was made for 300"):
        build(ExportRequest("portable", str(copy), options=(("context", "512"),)))


def test_sizes() -> None:
    assert [checkpoint.weights_argument("auto", size) for size in (None, "0.6B", "1.7B", "4B")] == [
        "auto", "auto", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B",
    ]  # fmt: skip
    assert checkpoint.weights_argument("synthetic", "4B") == "synthetic:4B"
    for weights, size in (("auto", "7B"), ("tiny", "4B"), ("/some/folder", "0.6B")):
        with pytest.raises(UserError, match=size if size == "7B" else "its own size"):
            checkpoint.weights_argument(weights, size)
    with pytest.raises(UserError, match="no such folder"):
        checkpoint.load("synthetic:7B")
    assert set(standin.CONFIGS) == set(checkpoint.SIZES)


def test_auto_falls_back_with_a_notice(no_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "synthetic", lambda size, why: replace(standin.tiny(), notices=(why,)))
    (notice,) = checkpoint.load("auto").notices
    assert "no network" in notice
    (notice,) = standin.tiny().notices
    assert "not language" in notice
