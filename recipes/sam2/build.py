"""`build`: a checkpoint to the exported methods and the metadata of the torch-free runner."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import Dim

from recipes.normalize import Normalize
from recipes.recipe import Bundle, ExportRequest, Method
from recipes.sam2 import MOST_POINTS
from recipes.sam2 import checkpoint as checkpoints
from recipes.sam2.checkpoint import Checkpoint
from recipes.sam2.modules import EncodeMethod, Features, PromptMethod, halve

# Prompts that one call answers: the largest map of 8 is 64 MiB, half of what every WebGPU device can bind. CPU backends
# plan the memory of the most that may come, so they take one.
MAX_OBJECTS = {"webgpu": 8}


def build(request: ExportRequest) -> Bundle:
    """The methods of the checkpoint that `request` names, in its precision."""
    return make_bundle(checkpoints.load(request.weights), request)


def make_bundle(checkpoint: Checkpoint, request: ExportRequest) -> Bundle:
    """The bundle of a checkpoint, which gives up its modules to it."""
    model = checkpoint.model.requires_grad_(False)
    metadata = make_metadata(checkpoint, request)
    features = Features(model.config.vision_config.fpn_hidden_size, metadata["size"] // 16)
    normalize = Normalize(checkpoint.mean, checkpoint.std)
    encode, prompt = EncodeMethod(model, features, normalize).eval(), PromptMethod(model, features).eval()
    if request.dtype == "fp16":
        halve(encode)
        halve(prompt)
    size, side = metadata["size"], metadata["mask_size"]
    most = metadata["max_objects"]
    objects = Dim("objects", min=1, max=most) if most > 1 else None
    count = Dim("points", min=1, max=MOST_POINTS)
    inputs = (
        torch.full((1, min(most, 3), 2, 2), size / 2),
        torch.ones(1, min(most, 3), 2, dtype=torch.int64),
        torch.zeros(1, 1, side, side),
        torch.zeros(1, dtype=torch.bool),
    )
    named = {2: count} if objects is None else {1: objects, 2: count}
    return Bundle(
        methods={
            "encode": Method(encode, (torch.zeros(1, size, size, 3, dtype=torch.uint8),)),
            "prompt": Method(prompt, inputs, (named, named, None, None)),
        },
        metadata=metadata,
        notices=checkpoint.notices,
    )


def make_metadata(checkpoint: Checkpoint, request: ExportRequest) -> dict[str, Any]:
    """What the runner must know, and the sizes that the program is exported for."""
    config = checkpoint.model.config
    decoder = config.mask_decoder_config
    size = config.prompt_encoder_config.image_size
    return {
        "size": size,
        "mask_size": size // 4,
        "max_points": MOST_POINTS,
        "max_objects": MAX_OBJECTS.get(request.backend, 1),
        "stability": {
            "use": decoder.dynamic_multimask_via_stability,
            "delta": decoder.dynamic_multimask_stability_delta,
            "threshold": decoder.dynamic_multimask_stability_thresh,
        },
        "is_trained": checkpoint.is_trained,
    }
