"""Timing work that stays on the GPU: by its own clock where it has one, and as seen from the host."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import wgpu

from backend.runtime.device import READ, WRITE, Device
from backend.runtime.replay import Step, encode

TARGET_SECONDS = 0.02  # of work between two timestamps

_COPY_GROUPS = 16384
_COPY = """
@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> target_: array<vec4<u32>>;
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  let step = groups.x * 256u;
  for (var i = id.x; i < arrayLength(&source); i += 4u * step) {
    let a = source[i];
    let b = source[i + step];
    let c = source[i + 2u * step];
    let d = source[i + 3u * step];
    target_[i] = a;
    if (i + step < arrayLength(&source)) { target_[i + step] = b; }
    if (i + 2u * step < arrayLength(&source)) { target_[i + 2u * step] = c; }
    if (i + 3u * step < arrayLength(&source)) { target_[i + 3u * step] = d; }
  }
}"""


def is_small(device: Device) -> bool:
    """Whether the adapter is a processor that stands in for a GPU: measured with less."""
    return device.is_cpu


def copy_bandwidth(device: Device) -> float:
    """GB/s, read and written, of the better of two copies: between buffers, and by a kernel of 16 bytes a read."""
    nbytes = (64 if is_small(device) else 512) << 20
    nbytes = min(nbytes, device.limit("max-storage-buffer-binding-size") // 1024 * 1024)
    source, target = device.buffer(nbytes, "copy source"), device.buffer(nbytes, "copy target")
    pipeline = device.pipeline(_COPY, (READ, WRITE), "copy")
    group = device.bind_group((READ, WRITE), [(source, 0, nbytes), (target, 0, nbytes)])
    copying = Step("copy", "copy", pipeline, group, (max(1, min(nbytes // 16384, _COPY_GROUPS)), 1, 1))
    by_kernel = Timer(device, [copying])
    # Timestamps may come out equal, or be missing (NaN): such a time says nothing.
    best = min(time for _ in range(5) for time in by_kernel.run() if time > 0)

    def run(count: int) -> float:
        encoder = device.handle.create_command_encoder()
        for _ in range(count):
            encoder.copy_buffer_to_buffer(source, 0, target, 0, nbytes)
        start = time.perf_counter()
        device.handle.queue.submit([encoder.finish()])
        by_kernel.wait()
        return (time.perf_counter() - start) / count

    count = max(1, min(100, int(TARGET_SECONDS / run(1))))
    return 2 * nbytes / min(best, *(run(count) for _ in range(5))) / 1e9


class Timer:
    """Repeats dispatches in one pass, enough of them for a time that can be measured: `seconds`, or somewhat less."""

    def __init__(self, device: Device, steps: Sequence[Step], seconds: float = TARGET_SECONDS):
        self.device = device
        self.steps = steps
        self.stamps = "timestamp-query" in device.features
        handle = device.handle
        self.resolved = handle.create_buffer(size=16, usage=wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC)
        # Kept, for making a buffer that can be mapped may take a driver longer than the work that is timed.
        self.seen = handle.create_buffer(size=16, usage=wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST)
        if self.stamps:
            self.queries = handle.create_query_set(type=wgpu.QueryType.timestamp, count=2)
        self.repeats = 1
        self.run()
        self.repeats = max(1, min(200, int(seconds / max(1e-6, self.run()[1]))))
        self.run()

    def wait(self) -> list[int]:
        """What the last timestamps were, when all that was submitted is done."""
        encoder = self.device.handle.create_command_encoder()
        if self.stamps:
            encoder.resolve_query_set(self.queries, 0, 2, self.resolved, 0)
        encoder.copy_buffer_to_buffer(self.resolved, 0, self.seen, 0, 16)
        self.device.handle.queue.submit([encoder.finish()])
        self.seen.map_sync(wgpu.MapMode.READ)
        stamps = memoryview(self.seen.read_mapped(copy=True)).cast("B").cast("Q").tolist()
        self.seen.unmap()
        return list(stamps)

    def run(self) -> tuple[float, float]:
        """(seconds by the GPU's clock or NaN, seconds by the host's) of one repetition."""
        encoder = self.device.handle.create_command_encoder()
        writes = {}
        if self.stamps:
            writes["timestamp_writes"] = {
                "query_set": self.queries,
                "beginning_of_pass_write_index": 0,
                "end_of_pass_write_index": 1,
            }
        compute = encoder.begin_compute_pass(**writes)
        for _ in range(self.repeats):
            encode(compute, self.steps)
        compute.end()
        commands = encoder.finish()
        start = time.perf_counter()
        self.device.handle.queue.submit([commands])
        first, last = self.wait()
        wall = (time.perf_counter() - start) / self.repeats
        return (last - first) / 1e9 / self.repeats if self.stamps else math.nan, wall
