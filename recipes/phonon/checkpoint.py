"""From a weights argument to a checkpoint in memory: model, codec, tokenizer, chat template, voices.

`auto | synthetic | tiny | PATH | HUB_ID`. A PATH is a folder in the hub's layout, as `save_pretrained` of the model
and of its processor write it:

    config.json, model.safetensors, generation_config.json     the model
    tokenizer.json, tokenizer_config.json, chat_template.jinja the text side
    processor_config.json                                      its settings; names the audio tokenizer
    audio_tokenizer/                                           optional: the audio tokenizer beside the model
    voices/NAME.safetensors                                    one tensor [frames, audio_prompt_dim] each
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recipes.recipe import UserError
from zoo import weights as source

HUB_ID = "gradium/phonon-31m-en"
# What is fetched of a hub repository: those of this model also hold the files of other runtimes.
_HUB_FILES = (
    "*.json", "*.jinja", "model*.safetensors", "voices/*.safetensors", "*voice*.safetensors",
    "audio_tokenizer/*.json", "audio_tokenizer/*.safetensors",
)  # fmt: skip


@dataclass(frozen=True)
class ProcessorSettings:
    """The settings of `PocketTTSProcessor` that shape an utterance; the defaults are that class's."""

    short_text_max_words: int = 4
    frames_after_eos_short_text: int = 4
    frames_after_eos: int = 2
    fade_in_duration: float = 0.005  # seconds


@dataclass
class Checkpoint:
    """Everything that is loaded for one export. `voices`: name -> float32 `[frames, audio_prompt_dim]`."""

    model: Any  # GradiumPhononTTSForConditionalGeneration, float32
    codec: Any  # PocketTTSAudioTokenizerModel with its decoder, float32
    tokenizer: Any
    chat_template: str
    processor: ProcessorSettings
    voices: dict[str, np.ndarray]
    is_speech: bool = True
    notices: tuple[str, ...] = field(default=())


def load(weights: str) -> Checkpoint:
    """The checkpoint that `weights` names. Raises `UserError` for one that is missing, unreadable or damaged."""
    from recipes.phonon import standin

    loaded: Checkpoint = source.load_single(weights, HUB_ID, _HUB_FILES, load_folder, standin)
    return loaded


def load_folder(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`. Raises `UserError` with the file that is missing or damaged."""
    from transformers import AutoTokenizer, GradiumPhononTTSForConditionalGeneration, PocketTTSAudioTokenizerModel

    config = source.read_json(folder / "config.json")
    if config.get("model_type") != "gradium_phonon_tts":
        raise UserError(f"{folder / 'config.json'} describes a {config.get('model_type')!r} model, not Phonon")
    with source.readable(folder, "the model"):
        model = source.pretrained(GradiumPhononTTSForConditionalGeneration, folder)
    settings = source.read_json(folder / "processor_config.json")
    codec_source = _codec_source(folder, settings)
    with source.readable(codec_source, "the audio tokenizer"):
        # the encoder turns a recording into a voice and is not needed to speak
        codec = source.pretrained(PocketTTSAudioTokenizerModel, codec_source, encoder_config=None)
    if codec.config.latent_dim != model.config.latent_dim:
        raise UserError(
            f"{folder}: the audio tokenizer has latents of {codec.config.latent_dim}, the model of "
            f"{model.config.latent_dim}"
        )
    with source.readable(folder, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        for name in ("audio_prompt_token", "audio_latent_token", "audio_bos_token"):
            getattr(tokenizer, name)
    known = {name: settings[name] for name in ProcessorSettings.__dataclass_fields__ if name in settings}
    return Checkpoint(
        model=model,
        codec=codec,
        tokenizer=tokenizer,
        chat_template=_chat_template(folder, settings, tokenizer),
        processor=ProcessorSettings(**known),
        voices=_voices(folder, model.config.audio_prompt_dim),
    )


def _codec_source(folder: Path, settings: dict[str, Any]) -> Path | str:
    """Where the audio tokenizer is: beside the model, at the path that the processor names, or on the hub."""
    beside = folder / "audio_tokenizer"
    if beside.is_dir():
        return beside
    reference = settings.get("audio_tokenizer")
    name = reference.get("audio_tokenizer_name_or_path") if isinstance(reference, dict) else None
    if not name:
        raise UserError(f"{folder} has no audio tokenizer: no audio_tokenizer/ and none in processor_config.json")
    for candidate in (Path(name), folder / name):
        if candidate.is_dir():
            return candidate
    if Path(name).is_absolute():
        raise UserError(f"{folder}: its audio tokenizer should be at {name}, which does not exist")
    return source.fetch(str(name), _HUB_FILES)


def _chat_template(folder: Path, settings: dict[str, Any], tokenizer: Any) -> str:
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    template = template or getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        raise UserError(f"{folder} has no chat_template.jinja, which lays out the prompt")
    return template


def _voices(folder: Path, width: int) -> dict[str, np.ndarray]:
    """The shipped voices: every safetensors file in `voices/`, and `*voice*.safetensors` beside the model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    voices = {}
    for file in sorted([*folder.glob("voices/*.safetensors"), *folder.glob("*voice*.safetensors")]):
        try:
            tensors = load_file(file).values()
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read voice {file}: {source.first_line(error)}") from error
        rows = [tensor.squeeze(0) if tensor.dim() == 3 else tensor for tensor in tensors]
        rows = [row for row in rows if row.dim() == 2 and row.shape[1] == width and len(row)]
        if len(rows) != 1:
            raise UserError(f"{file} is not a voice of this model: no single tensor [frames, {width}] in it")
        name = re.sub(r"[-_.]?voice$", "", file.stem) or file.stem
        voices[name] = rows[0].float().numpy()
    return voices
