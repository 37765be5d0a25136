"""What `zoo bench sam2` times: a picture encoded, a prompt answered, and a batch of prompts as a grid asks them (one by
one, where a program takes one).

Sides: the exported programs; `eager`, transformers' own model in float32 on the CPU; `eager-cuda`, the same on an
NVIDIA GPU. From numpy arrays to numpy arrays, but for what is kept of a picture: that stays on the GPU where a side can
leave it there, and the time ends when the GPU is done. A program gets a picture as bytes, transformers' model as the
floats that it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from recipes.normalize import Normalize
from recipes.recipe import ExportRequest, Runnable, UserError, Workload
from recipes.sam2 import checkpoint as checkpoints
from recipes.sam2.build import MAX_OBJECTS, make_metadata
from recipes.sam2.checkpoint import Checkpoint
from zoo.program import keep

SEED = 0


def workloads(programs: Mapping[str, Runnable], request: ExportRequest) -> list[Workload]:
    """A side that cannot run says why at its first call (`UserError`)."""
    checkpoint = checkpoints.load(request.weights)
    meta = make_metadata(checkpoint, request)
    size, side = meta["size"], meta["mask_size"]
    rng = np.random.default_rng(SEED)
    picture = rng.integers(0, 256, (1, size, size, 3), np.uint8)
    normalized = Normalize(checkpoint.mean, checkpoint.std)(torch.from_numpy(picture)).numpy()
    sides: dict[str, Runnable] = {
        **programs,
        "eager": Reference(checkpoint),
        "eager-cuda": Reference(checkpoint, "cuda"),
    }

    def encode(runnable: Runnable) -> None:
        if isinstance(runnable, Reference):
            runnable.keep(normalized)
        else:
            keep(runnable, "encode", picture).wait()

    encoded: set[str] = set()

    def prompt(name: str, runnable: Runnable, inputs: tuple[np.ndarray, ...]) -> None:
        if name not in encoded:
            encode(runnable)
            encoded.add(name)
        points, labels, *mask = inputs
        step = MAX_OBJECTS.get(name, 1) if name in programs else points.shape[1]
        for start in range(0, points.shape[1], step):
            runnable.run("prompt", points[:, start : start + step], labels[:, start : start + step], *mask)

    def inputs(objects: int) -> tuple[np.ndarray, ...]:
        points = (size * rng.random((1, objects, 1, 2))).astype(np.float32)
        labels = np.ones((1, objects, 1), np.int64)
        return points, labels, np.zeros((1, 1, side, side), np.float32), np.zeros(1, bool)

    found = [Workload("encode", "picture", 1, {name: functools.partial(encode, one) for name, one in sides.items()})]
    for objects in sorted({1, *(MAX_OBJECTS.get(name, 1) for name in programs)}):
        calls: dict[str, Callable[[], object]] = {
            name: functools.partial(prompt, name, one, inputs(objects)) for name, one in sides.items()
        }
        found.append(Workload(f"prompt, {objects} at once", "prompt", objects, calls))
    return found


class Reference:
    """transformers' `Sam2Model` with a program's methods, moved to its device at the first call."""

    def __init__(self, checkpoint: Checkpoint, device: str = "cpu"):
        self._checkpoint, self._device = checkpoint, device
        self._model: Any = None
        self._features: Any = None

    def _ready(self) -> Any:
        if self._device == "cuda" and not torch.cuda.is_available():
            raise UserError("PyTorch sees no CUDA device")
        if self._model is None:
            import copy

            model = self._checkpoint.model
            self._model = model if self._device == "cpu" else copy.deepcopy(model).to(self._device)
        return self._model

    def _moved(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def keep(self, pixels: np.ndarray) -> None:
        """Encodes pixels, float32 `[1, 3, size, size]`, for the prompts that follow; returns when that is done."""
        model = self._ready()
        with torch.no_grad():
            self._features = model.get_image_embeddings(self._moved(pixels))
        if self._device == "cuda":
            torch.cuda.synchronize()

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        assert method == "prompt", method
        model = self._ready()
        points, labels, mask, has_mask = (self._moved(array) for array in arrays)
        with torch.no_grad():
            answer = model(
                input_points=points,
                input_labels=labels,
                input_masks=mask if bool(has_mask) else None,
                image_embeddings=list(self._features),
                multimask_output=True,
            )
        return [part.cpu().numpy() for part in (answer.pred_masks, answer.iou_scores, answer.object_score_logits)]
