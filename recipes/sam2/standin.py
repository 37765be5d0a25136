"""Stand-in checkpoints for machines that reach no hub: the model's structure on seeded weights. No useful masks.

`synthetic` is a real configuration; `tiny` keeps every structure at a size that exports in seconds. Weights are scaled
so that every layer counts, masks have an inside and an outside that depend on picture and prompt, and the predicted IoU
lie neither at 0 nor at 1: a fault in one part shows.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Sam2Config, Sam2Model

from recipes.sam2.checkpoint import Checkpoint

NOTICE = "SYNTHETIC WEIGHTS ({why}): the model has the right structure and size, but its masks follow no object"
# Parameters that are values, not weights of a layer.
_LEARNED = (
    "token.weight", "tokens.weight", "point_embed.weight", "no_mask_embed.weight", "pos_embed", "pos_embed_window",
    "no_memory_embedding",
)  # fmt: skip
SEED = 20260901

# Meta's published configurations of SAM 2.1: what differs between the sizes.
_WIDTHS = {"tiny": 96, "small": 96, "base-plus": 112, "large": 144}
_HEADS = {"tiny": 1, "small": 1, "base-plus": 2, "large": 2}
_BLOCKS = {"tiny": [1, 2, 7, 2], "small": [1, 2, 11, 2], "base-plus": [2, 3, 16, 3], "large": [2, 6, 36, 4]}
_GLOBAL = {"tiny": [5, 7, 9], "small": [7, 10, 13], "base-plus": [12, 16, 20], "large": [23, 33, 43]}
_WINDOWS = {"large": [8, 4, 16, 8]}
_BACKGROUND = {"base-plus": [14, 14]}


def config(size: str) -> dict[str, Any]:
    """The published configuration of `size`, as the arguments of `Sam2Config`."""
    width, heads = _WIDTHS[size], _HEADS[size]
    backbone = {
        "model_type": "sam2_hiera_det_model",
        "hidden_size": width,
        "num_attention_heads": heads,
        "blocks_per_stage": _BLOCKS[size],
        "embed_dim_per_stage": [width * 2**stage for stage in range(4)],
        "num_attention_heads_per_stage": [heads * 2**stage for stage in range(4)],
        "window_size_per_stage": _WINDOWS.get(size, [8, 4, 14, 7]),
        "window_positional_embedding_background_size": _BACKGROUND.get(size, [7, 7]),
        "global_attention_blocks": _GLOBAL[size],
    }
    channels = [width * 2**stage for stage in (3, 2, 1, 0)]
    return {"vision_config": {"backbone_config": backbone, "backbone_channel_list": channels}}


# Windows that divide a stage and windows that need padding, stages with and without a global block, as in the real
# ones; heads of 32 and 16 in the decoder, as there.
TINY_CONFIG: dict[str, Any] = {
    "vision_config": {
        "backbone_config": {
            "model_type": "sam2_hiera_det_model",
            "image_size": [128, 128],
            "hidden_size": 32,
            "num_attention_heads": 1,
            "blocks_per_stage": [1, 1, 2, 2],
            "embed_dim_per_stage": [32, 64, 96, 128],
            "num_attention_heads_per_stage": [1, 2, 3, 4],
            "window_size_per_stage": [8, 4, 6, 3],
            "window_positional_embedding_background_size": [7, 7],
            "global_attention_blocks": [3],
        },
        "backbone_channel_list": [128, 96, 64, 32],
        "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
        "fpn_hidden_size": 64,
    },
    "prompt_encoder_config": {"hidden_size": 64, "image_size": 128},
    "mask_decoder_config": {"hidden_size": 64, "num_attention_heads": 2, "mlp_dim": 128, "iou_head_hidden_dim": 64},
}


def synthetic(size: str, why: str) -> Checkpoint:
    """The real configuration of `size` on seeded weights; `why` is told to the user."""
    model = make_model(config(size))
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    notice = f"{NOTICE.format(why=why)}; {millions:.0f} million weights"
    return Checkpoint(model, is_trained=False, notices=(notice,))


def tiny() -> Checkpoint:
    """The smallest configuration that keeps every structure, for tests."""
    return Checkpoint(make_model(TINY_CONFIG), is_trained=False, notices=(NOTICE.format(why="tiny, for tests"),))


def make_model(arguments: dict[str, Any]) -> Any:
    """A `Sam2Model` of this configuration on seeded weights."""
    # Not initialised by transformers: that draws every weight twice.
    with torch.device("meta"):
        model = Sam2Model._from_config(Sam2Config(**arguments), attn_implementation="sdpa").eval()
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                weight.uniform_(0.5, 1.5, generator=generator)
            elif weight.dim() == 1:
                # Few channels are normalised behind these: where all were near 0, rounding errors would be enlarged.
                few = "upscale_conv" in name or "mask_embed" in name
                weight.normal_(0, 0.7 if few else 0.1, generator=generator)
            elif name.endswith(_LEARNED):
                weight.normal_(0, 0.5, generator=generator)
            else:
                weight.normal_(0, _gain(name) * _fan_in(name, weight) ** -0.5, generator=generator)
        projection = model.prompt_encoder.shared_embedding.positional_embedding
        projection.normal_(0, 1, generator=generator)
        model.shared_image_embedding.positional_embedding.copy_(projection)
    return model


def _gain(name: str) -> float:
    # What attention compares stays small enough that no key takes all: there, rounding errors would grow as they do
    # in no trained model.
    return 0.4 if "q_proj" in name or "k_proj" in name or "neck" in name else 1.0


def _fan_in(name: str, weight: torch.Tensor) -> int:
    # A transposed convolution has its inputs first; with a stride of its width each output sees one tap.
    return weight.shape[0] if "upscale_conv" in name else weight[0].numel()
