"""Florence-2 as three exportable modules, one for each part of the work that is done again at another pace.

    vision   a picture, in bytes            -> its features, which stay on the GPU as the start of the encoder's input
    encode   a prompt after these features  -> keys and values of every cross-attention, computed once, on the GPU
    step     the last token of every beam   -> logits

Beams are rows of one sequence, not a batch. Their keys and values lie in slots of one cache, and a mask says which
slots a row sees: those of its own past. So beams share what they have in common, and choosing, copying or dropping a
beam moves nothing: it is another mask. The keys of the picture and the prompt are read by all rows at once.

State between methods is in buffers that both register under one name, and that both write to: only a buffer that a
method writes is state in it. So `inputs` holds the features and then the prompt, and each layer of `caches` holds first
the encoder's positions, then the decoder's slots.

Layers are transformers' own modules; the language model's attention is laid out anew, around the caches. Shapes
below: T picture tokens, P prompt tokens, M encoder positions, C slots, R rows, D hidden size, H heads, E head size,
V vocabulary. Norms, and the sum that runs through the layers, are never below float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.normalize import Normalize
from recipes.transformer import Vocabulary, fused_linear


class MixedLinear(nn.Linear):
    """A linear layer that computes in its weight's dtype, whatever its input's, and answers in the input's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def half_linears(module: nn.Module) -> None:
    """Linears, embedding and caches of a method in float16."""
    for child in list(module.modules()):
        if isinstance(child, Vocabulary):
            for table, head in zip(child.tables, child.heads, strict=True):
                is_tied = table.weight is head.weight
                table.half()
                head.half()
                if is_tied:
                    head.weight = table.weight
        elif isinstance(child, MixedLinear | Cache):
            child.half()


def mixed_linears(module: Any) -> Any:
    """`module` with its linear layers as `MixedLinear`, on the same weights."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            linear = MixedLinear(child.in_features, child.out_features, bias=child.bias is not None, device="meta")
            linear.weight, linear.bias = child.weight, child.bias
            setattr(module, name, linear)
        else:
            mixed_linears(child)
    return module


class EncoderInputs(nn.Module):
    """What the encoder reads, `[1, M, D]`: the picture's features, then the prompt's embeddings."""

    def __init__(self, positions: int, width: int):
        super().__init__()
        self.rows = nn.Buffer(torch.zeros(1, positions, width))

    def write(self, at: Tensor, rows: Tensor) -> None:
        """at `[S]` int64, rows `[1, S, D]`."""
        self.rows.index_copy_(1, at, rows.to(self.rows.dtype))


class Cache(nn.Module):
    """Keys and values `[1, H, M + C, E]` of one decoder layer: the encoder's positions, then the decoder's slots."""

    def __init__(self, heads: int, positions: int, slots: int, head_dim: int):
        super().__init__()
        self.positions = positions
        shape = (1, heads, positions + slots, head_dim)
        self.keys, self.values = nn.Buffer(torch.zeros(shape)), nn.Buffer(torch.zeros(shape))

    def write(self, at: Tensor, keys: Tensor, values: Tensor) -> None:
        """at `[S]` int64; keys and values `[1, H, S, E]`."""
        self.keys.index_copy_(2, at, keys.to(self.keys.dtype))
        self.values.index_copy_(2, at, values.to(self.values.dtype))

    def attend(self, query: Tensor, mask: Tensor, is_cross: bool, scale: float) -> Tensor:
        """query `[1, H, R, E]`, mask `[1, 1, 1 or R, M or C]` bool -> `[1, R, H E]`."""
        part = slice(None, self.positions) if is_cross else slice(self.positions, None)
        attended = F.scaled_dot_product_attention(
            query.to(self.keys.dtype), self.keys[:, :, part], self.values[:, :, part], attn_mask=mask, scale=scale
        )
        return attended.transpose(1, 2).flatten(2).to(query.dtype)


def make_caches(model: Any, slots: int) -> nn.ModuleList:
    """The caches of all decoder layers; `encode` and `step` share them."""
    config = model.config.text_config
    heads = config.decoder_attention_heads
    return nn.ModuleList(
        Cache(heads, config.max_position_embeddings, slots, config.d_model // heads)
        for _ in range(config.decoder_layers)
    )


def _heads(x: Tensor, heads: int) -> Tensor:
    """`[1, S, H E]` -> `[1, H, S, E]`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class VisionMethod(nn.Module):
    """Method `vision`: DaViT and the projector."""

    def __init__(self, model: Any, inputs: EncoderInputs, tokens: int, normalize: Normalize):
        super().__init__()
        self.normalize = normalize
        tower, projector = model.model.vision_tower, model.model.multi_modal_projector
        self.convs, self.blocks = tower.convs, mixed_linears(tower.blocks)
        self.projection, self.norm = projector.image_projection, projector.image_proj_norm
        self.inputs = inputs
        # What is added to every pixel depends on the size alone: its place, and that it is the first frame.
        side = round((tokens - 1) ** 0.5)
        width = tower.embed_dim[-1]
        place = projector.image_position_embed(torch.zeros(1, width, side, side)).flatten(2).transpose(1, 2)
        self.place = nn.Buffer((place + projector.visual_temporal_embed(place[:, :1])).detach())
        self.rows = nn.Buffer(torch.arange(tokens))
        mixed_linears(self)

    def forward(self, picture: Tensor) -> Tensor:
        """picture `[1, side, side, 3]` uint8 -> features `[1, T, D]`."""
        x = self.normalize(picture).to(self.place.dtype)
        for conv, blocks in zip(self.convs, self.blocks, strict=True):
            x = conv(x)
            for block in blocks:
                x = block(x)
        x = x.flatten(2).transpose(1, 2) + self.place
        x = torch.cat([x.mean(1, keepdim=True), x], 1)
        features: Tensor = self.norm(self.projection(x))
        self.inputs.write(self.rows, features)
        return features


class EncodeMethod(nn.Module):
    """Method `encode`: BART's encoder, and the cross-attentions' keys and values of its result."""

    def __init__(self, model: Any, vocabulary: Vocabulary, caches: nn.ModuleList, inputs: EncoderInputs, tokens: int):
        super().__init__()
        encoder, decoder = model.model.language_model.encoder, model.model.language_model.decoder
        self.tokens = tokens
        self.embed_scale: float = encoder.embed_tokens.embed_scale
        self.vocabulary = vocabulary
        self.inputs = inputs
        self.positions, self.norm = encoder.embed_positions, encoder.layernorm_embedding
        self.layers = mixed_linears(encoder.layers)
        crosses = [layer.encoder_attn for layer in decoder.layers]
        self.heads: int = crosses[0].num_heads
        # Keys and values of a layer in one product.
        self.cross = mixed_linears(nn.ModuleList(fused_linear(cross.k_proj, cross.v_proj) for cross in crosses))
        self.caches = caches

    def forward(self, ids: Tensor) -> Tensor:
        """ids `[1, P]` int64, of a picture whose features are there -> the encoder's result `[1, T + P, D]`."""
        prompt = self.vocabulary.embed(ids).to(self.norm.weight.dtype) * self.embed_scale
        self.inputs.write(self.tokens + torch.arange(ids.shape[1], device=ids.device), prompt)
        at = torch.arange(self.tokens + ids.shape[1], device=ids.device)
        x = self.inputs.rows[:, : self.tokens + ids.shape[1]]
        x = self.norm(x + self.positions(None, position_ids=at))
        for layer in self.layers:
            x = layer(x, None)
        caches: Any = self.caches
        for cross, cache in zip(self.cross, caches, strict=True):
            keys, values = cross(x).chunk(2, -1)
            cache.write(at, _heads(keys, self.heads), _heads(values, self.heads))
        return x


class DecoderLayer(nn.Module):
    """Post-norm decoder layer over the caches."""

    def __init__(self, source: Any):
        super().__init__()
        own, cross = source.self_attn, source.encoder_attn
        self.heads: int = own.num_heads
        self.scale: float = own.scaling
        self.qkv = fused_linear(own.q_proj, own.k_proj, own.v_proj)
        self.out, self.norm = own.out_proj, source.self_attn_layer_norm
        self.cross_query, self.cross_out, self.cross_norm = (
            cross.q_proj,
            cross.out_proj,
            source.encoder_attn_layer_norm,
        )
        self.fc1, self.fc2, self.activation = source.fc1, source.fc2, source.activation_fn
        self.final_norm = source.final_layer_norm
        mixed_linears(self)

    def forward(self, x: Tensor, cache: Cache, slots: Tensor, mask: Tensor, cross_mask: Tensor) -> Tensor:
        """x `[1, R, D]`, slots `[R]` int64, masks as `Cache.attend` wants them -> `[1, R, D]`."""
        query, keys, values = (_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        cache.write(cache.positions + slots, keys, values)
        x = self.norm(x + self.out(cache.attend(query, mask, False, self.scale)))
        query = _heads(self.cross_query(x), self.heads)
        x = self.cross_norm(x + self.cross_out(cache.attend(query, cross_mask, True, self.scale)))
        return self.final_norm(x + self.fc2(self.activation(self.fc1(x))))


class StepMethod(nn.Module):
    """Method `step`: BART's decoder and the output head."""

    def __init__(self, model: Any, vocabulary: Vocabulary, caches: nn.ModuleList):
        super().__init__()
        decoder = model.model.language_model.decoder
        self.embed_scale: float = decoder.embed_tokens.embed_scale
        self.vocabulary = vocabulary
        self.positions, self.norm = decoder.embed_positions, decoder.layernorm_embedding
        self.layers = nn.ModuleList(DecoderLayer(layer) for layer in decoder.layers)
        self.caches = caches
        self.encoder_positions = nn.Buffer(torch.arange(model.config.text_config.max_position_embeddings))

    def forward(self, ids: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, encoded: Tensor) -> Tensor:
        """The next logits of every row.

        ids `[1, R]` int64; positions `[R]` int64, of the tokens in their texts; slots `[R]` int64, all different,
        where their keys and values go; mask `[R, C]` bool, the slots that a row sees, its own among them;
        encoded `[1]` int64, T + P of the last `encode` -> logits `[R, V]`.
        """
        x = self.vocabulary.embed(ids).to(self.norm.weight.dtype) * self.embed_scale
        x = self.norm(x + self.positions(None, position_ids=positions))
        cross_mask = (self.encoder_positions < encoded).view(1, 1, 1, -1)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = layer(x, cache, slots, mask.unsqueeze(0).unsqueeze(0), cross_mask)
        return self.vocabulary.logits(x[0]).to(x.dtype)
