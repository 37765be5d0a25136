"""Florence-2's checkpoints: folders that transformers saved, damaged ones, sizes.

Run: pytest tests/recipes/test_florence2_weights.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support import change, check_damage, check_same_weights

from recipes.eager import EagerProgram
from recipes.florence2 import checkpoint, standin
from recipes.florence2.build import make_bundle, make_metadata
from recipes.florence2.checkpoint import weights_argument
from recipes.recipe import UserError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the hub's layout, in several files, written by transformers' own `save_pretrained`."""
    folder = tmp_path_factory.mktemp("checkpoint") / "florence2"
    source = standin.tiny()
    source.model.save_pretrained(folder, max_shard_size="1MB")
    source.processor.save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def test_saved_checkpoint_is_the_same_model(saved: Path) -> None:
    loaded, tiny = checkpoint.load(str(saved)), standin.tiny()
    assert loaded.is_trained and not loaded.notices
    assert make_metadata(loaded) == make_metadata(tiny) | {"is_trained": True}
    check_same_weights(loaded.model, tiny.model)
    pixels = np.random.default_rng(0).integers(0, 256, (1, 96, 96, 3), np.uint8)
    results = []
    for source in (loaded, tiny):
        program = EagerProgram(make_bundle(source))
        results.append([program.run("vision", pixels)[0], program.run("encode", np.arange(9)[None])[0]])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * abs(theirs).max())  # float32


def test_older_layout_of_the_processor(copy: Path) -> None:
    """The pictures' settings in a file of their own, as the published checkpoints have them."""
    own = json.loads((copy / "processor_config.json").read_text())
    (copy / "preprocessor_config.json").write_text(json.dumps(own.pop("image_processor")))
    (copy / "processor_config.json").write_text(json.dumps(own))
    assert make_metadata(checkpoint.load(str(copy))) == make_metadata(standin.tiny()) | {"is_trained": True}


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "tokenizer.json", "processor_config.json"]
)
@pytest.mark.parametrize("kind", ["missing", "cut"])
def test_damaged_checkpoint_is_one_line(copy: Path, name: str, kind: str) -> None:
    check_damage(checkpoint.load, copy, copy / name, kind)


def test_a_shard_that_is_cut(copy: Path) -> None:
    shard = min(copy.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot read the model"):
        checkpoint.load(str(copy))


def test_what_is_not_supported_is_refused(copy: Path) -> None:
    change(copy / "generation_config.json", repetition_penalty=1.5)
    with pytest.raises(UserError, match="sets repetition_penalty"):
        make_metadata(checkpoint.load(str(copy)))
    change(copy / "config.json", model_type="bart")
    with pytest.raises(UserError, match=r"'bart' model, not Florence-2 .*florence-community/Florence-2-base"):
        checkpoint.load(str(copy))


def test_sizes_and_names() -> None:
    assert weights_argument("auto", None) == weights_argument("auto", "base") == "auto"
    assert weights_argument("auto", "large") == "florence-community/Florence-2-large"
    assert weights_argument("synthetic", "large") == "synthetic:large"
    with pytest.raises(UserError, match="choose one of base, large"):
        weights_argument("auto", "huge")
    with pytest.raises(UserError, match="its own size"):
        weights_argument("tiny", "large")
    with pytest.raises(UserError, match="no such folder"):
        checkpoint.load("./nowhere")
