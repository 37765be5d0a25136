"""The next token, chosen where the logits are: the exportable methods `likeliest` and `draw`.

With them a text is written without its logits ever leaving the GPU, and the next step is begun before the host knows
this one's token. They follow the rules of sampling.py, in float32: a draw whose random number lies within rounding of
the bound between two tokens may fall on the other one there. Of tokens that are equal at the bound of top-k all stay
there, and here as many as `CANDIDATES` has room for. Shape below: V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CANDIDATES = 64  # `draw` looks at so many of the likeliest tokens: top-k of more, or of all, is the host's
RANDOM = 3  # the place of the random number among the settings of `draw`
NOT_FINITE = -1  # in place of a token, where not all logits are finite


class LikeliestMethod(nn.Module):
    """Method `likeliest`: greedy decoding."""

    def forward(self, logits: Tensor) -> Tensor:
        """logits `[1, V]` -> the token `[1, 1]` int64, the first of equal ones, or `NOT_FINITE`."""
        return _checked(logits.argmax(-1, keepdim=True), logits)


class DrawMethod(nn.Module):
    """Method `draw`: top-k, temperature, top-p and min-p, then one draw."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.candidates = min(CANDIDATES, vocabulary)

    def forward(self, logits: Tensor, top_k: Tensor, settings: Tensor) -> Tensor:
        """logits `[1, V]`, top_k `[1]` int64 from 1 to `candidates`, settings `[4]` -> the token, as `likeliest`.

        settings: temperature, the probability that top-p leaves out (1 - top-p), min-p, a random number in [0, 1).
        """
        temperature, left_out, min_p, random = settings.unsqueeze(0).split(1, -1)
        never = float("-inf")
        scores, tokens = logits.topk(self.candidates)  # the likeliest first
        limit = scores.gather(-1, top_k.unsqueeze(0) - 1)
        # Less the greatest before the division: a low temperature must not take scores beyond float32.
        scores = torch.where(scores >= limit, (scores - scores[:, :1]) / temperature, never)
        from_here_on = scores.softmax(-1).flip(-1).cumsum(-1).flip(-1)
        is_first = torch.arange(self.candidates, device=logits.device) == 0
        scores = torch.where(is_first | (from_here_on > left_out), scores, never)
        chances = scores.softmax(-1)
        chances = torch.where(chances >= min_p * chances[:, :1], chances, 0)
        up_to = chances.cumsum(-1)
        place = (up_to <= random * up_to[:, -1:]).sum(-1, keepdim=True)
        last = (chances > 0).sum(-1, keepdim=True) - 1
        return _checked(tokens.gather(-1, torch.minimum(place, last).clamp(min=0)), logits)


def _checked(token: Tensor, logits: Tensor) -> Tensor:
    """`token`, or `NOT_FINITE`."""
    return torch.where(logits.abs().amax(-1, keepdim=True).isfinite(), token, NOT_FINITE)
