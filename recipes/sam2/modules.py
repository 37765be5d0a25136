"""SAM 2 as two exportable modules: `EncodeMethod` (Hiera, feature pyramid) and `PromptMethod` (prompts, mask decoder).

Why this split. A picture is encoded once and prompted many times. What prompts need of it, the embedding and two finer
feature maps (16 MB in fp32), is a state that both methods share: it stays with the backend between calls, so a prompt
uploads its points and a mask, and downloads its masks, no more. The picture comes as bytes, which `encode` normalises:
3 MB to upload. Everything that depends on the size of the picture alone (position embeddings, of which one is resized
by bicubic interpolation) is a constant.

The modules of a transformers `Sam2Model` do the work; what its forward functions decide for a whole program at once
(which masks to return, whether there is a mask prompt) is data here. Floats within follow the model's dtype, those of
inputs and outputs stay float32 (float64 in a float64 model). Shapes below: S side of the input picture, E = S / 16,
P objects (prompts that are answered at once), N points of each, C = 256 channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.normalize import Normalize
from recipes.sam2.blocks import Block

MASKS = 4  # mask tokens: one for an unambiguous prompt, three for an ambiguous one
NO_POINT = -1  # label of a place that is no point
PADDING = -10  # label of a place that is not there at all


class Features(nn.Module):
    """What is kept of an encoded picture: embedding `[1, C, E, E]`, high_1 `[1, C/4, 2E, 2E]` and high_0
    `[1, C/8, 4E, 4E]`."""

    def __init__(self, channels: int, side: int):
        super().__init__()
        self.embedding = nn.Buffer(torch.zeros(1, channels, side, side))
        self.high_1 = nn.Buffer(torch.zeros(1, channels // 4, 2 * side, 2 * side))
        self.high_0 = nn.Buffer(torch.zeros(1, channels // 8, 4 * side, 4 * side))

    def maps(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.embedding, self.high_1, self.high_0

    def write(self, *maps: Tensor) -> None:
        for kept, new in zip(self.maps(), maps, strict=True):
            kept.copy_(new)

    def read(self) -> tuple[Tensor, ...]:
        """The maps, in a way that makes them states of the reading method, too: one that no method writes is taken
        for a constant. The backend sees that nothing changes and copies nothing."""
        for kept in self.maps():
            kept.copy_(kept.clone())
        return self.maps()


class EncodeMethod(nn.Module):
    """picture `[1, S, S, 3]` uint8 -> the three maps, which are kept as well."""

    def __init__(self, model: Any, features: Features, normalize: Normalize):
        super().__init__()
        self.normalize = normalize
        encoder = model.vision_encoder
        self.patches = encoder.backbone.patch_embed
        self.stage_ends: list[int] = encoder.backbone.stage_ends
        self.laterals = encoder.neck.convs
        self.top_down: list[int] = encoder.neck.fpn_top_down_levels
        self.high_convs = nn.ModuleList([model.mask_decoder.conv_s1, model.mask_decoder.conv_s0])
        side = model.config.prompt_encoder_config.image_size // encoder.config.backbone_config.patch_stride[0]
        self.blocks = nn.ModuleList()
        here = side
        for block in encoder.backbone.blocks:
            self.blocks.append(Block(block, here, here))
            here //= 1 if block.query_stride is None else block.query_stride[0]
        with torch.no_grad():
            self.position = nn.Buffer(encoder.backbone._get_pos_embed((side, side)).contiguous())
            self.no_memory = nn.Buffer(model.no_memory_embedding.detach().reshape(1, -1, 1, 1))
        self.features = features

    def forward(self, picture: Tensor) -> tuple[Tensor, ...]:
        pixels = self.normalize(picture)
        x = self.patches(pixels.to(self.position.dtype)) + self.position
        stages = []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in self.stage_ends:
                stages.append(x)
        levels: list[Tensor] = []  # from coarse to fine
        for level in range(len(stages) - 1, -1, -1):
            lateral = self.laterals[len(stages) - 1 - level](stages[level].permute(0, 3, 1, 2))
            if levels and level in self.top_down:
                lateral = lateral + F.interpolate(levels[-1], scale_factor=2.0, mode="nearest")
            levels.append(lateral)
        embedding, *finer = levels[-3:]
        maps = (embedding + self.no_memory, *(conv(map) for conv, map in zip(self.high_convs, finer, strict=True)))
        self.features.write(*maps)
        return tuple(map.to(pixels.dtype) for map in maps)


class PointEmbedding(nn.Module):
    """Points as tokens: the sines of random projections of their place, and what their label adds.

    Stays in float32 when the rest is in half precision, which cannot tell neighbouring pixels apart.
    """

    def __init__(self, model: Any):
        super().__init__()
        encoder = model.prompt_encoder
        self.size: int = encoder.input_image_size
        self.projection = nn.Buffer(encoder.shared_embedding.positional_embedding.detach().clone())
        none = encoder.not_a_point_embed.weight.detach()
        # By row: padding, no point, then labels from 0 on.
        self.labels = nn.Buffer(torch.cat([torch.zeros_like(none), none, encoder.point_embed.weight.detach()]))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        """points `[1, P, N, 2]` in pixels of the input picture, labels `[1, P, N]` -> `[1, P, N + 1, C]`.

        Labels: 1 and 0 points of the object and of the background, 2 and 3 the corners of a box, -1 no point, -10
        padding. One more that is no point ends every prompt, as in the reference.
        """
        at = F.pad((points + 0.5) / self.size, (0, 0, 0, 1))
        labels = F.pad(labels, (0, 1), value=NO_POINT)
        angles = 2 * torch.pi * ((2 * at - 1) @ self.projection)
        place = torch.cat([angles.sin(), angles.cos()], dim=-1)
        rows = torch.where(labels == PADDING, 0, labels + 2)
        return place * (labels >= 0).unsqueeze(-1).to(place.dtype) + F.embedding(rows, self.labels)


class PromptMethod(nn.Module):
    """Masks of the picture that was encoded last, for P prompts of N points each and one mask prompt."""

    def __init__(self, model: Any, features: Features):
        super().__init__()
        self.points = PointEmbedding(model)
        self.mask_embed = model.prompt_encoder.mask_embed
        decoder = model.mask_decoder
        self.transformer = decoder.transformer
        self.upscale_1, self.upscale_2 = decoder.upscale_conv1, decoder.upscale_conv2
        self.upscale_norm, self.activation = decoder.upscale_layer_norm, decoder.activation
        self.hypernetworks = decoder.output_hypernetworks_mlps
        self.iou_head, self.object_head = decoder.iou_prediction_head, decoder.pred_obj_score_head
        tokens = (decoder.obj_score_token, decoder.iou_token, decoder.mask_tokens)
        with torch.no_grad():
            self.tokens = nn.Buffer(torch.cat([token.weight for token in tokens])[None, None])
            self.position = nn.Buffer(model.get_image_wide_positional_embeddings().contiguous())
            self.no_mask = nn.Buffer(model.prompt_encoder.no_mask_embed.weight.reshape(1, -1, 1, 1).clone())
        self.features = features

    def forward(self, points: Tensor, labels: Tensor, mask: Tensor, has_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """points `[1, P, N, 2]` in pixels of the input picture, labels `[1, P, N]` int64 (see `PointEmbedding`), mask
        `[1, 1, 4E, 4E]` logits of an earlier answer, has_mask `[1]` bool: whether it counts ->
        mask logits `[1, P, 4, 4E, 4E]`, predicted IoU `[1, P, 4]` in 0…1, logit `[1, P, 1]` that there is an object.
        """
        embedding, high_1, high_0 = self.features.read()
        dtype = self.tokens.dtype
        objects = points.shape[1]
        dense = torch.where(has_mask, self.mask_embed(mask.to(dtype)), self.no_mask)
        sparse = self.points(points, labels).to(dtype)
        tokens = torch.cat([self.tokens.expand(1, objects, -1, -1), sparse], dim=2)
        image = (embedding + dense).expand(objects, -1, -1, -1)
        tokens, image = self.transformer(
            point_embeddings=tokens,
            image_embeddings=image,
            image_positional_embeddings=self.position.expand(objects, -1, -1, -1),
            attention_similarity=None,
        )
        channels, side = embedding.shape[1], embedding.shape[2]
        image = image.transpose(2, 3).reshape(objects, channels, side, side)
        image = self.activation(self.upscale_norm(self.upscale_1(image) + high_1))
        image = self.activation(self.upscale_2(image) + high_0)
        of_masks = [mlp(tokens[:, :, 2 + index]) for index, mlp in enumerate(self.hypernetworks)]
        flat = image.reshape(1, objects, channels // 8, 16 * side * side)
        masks = (torch.stack(of_masks, dim=2) @ flat).reshape(1, objects, MASKS, 4 * side, 4 * side)
        scores, present = self.iou_head(tokens[:, :, 1]), self.object_head(tokens[:, :, 0])
        return masks.to(points.dtype), scores.to(points.dtype), present.to(points.dtype)


def halve(module: nn.Module) -> None:
    """Half precision, apart from points, whose places need more, and from what turns bytes into colours."""
    module.half()
    for part in module.modules():
        if isinstance(part, PointEmbedding | Normalize):
            part.float()
