"""Phonon: both methods against transformers, the runner, the declaration, and an exported program.

Run: pytest tests/recipes/test_phonon.py
"""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phonon_support import Ready, reference_prompt

from recipes import recipe as registry
from recipes.eager import EagerProgram
from recipes.phonon import RECIPE, standin
from recipes.phonon.build import build
from recipes.phonon.codec import DecodeMethod
from recipes.phonon.modules import FrameMethod
from recipes.phonon.runner import Speaker
from recipes.recipe import ExportRequest, UserError
from zoo.check import compare

LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4

# the methods


@pytest.mark.parametrize("flow_type", ["lsd", "drifting"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_frame_equals_transformers(monkeypatch: pytest.MonkeyPatch, flow_type: str, kv_heads: int, steps: int) -> None:
    config = {**standin.TINY_CONFIG, "num_key_value_heads": kv_heads}
    config["flow_head_config"] = {**config["flow_head_config"], "flow_type": flow_type}
    monkeypatch.setattr(standin, "TINY_CONFIG", config)
    reference = standin.tiny().model
    method = FrameMethod(standin.tiny().model, 64, steps)
    torch.manual_seed(0)
    ids = torch.tensor([[5, 5, 5, 270, 31, 142, 4]])
    voice, noise = torch.randn(1, 3, 24), torch.randn(3, 1, 8)
    features = torch.zeros(1, 7, 32)
    features[:, :3, :24] = voice
    latents: list[torch.Tensor] = []
    with torch.no_grad():
        for step in range(3):
            position = torch.tensor([ids.shape[1] - features.shape[1]])
            latent, logit, following = method(ids[:, position.item() :], features, position, noise[step])
            history = torch.stack(latents, 1) if latents else None
            out = reference(input_ids=ids, audio_prompt_latents=voice, audio_latents=history)
            expected = reference.sample_latent(out.last_hidden_state[:, -1], noise[step], steps)
            torch.testing.assert_close(latent, expected, atol=2e-5, rtol=0)
            torch.testing.assert_close(logit, out.logits[:, -1], atol=1e-4, rtol=0)
            latents.append(latent)
            ids = torch.cat([ids, torch.tensor([[6]])], 1)
            features = torch.zeros(1, 1, 32)
            features[0, 0, 24:] = latent[0]
            assert torch.equal(following, features)


@pytest.mark.parametrize("pad_mode", ["constant", "replicate"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_decode_equals_offline_beyond_the_window(monkeypatch: pytest.MonkeyPatch, pad_mode: str, kv_heads: int) -> None:
    """20 frames are 320 positions, 8 windows of 40; then a second stream on a state that is not even finite."""
    config = {**standin.TINY_CODEC_CONFIG, "pad_mode": pad_mode, "num_key_value_heads": kv_heads}
    monkeypatch.setattr(standin, "TINY_CODEC_CONFIG", config)
    reference = standin.tiny()
    torch.manual_seed(0)
    mean, std = torch.randn(8), torch.rand(8) + 0.5
    method = DecodeMethod(standin.tiny().codec, mean, std, 64)
    latents = torch.randn(1, 20, 8)
    with torch.no_grad():
        offline = reference.codec.decode(latents * std + mean).audio_values
        for _ in range(2):
            streamed = [method(latents[:, frame], torch.tensor([frame])) for frame in range(20)]
            torch.testing.assert_close(torch.cat(streamed, -1), offline, atol=1e-5, rtol=0)
            for name, buffer in method.named_buffers():
                if name.endswith(("previous", "keys", "values")):
                    buffer.fill_(float("nan"))


def test_decode_of_the_real_window_wraps() -> None:
    """250 positions, the released codec's window, at tiny widths."""
    source = standin.tiny()
    config = {**standin.TINY_CODEC_CONFIG, "sliding_window": 250, "encoder_config": None}
    from transformers import PocketTTSAudioTokenizerConfig, PocketTTSAudioTokenizerModel

    codec = PocketTTSAudioTokenizerModel(PocketTTSAudioTokenizerConfig(**config)).eval()
    latents = torch.randn(1, 40, 8)
    with torch.no_grad():
        offline = codec.decode(latents).audio_values
        method = DecodeMethod(codec, source.model.latent_mean, source.model.latent_std, 64)
        streamed = torch.cat([method(latents[:, frame], torch.tensor([frame])) for frame in range(40)], -1)
    assert (streamed - offline).abs().max() <= 1e-5 * offline.abs().max().clamp(min=1)


# the runner


class Counting:
    """A program that counts its calls and can be told never to end speech."""

    def __init__(self, program: EagerProgram, logit: float | None = None):
        self.calls: list[str] = []
        self._program, self._logit = program, logit

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        self.calls.append(method)
        outputs = self._program.run(method, *arrays)
        if method == "frame" and self._logit is not None:
            outputs[1][:] = self._logit
        return outputs


def test_utterance_equals_transformers(ready: Ready, processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise through `generate` and the processor's `decode` gives the same waveform."""
    text, seed = "Hello, this is a test of speech.", 3
    ours = np.concatenate(list(ready.speaker().stream(text, seed=seed)))
    source = standin.tiny()
    voice = torch.from_numpy(source.voices["synthetic"])
    inputs = reference_prompt(processor, text, voice)
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(
        torch, "randn", lambda *size, **_: torch.from_numpy(rng.standard_normal(size, dtype=np.float32))
    )
    with torch.no_grad():
        out = source.model.generate(**inputs, return_dict_in_generate=True)
    monkeypatch.undo()
    theirs = processor.decode(out.audio_latents, out.audio_latents_mask)[0].numpy()
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_frames_come_one_by_one_and_runs_are_identical(ready: Ready) -> None:
    """T1: two calls a frame, each frame at once; long, short, long in one process: both long runs identical."""
    program = Counting(ready.program)
    speaker = Speaker(program, ready.assets, warn=lambda line: None)
    frames = speaker.stream(LONG, seed=1)
    first = next(frames)
    assert program.calls == ["frame", "decode"]
    assert first.shape == (1920,) and first.dtype == np.float32
    long = [first, *frames]
    assert len(program.calls) == 2 * len(long)
    short = list(speaker.stream("Yes.", seed=1))
    again = list(speaker.stream(LONG, seed=1))
    assert 0 < len(short) < len(long)
    assert b"".join(x.tobytes() for x in again) == b"".join(x.tobytes() for x in long)
    assert b"".join(x.tobytes() for x in speaker.stream(LONG, seed=2)) != b"".join(x.tobytes() for x in long)
    samples = np.concatenate(long)
    assert np.isfinite(samples).all() and 0.01 < samples.std() < 1


@pytest.mark.parametrize("size", [1, 3, 7])
def test_chunked_consumption_changes_nothing(ready: Ready, size: int) -> None:
    """T1: whole against chunks of 1, 3 and 7 frames, consumed with other work in between."""
    whole = np.concatenate(list(ready.speaker().stream("A short sentence.", seed=5)))
    frames = ready.speaker().stream("A short sentence.", seed=5)
    chunks: list[np.ndarray] = []
    while chunk := list(islice(frames, size)):
        chunks.append(np.concatenate(chunk))
    np.testing.assert_array_equal(np.concatenate(chunks), whole)


@pytest.mark.parametrize("text", ["Yes.", "12 345,6", "?!", "42"])
def test_t3_budget_stops_with_a_warning(ready: Ready, text: str) -> None:
    """T3: bounded, and the warning names the text."""
    warnings: list[str] = []
    speaker = Speaker(Counting(ready.program, logit=-100.0), ready.assets, warn=warnings.append)
    frames = list(speaker.stream(text))
    tokens = ready.frontend.prompt(text, 5).ids.shape[1] - 6
    assert len(frames) == int(np.ceil((tokens / 3 + 2) * 12.5))
    assert len(warnings) == 1 and repr(text) in warnings[0]


def test_warning_is_visible_by_default(ready: Ready, capsys: pytest.CaptureFixture[str]) -> None:
    list(Speaker(Counting(ready.program, logit=-100.0), ready.assets).stream("Yes."))
    captured = capsys.readouterr()
    assert "budget" in captured.err and captured.out == ""


def test_bad_arguments_are_one_line(ready: Ready) -> None:
    speaker = ready.speaker()
    with pytest.raises(UserError, match=r"unknown voice 'nobody': this model has synthetic"):
        speaker.stream("Hello", voice="nobody")
    with pytest.raises(UserError, match="seed"):
        speaker.stream("Hello", seed=-1)
    for temperature in (-1.0, float("nan")):
        with pytest.raises(UserError, match="temperature"):
            speaker.stream("Hello", temperature=temperature)


def test_zero_temperature_ignores_the_seed(ready: Ready) -> None:
    runs = [
        [frame.tobytes() for frame in ready.speaker(warn=lambda line: None).stream("Hello", seed=seed, temperature=0.0)]
        for seed in (1, 2)
    ]
    assert runs[0] == runs[1]


def test_samples_that_are_not_finite_are_refused(ready: Ready) -> None:
    class Broken:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            return [output * np.nan for output in ready.program.run(method, *arrays)]

    with pytest.raises(UserError, match="not finite"):
        list(Speaker(Broken(), ready.assets).stream("Hello"))


def test_runner_works_without_torch(ready: Ready) -> None:
    """In a process where torch, transformers and executorch cannot be imported."""
    code = """
import sys
for name in ("torch", "transformers", "executorch"):
    sys.modules[name] = None
import numpy as np
from pathlib import Path
from recipes.phonon.runner import Speaker
import recipes.phonon
class Fake:
    def run(self, method, *arrays):
        if method == "frame":
            return [arrays[3], np.zeros((1, 1), np.float32), np.zeros((1, 1, arrays[1].shape[2]), np.float32)]
        return [np.full((1, 1, 1920), 0.5, np.float32)]
frames = list(Speaker(Fake(), Path(sys.argv[1])).stream("Hello world, one two three."))
print(len(frames), frames[0][0], frames[0][119], frames[1][0])
"""
    run = [sys.executable, "-c", code, str(ready.assets)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    # 6 frames are ignored, the 7th ends the speech, 2 more follow; 0.5 fades in over 120 samples
    assert done.stdout.split() == ["9", "0.0", "0.5", "0.5"]


# declaration, export


def test_declaration() -> None:
    assert registry.load("phonon") is RECIPE
    assert RECIPE.modes("webgpu") == ("none", "4w", "8w", "8da4w", "8da8w")
    assert RECIPE.modes("xnnpack") == ("none", "8da4w", "8da8w")
    assert RECIPE.modes("cuda") == RECIPE.modes("mlx") == ("none", "4w", "8w")
    assert all(bound.why for bounds in RECIPE.tolerances.values() for bound in bounds.values())
    assert RECIPE.tolerances["webgpu", "fp32", "none"]["utterance"].rtol == 1e-3


def test_bundle_declares_its_methods(ready: Ready) -> None:
    assert tuple(ready.bundle.methods) == RECIPE.methods
    # state is shared by name between methods: none may meet
    names = [{name for name, _ in method.module.named_buffers()} for method in ready.bundle.methods.values()]
    assert not set.intersection(*names)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_check_of_eager_passes(dtype: str) -> None:
    request = ExportRequest("portable", "tiny", dtype=dtype)
    rows = RECIPE.check(EagerProgram(build(request)), request)
    outcomes = {row.name: compare(row) for row in rows}
    assert all(outcome.passed for outcome in outcomes.values()), outcomes
    assert ("utterance.samples" in outcomes) == (dtype == "fp32")


def test_check_sees_a_stale_cache() -> None:
    """A program that forgets its cache between calls, as one whose state is not kept would."""
    request = ExportRequest("portable", "tiny")
    program = EagerProgram(build(request))

    class Forgetful:
        def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
            if method == "frame":
                for name, buffer in program._methods["frame"].named_buffers():
                    if name.endswith(("keys", "values")):
                        buffer.zero_()
            return program.run(method, *arrays)

    failed = {row.name for row in RECIPE.check(Forgetful(), request) if not compare(row).passed}
    assert {"frame[7].latent", "frame[7].eos_logit", "utterance.samples"} <= failed


def test_exported_program_runs_at_every_length(tmp_path: Path) -> None:
    """Export, lowering and ExecuTorch's own kernels: the check's lengths 1, 2, 7, 50 and the longest, and a run."""
    from zoo.export import export
    from zoo.program import Program

    request = ExportRequest("portable", "tiny")
    report = export(RECIPE, request, tmp_path / "phonon.pte")
    with Program.load(report.path) as program:
        for row in RECIPE.check(program, request):
            outcome = compare(row)
            assert outcome.passed, (row.name, outcome)
        speaker = Speaker(program, tmp_path / "phonon.assets")
        assert np.concatenate(list(speaker.stream("Hello there."))).std() > 0.01


@pytest.mark.slow
def test_synthetic_is_the_real_configuration() -> None:
    source = standin.synthetic("test")
    config = source.model.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (768, 6, 4001)
    assert source.codec.config.hidden_size == 512 and len(source.tokenizer) == 4001
    request = ExportRequest("portable", "synthetic")
    rows = RECIPE.check(EagerProgram(build(request)), request)
    assert all(compare(row).passed for row in rows)
