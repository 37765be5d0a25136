"""Parts of transformers that several recipes export: fewer, larger operations than the models' own modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# WebGPU promises bindings of this size on every device; a bigger weight is stored in blocks of rows.
MAX_BYTES = 128 * 2**20


def fused_linear(*layers: nn.Linear) -> nn.Linear:
    """One linear layer whose outputs are those of `layers` side by side: one matrix product in place of several."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=layers[0].bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if layers[0].bias is not None:
        linear.bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]), requires_grad=False)
    return linear


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half RoPE. x `[1, S, heads, E]`, cos and sin `[S, 1, E]`."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


class Vocabulary(nn.Module):
    """The embedding and the output head: one table when they are tied, in blocks of rows of at most `MAX_BYTES`."""

    def __init__(self, embedding: Tensor, head: Tensor, max_bytes: int = MAX_BYTES):
        super().__init__()
        rows = max(1, max_bytes // (4 * embedding.shape[1]))
        blocks = -(-embedding.shape[0] // rows)
        # Of equal size, as far as they can be.
        self.rows = -(-embedding.shape[0] // blocks)
        tables: list[nn.Embedding] = []
        heads: list[nn.Linear] = []
        tied = embedding.data_ptr() == head.data_ptr()
        for table, out in zip(embedding.detach().split(self.rows), head.detach().split(self.rows), strict=True):
            # Clones: a view would be saved with all of its storage.
            weight = nn.Parameter(table if blocks == 1 else table.clone(), requires_grad=False)
            embed = nn.Embedding(table.shape[0], table.shape[1], device="meta")
            embed.weight = weight
            tables.append(embed)
            linear = nn.Linear(out.shape[1], out.shape[0], bias=False, device="meta")
            linear.weight = weight if tied else nn.Parameter(out.clone(), requires_grad=False)
            heads.append(linear)
        self.tables, self.heads = nn.ModuleList(tables), nn.ModuleList(heads)
        self._last = [len(head.weight) - 1 for head in heads]  # row of each block

    def embed(self, ids: Tensor) -> Tensor:
        """ids `[1, S]` int64 -> `[1, S, D]`."""
        x: Tensor = self.tables[0](ids.clamp(max=self.rows - 1) if len(self.tables) > 1 else ids)
        for block in range(1, len(self.tables)):
            local = ids - block * self.rows
            found = self.tables[block](local.clamp(0, self._last[block]))
            x = torch.where((local >= 0).unsqueeze(-1), found, x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden `[1, D]` -> `[1, V]`."""
        dtype = next(self.heads.parameters()).dtype
        parts = [head(hidden.to(dtype)) for head in self.heads]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
