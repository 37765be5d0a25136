"""The two exported methods.

`stack`   log-mel frames `[1, T, 8, mel]` → encoder frames `[1, T, H]`
`encode`  encoder frames `[1, S, H]`, lengths `[2]` → probabilities `[1, 8*S, speakers]`

`lengths` are how many frames are attended to, and how many there are: what is after them is padding (few lengths
need few plans), and changes nothing before it. The difference of the two is transformers' own: a masked frame is
not attended to, but the upsampling of its neighbour sees it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class StackMethod(nn.Module):
    """Feature stacking and its projection; the frames come padded to whole groups."""

    def __init__(self, model: Any):
        super().__init__()
        self.projection = model.model.audio_tower.embedder.projection

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        embeds: torch.Tensor = self.projection(features.flatten(2))
        return embeds


class SubpixelUpsampler(nn.Module):
    """The model's upsampler, a convolution over three frames, as one linear layer over them side by side.

    One matrix product, and lengths keep their range for whoever exports it: with a convolution, oneDNN's choice of a
    CPU kernel for the example's length would be held for all (`zoo.export` turns that off).
    """

    def __init__(self, upsampler: Any):
        super().__init__()
        conv = upsampler.conv
        outputs, inputs, taps = conv.weight.shape
        self.factor: int = upsampler.upsample_factor
        self.taps = nn.Linear(inputs * taps, outputs, dtype=conv.weight.dtype)
        with torch.no_grad():
            self.taps.weight.copy_(conv.weight.transpose(1, 2).reshape(outputs, taps * inputs))
            self.taps.bias.copy_(conv.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, frames, size = hidden.shape
        edge = torch.zeros(batch, 1, size, dtype=hidden.dtype, device=hidden.device)
        before = torch.cat([edge, hidden], 1)[:, :frames]
        after = torch.cat([hidden, edge], 1)[:, 1:]
        wide = self.taps(torch.cat([before, hidden, after], 2))
        return wide.reshape(batch, frames * self.factor, size)


class EncodeMethod(nn.Module):
    """The encoder, the upsampler and the classifier with its sigmoid, with the model's own attention.

    Positions restart at every call, so the rotary table is a constant, made by the model's own code.
    """

    def __init__(self, model: Any, max_frames: int):
        super().__init__()
        tower = model.model.audio_tower
        self.input_layer_norm, self.layers, self.layer_norm = tower.input_layer_norm, tower.layers, tower.layer_norm
        self.proj, self.classifier = model.model.proj, model.classifier
        self.upsampler = SubpixelUpsampler(model.model.upsampler)
        self.additive: bool = tower.config._attn_implementation == "eager"
        weight = self.proj.weight
        # In float32, as the model computes them in any precision. One more than is needed: of the whole table, a slice
        # is the table itself, which export would hold against the longest length.
        cos, sin = tower.rotary_emb(torch.zeros(1, dtype=torch.float32), torch.arange(max_frames + 1)[None])
        self.register_buffer("cos", cos.to(weight.dtype), persistent=False)
        self.register_buffer("sin", sin.to(weight.dtype), persistent=False)

    def forward(self, embeds: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        frames = embeds.shape[1]
        index = torch.arange(frames, device=embeds.device)
        mask = (index < lengths[0:1])[None, None, None, :].expand(1, 1, frames, frames)
        if self.additive:
            # Eager attention adds its mask.
            zero = torch.zeros((), dtype=embeds.dtype)
            mask = torch.where(mask, zero, torch.finfo(embeds.dtype).min)
        position = self.get_buffer("cos")[:, :frames], self.get_buffer("sin")[:, :frames]
        hidden = self.input_layer_norm(embeds)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=position)
        hidden = self.proj(self.layer_norm(hidden))
        # The upsampler has zeros after the last frame: padding of ours must look the same.
        hidden = hidden * (index < lengths[1:2])[None, :, None].to(hidden.dtype)
        return torch.sigmoid(self.classifier(self.upsampler(hidden)))
