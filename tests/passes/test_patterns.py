"""pytest tests/passes/test_patterns.py: norms, gates and rotary embedding spelled out, and whole attention modules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from backend import passes
from backend.blob import to_blob
from backend.graph import Graph, Ref
from backend.runtime.delegate import Delegate
from tests.passes.make import Maker
from tests.passes.programs import Method, check, lower
from zoo.eager import interpret


def run(graph: Graph, inputs: list[Tensor]) -> list[np.ndarray]:
    delegate = Delegate(to_blob(graph), {}.__getitem__)
    try:
        return delegate.execute([tensor.numpy() for tensor in inputs])
    finally:
        delegate.close()


def same(m: Maker, ops: list[str], atol: float = 1e-5) -> Graph:
    """The graph after the passes has these operators, and gives what it gave."""
    torch.manual_seed(0)
    inputs = [
        torch.randn(spec.shape).to(getattr(torch, spec.dtype)) for spec in (m.graph.values[i] for i in m.graph.inputs)
    ]
    after = passes.run(m.graph)
    assert [node.op.removeprefix("aten.") for node in after.nodes] == ops
    wanted = interpret(m.graph, inputs, double=True)
    for results in (run(after, inputs), run(m.graph, inputs)):
        for actual, expected in zip(results, wanted, strict=True):
            np.testing.assert_allclose(actual.astype(np.float64), expected.double().numpy(), rtol=1e-5, atol=atol)
    return after


def rms_norm(m: Maker, x: Ref, square: str = "pow", weight: Ref | None = None, weight_first: bool = True) -> Ref:
    squared = m("pow.Tensor_Scalar", self=x, exponent=2) if square == "pow" else m("mul.Tensor", self=x, other=x)
    mean = m("mean.dim", self=squared, dim=[-1], keepdim=True)
    scale = m("rsqrt.default", self=m("add.Scalar", self=mean, other=1e-5))
    y = m("mul.Tensor", self=x, other=scale)
    if weight is not None:
        y = m("mul.Tensor", self=weight, other=y) if weight_first else m("mul.Tensor", self=y, other=weight)
    return y


@pytest.mark.parametrize("square", ["pow", "mul"])
@pytest.mark.parametrize("weight", [None, True, False])
def test_rms_norm(square, weight):
    m = Maker()
    x = m.input(3, 5, 24)
    w = m.input(24) if weight is not None else None
    m.graph.outputs = [rms_norm(m, x, square, w, bool(weight)).value]
    after = same(m, ["rms_norm.default"])
    assert after.nodes[0].args["eps"] == pytest.approx(1e-5)


def test_rms_norm_in_float16_with_casts():
    m = Maker()
    x, w = m.input(3, 24, dtype="float16"), m.input(24, dtype="float16")
    wide = m("_to_copy.default", self=x, dtype="float32")
    narrow = m("_to_copy.default", self=rms_norm(m, wide), dtype="float16")
    m.graph.outputs = [m("mul.Tensor", self=w, other=narrow).value]
    same(m, ["rms_norm.default"], atol=4e-3)  # float16 rounds at 1e-3, the graph before twice


def test_what_is_no_rms_norm_stays():
    m = Maker()
    x, y = m.input(3, 24), m.input(3, 24)
    mean = m("mean.dim", self=m("pow.Tensor_Scalar", self=y, exponent=2), dim=[-1], keepdim=True)
    scale = m("rsqrt.default", self=m("add.Scalar", self=mean, other=1e-5))
    m.graph.outputs = [m("mul.Tensor", self=x, other=scale).value]
    same(m, [node.op.removeprefix("aten.") for node in m.graph.nodes])


def test_silu():
    m = Maker()
    x = m.input(3, 5)
    m.graph.outputs = [m("mul.Tensor", self=m("sigmoid.default", self=x), other=x).value]
    same(m, ["silu.default"])


@pytest.mark.parametrize("shape", [(1, 2, 5, 8), (3, 6), (2, 7, 3, 16)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(shape, interleaved):
    m = Maker()
    x, cos, sin = m.input(*shape), m.input(*shape[-2:]), m.input(*shape[-2:])
    width, axis = shape[-1], len(shape) - 1
    if interleaved:
        odd = m("slice.Tensor", self=x, dim=-1, start=1, end=2**40, step=2)
        even = m("slice.Tensor", self=x, dim=-1, start=0, end=2**40, step=2)
        parts = [m("unsqueeze.default", self=part, dim=-1) for part in (m("neg.default", self=odd), even)]
        turned = m("reshape.default", self=m("cat.default", tensors=parts, dim=-1), shape=list(shape))
    else:
        low = m("slice.Tensor", self=x, dim=axis, start=0, end=width // 2, step=1)
        high = m("slice.Tensor", self=x, dim=axis, start=width // 2, end=2**40, step=1)
        turned = m("cat.default", tensors=[m("neg.default", self=high), low], dim=-1)
    left = m("mul.Tensor", self=x, other=cos)
    m.graph.outputs = [m("add.Tensor", self=left, other=m("mul.Tensor", self=turned, other=sin)).value]
    after = same(m, ["zoo.rope"])
    assert after.nodes[0].args["interleaved"] is interleaved


def test_a_swap_without_the_sign_is_no_rope():
    m = Maker()
    x, cos, sin = m.input(3, 8), m.input(3, 8), m.input(3, 8)
    low = m("slice.Tensor", self=x, dim=1, start=0, end=4, step=1)
    high = m("slice.Tensor", self=x, dim=1, start=4, end=8, step=1)
    turned = m("cat.default", tensors=[m("neg.default", self=low), high], dim=1)
    left = m("mul.Tensor", self=x, other=cos)
    m.graph.outputs = [m("add.Tensor", self=left, other=m("mul.Tensor", self=turned, other=sin)).value]
    same(m, [node.op.removeprefix("aten.") for node in m.graph.nodes])


@st.composite
def graphs(draw: st.DrawFn) -> Maker:
    """The operators that patterns are made of, put together at random."""
    m = Maker()
    live = [m.input(2, 3, 4, 4), m.input(2, 3, 4, 4), m.input(4)]
    for _ in range(draw(st.integers(3, 14))):
        x, y = draw(st.sampled_from(live[-5:])), draw(st.sampled_from(live))
        kind = draw(
            st.sampled_from(
                ["matmul", "softmax", "permute", "scale", "add", "mul", "sigmoid", "clone", "norm", "half", "neg"]
            )
        )
        wide = len(m.shape(x)) == 4
        if kind == "matmul" and wide and len(m.shape(y)) == 4:
            new = m("matmul.default", self=m("mul.Scalar", self=x, other=0.1), other=y)
        elif kind == "softmax":
            new = m("softmax.int", self=x, dim=-1)
        elif kind == "permute" and wide:
            new = m("permute.default", self=x, dims=draw(st.sampled_from([[0, 1, 3, 2], [0, 1, 2, 3]])))
        elif kind == "scale":
            new = m("mul.Tensor", self=x, other=0.5)
        elif kind in ("add", "mul"):
            new = m(f"{kind}.Tensor", self=x, other=y)
        elif kind == "norm" and wide:
            new = rms_norm(m, x, "mul", live[2])
        elif kind == "half" and wide:
            low = m("slice.Tensor", self=x, dim=3, start=0, end=2, step=1)
            high = m("slice.Tensor", self=x, dim=3, start=2, end=4, step=1)
            new = m("cat.default", tensors=[m("neg.default", self=high), low], dim=3)
        elif kind in ("sigmoid", "clone", "neg"):
            new = m(f"{kind}.default", self=x)
        else:
            continue
        live.append(new)
    m.graph.outputs = [live[-1].value, *([draw(st.sampled_from(live)).value] if draw(st.booleans()) else [])]
    return m


@given(graphs())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_graphs_agree_before_and_after(m):
    torch.manual_seed(0)
    inputs = [torch.randn(m.graph.values[i].shape) for i in m.graph.inputs]
    after = passes.run(m.graph)
    after.check()
    wanted = interpret(m.graph, inputs, double=True)
    for results in (run(after, inputs), run(m.graph, inputs)):
        for actual, expected in zip(results, wanted, strict=True):
            limit = 1e-4 * max(1.0, float(expected.abs().max()))  # chains of products grow; relative to the largest
            np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-4, atol=limit)


# --- real modules -----------------------------------------------------------------------------------------------------


def operators(monkeypatch) -> list[str]:
    """Collects the operators of what preprocess writes."""
    from backend import preprocess

    seen: list[str] = []
    write = preprocess.to_blob

    def spy(graph: Graph) -> bytes:
        seen.extend(node.op for node in graph.nodes)
        return write(graph)

    monkeypatch.setattr(preprocess, "to_blob", spy)
    return seen


class Decoder(nn.Module):
    """A decoder of transformers on embeddings, with an own additive mask."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        return self.model(
            inputs_embeds=x, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state


def test_qwen3_with_eager_attention(tmp_path, monkeypatch):
    """Two layers: each has one attention over grouped heads, two rotations, and norms before, after, on q and on k."""
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=50, attn_implementation="eager",
    )  # fmt: skip
    module = Decoder(Qwen3Model(config)).eval()
    seen = operators(monkeypatch)
    mask = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)[None, None]
    args = (torch.randn(1, 6, 32), mask, torch.arange(6)[None])
    lowered = lower(tmp_path / "qwen.pte", Method(module, args))
    assert lowered.refusals == []
    assert lowered.delegates == {"forward": 1}
    counts = {
        name: seen.count(name)
        for name in (
            "zoo.sdpa",
            "zoo.rope",
            "aten.rms_norm.default",
            "aten.matmul.default",
            "aten.softmax.int",
            "aten.cat.default",
        )
    }
    assert counts == {
        "zoo.sdpa": 2,
        "zoo.rope": 4,
        "aten.rms_norm.default": 9,
        "aten.matmul.default": 0,
        "aten.softmax.int": 0,
        "aten.cat.default": 1,
    }
    check(lowered, module, [args], atol=2e-5)


def test_bert_with_eager_attention(tmp_path, monkeypatch):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=50,
        attn_implementation="eager",
    )  # fmt: skip
    encoder = BertModel(config).encoder.eval()

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.encoder(x, attention_mask=mask).last_hidden_state

    seen = operators(monkeypatch)
    mask = torch.zeros(2, 1, 1, 7)
    mask[1, ..., 4:] = torch.finfo(torch.float32).min
    args = (torch.randn(2, 7, 32), mask)
    lowered = lower(tmp_path / "bert.pte", Method(Encoder(), args))
    assert seen.count("zoo.sdpa") == 1
    assert lowered.outside == {"forward": []}
    check(lowered, Encoder(), [args])


def test_the_rotation_of_our_recipes(tmp_path, monkeypatch):
    from recipes.phonon.modules import rotate

    class Rotate(nn.Module):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return rotate(x[:, :, :3], cos, sin)

    seen = operators(monkeypatch)
    args = (torch.randn(1, 5, 4, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 8))
    lowered = lower(tmp_path / "rotate.pte", Method(Rotate(), args))
    assert seen == ["aten.slice_copy.Tensor", "zoo.rope"]
    check(lowered, Rotate(), [args])
