"""pytest tests/ops/test_matmul.py

Tolerances: sums of K products in float32, in another order than eager's: an error of about eps × sqrt(K) × the sum's
scale, so 1e-4 covers K up to some hundreds of unit normals. float16 results are rounded once from a float32 sum.
Integers are exact.
"""

from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_close, check_op, refusal_of, run_graph

from backend.blob import to_blob
from backend.convert import dtype_name, normalize
from backend.expr import parse
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import registry, tiles
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities
from backend.runtime.delegate import Delegate

SUMS = {"atol": 1e-4, "rtol": 1e-4}
HALF = {"atol": 2e-3, "rtol": 2e-3}
PRIMES = (1, 2, 3, 5, 7, 11, 13, 17)


def chain(
    inputs: dict[str, torch.Tensor], *steps: tuple[str, str, dict[str, Any]]
) -> tuple[Graph, list[np.ndarray], torch.Tensor]:
    """A graph of named steps (result, op, arguments: a string stands for the tensor it names), and float64's result."""
    graph, known, index = Graph(), dict(inputs), {}
    for name, tensor in inputs.items():
        index[name] = graph.add_value(TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape)))
        graph.inputs.append(index[name])
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    for result, op, args in steps:
        namespace, base, kind = op.split(".")
        target = getattr(getattr(getattr(torch.ops, namespace), base), kind)
        known[result] = target(**{k: known.get(v, v) if isinstance(v, str) else v for k, v in args.items()})
        wide[result] = target(**{k: wide.get(v, v) if isinstance(v, str) else v for k, v in args.items()})
        index[result] = graph.add_value(TensorSpec(dtype_name(known[result].dtype), tuple(known[result].shape)))
        named = normalize(target, (), {k: Ref(index[v]) if isinstance(v, str) else v for k, v in args.items()})
        graph.nodes.append(Node(op, named, (index[result],)))
        assert registry.refusal(graph.call(graph.nodes[-1])) is None
    graph.outputs = [index[steps[-1][0]]]
    return graph, [tensor.contiguous().numpy() for tensor in inputs.values()], wide[steps[-1][0]]


def check_chain(
    inputs: dict[str, torch.Tensor], *steps: tuple[str, str, dict[str, Any]], **tolerance: float
) -> list[Any]:
    """Runs the chain against float64; returns the templates that were dispatched."""
    graph, feeds, golden = chain(inputs, *steps)
    (actual,) = run_graph(graph, feeds)
    assert_close(actual, golden.numpy(), **(tolerance or SUMS))
    return [d.template for d in lower_graph(graph, {}, Capabilities()).dispatches]


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape).float()


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 4, 7, 13, 64, 132, 257])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 17, 65])
def test_linear_sizes(rows, depth):
    torch.manual_seed(0)
    for cols in (1, 4, 5, 17, 68):
        check_op(
            "aten.linear.default", torch.randn(2, rows, depth), torch.randn(cols, depth), torch.randn(cols), **SUMS
        )
        check_op("aten.mm.default", torch.randn(rows, depth), torch.randn(depth, cols), **SUMS)


@pytest.mark.parametrize("rows", range(1, 18))
def test_odd_sizes_are_exact(rows):
    torch.manual_seed(rows)
    for cols in PRIMES:
        for depth in (rows, 29, 113):
            check_op("aten.mm.default", integers(rows, depth), integers(depth, cols), atol=0, rtol=0)


@pytest.mark.parametrize("shape", [(130, 70, 190), (257, 129, 131), (64, 512, 64), (33, 1000, 40)])
def test_tiles(shape):
    rows, depth, cols = shape
    torch.manual_seed(0)
    check_op("aten.mm.default", torch.randn(rows, depth), torch.randn(depth, cols), atol=3e-4, rtol=1e-4)
    check_op("aten.linear.default", torch.randn(rows, depth), torch.randn(cols, depth), atol=3e-4, rtol=1e-4)


def test_many_tiles():
    """Enough 64 × 64 tiles for the large blocks, with tails on every side."""
    torch.manual_seed(0)
    check_op("aten.bmm.default", integers(3, 197, 45), integers(3, 45, 203), atol=0, rtol=0)
    check_op("aten.bmm.default", integers(3, 196, 48), integers(3, 48, 204), atol=0, rtol=0)


def test_empty_sizes():
    check_op("aten.mm.default", torch.randn(3, 0), torch.randn(0, 5))
    check_op("aten.linear.default", torch.randn(2, 3, 0), torch.randn(5, 0), torch.randn(5))
    check_op("aten.mm.default", torch.randn(0, 4), torch.randn(4, 5))
    check_op("aten.mm.default", torch.randn(3, 4), torch.randn(4, 0))
    check_op("aten.bmm.default", torch.randn(0, 3, 4), torch.randn(0, 4, 5))
    check_op("aten.addmm.default", torch.randn(5), torch.randn(3, 0), torch.randn(0, 5), beta=2.0)
    check_op("aten.dot.default", torch.randn(0), torch.randn(0))


# --- cases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 33])
def test_n6_float32_stays_float32(rows):
    x = torch.zeros(rows, 64)
    x[0, 0] = 1e5
    check_op("aten.linear.default", x, torch.eye(64), atol=0, rtol=0)
    check_op("aten.mm.default", x, torch.eye(64), atol=0, rtol=0)


def test_n8_every_batch():
    torch.manual_seed(0)
    check_op("aten.matmul.default", integers(2, 4, 5, 7), integers(2, 4, 7, 3), atol=0, rtol=0)
    check_op("aten.matmul.default", integers(2, 4, 20, 37), integers(2, 4, 37, 19), atol=0, rtol=0)


def test_r2_batch_of_70000():
    torch.manual_seed(0)
    check_op("aten.bmm.default", integers(70000, 2, 2), integers(70000, 2, 2), atol=0, rtol=0)


def test_r2_more_groups_than_a_dimension_holds():
    """A row of 65536 × 4 + 4 results, 4 a workgroup, on the last fold edge too."""
    weight = torch.arange(262148).float().reshape(-1, 1) * torch.ones(1, 9)
    check_op("aten.linear.default", torch.ones(1, 9), weight, atol=0, rtol=0)


# --- matmul's ranks and broadcasting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "left, right",
    [
        ((5,), (5,)), ((5,), (5, 3)), ((3, 5), (5,)), ((5,), (2, 5, 3)), ((2, 3, 5), (5,)), ((2, 3, 5), (5, 4)),
        ((3, 5), (2, 5, 4)), ((3, 1, 5, 33), (4, 33, 20)), ((1, 4, 9, 12), (3, 1, 12, 16)),
        ((2, 1, 3, 1, 9, 30), (2, 1, 5, 30, 11)), ((2, 3, 2, 1, 10, 12), (1, 3, 1, 2, 12, 9)), ((7, 0, 3, 4), (4, 5)),
    ],
)  # fmt: skip
def test_matmul_ranks(left, right):
    torch.manual_seed(0)
    check_op("aten.matmul.default", torch.randn(left), torch.randn(right), **SUMS)


def test_linear_ranks():
    torch.manual_seed(0)
    check_op("aten.linear.default", torch.randn(12), torch.randn(7, 12), torch.randn(7), **SUMS)
    check_op("aten.linear.default", torch.randn(12), torch.randn(12), **SUMS)
    check_op("aten.linear.default", torch.randn(2, 3, 4, 12), torch.randn(7, 12), **SUMS)


def test_other_products():
    torch.manual_seed(0)
    mat, other = torch.randn(9, 30), torch.randn(30, 11)
    for bias in (torch.randn(11), torch.randn(9, 11), torch.randn(9, 1), torch.randn(())):
        check_op("aten.addmm.default", bias, mat, other, beta=0.5, alpha=-2.0, **SUMS)
    check_op("aten.addmm.default", torch.full((11,), float("nan")), mat, other, beta=0, **SUMS)
    check_op("aten.baddbmm.default", torch.randn(11), torch.randn(4, 9, 30), torch.randn(4, 30, 11), alpha=3, **SUMS)
    check_op("aten.mv.default", mat, torch.randn(30), **SUMS)
    check_op("aten.addmv.default", torch.randn(9), mat, torch.randn(30), beta=2.0, alpha=0.25, **SUMS)
    check_op("aten.dot.default", torch.randn(3001), torch.randn(3001), atol=1e-3, rtol=1e-4)


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_float16(rows):
    torch.manual_seed(0)
    for depth, cols in ((64, 48), (37, 29), (5, 3)):
        x, weight = torch.randn(rows, depth).half(), torch.randn(cols, depth).half() / 4
        check_op("aten.linear.default", x, weight, torch.randn(cols).half(), **HALF)
        check_op("aten.mm.default", x, weight.t().contiguous(), **HALF)


def test_float16_sums_are_float32():
    """Partial sums beyond float16's 65504, and addends below its resolution."""
    x = torch.cat([torch.full((1, 512), 200.0), torch.full((1, 512), -200.0), torch.full((1, 64), 0.25)], 1).half()
    check_op("aten.linear.default", x, torch.ones(1, 1088).half().mul(4), atol=0, rtol=0)
    check_op("aten.linear.default", x.expand(20, -1), torch.ones(9, 1088).half().mul(4), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers(dtype):
    """Exact; small ints wrap as torch's."""
    torch.manual_seed(0)
    low = 0 if dtype == torch.uint8 else -9
    for rows, depth, cols in ((1, 70, 9), (3, 5, 4), (20, 33, 17)):
        a, c = torch.randint(low, 10, (rows, depth)).to(dtype), torch.randint(low, 10, (depth, cols)).to(dtype)
        check_op("aten.mm.default", a, c)
        check_op("aten.addmm.default", torch.randint(0, 99, (cols,)).to(dtype), a, c, beta=3, alpha=2)


def test_refusals():
    assert "float64" in (refusal_of("aten.mm.default", torch.randn(2, 2).double(), torch.randn(2, 2).double()) or "")
    graph = Graph([TensorSpec("float32", (2, 2)), TensorSpec("float16", (2, 2)), TensorSpec("float32", (2, 2))])
    call = graph.call(Node("aten.mm.default", {"self": Ref(0), "mat2": Ref(1)}, (2,)))
    assert "different dtypes" in (registry.refusal(call) or "")


@pytest.mark.parametrize("rows", [1, 20])
def test_nan_and_infinities_stay_in_their_row(rows):
    x = torch.randn(rows + 3, 66)
    x[0, 3], x[1, 65], x[2, 1] = float("nan"), float("inf"), float("-inf")
    check_op("aten.linear.default", x, torch.rand(21, 66) + 0.1, **SUMS)
    weight = torch.rand(21, 66)
    weight[4, 65] = float("inf")
    check_op("aten.linear.default", torch.rand(rows, 66) + 0.1, weight, **SUMS)


# --- strides, fusion, dynamic shapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_transposed_operands_are_not_copied(rows):
    torch.manual_seed(0)
    inputs = {"x": torch.randn(3, 64, rows), "y": torch.randn(3, 52, 64)}
    templates = check_chain(
        inputs,
        ("a", "aten.permute.default", {"self": "x", "dims": [0, 2, 1]}),
        ("b", "aten.permute.default", {"self": "y", "dims": [0, 2, 1]}),
        ("out", "aten.bmm.default", {"self": "a", "mat2": "b"}),
    )
    assert len(templates) == 1


def test_slices_keep_their_offset():
    torch.manual_seed(0)
    for start in (1, 4):
        for step in (1, 2):
            templates = check_chain(
                {"x": torch.randn(11, 90), "w": torch.randn(3, 80, 50)},
                (
                    "a",
                    "aten.slice.Tensor",
                    {"self": "x", "dim": 1, "start": start, "end": start + 40 * step, "step": step},
                ),
                ("b", "aten.select.int", {"self": "w", "dim": 0, "index": 2}),
                ("c", "aten.slice.Tensor", {"self": "b", "dim": 0, "start": start, "end": start + 40}),
                ("out", "aten.mm.default", {"self": "a", "mat2": "c"}),
            )
            assert len(templates) == 1


def test_expanded_batch_is_read_in_place():
    templates = check_chain(
        {"x": torch.randn(2, 3, 9, 20), "w": torch.randn(2, 1, 20, 12)},
        ("b", "aten.expand.default", {"self": "w", "size": [2, 3, 20, 12]}),
        ("out", "aten.matmul.default", {"self": "x", "other": "b"}),
    )
    assert len(templates) == 1


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_bias_and_activation_are_fused(rows):
    templates = check_chain(
        {"x": torch.randn(rows, 40), "w": torch.randn(24, 40), "bias": torch.randn(24), "r": torch.randn(rows, 24)},
        ("y", "aten.linear.default", {"input": "x", "weight": "w", "bias": "bias"}),
        ("g", "aten.gelu.default", {"self": "y"}),
        ("out", "aten.add.Tensor", {"self": "g", "other": "r"}),
    )
    assert len(templates) == 1


def test_dynamic_rows():
    """One graph, one length after another: each kernel in turn."""
    torch.manual_seed(0)
    weight, graph = torch.randn(24, 36), Graph(symbols={"s": (0, 128)})
    rows = parse("s")
    graph.values = [
        TensorSpec("float32", (1, rows, 36)),
        TensorSpec("float32", (24, 36), "w"),
        TensorSpec("float32", (1, rows, 24)),
    ]
    graph.inputs, graph.outputs = [0], [2]
    graph.nodes = [Node("aten.linear.default", {"input": Ref(0), "weight": Ref(1), "bias": None}, (2,))]
    assert registry.refusal(graph.call(graph.nodes[0])) is None
    delegate = Delegate(to_blob(graph), {"w": weight.numpy().tobytes()}.__getitem__)
    for length in (64, 7, 1, 33, 0, 64):
        x = torch.randn(1, length, 36)
        assert_close(delegate.execute([x.numpy()])[0], (x.double() @ weight.double().t()).numpy(), **SUMS)
    delegate.close()


LAYOUTS = {  # of wide tiles: what is read along depth, four at a time, or one by one
    "linear": lambda: ("aten.linear.default", torch.randn(37, 260), torch.randn(131, 260), torch.randn(131)),
    "mm": lambda: ("aten.mm.default", torch.randn(20, 68), torch.randn(68, 132)),
    "batches": lambda: ("aten.matmul.default", torch.randn(2, 1, 19, 17), torch.randn(3, 17, 21)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", tiles.TILES, ids=lambda tile: tile.name)
def test_wide_tiles(tile, layout, monkeypatch):
    """GPUs' own kernel, on any device: edges on all sides, sums in parts, the same bits every time."""
    force(tiles.Choice(tile, 2 if layout == "linear" else 1), monkeypatch)
    case = LAYOUTS[layout]()
    (first,) = check_op(*case, **SUMS)
    (again,) = check_op(*case, **SUMS)
    assert first.tobytes() == again.tobytes()


@pytest.mark.parametrize("tile", [tiles.MEDIUM, tiles.MEDIUM_QUARTERED, tiles.SMALL_HALVED], ids=lambda tile: tile.name)
def test_wide_tiles_of_float16_and_turned_rows(tile, monkeypatch):
    force(tiles.Choice(tile, 2), monkeypatch)
    x, weight = torch.randn(33, 258).half(), torch.randn(70, 258).half()
    check_op("aten.linear.default", x, weight, torch.randn(70).half(), atol=2e-2, rtol=2e-3)
    steps = (
        ("a", "aten.permute.default", {"self": "x", "dims": [1, 0]}),
        ("out", "aten.mm.default", {"self": "a", "mat2": "y"}),
    )
    check_chain({"x": torch.randn(300, 40), "y": torch.randn(300, 36)}, *steps)


SLICE = "aten.slice.Tensor"
# What is added to 33 × 40 results: its shape, a view of it, and whether four neighbours of it can be read at once.
ADDED: dict[str, tuple[tuple[int, ...], tuple[str, dict[str, Any]] | None, bool]] = {
    "whole": ((33, 40), None, True),
    "a row": ((40,), None, True),
    "a column": ((33, 1), None, True),
    "from column 4 on": ((33, 48), (SLICE, {"self": "r", "dim": 1, "start": 4, "end": 44, "step": 1}), True),
    "from column 3 on": ((33, 48), (SLICE, {"self": "r", "dim": 1, "start": 3, "end": 43, "step": 1}), False),
    "rows of 41": ((33, 41), (SLICE, {"self": "r", "dim": 1, "start": 0, "end": 40, "step": 1}), False),
    "every second": ((33, 80), (SLICE, {"self": "r", "dim": 1, "start": 0, "end": 80, "step": 2}), False),
    "turned": ((40, 33), ("aten.permute.default", {"self": "r", "dims": [1, 0]}), False),
}


@pytest.mark.parametrize("added", ADDED)
def test_when_four_results_are_stored_at_once(added, monkeypatch):
    """Only where all that goes with them comes in fours; the results are right either way."""
    force(tiles.Choice(tiles.MEDIUM), monkeypatch)
    shape, view, wide = ADDED[added]
    inputs = {"x": torch.randn(33, 64), "w": torch.randn(40, 64), "r": torch.randn(shape)}
    seen = [("s", *view)] if view else []
    steps = [
        *seen,
        ("a", "aten.linear.default", {"input": "x", "weight": "w", "bias": None}),
        ("out", "aten.add.Tensor", {"self": "a", "other": "s" if view else "r", "alpha": 1}),
    ]
    graph, feeds, golden = chain(inputs, *steps)
    (actual,) = run_graph(graph, feeds)
    assert_close(actual, golden.numpy(), **SUMS)
    (code,) = [d.code for d in lower_graph(graph, {}, Capabilities()).dispatches if d.template == "gemm_wide"]
    assert ("put4(to" in code) == wide


@pytest.mark.parametrize("columns", [38, 41])
def test_rows_that_four_does_not_divide_are_stored_one_by_one(columns, monkeypatch):
    force(tiles.Choice(tiles.MEDIUM), monkeypatch)
    inputs = {"x": torch.randn(33, 64), "w": torch.randn(columns, 64), "b": torch.randn(columns)}
    graph, feeds, golden = chain(inputs, ("out", "aten.linear.default", {"input": "x", "weight": "w", "bias": "b"}))
    (actual,) = run_graph(graph, feeds)
    assert_close(actual, golden.numpy(), **SUMS)
    (dispatch,) = lower_graph(graph, {}, Capabilities()).dispatches
    assert dispatch.template == "gemm_wide" and "put4(to" not in dispatch.code


def force(choice: tiles.Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.ops.tiles.usable", lambda b: True)
    monkeypatch.setattr("backend.ops.tiles.choose", lambda sizes, b: choice)


@pytest.mark.parametrize("depth", [4097, 20000, 36864])
def test_long_sums_are_added_in_parts(depth):
    """Within 2e-6 of the largest result, where one sum of 36864 terms in a row was 1e-5 off (torch: 4e-7)."""
    for shape, other in (((33, depth), (depth, 40)), ((2, 1, 20, depth), (3, depth, 17))):
        for shift in (0.0, 1.0):
            x, y = torch.randn(shape) + shift, torch.randn(other) + shift
            golden = x.double() @ y.double()
            bound = {"atol": 2e-6 * float(golden.abs().max()), "rtol": 0}
            check_op("aten.matmul.default", x, y, **bound)
            check_op("aten.matmul.default", x.mT.contiguous().mT, y.mT.contiguous().mT, **bound)
    x, y = torch.randn(33, depth).half(), torch.randn(depth, 40).half()
    check_op("aten.mm.default", x, y, atol=0.05, rtol=2e-3)  # one rounding of results of up to 4 sqrt(depth)


@pytest.mark.parametrize("tile", [tiles.MEDIUM, tiles.MEDIUM_QUARTERED, tiles.SMALL_HALVED], ids=lambda tile: tile.name)
def test_wide_tiles_with_what_must_not_leak(tile, monkeypatch):
    """What is staged beyond an edge meets infinities: 0 x inf must not reach a result."""
    force(tiles.Choice(tile), monkeypatch)
    x, y = torch.randn(20, 21), torch.randn(21, 35)
    x[3, 20], y[20, 34] = float("inf"), float("nan")
    check_op("aten.mm.default", x, y, **SUMS)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64, torch.int8))
def test_whole_numbers_of_great_depth(dtype):
    """More than a device that ends long loops adds up in one; the last part is short. Small ints wrap as in torch."""
    torch.manual_seed(0)
    check_op(
        "aten.mm.default",
        torch.randint(-3, 4, (33, 70001), dtype=dtype),
        torch.randint(-3, 4, (70001, 35), dtype=dtype),
    )


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_great_depth_with_a_batch(batch):
    """The batch is folded into the rows of a product with one matrix, whose depth is added up in parts."""
    torch.manual_seed(0)
    x, weight = torch.randn(*batch, 20, 4864), torch.randn(24, 4864)
    # Sums of 4864 products of size 1 in f32, in parts.
    check_op("aten.linear.default", x, weight, atol=2e-4, rtol=1e-5)
    check_op("aten.matmul.default", x, weight.T, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("rows, depth, cols", [(16, 300000, 64), (2, 1100000, 3)])
def test_few_rows_of_very_great_depth(rows, depth, cols):
    """More than a device that ends long loops adds up in one: with ones, every loss is seen."""
    check_op("aten.mm.default", torch.ones(rows, depth), torch.ones(depth, cols), rtol=1e-6)
