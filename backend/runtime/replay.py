"""Encoding a plan's dispatches, reading its results, and timing its dispatches one by one.

wgpu-py spends 4 to 8 µs of Python a dispatch on argument checks that a plan has passed once already, and hands every
mapping of a buffer to a thread of its own and back. Replay calls the library underneath with the handles that wgpu-py
holds; a bad call would still be reported when the encoder finishes. This is the one place that reaches below wgpu-py's
public interface.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import wgpu
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


def encode(compute_pass: Any, steps: Sequence[Step]) -> None:
    """Records the steps into an open compute pass."""
    handle = compute_pass._internal
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


@contextmanager
def mapped(device: Any, buffer: Any, size: int) -> Iterator[memoryview]:
    """The first `size` bytes of a buffer that the host may read, once all submitted work is done.

    The memory is gone when the context ends. Raises `RuntimeError` with the library's reason when the buffer cannot be
    mapped, as on a lost device.
    """
    told: list[str] = []

    def done(status: int, message: Any, *_: Any) -> None:
        text = ffi.unpack(message.data, message.length).decode() if message.data != ffi.NULL else "no reason given"
        told.append("" if status == lib.WGPUMapAsyncStatus_Success else f"{' '.join(text.split())} (status {status})")

    callback = ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", done)
    info = ffi.new("WGPUBufferMapCallbackInfo *", {"mode": lib.WGPUCallbackMode_AllowProcessEvents})
    info.callback = callback
    lib.wgpuBufferMapAsync(buffer._internal, lib.WGPUMapMode_Read, 0, size, info[0])
    while not told:
        lib.wgpuDevicePoll(device.handle._internal, True, ffi.NULL)
    if told[0]:
        raise RuntimeError(told[0])
    try:
        yield memoryview(ffi.buffer(lib.wgpuBufferGetConstMappedRange(buffer._internal, 0, size), size))
    finally:
        lib.wgpuBufferUnmap(buffer._internal)


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
