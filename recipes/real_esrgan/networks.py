"""The two network families of Real-ESRGAN, under the parameter names of the official checkpoints.

Written so that every operator of the exported graph is a plain one: convolution, leaky_relu or prelu, nearest
enlargement, pixel_shuffle (and its inverse), cat, add, mul; for pixels also clamp, round and a cast.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from recipes.real_esrgan.variants import Architecture

RESIDUAL = 0.2  # scale of every residual branch of an RRDBNet
SLOPE = 0.2  # of its leaky ReLUs


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def _activate(x: torch.Tensor) -> torch.Tensor:
    return functional.leaky_relu(x, SLOPE)


class ResidualDenseBlock(nn.Module):
    """Five convolutions, each over everything before it in the block."""

    def __init__(self, features: int, growth: int) -> None:
        super().__init__()
        for index in range(4):
            self.add_module(f"conv{index + 1}", _conv(features + index * growth, growth))
        self.conv5 = _conv(features + 4 * growth, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x]
        for index in range(4):
            conv = self.get_submodule(f"conv{index + 1}")
            parts.append(_activate(conv(torch.cat(parts, 1) if index else x)))
        return self.conv5(torch.cat(parts, 1)) * RESIDUAL + x


class RRDB(nn.Module):
    def __init__(self, features: int, growth: int) -> None:
        super().__init__()
        self.rdb1 = ResidualDenseBlock(features, growth)
        self.rdb2 = ResidualDenseBlock(features, growth)
        self.rdb3 = ResidualDenseBlock(features, growth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rdb3(self.rdb2(self.rdb1(x))) * RESIDUAL + x


class RRDBNet(nn.Module):
    """Enlarges 4 times; a smaller scale first folds `multiple`² pixels into channels. RGB `[N, 3, H, W]` in [0, 1]."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        features = architecture.features
        self.fold = architecture.multiple
        self.conv_first = _conv(3 * self.fold**2, features)
        self.body = nn.Sequential(*(RRDB(features, architecture.growth) for _ in range(architecture.blocks)))
        self.conv_body = _conv(features, features)
        self.conv_up1 = _conv(features, features)
        self.conv_up2 = _conv(features, features)
        self.conv_hr = _conv(features, features)
        self.conv_last = _conv(features, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fold > 1:
            x = functional.pixel_unshuffle(x, self.fold)
        x = self.conv_first(x)
        x = x + self.conv_body(self.body(x))
        for conv in (self.conv_up1, self.conv_up2):
            x = _activate(conv(functional.interpolate(x, scale_factor=2.0, mode="nearest")))
        return self.conv_last(_activate(self.conv_hr(x)))


class SRVGGNetCompact(nn.Module):
    """A plain stack of convolutions at the input's size; it learns the difference to nearest enlargement."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        features, self.scale = architecture.features, architecture.scale
        layers: list[nn.Module] = [_conv(3, features), nn.PReLU(features)]
        for _ in range(architecture.blocks):
            layers += [_conv(features, features), nn.PReLU(features)]
        self.body = nn.ModuleList([*layers, _conv(features, 3 * self.scale**2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.body:
            y = layer(y)
        return functional.pixel_shuffle(y, self.scale) + functional.interpolate(
            x, scale_factor=float(self.scale), mode="nearest"
        )


def make_network(architecture: Architecture) -> nn.Module:
    """The network with torch's initial weights, in evaluation mode."""
    network = RRDBNet(architecture) if architecture.kind == "rrdb" else SRVGGNetCompact(architecture)
    return network.eval().requires_grad_(False)


class Upscale(nn.Module):
    """The exported method: float32 in and out, whatever precision the network works in."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network = network.to(dtype)
        self.dtype = dtype

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return self.network(picture.to(self.dtype)).to(picture.dtype)


class Pixels(nn.Module):
    """`Upscale`, and what a picture of 8 bits keeps of it: a quarter of the bytes, rounded where they are made."""

    def __init__(self, upscale: Upscale) -> None:
        super().__init__()
        self.upscale = upscale

    def forward(self, picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 `[N, H, W, 3]`, and whether a value was no finite number, `[]` bool: its pixel means nothing then."""
        enlarged = self.upscale(picture)
        pixels = (enlarged.clamp(0, 1) * 255).round().to(torch.uint8)
        # Not by isfinite: export spells that x == x, which compilers of shaders may take for granted.
        broken = (enlarged.isnan() | enlarged.isinf()).any()
        return pixels.permute(0, 2, 3, 1).contiguous(), broken
