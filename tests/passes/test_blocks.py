"""pytest tests/passes/test_blocks.py: a transformer block with dynamic length is one delegate, and right at any length.

These two blocks were reported as cut into many pieces by another backend: the length mask, made of comparisons on
integers and bools, was refused, and so was whatever it touched.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.passes.programs import Method, check, lower

WIDTH, HEADS, LONGEST = 64, 4, 1024


class Block(nn.Module):
    """Pre-norm attention and MLP over `[1, S, WIDTH]`; positions from `length` on are hidden from attention."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
        size = q.shape[2]
        mask = (torch.arange(size) < length)[None, None, None, :]
        if self.form == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(1, 1, size, size))
        if self.form == "where":
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            scores = torch.where(mask, scores, torch.full_like(scores, -math.inf))
        elif self.form == "masked_fill":
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
            scores = scores + torch.where(mask, 0.0, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ v

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        size = x.shape[1]
        q, k, v = self.qkv(self.norm1(x)).view(1, size, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(self.attend(q, k, v, length).transpose(1, 2).reshape(1, size, WIDTH))
        return F.gelu(x + self.down(self.up(self.norm2(x))))


@pytest.mark.parametrize("form", ["sdpa", "where", "masked_fill", "additive"])
def test_one_delegate_at_any_length(form, tmp_path):
    torch.manual_seed(0)
    block = Block(form)
    size = torch.export.Dim("S", min=2, max=LONGEST)
    lowered = lower(
        tmp_path / "block.pte", Method(block, (torch.randn(1, 16, WIDTH), torch.tensor(9)), ({1: size}, None))
    )
    assert lowered.refusals == []
    assert lowered.delegates == {"forward": 1}
    assert lowered.outside == {"forward": []}
    calls = [
        (torch.randn(1, n, WIDTH), torch.tensor(length)) for n, length in ((2, 1), (16, 9), (333, 200), (1000, 1000))
    ]
    check(lowered, block, calls, atol=1e-5)
