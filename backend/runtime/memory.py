"""Where the values of a plan lie on the GPU: few buffers, and places in them that are used again when a value is dead.

The places are an offset assignment as in "Efficient Memory Management for Deep Neural Net Inference" (Pisarchyk and
Lee, 2020: largest first, into the gap that fits best), under one rule of WebGPU: a dispatch may not write to a buffer
that it also binds for reading, not even to another part of it. So there are several arenas, and what a dispatch reads
lies in others than what it writes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from backend.runtime.device import WRITE
from backend.runtime.dispatch import Dispatch
from backend.runtime.tensor import Buffer

# No order of placing is best for every graph. Plain ones come first, then drawn ones (from a fixed seed) until the
# result is this near to the lower bound: a try takes some 0.3 ms for 100 values.
_NEAR, _NEAR_ENOUGH = 1.02, 1.10
_TRIES = 64


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


@dataclass
class _Arena:
    size: int = 0
    members: int = 0  # a bit for each value in it
    taken: list[tuple[int, int, int]] = field(default_factory=list)  # (offset, end, value), by offset


@dataclass(frozen=True)
class _Values:
    """What is to be placed, by position; `apart` holds a bit for each value that may not share a value's arena."""

    keys: list[int]
    sizes: list[int]
    starts: list[int]
    ends: list[int]
    apart: list[int]


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
    best: list[_Arena] | None = None
    for attempt, (order, pick) in enumerate(_attempts(values)):
        found = _place(values, order, pick, most, None if best is None else sum(arena.size for arena in best))
        best = best if found is None else found
        assert best is not None
        if sum(arena.size for arena in best) <= (_NEAR if attempt < 4 else _NEAR_ENOUGH) * bound:
            break
    arenas = best or []
    places = {values.keys[v]: (index, at) for index, arena in enumerate(arenas) for at, _, v in arena.taken}
    return Layout(places, [arena.size for arena in arenas], bound)


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
    apart = [0] * len(life)
    for dispatch in dispatches:
        placed = [(index[id(buffer)], access) for buffer, access in dispatch.slots if id(buffer) in index]
        written = {v for v, access in placed if access == WRITE}
        for w in written:
            for r in {v for v, access in placed if access != WRITE}:
                apart[w] |= 1 << r
                apart[r] |= 1 << w
    starts, ends, sizes = ([row[column] for row in life.values()] for column in range(3))
    return _Values(list(life), [-(-n // alignment) * alignment for n in sizes], starts, ends, apart)


_Pick = Callable[[int, int], tuple[float, float]]  # (bytes left of the gap, arena) -> how bad, among those that fit


def _attempts(values: _Values) -> Iterator[tuple[list[int], _Pick]]:
    """Orders in which to place the values, and how to choose among gaps that fit."""
    everything = range(len(values.keys))
    length = [end - start + 1 for start, end in zip(values.starts, values.ends, strict=True)]
    size, start = values.sizes, values.starts

    def tightest(left: int, arena: int) -> tuple[float, float]:
        return left, arena

    for plain in (
        lambda v: (-size[v], start[v]),
        lambda v: (-size[v] * length[v], start[v]),
        lambda v: (start[v], -size[v]),
        lambda v: (-length[v], -size[v]),
    ):
        yield sorted(everything, key=plain), tightest
    draw = random.Random(0)
    for attempt in range(_TRIES):
        weight = [draw.uniform(0.6, 1.6) for _ in everything]
        by_time, by_area = attempt % 3 == 0, attempt % 3 == 1
        rank = [
            start[v] + weight[v] / 2 if by_time else -size[v] * weight[v] * (length[v] if by_area else 1)
            for v in everything
        ]
        yield (
            sorted(everything, key=rank.__getitem__),
            (lambda left, arena: (draw.random(), arena)) if attempt % 2 else tightest,
        )


def _place(values: _Values, order: Sequence[int], pick: _Pick, most: int, limit: int | None) -> list[_Arena] | None:
    """Arenas with each value in the gap that `pick` likes best, else where memory grows least.

    None when it comes to `limit` bytes or more.
    """
    sizes, starts, ends = values.sizes, values.starts, values.ends
    arenas: list[_Arena] = []
    total = 0
    for v in order:
        size, start, end = sizes[v], starts[v], ends[v]
        best: tuple[tuple[float, ...], _Arena, int, int] | None = None
        for index, arena in enumerate(arenas):
            if values.apart[v] & arena.members:
                continue
            gap_at, gap, free_from = -1, -1, 0
            for at, behind, other in arena.taken:
                if starts[other] <= end and start <= ends[other]:
                    if at - free_from >= size and (gap_at < 0 or at - free_from < gap):
                        gap_at, gap = free_from, at - free_from
                    free_from = max(free_from, behind)
            if arena.size - free_from >= size and (gap_at < 0 or arena.size - free_from < gap):
                gap_at, gap = free_from, arena.size - free_from
            grown = 0
            if gap_at < 0:
                gap_at, gap, grown = free_from, size, free_from + size - arena.size
                if free_from + size > most:
                    continue
            score = (grown, *pick(gap - size, index))
            if best is None or score < best[0]:
                best = (score, arena, gap_at, grown)
        if best is None or best[3] >= size:
            arenas.append(_Arena())
            best = ((), arenas[-1], 0, size)
        _, arena, at, grown = best
        arena.size += grown
        arena.members |= 1 << v
        arena.taken.append((at, at + size, v))
        arena.taken.sort()
        total += grown
        if limit is not None and total >= limit:
            return None
    return arenas
