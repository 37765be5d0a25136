"""pytest tests/ops/test_index.py

Indexing moves data: every comparison is exact.
"""

import numpy as np
import pytest
import torch
from harness import build, check_op, refusal_of, run_graph, run_op

from backend.blob import to_blob
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import registry
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities
from backend.runtime.delegate import Delegate
from backend.runtime.state import StateStore

DTYPES = [torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
EXACT = {"atol": 0, "rtol": 0}


def sample(dtype, *shape):
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype):
    table = sample(dtype, 11, 7)
    for ids in (torch.tensor([[1, 2, 10], [0, 0, 3]]), torch.tensor(4), torch.zeros(0, dtype=torch.int64)):
        check_op("aten.embedding.default", table, ids)
    check_op("aten.embedding.default", table, torch.tensor([10, 0], dtype=torch.int32), constants=("weight",))


def test_embedding_stays_inside_its_table():
    table = torch.arange(12.0).reshape(4, 3)
    graph, feeds, data, _ = build("aten.embedding.default", (table, torch.tensor([0, 1, 2, 3])), {})
    feeds[1] = np.array([-1, 4, 2**31 - 1, -(2**31)])
    (y,) = run_graph(graph, feeds, data)
    np.testing.assert_array_equal(y, table[[0, 3, 3, 0]])


def test_i1_table_lookup_of_int64():
    x = torch.tensor([0, -1, 5, 2**31 - 1])
    check_op("aten.index_select.default", x, 0, torch.tensor([3, 1, 0]))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_index_select(dtype, axis):
    check_op("aten.index_select.default", sample(dtype, 3, 5, 7), axis, torch.tensor([2, 0, 0, 1]))


def test_index_select_of_small_shapes():
    check_op("aten.index_select.default", torch.tensor(3.0), 0, torch.tensor([0]))
    check_op("aten.index_select.default", torch.randn(5, 0), 0, torch.tensor([1, 2]))
    check_op("aten.index_select.default", torch.randn(5, 2), 0, torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather(axis):
    x = torch.randn(3, 5, 7)
    index = torch.randint(0, 3, (2, 4, 6))
    check_op("aten.gather.default", x, axis, index, **EXACT)
    check_op("aten.gather.default", x[0, 0], 0, index[0, 0], **EXACT)
    check_op("aten.gather.default", torch.tensor(3.0), 0, torch.tensor(0))
    check_op("aten.gather.default", x, axis, torch.zeros(0, 4, 6, dtype=torch.int64))


@pytest.mark.parametrize(
    "indices",
    [
        [torch.tensor([0, -1])],
        [torch.tensor([[0], [-2]])],
        [None, torch.tensor([2, -3, 0])],
        [None, None, torch.tensor(4)],
        [torch.tensor([0, 1]), torch.tensor([-1, 2])],
        [None, torch.tensor([[0], [1]]), torch.tensor([1, -1, 2])],
        [torch.tensor([0, 1]), None, torch.tensor([[4], [0], [2]])],
        [torch.tensor([1]), None, None, torch.tensor([0, 1, 0])],
        [torch.tensor([0]), torch.tensor([1]), torch.tensor([2]), torch.tensor([1, 0])],
        [torch.zeros(0, dtype=torch.int64)],
        [None, torch.tensor([2, 0], dtype=torch.int32)],
    ],
    ids=lambda indices: "x".join("-" if i is None else str(list(i.shape)) for i in indices),
)
def test_index_and_index_put(indices):
    x = torch.randn(2, 3, 5, 2)
    check_op("aten.index.Tensor", x, indices, **EXACT)
    places = torch.ops.aten.index.Tensor(torch.arange(x.numel()).reshape(x.shape), indices)
    per_place = torch.randn(x.numel())[places]  # where one place is written twice, either write may stay
    check_op("aten.index_put.default", x, indices, per_place, **EXACT)
    check_op("aten.index_put.default", x, indices, torch.tensor(2.0), **EXACT)


def test_index_put_skips_what_is_outside():
    x = torch.zeros(4, 2)
    graph, feeds, data, _ = build("aten.index_put.default", (x, [torch.tensor([0, 1, 2])], torch.ones(3, 2)), {})
    feeds[1] = np.array([4, -4, -5])
    (y,) = run_graph(graph, feeds, data)
    np.testing.assert_array_equal(y, [[1, 1], [0, 0], [0, 0], [0, 0]])


def test_refusals():
    x = torch.randn(3, 5)
    assert "bool mask" in refusal_of("aten.index.Tensor", x, [x > 0])
    assert "bool mask" in refusal_of("aten.index_put.default", x, [x > 0], torch.tensor(1.0))
    assert "accumulate" in refusal_of("aten.index_put.default", x > 0, [torch.tensor([0])], x[:1] > 0, True)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_index_copy(dtype, axis):
    shape = [3, 5, 7]
    shape[axis] = 2
    check_op("aten.index_copy.default", sample(dtype, 3, 5, 7), axis, torch.tensor([2, 0]), sample(dtype, *shape))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scatter(axis):
    x, index = torch.randn(3, 5, 7), torch.zeros(2, 3, 6, dtype=torch.int64)
    size = index.shape[axis]
    view = [1, 1, 1]
    view[axis] = size
    index = index + torch.randperm(x.shape[axis])[:size].reshape(view)  # no place is written twice
    check_op("aten.scatter.src", x, axis, index, torch.randn(3, 5, 7), **EXACT)
    check_op("aten.scatter.value", x, axis, index, 2.5, **EXACT)
    check_op("aten.scatter.value", x.long(), axis, index, -3)
    check_op("aten.scatter.value", x > 0, axis, index, True)


def test_slice_scatter_and_select_scatter():
    x = torch.randn(3, 5, 7)
    check_op("aten.slice_scatter.default", x, torch.randn(3, 2, 7), 1, 1, 5, 2, **EXACT)
    check_op("aten.slice_scatter.default", x, torch.randn(3, 5, 7), **EXACT)
    check_op("aten.slice_scatter.default", x, torch.randn(3, 5, 3), -1, -3, **EXACT)
    check_op("aten.slice_scatter.default", x, torch.randn(0, 5, 7), 0, 2, 2, **EXACT)
    for axis in (0, 1, -1):
        shape = [size for d, size in enumerate(x.shape) if d != axis % 3]
        check_op("aten.select_scatter.default", x, torch.randn(shape), axis, -2, **EXACT)


def test_copy():
    check_op("aten.copy.default", torch.zeros(2, 3), torch.arange(3))
    check_op("aten.copy.default", torch.zeros(2, 3, dtype=torch.int32), torch.tensor([[1.9], [-1.9]]))


def test_more_groups_than_one_row_holds():
    table = torch.arange(65536 * 2, dtype=torch.int32).reshape(-1, 1).repeat(1, 2)
    ids = torch.arange(65536 * 128 + 5) * 7919 % len(table)
    np.testing.assert_array_equal(run_op("aten.embedding.default", table, ids)[0], table[ids].numpy())


# --- states -----------------------------------------------------------------------------------------------------------


def cache_graph(op, shape, new_shape, **args):
    """cache, new, positions -> the cache after the call and twice its contents before it."""
    graph = Graph()
    cache = graph.add_value(TensorSpec("float32", shape, state="cache"))
    new = graph.add_value(TensorSpec("float32", new_shape))
    positions = graph.add_value(TensorSpec("int64", (new_shape[1],)))
    graph.inputs = [new, positions]
    filled = {
        key: Ref({"cache": cache, "new": new, "positions": positions}[item]) if isinstance(item, str) else item
        for key, item in args.items()
    }
    if "indices" in filled:
        filled["indices"] = [None, Ref(positions)]
    after = graph.add_value(TensorSpec("float32", shape))
    graph.nodes.append(Node(op, filled, (after,)))
    graph.mutations[cache] = after
    graph.outputs = [after]
    return graph, cache


CACHE_OPS = {
    "aten.index_copy.default": {"self": "cache", "dim": 1, "index": "positions", "source": "new"},
    "aten.index_put.default": {"self": "cache", "indices": None, "values": "new", "accumulate": False},
}


@pytest.mark.parametrize("op", CACHE_OPS)
def test_caches_are_updated_in_place(op):
    graph, _ = cache_graph(op, (2, 6, 3), (2, 2, 3), **CACHE_OPS[op])
    lowered = lower_graph(graph, {}, Capabilities())
    assert [d.template for d in lowered.dispatches] == ["scatter", "pointwise"]  # the second one is the output's copy
    delegate = Delegate(to_blob(graph), {}.__getitem__, StateStore())
    wanted = torch.zeros(2, 6, 3)
    for places in ([4, 5], [0, 3], [5, 1]):
        new = torch.randn(2, 2, 3)
        wanted[:, places] = new
        (y,) = delegate.execute([new.numpy(), np.array(places)])
        np.testing.assert_array_equal(y, wanted)


def test_what_reads_the_old_cache_still_sees_it():
    graph, cache = cache_graph("aten.index_copy.default", (2, 6, 3), (2, 2, 3), **CACHE_OPS["aten.index_copy.default"])
    doubled = graph.add_value(TensorSpec("float32", (2, 6, 3)))
    late = graph.add_value(TensorSpec("float32", (2, 6, 3)))
    graph.nodes.insert(0, Node("aten.mul.Tensor", {"self": Ref(cache), "other": 2.0}, (doubled,)))
    graph.nodes.append(Node("aten.add.Tensor", {"self": Ref(cache), "other": 1.0, "alpha": 1}, (late,)))
    graph.outputs = [doubled, late]
    delegate = Delegate(to_blob(graph), {}.__getitem__, StateStore())
    old = torch.zeros(2, 6, 3)
    for places in ([4, 5], [0, 3]):
        new = torch.randn(2, 2, 3)
        before, after = delegate.execute([new.numpy(), np.array(places)])
        np.testing.assert_array_equal(before, old * 2)
        np.testing.assert_array_equal(after, old + 1)
        old[:, places] = new


def test_a_state_shifted_onto_itself():
    graph = Graph()
    fifo = graph.add_value(TensorSpec("float32", (1, 5), state="fifo"))
    x = graph.add_value(TensorSpec("float32", (1, 5)))
    graph.inputs = [x]
    spec = [TensorSpec("float32", (1, 4)), TensorSpec("float32", (1, 5)), TensorSpec("float32", (1, 5))]
    tail, added, moved = (graph.add_value(item) for item in spec)
    graph.nodes = [
        Node("aten.add.Tensor", {"self": Ref(fifo), "other": Ref(x), "alpha": 1}, (added,)),
        Node("aten.slice_copy.Tensor", {"self": Ref(added), "dim": 1, "start": 1, "end": 5, "step": 1}, (tail,)),
        Node(
            "aten.slice_scatter.default",
            {"self": Ref(fifo), "src": Ref(tail), "dim": 1, "start": 0, "end": 4, "step": 1},
            (moved,),
        ),
    ]
    graph.mutations[fifo] = moved
    graph.outputs = [moved]
    delegate = Delegate(to_blob(graph), {}.__getitem__, StateStore())
    wanted = np.zeros((1, 5), np.float32)
    for step in range(3):
        feed = np.arange(5, dtype=np.float32)[None] + step
        wanted[:, :4] = (wanted + feed)[:, 1:]
        np.testing.assert_array_equal(delegate.execute([feed])[0], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
def test_index_put_accumulates_repeated_places(dtype):
    x, new = sample(dtype, 5, 3, 4), sample(dtype, 7, 4)
    rows, columns = torch.tensor([0, 4, 0, -1, 2, 0, 4]), torch.tensor([1, 2, 1, 2, 0, 0, -1])
    check_op("aten.index_put.default", x, [rows, columns], new, True, **EXACT)
    check_op("aten.index_put.default", x, [None, columns % 3], sample(dtype, 5, 7, 4), True, **EXACT)
    check_op("aten.index_put.default", x, [columns], sample(dtype, 1), True, **EXACT)
    check_op("aten.index_put.default", x, [rows[:0]], sample(dtype, 0, 3, 4), True, **EXACT)
    many = torch.zeros(65537, dtype=torch.int64)
    assert "at most" in refusal_of("aten.index_put.default", x, [many], sample(dtype, 1), True)


def embedding_bag(table, indices, offsets, mode, weights=None, last=False, padding=-1):
    """Its first output, the only one with a kernel, and eager's."""
    args = (table, indices, offsets, False, mode, False, weights, last, padding)
    graph, feeds, data, eager = build("aten._embedding_bag.default", args, {})
    (node,) = graph.nodes
    graph.nodes[0] = Node(node.op, node.args, (node.outputs[0], None, None, None))
    graph.outputs = [node.outputs[0]]
    assert registry.refusal(graph.call(graph.nodes[0])) is None
    return run_graph(graph, feeds, data)[0], eager[0].numpy()


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_embedding_bag(mode, dtype):
    """Sums of up to 7 elements below 100: exact in float32; f16 is rounded once, where torch may round at each step."""
    table, indices = sample(dtype, 11, 5), torch.tensor([1, 10, 4, 4, 0, 3, 2])
    tolerance = {"rtol": 2e-3 if dtype == torch.float16 else 1e-6}
    for offsets in ([0, 4], [0], [0, 2, 2, 5], [0, 7], [0, 0, 7, 7]):
        np.testing.assert_allclose(*embedding_bag(table, indices, torch.tensor(offsets), mode), **tolerance)
    empty = torch.zeros(2, dtype=torch.int64)
    np.testing.assert_array_equal(*embedding_bag(table, indices[:0], empty, mode))
    np.testing.assert_allclose(*embedding_bag(table, indices, torch.tensor([0, 3]), mode, padding=4), **tolerance)


def test_embedding_bag_weighted_and_refused():
    table, indices = sample(torch.float32, 11, 5), torch.tensor([1, 10, 4, 4, 0, 3, 2])
    offsets, weights = torch.tensor([0, 3, 7]), torch.randn(7)
    actual, wanted = embedding_bag(table, indices, offsets[:2], 0, weights)
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(*embedding_bag(table, indices, offsets, 0, None, True))
    assert "first output" in refusal_of("aten._embedding_bag.default", table, indices, offsets)
