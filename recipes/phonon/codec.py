"""Method `decode`: one latent to one frame of audio (80 ms), with the streaming state kept by the backend.

transformers streams only the key-value cache of the codec's transformer; here the convolutions stream too. Every
state is a row of previous values that is put before the new ones:

- a causal convolution keeps its last `(kernel - 1) * dilation` inputs;
- a transposed convolution (kernel = 2 x stride) keeps one input, and the padding cuts away the outputs that
  belong to the frame before and to the frame after;
- attention keeps the last `window - 1` keys and values. The row slides by one frame a call, which costs a copy
  of 0.5 MB beside the 60 MB of weights of a call and needs no wrapped index.

`frame` (int64 data) counts the frames of the stream. Frame 0 replaces every state by zeros through `where`, which
holds even for a state that is not finite, so any caller starts a stream over without another method.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.phonon.modules import rotary_tables, scaled_rows
from recipes.recipe import UserError
from recipes.transformer import fused_linear, rotate


class StreamConv1d(nn.Module):
    """Causal convolution (stride 1) of a stream."""

    def __init__(self, source: Any):
        super().__init__()
        conv = source.conv
        if not source.causal or conv.stride[0] != 1 or source.pad_mode not in ("constant", "replicate"):
            raise UserError("the codec streams causal convolutions of stride 1 with constant or replicate padding only")
        self.conv = conv
        self.replicates: bool = source.pad_mode == "replicate"
        self.padding: int = (conv.kernel_size[0] - 1) * conv.dilation[0]
        if self.padding:
            shape = (1, conv.in_channels, self.padding)
            self.previous = nn.Buffer(torch.zeros(shape, dtype=conv.weight.dtype))

    def forward(self, x: Tensor, running: Tensor, zero: Tensor) -> Tensor:
        """x `[1, channels, T]` -> `[1, out channels, T]`. running `[1]` bool: False at frame 0. zero `[1]`."""
        if not self.padding:
            return self.conv(x)
        start = x[..., :1] if self.replicates else zero
        x = torch.cat((torch.where(running, self.previous, start), x), dim=-1)
        self.previous.copy_(x[..., -self.padding :])
        return self.conv(x)


class StreamConvTranspose1d(nn.Module):
    """Causal transposed convolution (kernel = 2 x stride) of a stream."""

    def __init__(self, source: Any):
        super().__init__()
        conv = source.conv
        if source.padding_left or conv.kernel_size[0] != 2 * conv.stride[0]:
            raise UserError("the codec streams causal transposed convolutions with kernel = 2 x stride only")
        self.weight, self.bias = conv.weight, conv.bias
        self.stride: int = conv.stride[0]
        self.groups: int = conv.groups
        self.previous = nn.Buffer(torch.zeros((1, conv.in_channels, 1), dtype=conv.weight.dtype))

    def forward(self, x: Tensor, running: Tensor, zero: Tensor) -> Tensor:
        """x `[1, channels, T]` -> `[1, out channels, T * stride]`."""
        joined = torch.cat((torch.where(running, self.previous, zero), x), dim=-1)
        self.previous.copy_(x[..., -1:])
        return F.conv_transpose1d(
            joined, self.weight, self.bias, stride=self.stride, padding=self.stride, groups=self.groups
        )


class StreamAttention(nn.Module):
    """Sliding-window attention over the keys and values of this frame and the `window - 1` before."""

    def __init__(self, source: Any, window: int):
        super().__init__()
        self.head_dim: int = source.head_dim
        self.heads: int = source.num_heads
        self.kv_heads: int = source.num_key_value_heads
        self.scale: float = source.scaling
        self.qkv = fused_linear(source.q_proj, source.k_proj, source.v_proj)
        self.out = source.o_proj
        shape = (1, self.kv_heads, window - 1, self.head_dim)
        self.keys = nn.Buffer(torch.zeros(shape, dtype=self.qkv.weight.dtype))
        self.values = nn.Buffer(torch.zeros(shape, dtype=self.qkv.weight.dtype))

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, running: Tensor, zero: Tensor) -> Tensor:
        """x `[1, T, D]`, mask `[1, 1, T, window - 1 + T]` bool -> `[1, T, D]`."""
        length = x.shape[1]
        qkv = self.qkv(x).view(1, length, self.heads + 2 * self.kv_heads, self.head_dim)
        rotated = rotate(qkv[:, :, : self.heads + self.kv_heads], cos, sin)
        query = rotated[:, :, : self.heads].transpose(1, 2)
        new_keys = rotated[:, :, self.heads :].transpose(1, 2)
        new_values = qkv[:, :, self.heads + self.kv_heads :].transpose(1, 2)
        keys = torch.cat((torch.where(running, self.keys, zero), new_keys), dim=2)
        values = torch.cat((torch.where(running, self.values, zero), new_values), dim=2)
        self.keys.copy_(keys[:, :, length:])
        self.values.copy_(values[:, :, length:])
        attended = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=self.scale, enable_gqa=self.heads != self.kv_heads
        )
        return self.out(attended.transpose(1, 2).reshape(1, length, self.heads * self.head_dim))


class StreamLayer(nn.Module):
    """Pre-norm transformer layer of the codec; the layer scales are folded into the projections before them."""

    def __init__(self, source: Any, window: int):
        super().__init__()
        self.attention_norm = source.input_layernorm
        self.attention = StreamAttention(source.self_attn, window)
        self.attention.out = scaled_rows(source.self_attn.o_proj, source.self_attn_layer_scale.scale)
        self.mlp_norm = source.post_attention_layernorm
        self.fc1 = source.mlp.fc1
        self.fc2 = scaled_rows(source.mlp.fc2, source.mlp_layer_scale.scale)
        self.activation = source.mlp.activation_fn

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, running: Tensor, zero: Tensor) -> Tensor:
        """x `[1, T, D]` -> `[1, T, D]`."""
        x = x + self.attention(self.attention_norm(x), mask, cos, sin, running, zero)
        return x + self.fc2(self.activation(self.fc1(self.mlp_norm(x))))


class StreamResnetBlock(nn.Module):
    """Residual block of the SEANet decoder."""

    def __init__(self, source: Any):
        super().__init__()
        self.layers = nn.ModuleList(streaming(layer) for layer in source.block)
        self.shortcut = streaming(source.shortcut)

    def forward(self, x: Tensor, running: Tensor, zero: Tensor) -> Tensor:
        """x `[1, channels, T]` -> the same shape."""
        return apply(self.shortcut, x, running, zero) + run_all(self.layers, x, running, zero)


def streaming(layer: nn.Module) -> nn.Module:
    """The streaming form of a layer of transformers' SEANet decoder; layers without state as they are."""
    kinds = {
        "PocketTTSAudioTokenizerConv1d": StreamConv1d,
        "PocketTTSAudioTokenizerConvTranspose1d": StreamConvTranspose1d,
        "PocketTTSAudioTokenizerResnetBlock": StreamResnetBlock,
    }
    kind = kinds.get(type(layer).__name__)
    return kind(layer) if kind is not None else layer


def apply(layer: nn.Module, x: Tensor, running: Tensor, zero: Tensor) -> Tensor:
    """One layer, with the stream's flags where it takes them."""
    if isinstance(layer, StreamConv1d | StreamConvTranspose1d | StreamResnetBlock):
        return layer(x, running, zero)
    return layer(x)


def run_all(layers: nn.ModuleList, x: Tensor, running: Tensor, zero: Tensor) -> Tensor:
    """`layers` one after the other."""
    for layer in layers:
        x = apply(layer, x, running, zero)
    return x


class Codec(nn.Module):
    """The decoder of `PocketTTSAudioTokenizerModel`, one latent frame a call."""

    def __init__(self, codec: Any, latent_mean: Tensor, latent_std: Tensor, max_frames: int):
        super().__init__()
        decoder = codec.decoder
        weight = codec.latent_proj.weight.detach()[..., 0]
        # denormalisation is affine, so it is part of the projection that follows it
        self.input_proj = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
        mean, std = latent_mean.to(weight.dtype), latent_std.to(weight.dtype)
        self.input_proj.weight = nn.Parameter(weight * std, requires_grad=False)
        self.input_proj.bias = nn.Parameter(weight @ mean, requires_grad=False)
        self.upsample = StreamConvTranspose1d(decoder.upsample)
        window: int = codec.config.sliding_window
        self.stride: int = codec.config.latent_stride  # positions of the codec's transformer per frame
        self.past: int = window - 1
        self.layers = nn.ModuleList(StreamLayer(layer, window) for layer in decoder.decoder_transformer.layers)
        self.seanet = nn.ModuleList(streaming(layer) for layer in decoder.decoder_seanet.layers)
        cos, sin = rotary_tables(decoder.decoder_transformer.rotary_emb, max_frames * self.stride, weight.dtype)
        self.cos, self.sin = nn.Buffer(cos), nn.Buffer(sin)
        self.offsets = nn.Buffer(torch.arange(self.stride))
        self.columns = nn.Buffer(torch.arange(self.past + self.stride))
        # distance from query i (column past + i) to each column: 0 is itself, window - 1 the oldest that it sees
        distance = self.past + self.offsets[:, None] - self.columns
        self.band = nn.Buffer((distance >= 0) & (distance < window))
        self.zero = nn.Buffer(torch.zeros(1, dtype=weight.dtype))

    def forward(self, latent: Tensor, frame: Tensor) -> Tensor:
        """latent `[1, L]` (normalised), frame `[1]` int64, 0 for the first of a stream -> samples `[1, 1, 1920]`."""
        running = frame > 0
        x = self.input_proj(latent).unsqueeze(-1)
        x = self.upsample(x, running, self.zero).transpose(1, 2)
        start = frame * self.stride
        positions = start + self.offsets
        cos = F.embedding(positions, self.cos).unsqueeze(1)
        sin = F.embedding(positions, self.sin).unsqueeze(1)
        # column c holds position start - past + c: columns before position 0 hold nothing yet
        mask = (self.band & (self.columns + start >= self.past)).unsqueeze(0).unsqueeze(0)
        for layer in self.layers:
            x = layer(x, mask, cos, sin, running, self.zero)
        return run_all(self.seanet, x.transpose(1, 2), running, self.zero)


class DecodeMethod(nn.Module):
    """Method `decode`. `codec` keeps its buffer names apart from those of `frame`: state is shared by name."""

    def __init__(self, codec: Any, latent_mean: Tensor, latent_std: Tensor, max_frames: int):
        super().__init__()
        self.codec = Codec(codec, latent_mean, latent_std, max_frames)

    def forward(self, latent: Tensor, frame: Tensor) -> Tensor:
        """latent `[1, L]`, frame `[1]` int64 -> samples `[1, 1, 1920]` at 24 kHz, not clamped."""
        dtype = self.codec.zero.dtype
        return self.codec(latent.to(dtype), frame).to(latent.dtype)
