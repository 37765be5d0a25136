"""Hiera's blocks with windowed attention in as few passes over memory as the order of tokens allows.

The reference cuts the normalised picture into windows and puts it together again, each a copy of the whole. Here the
norm itself reads the picture window by window, and what attention adds is read back in the picture's order by the sum
with the residual: both are strided views of six axes, (rows of windows, rows, columns of windows, columns, …), which
cost nothing. Where queries are pooled, residual and result are in the order of windows and the second half of the block
works on such a view. Only pooled windows that stand over the border of the picture are put together by a copy.

No value of a block is larger than what every WebGPU device can bind: where one would be, its linear is split.

Shapes below: H, W tokens of the picture, w side of a window, n windows, C channels.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.recipe import UserError
from recipes.transformer import MAX_BYTES

ITEM_BYTES = 4  # float32; the same split in half precision


def part_of(linear: nn.Linear, rows: slice, columns: slice, bias: bool) -> nn.Linear:
    """A linear with these rows (outputs) and columns (inputs) of the weight."""
    weight = linear.weight.detach()[rows, columns].clone()
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=bias and linear.bias is not None, dtype=weight.dtype)
    part.weight = nn.Parameter(weight, requires_grad=False)
    if part.bias is not None:
        part.bias = nn.Parameter(linear.bias.detach()[rows].clone(), requires_grad=False)
    return part


class Mlp(nn.Module):
    """The two linears of a block; the hidden values in `parts` that are added up."""

    def __init__(self, source: Any, tokens: int):
        super().__init__()
        hidden = source.proj_in.out_features
        parts = min(-(-tokens * hidden * ITEM_BYTES // MAX_BYTES), hidden // 32)
        # multiples of 32, the group of 4-bit weights
        ends = [32 * round(hidden * index / parts / 32) for index in range(parts)] + [hidden]
        every = slice(None)
        spans = [slice(start, end) for start, end in itertools.pairwise(ends)]
        self.activation = source.activation
        self.wide = nn.ModuleList([part_of(source.proj_in, span, every, True) for span in spans])
        self.narrow = nn.ModuleList(
            [part_of(source.proj_out, every, span, index == 0) for index, span in enumerate(spans)]
        )

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        """`to` and what becomes of `x`."""
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            to = to + narrow(self.activation(wide(x)))
        return to


def pool(x: Tensor, stride: list[int]) -> Tensor:
    """The largest of each `stride` window of tokens; x `[n, h, w, C]`."""
    return F.max_pool2d(x.permute(0, 3, 1, 2), stride, stride).permute(0, 2, 3, 1)


def to_windows(x: Tensor, side: int) -> Tensor:
    """A picture `[1, H, W, C]` of whole windows as a view `[1, H/w, W/w, w, w, C]`."""
    _, height, width, channels = x.shape
    rows = x.view(1, height // side, side, width // side, side, channels)
    return rows.permute(0, 1, 3, 2, 4, 5)


def from_windows(x: Tensor) -> Tensor:
    """Windows `[1, H/w, W/w, w, w, C]` in the order of the picture, a view `[1, H/w, w, W/w, w, C]`."""
    return x.permute(0, 1, 3, 2, 4, 5)


class Block(nn.Module):
    """One block, the same function as transformers' `Sam2MultiScaleBlock` of which it takes the modules."""

    def __init__(self, source: Any, height: int, width: int):
        """`source` sees pictures of `height` × `width` tokens."""
        super().__init__()
        self.norm1, self.norm2, self.out = source.layer_norm1, source.layer_norm2, source.attn.proj
        self.heads: int = source.attn.num_attention_heads
        self.scale: float = source.attn.scale
        self.stride: list[int] | None = source.query_stride
        self.widen = source.proj if source.dim != source.dim_out else None
        self.window: int = source.window_size
        self.padding = (-height % self.window, -width % self.window) if self.window else (0, 0)
        tokens = (height + self.padding[0]) * (width + self.padding[1])
        qkv, wide = source.attn.qkv, source.attn.qkv.out_features
        parts = 3 if tokens * wide * ITEM_BYTES > MAX_BYTES else 1
        spans = [slice(wide * index // parts, wide * (index + 1) // parts) for index in range(parts)]
        self.qkv = nn.ModuleList([part_of(qkv, span, slice(None), True) for span in spans])
        self.mlp = Mlp(source.mlp, tokens // (1 if self.stride is None else self.stride[0] * self.stride[1]))
        sides = ((height, self.window), (width, self.window))
        if self.stride is not None and any(
            side % step for step, both in zip(self.stride, sides, strict=True) for side in both
        ):
            raise UserError(f"pooled windows of {self.window} in {height}×{width} tokens do not come out even")
        if any(self.padding):
            inside = F.pad(torch.ones(1, height, width, 1), (0, 0, 0, self.padding[1], 0, self.padding[0]))
            self.inside = nn.Buffer(to_windows(inside, self.window).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """x `[1, H, W, C]` -> the same, or `[1, H/2, W/2, C']` when queries are pooled."""
        height, width = x.shape[1:3]
        if self.window == 0:
            normed = self.norm1(x)
            added = self.attend(normed)
            x = added + (x if self.widen is None else self.residual(normed))
            return self.mlp.add(self.norm2(x), x)
        if any(self.padding):
            x = F.pad(x, (0, 0, 0, self.padding[1], 0, self.padding[0]))
        full = x.shape[1:3]
        normed = self.norm1(to_windows(x, self.window))
        if any(self.padding):
            normed = normed * self.inside  # what pads a picture is 0 after the norm
        grid = normed.shape[:3]
        normed = normed.flatten(0, 2)
        added = self.attend(normed)
        if self.widen is None:
            added = from_windows(added.view(*grid, *added.shape[1:]))
            x = (x.view(added.shape) + added).view(1, *full, -1)[:, :height, :width]
            return self.mlp.add(self.norm2(x), x)
        x = added + self.residual(normed)
        x = from_windows(x.view(*grid, *x.shape[1:]))
        down = (1, 1) if self.stride is None else self.stride
        shape = (1, full[0] // down[0], full[1] // down[1], x.shape[-1])
        if any(self.padding):
            x = x.reshape(shape)[:, : height // down[0], : width // down[1]]
            return self.mlp.add(self.norm2(x), x)
        return self.mlp.add(self.norm2(x), x).reshape(shape)

    def residual(self, normed: Tensor) -> Tensor:
        assert self.widen is not None
        x = self.widen(normed)
        return x if self.stride is None else pool(x, self.stride)

    def attend(self, x: Tensor) -> Tensor:
        """Attention within each of n pictures or windows; x `[n, h, w, C]` -> `[n, h, w, C']`, pooled with a stride."""
        count, height, width, _ = x.shape
        parts = [linear(x).view(count, height * width, 3 // len(self.qkv), self.heads, -1) for linear in self.qkv]
        query, key, value = (one for part in parts for one in part.unbind(2))
        if self.stride is not None:
            query = pool(query.reshape(count, height, width, -1), self.stride)
            height, width = query.shape[1:3]
            query = query.reshape(count, height * width, self.heads, -1)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, scale=self.scale)
        return self.out(mixed.transpose(1, 2).reshape(count, height, width, -1))
