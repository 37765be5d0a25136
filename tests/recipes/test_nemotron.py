"""Nemotron diarization: against transformers chunk for chunk, the speaker cache to the bit, and the runner.

Run: pytest tests/recipes/test_nemotron.py
"""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nemotron_support import MODES, RATE, Ready, make_ready, offline, talk
from transformers import Nemotron3DiarizationStreamingConfig
from transformers.models.nemotron3_diarization.modeling_nemotron3_diarization import Nemotron3DiarizationSpeakerCache

from backend.blob import from_blob
from backend.runtime.program import read_program
from recipes import recipe as registry
from recipes.eager import EagerProgram
from recipes.nemotron_diarization import RECIPE, standin, tolerances
from recipes.nemotron_diarization.build import build as build_bundle
from recipes.nemotron_diarization.build import make_bundle
from recipes.nemotron_diarization.cache import SpeakerCache
from recipes.nemotron_diarization.features import LogMel
from recipes.nemotron_diarization.modules import EncodeMethod
from recipes.nemotron_diarization.runner import Diarizer
from recipes.nemotron_diarization.segments import Decision, Segmenter
from recipes.nemotron_diarization.topk import top_indices
from recipes.recipe import Bundle, ExportRequest, UserError
from zoo.check import compare
from zoo.export import export, make_request
from zoo.program import Program

# The module: its name in the package is the function of the recipe.
checks = importlib.import_module("recipes.nemotron_diarization.check")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    return make_ready(standin.tiny(), tmp_path_factory.mktemp("nemotron") / "assets")


# transformers' own results


def streamed(ready: Ready, samples: np.ndarray, mode: str) -> list[np.ndarray]:
    """The loop of transformers' documentation; one block a chunk."""
    processor = ready.processor
    processor.set_streaming_mode(mode)
    blocks, cache, frame = [], None, 0
    while True:
        start = processor.audio_chunk_start(frame) if frame else 0
        length = processor.num_samples_per_audio_chunk if frame else processor.num_samples_first_audio_chunk
        last = start + length > len(samples)
        inputs = processor(
            samples[start : None if last else start + length],
            sampling_rate=RATE,
            is_streaming=True,
            is_first_audio_chunk=frame == 0,
            is_last_audio_chunk=last,
        )
        with torch.no_grad():
            output = ready.model(**inputs, speaker_cache=cache)
        blocks.append(output.logits.sigmoid()[0].numpy())
        cache = output.speaker_cache
        if last:
            return blocks
        frame += processor.num_mel_frames_per_step


# The last sample of a frame, of an encoder frame, of a chunk, one frame on; more than one chunk, many compressions.
@pytest.mark.parametrize("length", [160, 319, 1280, 1281, 32000, 435200, 435200 + 160, 486400 + 40, 75 * RATE + 77])
def test_offline_equals_transformers(ready: Ready, length: int) -> None:
    samples = talk(length / RATE)
    ours = ready.run(samples)
    assert len(ours) == length // 160
    np.testing.assert_allclose(ours, offline(ready, samples), atol=2e-5, rtol=0)


def test_offline_with_lookback_equals_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "TINY_CONFIG", {**standin.TINY_CONFIG, "chunk_left_context": 7, "chunk_length": 60})
    other = make_ready(standin.tiny(), tmp_path / "assets")
    samples = talk(23.0)
    np.testing.assert_allclose(other.run(samples), offline(other, samples), atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("seconds", [0.05, 1.0, 1.045, 1.9, 42.0])
def test_streaming_equals_transformers_chunk_for_chunk(ready: Ready, mode: str, seconds: float) -> None:
    if seconds > 10 and mode == "ultra_low_latency":
        seconds = 23.0  # until the FIFO queue was full; the longer ones until the speaker cache was
    samples = talk(seconds)
    theirs = streamed(ready, samples, mode)
    diarizer = Diarizer(ready.program, ready.assets, mode)
    ours = diarizer.feed(samples) + diarizer.finish()
    assert [len(block) for block in ours] == [len(block) for block in theirs]
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(theirs), atol=2e-5, rtol=0)


@pytest.mark.parametrize("extra", [-1, 0, 1, 103, 104, 159, 160])
def test_the_end_of_a_stream_is_where_transformers_puts_it(ready: Ready, extra: int) -> None:
    """Around the length at which the second chunk is complete."""
    samples = talk(3.0)[: 22 * 1280 + 144 + extra]
    ours = Diarizer(ready.program, ready.assets, "low_latency")
    blocks = ours.feed(samples) + ours.finish()
    theirs = streamed(ready, samples, "low_latency")
    assert [len(block) for block in blocks] == [len(block) for block in theirs]
    np.testing.assert_allclose(np.concatenate(blocks), np.concatenate(theirs), atol=2e-5, rtol=0)


@pytest.mark.parametrize("length", [1, 159, 160, 400, 16001])
def test_features_equal_the_feature_extractor(ready: Ready, length: int) -> None:
    meta, samples = ready.bundle.metadata, talk(1.2)[:length]
    mel = LogMel(meta, np.load(ready.assets / "window.npy"), np.load(ready.assets / "mel_filters.npy"))
    for at in range(0, length, 77):
        mel.push(samples[at : at + 77])
    theirs = ready.processor(samples, sampling_rate=RATE)["input_features"][0, : length // 160].numpy()
    np.testing.assert_allclose(mel.take(mel.total), theirs, atol=2e-4, rtol=0)


# the speaker cache


@pytest.mark.parametrize("levels", [None, 1, 8], ids=["distinct", "many ties", "some ties"])
@pytest.mark.parametrize(("fifo", "period", "seed"), [(40, 300, 0), (264, 222, 1), (264, 222, 2)])
def test_speaker_cache_is_transformers_to_the_bit(fifo: int, period: int, seed: int, levels: int | None) -> None:
    config = Nemotron3DiarizationStreamingConfig()
    rng = np.random.default_rng(seed)
    silence = rng.standard_normal(16).astype(np.float32)
    theirs = Nemotron3DiarizationSpeakerCache(config, fifo, period)
    ours = SpeakerCache(config.to_dict(), silence, fifo, period, 8, 8)
    steps = 6 if fifo == 40 else 70
    for step in range(steps):
        chunk = 340 if fifo == 40 else int(rng.integers(1, 20))
        lookahead, lookback = int(rng.integers(0, 5)), int(rng.integers(0, 3)) if step else 0
        embeds = rng.standard_normal((lookback + chunk + lookahead, 16)).astype(np.float32)
        context = theirs.get_embeds(torch.from_numpy(embeds)[None])[0].numpy()
        np.testing.assert_array_equal(ours.context(), context)
        embeds = np.concatenate([context, embeds])
        logits = (rng.standard_normal((8 * len(embeds), 8)) * rng.choice([1, 3, 8], 8) - 1).astype(np.float32)
        if levels is not None:
            logits = np.repeat(np.rint(logits[::8] * levels) / np.float32(levels), 8, axis=0)
        valid = len(embeds) - int(rng.integers(0, 2))
        given = torch.from_numpy(logits)
        mask = torch.arange(len(embeds))[None] < valid
        theirs.update(torch.from_numpy(embeds)[None], given[None], torch.from_numpy(silence), chunk, mask, lookback)
        ours.update(embeds, given.sigmoid().numpy(), chunk, valid, lookback)
        assert theirs.embeds is not None and theirs.probs is not None
        np.testing.assert_array_equal(ours.embeds, theirs.embeds[0, : theirs.num_cache_frames].numpy())
        np.testing.assert_array_equal(ours.probs, theirs.probs[0, : theirs.num_cache_frames].numpy())
    assert theirs.is_compressed and ours.compressed


@pytest.mark.parametrize("seed", range(40))
def test_top_indices_keep_what_torch_keeps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(3, 600))
    count = max(size // 70, 1) if seed % 4 == 0 else int(rng.integers(1, size))
    values = rng.integers(0, int(rng.integers(2, 30)), size).astype(np.float32)
    theirs = torch.topk(torch.from_numpy(values), count, sorted=False)[1]
    assert set(top_indices(values, count).tolist()) == set(theirs.tolist())


# how the audio is fed, silence, ends


@pytest.mark.parametrize("mode", MODES)
def test_s1_results_do_not_depend_on_the_feed(ready: Ready, mode: str) -> None:
    samples = talk(29.0 if mode == "offline" else 4.0)
    whole = ready.run(samples, mode)
    for size in (320, 8960, 4999):  # 20 ms, 560 ms, neither
        np.testing.assert_array_equal(ready.run(samples, mode, size), whole)
    assert len(whole) == len(samples) // 160


@pytest.mark.parametrize("mode", MODES)
def test_s1_one_chunk_and_one_frame_is_flushed(ready: Ready, mode: str) -> None:
    diarizer = Diarizer(ready.program, ready.assets, mode)
    samples = talk(diarizer.latency + 0.01)
    assert len(ready.run(samples, mode)) == len(samples) // 160


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 159])
def test_s1_less_than_a_frame_has_no_rows(ready: Ready, mode: str, length: int) -> None:
    assert ready.run(np.full(length, 0.1, np.float32), mode).shape == (0, 8)


@pytest.mark.parametrize("mode", MODES)
def test_s1_silence_has_no_segments(ready: Ready, mode: str) -> None:
    probs = ready.run(np.zeros(3 * RATE, np.float32), mode)
    segmenter = Segmenter(8, 0.01, Decision())
    assert len(probs) == 300 and segmenter.push(probs) + segmenter.finish(3.0) == []


def test_a_stream_of_any_length_holds_a_bounded_amount(ready: Ready) -> None:
    """A quarter of an hour: what is kept between calls is a chunk, the cache and the queue, and no more."""

    class Noise:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            count = arrays[0].shape[1]
            if method == "stack":
                return [rng.standard_normal((1, count, 64), dtype=np.float32)]
            return [rng.random((1, 8 * count, 8), dtype=np.float32)]

    rng = np.random.default_rng(0)
    diarizer = Diarizer(Noise(), ready.assets)
    held = []
    for _ in range(90):
        diarizer.feed(0.1 * rng.standard_normal(10 * RATE, dtype=np.float32))
        held.append(len(pickle.dumps({k: v for k, v in vars(diarizer).items() if k != "_program"})))
    assert max(held) < 1.1 * max(held[:18])


def test_the_stand_in_hears_speakers_and_the_cache_is_compressed(ready: Ready) -> None:
    probs = ready.run(talk(60.0))
    assert 0.05 < (probs > 0.5).any(axis=1).mean() < 0.95


def test_samples_that_are_not_finite_are_refused(ready: Ready) -> None:
    for value in (np.nan, np.inf):
        samples = np.zeros(1000, np.float32)
        samples[800] = value
        with pytest.raises(UserError, match=r"not a finite number, at 0\.050 s"):
            Diarizer(ready.program, ready.assets).feed(samples)


def test_unknown_mode_lists_those_there_are(ready: Ready) -> None:
    with pytest.raises(UserError, match=", ".join(MODES)):
        Diarizer(ready.program, ready.assets, "none")


def test_runner_works_without_torch(ready: Ready) -> None:
    """In a process where torch, transformers and executorch cannot be imported."""
    code = """
import importlib
import sys
for name in ("torch", "transformers", "executorch"):
    sys.modules[name] = None
import numpy as np
from pathlib import Path
import recipes.nemotron_diarization, recipes.nemotron_diarization.session
from recipes.nemotron_diarization.runner import Diarizer
class Fake:
    def run(self, method, *arrays):
        if method == "stack":
            return [arrays[0].mean((2, 3), keepdims=True)[..., 0].repeat(64, 2)]
        return [np.full((1, 8 * arrays[0].shape[1], 8), 0.75, np.float32)]
for mode in ("offline", "low_latency"):
    diarizer = Diarizer(Fake(), Path(sys.argv[1]), mode)
    blocks = diarizer.feed(np.ones(60 * 16000, np.float32)) + diarizer.finish()
    print(sum(map(len, blocks)))
"""
    run = [sys.executable, "-c", code, str(ready.assets)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6000", "6000"]


# the methods


def with_attention(kind: str) -> Callable[[ExportRequest], Bundle]:
    def build(request: ExportRequest) -> Bundle:
        source = standin.tiny()
        source.model.set_attn_implementation(kind)
        return make_bundle(source)

    return build


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model for WebGPU: one partition a method, nothing outside."""
    path = tmp_path_factory.mktemp("exported") / "nemotron.pte"
    report = export(RECIPE, ExportRequest("webgpu", "tiny"), path)
    assert {(row.partitions, row.undelegated) for row in report.methods.values()} == {(1, 0)}
    return path


def check_all(path: Path, request: ExportRequest, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every row of the accuracy check, over shorter recordings; the names of the rows."""
    monkeypatch.setattr(checks, "SECONDS", 30.0)
    monkeypatch.setattr(checks, "STREAM_SECONDS", 2.0)
    with Program.load(path) as program:
        outcomes = {row.name: compare(row) for row in RECIPE.check(program, request)}
    assert all(outcome.passed for outcome in outcomes.values()), outcomes
    return set(outcomes)


def test_d1_n2_every_length_and_nothing_to_attend_to(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longest, short, shortest, long, with padding of other frames."""
    names = check_all(exported, ExportRequest("webgpu", "tiny"), monkeypatch)
    assert {"encode[688 of 688].probabilities", "encode[0 of 1].probabilities", "offline[30 s].decisions"} <= names


def test_d3_a_first_chunk_has_no_cache_and_no_queue(ready: Ready, exported: Path) -> None:
    with Program.load(exported) as program:
        diarizer = Diarizer(program, ready.assets, "ultra_low_latency")
        assert diarizer._cache.context().shape == (0, 64)
        probs = np.concatenate(diarizer.feed(talk(0.4)) + diarizer.finish())
    np.testing.assert_allclose(probs, ready.run(talk(0.4), "ultra_low_latency"), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype", "mode"),
    [
        ("portable", "fp32", "none"),
        *(("xnnpack", "fp32", mode) for mode in RECIPE.modes("xnnpack")),
        *(("webgpu", "fp32", mode) for mode in RECIPE.modes("webgpu")[1:]),
        ("webgpu", "fp16", "none"),
    ],
)
def test_every_backend_and_mode(
    backend: str, dtype: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(RECIPE, backend, weights="tiny", dtype=dtype, qlinear=mode)
    check_all(export(RECIPE, request, tmp_path / "nemotron.pte").path, request, monkeypatch)


def test_eager_attention_is_one_partition_too(ready: Ready, tmp_path: Path) -> None:
    request = ExportRequest("webgpu", "tiny")
    report = export(replace(RECIPE, build=with_attention("eager")), request, tmp_path / "nemotron.pte")
    assert {(row.partitions, row.undelegated) for row in report.methods.values()} == {(1, 0)}
    embeds = np.random.default_rng(0).standard_normal((1, 48, 64)).astype(np.float32)
    with Program.load(report.path) as program:
        for lengths in ([48, 48], [33, 34], [1, 1]):
            given = np.array(lengths)
            (actual,), (expected,) = program.run("encode", embeds, given), ready.program.run("encode", embeds, given)
            keep = 8 * lengths[1]
            np.testing.assert_allclose(actual[:, :keep], expected[:, :keep], atol=1e-4, rtol=0)


def test_n2_a_fully_masked_call_attends_to_nothing(ready: Ready) -> None:
    """Every attention gives zeros, as torch's sdpa does, and never NaN."""
    embeds = np.random.default_rng(0).standard_normal((1, 16, 64)).astype(np.float32)
    (masked,) = ready.program.run("encode", embeds, np.array([0, 16]))
    method: Any = ready.bundle.methods["encode"].module
    with torch.no_grad():
        hidden = method.input_layer_norm(torch.from_numpy(embeds))
        for layer in method.layers:
            hidden = hidden + layer.self_attn.o_proj.bias
            hidden = hidden + layer.mlp(layer.layer_norm2(hidden))
        expected = torch.sigmoid(method.classifier(method.upsampler(method.proj(method.layer_norm(hidden)))))
    np.testing.assert_allclose(masked, expected.numpy(), atol=1e-5, rtol=0)


def test_n3b_gelu_is_exact(ready: Ready, exported: Path) -> None:
    """The model's activation is erf's, not tanh's, and is exported as it is."""
    layers: Any = ready.bundle.methods["encode"].module
    x = torch.linspace(-6, 6, 1001)
    exact = x.double() * 0.5 * (1 + torch.erf(x.double() / 2**0.5))
    assert (layers.layers[0].mlp.activation_fn(x) - exact).abs().max() < 1e-6
    (call,) = read_program(exported).methods["encode"].calls
    gelus = [node for node in from_blob(call.blob).nodes if node.op == "aten.gelu.default"]
    assert len(gelus) >= 2 and all(node.args.get("approximate", "none") == "none" for node in gelus)


def test_padding_and_masked_frames(ready: Ready) -> None:
    """Padding changes nothing; the upsampler equals the model's convolution at both ends."""
    embeds = np.random.default_rng(1).standard_normal((1, 32, 64)).astype(np.float32)
    lengths = np.array([19, 20])
    (long,), (short,) = (ready.program.run("encode", part, lengths) for part in (embeds, embeds[:, :20]))
    np.testing.assert_allclose(long[:, :160], short, atol=2e-5, rtol=0)
    hidden = torch.randn(1, 5, 128)
    method: Any = EncodeMethod(ready.model, 16)
    with torch.no_grad():
        torch.testing.assert_close(method.upsampler(hidden), ready.model.model.upsampler(hidden), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_check_of_eager_passes(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SECONDS", 30.0)
    monkeypatch.setattr(checks, "STREAM_SECONDS", 2.0)
    request = ExportRequest("portable", "tiny", dtype=dtype)
    outcomes = {row.name: compare(row) for row in RECIPE.check(EagerProgram(build_bundle(request)), request)}
    assert all(outcome.passed for outcome in outcomes.values()), outcomes
    assert ("offline[30 s].decisions" in outcomes) == (dtype == "fp32")


def test_declaration(ready: Ready) -> None:
    assert registry.load("nemotron-diarization") is RECIPE
    assert RECIPE.modes("webgpu") == ("none", "4w", "8w", "8da4w", "8da8w")
    assert "8da4w" in RECIPE.modes("xnnpack")
    assert tuple(ready.bundle.methods) == RECIPE.methods
    assert tolerances("webgpu", "fp32", "none")["recording"].atol == 1e-4
    assert all(bound.why for bounds in RECIPE.tolerances.values() for bound in bounds.values())
