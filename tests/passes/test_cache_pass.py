"""pytest tests/passes/test_cache_pass.py: a step's norms, rotation and cache writes become one operator, or stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backend import passes
from recipes.qwen3.modules import rotate
from tests.passes.programs import Method, check, lower

HEADS, KV_HEADS, WIDTH, CAPACITY = 4, 2, 8, 12


class Step(nn.Module):
    """Attention of a step over caches, with what recipes vary."""

    def __init__(self, norm: str = "", dtype: torch.dtype = torch.float32, also: str = "") -> None:
        super().__init__()
        self.norm, self.also = norm, also
        self.qkv = nn.Linear(16, (HEADS + 2 * KV_HEADS) * WIDTH, bias=False)
        self.weight = nn.Parameter(torch.randn(HEADS + KV_HEADS, WIDTH))
        self.keys = nn.Buffer(torch.zeros(1, KV_HEADS, CAPACITY, WIDTH, dtype=dtype))
        self.values = nn.Buffer(torch.zeros(1, KV_HEADS, CAPACITY, WIDTH, dtype=dtype))
        self.cos, self.sin = nn.Buffer(torch.randn(CAPACITY, WIDTH)), nn.Buffer(torch.randn(CAPACITY, WIDTH))
        self.slots = nn.Buffer(torch.arange(CAPACITY))

    def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        positions = position + torch.arange(x.shape[1])
        cos, sin = (F.embedding(positions, table).unsqueeze(1) for table in (self.cos, self.sin))
        qkv = self.qkv(x).view(1, x.shape[1], HEADS + 2 * KV_HEADS, WIDTH)
        both, value = qkv[:, :, : HEADS + KV_HEADS], qkv[:, :, HEADS + KV_HEADS :]
        if self.norm:
            both = F.rms_norm(both, (WIDTH,), self.weight[0] if self.norm == "own" else None, 1e-6)
        if self.norm == "heads":
            both = both * self.weight
        both = rotate(both, cos, sin).to(self.keys.dtype)
        query, key = both[:, :, :HEADS].transpose(1, 2), both[:, :, HEADS:].transpose(1, 2)
        self.keys.index_copy_(2, positions, key)
        at = positions.flip(0) if self.also == "another index" else positions
        self.values.index_copy_(2, at, value.to(self.values.dtype).transpose(1, 2))
        mask = (self.slots <= positions.unsqueeze(1))[None, None]
        y = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask, enable_gqa=True).float()
        return (y, both.float()) if self.also == "another reader" else (y,)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of the graph after the passes, the last time that they ran."""
    found: list[str] = []
    run = passes.run

    def spy(graph: object) -> object:
        after = run(graph)  # type: ignore[arg-type]
        found[:] = [node.op for node in after.nodes]
        return after

    monkeypatch.setattr(passes, "run", spy)
    return found


def calls(*lengths: int) -> list[tuple[Tensor, Tensor]]:
    """Texts one behind the other."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [(torch.randn(1, n, 16), torch.tensor([start])) for n, start in zip(lengths, starts, strict=True)]


@pytest.mark.parametrize(
    ("norm", "dtype", "atol"),
    [
        ("", torch.float32, 1e-5),
        ("own", torch.float32, 1e-5),
        ("heads", torch.float32, 1e-5),
        ("heads", torch.float16, 5e-3),  # queries, keys and values keep 11 bits
    ],
)
def test_one_operator(tmp_path: Path, seen: list[str], norm: str, dtype: torch.dtype, atol: float) -> None:
    torch.manual_seed(0)
    module = Step(norm, dtype).eval()
    turns = calls(3, 1, 1, 4)
    length = {1: torch.export.Dim("length", min=1, max=CAPACITY)}
    lowered = lower(tmp_path / "step.pte", Method(module, turns[0], (length, None)))
    assert lowered.refusals == []
    assert seen.count("zoo.rope_cache") == 1
    assert not {"zoo.rope", "aten.index_copy.default", "aten.rms_norm.default"} & set(seen)
    check(lowered, module, turns, atol=atol)


@pytest.mark.parametrize("also", ["another reader", "another index"])
def test_what_has_more_to_do_stays(tmp_path: Path, seen: list[str], also: str) -> None:
    torch.manual_seed(0)
    module = Step("heads", also=also).eval()
    turns = calls(3, 3)
    lowered = lower(tmp_path / "step.pte", Method(module, turns[0]))
    assert "zoo.rope_cache" not in seen
    assert seen.count("aten.index_copy.default") == 2
    check(lowered, module, turns)
