"""pytest tests/ops/test_attention.py

Tolerances: weights are exp of float32 sums of up to 256 products, so 1e-5 relative holds for unit normals; float16
results are rounded once.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_close, build, check_op, refusal_of, run_op
from test_matmul import check_chain

from backend.blob import to_blob
from backend.expr import parse
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import attention, registry
from backend.runtime.capabilities import Capabilities, capabilities
from backend.runtime.delegate import Delegate
from backend.runtime.device import get_device

SDPA = "aten.scaled_dot_product_attention.default"
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
HALF = {"atol": 2e-3, "rtol": 2e-3}
INF = float("inf")
# Both kernels for few queries (one span of 256 keys, several) and the tiled one, with tails.
LENGTHS = [(1, 1), (1, 33), (3, 257), (8, 600), (9, 7), (33, 33), (70, 131)]


def qkv(
    queries: int, keys: int, depth: int = 8, width: int | None = None, lead: tuple[int, ...] = (2, 3)
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(*lead, queries, depth),
        torch.randn(*lead, keys, depth),
        torch.randn(*lead, keys, width or depth),
    ]


@pytest.mark.parametrize("queries, keys", LENGTHS)
def test_head_dims(queries, keys):
    for depth, width in ((1, 1), (4, 4), (7, 5), (64, 64), (80, 130), (96, 36), (256, 256), (20, 300)):
        check_op(SDPA, *qkv(queries, keys, depth, width), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("queries, keys", [(5, 7), (32, 32), (3, 600)])
def test_heads_of_many_elements(queries, keys, dtype):
    """Attention between channels: the depth is a picture's pixels. Views, as a channel's pixels are not neighbours."""
    close = CLOSE if dtype == torch.float32 else HALF
    for depth, width in ((1025, 1025), (577, 64), (8, 700)):
        args = [x.to(dtype) for x in qkv(queries, keys, depth, width, lead=(1, 2))]
        check_op(SDPA, *args, **close)
        check_op(SDPA, *(x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in args), scale=0.02, **close)
        check_op(SDPA, *args, attn_mask=torch.rand(queries, keys) > 0.4, **close)
    check_op(SDPA, *(x.to(dtype) for x in qkv(queries, keys, 700, lead=())), **close)


@pytest.mark.parametrize("queries, keys", LENGTHS)
def test_masks(queries, keys):
    args = qkv(queries, keys)
    for shape in (
        (queries, keys),
        (1, keys),
        (queries, 1),
        (3, 1, keys),
        (2, 1, 1, keys),
        (2, 3, queries, keys),
        (1, 1, 1, 1),
    ):
        check_op(SDPA, *args, attn_mask=torch.randn(shape), **CLOSE)
        check_op(SDPA, *args, attn_mask=torch.rand(shape) > 0.4, **CLOSE)


@pytest.mark.parametrize("queries, keys", LENGTHS)
def test_causal_is_aligned_at_the_top_left(queries, keys):
    check_op(SDPA, *qkv(queries, keys), is_causal=True, **CLOSE)


@pytest.mark.parametrize("queries, keys", LENGTHS)
def test_grouped_heads(queries, keys):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, queries, 12), torch.randn(2, 2, keys, 12), torch.randn(2, 3, keys, 12)
    check_op(SDPA, q, k, v, enable_gqa=True, **CLOSE)
    check_op(SDPA, q, k, k, attn_mask=torch.rand(1, 6, queries, keys) > 0.3, enable_gqa=True, **CLOSE)
    check_op(SDPA, q, k[:, :1], v[:, :1], enable_gqa=True, **CLOSE)
    check_op(SDPA, q[0], k[0], v[0], enable_gqa=True, **CLOSE)


@pytest.mark.parametrize("queries, keys", LENGTHS)
def test_ranks_and_broadcast_batches(queries, keys):
    q, k, v = qkv(queries, keys, 12)
    check_op(SDPA, q[0], k[0], v[0], **CLOSE)
    check_op(SDPA, q[0, 0], k[0, 0], v[0, 0], attn_mask=torch.randn(queries, keys), **CLOSE)
    check_op(SDPA, q, k[:1], v[:, :1], **CLOSE)
    check_op(SDPA, q[:, :1], k, v, **CLOSE)


@pytest.mark.parametrize("queries, keys", [(1, 33), (2, 700), (40, 70)])
def test_float16(queries, keys):
    for depth in (16, 7):
        args = [x.half() for x in qkv(queries, keys, depth)]
        check_op(SDPA, *args, **HALF)
        check_op(SDPA, *args, attn_mask=torch.randn(queries, keys).half(), **HALF)
        check_op(SDPA, *args, attn_mask=torch.rand(queries, keys) > 0.3, **HALF)
    long = [torch.full((1, 1, n, 64), 60.0).half() for n in (queries, keys, keys)]  # scores of 230400 before the scale
    check_op(SDPA, *long, **HALF)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_scale(scale):
    check_op(SDPA, *qkv(5, 9), scale=scale, **CLOSE)
    check_op(SDPA, *qkv(20, 9), scale=scale, **CLOSE)


def test_empty():
    check_op(SDPA, *qkv(3, 0))
    check_op(SDPA, *qkv(30, 0, 8, 5))
    check_op(SDPA, *qkv(0, 3))
    check_op(SDPA, *qkv(3, 4, lead=(0, 2)))


# --- rows with little or nothing to see -------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [3, 33, 257, 600])
@pytest.mark.parametrize("queries", [2, 40])
def test_n2_fully_masked_row(queries, keys):
    q, k = torch.ones(1, 1, queries, 4), torch.ones(1, 1, keys, 4)
    mask = torch.zeros(queries, keys)
    mask[1::2] = -INF
    for form in (mask, mask == 0):
        (out,) = run_op(SDPA, q, k, k, attn_mask=form)
        eager = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=form)
        assert_close(out, eager.double().numpy(), atol=1e-6, rtol=0)
        assert (out[0, 0, ::2] == 1).all() or np.allclose(out[0, 0, ::2], 1, atol=1e-6)
        assert (out[0, 0, 1::2] == 0).all()


@pytest.mark.parametrize("queries, keys", [(2, 33), (2, 600), (40, 70)])
def test_row_masked_by_the_lowest_float_is_an_average(queries, keys):
    """A mask of finfo.min everywhere hides nothing: all scores round to the same number."""
    lowest = torch.full((queries, keys), torch.finfo(torch.float32).min)
    q, k, v = qkv(queries, keys)
    golden = v.double().mean(2, keepdim=True).expand(2, 3, queries, 8)
    check_op(SDPA, q, k, v, attn_mask=lowest, golden=lambda: golden, **CLOSE)


@pytest.mark.parametrize("queries", [1, 33])
def test_single_visible_key(queries):
    """A decoder's first step: a cache of 1024 positions of which one is filled; hidden ones are never read."""
    q, k, v = qkv(queries, 1024, 64)
    for visible in (0, 255, 256, 1023):
        mask = torch.zeros(1, 1, queries, 1024, dtype=torch.bool)
        mask[..., visible] = True
        check_op(
            SDPA, q, k, v, attn_mask=mask, golden=lambda at=visible: v[:, :, at : at + 1].double().expand_as(q), **CLOSE
        )


def test_hidden_keys_of_a_cache_do_not_matter():
    q, k, v = qkv(1, 600)
    mask = torch.arange(600) < 5
    clean = run_op(SDPA, q, k, v, attn_mask=mask[None])[0]
    k[:, :, 5:], v[:, :, 5:] = float("nan"), float("nan")
    assert np.array_equal(run_op(SDPA, q, k, v, attn_mask=mask[None])[0], clean)


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("shared", [True, False])
def test_steps_that_hide_all_their_keys_are_not_made(form, shared):
    """A prompt in a cache of 4500 positions: open stretches here and there, and NaN where whole steps are hidden."""
    q, k, v = qkv(67, 4500, 16, lead=(1, 2))
    open_ = torch.zeros(1, 1, 67, 4500, dtype=torch.bool)
    for first, last in ((5, 9), (1000, 1100), (2047, 2049), (4099, 4100), (4490, 4500)):
        open_[..., first:last] = True
    if not shared:
        open_ = open_ & (torch.rand(1, 1, 67, 4500) < 0.5)
        open_[..., 4490] = True
        open_[:, :, 40, :] = False  # a query that sees nothing
    golden = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), open_)
    for first, last in ((64, 960), (1152, 1984), (2112, 4096), (4160, 4480)):  # whole tiles of 64
        k[:, :, first:last], v[:, :, first:last] = float("nan"), float("nan")
    mask = open_[:, :, :1].expand(1, 1, 67, 4500) if shared else open_
    if form == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -INF)
    check_op(SDPA, q, k, v, attn_mask=mask, golden=lambda: golden, **CLOSE)


@pytest.mark.parametrize("queries, keys", [(3, 33), (3, 600), (40, 70)])
def test_nan_and_infinities(queries, keys):
    for bad in (float("nan"), INF, -INF):
        q, k, v = qkv(queries, keys)
        q[0, 1, 2, 3] = bad
        check_op(SDPA, q, k, v, **CLOSE)
        q, k, v = qkv(queries, keys)
        v[1, 0, keys - 1, 2] = bad
        check_op(SDPA, q, k, v, **CLOSE)


@pytest.mark.parametrize("queries, keys", [(3, 600), (40, 70)])
def test_large_scores_do_not_overflow(queries, keys):
    q, k, v = qkv(queries, keys)
    check_op(SDPA, q * 100, k * 100, v, atol=1e-3, rtol=1e-3)  # eps × scores of some 1e4
    check_op(SDPA, q, k, v, attn_mask=torch.full((queries, keys), -200.0), atol=2e-5, rtol=2e-5)


# --- strides, fusion, dynamic shapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("queries, keys", [(1, 40), (6, 600), (40, 70)])
def test_permuted_operands_are_not_copied(queries, keys):
    """Nor is the result, read with the heads of a position side by side."""
    torch.manual_seed(0)
    inputs = {
        "q0": torch.randn(2, queries, 3, 16), "k0": torch.randn(2, keys, 3, 16), "v0": torch.randn(3, 16, 2, keys),
        "m": torch.randn(keys, queries),
    }  # fmt: skip
    templates = check_chain(
        inputs,
        ("q", "aten.permute.default", {"self": "q0", "dims": [0, 2, 1, 3]}),
        ("k", "aten.permute.default", {"self": "k0", "dims": [0, 2, 1, 3]}),
        ("v", "aten.permute.default", {"self": "v0", "dims": [2, 0, 3, 1]}),
        ("mask", "aten.permute.default", {"self": "m", "dims": [1, 0]}),
        ("y", SDPA, {"query": "q", "key": "k", "value": "v", "attn_mask": "mask"}),
        ("out", "aten.permute.default", {"self": "y", "dims": [0, 2, 1, 3]}),
        **CLOSE,
    )
    kernels = (
        "attention",
        "attention_few",
        "attention_wide",
        "attention_seen",
        "attention_merge",
        "attention_merge_few",
    )
    assert set(templates) <= set(kernels)


@pytest.mark.parametrize("queries, keys", [(1, 40), (40, 70)])
def test_slices_and_expanded_masks(queries, keys):
    """Offsets that are no multiple of 4, and a mask computed from positions, then expanded."""
    torch.manual_seed(0)
    templates = check_chain(
        {
            "x": torch.randn(2, 3, queries, 17),
            "c": torch.randn(2, 2, 3, keys, 17),
            "n": torch.arange(keys).reshape(1, 1, 1, keys),
        },
        ("q", "aten.slice.Tensor", {"self": "x", "dim": 3, "start": 1, "end": 17}),
        ("c1", "aten.slice.Tensor", {"self": "c", "dim": 4, "start": 0, "end": 16}),
        ("k", "aten.select.int", {"self": "c1", "dim": 0, "index": 0}),
        ("v", "aten.select.int", {"self": "c1", "dim": 0, "index": 1}),
        ("seen", "aten.le.Scalar", {"self": "n", "other": 31}),
        ("mask", "aten.expand.default", {"self": "seen", "size": [2, 1, queries, keys]}),
        ("out", SDPA, {"query": "q", "key": "k", "value": "v", "attn_mask": "mask"}),
        **CLOSE,
    )
    # The mask, once, at its own size; and the result, which lies by position, as the graph's output.
    assert templates.count("pointwise") == (1 if queries == 1 else 2)


def test_dynamic_lengths():
    """One graph: prompts and single steps, over caches on both sides of a span."""
    torch.manual_seed(0)
    graph = Graph(symbols={"s": (0, 64), "t": (0, 1024)})
    queries, keys = parse("s"), parse("t")
    shapes: list[tuple[Any, ...]] = [(1, 4, queries, 16), (1, 2, keys, 16), (1, 2, keys, 16), (1, 1, queries, keys)]
    graph.values = [TensorSpec("bool" if i == 3 else "float32", shape) for i, shape in enumerate([*shapes, shapes[0]])]
    graph.inputs, graph.outputs = [0, 1, 2, 3], [4]
    names = ("query", "key", "value", "attn_mask")
    args: dict[str, Any] = {name: Ref(i) for i, name in enumerate(names)}
    args |= {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": True}
    graph.nodes = [Node(SDPA, args, (4,))]
    assert registry.refusal(graph.call(graph.nodes[0])) is None
    delegate = Delegate(to_blob(graph), {}.__getitem__)
    for s, t in ((33, 33), (1, 34), (1, 300), (5, 0), (0, 7), (40, 513), (1, 34)):
        q, k, v = torch.randn(1, 4, s, 16), torch.randn(1, 2, t, 16), torch.randn(1, 2, t, 16)
        mask = torch.rand(1, 1, s, t) > 0.5
        golden = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), mask, enable_gqa=True
        )
        (out,) = delegate.execute([x.numpy() for x in (q, k, v, mask)])
        assert_close(out, golden.numpy(), **CLOSE)
    delegate.close()


def test_refusals():
    args = qkv(3, 5)
    assert "dropout" in (refusal_of(SDPA, *args, dropout_p=0.5) or "")
    assert "float64" in (refusal_of(SDPA, *(x.double() for x in args)) or "")
    assert "rank 5" in (refusal_of(SDPA, *(x[None] for x in args)) or "")
    assert refusal_of(SDPA, *args, scale=1 / math.sqrt(3)) is None


@pytest.mark.parametrize("span", attention.SPANS)
@pytest.mark.parametrize("few", [attention.ON_GPU, attention.ON_PROCESSOR], ids=lambda few: f"split{few.SPLIT}")
def test_few_queries_as_on_gpus_and_on_processors(few, span, monkeypatch):
    """On any device: short spans, too, and several invocations a score."""
    monkeypatch.setattr(attention, "SPANS", (span, span))
    monkeypatch.setattr(attention, "choose_few", lambda b: few)
    monkeypatch.setattr(attention.lanes, "usable", lambda b: False)  # no products in its place
    for queries, keys in ((1, 33), (3, 257), (8, 600)):
        test_masks(queries, keys)
        test_causal_is_aligned_at_the_top_left(queries, keys)
        test_grouped_heads(queries, keys)
        test_n2_fully_masked_row(queries, keys)
        test_head_dims(queries, keys)
    test_float16(2, 700)
    test_single_visible_key(1)
    test_hidden_keys_of_a_cache_do_not_matter()
    test_nan_and_infinities(3, 600)
    test_permuted_operands_are_not_copied(6, 600)
    test_dynamic_lengths()


def test_many_small_windows_are_not_given_to_the_kernel_of_few_queries(monkeypatch):
    """On a GPU, unless keys are hidden; the results are the same."""
    monkeypatch.setattr(attention, "usable", lambda b: True)
    monkeypatch.setattr(attention.lanes, "usable", lambda b: False)
    q, k, v = (
        x * 0.5 for x in (torch.randn(1030, 1, 3, 24), torch.randn(1030, 1, 17, 24), torch.randn(1030, 1, 17, 8))
    )
    mask = torch.ones(3, 17, dtype=torch.bool)
    for options, wide in (({}, True), ({"attn_mask": mask}, False), ({"is_causal": True}, False)):
        graph, feeds, data, _ = build(SDPA, (q, k, v), options)
        delegate = Delegate(to_blob(graph), data.__getitem__)
        templates = {step.template for step in delegate.plan([feed.shape for feed in feeds]).steps}
        assert ("attention_wide" in templates, "attention_few" in templates) == (wide, not wide)
        (out,) = delegate.execute(feeds)
        delegate.close()
        golden = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
        assert_close(out, golden.numpy(), **CLOSE)


def test_a_span_of_hidden_keys_ends_early(monkeypatch):
    """Its sums stay what they were in memory, here NaN, and do not count."""
    monkeypatch.setattr(attention, "SPANS", (64, 64))
    monkeypatch.setattr(attention, "choose_few", lambda b: attention.ON_GPU)
    q, k, v = qkv(1, 640, 64, lead=(1, 2))
    mask = torch.zeros(1, 640, dtype=torch.bool)
    mask[:, 70:90] = True
    graph, feeds, data, _ = build(SDPA, (q, k, v), {"attn_mask": mask})
    delegate = Delegate(to_blob(graph), data.__getitem__)
    plan = delegate.plan([feed.shape for feed in feeds])
    few = next(step for step in plan.steps if step.template == "attention_few")
    assert few.groups == (20, 1, 1)
    buffers = {id(buffer): buffer for buffer, _ in plan._places.values()}.values()
    poison = np.float32(np.nan).view(np.uint32)
    for buffer in buffers:
        plan.device.write(buffer, np.full(buffer.size // 4, poison).view(np.uint8))
    (out,) = delegate.execute(feeds)
    left = sum(int((np.frombuffer(plan.device.read(b, b.size), np.uint32) == poison).sum()) for b in buffers)
    delegate.close()
    golden = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
    assert_close(out, golden.numpy(), **CLOSE)
    assert left >= 2 * 9 * 64  # of two heads, the sums of nine spans of ten


@pytest.mark.parametrize("few", [attention.ON_GPU, attention.ON_PROCESSOR], ids=lambda few: f"slices{few.SLICES}")
def test_more_spans_of_many_queries_than_are_written_out(few, monkeypatch):
    """A device that ends long loops gets them in as many spans as it takes."""
    force(TINY, monkeypatch)
    monkeypatch.setattr(attention, "MOST_SPANS", 2)
    monkeypatch.setattr(attention, "choose_few", lambda b: few)
    queries, keys = 20, 700
    monkeypatch.setattr(
        "backend.runtime.delegate.capabilities",
        lambda device: replace(capabilities(device), most_iterations=3 * TINY.iterations(8)),
    )
    test_masks(queries, keys)
    test_causal_is_aligned_at_the_top_left(queries, keys)


# --- the tiles of GPUs, on any device ---------------------------------------------------------------------------------

# As small as they get, so that a few dozen rows are several tiles, and a driver of a processor compiles them quickly.
TINY = attention.Tile(4, 8, 2, 1, 8, 8)
SPREAD = [
    (test_head_dims, (70, 131)),
    (test_masks, (33, 33)),
    (test_masks, (70, 131)),
    (test_causal_is_aligned_at_the_top_left, (33, 33)),
    (test_causal_is_aligned_at_the_top_left, (70, 131)),
    (test_causal_is_aligned_at_the_top_left, (131, 70)),
    (test_grouped_heads, (70, 131)),
    (test_ranks_and_broadcast_batches, (70, 131)),
    (test_float16, (40, 70)),
    (test_scale, (-0.3,)),
    (test_heads_of_many_elements, (32, 32, torch.float32)),
    (test_n2_fully_masked_row, (40, 600)),
    (test_row_masked_by_the_lowest_float_is_an_average, (40, 70)),
    (test_single_visible_key, (33,)),
    (test_steps_that_hide_all_their_keys_are_not_made, ("bool", True)),
    (test_steps_that_hide_all_their_keys_are_not_made, ("bool", False)),
    (test_steps_that_hide_all_their_keys_are_not_made, ("float", True)),
    (test_steps_that_hide_all_their_keys_are_not_made, ("float", False)),
    (test_nan_and_infinities, (40, 70)),
    (test_large_scores_do_not_overflow, (40, 70)),
    (test_permuted_operands_are_not_copied, (40, 70)),
    (test_slices_and_expanded_masks, (40, 70)),
    (test_dynamic_lengths, ()),
]


def force(tile: attention.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "usable", lambda b: True)
    monkeypatch.setattr(attention, "choose", lambda job, b: tile)


@pytest.mark.parametrize("test, args", SPREAD, ids=lambda x: getattr(x, "__name__", None) or "-".join(map(str, x)))
def test_wide(test, args, monkeypatch):
    """So little work is always shared out over spans."""
    force(TINY, monkeypatch)
    test(*args)


def test_wide_in_one_span(monkeypatch):
    force(replace(TINY, busy=1), monkeypatch)
    test_masks(70, 131)
    test_causal_is_aligned_at_the_top_left(70, 131)
    test_n2_fully_masked_row(40, 33)
    test_steps_that_hide_all_their_keys_are_not_made("bool", False)
    test_nan_and_infinities(40, 70)
    test_permuted_operands_are_not_copied(40, 70)


# HIGH itself needs 45 KiB of workgroup memory, which not every device has: half its keys do with 32 KiB.
SHIPPED = [replace(attention.HIGH, RN=1), *attention.TILES]


@pytest.mark.parametrize("tile", SHIPPED, ids=lambda tile: f"{tile.queries}x{tile.keys}")
def test_tiles_that_are_shipped(tile, monkeypatch):
    if not tile.fits(40, capabilities(get_device())):
        pytest.skip(f"{tile.bytes(40)} bytes of workgroup memory are more than this device has")
    force(tile, monkeypatch)
    check_op(SDPA, *qkv(70, 131, 40, 40), attn_mask=torch.rand(70, 131) > 0.4, **CLOSE)


def test_layers_look_through_a_mask_once(monkeypatch):
    force(TINY, monkeypatch)
    torch.manual_seed(0)
    again = {"key": "k", "value": "k", "attn_mask": "m"}
    templates = check_chain(
        {"q": torch.randn(1, 2, 40, 8), "k": torch.randn(1, 2, 70, 8), "m": torch.rand(40, 70) > 0.3},
        ("y", SDPA, {"query": "q", **again}),
        ("z", SDPA, {"query": "y", **again}),
        **CLOSE,
    )
    assert templates.count("attention_seen") == 1
    assert templates.count("attention_wide") == 2


@pytest.mark.parametrize(
    "nbytes, pairs, queries, depth, chosen",
    [
        (65536, 16, 2048, 128, attention.HIGH),
        (49152, 16, 2048, 128, attention.FLAT),  # the high one holds at most 64 columns there
        (49152, 16, 2048, 64, attention.HIGH),
        (49152, 8, 640, 64, attention.SMALL),  # 40 high tiles
        (49152, 64, 144, 32, attention.SMALL),  # nearly half of a second high tile would be empty
        (49152, 16, 512, 128, attention.FLAT),
        (49152, 16, 128, 128, attention.DEEP),
        (16384, 16, 640, 128, attention.SMALL),
        (8192, 16, 640, 128, None),
    ],
)
def test_choice_by_work_and_device(nbytes, pairs, queries, depth, chosen):
    device = SimpleNamespace(capabilities=Capabilities(max_workgroup_bytes=nbytes))
    job = SimpleNamespace(pairs=pairs, params={"queries": queries, "depth": depth, "values": depth})
    assert attention.choose(job, device) is chosen


@pytest.mark.parametrize("keys, depth, masked", [(33001, 128, True), (70001, 16, False)])
def test_keys_of_a_long_context(keys, depth, masked):
    """A device that ends long loops (llvmpipe) gets them in spans, and nothing is left out."""
    torch.manual_seed(0)
    mask = {"attn_mask": torch.rand(9, keys) > 0.1} if masked else {}
    close = {"atol": 1e-5, "rtol": 1e-4}  # means of tens of thousands of values, of which a few stand out
    q, k, v = (torch.randn(1, 1, count, depth) for count in (9, keys, keys))
    check_op(SDPA, q, k, v, **mask, **close)


def test_scores_on_a_processor_are_few_at_a_time():
    """Eight heads of 1024 x 1024 scores are 32 MiB: they, and a copy of them, are kept for some queries at a time."""
    graph = Graph([TensorSpec("float32", (1, 8, 1024, 16))] * 4, inputs=[0, 1, 2], outputs=[3])
    arguments = {"query": Ref(0), "key": Ref(1), "value": Ref(2)}
    graph.nodes = [Node(SDPA, arguments, (3,))]
    delegate = Delegate(to_blob(graph), {}.__getitem__)
    if not capabilities(get_device()).on_processor:
        pytest.skip("GPUs keep no scores")
    assert delegate.plan([(1, 8, 1024, 16)] * 3).buffer_bytes < 24 << 20
    delegate.close()
