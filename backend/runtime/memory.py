"""Where the values of a plan lie on the GPU: few buffers, and places in them that are used again when a value is dead.

The places are an offset assignment as in "Efficient Memory Management for Deep Neural Net Inference" (Pisarchyk and
Lee, 2020: largest first, into the gap that fits best), under one rule of WebGPU: a dispatch may not write to a buffer
that it also binds for reading, not even to another part of it. So there are several arenas, and what a dispatch reads
lies in others than what it writes.

The rule alone can cost more than 1.15 of what is live at once. Take a value of s bytes and a dispatch outside its life
that reads r and writes w bytes: the value's arena holds none of what is read there or none of what is written, so all
arenas together take s + min(r, w) at least. Florence-2's `encode` on GPUs ends with keys and values of all layers as
one value of 21.3 MB, and before that a product reads and writes 7.1 MB: 28.4 MB, 1.23 of the 23.1 MB that are live.
An exact solver finds 1.31 there for one token of a prompt, as the search does, and 1.34 for seven on processors.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from backend.runtime.device import WRITE
from backend.runtime.dispatch import Dispatch
from backend.runtime.tensor import Buffer

# Multiples of the lower bound that are near enough: of plain orders of placing, of so many orders that come from them,
# and of all that are tried while the steps of work last, of which a million take some 0.2 s.
_PLAIN_NEAR, _FEW_NEAR, _NEAR = 1.02, 1.05, 1.10
_FEW_TRIES, _TRIES, _STEPS = 192, 800, 1_500_000
_STEPS_A_VALUE = 16  # to place it, and one for each other that lives while it does


@dataclass(frozen=True)
class Layout:
    """places: buffer id -> (arena, byte offset); arenas: bytes of each.

    bound: the most bytes that are live at one time, which no layout can do without.
    """

    places: dict[int, tuple[int, int]]
    arenas: list[int]
    bound: int

    @property
    def nbytes(self) -> int:
        return sum(self.arenas)


@dataclass(frozen=True)
class _Values:
    """What is to be placed, by position. For each value: `apart`, those that may not share its arena; `meets`, those
    that live at some time while it does.
    """

    keys: list[int]
    sizes: list[int]
    starts: list[int]
    ends: list[int]
    apart: list[list[int]]
    meets: list[list[int]]


@dataclass(frozen=True)
class _Placed:
    """places: (arena, byte offset) of each value, or of the first ones where `_place` gave up. grew: those that memory
    grew for. steps: of work.
    """

    places: list[tuple[int, int]]
    arenas: list[int]
    grew: list[int]
    steps: int

    @property
    def nbytes(self) -> int:
        return sum(self.arenas)


def assign_memory(
    dispatches: Sequence[Dispatch],
    inputs: Sequence[Buffer],
    kept: Sequence[Buffer],
    elsewhere: Container[int],
    *,
    alignment: int,
    most: int,
) -> Layout:
    """Places in shared memory for the inputs and temporaries of a plan, but for ids in `elsewhere`.

    A buffer lives from the first dispatch that touches it to the last; inputs that are read from the start, `kept`
    ones to the end. alignment: of offsets, in bytes. most: bytes of an arena, which only a single value may exceed.
    """
    life = _lifetimes(dispatches, inputs, kept, elsewhere)
    bound = _most_alive([(start, end, nbytes) for start, end, nbytes in life.values()])
    values = _values(life, dispatches, alignment)
    best = _search(values, most, _most_alive(list(zip(values.starts, values.ends, values.sizes, strict=True))))
    return Layout(dict(zip(values.keys, best.places, strict=True)), best.arenas, bound)


def _lifetimes(
    dispatches: Sequence[Dispatch], inputs: Sequence[Buffer], kept: Sequence[Buffer], elsewhere: Container[int]
) -> dict[int, tuple[int, int, int]]:
    """buffer id -> first and last dispatch (the number of dispatches for "to the end"), bytes."""
    life: dict[int, tuple[int, int, int]] = {}

    def touch(buffer: Buffer, position: int) -> None:
        if buffer.kind in ("temp", "input") and id(buffer) not in elsewhere:
            start = 0 if buffer.kind == "input" else life.get(id(buffer), (position,))[0]
            life[id(buffer)] = (start, position, max(4, (buffer.nbytes + 3) // 4 * 4))

    for position, dispatch in enumerate(dispatches):
        for buffer, _ in dispatch.slots:
            touch(buffer, position)
    for buffer in kept:
        touch(buffer, len(dispatches))
    return life


def _most_alive(lives: Sequence[tuple[int, int, int]]) -> int:
    changes: dict[int, int] = {}
    for start, end, nbytes in lives:
        changes[start] = changes.get(start, 0) + nbytes
        changes[end + 1] = changes.get(end + 1, 0) - nbytes
    most = alive = 0
    for position in sorted(changes):
        alive += changes[position]
        most = max(most, alive)
    return most


def _values(life: dict[int, tuple[int, int, int]], dispatches: Sequence[Dispatch], alignment: int) -> _Values:
    index = {key: position for position, key in enumerate(life)}
    apart: list[set[int]] = [set() for _ in life]
    for dispatch in dispatches:
        placed = [(index[id(buffer)], access) for buffer, access in dispatch.slots if id(buffer) in index]
        written = {v for v, access in placed if access == WRITE}
        read = {v for v, access in placed if access != WRITE}
        for w in written:
            apart[w] |= read
        for r in read:
            apart[r] |= written
    starts, ends, sizes = ([row[column] for row in life.values()] for column in range(3))
    meets: list[list[int]] = [[] for _ in life]
    alive: list[int] = []
    for v in sorted(range(len(life)), key=starts.__getitem__):
        alive = [other for other in alive if ends[other] >= starts[v]]
        for other in alive:
            meets[other].append(v)
        meets[v] += alive
        alive.append(v)
    aligned = [-(-n // alignment) * alignment for n in sizes]
    return _Values(list(life), aligned, starts, ends, [sorted(others) for others in apart], meets)


def _search(values: _Values, most: int, bound: int) -> _Placed:
    """The best of plain orders, then of orders that come from it.

    "Squeaky wheel" optimization (Joslin and Clements, 1999): the values that memory grew for are placed earlier in the
    next try, by an amount that is drawn (from a fixed seed).
    """
    order: list[int] = []
    best: _Placed | None = None
    for plain in _plain_orders(values):
        tried = _place(values, plain, most, best.nbytes if best else None)
        if best is None or tried.nbytes < best.nbytes:
            best, order = tried, plain
        if best.nbytes <= _PLAIN_NEAR * bound:
            return best
    assert best is not None
    count, draw, grew, steps = len(order), random.Random(0), best.grew, 0
    for attempt in range(_TRIES):
        if best.nbytes <= (_FEW_NEAR if attempt < _FEW_TRIES else _NEAR) * bound or steps > _STEPS:
            break
        ahead = {v: draw.random() * count / 2 for v in grew}
        rank = {v: position - ahead.get(v, 0.0) for position, v in enumerate(order)}
        order = sorted(order, key=rank.__getitem__)
        tried = _place(values, order, most, best.nbytes)
        grew, steps = tried.grew, steps + tried.steps
        if tried.nbytes < best.nbytes:
            best = tried
    return best


def _plain_orders(values: _Values) -> Iterator[list[int]]:
    everything, size, start = range(len(values.keys)), values.sizes, values.starts
    length = [end - start + 1 for start, end in zip(values.starts, values.ends, strict=True)]
    yield sorted(everything, key=lambda v: (-size[v], start[v]))
    yield sorted(everything, key=lambda v: (-size[v] * length[v], start[v]))
    yield sorted(everything, key=lambda v: (start[v], -size[v]))
    yield sorted(everything, key=lambda v: (-length[v], -size[v]))


def _place(values: _Values, order: Sequence[int], most: int, limit: int | None) -> _Placed:
    """Each value where memory grows least, and among gaps that hold it in the tightest.

    Gives up when memory comes to `limit` bytes.
    """
    sizes = values.sizes
    places, arenas, grew = [(-1, 0)] * len(sizes), list[int](), list[int]()
    total = steps = 0
    for v in order:
        size = sizes[v]
        steps += _STEPS_A_VALUE + len(values.meets[v])
        forbidden = {places[other][0] for other in values.apart[v]}
        taken: list[list[tuple[int, int]]] = [[] for _ in arenas]
        for other in values.meets[v]:
            arena, at = places[other]
            if arena >= 0:
                taken[arena].append((at, at + sizes[other]))
        best = (size, 0, len(arenas), 0)  # bytes that memory grows by, bytes left of the gap, arena, offset: a new one
        for arena, spans in enumerate(taken):
            if arena in forbidden:
                continue
            spans.sort()
            gap, offset, free_from = -1, 0, 0
            for at, end in (*spans, (arenas[arena], 0)):
                if at - free_from >= size and (gap < 0 or at - free_from < gap):
                    gap, offset = at - free_from, free_from
                free_from = max(free_from, end)
            if gap >= 0:
                best = min(best, (0, gap - size, arena, offset))
            elif free_from + size <= most and free_from + size - arenas[arena] < best[0]:
                best = (free_from + size - arenas[arena], 0, arena, free_from)
        grown, _, arena, offset = best
        places[v] = arena, offset
        if grown:
            if arena == len(arenas):
                arenas.append(0)
            arenas[arena] += grown
            total += grown
            grew.append(v)
            if limit is not None and total >= limit:
                break
    return _Placed(places, arenas, grew, steps)
