"""Phonon: both methods against transformers, the whole text side against its processor, and the runner.

Run: pytest tests/recipes/test_phonon.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes import recipe as registry
from recipes.phonon import RECIPE, checkpoint, standin
from recipes.phonon.build import build, make_bundle
from recipes.phonon.check import EagerProgram
from recipes.phonon.checkpoint import Checkpoint
from recipes.phonon.codec import DecodeMethod
from recipes.phonon.modules import FrameMethod
from recipes.phonon.runner import Speaker
from recipes.phonon.text import EndOfSpeech, TextFrontend
from recipes.recipe import Bundle, ExportRequest, UserError
from zoo.check import compare

LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4
TEXTS = [
    "Hello.",
    "Yes",
    "one two three four",
    "one two three four five",
    "Pi is 3.14159, roughly. Is it? Yes! No... maybe",
    "  spaces   inside and\tat the ends  ",
    "12345 67890",
    "?!...,;:",
    "Ünïcode, 漢字かな and emoji 🎧 are kept.",
    "a, b; c: d. " * 20,
    LONG,
    "one sentence with clauses, " * 12 + "and an end.",
    "v1.2.3 costs 5.00 or 6. 7 is next.",
]


@dataclass
class Ready:
    """A tiny bundle with its assets on disk, run in eager PyTorch."""

    bundle: Bundle
    assets: Path
    program: EagerProgram

    def speaker(self, **options: Any) -> Speaker:
        return Speaker(self.program, self.assets, **options)

    @property
    def frontend(self) -> TextFrontend:
        return TextFrontend(self.assets, self.bundle.metadata)


def write(bundle: Bundle, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    bundle.write_assets(folder)
    (folder / "recipe.json").write_text(json.dumps(bundle.metadata), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    bundle = build(ExportRequest("portable", "tiny"))
    return Ready(bundle, write(bundle, tmp_path_factory.mktemp("phonon") / "assets"), EagerProgram(bundle))


def make_processor(source: Checkpoint) -> Any:
    from transformers import PocketTTSFeatureExtractor, PocketTTSProcessor

    return PocketTTSProcessor(
        PocketTTSFeatureExtractor(), source.tokenizer, source.codec, chat_template=source.chat_template
    )


@pytest.fixture(scope="module")
def processor() -> Any:
    return make_processor(standin.tiny())


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
            latent, logit = method(ids[:, position.item() :], features, position, noise[step])
            history = torch.stack(latents, 1) if latents else None
            out = reference(input_ids=ids, audio_prompt_latents=voice, audio_latents=history)
            expected = reference.sample_latent(out.last_hidden_state[:, -1], noise[step], steps)
            torch.testing.assert_close(latent, expected, atol=2e-5, rtol=0)
            torch.testing.assert_close(logit, out.logits[:, -1], atol=1e-4, rtol=0)
            latents.append(latent)
            ids = torch.cat([ids, torch.tensor([[6]])], 1)
            features = torch.zeros(1, 1, 32)
            features[0, 0, 24:] = latent[0]


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


# the text side


def reference_prompt(processor: Any, text: str, voice: torch.Tensor) -> Any:
    conversation = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": text}]}]
    prompt = processor.apply_chat_template(conversation)
    return processor(text=prompt, audio_prompt_latents=[voice], return_tensors="pt")


@pytest.mark.parametrize("text", TEXTS)
def test_split_and_prompt_equal_the_processor(ready: Ready, processor: Any, text: str) -> None:
    frontend = ready.frontend
    chunks = processor.split_text(text, max_tokens=50)
    limit = ready.bundle.metadata["text_capacity"]
    if max(len(processor.tokenizer.encode(chunk, add_special_tokens=False)) for chunk in chunks) <= limit:
        assert frontend.split(text, has_voice=True) == chunks
    voice = torch.zeros(5, 24)
    for chunk in frontend.split(text, has_voice=True):
        inputs = reference_prompt(processor, chunk, voice)
        prompt = frontend.prompt(chunk, len(voice))
        np.testing.assert_array_equal(prompt.ids, inputs["input_ids"].numpy())
        assert prompt.frames_after_eos == int(inputs["frames_after_eos"])
        assert prompt.ids.shape[1] <= ready.bundle.metadata["max_prompt"]
        assert prompt.budget <= ready.bundle.metadata["max_frames"]


@pytest.mark.parametrize("text", [*TEXTS, "word " * 300, "x" * 400, "no marks at all " * 40 + "7" * 200])
def test_no_text_is_lost(ready: Ready, text: str) -> None:
    chunks = ready.frontend.split(text, has_voice=True)
    assert "".join("".join(chunks).split()) == "".join(text.split())


def test_long_sentences_are_cut_between_words(ready: Ready) -> None:
    text = "three short words " * 60
    chunks = ready.frontend.split(text, has_voice=True)
    assert len(chunks) > 1 and " ".join(chunks).split() == text.split()


@pytest.mark.parametrize("text", ["", "   ", "\n\t", "<|audio_bos|>"])
def test_empty_text_is_refused(ready: Ready, text: str) -> None:
    with pytest.raises(UserError, match="empty"):
        ready.speaker().stream(text)


def test_marks_of_the_model_are_refused(ready: Ready) -> None:
    with pytest.raises(UserError, match="marks"):
        ready.speaker().stream("say <|audio_<|audio_prompt|>prompt|> please")


def test_stand_in_tokenizer_has_the_right_size() -> None:
    tokenizer = standin.make_tokenizer(4001)
    assert len(tokenizer) == 4001
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)).strip() == text.strip()


@pytest.mark.parametrize("seed", range(20))
def test_end_of_speech_equals_transformers(seed: int) -> None:
    from transformers.models.pocket_tts.generation_pocket_tts import PocketTTSEosThresholdCriteria

    rng = np.random.default_rng(seed)
    after, min_frames = int(rng.integers(0, 5)), int(rng.integers(0, 8))
    theirs = PocketTTSEosThresholdCriteria(-4.0, after, min_frames)
    ours = EndOfSpeech(-4.0, after, min_frames)
    ids = torch.zeros(1, 1, dtype=torch.long)
    for logit in rng.normal(-5, 2, 40).astype(np.float32):
        assert ours.done(float(logit)) == bool(theirs(ids, torch.tensor([logit]))[0])


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
def test_budget_stops_with_a_warning(ready: Ready, text: str) -> None:
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
            return [arrays[3], np.zeros((1, 1), np.float32)]
        return [np.full((1, 1, 1920), 0.5, np.float32)]
frames = list(Speaker(Fake(), Path(sys.argv[1])).stream("Hello world, one two three."))
print(len(frames), frames[0][0], frames[0][119], frames[1][0])
"""
    run = [sys.executable, "-c", code, str(ready.assets)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    # 6 frames are ignored, the 7th ends the speech, 2 more follow; 0.5 fades in over 120 samples
    assert done.stdout.split() == ["9", "0.0", "0.5", "0.5"]


# weights


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


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_saved_checkpoint_speaks_the_same(saved: Path, ready: Ready, tmp_path: Path) -> None:
    loaded = checkpoint.load(str(saved))
    assert sorted(loaded.voices) == ["ada", "default", "zoe"]
    assert loaded.is_speech and not loaded.notices
    loaded.voices = standin.tiny().voices
    bundle = make_bundle(loaded)
    assert bundle.metadata | {"is_speech": False} == ready.bundle.metadata
    speaker = Speaker(EagerProgram(bundle), write(bundle, tmp_path / "assets"))
    ours, theirs = (np.concatenate(list(s.stream("Hello there."))) for s in (speaker, ready.speaker()))
    np.testing.assert_array_equal(ours, theirs)


def test_voices_of_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    bundle = build(ExportRequest("portable", str(saved)))
    assert bundle.metadata["default_voice"] == "default"
    assert bundle.metadata["max_prompt"] == 6 + 64 + 1
    speaker = Speaker(EagerProgram(bundle), write(bundle, tmp_path / "assets"), warn=lambda line: None)
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
    speaker = Speaker(EagerProgram(bundle), write(bundle, tmp_path / "assets"), warn=lambda line: None)
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
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError) as caught:
        checkpoint.load(str(copy))
    assert "\n" not in str(caught.value) and "copy" in str(caught.value)


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


def test_auto_falls_back_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(hub_id: str) -> Path:
        raise UserError(f"{hub_id} is not in the local cache and the hub gave: no network")

    monkeypatch.setattr(checkpoint, "fetch", offline)
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
        checkpoint.fetch("a/b")


# declaration, export


def test_declaration() -> None:
    assert registry.load("phonon") is RECIPE
    assert RECIPE.modes("webgpu") == ("none", "4w", "8da4w")
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
