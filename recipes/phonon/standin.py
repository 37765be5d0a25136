"""Stand-in checkpoints for machines that reach no hub: the model's structure on seeded weights. Not speech.

`synthetic` is the real 31M configuration with the codec's real decoder; `tiny` keeps every structure at a size
that exports in seconds. Both come with a tokenizer of the right size, a chat template and one voice, so that the
whole way from text to samples is the real one.

What the random weights are tuned for, and nothing else: samples that are finite and about as loud as speech (the
last convolution is scaled by a power of two), and an end of speech after a plausible time. The rule that ends
speech is the model's own; only the end-of-speech head is chosen so that its logit sits below the threshold
and crosses it now and then.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    GradiumPhononTTSConfig,
    GradiumPhononTTSForConditionalGeneration,
    PocketTTSAudioTokenizerConfig,
    PocketTTSAudioTokenizerModel,
    PreTrainedTokenizerFast,
)

from recipes.phonon.checkpoint import Checkpoint, ProcessorSettings

NOTICE = "SYNTHETIC WEIGHTS ({why}): the model has the right structure and size, but what it plays is not speech"
SEED = 20260901
VOICE_FRAMES = 63  # about 5 s of voice prompt
LOUDNESS = 0.1  # root mean square of the samples that the last convolution is scaled to, within a factor of 1.5
# Initial weights would make two parts invisible: the flow head hands its noise through, the codec's transformer adds
# 1%. With these gains every part counts, so that a fault in one shows in the samples.
FLOW_GAIN = 4.0
LAYER_SCALE = 0.3
TEMPERATURE = 0.7
EOS_THRESHOLD = -4.0  # the released checkpoints' value
EOS_LOGIT = (-12.0, 3.0)  # mean and spread over the frames of random prompts; texts differ by a few

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "<|audio_bos|>", "<|audio_prompt|>", "<|audio_latent|>")

# One audio placeholder for a voice, the text, and the first audio position, which closes the prompt.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- for item in message['content'] -%}
{%- if item['type'] == 'audio' -%}<|audio_prompt|>{%- else -%}{{ item['text'] | trim }}{%- endif -%}
{%- endfor -%}
<|audio_bos|>
{%- endfor -%}
"""

TINY_CONFIG: dict[str, Any] = {
    "vocab_size": 384,
    "initializer_range": 0.1,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "latent_dim": 8,
    "audio_prompt_dim": 24,
    "num_speakers_embedding_dim": 8,
    "duration_delta_embedding_dim": 16,
    "flow_head_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "latent_dim": 8,
        "condition_dim": 64,
        "frequency_embedding_size": 16,
    },
}
TINY_CODEC_CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "num_filters": 4,
    "upsample_groups": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "sliding_window": 40,
    "latent_dim": 8,
}


def synthetic(why: str) -> Checkpoint:
    """The real configuration on seeded weights; `why` is told to the user."""
    return _make({}, {}, VOICE_FRAMES, NOTICE.format(why=why))


def tiny() -> Checkpoint:
    """The smallest configuration that keeps every structure, for tests."""
    return _make(TINY_CONFIG, TINY_CODEC_CONFIG, 5, NOTICE.format(why="tiny, for tests"))


def _make(config: dict[str, Any], codec_config: dict[str, Any], voice_frames: int, notice: str) -> Checkpoint:
    codec_config = {"layer_scale_initial_scale": LAYER_SCALE, "encoder_config": None, **codec_config}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED)
        model = GradiumPhononTTSForConditionalGeneration(GradiumPhononTTSConfig(**config)).eval()
        codec = PocketTTSAudioTokenizerModel(PocketTTSAudioTokenizerConfig(**codec_config)).eval()
        model.model.bos_latent.normal_()
        for layer in (*model.flow_head.layers, model.flow_head.final_layer):
            layer.adaln_proj.weight.mul_(FLOW_GAIN)
        _balance_eos(model)
        voice = torch.randn(voice_frames, model.config.audio_prompt_dim)
        _scale_loudness(codec)
    model.generation_config = GenerationConfig(do_sample=True, temperature=TEMPERATURE, eos_threshold=EOS_THRESHOLD)
    return Checkpoint(
        model=model,
        codec=codec,
        tokenizer=make_tokenizer(model.config.vocab_size),
        chat_template=CHAT_TEMPLATE,
        processor=ProcessorSettings(),
        voices={"synthetic": voice.numpy()},
        is_speech=False,
        notices=(notice,),
    )


def _balance_eos(model: Any) -> None:
    """An end-of-speech head whose logit varies with the frames and not with the text.

    A random direction mostly tells texts apart: some would end at once and others never. What the hidden states of
    one prompt have in common is projected out of it, and the logit gets the mean and spread of `EOS_LOGIT`.
    """
    config = model.config
    prompts, frames = 24, 24
    ids = torch.randint(config.audio_latent_token_id + 1, config.vocab_size, (prompts, 1)).repeat(1, 8)
    ids = torch.cat((ids + torch.arange(8), torch.full((prompts, 1), config.audio_bos_token_id)), dim=1)
    ids = ids.clamp(max=config.vocab_size - 1)
    ids = torch.cat((ids, torch.full((prompts, frames), config.audio_latent_token_id)), dim=1)
    latents = torch.randn(prompts, frames, config.latent_dim)
    hidden = model.model(input_ids=ids, audio_latents=latents).last_hidden_state[:, -frames:]
    common = torch.linalg.svd(hidden.mean(1), full_matrices=False).Vh
    weight = torch.randn(config.hidden_size)
    weight -= common.T @ (common @ weight)
    logits = hidden @ weight
    mean, spread = EOS_LOGIT
    model.eos_head.weight.copy_((weight * spread / logits.std())[None])
    model.eos_head.bias.fill_(mean)


def _scale_loudness(codec: Any) -> None:
    """Scales the codec's last convolution so that latents of unit variance give samples of about `LOUDNESS`."""
    samples = codec.decode(torch.randn(1, 12, codec.config.latent_dim)).audio_values
    # A power of two: the same on every machine, whatever the last bits of the measurement.
    gain = 2.0 ** round(math.log2(LOUDNESS / samples.std().item()))
    last = codec.decoder.decoder_seanet.layers[-1].conv
    last.weight.mul_(gain)
    last.bias.mul_(gain)


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `vocab_size` entries that loses no text: short letter groups, then bytes.

    It cuts a text into the fewest pieces (all scores are equal), about three characters a token in English.
    """
    pieces = list(itertools.islice(_pieces(), vocab_size))
    model = models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always"), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIAL_TOKENS[0],
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[3],
        padding_side="left",
        extra_special_tokens={
            "audio_bos_token": SPECIAL_TOKENS[4],
            "audio_prompt_token": SPECIAL_TOKENS[5],
            "audio_latent_token": SPECIAL_TOKENS[6],
        },
    )


def _pieces() -> itertools.chain[str]:
    """The vocabulary in order, longer than any vocabulary asked for; no piece twice."""
    letters = "etaoinshrdlucmfwygpbvkqxjz"
    marks = [".", "!", "?", "...", ",", ";", ":", "'", '"', "-", "(", ")", "/", "%", "&", "+"]
    pairs = [a + b for a, b in itertools.product(letters, repeat=2)]
    return itertools.chain(
        SPECIAL_TOKENS,
        (f"<0x{byte:02X}>" for byte in range(256)),
        ["▁", *marks, *"0123456789", *letters, *letters.upper()],
        (f"▁{letter}" for letter in letters + letters.upper()),
        pairs,
        (f"▁{pair}" for pair in pairs),
        (a + b + c for a, b, c in itertools.product(letters, repeat=3)),
    )
