"""Stand-in checkpoints for machines that reach no hub: the model's structure on seeded weights. Not language.

`synthetic` is a real configuration; `tiny` keeps every structure at a size that exports in seconds. Both come with a
byte-level BPE tokenizer of the right size and a chat template of the real one's form, so that the whole way from text
to text is the real one. Weights are scaled so that every layer counts and the logits differ from token to token: a
fault in one part shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from recipes.qwen3.checkpoint import Checkpoint

NOTICE = "SYNTHETIC WEIGHTS ({why}): the model has the right structure and size, but what it writes is not language"
SEED = 20260901
EMBEDDING_STD = 0.1  # logits of some units
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_TOKENS = ("<think>", "</think>")
PADDING = 293  # ids at the end of the real vocabulary that are no piece of text: special, added and unused ones

# The real template's form: turns between marks, thoughts of earlier answers left out, and none asked for when
# `enable_thinking` is false.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

_COMMON: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "0.6B": {
        **_COMMON,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "1.7B": {
        **_COMMON,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4B": {
        **_COMMON,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
TINY_CONFIG: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 576,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # heads x head_dim is not the hidden size, as in the real 0.6B and 4B
}
TINY_CONTEXT = 256


def synthetic(size: str, why: str) -> Checkpoint:
    """The real configuration of `size` on seeded weights; `why` is told to the user."""
    checkpoint = _make(CONFIGS[size], PADDING)
    billions = sum(weight.numel() for weight in checkpoint.model.parameters()) / 1e9
    checkpoint.notices = (f"{NOTICE.format(why=why)}; {billions:.2f} billion weights, {4 * billions:.1f} GB in fp32",)
    return checkpoint


def tiny() -> Checkpoint:
    """The smallest configuration that keeps every structure, for tests."""
    checkpoint = _make(TINY_CONFIG, 16)
    checkpoint.context = TINY_CONTEXT
    checkpoint.notices = (NOTICE.format(why="tiny, for tests"),)
    return checkpoint


def _make(config: dict[str, Any], padding: int) -> Checkpoint:
    configuration = Qwen3Config(**config)
    # Not initialised by transformers: that draws every weight twice.
    with torch.device("meta"):
        model = Qwen3ForCausalLM(configuration).eval()
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = Qwen3RotaryEmbedding(configuration)
    model.tie_weights()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                std = EMBEDDING_STD if "embed_tokens" in name else weight.shape[1] ** -0.5
                weight.normal_(0, std, generator=generator)
    tokenizer = make_tokenizer(configuration.vocab_size - padding)
    stops = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, eos_token_id=stops, pad_token_id=stops[1]
    )
    return Checkpoint(model, tokenizer, CHAT_TEMPLATE, is_language=False)


def make_tokenizer(pieces: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `pieces` entries, then the special ones: every byte, then groups of letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(_merges(), pieces - len(alphabet)))
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _merges() -> Iterator[tuple[str, str]]:
    """Merges in order, more than any vocabulary asks for: each joins a piece that is there already and a letter."""
    letters = "etaoinshrdlucmfwygpbvkqxjz"
    pieces = ["Ġ", *letters]
    while True:
        pairs = list(itertools.product(pieces, letters))
        yield from pairs
        pieces = [piece + letter for piece, letter in pairs]
