"""pytest tests/runtime/test_graph.py: expressions, the graph and its blob, without a GPU."""

from __future__ import annotations

import hashlib
import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.blob import _HEADER, MAGIC, VERSION, from_blob, to_blob
from backend.expr import Expr, ExprError, evaluate, parse
from backend.graph import BlobError, Graph, Node, Ref, ShapeError, TensorSpec

S, T = Expr("s0"), Expr("s1")

expressions = st.recursive(
    st.one_of(st.integers(-50, 50), st.sampled_from([S, T])),
    lambda inner: st.builds(
        lambda op, args: Expr(op, tuple(args)),
        st.sampled_from(["+", "-", "*", "//", "%", "min", "max"]),
        st.lists(inner, min_size=2, max_size=3),
    ),
    max_leaves=12,
)


@given(expressions, st.integers(0, 40), st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_expression_text_means_the_same(expression, s0, s1):
    env = {"s0": s0, "s1": s1}
    again = parse(str(expression))
    try:
        expected = evaluate(expression, env)
    except ExprError:
        with pytest.raises(ExprError):
            evaluate(again, env)
        return
    assert evaluate(again, env) == expected
    assert str(parse(str(again))) == str(again)


@pytest.mark.parametrize(
    "text",
    ["", "s0 +", "f(s0)", "s0.a", "s0[0]", "s0 / 2", "s0 ** 2", "True", "1.5", "'s'", "min(s0)", "max(1, 2, key=3)",
     "__import__('os')", "s0 if s0 else 1", "9" * 30, "s0+" * 3000 + "1", "-" * 3000 + "1", "\0"],
)  # fmt: skip
def test_expression_refuses_everything_else(text):
    with pytest.raises(ExprError):
        parse(text)


def test_expression_without_a_value():
    with pytest.raises(ExprError, match="s1"):
        evaluate(Expr("+", (S, T)), {"s0": 1})
    with pytest.raises(ExprError, match="zero"):
        evaluate(Expr("//", (S, T)), {"s0": 1, "s1": 0})


# --- bind ---------------------------------------------------------------------------------------------------------


def graph_of(*shapes, symbols):
    graph = Graph(symbols=symbols)
    for shape in shapes:
        graph.inputs.append(graph.add_value(TensorSpec("float32", shape)))
    return graph


def test_bind_solves_linear_dims_in_any_order():
    graph = graph_of((Expr("+", (S, T)), 4), (Expr("*", (8, S)),), symbols={"s0": (1, 10), "s1": (0, None)})
    assert graph.bind([(9, 4), (24,)]) == {"s0": 3, "s1": 6}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(25,)], "dimension 0 is 25"),  # no multiple of 8
        ([(88,)], "dimension 0 is 88, allowed 8 to 80"),
        ([(0,)], "dimension 0 is 0, allowed 8 to 80"),
        ([(8, 1)], "2 dimensions"),
        ([], "0 inputs given"),
    ],
)
def test_bind_names_the_dimension(shapes, message):
    graph = graph_of((Expr("*", (8, S)),), symbols={"s0": (1, 10)})
    with pytest.raises(ShapeError, match=message):
        graph.bind(shapes)


def test_r6_bounds_hold_for_each_dimension():
    """As many elements as the bounds allow in total, but not in this dimension."""
    graph = graph_of((S, T), symbols={"s0": (1, 4), "s1": (1, 3)})
    assert graph.bind([(4, 3)]) == {"s0": 4, "s1": 3}
    with pytest.raises(ShapeError, match="input 0, dimension 1 is 6, allowed 1 to 3"):
        graph.bind([(2, 6)])


def test_bind_refuses_what_disagrees():
    graph = graph_of((S,), (S,), symbols={"s0": (1, 9)})
    with pytest.raises(ShapeError, match=r"input 1, dimension 0 is 4, expected 3"):
        graph.bind([(3,), (4,)])
    quadratic = graph_of((Expr("*", (S, S)),), symbols={"s0": (1, 9)})
    with pytest.raises(ShapeError, match="cannot be solved"):
        quadratic.bind([(9,)])


# --- graphs -------------------------------------------------------------------------------------------------------


def sample() -> Graph:
    graph = Graph(symbols={"s0": (1, 64), "s1": (0, None)})
    x = graph.add_value(TensorSpec("float32", (S, 4)))
    size = graph.add_value(TensorSpec("int64", ()))
    weight = graph.add_value(TensorSpec("float16", (4, 4), "w"))
    state = graph.add_value(TensorSpec("float32", (4,), None, "cache.k"))
    y = graph.add_value(TensorSpec("float32", (Expr("*", (2, S)), 4)))
    new = graph.add_value(TensorSpec("float32", (4,)))
    graph.inputs, graph.sizes = [x, size], {size: T}
    graph.nodes = [
        Node("aten.cat.default", {"tensors": [Ref(x), Ref(x)], "dim": 0}, (y,), ("cat",)),
        Node(
            "zoo.anything",
            {"a": Ref(state), "b": Ref(weight), "eps": 1e-5, "inf": float("-inf"), "n": None, "end": Expr("-", (S, 1)),
             "text": "none", "flag": True, "nested": [[1, T], [Ref(y)]]},
            (new, None),
        ),
    ]  # fmt: skip
    graph.outputs, graph.mutations = [y, x], {state: new}
    return graph


def without_origin(graph: Graph) -> list[Node]:
    return [Node(node.op, node.args, node.outputs) for node in graph.nodes]


def test_blob_round_trip():
    graph = sample()
    again = from_blob(to_blob(graph))
    assert again.values == graph.values
    assert (again.inputs, again.outputs, again.mutations) == (graph.inputs, graph.outputs, graph.mutations)
    assert (again.symbols, again.sizes) == (graph.symbols, graph.sizes)
    assert again.nodes == without_origin(graph)
    assert to_blob(again) == to_blob(graph)
    nan = Graph([TensorSpec("float32", (2,))], [0], [0], [])
    nan.nodes.append(
        Node("aten.full.default", {"fill_value": float("nan")}, (nan.add_value(TensorSpec("float32", (2,))),))
    )
    value = from_blob(to_blob(nan)).nodes[0].args["fill_value"]
    assert value != value


def test_blob_is_json_for_any_tool():
    document = json.loads(to_blob(sample())[_HEADER.size :])
    assert document["values"][4]["shape"] == ["2*s0", 4]


def seal(document: object) -> bytes:
    """A blob whose checksum is right, around any document."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return _HEADER.pack(MAGIC, VERSION, len(text), hashlib.sha256(text).digest()) + text


def test_blob_bit_flips_and_truncation():
    blob = to_blob(sample())
    draw = random.Random(0)
    for _ in range(300):
        damaged = bytearray(blob)
        damaged[draw.randrange(len(blob))] ^= 1 << draw.randrange(8)
        with pytest.raises(BlobError):
            from_blob(bytes(damaged))
    for length in [*range(60), *range(60, len(blob), 17)]:
        with pytest.raises(BlobError):
            from_blob(blob[:length])
    with pytest.raises(BlobError, match="version 9"):
        from_blob(_HEADER.pack(MAGIC, 9, 0, b"\0" * 32))


VALUES = [{"dtype": "float32", "shape": [2]}, {"dtype": "float32", "shape": [2]}]
WHOLE = {"symbols": {}, "values": VALUES, "inputs": [0], "outputs": [1], "sizes": [], "mutations": [],
         "nodes": [{"op": "aten.neg.default", "args": {"self": {"v": 0}}, "outputs": [1]}]}  # fmt: skip


def test_the_sealed_document_is_whole():
    assert from_blob(seal(WHOLE)).outputs == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": [{"op": "a", "args": {"self": {"v": 1}}, "outputs": [1]}]},  # a cycle
        {"nodes": [{"op": "a", "args": {"self": {"v": 7}}, "outputs": [1]}]},
        {"nodes": [{"op": "a", "args": {"self": {"v": -1}}, "outputs": [1]}]},
        {"nodes": [{"op": "a", "args": {}, "outputs": [0]}]},  # writes an input
        {"nodes": [{"op": "a", "args": {}, "outputs": [1]}] * 2},  # defined twice
        {"nodes": []},  # the output is never computed
        {"nodes": [{"op": "a", "args": {"x": {"q": 1}}, "outputs": [1]}]},
        {"nodes": [{"op": "a", "args": {"x": {"v": 0, "e": "s"}}, "outputs": [1]}]},
        {"nodes": [{"op": "a", "args": {"x": {"e": "os.system('x')"}}, "outputs": [1]}]},
        {"nodes": [{"op": "a", "args": {"x": {"e": "s9"}}, "outputs": [1]}]},  # an undeclared symbol
        {"nodes": [{"op": "a", "args": [], "outputs": [1]}]},
        {"nodes": [{"op": "a", "outputs": [1]}]},
        {"nodes": {"op": "a"}},
        {"nodes": None},
        {"outputs": [99]},
        {"outputs": [-1]},
        {"outputs": "1"},
        {"inputs": [5]},
        {"inputs": [0, 0]},
        {"inputs": None},
        {"values": [{"dtype": "complex64", "shape": [2]}, VALUES[1]]},
        {"values": [{"dtype": "float32", "shape": [-2]}, VALUES[1]]},
        {"values": [{"dtype": "float32", "shape": [2.5]}, VALUES[1]]},
        {"values": [{"dtype": "float32", "shape": [True]}, VALUES[1]]},
        {"values": [{"dtype": "float32", "shape": [2**62]}, VALUES[1]]},
        {"values": [{"dtype": "float32", "shape": ["s9"]}, VALUES[1]]},
        {"values": [{"dtype": "float32", "shape": [1] * 9}, VALUES[1]]},
        {"values": [{"dtype": "float32", "shape": [2], "constant": 3}, VALUES[1]]},
        {"values": [{"dtype": "float32", "shape": [2], "state": ["x"]}, VALUES[1]]},
        {"values": [{"dtype": "float32", "shape": ["s0"], "constant": "w"}, VALUES[1]], "symbols": {"s0": [0, 4]}},
        {"values": [3, 4]},
        {"mutations": [[0, 1]]},  # not a state
        {"mutations": [[0]]},
        {"sizes": [[1, "s0"]], "symbols": {"s0": [0, 4]}},  # not an input
        {"sizes": [[0, "s9"]]},
        {"symbols": {"s0": [1]}},
        {"symbols": {"s0": ["a", "b"]}},
        {"symbols": []},
    ],
)
def test_blob_with_a_right_checksum_and_wrong_contents(change):
    with pytest.raises(BlobError):
        from_blob(seal({**WHOLE, **change}))


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"{}", b"\xff\xfe", b"{" * 5, b"[" * 100000, b'{"values": NaN}'])
def test_blob_that_is_no_document(text):
    with pytest.raises(BlobError):
        from_blob(seal(text))


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 5), st.floats(), st.sampled_from(["s0", "a", ""])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["v", "e", "f", "op"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(st.sampled_from([*WHOLE, "op", "args", "node outputs", "dtype", "shape"]), json_values)
@example("inputs", [float("inf")])
@settings(max_examples=300, deadline=None)
def test_hostile_documents_raise_blob_error_only(place, value):
    document = json.loads(json.dumps(WHOLE))
    if place in WHOLE:
        document[place] = value
    elif place in ("dtype", "shape"):
        document["values"][0][place] = value
    else:
        document["nodes"][0][place.removeprefix("node ")] = value
    try:
        graph = from_blob(seal(document))
    except BlobError:
        return
    to_blob(graph)  # what is taken is whole


def test_compacted_drops_what_nobody_reads():
    graph = sample()
    dead = graph.add_value(TensorSpec("float32", (2,)))
    graph.nodes.insert(0, Node("aten.neg.default", {"self": Ref(graph.inputs[0])}, (dead,)))
    graph.add_value(TensorSpec("float32", (3,), "never read"))
    small = graph.compacted()
    assert [node.op for node in small.nodes] == ["aten.cat.default", "zoo.anything"]
    assert len(small.values) == 6
    assert small.nodes[0].origin == ("cat",)
    small.check()


def test_rewired_follows_chains_of_renames():
    graph = Graph([TensorSpec("float32", (2,)) for _ in range(4)], [0], [3], [])
    graph.nodes = [Node("aten.neg.default", {"self": Ref(2)}, (3,))]
    again = graph.rewired(graph.nodes, {2: 1, 1: 0})
    assert again.nodes[0].args == {"self": Ref(0)}
    assert again.outputs == [3]
    assert graph.nodes[0].args == {"self": Ref(2)}
