"""pytest tests/runtime/test_delegate.py: inputs and outputs of every dtype, state, and faults of the GPU."""

from __future__ import annotations

import numpy as np
import pytest

from backend.blob import to_blob
from backend.expr import Expr
from backend.graph import BlobError, Graph, Node, Ref, ShapeError, TensorSpec
from backend.runtime import plan as plans
from backend.runtime.delegate import Delegate
from backend.runtime.device import Device, get_device
from backend.runtime.errors import DeviceError, DeviceLostError
from backend.runtime.state import StateStore

S = Expr("s0")


def one_node(op: str, args: dict, inputs: list[TensorSpec], output: TensorSpec) -> Graph:
    """`args` names the inputs by their position: `{"self": Ref(0)}`."""
    graph = Graph(list(inputs), list(range(len(inputs))), [len(inputs)], symbols={"s0": (0, 1000)})
    graph.add_value(output)
    graph.nodes = [Node(op, args, (len(inputs),))]
    return graph


def delegate_of(graph: Graph, data: dict[str, bytes] | None = None, states: StateStore | None = None) -> Delegate:
    return Delegate(to_blob(graph), (data or {}).__getitem__, states)


# --- boundary -----------------------------------------------------------------------------------------------------

BOUNDARY = [
    ("float32", np.float32([1.5, -0.0, np.inf, 3e38])),
    ("float16", np.float16([1.5, -2.25, 65504])),
    ("int64", np.array([0, -1, 5, 2**31 - 1, -(2**31)])),
    ("int32", np.int32([2**31 - 1, -(2**31), 7])),
    ("int16", np.int16([-32768, 32767, 1])),
    ("int8", np.int8([-128, 127, 1, 0, 5])),
    ("bool", np.random.default_rng(0).random((5, 5)) < 0.5),
    *(("uint8", np.arange(250, 250 + n, dtype=np.int64).astype(np.uint8)) for n in range(1, 8)),
]


@pytest.mark.parametrize(("dtype", "array"), BOUNDARY)
def test_r3_every_dtype_and_odd_sizes_come_back_exactly(dtype, array):
    """Through an operator that moves data: flipped twice over, once on the GPU and once here."""
    spec = TensorSpec(dtype, array.shape)
    graph = one_node("aten.flip.default", {"self": Ref(0), "dims": [0]}, [spec], spec)
    delegate = delegate_of(graph)
    for _ in range(2):
        (got,) = delegate.execute([array])
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got[::-1], array)
    delegate.close()


def test_r3_the_neighbour_is_untouched():
    """Outputs of 25 and 3 elements side by side in the readback."""
    graph = Graph(
        [
            TensorSpec("bool", (5, 5)),
            TensorSpec("float16", (3,)),
            TensorSpec("bool", (5, 5)),
            TensorSpec("float16", (3,)),
        ],
        [0, 1],
        [2, 3, 2],
    )
    graph.nodes = [
        Node("aten.logical_not.default", {"self": Ref(0)}, (2,)),
        Node("aten.neg.default", {"self": Ref(1)}, (3,)),
    ]
    mask, numbers = np.random.default_rng(1).random((5, 5)) < 0.5, np.float16([1, 2, 3])
    first, second, third = delegate_of(graph).execute([mask, numbers])
    np.testing.assert_array_equal(first, ~mask)
    np.testing.assert_array_equal(second, -numbers)
    np.testing.assert_array_equal(third, ~mask)


def test_i1_int64_keeps_its_sign_and_out_of_range_is_refused():
    spec = TensorSpec("int64", (S,))
    delegate = delegate_of(one_node("aten.clone.default", {"self": Ref(0)}, [spec], spec))
    (got,) = delegate.execute([np.array([0, -1, 5, 2**31 - 1])])
    assert got.dtype == np.int64
    assert got.tolist() == [0, -1, 5, 2**31 - 1]
    for value in (2**31 + 5, 2**31, -(2**31) - 1, 2**62):
        with pytest.raises(ShapeError, match=f"input 0 holds {value}"):
            delegate.execute([np.array([0, value])])
    assert delegate.execute([np.array([7])])[0].tolist() == [7]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 4), np.float64), "input 0 is float64, expected float32"),
        (np.zeros((3, 5), np.float32), "dimension 1 is 5, expected 4"),
        (np.zeros((1001, 4), np.float32), "dimension 0 is 1001, allowed 0 to 1000"),
        (np.zeros((4,), np.float32), "1 dimensions"),
    ],
)
def test_inputs_that_do_not_fit_are_named(array, message):
    spec = TensorSpec("float32", (S, 4))
    delegate = delegate_of(one_node("aten.neg.default", {"self": Ref(0)}, [spec], spec))
    with pytest.raises(ShapeError, match=message):
        delegate.execute([array])
    assert delegate.execute([np.ones((2, 4), np.float32)])[0].tolist() == [[-1] * 4] * 2


def test_d3_an_empty_input():
    spec = TensorSpec("float32", (S, 4))
    delegate = delegate_of(one_node("aten.neg.default", {"self": Ref(0)}, [spec], spec))
    assert delegate.execute([np.zeros((0, 4), np.float32)])[0].shape == (0, 4)


def test_inputs_of_any_layout():
    spec = TensorSpec("float32", (S, 4))
    delegate = delegate_of(one_node("aten.neg.default", {"self": Ref(0)}, [spec], spec))
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    for array in (base.T[::-1], np.broadcast_to(np.float32(2), (3, 4)), base[:, ::2].T):
        np.testing.assert_array_equal(delegate.execute([array])[0], -array)


# --- blobs --------------------------------------------------------------------------------------------------------


def test_blobs_that_this_runtime_cannot_run():
    spec = TensorSpec("float32", (2,))
    with pytest.raises(BlobError, match=r"no kernel for zoo\.unheard_of"):
        delegate_of(one_node("zoo.unheard_of", {"self": Ref(0)}, [spec], spec))
    graph = one_node(
        "aten.add.Tensor", {"self": Ref(0), "other": Ref(0), "alpha": 1}, [TensorSpec("float32", (2,), "w")], spec
    )
    graph.inputs = []
    with pytest.raises(BlobError, match="no data for weight 'w'"):
        delegate_of(graph)
    with pytest.raises(BlobError, match="weight 'w' has 4 bytes, expected 8"):
        delegate_of(graph, {"w": b"1234"})


# --- state --------------------------------------------------------------------------------------------------------


def counter(name: str = "count", initial: str | None = None, size: int = 3) -> Graph:
    """state += x; returns the new contents."""
    spec = TensorSpec("float32", (size,))
    graph = Graph([spec, TensorSpec("float32", (size,), initial, name), spec], [0], [2], mutations={1: 2})
    graph.nodes = [Node("aten.add.Tensor", {"self": Ref(1), "other": Ref(0), "alpha": 1}, (2,))]
    return graph


ONE = np.ones(3, np.float32)


def test_state_is_kept_between_calls_and_shared_by_one_store_only():
    store = StateStore()
    first, second = delegate_of(counter(), states=store), delegate_of(counter(), states=store)
    other = delegate_of(counter())
    assert first.execute([ONE])[0].tolist() == [1, 1, 1]
    assert second.execute([ONE])[0].tolist() == [2, 2, 2]
    assert other.execute([ONE])[0].tolist() == [1, 1, 1]
    assert first.execute([ONE])[0].tolist() == [3, 3, 3]
    assert store.names() == ["count"]
    assert np.frombuffer(store.read("count"), np.float32)[:3].tolist() == [3, 3, 3]


def test_state_starts_with_its_contents():
    data = {"init": np.float32([5, 6, 7]).tobytes()}
    delegate = delegate_of(counter(initial="init"), data)
    assert delegate.execute([ONE])[0].tolist() == [6, 7, 8]
    assert delegate.execute([ONE])[0].tolist() == [7, 8, 9]


def test_methods_that_disagree_on_a_state_are_refused():
    store = StateStore()
    delegate_of(counter(), states=store).execute([ONE])
    with pytest.raises(BlobError, match="state 'count'"):
        delegate_of(counter(size=4), states=store).execute([np.ones(4, np.float32)])


def test_the_old_contents_are_read_after_the_new_ones_are_known():
    """new = state + x, y = 2 × old: whatever order the kernels run in, y sees the old contents."""
    graph = counter()
    y = graph.add_value(TensorSpec("float32", (3,)))
    graph.nodes.append(Node("aten.mul.Scalar", {"self": Ref(1), "other": 2.0}, (y,)))
    graph.outputs = [y, 2, 1]
    delegate = delegate_of(graph)
    for step in range(3):
        twice, new, old = delegate.execute([ONE])
        assert twice.tolist() == [2.0 * step] * 3
        assert new.tolist() == [step + 1.0] * 3
        assert old.tolist() == [float(step)] * 3


@pytest.mark.parametrize("op", ["aten.alias_copy.default", "aten.flip.default"])
def test_two_states_swap(op):
    graph = Graph([TensorSpec("float32", (2,), "a", "first"), TensorSpec("float32", (2,), "b", "second")])
    args = {"dims": [0]} if "flip" in op else {}
    x, y = (graph.add_value(TensorSpec("float32", (2,))) for _ in range(2))
    graph.nodes = [Node(op, {"self": Ref(0), **args}, (x,)), Node(op, {"self": Ref(1), **args}, (y,))]
    graph.mutations, graph.outputs = {0: y, 1: x}, [x, y]
    data = {"a": np.float32([1, 2]).tobytes(), "b": np.float32([3, 4]).tobytes()}
    delegate = delegate_of(graph, data)
    a, b = np.float32([1, 2]), np.float32([3, 4])
    turn = (lambda v: v[::-1]) if args else (lambda v: v)
    for _ in range(3):
        got = delegate.execute([])
        a, b = turn(a), turn(b)
        np.testing.assert_array_equal(got[0], a)
        np.testing.assert_array_equal(got[1], b)
        a, b = b, a


def test_a_state_that_takes_a_view_of_itself():
    """A row that slides: new = cat(old[1:], x)."""
    graph = Graph([TensorSpec("float32", (1,)), TensorSpec("float32", (3,), None, "row")], [0])
    tail, new = graph.add_value(TensorSpec("float32", (2,))), graph.add_value(TensorSpec("float32", (3,)))
    graph.nodes = [
        Node("aten.slice_copy.Tensor", {"self": Ref(1), "dim": 0, "start": 1, "end": 2**40, "step": 1}, (tail,)),
        Node("aten.cat.default", {"tensors": [Ref(tail), Ref(0)], "dim": 0}, (new,)),
    ]
    graph.mutations, graph.outputs = {1: new}, [tail]
    delegate = delegate_of(graph)
    seen = [delegate.execute([np.float32([i])])[0].tolist() for i in (1, 2, 3, 4)]
    assert seen == [[0, 0], [0, 1], [1, 2], [2, 3]]


def test_a_state_takes_an_input_as_it_is():
    graph = Graph(
        [TensorSpec("float32", (3,)), TensorSpec("float32", (3,), None, "kept"), TensorSpec("float32", (3,))], [0], [2]
    )
    graph.nodes = [Node("aten.clone.default", {"self": Ref(1)}, (2,))]
    graph.mutations = {1: 0}
    delegate = delegate_of(graph)
    assert [delegate.execute([ONE * i])[0].tolist()[0] for i in (1, 2, 3)] == [0, 1, 2]


def test_a_failed_call_leaves_the_state():
    delegate = delegate_of(counter())
    delegate.execute([ONE])
    with pytest.raises(ShapeError):
        delegate.execute([np.ones(4, np.float32)])
    assert delegate.execute([ONE])[0].tolist() == [2, 2, 2]


# --- faults of the GPU ----------------------------------------------------------------------------------------------


def test_r5_a_failed_readback_does_not_poison_the_next():
    spec = TensorSpec("float32", (3,))
    delegate = delegate_of(one_node("aten.neg.default", {"self": Ref(0)}, [spec], spec))
    delegate.execute([ONE])
    (readout,) = delegate.plan([(3,)])._readouts.values()
    # Memory that the host may not map: the library itself refuses, and its reason is told.
    readout.spare.append(get_device().buffer(readout.nbytes))
    with pytest.raises(DeviceError, match=r"reading results back failed on .*: Validation Error .*MAP_READ"):
        delegate.execute([ONE])
    assert delegate.execute([ONE * 2])[0].tolist() == [-2, -2, -2]


def test_r4_a_weight_above_the_device_limit_is_named_before_allocation(monkeypatch):
    device = get_device()
    spec = TensorSpec("float32", (1024,))
    graph = one_node(
        "aten.add.Tensor",
        {"self": Ref(0), "other": Ref(1), "alpha": 1},
        [spec, TensorSpec("float32", (1024,), "w")],
        spec,
    )
    graph.inputs = [0]
    delegate = delegate_of(graph, {"w": np.ones(1024, np.float32).tobytes()})
    with monkeypatch.context() as patch:
        patch.setitem(device.limits, "max-storage-buffer-binding-size", 2048)
        with pytest.raises(DeviceError, match="MiB a buffer"):
            delegate.execute([np.ones(1024, np.float32)])
    assert delegate.execute([np.ones(1024, np.float32)])[0].sum() == 2048


def test_a_lost_device_is_replaced(monkeypatch):
    """The next call runs on a new device, with weights uploaded again and states started over, which is told once."""
    from backend.runtime import device as devices

    data = {"init": np.float32([5, 6, 7]).tobytes()}
    delegate = delegate_of(counter(initial="init"), data)
    assert delegate.execute([ONE])[0].tolist() == [6, 7, 8]
    before = get_device()
    monkeypatch.setattr(before, "lost", "lost in a test")
    with pytest.raises(DeviceLostError, match="starts over"):
        delegate.execute([ONE])
    for expected in ([6, 7, 8], [7, 8, 9]):
        assert delegate.execute([ONE])[0].tolist() == expected
    assert get_device() is not before
    assert devices.get_device() is get_device()


def test_who_was_told_of_a_lost_device_is_not_told_again(monkeypatch):
    """The call that found out raised; a program that keeps nothing between calls has lost nothing."""
    delegate = delegate_of(counter(initial="init"), {"init": np.float32([5, 6, 7]).tobytes()})
    delegate.execute([ONE])
    before = get_device()

    def submit(*_):
        before.lost = "lost in a test"
        raise DeviceLostError("lost in a test")

    with monkeypatch.context() as patch:
        patch.setattr(plans.Plan, "_submit", submit)
        with pytest.raises(DeviceLostError, match="in a test"):
            delegate.execute([ONE])
    assert delegate.execute([ONE])[0].tolist() == [6, 7, 8]
    spec = TensorSpec("float32", (3,))
    plain = delegate_of(one_node("aten.neg.default", {"self": Ref(0)}, [spec], spec))
    for _ in range(2):
        assert plain.execute([ONE])[0].tolist() == [-1, -1, -1]
        monkeypatch.setattr(get_device(), "lost", "lost in a test")


@pytest.mark.parametrize("by", ["the next call", "a result"])
def test_a_device_that_is_gone_is_told_once(monkeypatch, by):
    """By whatever finds out first, with all plans made: an upload, or the reading of a result."""
    monkeypatch.setattr("backend.runtime.device._current", gone := Device())
    delegate = delegate_of(counter(initial="init"), {"init": np.float32([5, 6, 7]).tobytes()})
    for expected in ([6, 7, 8], [7, 8, 9]):
        assert delegate.execute([ONE])[0].tolist() == expected
    (tensor,) = delegate.start([ONE])
    gone.handle.destroy()
    with pytest.raises(DeviceLostError):
        tensor.numpy() if by == "a result" else delegate.execute([ONE])
    assert delegate.execute([ONE])[0].tolist() == [6, 7, 8]
    assert get_device() is not gone


def test_only_so_many_plans_are_kept():
    spec = TensorSpec("float32", (S,))
    delegate = delegate_of(one_node("aten.neg.default", {"self": Ref(0)}, [spec], spec))
    for size in range(1, 40):
        delegate.execute([np.ones(size, np.float32)])
    from backend.runtime.delegate import MAX_PLANS

    assert len(delegate._plans) == MAX_PLANS
    assert delegate.execute([np.ones(1, np.float32)])[0].tolist() == [-1]
    assert plans.Plan is type(delegate.plan([(1,)]))
