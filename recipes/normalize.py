"""What a picture's bytes become before a model's first layer, as part of the exported program.

A picture goes to the program as it is, 8 bits a colour: a quarter of the bytes of floats, and no arithmetic on the
host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

RESCALE = 1 / 255  # image processors' own default


class Normalize(nn.Module):
    """(x rescale - mean) / std of each colour, as image processors do it in several roundings, with two:
    (x - mean / rescale) (rescale / std). So it is within float32's rounding of theirs, without a division.

    Stays in float32 when the rest of a model is in half precision.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], rescale: float = RESCALE):
        super().__init__()
        means, deviations = np.asarray(mean, np.float64), np.asarray(std, np.float64)
        self.offset = nn.Buffer(torch.from_numpy(means / rescale).float())
        self.factor = nn.Buffer(torch.from_numpy(rescale / deviations).float())

    def forward(self, picture: Tensor) -> Tensor:
        """uint8 `[N, H, W, 3]` -> `[N, 3, H, W]`, float32 (float64 in a float64 model)."""
        return ((picture.to(self.offset.dtype) - self.offset) * self.factor).permute(0, 3, 1, 2)
