"""pytest tests/runtime/test_layout.py: where the values of a plan lie, and how much memory that takes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.blob import to_blob
from backend.runtime import memory
from backend.runtime.delegate import Delegate
from backend.runtime.device import READ, WRITE, get_device
from backend.runtime.dispatch import Dispatch
from backend.runtime.memory import Layout, assign_memory
from backend.runtime.state import StateStore, size_class
from backend.runtime.tensor import Buffer
from tests.passes.make import Maker

MOST = 1 << 40


def dispatch(*slots: tuple[Buffer, str]) -> Dispatch:
    return Dispatch("", "", "", slots, b"", (1, 1, 1))


@dataclass
class Program:
    dispatches: list[Dispatch]
    inputs: list[Buffer]
    kept: list[Buffer]

    def layout(self, alignment: int = 4, most: int = MOST) -> Layout:
        return assign_memory(self.dispatches, self.inputs, self.kept, set(), alignment=alignment, most=most)


def lifetimes(program: Program) -> dict[int, tuple[int, int, int]]:
    """buffer id -> first and last dispatch, bytes; written here without a look at the code under test."""
    found: dict[int, tuple[int, int, int]] = {}
    for position, item in enumerate(program.dispatches):
        for buffer, _ in item.slots:
            first = 0 if buffer in program.inputs else found.get(id(buffer), (position, 0, 0))[0]
            found[id(buffer)] = (first, position, buffer.nbytes)
    for buffer in program.kept:
        found[id(buffer)] = (found.get(id(buffer), (0, 0, 0))[0], len(program.dispatches), buffer.nbytes)
    return found


def lower_bound(program: Program) -> int:
    """The most bytes that are live at once, each value in whole words."""
    lives = lifetimes(program).values()
    return max(
        (
            sum(-(-n // 4) * 4 for start, end, n in lives if start <= at <= end)
            for at in range(len(program.dispatches) + 1)
        ),
        default=0,
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Each dispatch writes one value or two and reads some of those before."""
    size = st.sampled_from([4, 10, 64, 256, 1000, 4096])
    inputs = [Buffer("input", draw(size), "input") for _ in range(draw(st.integers(0, 2)))]
    there, dispatches = list(inputs), []
    for _ in range(draw(st.integers(1, 14))):
        reads = draw(st.lists(st.sampled_from(there), max_size=3, unique_by=id)) if there else []
        made = [Buffer("temp", draw(size), "made") for _ in range(draw(st.integers(1, 2)))]
        dispatches.append(dispatch(*((read, READ) for read in reads), *((new, WRITE) for new in made)))
        there += made
    made = [buffer for buffer in there if buffer.kind == "temp"]
    return Program(dispatches, inputs, draw(st.lists(st.sampled_from(made), max_size=3)))


@given(programs(), st.sampled_from([4, 32, 256]), st.sampled_from([0, 5000, MOST]))
@settings(max_examples=300, deadline=None)
def test_no_two_values_are_at_one_place_at_one_time(program: Program, alignment: int, most: int) -> None:
    layout, lives = program.layout(alignment, most), lifetimes(program)
    assert set(layout.places) == set(lives)
    assert layout.bound == lower_bound(program) <= layout.nbytes
    for key, (_, _, nbytes) in lives.items():
        arena, offset = layout.places[key]
        assert offset % alignment == 0 and offset + nbytes <= layout.arenas[arena]
    for (a, (a_start, a_end, a_bytes)), (b, (b_start, b_end, b_bytes)) in itertools.combinations(lives.items(), 2):
        (a_arena, a_at), (b_arena, b_at) = layout.places[a], layout.places[b]
        if a_arena == b_arena and a_start <= b_end and b_start <= a_end:
            assert a_at + a_bytes <= b_at or b_at + b_bytes <= a_at
    for index, size in enumerate(layout.arenas):
        members = [lives[key][2] for key, (arena, _) in layout.places.items() if arena == index]
        assert size <= max(most, -(-max(members) // alignment) * alignment)


@given(programs())
@settings(max_examples=150, deadline=None)
def test_no_dispatch_reads_from_a_buffer_that_it_writes_to(program: Program) -> None:
    """WebGPU's rule of usage scopes: it holds for the whole buffer, wherever in there the bindings are."""
    places = program.layout().places
    for item in program.dispatches:
        arenas: dict[str, set[int]] = {READ: set(), WRITE: set()}
        for buffer, access in item.slots:
            arenas[access].add(places[id(buffer)][0])
        assert not arenas[READ] & arenas[WRITE]


@given(programs())
@settings(max_examples=150, deadline=None)
def test_memory_is_at_most_half_above_the_bound(program: Program) -> None:
    """Some programs cannot reach the bound: a value that is written lies in no buffer that the dispatch reads."""
    assert program.layout().nbytes <= 1.5 * lower_bound(program)


@given(programs())
@settings(max_examples=30, deadline=None)
def test_the_layout_of_a_program_is_always_the_same(program: Program) -> None:
    first, second = program.layout(), program.layout()
    assert (first.places, first.arenas) == (second.places, second.arenas)


def transformer(layers: int, tokens: int, width: int) -> Program:
    """The buffers of a pre-norm transformer: residual stream, norm, qkv, attention, MLP of four times the width."""

    def temp(features: int) -> Buffer:
        return Buffer("temp", tokens * features * 4, "")

    x = Buffer("input", tokens * width * 4, "")
    program = Program([], [x], [])
    for _ in range(layers):
        for hidden in (3 * width, 4 * width):
            norm, wide, narrow, added = temp(width), temp(hidden), temp(width), temp(width)
            program.dispatches += [
                dispatch((x, READ), (norm, WRITE)),
                dispatch((norm, READ), (wide, WRITE)),
                dispatch((wide, READ), (narrow, WRITE)),
                dispatch((narrow, READ), (x, READ), (added, WRITE)),
            ]
            x = added
    return program


def convolutions(stages: int, size: int) -> Program:
    """An encoder and decoder with skips: half the size a stage."""
    x = Buffer("input", size, "")
    program, skips = Program([], [x], []), []
    for stage in range(stages):
        for _ in range(1 + stage % 3):
            y = Buffer("temp", size >> stage, "")
            program.dispatches.append(dispatch((x, READ), (y, WRITE)))
            x = y
        skips.append(x)
    for stage in reversed(range(stages)):
        y = Buffer("temp", size >> stage, "")
        program.dispatches.append(dispatch((x, READ), (skips[stage], READ), (y, WRITE)))
        x = y
    return program


def mask_decoder(unit: int) -> Program:
    """SAM2's: attention to and from the features of an image in turns, then these enlarged. Tokens are left out."""
    image = Buffer("input", 16 * unit, "")
    program = Program([], [image], [])

    def run(units: int, *reads: Buffer) -> Buffer:
        made = Buffer("temp", units * unit, "")
        program.dispatches.append(dispatch(*((read, READ) for read in reads), (made, WRITE)))
        return made

    def to_image(width: int) -> None:
        keys = run(16, run(width, image))
        values = run(16, image)
        run(1, run(9, run(9, keys)), values)

    for width in (16, 32):
        to_image(width)
        queries = run(16, run(width, image))
        mixed = run(16, run(16, run(9, run(9, queries))))
        image = run(32, run(32, mixed, image))
    to_image(32)
    for width in (32, 32, 32, 32, 64, 64, 8, 1):
        image = run(width, image)
    return program


@pytest.mark.parametrize(
    ("program", "allowed"),
    [
        (transformer(4, 33, 64), 1.0),
        (transformer(12, 512, 768), 1.0),
        (convolutions(5, 1 << 20), 1.15),
        (mask_decoder(1 << 18), 1.01),
    ],
    ids=["transformer", "larger transformer", "convolutions", "mask decoder"],
)
def test_memory_is_near_the_bound(program: Program, allowed: float) -> None:
    assert program.layout().nbytes <= allowed * lower_bound(program)


def test_what_the_rule_of_usage_scopes_costs() -> None:
    """13 are live with the value of 12. It shares an arena with one of the two values of 4, which another holds."""
    values = [Buffer("temp", 4 * units, "") for units in (1, 4, 4, 1, 12)]
    steps = [dispatch((read, READ), (made, WRITE)) for read, made in itertools.pairwise(values)]
    program = Program(steps, [], [])
    assert lower_bound(program) == 4 * 13
    assert program.layout().nbytes == 4 * (12 + 4)


def test_small_values_are_not_searched_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What alignment adds to a few bytes cannot be saved: no order is tried for it."""
    buffers = [Buffer("temp", 12, "") for _ in range(20)]
    chain = [dispatch((a, READ), (b, WRITE)) for a, b in itertools.pairwise(buffers)]
    tried = []
    place = memory._place
    monkeypatch.setattr(memory, "_place", lambda *given: tried.append(0) or place(*given))
    layout = assign_memory(chain, [], [buffers[-1]], (), alignment=256, most=2**20)
    assert layout.nbytes == 2 * 256 and layout.bound == 24 and len(tried) == 1


def test_what_is_computed_once_from_constants_takes_no_shared_memory() -> None:
    m = Maker()
    x, w = m.input(4, 64), m.input(64, 64)
    m.graph.inputs.remove(w.value)
    m.graph.values[w.value] = replace(m.graph.values[w.value], constant="w")
    m.graph.outputs = [m("mm.default", self=x, mat2=m("exp.default", self=w)).value]
    delegate = Delegate(to_blob(m.graph), {"w": np.ones((64, 64), np.float32).tobytes()}.__getitem__)
    try:
        plan = delegate.plan([(4, 64)])
        assert plan.buffer_bytes == plan.bound_bytes == 2 * 4 * 64 * 4
    finally:
        delegate.close()


def test_methods_of_a_program_share_memory() -> None:
    states, device = StateStore(), get_device()
    first = states.scratch(device, [4096, 64, 4096], exact=True)
    assert [buffer.size for buffer in first] == [4096, 64, 4096] and len({id(buffer) for buffer in first}) == 3
    second = states.scratch(device, [60, 4000], exact=True)
    assert {id(buffer) for buffer in second} < {id(buffer) for buffer in first}
    third = states.scratch(device, [4096, 4096, 5000], exact=False)
    assert {id(buffer) for buffer in third[:2]} < {id(buffer) for buffer in first}
    assert third[2].size == size_class(5000) <= 5000 * 9 / 8
    assert StateStore().scratch(device, [64], exact=True)[0] is not first[1]


def test_inputs_lie_in_memory_that_is_used_again() -> None:
    """The input is dead after the first of three kernels; what a call leaves in its place is no input of the next."""
    m = Maker()
    x = m.input(16, 16)
    y = m("cumsum.default", self=m("cumsum.default", self=m("cumsum.default", self=x, dim=0), dim=1), dim=0)
    m.graph.outputs = [y.value]
    delegate = Delegate(to_blob(m.graph), {}.__getitem__)
    try:
        plan = delegate.plan([(16, 16)])
        assert len(plan.steps) == 3 and plan.buffer_bytes == 2 * 16 * 16 * 4
        for seed in range(3):
            array = np.random.default_rng(seed).integers(-9, 9, (16, 16)).astype(np.float32)
            expected = array.astype(np.float64).cumsum(0).cumsum(1).cumsum(0)
            np.testing.assert_array_equal(delegate.execute([array])[0], expected)  # whole numbers below 2**24: exact
            on_gpu = delegate.start([delegate.start([array])[0]])[0].numpy()
            np.testing.assert_array_equal(on_gpu, delegate.execute([expected.astype(np.float32)])[0])
    finally:
        delegate.close()
