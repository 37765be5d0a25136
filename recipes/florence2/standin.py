"""Stand-in checkpoints for machines that reach no hub: the model's structure on seeded weights. Not trained.

`synthetic` is a real configuration; `tiny` keeps every structure at a size that exports in seconds. Both come with a
processor of the real one's form: a byte-level BPE tokenizer with the tasks' and places' tokens at the real ids (for
`synthetic`), and the picture settings. Weights are scaled so that every layer counts and the logits differ from token
to token: a fault in one part shows.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Florence2Config, Florence2ForConditionalGeneration, Florence2Processor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from recipes.florence2.checkpoint import Checkpoint

NOTICE = "SYNTHETIC WEIGHTS ({why}): the model has the right structure and size, but what it sees means nothing"
SEED = 20261120
LOGIT_STD = 1.0
_STRONG = ("q_proj", "k_proj", "out_proj", "fc2")
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # the first ids, in BART's order
LOCATIONS = [f"<loc_{bin_}>" for bin_ in range(1000)]
_MARKS = ["cap", "ncap", "dcap", "grounding", "seg"]
TASK_TOKENS = [
    "<od>", "</od>", "<ocr>", "</ocr>", *LOCATIONS,
    *itertools.chain.from_iterable((f"<{mark}>", f"</{mark}>") for mark in _MARKS),
    "<sep>", "<region_cap>", "</region_cap>", "<region_to_desciption>", "</region_to_desciption>",  # as published
    "<proposal>", "</proposal>", "<poly>", "</poly>", "<and>",
]  # fmt: skip
BANNED = ("it", "they", "the image", "image", "the", "a", "an", "a group", "other objects", "lots", "a set")
_TEXT: dict[str, Any] = {
    "model_type": "bart", "vocab_size": 51328, "max_position_embeddings": 1024, "scale_embedding": False,
}  # fmt: skip
IMAGE_TOKEN, TINY_IMAGE_TOKEN = 51289, 1400  # the last of the tokenizer; ids up to a multiple of 64 are padding
CONFIGS: dict[str, dict[str, Any]] = {
    "base": {
        "image_token_id": IMAGE_TOKEN,
        "text_config": {
            **_TEXT, "d_model": 768,
            "encoder_layers": 6, "encoder_ffn_dim": 3072, "encoder_attention_heads": 12,
            "decoder_layers": 6, "decoder_ffn_dim": 3072, "decoder_attention_heads": 12,
        },
        "vision_config": {"projection_dim": 768},
    },
    "large": {
        "image_token_id": IMAGE_TOKEN,
        "text_config": {
            **_TEXT, "d_model": 1024,
            "encoder_layers": 12, "encoder_ffn_dim": 4096, "encoder_attention_heads": 16,
            "decoder_layers": 12, "decoder_ffn_dim": 4096, "decoder_attention_heads": 16,
        },
        "vision_config": {
            "projection_dim": 1024, "embed_dim": [256, 512, 1024, 2048],
            "num_heads": [8, 16, 32, 64], "num_groups": [8, 16, 32, 64],
        },
    },
}  # fmt: skip
TINY_CONFIG: dict[str, Any] = {
    "image_token_id": TINY_IMAGE_TOKEN,
    "text_config": {
        "model_type": "bart", "vocab_size": 1408, "max_position_embeddings": 160, "scale_embedding": False,
        "d_model": 64,
        "encoder_layers": 2, "encoder_ffn_dim": 96, "encoder_attention_heads": 4,
        "decoder_layers": 2, "decoder_ffn_dim": 96, "decoder_attention_heads": 4,
    },
    "vision_config": {
        "projection_dim": 64, "embed_dim": [32, 64, 96, 128], "num_heads": [1, 2, 3, 4], "num_groups": [1, 2, 3, 4],
        "depths": [1, 1, 2, 1], "mlp_ratio": 2.0,
    },
}  # fmt: skip
SIDE, TINY_SIDE = 768, 96  # tiny: windows of 12 that fill 24 and 12 pixels, and are padded at 6 and 3
_GENERATION: dict[str, Any] = {
    "num_beams": 3, "early_stopping": True, "no_repeat_ngram_size": 3, "forced_bos_token_id": 0,
    "forced_eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


def synthetic(size: str, why: str) -> Checkpoint:
    """The real configuration of `size` on seeded weights; `why` is told to the user."""
    return _make(CONFIGS[size], SIDE, NOTICE.format(why=why))


def tiny() -> Checkpoint:
    """The smallest configuration that keeps every structure, for tests."""
    return _make(TINY_CONFIG, TINY_SIDE, NOTICE.format(why="tiny, for tests"))


def _make(settings: dict[str, Any], side: int, notice: str) -> Checkpoint:
    config: Any = Florence2Config(**settings)
    with torch.random.fork_rng(devices=[]):
        model = Florence2ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _fill(name, weight, generator)
    for name, value in _GENERATION.items():
        setattr(model.generation_config, name, value)
    processor = make_processor(config.image_token_id + 1, side)
    return Checkpoint(model, processor, is_trained=False, notices=(notice,))


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith("bias"):
        weight.normal_(0, 0.1, generator=generator)
    elif weight.dim() == 1:
        weight.uniform_(0.5, 1.5, generator=generator)
    elif "shared" in name or "lm_head" in name or "embed_positions" in name:
        weight.normal_(0, LOGIT_STD * weight.shape[1] ** -0.5, generator=generator)
    elif "embed" in name:  # positions in pictures
        weight.normal_(0, 0.3, generator=generator)
    else:
        # Attention that looks somewhere, and layers that count beside what they are added to: or every token would be
        # followed by itself, whatever was asked.
        gain = 2.0 if "language_model" in name and name.split(".")[-2] in _STRONG else 1.0
        weight.normal_(0, gain * weight[0].numel() ** -0.5, generator=generator)


def make_processor(tokens: int, side: int) -> Florence2Processor:
    """A processor whose tokenizer has `tokens` entries, the last for pictures, which are `side` pixels square."""
    pictures = CLIPImageProcessorPil(
        size={"height": side, "width": side},
        crop_size={"height": side, "width": side},
        do_center_crop=False,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
        image_seq_length=(side // 32) ** 2 + 1,
    )
    rules: dict[str, Any] = {
        kind: {}
        for kind in (
            "pure_text", "description_with_bboxes", "description_with_polygons", "polygons", "bboxes",
            "description_with_bboxes_or_polygons",
        )
    }  # fmt: skip
    rules["ocr"] = {"area_threshold": 0.0}
    rules["phrase_grounding"] = {"banned_grounding_tokens": list(BANNED)}
    return Florence2Processor(pictures, make_tokenizer(tokens), post_processor_config=rules)


def make_tokenizer(tokens: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: special tokens, every byte, groups of letters, `<mask>`, task tokens, `<image>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = tokens - len(SPECIAL_TOKENS) - 1 - len(TASK_TOKENS) - 1
    letters = "etaoinshrdlucmfwygpbvkqxjz"
    starts = ["Ġ", *letters]
    merges: list[tuple[str, str]] = []
    while len(merges) < pieces - len(alphabet):
        pairs = list(itertools.product(starts, letters))
        merges += pairs
        starts = [first + second for first, second in pairs]
    merges = merges[: pieces - len(alphabet)]
    words = [*SPECIAL_TOKENS, *alphabet, *(first + second for first, second in merges), "<mask>"]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in (*SPECIAL_TOKENS, "<mask>", *TASK_TOKENS, "<image>"):
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        extra_special_tokens={"image_token": "<image>"},
        clean_up_tokenization_spaces=False,
    )
