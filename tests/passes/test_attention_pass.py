"""pytest tests/passes/test_attention_pass.py: spelled-out attention becomes one node that computes the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from backend import passes
from backend.blob import to_blob
from backend.graph import Graph, Ref
from backend.runtime.delegate import Delegate
from tests.passes.make import Maker
from zoo.eager import interpret

INF, LOWEST = math.inf, torch.finfo(torch.float32).min
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}  # sums of up to 300 products in another order


def run(graph: Graph, inputs: list[torch.Tensor]) -> list[np.ndarray]:
    delegate = Delegate(to_blob(graph), {}.__getitem__)
    try:
        return delegate.execute([tensor.numpy() for tensor in inputs])
    finally:
        delegate.close()


def check(m: Maker, inputs: list[torch.Tensor], ops: list[str]) -> Graph:
    """The graph after the passes has these operators and gives what the one before gives, here and on the GPU."""
    before = list(m.graph.values)
    after = passes.run(m.graph)
    assert m.graph.values == before
    assert [node.op for node in after.nodes] == ops
    after.check()
    wanted = interpret(m.graph, inputs)
    for results in (interpret(after, inputs), run(after, inputs), run(m.graph, inputs)):
        for actual, expected in zip(results, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(actual), expected.numpy(), **TOLERANCE)
    return after


SIZES = [(1, 4, 7, 7, 8), (2, 3, 1, 300, 16), (1, 2, 33, 5, 12)]  # batch, heads, queries, keys, head dim


def eager(m: Maker, sizes: tuple[int, ...], scaling: str, masking: str) -> list[torch.Tensor]:
    """Builds attention in the given forms; the last input is the mask, of which one row hides every key."""
    batch, heads, queries, keys, depth = sizes
    q, k, v = (
        m.input(batch, heads, queries, depth),
        m.input(batch, heads, keys, depth),
        m.input(batch, heads, keys, depth),
    )
    inputs = [torch.randn(m.shape(ref)) for ref in (q, k, v)]
    root = depth**-0.25
    if scaling in ("query", "both"):
        q = m("mul.Tensor", self=q, other=root if scaling == "both" else root * root)
    if scaling == "both":
        k = m("div.Tensor", self=k, other=1 / root)
    if scaling == "stored":  # k is kept transposed
        k = m("permute.default", self=k, dims=[0, 1, 3, 2])
        k = m("clone.default", self=k)
        k = m("permute.default", self=k, dims=[0, 1, 3, 2])
    scores = m("matmul.default", self=q, other=m("transpose.int", self=k, dim0=-1, dim1=-2))
    if scaling == "div":
        scores = m("div.Tensor", self=scores, other=1 / root**2)
    if scaling == "stored":
        scores = m("mul.Scalar", self=scores, other=root**2)
    visible = torch.rand(batch, 1, queries, keys) < 0.7
    visible[..., 0] = True
    visible[0, 0, queries // 2] = False
    if masking.startswith("add"):
        mask = m.input(batch, 1, queries, keys)
        inputs.append(torch.where(visible, 0.0, -INF if masking == "add -inf" else LOWEST))
        scores = (
            m("add.Tensor", self=mask, other=scores)
            if masking == "add -inf"
            else m("add.Tensor", self=scores, other=mask)
        )
    elif masking != "none":
        mask = m.input(batch, 1, queries, keys, dtype="bool")
        inputs.append(visible)
        if masking == "where -inf":
            fill = m("full_like.default", self=scores, fill_value=-INF)
            scores = m("where.self", condition=mask, self=scores, other=fill)
        else:
            hidden = m("logical_not.default", self=mask)
            fill = m("scalar_tensor.default", s=-INF if masking == "not -inf" else LOWEST)
            scores = m("where.self", condition=hidden, self=fill, other=scores)
    weights = m("softmax.int", self=scores, dim=-1)
    m.graph.outputs = [m("matmul.default", self=weights, other=v).value]
    return inputs


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("masking", ["none", "add -inf", "add lowest", "where -inf", "not -inf", "not lowest"])
def test_masks(sizes, masking):
    """A query that sees no key is NaN after -inf and looks at all keys alike after a large negative number."""
    torch.manual_seed(0)
    m = Maker()
    inputs = eager(m, sizes, "div", masking)
    extra = ["aten.where.self"] if masking == "not lowest" else []
    hidden = ["aten.logical_not.default"] if extra else []
    after = check(m, inputs, [*hidden, *extra, "zoo.sdpa"])
    assert after.nodes[-1].args["scale"] == pytest.approx(sizes[-1] ** -0.5)
    if masking.endswith("-inf"):
        assert np.isnan(run(after, inputs)[0]).any()


@pytest.mark.parametrize("scaling", ["query", "both", "div", "stored"])
def test_scales(scaling):
    torch.manual_seed(0)
    m = Maker()
    inputs = eager(m, SIZES[0], scaling, "add lowest")
    after = passes.run(m.graph)
    assert after.nodes[-1].op == "zoo.sdpa"
    assert after.nodes[-1].args["scale"] == pytest.approx(SIZES[0][-1] ** -0.5)
    check(m, inputs, [node.op for node in after.nodes])


def test_three_dims_through_bmm():
    torch.manual_seed(0)
    m = Maker()
    q, k, v = m.input(6, 5, 8), m.input(6, 9, 8), m.input(6, 9, 8)
    scores = m("bmm.default", self=q, mat2=m("permute.default", self=k, dims=[0, 2, 1]))
    m.graph.outputs = [m("bmm.default", self=m("softmax.int", self=scores, dim=2), mat2=v).value]
    check(m, [torch.randn(m.shape(ref)) for ref in (q, k, v)], ["zoo.sdpa"])


def without(change: str) -> tuple[Maker, list[torch.Tensor]]:
    """Things that look like attention and are not."""
    m = Maker()
    q, k, v = m.input(1, 2, 5, 8), m.input(1, 2, 5, 8), m.input(1, 2, 5, 8)
    scores = m("matmul.default", self=q, other=m("permute.default", self=k, dims=[0, 1, 3, 2]))
    if change == "tanh":
        scores = m("tanh.default", self=scores)
    if change == "fill":
        mask = m("lt.Scalar", self=scores, other=0.5)
        scores = m("where.self", condition=mask, self=scores, other=m("scalar_tensor.default", s=-5.0))
    weights = m("softmax.int", self=scores, dim=-2 if change == "axis" else -1)
    if change == "scaled":
        weights = m("mul.Tensor", self=weights, other=0.5)
    m.graph.outputs = [m("matmul.default", self=weights, other=v).value]
    if change == "weights":
        m.graph.outputs.append(weights.value)
    return m, [torch.randn(1, 2, 5, 8) for _ in range(3)]


@pytest.mark.parametrize("change", ["tanh", "fill", "axis", "scaled", "weights"])
def test_what_is_not_attention_stays(change):
    torch.manual_seed(0)
    m, inputs = without(change)
    check(m, inputs, [node.op for node in m.graph.nodes])


@pytest.mark.parametrize("form", ["expand", "interleave"])
@pytest.mark.parametrize("fused", [False, True])
def test_repeated_heads_are_grouped(form, fused):
    torch.manual_seed(0)
    m = Maker()
    q, k, v = m.input(2, 6, 5, 8), m.input(2, 2, 9, 8), m.input(2, 2, 9, 8)
    inputs = [torch.randn(m.shape(ref)) for ref in (q, k, v)]

    def repeated(x: Ref) -> Ref:
        if form == "interleave":
            return m("repeat_interleave.self_int", self=x, repeats=3, dim=1)
        wide = m("expand.default", self=m("unsqueeze.default", self=x, dim=2), size=[2, 2, 3, 9, 8])
        return m("reshape.default", self=m("clone.default", self=wide), shape=[2, 6, 9, 8])

    k, v = repeated(k), repeated(v)
    if fused:
        out = m("scaled_dot_product_attention.default", query=q, key=k, value=v)
    else:
        scores = m("matmul.default", self=q, other=m("permute.default", self=k, dims=[0, 1, 3, 2]))
        out = m("matmul.default", self=m("softmax.int", self=scores, dim=-1), other=v)
    m.graph.outputs = [out.value]
    after = check(m, inputs, ["aten.scaled_dot_product_attention.default" if fused else "zoo.sdpa"])
    assert after.nodes[0].args["enable_gqa"] is True


def test_heads_in_another_order_are_not_grouped():
    """repeat along the heads, [h0 h1 h0 h1], is not [h0 h0 h1 h1]."""
    torch.manual_seed(0)
    m = Maker()
    q, k, v = m.input(1, 4, 5, 8), m.input(1, 2, 9, 8), m.input(1, 2, 9, 8)
    inputs = [torch.randn(m.shape(ref)) for ref in (q, k, v)]

    def repeated(x: Ref) -> Ref:
        wide = m("expand.default", self=m("unsqueeze.default", self=x, dim=1), size=[1, 2, 2, 9, 8])
        return m("reshape.default", self=wide, shape=[1, 4, 9, 8])

    m.graph.outputs = [m("scaled_dot_product_attention.default", query=q, key=repeated(k), value=repeated(v)).value]
    check(m, inputs, [node.op for node in m.graph.nodes])


def test_origins_are_joined():
    from dataclasses import replace

    m = Maker()
    eager(m, SIZES[0], "query", "where -inf")
    m.graph.nodes = [replace(node, origin=(f"n{i}",)) for i, node in enumerate(m.graph.nodes)]
    after = passes.run(m.graph)
    assert len(after.nodes) == 1
    names = {name for node in m.graph.nodes if node.op != "aten.full_like.default" for name in node.origin}
    assert set(after.nodes[0].origin) == names
