"""pytest tests/ops/test_pointwise.py"""

import numpy as np
import pytest
import torch
from harness import check_op

SHAPES = [(1,), (7,), (2, 3), (5, 1, 11), ()]


@pytest.mark.parametrize("shape", SHAPES)
def test_add_broadcasts(shape):
    torch.manual_seed(0)
    check_op("aten.add.Tensor", torch.randn(*shape), torch.randn(3, *shape) if shape else torch.randn(4))
