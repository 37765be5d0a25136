"""Nemotron diarization: checkpoints, segments, audio in, the picture, and the command.

Run: pytest tests/recipes/test_nemotron_run.py
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from nemotron_support import RATE, Ready, make_ready, talk
from PIL import Image
from support import check_damage

from recipes.nemotron_diarization import RECIPE, audio, checkpoint, session, standin
from recipes.nemotron_diarization.plot import Envelope, draw
from recipes.nemotron_diarization.segments import Decision, Segment, Segmenter, rttm
from recipes.recipe import ExportRequest, UserError


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    return make_ready(standin.tiny(), tmp_path_factory.mktemp("nemotron") / "assets")


# weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the hub's layout, written by transformers' own `save_pretrained`."""
    folder = tmp_path_factory.mktemp("checkpoint") / "nemotron"
    source = standin.tiny()
    source.model.save_pretrained(folder)
    source.processor.save_pretrained(folder)
    return folder


def test_saved_checkpoint_is_the_same(saved: Path, ready: Ready, tmp_path: Path) -> None:
    loaded = checkpoint.load(str(saved))
    assert loaded.is_trained and not loaded.notices
    other = make_ready(loaded, tmp_path / "assets")
    assert other.bundle.metadata | {"is_trained": False} == ready.bundle.metadata
    samples = talk(2.0)
    np.testing.assert_array_equal(other.run(samples), ready.run(samples))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "processor_config.json"])
@pytest.mark.parametrize("kind", ["missing", "cut"])
def test_damaged_checkpoint_is_one_line(copy: Path, name: str, kind: str) -> None:
    check_damage(checkpoint.load, copy, copy / name, kind)


@pytest.mark.parametrize("weights", ["./nowhere", "/nowhere/at/all", "not an id", "a/b/c"])
def test_weights_that_are_nowhere(weights: str) -> None:
    with pytest.raises(UserError, match="no such folder"):
        checkpoint.load(weights)


def test_auto_falls_back_with_a_notice(no_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "synthetic", lambda why: replace(standin.tiny(), notices=(why,)))
    (notice,) = checkpoint.load("auto").notices
    assert "no network" in notice
    with pytest.raises(UserError, match="no network"):
        checkpoint.load("someone/some-model")


# segments


def probabilities(seed: int = 0, frames: int = 400) -> np.ndarray:
    rng = np.random.default_rng(seed)
    steps = np.repeat(rng.uniform(0, 1, (frames // 5, 8)), 5, axis=0)
    return np.clip(steps + rng.normal(0, 0.1, steps.shape), 0, 1).astype(np.float32)


def segment(probs: np.ndarray, decision: Decision, size: int) -> list[Segment]:
    segmenter = Segmenter(8, 0.01, decision)
    found = [s for at in range(0, len(probs), size) for s in segmenter.push(probs[at : at + size])]
    return sorted(found + segmenter.finish(len(probs) * 0.01), key=lambda s: (s.start, s.speaker))


def test_segments_equal_transformers(ready: Ready) -> None:
    import torch

    probs = probabilities()
    logits = torch.logit(torch.from_numpy(probs).clamp(1e-6, 1 - 1e-6))
    theirs = ready.processor.extract_speaker_dict(logits[None])[0]
    ours = segment(logits.sigmoid().numpy(), Decision(), 400)
    assert [(s.start, s.end, s.speaker) for s in ours] == [(s["Start"], s["End"], s["Speaker"]) for s in theirs]


@pytest.mark.parametrize(
    "decision",
    [Decision(), Decision(0.7, 0.3), Decision(min_gap=0.1), Decision(min_speech=0.1), Decision(0.6, 0.5, 0.1, 0.07)],
)
def test_segments_do_not_depend_on_the_blocks(decision: Decision) -> None:
    probs = probabilities(1)
    whole = segment(probs, decision, len(probs))
    assert whole and all(0 <= s.start < s.end <= 4.0 for s in whole)
    for size in (1, 7, 72):
        assert segment(probs, decision, size) == whole


def test_gaps_are_filled_before_short_speech_is_dropped() -> None:
    probs = np.zeros((100, 8), np.float32)
    for start, end in ((10, 14), (16, 20), (40, 44), (60, 90)):
        probs[start:end, 2] = 0.9
    probs[62:70, 2] = 0.45
    decision = Decision(threshold=0.5, release=0.4, min_speech=0.08, min_gap=0.03)
    assert segment(probs, decision, 9) == [Segment(0.1, 0.2, 2), Segment(0.6, 0.9, 2)]


@pytest.mark.parametrize("options", [(1.0,), (-0.1,), (0.5, 0.6), (0.5, None, -1.0), (0.5, None, 0.0, float("nan"))])
def test_decisions_that_make_no_sense(options: tuple[Any, ...]) -> None:
    with pytest.raises(UserError):
        Decision(*options)


def test_forms() -> None:
    one = Segment(1.5, 3.25, 4)
    assert rttm([one], "my talk") == "SPEAKER my_talk 1 1.50 1.75 <NA> <NA> speaker_4 <NA> <NA>\n"
    assert json.loads(one.json()) == {"start": 1.5, "end": 3.25, "speaker": 4}


# audio in


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_resampling_does_not_depend_on_the_blocks(rate: int) -> None:
    samples = np.sin(np.arange(rate * 2) * 2 * np.pi * 440 / rate).astype(np.float32)
    whole = np.concatenate(list(audio.at_rate([samples], rate, RATE)))
    assert abs(len(whole) - 2 * RATE) <= 1
    middle = np.arange(4000, 28000)
    np.testing.assert_allclose(whole[middle], np.sin(middle * 2 * np.pi * 440 / RATE), atol=2e-3)
    for size in (1, 160, 8960) if rate == 8000 else (997, 8960):
        pieces = (samples[at : at + size] for at in range(0, len(samples), size))
        np.testing.assert_array_equal(np.concatenate(list(audio.at_rate(pieces, rate, RATE))), whole)


@pytest.mark.parametrize(
    ("suffix", "subtype"), [("wav", "PCM_24"), ("flac", "PCM_16"), ("wav", "FLOAT"), ("ogg", "VORBIS")]
)
def test_any_file_any_channels(tmp_path: Path, suffix: str, subtype: str) -> None:
    samples = talk(1.0)
    path = tmp_path / f"talk.{suffix}"
    soundfile.write(path, np.stack([samples, 0 * samples, samples], 1), RATE, subtype=subtype)
    with audio.File(path) as file:
        read = np.concatenate(list(file.blocks()))
    assert file.channels == 3 and file.seconds == 1.0 and len(read) == RATE
    assert np.abs(read - samples * 2 / 3).mean() < (1e-2 if subtype == "VORBIS" else 1e-4)


def bad_files(folder: Path) -> dict[str, tuple[bytes, str]]:
    buffer = io.BytesIO()
    soundfile.write(buffer, talk(1.0), RATE, format="WAV")
    good = buffer.getvalue()
    empty = io.BytesIO()
    soundfile.write(empty, np.zeros(0), RATE, format="WAV")
    return {
        "text": (b"this is a text, not audio " * 9, "as audio"),
        "nothing": (b"", "is empty"),
        "no samples": (empty.getvalue(), "holds no samples"),
        "rate 0": (good[:24] + struct.pack("<I", 0) + good[28:], "sample rate of 0 Hz"),
        "cut short": (good[:-1001], "cut short"),
        "cut in the header": (good[:40], "cut short"),
    }


@pytest.mark.parametrize("case", list(bad_files(Path())))
def test_bad_files_are_one_line_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    content, message = bad_files(tmp_path)[case]
    path = tmp_path / "bad.wav"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        RECIPE.run(path, rttm=tmp_path / "bad.rttm", plot=tmp_path / "bad.png", weights="tiny", backend="portable")
    assert "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["bad.wav"]


@pytest.mark.parametrize("what", ["grows", "ends", "NaN"])
def test_a_file_that_changes_while_it_is_read(ready: Ready, tmp_path: Path, what: str) -> None:
    path = tmp_path / "talk.wav"
    samples = talk(3.0)
    samples[40000] = np.nan if what == "NaN" else 0
    soundfile.write(path, samples, RATE, subtype="FLOAT")

    class Meddling:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            if what == "grows":
                path.write_bytes(path.read_bytes() + bytes(1000))
            elif what == "ends":
                os.truncate(path, 8 * RATE)
            return ready.program.run(method, *arrays)

    outputs = session.Outputs(rttm=tmp_path / "talk.rttm", plot=tmp_path / "talk.png")
    message = {"grows": "was changed while", "ends": "ended while|cannot read", "NaN": "not a finite number"}[what]
    with pytest.raises(UserError, match=message):
        session.diarize(Meddling(), ready.assets, session.Source(path, stream=True), Decision(), outputs, "")
    assert [file.name for file in tmp_path.iterdir()] == ["talk.wav"]


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "stdin").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", open(tmp_path / "stdin"))  # noqa: SIM115


@pytest.mark.parametrize(("channels", "extra"), [(1, b""), (2, b"xyz")])
def test_pcm_on_stdin_is_the_file(
    ready: Ready,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    channels: int,
    extra: bytes,
) -> None:
    path = tmp_path / "talk.wav"
    pcm = np.repeat(np.rint(talk(3.0) * 32767).astype("<i2")[:, None], channels, axis=1)
    soundfile.write(path, pcm, RATE)
    from_file = session.diarize(
        ready.program, ready.assets, session.Source(path, stream=True), Decision(), session.Outputs(), ""
    )
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == len(from_file) > 0
    pipe(monkeypatch, pcm.tobytes() + extra, tmp_path)
    source = session.Source(None, stream=True, channels=channels)
    outputs = session.Outputs(as_json=True)
    assert session.diarize(ready.program, ready.assets, source, Decision(), outputs, "") == from_file
    told = capfd.readouterr()
    assert [json.loads(line)["start"] for line in told.out.splitlines()]
    assert ("within a sample: its last 3 bytes" in told.err) == bool(extra)


@pytest.mark.parametrize(("data", "message"), [(b"", "no audio"), (b"RIFF" + bytes(100), "give the file by name")])
def test_bad_stdin(ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str) -> None:
    pipe(monkeypatch, data, tmp_path)
    with pytest.raises(UserError, match=message):
        session.diarize(ready.program, ready.assets, session.Source(None, True), Decision(), session.Outputs(), "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "name an audio file"),
        ({"audio": "gone.wav"}, "no such file"),
        ({"audio": "."}, "is a folder"),
        ({"audio": "talk.wav", "rttm": "gone/a.rttm"}, "folder .*gone does not exist"),
        ({"audio": "talk.wav", "rttm": "a.txt"}, "must end in .rttm"),
        ({"audio": "talk.wav", "plot": "a.jpg"}, "must end in .png"),
        ({"audio": "talk.wav", "latency": "low_latency"}, "belongs to --stream"),
        ({"audio": "talk.wav", "threshold": 1.5}, "threshold"),
        ({"example": True}, "--example needs"),
        ({"audio": "talk.wav", "backend": "vulkan"}, "export only"),
    ],
)
def test_mistakes_are_told_before_the_export(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    soundfile.write(tmp_path / "talk.wav", talk(0.5), RATE)
    given = {name: tmp_path / value if name in ("audio", "rttm", "plot") else value for name, value in options.items()}
    with pytest.raises(UserError, match=message):
        RECIPE.run(**{"weights": "tiny", "backend": "portable", **given})
    assert [file.name for file in tmp_path.iterdir()] == ["talk.wav"]


# the whole way


def test_example_rttm_json_and_picture(ready: Ready, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "example.wav"
    session.write_example(path)
    outputs = session.Outputs(tmp_path / "a.rttm", tmp_path / "a.png", as_json=True)
    decision = Decision(min_gap=0.2, min_speech=0.1)
    found = session.diarize(ready.program, ready.assets, session.Source(path), decision, outputs, "told")
    printed = capfd.readouterr()
    assert [json.loads(line) for line in printed.out.splitlines()] == [json.loads(s.json()) for s in found]
    assert "20.00 s of audio" in printed.err and "MEANS NOTHING" in printed.err
    rows = [line.split() for line in (tmp_path / "a.rttm").read_text().splitlines()]
    assert len(rows) == len(found) > 5
    assert all(row[:3] == ["SPEAKER", "example", "1"] and len(row) == 10 for row in rows)
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG" and image.width > 1600
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.png", "a.rttm", "example.wav"]


@pytest.mark.parametrize("length", [0, 1, 63, 16000, 1_000_003])
def test_envelope_is_bounded_and_misses_no_peak(length: int) -> None:
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, length).astype(np.float32)
    samples[length // 2 : length // 2 + 1] = 0.9
    envelope = Envelope()
    for at in range(0, length, 4801):
        envelope.push(samples[at : at + 4801])
    low, high = envelope.columns(100)
    assert len(envelope._low) <= 3200 and low.shape == high.shape == (100,)
    assert high.max() == (np.float32(0.9) if length else 0)
    if length > 100:
        assert abs(int(np.argmax(high)) - 50) <= 1
    file = io.BytesIO()
    draw(file, [Segment(0.0, 0.01, 0)] if length else [], envelope, length / RATE)
    assert file.getvalue().startswith(b"\x89PNG")


def test_workloads_of_the_bench(ready: Ready) -> None:
    """A recording, and the longest step of a stream, the same at every call."""
    steps: list[tuple[str, int]] = []

    class Noting:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            steps.append((method, int(arrays[1][1]) if method == "encode" else arrays[0].shape[1]))
            return ready.program.run(method, *arrays)

    request = ExportRequest("webgpu", "tiny")
    assert RECIPE.workloads is not None
    offline, stream = RECIPE.workloads({"webgpu": Noting()}, request)
    meta = ready.bundle.metadata
    for _ in range(2):
        offline.calls["webgpu"]()
        assert steps == [("stack", 126), ("encode", 126)]  # 10 s
        steps.clear()
        stream.calls["webgpu"]()
        step = meta["streaming_modes"]["low_latency"][0]
        # The queue holds whole chunks: what is over is never used.
        longest = meta["stream_frames"] - meta["streaming"]["fifo_length"] % step
        assert steps == [("stack", step), ("encode", longest)]
        steps.clear()
    assert (offline.amount, stream.amount) == (10.0, step * 0.08)
    for workload in (offline, stream):
        assert set(workload.calls) == {"webgpu", "eager", "eager-cuda"}
        workload.calls["eager"]()
