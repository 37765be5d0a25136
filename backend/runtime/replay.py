"""Recording a plan's dispatches, reading results, and timing dispatches one by one.

wgpu-py spends 4 to 8 µs of Python a dispatch on argument checks that a plan has passed once already, and hands every
mapping of a buffer to a thread of its own and back. Replay calls the library underneath with the handles that wgpu-py
holds; a bad call is still reported, when the commands are finished. This is the one place that reaches below
wgpu-py's public interface.

The calls of one command buffer are made by `backend/native/replay.c`, or by `_record` here where that cannot be
compiled: the same calls in the same order, so the same results, at some 1 µs more a dispatch.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import wgpu
from wgpu.backends.wgpu_native._api import libf
from wgpu.backends.wgpu_native._ffi import ffi, lib

_TIMESTAMP_BYTES = 8
_MAX_QUERIES = 4096


@dataclass(frozen=True)
class Step:
    label: str
    template: str
    pipeline: Any
    bind_group: Any
    groups: tuple[int, int, int]


class Copy(NamedTuple):
    """`nbytes` from `start` in the GPU buffer `source` to `offset` in `target`; all three are multiples of 4."""

    source: Any
    start: int
    target: Any
    offset: int
    nbytes: int


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pipeline", "group")),
        *((name, ctypes.c_uint32) for name in ("x", "y", "z", "unused")),
    )


class _Copy(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "target")),
        *((name, ctypes.c_uint64) for name in ("start", "offset", "nbytes")),
    )


# In the order of `Functions` in replay.c.
_FUNCTIONS = (
    "wgpuDeviceCreateCommandEncoder",
    "wgpuCommandEncoderBeginComputePass",
    "wgpuComputePassEncoderSetPipeline",
    "wgpuComputePassEncoderSetBindGroup",
    "wgpuComputePassEncoderDispatchWorkgroups",
    "wgpuComputePassEncoderEnd",
    "wgpuComputePassEncoderRelease",
    "wgpuCommandEncoderCopyBufferToBuffer",
    "wgpuCommandEncoderFinish",
    "wgpuCommandEncoderRelease",
)


class Table:
    """Steps as they are recorded: built once, for any number of replays. Holds their pipelines and bind groups."""

    def __init__(self, steps: Sequence[Step]):
        self.steps = list(steps)
        self.packed = (_Step * len(self.steps))(
            *(
                _Step(_address(step.pipeline._internal), _address(step.bind_group._internal), *step.groups)
                for step in steps
            )
        )


def record(
    device: Any, table: Table, first: int, count: int, before: Sequence[Copy] = (), after: Sequence[Copy] = ()
) -> Any:
    """A command buffer of `count` steps of the table from `first` on, in one pass, between copies. See `submit`.

    Raises `wgpu.GPUError` for what the library refuses.
    """
    loop, _ = native_loop()
    return (_checked_record if loop is None else _checked_native)(device, table, first, count, before, after)


def submit(device: Any, commands: Any) -> int:
    """Submits what `record` gave, once, and returns the submission's number for `Mapping`."""
    try:
        queue = device.handle.queue._internal
        return int(libf.wgpuQueueSubmitForIndex(queue, 1, ffi.new("WGPUCommandBuffer[]", [commands])))
    finally:
        lib.wgpuCommandBufferRelease(commands)


def write(device: Any, buffer: Any, offset: int, data: Any) -> None:
    """Copies contiguous bytes, a multiple of 4 of them, to a place in a GPU buffer, before the next submit.

    Raises `wgpu.GPUError`.
    """
    # Released here: an error's traceback would keep it, and the collector takes a buffer from under it.
    with ffi.from_buffer(data) as pointer:
        libf.wgpuQueueWriteBuffer(device.handle.queue._internal, buffer._internal, offset, pointer, len(pointer))


@functools.cache
def native_loop() -> tuple[Any, str]:
    """The compiled loop and its path, or None and the reason, in one line, why Python's runs instead."""
    from backend.native.build import REPLAY, BuildError, ensure_built

    try:
        path = str(ensure_built(REPLAY))
        loop = ctypes.CDLL(path).zoo_record
    except (BuildError, OSError) as error:
        return None, (str(error).strip() or type(error).__name__).splitlines()[0]
    loop.restype = ctypes.c_void_p
    pointer, count = ctypes.c_void_p, ctypes.c_size_t
    loop.argtypes = (pointer, pointer, pointer, count, pointer, count, pointer, count)
    return functools.partial(loop, _function_table()), path


def _address(handle: Any) -> int:
    return int(ffi.cast("uintptr_t", handle))


@functools.cache
def _function_table() -> Any:
    return (ctypes.c_void_p * len(_FUNCTIONS))(*(_address(getattr(lib, name)) for name in _FUNCTIONS))


def _record_native(
    device: Any, table: Table, first: int, count: int, before: Sequence[Copy], after: Sequence[Copy]
) -> Any:
    loop, _ = native_loop()
    copies = [
        (_Copy * len(group))(
            *(
                _Copy(_address(c.source._internal), _address(c.target._internal), c.start, c.offset, c.nbytes)
                for c in group
            )
        )
        for group in (before, after)
    ]
    steps = ctypes.addressof(table.packed) + first * ctypes.sizeof(_Step)
    made = loop(_address(device.handle._internal), steps, count, copies[0], len(before), copies[1], len(after))
    return ffi.cast("WGPUCommandBuffer", made)


def _record(device: Any, table: Table, first: int, count: int, before: Sequence[Copy], after: Sequence[Copy]) -> Any:
    encoder = lib.wgpuDeviceCreateCommandEncoder(device.handle._internal, ffi.NULL)
    _copy(encoder, before)
    if count:
        compute = lib.wgpuCommandEncoderBeginComputePass(encoder, ffi.NULL)
        _dispatch(compute, table.steps[first : first + count])
        lib.wgpuComputePassEncoderEnd(compute)
        lib.wgpuComputePassEncoderRelease(compute)
    _copy(encoder, after)
    commands = lib.wgpuCommandEncoderFinish(encoder, ffi.NULL)
    lib.wgpuCommandEncoderRelease(encoder)
    return commands


def _copy(encoder: Any, copies: Sequence[Copy]) -> None:
    for copy in copies:
        source, target = copy.source._internal, copy.target._internal
        lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, source, copy.start, target, copy.offset, copy.nbytes)


def _dispatch(handle: Any, steps: Sequence[Step]) -> None:
    set_pipeline = lib.wgpuComputePassEncoderSetPipeline
    set_group = lib.wgpuComputePassEncoderSetBindGroup
    dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
    null = ffi.NULL
    last = None
    for step in steps:
        if step.pipeline is not last:
            last = step.pipeline
            set_pipeline(handle, last._internal)
        set_group(handle, 0, step.bind_group._internal, 0, null)
        dispatch(handle, *step.groups)


# What the library says while these run becomes an exception, as in wgpu-py's own calls.
_checked_native = libf._make_proxy_func("replay", _record_native)
_checked_record = libf._make_proxy_func("replay", _record)


def encode(compute_pass: Any, steps: Sequence[Step]) -> None:
    """Records the steps into an open compute pass of wgpu-py."""
    _dispatch(compute_pass._internal, steps)


_requests: dict[int, list[str]] = {}  # mappings that were not answered yet; an answer is a reason, empty for success
_numbers = itertools.count(1)


def _answer(status: int, message: Any, number: Any, _: Any) -> None:
    text = ""
    if status != lib.WGPUMapAsyncStatus_Success:
        text = ffi.unpack(message.data, message.length).decode() if message.data != ffi.NULL else "no reason given"
        text = f"{' '.join(text.split())} (status {status})"
    _requests.get(_address(number), []).append(text)
    _requests.pop(_address(number), None)


_struck: list[BaseException] = []  # in `_answer`, which has nobody to raise it to


def _interrupted(kind: Any, error: BaseException, trace: Any) -> None:
    """Ctrl-C in the middle of `_answer`: the answer counts all the same, and `Mapping.wait` raises."""
    _struck.append(error)
    _answer(*(trace.tb_frame.f_locals[name] for name in ("status", "message", "number", "_")))


@functools.cache
def _callback() -> Any:
    # One for all requests: it must live until the library has answered, also when nobody waits any more.
    return ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", _answer, onerror=_interrupted)


class Mapping:
    """The first `size` bytes of a staging buffer on their way to the host, asked for at once and waited for late.

    submission: of the work that writes the buffer. The buffer is the mapping's until `close`; a mapping that is dropped
    before takes the buffer along.
    """

    def __init__(self, device: Any, buffer: Any, size: int, submission: int):
        self._device, self._buffer, self._size, self._submission = device, buffer, size, submission
        self._told: list[str] = []
        number = next(_numbers)
        _requests[number] = self._told
        info = ffi.new("WGPUBufferMapCallbackInfo *", {"mode": lib.WGPUCallbackMode_AllowProcessEvents})
        info.callback = _callback()
        info.userdata1 = ffi.cast("void *", number)
        lib.wgpuBufferMapAsync(buffer._internal, lib.WGPUMapMode_Read, 0, size, info[0])

    def wait(self) -> memoryview:
        """The bytes, which are gone after `close` and not before. Does not wait for work that was submitted later.

        Raises `RuntimeError` with the library's reason when the buffer cannot be mapped, as on a lost device.
        """
        submission = ffi.new("WGPUSubmissionIndex *", self._submission)
        while not self._told:
            lib.wgpuDevicePoll(self._device.handle._internal, True, submission)
            if _struck:
                raise _struck.pop()
        if self._told[0]:
            raise RuntimeError(self._told[0])
        buffer = self._buffer
        data = lib.wgpuBufferGetConstMappedRange(buffer._internal, 0, self._size)
        # The bytes hold the buffer: Ctrl-C drops the mapping while threads may still be copying from it.
        held = ffi.gc(data, lambda _, buffer=buffer: None)
        return memoryview(ffi.buffer(held, self._size))

    def close(self) -> Any:
        """Unmaps and returns the buffer, for another use."""
        lib.wgpuBufferUnmap(self._buffer._internal)
        return self._buffer


def timed(device: Any, steps: Sequence[Step]) -> list[int]:
    """Runs the steps, each in a pass of its own, and returns nanoseconds of GPU time for each.

    Raises `ValueError` when the adapter has no timestamp queries.
    """
    if "timestamp-query" not in device.features:
        raise ValueError(f"{device.name} has no timestamp queries")
    spent: list[int] = []
    for first in range(0, len(steps), _MAX_QUERIES // 2):
        spent += _timed(device, steps[first : first + _MAX_QUERIES // 2])
    return spent


def _timed(device: Any, steps: Sequence[Step]) -> list[int]:
    count = 2 * len(steps)
    queries = device.handle.create_query_set(type=wgpu.QueryType.timestamp, count=count)
    resolved = device.handle.create_buffer(
        size=count * _TIMESTAMP_BYTES, usage=wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
    )
    encoder = device.handle.create_command_encoder()
    for position, step in enumerate(steps):
        writes = {
            "query_set": queries,
            "beginning_of_pass_write_index": 2 * position,
            "end_of_pass_write_index": 2 * position + 1,
        }
        compute = encoder.begin_compute_pass(timestamp_writes=writes)
        encode(compute, [step])
        compute.end()
    encoder.resolve_query_set(queries, 0, count, resolved, 0)
    device.handle.queue.submit([encoder.finish()])
    stamps = memoryview(device.handle.queue.read_buffer(resolved)).cast("B").cast("Q").tolist()
    return [stamps[2 * position + 1] - stamps[2 * position] for position in range(len(steps))]
