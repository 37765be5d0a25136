"""Qwen3 as one exportable module, `StepMethod`: positions of a text in, the logits of the last one out.

One method with a dynamic length serves the prompt and every step, so one set of caches and weights serves both. The
caches are buffers that stay with the backend; the position is data. Rows of a cache behind the last position are
hidden by the mask: position 0 starts a new text, and going back to an earlier position takes a text up from there.

The module takes its weights from a transformers `Qwen3ForCausalLM` and computes the same function with fewer
operations. Shapes below: S positions of this call, C capacity of the caches, D hidden size, H heads, K key-value heads,
E head size, V vocabulary. Three precisions may differ: linears and embedding (`half_linears`), caches, and all else
(norms, rotation, the sum that runs through the layers), which is never below float32: that sum grows beyond what
float16 holds in trained models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.transformer import MAX_BYTES, Vocabulary, fused_linear, rotate


class RmsNorm(nn.Module):
    """RMSNorm over the last axis, as one operator."""

    def __init__(self, source: Any):
        super().__init__()
        self.weight = nn.Parameter(source.weight.detach(), requires_grad=False)
        self.eps: float = source.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Self-attention with normed queries and keys over caches `[1, K, C, E]` that stay with the backend."""

    def __init__(self, source: Any, capacity: int, cache_dtype: torch.dtype):
        super().__init__()
        self.head_dim: int = source.head_dim
        self.heads: int = source.q_proj.out_features // self.head_dim
        self.kv_heads: int = source.k_proj.out_features // self.head_dim
        self.scale: float = source.scaling
        self.eps: float = source.q_norm.variance_epsilon
        self.qkv = fused_linear(source.q_proj, source.k_proj, source.v_proj)
        self.out = source.o_proj
        # The norms of queries and keys differ in their weights only: one norm without, then one row a head.
        rows = [source.q_norm.weight.detach()] * self.heads + [source.k_norm.weight.detach()] * self.kv_heads
        self.norm_weight = nn.Parameter(torch.stack(rows), requires_grad=False)
        shape = (1, self.kv_heads, capacity, self.head_dim)
        self.keys = nn.Buffer(torch.zeros(shape, dtype=cache_dtype))
        self.values = nn.Buffer(torch.zeros(shape, dtype=cache_dtype))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x `[1, S, D]`, positions `[S]` int64, mask `[1, 1, S, C]` bool (True: attend) -> `[1, S, D]`."""
        qkv = self.qkv(x.to(self.qkv.weight.dtype)).view(1, x.shape[1], self.heads + 2 * self.kv_heads, self.head_dim)
        # Queries and keys are normed and rotated together: one chain of operations for both.
        both = qkv[:, :, : self.heads + self.kv_heads].to(x.dtype)
        both = F.rms_norm(both, (self.head_dim,), None, self.eps) * self.norm_weight
        both = rotate(both, cos, sin).to(self.keys.dtype)
        query = both[:, :, : self.heads].transpose(1, 2)
        value = qkv[:, :, self.heads + self.kv_heads :].to(self.values.dtype)
        self.keys.index_copy_(2, positions, both[:, :, self.heads :].transpose(1, 2))
        self.values.index_copy_(2, positions, value.transpose(1, 2))
        attended = F.scaled_dot_product_attention(
            query,
            self.keys,
            self.values,
            attn_mask=mask,
            scale=self.scale,
            enable_gqa=self.heads != self.kv_heads,
        )
        attended = attended.transpose(1, 2).reshape(1, x.shape[1], self.heads * self.head_dim)
        return self.out(attended.to(self.out.weight.dtype)).to(x.dtype)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, source: Any):
        super().__init__()
        self.width: int = source.gate_proj.out_features
        # One product for both halves, unless their weight would be bigger than a binding may be.
        bytes_of_both = 8 * source.gate_proj.weight.numel()
        self.gate_up = fused_linear(source.gate_proj, source.up_proj) if bytes_of_both <= MAX_BYTES else None
        if self.gate_up is None:
            self.gate, self.up = source.gate_proj, source.up_proj
        self.down = source.down_proj
        self.activation = source.act_fn

    def forward(self, x: Tensor) -> Tensor:
        """x `[1, S, D]` -> `[1, S, D]`."""
        narrow = x.to(self.down.weight.dtype)
        if self.gate_up is None:
            gate, up = self.gate(narrow), self.up(narrow)
        else:
            both = self.gate_up(narrow)
            gate, up = both[..., : self.width], both[..., self.width :]
        return self.down(self.activation(gate) * up).to(x.dtype)


class Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, source: Any, capacity: int, cache_dtype: torch.dtype):
        super().__init__()
        self.attention_norm = RmsNorm(source.input_layernorm)
        self.attention = Attention(source.self_attn, capacity, cache_dtype)
        self.mlp_norm = RmsNorm(source.post_attention_layernorm)
        self.mlp = Mlp(source.mlp)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x `[1, S, D]` -> `[1, S, D]`."""
        x = x + self.attention(self.attention_norm(x), positions, mask, cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class StepMethod(nn.Module):
    """Method `step`. Takes the layers out of `model` one by one, so that no weight is in memory twice for long."""

    def __init__(self, model: Any, capacity: int, cache_dtype: torch.dtype):
        super().__init__()
        source = model.model
        self.vocabulary = Vocabulary(source.embed_tokens.weight, model.lm_head.weight)
        self.layers = nn.ModuleList()
        for index in range(len(source.layers)):
            self.layers.append(Layer(source.layers[index], capacity, cache_dtype))
            source.layers[index] = nn.Identity()
        self.norm = RmsNorm(source.norm)
        # A table is exact where a GPU's own `cos` of some thousand radians is not.
        cos, sin = source.rotary_emb(torch.zeros(1), torch.arange(capacity)[None])
        self.cos, self.sin = nn.Buffer(cos[0].clone()), nn.Buffer(sin[0].clone())
        self.slots = nn.Buffer(torch.arange(capacity))

    def half_linears(self) -> None:
        """Linears and embedding in float16."""
        halved: dict[Tensor, nn.Parameter] = {}  # a tied weight stays one
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                if module.weight not in halved:
                    halved[module.weight] = nn.Parameter(module.weight.detach().half(), requires_grad=False)
                module.weight = halved[module.weight]
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias = nn.Parameter(module.bias.detach().half(), requires_grad=False)

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        """ids `[1, S]` int64, position `[1]` int64 of the first -> logits `[1, V]` of the last."""
        x = self.vocabulary.embed(ids).to(self.cos.dtype)
        positions = position + torch.arange(ids.shape[1], device=ids.device)
        mask = (self.slots <= positions.unsqueeze(1)).unsqueeze(0).unsqueeze(0)
        cos = F.embedding(positions, self.cos).unsqueeze(1)
        sin = F.embedding(positions, self.sin).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, positions, mask, cos, sin)
        hidden = self.norm(x[:, -1])
        return self.vocabulary.logits(hidden).to(x.dtype)
