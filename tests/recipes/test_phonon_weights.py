"""Phonon's checkpoints: folders that transformers saved, damaged ones, the hub, and the stand-ins.

Run: pytest tests/recipes/test_phonon_weights.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phonon_support import Ready, make_processor
from support import check_damage, check_same_weights, write_assets

from recipes.eager import EagerProgram
from recipes.phonon import checkpoint, standin
from recipes.phonon.build import build, make_bundle
from recipes.phonon.runner import Speaker
from recipes.recipe import ExportRequest, UserError
from zoo.weights import fetch


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the hub's layout, written by transformers' own `save_pretrained`."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("checkpoint") / "phonon"
    source = standin.tiny()
    source.model.save_pretrained(folder)
    source.codec.save_pretrained(folder / "audio_tokenizer")
    source.codec.name_or_path = str(folder / "audio_tokenizer")
    make_processor(source).save_pretrained(folder)
    (folder / "voices").mkdir()
    for name in ("ada", "zoe"):
        save_file({"latents": torch.randn(4, 24)}, folder / "voices" / f"{name}.safetensors")
    save_file({"latents": torch.randn(1, 6, 24)}, folder / "default-voice.safetensors")
    return folder


def test_saved_checkpoint_speaks_the_same(saved: Path, ready: Ready, tmp_path: Path) -> None:
    loaded = checkpoint.load(str(saved))
    assert sorted(loaded.voices) == ["ada", "default", "zoe"]
    assert loaded.is_speech and not loaded.notices
    tiny = standin.tiny()
    check_same_weights(loaded.model, tiny.model)
    check_same_weights(loaded.codec, tiny.codec)
    loaded.voices = tiny.voices
    bundle = make_bundle(loaded)
    assert bundle.metadata | {"is_speech": False} == ready.bundle.metadata
    speaker = Speaker(EagerProgram(bundle), write_assets(bundle, tmp_path / "assets"))
    ours, theirs = (np.concatenate(list(s.stream("Hello there."))) for s in (speaker, ready.speaker()))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * abs(theirs).max())  # float32, frame after frame


def test_voices_of_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    bundle = build(ExportRequest("portable", str(saved)))
    assert bundle.metadata["default_voice"] == "default"
    assert bundle.metadata["max_prompt"] == 6 + 64 + 1
    speaker = Speaker(EagerProgram(bundle), write_assets(bundle, tmp_path / "assets"), warn=lambda line: None)
    runs = {name: b"".join(x.tobytes() for x in speaker.stream("Hi.", name)) for name in (None, *speaker.voices)}
    assert runs[None] == runs["default"]
    assert len({*runs.values()}) == 3


def test_audio_tokenizer_by_reference(copy: Path) -> None:
    """Without `audio_tokenizer/` beside the model, the processor's config says where it is."""
    shutil.move(copy / "audio_tokenizer", copy / "codec")
    path = copy / "processor_config.json"
    config = json.loads(path.read_text())
    config["audio_tokenizer"]["audio_tokenizer_name_or_path"] = "codec"
    path.write_text(json.dumps(config))
    assert checkpoint.load(str(copy)).codec.config.latent_dim == 8
    config["audio_tokenizer"]["audio_tokenizer_name_or_path"] = "/nowhere/codec"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="/nowhere/codec"):
        checkpoint.load(str(copy))


def test_checkpoint_without_voices_speaks(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / "voices")
    (copy / "default-voice.safetensors").unlink()
    bundle = build(ExportRequest("portable", str(copy)))
    speaker = Speaker(EagerProgram(bundle), write_assets(bundle, tmp_path / "assets"), warn=lambda line: None)
    assert next(speaker.stream("Hello")).shape == (1920,)
    with pytest.raises(UserError, match="this model has none"):
        speaker.stream("Hello", voice="ada")


def damage(folder: Path) -> Iterator[tuple[str, Path]]:
    yield "truncated", folder / "model.safetensors"
    yield "truncated", folder / "audio_tokenizer" / "model.safetensors"
    yield "truncated", folder / "voices" / "ada.safetensors"
    yield "truncated", folder / "config.json"
    yield "truncated", folder / "tokenizer.json"
    yield "truncated", folder / "processor_config.json"
    yield "missing", folder / "model.safetensors"
    yield "missing", folder / "config.json"
    yield "missing", folder / "tokenizer.json"
    yield "missing", folder / "chat_template.jinja"
    yield "missing", folder / "audio_tokenizer" / "model.safetensors"


@pytest.mark.parametrize("case", range(11))
def test_damaged_checkpoint_is_one_line(copy: Path, case: int) -> None:
    kind, file = list(damage(copy))[case]
    check_damage(checkpoint.load, copy, file, kind)


def test_missing_weight_is_refused_not_invented(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    del tensors[next(name for name in tensors if "eos" in name and name.endswith("weight"))]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"eos_head\.weight"):
        checkpoint.load(str(copy))


@pytest.mark.parametrize("weights", ["./nowhere", "/nowhere/at/all", "not an id", "a/b/c"])
def test_weights_that_are_nowhere(weights: str) -> None:
    with pytest.raises(UserError, match="no such folder"):
        checkpoint.load(weights)


def test_file_as_weights(saved: Path) -> None:
    with pytest.raises(UserError, match="is a file"):
        checkpoint.load(str(saved / "model.safetensors"))


def test_auto_falls_back_with_a_notice(no_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "synthetic", lambda why: replace(standin.tiny(), notices=(why,)))
    (notice,) = checkpoint.load("auto").notices
    assert "no network" in notice
    with pytest.raises(UserError, match="no network"):
        checkpoint.load("someone/some-model")
    (notice,) = standin.tiny().notices
    assert "not speech" in notice


def test_hub_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def fail(repo: str, local_files_only: bool = False, **_: Any) -> str:
        if local_files_only:
            return str(tmp_path)  # a snapshot with nothing in it
        raise OSError("Network is unreachable\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"a/b is not in the local cache.*unreachable$"):
        fetch("a/b", ("*.json",))
