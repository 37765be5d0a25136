"""Phonon as two exportable modules: `FrameMethod` (backbone + flow head) and `DecodeMethod` (codec, see codec.py).

Why this split. A call of `frame` yields one latent whatever its length, so one method with a dynamic length
serves the prompt (whose last position already gives the first frame) and every later step, and the KV cache
lives in one method, also on backends that do not share buffers between methods. The codec is a method of its
own because its shapes never change: a new prompt length costs a new plan for `frame` only. A frame of
80 ms is thus two calls; only the latent (128 bytes), the end-of-speech logit and the samples cross to the host.

The modules take their weights from a transformers `GradiumPhononTTSForConditionalGeneration` and compute the
same function with fewer operations. Shapes below: S positions of this call, C capacity of the cache,
D hidden size, H heads, L latent size, V voice latent size. Floats follow the model's dtype; inputs and outputs
stay float32 (or float64 in a float64 model), so a caller never depends on the model's precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.transformer import fused_linear, rotate


def scaled_rows(linear: nn.Linear, scale: Tensor | float) -> nn.Linear:
    """`linear` with its outputs multiplied by `scale` (one number, or one each), folded into its weights."""
    rows = torch.as_tensor(scale, dtype=linear.weight.dtype).detach().expand(linear.out_features)
    folded = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, dtype=linear.weight.dtype)
    folded.weight = nn.Parameter(linear.weight.detach() * rows[:, None], requires_grad=False)
    if linear.bias is not None:
        folded.bias = nn.Parameter(linear.bias.detach() * rows, requires_grad=False)
    return folded


def rotary_tables(rotary: Any, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[length, head_dim]` of every position, as transformers' rotary embedding computes them.

    A table is exact where a GPU's own `cos` of some thousand radians is not.
    """
    cos, sin = rotary(torch.zeros(1, dtype=dtype), torch.arange(length)[None])
    return cos[0].clone(), sin[0].clone()


class Attention(nn.Module):
    """Self-attention over a KV cache `[1, kv_heads, C, head_dim]` that stays with the backend."""

    def __init__(self, source: Any, capacity: int):
        super().__init__()
        self.head_dim: int = source.head_dim
        self.heads: int = source.q_proj.out_features // self.head_dim
        self.kv_heads: int = source.k_proj.out_features // self.head_dim
        self.scale: float = source.scaling
        self.qkv = fused_linear(source.q_proj, source.k_proj, source.v_proj)
        self.out = source.o_proj
        shape = (1, self.kv_heads, capacity, self.head_dim)
        self.keys = nn.Buffer(torch.zeros(shape, dtype=self.qkv.weight.dtype))
        self.values = nn.Buffer(torch.zeros(shape, dtype=self.qkv.weight.dtype))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x `[1, S, D]`, positions `[S]` int64, mask `[1, 1, S, C]` bool (True: attend) -> `[1, S, D]`."""
        qkv = self.qkv(x).view(1, x.shape[1], self.heads + 2 * self.kv_heads, self.head_dim)
        # queries and keys rotate together: one chain of operations for both
        rotated = rotate(qkv[:, :, : self.heads + self.kv_heads], cos, sin)
        query = rotated[:, :, : self.heads].transpose(1, 2)
        self.keys.index_copy_(2, positions, rotated[:, :, self.heads :].transpose(1, 2))
        self.values.index_copy_(2, positions, qkv[:, :, self.heads + self.kv_heads :].transpose(1, 2))
        attended = F.scaled_dot_product_attention(
            query,
            self.keys,
            self.values,
            attn_mask=mask,
            scale=self.scale,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.out(attended.transpose(1, 2).reshape(1, x.shape[1], self.heads * self.head_dim))


class Layer(nn.Module):
    """Pre-norm transformer layer of the backbone."""

    def __init__(self, source: Any, capacity: int):
        super().__init__()
        self.attention_norm = source.input_layernorm
        self.attention = Attention(source.self_attn, capacity)
        self.mlp_norm = source.post_attention_layernorm
        self.fc1 = source.mlp.fc1
        self.fc2 = source.mlp.fc2
        self.activation = source.mlp.activation_fn

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x `[1, S, D]` -> `[1, S, D]`."""
        x = x + self.attention(self.attention_norm(x), positions, mask, cos, sin)
        return x + self.fc2(self.activation(self.fc1(self.mlp_norm(x))))


class Backbone(nn.Module):
    """The causal transformer over voice, text and audio positions, with the embedding of all three kinds.

    The kinds meet in one lookup and one projection. Every position has a token id; the rows of the placeholder
    ids hold what transformers computes for them and what does not depend on the input: zero for a voice frame,
    the conditioning vector for an audio latent, the projected BOS latent plus that vector for the BOS. The rest
    is linear in the position's features `[voice latent | audio latent]`, zero where the position has none.
    """

    def __init__(self, model: Any, capacity: int):
        super().__init__()
        config, source = model.config, model.model
        table = source.embed_tokens.weight.detach().clone()
        condition = source.get_condition_embeds(table.device).detach()
        table[config.audio_prompt_token_id] = 0
        table[config.audio_latent_token_id] = condition
        table[config.audio_bos_token_id] = source.embed_audio_latents(source.bos_latent).detach()
        self.token_embedding = nn.Embedding.from_pretrained(table, freeze=True)
        projections = (source.audio_prompt_proj.weight.detach(), source.audio_latent_proj.weight.detach())
        weight = torch.cat(projections, dim=1)
        self.input_proj = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        self.input_proj.weight = nn.Parameter(weight, requires_grad=False)
        self.layers = nn.ModuleList([Layer(layer, capacity) for layer in source.layers])
        self.norm = source.norm
        cos, sin = rotary_tables(source.rotary_emb, capacity, table.dtype)
        self.cos, self.sin = nn.Buffer(cos), nn.Buffer(sin)
        self.slots = nn.Buffer(torch.arange(capacity))

    def forward(self, ids: Tensor, features: Tensor, position: Tensor) -> Tensor:
        """ids `[1, S]` int64, features `[1, S, V + L]`, position `[1]` int64 of the first -> last hidden `[1, D]`.

        Cache rows after the position are hidden by the mask, so position 0 starts a new sequence.
        """
        x = self.token_embedding(ids) + self.input_proj(features)
        positions = position + torch.arange(ids.shape[1], device=ids.device)
        mask = (self.slots <= positions.unsqueeze(1)).unsqueeze(0).unsqueeze(0)
        cos = F.embedding(positions, self.cos).unsqueeze(1)
        sin = F.embedding(positions, self.sin).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, positions, mask, cos, sin)
        return self.norm(x[:, -1])


class FlowHead(nn.Module):
    """The flow head with its sampler unrolled: noise to latent in `steps` calls (LSD) or one (drifting).

    The flow times are known at export, so their embeddings are constants; the modulations of all blocks and all
    steps are one matrix product, with the 1 of `1 + scale` in its bias; the step size is in the output projection;
    the norms, written out upstream for training, are ordinary layer norms.
    """

    def __init__(self, model: Any, steps: int):
        super().__init__()
        head = model.flow_head
        self.adds_velocity = model.config.flow_head_config.flow_type != "drifting"
        self.steps = steps if self.adds_velocity else 1
        self.width: int = head.input_proj.out_features
        self.input_proj = head.input_proj
        self.cond_proj = head.cond_proj
        self.activation = head.final_layer.act_fn
        self.blocks = nn.ModuleList([FlowBlock(layer) for layer in head.layers])
        self.modulation = fused_linear(*(layer.adaln_proj for layer in head.layers), head.final_layer.adaln_proj)
        for index in range(len(head.layers) + 1):  # shift, scale, gate of each block; shift, scale of the last layer
            first = (3 * index + 1) * self.width
            self.modulation.bias.data[first : first + self.width] += 1
        self.final_eps: float = head.final_layer.norm.eps
        self.output_proj = scaled_rows(head.final_layer.proj, 1 / self.steps)
        if self.adds_velocity:
            dtype = self.input_proj.weight.dtype
            starts = torch.arange(steps, dtype=dtype)[:, None] / steps
            ends = torch.arange(1, steps + 1, dtype=dtype)[:, None] / steps
            embedded = [embed(time) for embed, time in zip(head.timestep_embeddings, (starts, ends), strict=True)]
            self.times = nn.Buffer(torch.stack(embedded).mean(0).detach())  # [steps, width]

    def forward(self, condition: Tensor, noise: Tensor) -> Tensor:
        """condition `[1, D]`, noise `[1, L]` scaled by sqrt(temperature) -> latent `[1, L]`, normalised space."""
        condition = self.cond_proj(condition)
        if self.adds_velocity:
            condition = condition + self.times
        modulation = self.modulation(self.activation(condition))
        if not self.adds_velocity:
            return self.head(noise, modulation)
        latent = noise
        for step in range(self.steps):
            latent = latent + self.head(latent, modulation if self.steps == 1 else modulation[step : step + 1])
        return latent

    def head(self, latent: Tensor, modulation: Tensor) -> Tensor:
        """One call of the network. latent `[1, L]`, modulation `[1, (3 blocks + 2) width]` -> `[1, L]`."""
        parts = [modulation[:, first : first + self.width] for first in range(0, modulation.shape[1], self.width)]
        x = self.input_proj(latent)
        for index, block in enumerate(self.blocks):
            x = block(x, *parts[3 * index : 3 * index + 3])
        shift, scale = parts[-2:]
        return self.output_proj(F.layer_norm(x, (self.width,), eps=self.final_eps) * scale + shift)


class FlowBlock(nn.Module):
    """Residual block with adaptive layer norm; its modulation is computed outside."""

    def __init__(self, source: Any):
        super().__init__()
        norm = source.norm
        self.norm = nn.LayerNorm(norm.normalized_shape, eps=norm.eps, dtype=norm.weight.dtype)
        self.norm.load_state_dict(norm.state_dict())
        self.fc1, self.fc2 = source.fc1, source.fc2
        self.activation = source.act_fn

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        """All `[1, width]`."""
        return x + gate * self.fc2(self.activation(self.fc1(self.norm(x) * scale + shift)))


class FrameMethod(nn.Module):
    """Method `frame`: the positions of a prompt, or the previous latent, to the next latent."""

    def __init__(self, model: Any, capacity: int, flow_steps: int):
        super().__init__()
        self.backbone = Backbone(model, capacity)
        self.flow = FlowHead(model, flow_steps)
        self.eos_head = model.eos_head

    def forward(self, ids: Tensor, features: Tensor, position: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids `[1, S]` int64, features `[1, S, V + L]`, position `[1]` int64, noise `[1, L]` ->
        latent `[1, L]` (normalised), end-of-speech logit `[1, 1]`, both of the last position, and
        the features `[1, 1, V + L]` that the latent is in the next call, which needs no host for them."""
        dtype = self.eos_head.weight.dtype
        hidden = self.backbone(ids, features.to(dtype), position)
        latent = self.flow(hidden, noise.to(dtype)).to(noise.dtype)
        following = F.pad(latent.unsqueeze(1), (features.shape[2] - latent.shape[1], 0))
        return latent, self.eos_head(hidden).to(noise.dtype), following
