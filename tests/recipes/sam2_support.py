"""What the tests of SAM 2 share: a small picture, and pixels as transformers' model takes them."""

from __future__ import annotations

import numpy as np
import torch

from recipes.normalize import Normalize
from recipes.sam2.masks import as_pixels
from zoo.pictures import read_rgb, sample_path

PICTURE = read_rgb(sample_path("sample:chelsea"))[::2, ::2]
HEIGHT, WIDTH = PICTURE.shape[:2]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalized(picture: np.ndarray, size: int) -> np.ndarray:
    """float32 `[1, 3, size, size]`, what `encode` makes of a picture first."""
    values: np.ndarray = Normalize(MEAN, STD)(torch.from_numpy(as_pixels(picture, size).copy())).numpy()
    return values
