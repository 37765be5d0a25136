"""A plan: one graph at concrete shapes, with memory assigned and pipelines ready, replayed at every call.

Inputs and temporary buffers share memory by lifetime (`memory`). What depends on constants alone is computed once, when
the plan is made, and kept with the delegate's resources for the plans of other shapes; constants that nothing else
reads are let go.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import wgpu

from backend.runtime.device import WRITE, Device
from backend.runtime.device_tensor import DeviceTensor, Readback
from backend.runtime.dispatch import Dispatch, Lowered
from backend.runtime.hostdata import Stored
from backend.runtime.memory import assign_memory
from backend.runtime.packing import is_packed
from backend.runtime.replay import Copy, Mapping, Step, Table, record, submit, timed
from backend.runtime.state import StateStore
from backend.runtime.tensor import STORAGE, STORAGE_BYTES, Buffer, Tensor

_AT_ONCE_BYTES = 32 << 20  # of new buffers, before work on constants is run and lets go of what it needs no more
# Dispatches of a submit: the GPU works on few while the host records more. A submit costs as much as ten dispatches.
FIRST_SUBMIT, MOST_SUBMIT = 8, 64
_STAGING_USAGE = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
_LARGE_SPARE = 1 << 20  # bytes; making a smaller one again costs more than holding it
_MOST_SPARE = 4  # buffers that a plan keeps for the next calls, of each kind


class Resources(Protocol):
    """What plans of one delegate share."""

    device: Device
    states: StateStore
    static: dict[str, Any]  # content key -> GPU buffer

    def stored(self, buffer: Buffer, keep: bool = True) -> Any:
        """The GPU buffer of a constant or a state. Without `keep` a new one of a constant is not held on to."""

    def scratch(self, sizes: Sequence[int]) -> list[Any]:
        """Distinct GPU buffers of at least these sizes; plans of any method of the program may use the same ones."""


@dataclass(frozen=True)
class _Readout:
    """How some of the outputs come to the host: where each lies in staging memory, and such memory for the next calls.

    `places`: the GPU buffer of each, or None for an empty output, and the byte offset there.
    """

    places: list[tuple[Any, int]]
    layout: list[Stored]
    nbytes: int
    spare: deque[Any] = field(default_factory=lambda: deque(maxlen=_MOST_SPARE))


class Plan:
    """`run` writes the inputs, replays the dispatches in a few submits, and reads the outputs back.

    keep_inputs: nothing else comes to lie where the inputs are, so that the dispatches may be repeated without `run`.
    """

    def __init__(self, lowered: Lowered, resources: Resources, keep_inputs: bool = False):
        self.device = resources.device
        self._states = resources.states
        self.outputs = lowered.outputs
        self._packed = lowered.packed
        static = _static_dispatches(lowered.dispatches)
        dynamic = [d for d in lowered.dispatches if id(d) not in static]
        self._memory: dict[int, Any] = {}  # buffer id -> a GPU buffer of its own
        self._places: dict[int, tuple[Any, int]] = {}  # buffer id -> a GPU buffer that others are in too, and where
        memory = self._memory
        for dispatch in dynamic:
            for buffer, _ in dispatch.slots:
                if buffer.kind in ("constant", "state") and id(buffer) not in memory:
                    memory[id(buffer)] = resources.stored(buffer)
        with self.device.lock:
            self._compute_static(lowered, [d for d in lowered.dispatches if id(d) in static], resources)
        ends = (*self.outputs, *(packed for packed in self._packed if packed is not None))
        kept = [*(tensor.buffer for tensor in ends), *(lowered.inputs if keep_inputs else ())]
        layout = assign_memory(
            *(dynamic, lowered.inputs, kept, memory),
            alignment=self.device.limit("min-storage-buffer-offset-alignment"),
            most=min(map(self.device.limit, ("max-storage-buffer-binding-size", "max-buffer-size"))),
        )
        arenas = resources.scratch(layout.arenas)
        self._places = {key: (arenas[arena], offset) for key, (arena, offset) in layout.places.items()}
        self.buffer_bytes, self.bound_bytes = layout.nbytes, layout.bound
        # None: an input that nothing reads.
        self._inputs = [(self._places.get(id(buffer)), buffer.nbytes) for buffer in lowered.inputs]
        self._table = Table(self._prepare(dynamic))
        self.steps = self._table.steps
        self._readouts: dict[tuple[int, ...], _Readout] = {}
        self._kept: list[deque[Any]] = [deque(maxlen=_MOST_SPARE) for _ in self.outputs]

    def let_go(self) -> None:
        """Drops large buffers that are left over for the next calls, for another plan is in use now."""
        for spare in (*self._kept, *(readout.spare for readout in self._readouts.values())):
            small = [buffer for buffer in spare if buffer.size < _LARGE_SPARE]
            spare.clear()
            spare.extend(small)

    # -- building

    def _compute_static(self, lowered: Lowered, dispatches: list[Dispatch], resources: Resources) -> None:
        """Runs what depends on constants alone and has not run before; puts its results that are kept into memory."""
        memory = self._memory
        kept = _static_buffers(lowered, {id(d) for d in dispatches})
        keys = _content_keys(dispatches)
        memory |= {id(b): resources.static[keys[id(b)]] for b in kept if keys[id(b)] in resources.static}
        to_run = _needed(dispatches, {id(buffer) for buffer in kept if id(buffer) not in memory}, memory)
        lasting = {*memory, *(id(buffer) for buffer in kept)}
        last = {id(buffer): position for position, d in enumerate(to_run) for buffer, _ in d.slots}
        waiting: list[Dispatch] = []
        fresh = 0
        for position, dispatch in enumerate(to_run):
            for buffer in (buffer for buffer, _ in dispatch.slots if id(buffer) not in memory):
                if buffer.kind == "constant":
                    memory[id(buffer)] = resources.stored(buffer, keep=False)
                else:
                    memory[id(buffer)] = self.device.buffer(buffer.nbytes, buffer.label)
                fresh += buffer.nbytes
            waiting.append(dispatch)
            if fresh >= _AT_ONCE_BYTES or dispatch is to_run[-1]:
                self._submit(Table(self._prepare(waiting)))
                for key in [key for key, at in last.items() if at <= position and key not in lasting]:
                    memory.pop(key, None)
                self.device.flush()
                waiting, fresh = [], 0
        resources.static.update({keys[id(buffer)]: memory[id(buffer)] for buffer in kept})

    def _prepare(self, dispatches: Sequence[Dispatch]) -> list[Step]:
        if not dispatches:
            return []
        align = self.device.limit("min-uniform-buffer-offset-alignment")
        offsets = []
        blob = bytearray()
        for dispatch in dispatches:
            blob.extend(bytes(-len(blob) % align))
            offsets.append(len(blob))
            blob.extend(dispatch.params)
        uniforms = self.device.buffer(len(blob), "uniforms", wgpu.BufferUsage.UNIFORM)
        self.device.write(uniforms, blob)
        steps = []
        for dispatch, offset in zip(dispatches, offsets, strict=True):
            resources = []
            for buffer, _ in dispatch.slots:
                resources.append((*self._place(buffer), max(4, (buffer.nbytes + 3) // 4 * 4)))
            resources.append((uniforms, offset, len(dispatch.params)))
            pipeline = self.device.pipeline(dispatch.code, dispatch.kinds, dispatch.label)
            group = self.device.bind_group(dispatch.kinds, resources)
            steps.append(Step(dispatch.label, dispatch.template, pipeline, group, dispatch.groups))
        return steps

    def _place(self, buffer: Buffer) -> tuple[Any, int]:
        """The GPU buffer that holds it, and the byte offset in there."""
        return self._places.get(id(buffer)) or (self._memory[id(buffer)], 0)

    # -- running

    def run(self, inputs: Sequence[np.ndarray | DeviceTensor]) -> list[np.ndarray]:
        """inputs as stored (see `hostdata`), or on the GPU. Returns fresh arrays of the outputs' dtypes and shapes."""
        return self._launch(inputs, tuple(range(len(self.outputs))), keep=False)[1].arrays()

    def start(self, inputs: Sequence[np.ndarray | DeviceTensor], fetch: tuple[int, ...] = ()) -> list[DeviceTensor]:
        """As `run`, but returns when the work is submitted. The outputs at `fetch` are on their way to the host."""
        buffers, readback = self._launch(inputs, fetch, keep=True)
        return [
            DeviceTensor(
                *(self.device, buffer, tensor.dtype, tensor.shape, spare, self._states),
                readback=functools.partial(_nth, readback, fetch.index(position)) if position in fetch else None,
            )
            for position, (tensor, buffer, spare) in enumerate(zip(self.outputs, buffers, self._kept, strict=True))
        ]

    def profile(self, inputs: Sequence[np.ndarray | DeviceTensor]) -> list[tuple[str, int]]:
        """(label, nanoseconds on the GPU) of every dispatch of one run. Updates states as `run` does.

        Raises `ValueError` when the adapter has no timestamp queries.
        """
        with self.device.lock:
            if copies := self._upload(inputs):
                self._submit(Table([]), copies)
            return list(zip((step.label for step in self.steps), timed(self.device, self.steps), strict=True))

    def _launch(
        self, inputs: Sequence[np.ndarray | DeviceTensor], fetch: tuple[int, ...], keep: bool
    ) -> tuple[list[Any], Readback]:
        """Submits one run. Returns copies of the outputs on the GPU, if `keep`, and those at `fetch` for the host."""
        with self.device.lock:
            before = self._upload(inputs)
            readout = self._readouts.get(fetch)
            if readout is None:
                readout = self._readouts[fetch] = self._read_out(fetch)
            staging = _pop(readout.spare) if readout.nbytes else None
            if staging is None and readout.nbytes:
                staging = _staging(self.device, readout.nbytes)
            after = [
                Copy(*place, staging, stored.start, _padded(stored.nbytes))
                for place, stored in zip(readout.places, readout.layout, strict=True)
                if stored.nbytes
            ]
            kept = []
            for tensor, packed, spare in zip(self.outputs if keep else (), self._packed, self._kept, strict=False):
                source = packed or tensor
                live = _live_bytes(source)
                kept.append(_pop(spare) or self.device.buffer(live, "a result"))
                if live:
                    after.append(Copy(*self._place(source.buffer), kept[-1], 0, _padded(live)))
            submission = self._submit(self._table, before, after)
            mapping = Mapping(self.device, staging, readout.nbytes, submission) if staging is not None else None
        return kept, Readback(self.device, mapping, readout.layout, readout.spare)

    def _read_out(self, fetch: tuple[int, ...]) -> _Readout:
        places: list[tuple[Any, int]] = []
        layout: list[Stored] = []
        total = 0
        for output, packed in ((self.outputs[position], self._packed[position]) for position in fetch):
            layout.append(Stored(total, output.dtype, output.shape, packed is not None))
            live = layout[-1].nbytes
            places.append(self._place((packed or output).buffer) if live else (None, 0))
            total += -(-live // 8) * 8
        return _Readout(places, layout, total)

    def _upload(self, inputs: Sequence[np.ndarray | DeviceTensor]) -> list[Copy]:
        """Writes arrays; what is on the GPU is left for the copies that it returns."""
        copies = []
        for (place, nbytes), given in zip(self._inputs, inputs, strict=True):
            if place is None:
                continue
            if isinstance(given, DeviceTensor):
                copies.append(Copy(given.buffer, 0, *place, max(4, _padded(nbytes))))
            elif given.size:
                self.device.write(place[0], given.reshape(-1).view(np.uint8), place[1])
        return copies

    def _submit(self, table: Table, before: Sequence[Copy] = (), after: Sequence[Copy] = ()) -> int:
        submission: int = self.device.guard("running a plan", self._encode, table, before, after)
        return submission

    def _encode(self, table: Table, before: Sequence[Copy], after: Sequence[Copy]) -> int:
        # Where the host is the GPU there is nothing to overlap, and a submit waits for the one before.
        first, count = 0, len(table.steps) if self.device.is_cpu else FIRST_SUBMIT
        while True:
            last = first + count >= len(table.steps)
            count = min(count, len(table.steps) - first)
            commands = record(self.device, table, first, count, () if first else before, after if last else ())
            submission = submit(self.device, commands)
            if last:
                return submission
            first, count = first + count, min(2 * count, MOST_SUBMIT)


def read_later(device: Device, buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """A function that gives the contents of a result's GPU buffer as they are now, which are on their way to the
    host."""
    layout = [Stored(0, dtype, shape, is_packed(dtype, math.prod(shape)))]
    live = layout[0].nbytes
    if not live:
        return functools.partial(_nth, Readback(device, None, layout, deque()), 0)
    staging = _staging(device, _padded(live))
    with device.lock:
        copies = (Copy(buffer, 0, staging, 0, _padded(live)),)
        submission = device.guard("reading results back", _record_and_submit, device, copies)
        mapping = Mapping(device, staging, _padded(live), submission)
    return functools.partial(_nth, Readback(device, mapping, layout, deque(maxlen=0)), 0)


def _record_and_submit(device: Device, copies: Sequence[Copy]) -> int:
    return submit(device, record(device, Table([]), 0, 0, copies))


def _nth(readback: Readback, position: int) -> np.ndarray:
    return readback.arrays()[position]


def _live_bytes(tensor: Tensor) -> int:
    return tensor.numel * STORAGE_BYTES[STORAGE[tensor.dtype]]


def _padded(nbytes: int) -> int:
    return (nbytes + 3) // 4 * 4


def _pop(spare: deque[Any]) -> Any:
    """A buffer that is left over, or None; others may take one at the same time."""
    try:
        return spare.pop()
    except IndexError:
        return None


def _staging(device: Device, nbytes: int) -> Any:
    return device.guard(f"allocating {nbytes} bytes to read results back", _create_staging, device, nbytes)


def _create_staging(device: Device, nbytes: int) -> Any:
    return device.handle.create_buffer(size=nbytes, usage=_STAGING_USAGE)


def _static_dispatches(dispatches: Sequence[Dispatch]) -> set[int]:
    """ids of dispatches that depend on constants only, and whose results nothing else writes to."""
    static = {id(d) for d in dispatches}
    while True:
        writers: dict[int, list[int]] = {}
        for d in dispatches:
            for buffer, access in d.slots:
                if access == WRITE:
                    writers.setdefault(id(buffer), []).append(id(d))

        moving = {key for key, made_by in writers.items() if not static.issuperset(made_by)}
        remaining = {
            id(d)
            for d in dispatches
            if id(d) in static
            and all(b.kind == "constant" or (b.kind == "temp" and id(b) not in moving) for b, _ in d.slots)
        }
        if remaining == static:
            return static
        static = remaining


def _content_keys(dispatches: Sequence[Dispatch]) -> dict[int, str]:
    """buffer id -> what names its contents, for all that the dispatches write: the same in the plans of any shape."""
    keys: dict[int, str] = {}
    for dispatch in dispatches:
        digest = hashlib.sha256(dispatch.code.encode() + dispatch.params + repr(dispatch.groups).encode())
        for buffer, access in dispatch.slots:
            known: str | int = keys.get(id(buffer), f"{buffer.kind}:{buffer.key}")
            if access == WRITE and id(buffer) not in keys:
                known = buffer.nbytes
            digest.update(f"{access}:{known};".encode())
        for position, (buffer, access) in enumerate(dispatch.slots):
            if access == WRITE:
                keys[id(buffer)] = f"{digest.hexdigest()}:{position}"
    return keys


def _needed(dispatches: Sequence[Dispatch], wanted: set[int], there: Container[int]) -> list[Dispatch]:
    """Those of the dispatches, in order, that `wanted` buffers depend on, up to what is `there` already."""
    found = []
    for dispatch in reversed(dispatches):
        if any(access == WRITE and id(buffer) in wanted for buffer, access in dispatch.slots):
            found.append(dispatch)
            wanted |= {id(buffer) for buffer, _ in dispatch.slots if id(buffer) not in there}
    return found[::-1]


def _static_buffers(lowered: Lowered, static: set[int]) -> list[Buffer]:
    """Results of static dispatches that the replayed dispatches or the outputs read."""
    made = {id(b): b for d in lowered.dispatches if id(d) in static for b, access in d.slots if access == WRITE}
    read = {id(b) for d in lowered.dispatches if id(d) not in static for b, _ in d.slots}
    read |= {id(tensor.buffer) for tensor in (*lowered.outputs, *lowered.packed) if tensor is not None}
    return [buffer for key, buffer in made.items() if key in read]
