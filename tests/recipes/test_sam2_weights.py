"""SAM 2's checkpoints: folders that transformers saved, damaged ones, sizes, and the stand-ins.

Run: pytest tests/recipes/test_sam2_weights.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import change, check_damage
from transformers import Sam2VideoConfig, Sam2VideoModel

from recipes.recipe import ExportRequest, UserError
from recipes.sam2 import checkpoint, standin
from recipes.sam2.build import make_metadata

REQUEST = ExportRequest("webgpu", "tiny")
# As the image processor saves itself.
SETTINGS: dict[str, Any] = {
    "image_processor_type": "Sam2ImageProcessorFast",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.25, 0.3],
    "mask_size": {"height": 32, "width": 32},
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 128, "width": 128},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the hub's layout, the model written by transformers' own `save_pretrained`."""
    folder = tmp_path_factory.mktemp("checkpoint") / "sam2"
    standin.tiny().model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


def test_saved_checkpoint_is_the_same_model(saved: Path) -> None:
    loaded, tiny = checkpoint.load(str(saved)), standin.tiny()
    assert loaded.is_trained and not loaded.notices
    assert (loaded.mean, loaded.std) == ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    assert make_metadata(loaded, REQUEST) == make_metadata(tiny, REQUEST) | {"is_trained": True}
    ours, theirs = loaded.model.state_dict(), tiny.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert loaded.model.config.vision_config.backbone_config._attn_implementation == "sdpa"


def test_processors_own_file_serves_too(copy: Path) -> None:
    (copy / "preprocessor_config.json").unlink()
    (copy / "processor_config.json").write_text(json.dumps({"image_processor": SETTINGS, "target_size": 128}))
    assert checkpoint.load(str(copy)).mean == (0.5, 0.4, 0.3)


def test_video_checkpoint_holds_the_image_model(copy: Path) -> None:
    """What the published repositories hold: the memory of the video model is left out."""
    config = standin.tiny().model.config
    video = Sam2VideoModel(
        Sam2VideoConfig(
            vision_config=config.vision_config.to_dict(),
            prompt_encoder_config=config.prompt_encoder_config.to_dict(),
            mask_decoder_config=config.mask_decoder_config.to_dict(),
            memory_attention_hidden_size=64,
            memory_attention_num_layers=1,
            memory_attention_feed_forward_hidden_size=64,
            memory_encoder_hidden_size=64,
            memory_encoder_output_channels=16,
            mask_downsampler_embed_dim=64,
            memory_fuser_embed_dim=64,
            memory_fuser_intermediate_dim=64,
            image_size=128,
        )
    )
    video.load_state_dict(standin.tiny().model.state_dict(), strict=False)
    (copy / "model.safetensors").unlink()
    video.save_pretrained(copy)
    assert json.loads((copy / "config.json").read_text())["model_type"] == "sam2_video"
    ours, theirs = checkpoint.load(str(copy)).model.state_dict(), standin.tiny().model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "preprocessor_config.json"])
@pytest.mark.parametrize("kind", ["missing", "cut"])
def test_damaged_checkpoint_is_one_line(copy: Path, name: str, kind: str) -> None:
    check_damage(checkpoint.load, copy, copy / name, kind)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"size": {"height": 256, "width": 256}}, "size is .*256"),
        ({"resample": 3}, "resample is 3; only 2"),
        ({"do_normalize": False}, "do_normalize is False"),
        ({"image_mean": [0.5]}, "three numbers"),
        ({"image_std": [0.2, 0, 0.2]}, "three numbers"),
        ({"image_std": None}, "image_mean and image_std"),
    ],
)
def test_other_preparation_is_refused(copy: Path, values: dict[str, Any], said: str) -> None:
    change(copy / "preprocessor_config.json", **values)
    with pytest.raises(UserError, match=said):
        checkpoint.load(str(copy))


def test_other_models_are_refused(copy: Path) -> None:
    change(copy / "config.json", model_type="sam")
    with pytest.raises(UserError, match="'sam' model, not SAM 2"):
        checkpoint.load(str(copy))


def test_sizes() -> None:
    assert [checkpoint.weights_argument("auto", size) for size in (None, "tiny", "small", "large")] == [
        "auto", "auto", "facebook/sam2.1-hiera-small", "facebook/sam2.1-hiera-large",
    ]  # fmt: skip
    assert checkpoint.weights_argument("synthetic", "base-plus") == "synthetic:base-plus"
    for weights, size in (("auto", "huge"), ("tiny", "large"), ("/some/folder", "tiny")):
        with pytest.raises(UserError, match=size if size == "huge" else "its own size"):
            checkpoint.weights_argument(weights, size)
    with pytest.raises(UserError, match="no such folder"):
        checkpoint.load("synthetic:huge")


@pytest.mark.parametrize(("size", "millions"), [("tiny", 38.9), ("small", 46), ("base-plus", 80.8), ("large", 224.4)])
def test_configurations_are_the_published_sizes(size: str, millions: float) -> None:
    """Meta's counts are of the video model, whose memory has 7.5 million weights in every size."""
    from transformers import Sam2Config, Sam2Model

    with torch.device("meta"):
        model = Sam2Model(Sam2Config(**standin.config(size)))
    assert millions - sum(weight.numel() for weight in model.parameters()) / 1e6 == pytest.approx(7.5, abs=0.1)


def test_auto_falls_back_with_a_notice(no_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "synthetic", lambda size, why: replace(standin.tiny(), notices=(why,)))
    (notice,) = checkpoint.load("auto").notices
    assert "no network" in notice
    (notice,) = standin.tiny().notices
    assert "follow no object" in notice
