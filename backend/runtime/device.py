"""The GPU device: adapter choice, limits, buffers, pipelines. It knows nothing about operators.

One device a process, started on first use. `ZOO_ADAPTER` picks the adapter by its index or by part of its name
(`zoo doctor` lists them); otherwise the best one is taken: discrete, integrated, virtual, then CPU. Limits are
raised to what the adapter has, features are used only when it reports them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import wgpu
from wgpu.backends.wgpu_native._ffi import ffi

from backend.runtime import c_types, replay
from backend.runtime.errors import DeviceError, DeviceLostError

c_types.install(ffi)

WANTED_FEATURES = ("shader-f16", "subgroup", "timestamp-query")
_TYPE_ORDER = {"DiscreteGPU": 0, "IntegratedGPU": 1, "VirtualGPU": 2, "CPU": 3, "Unknown": 4}
_BUFFER_USAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
_NO_ADAPTER = (
    "no WebGPU adapter found: install a GPU driver with Vulkan, Metal or D3D12 "
    "(on Debian or Ubuntu without a GPU: apt-get install mesa-vulkan-drivers libvulkan1)"
)

# wgpu copies what is written into staging memory and frees that after a later submit has run: so much may wait for it.
STAGED_BYTES = 16 << 20

COMPILERS = min(16, os.cpu_count() or 1)

# What a binding slot holds, in the order in which a kernel lists its slots.
READ, WRITE, UNIFORM = "read-only-storage", "storage", "uniform"


def adapters() -> list[Any]:
    """Every adapter that wgpu sees through Vulkan, Metal or D3D12, best first; empty when there is none.

    OpenGL adapters are left out: they lack storage buffers and formats that kernels rely on.
    """
    try:
        found = wgpu.gpu.enumerate_adapters_sync()
    except Exception as error:
        raise DeviceError(f"wgpu cannot enumerate adapters: {error}") from error
    usable = [adapter for adapter in found if adapter.info["backend_type"] not in ("OpenGL", "OpenGLES")]
    return sorted(usable, key=lambda adapter: _TYPE_ORDER.get(adapter.info["adapter_type"], 4))


def choose_adapter(wanted: str | None = None) -> Any:
    """The adapter named by `wanted` (default: `ZOO_ADAPTER`), or the best. Raises `DeviceError`."""
    found = adapters()
    if not found:
        raise DeviceError(_NO_ADAPTER)
    wanted = wanted if wanted is not None else os.environ.get("ZOO_ADAPTER", "")
    if not wanted:
        return found[0]
    if wanted.isdigit() and int(wanted) < len(found):
        return found[int(wanted)]
    for adapter in found:
        if wanted.lower() in f"{adapter.info['device']} {adapter.info['description']}".lower():
            return adapter
    listed = ", ".join(f"{index}: {adapter.info['device']}" for index, adapter in enumerate(found))
    raise DeviceError(f"ZOO_ADAPTER={wanted!r} matches no adapter (there are {listed})")


def is_processor(adapter: Any) -> bool:
    """Whether the adapter is a processor that stands in for a GPU."""
    return str(adapter.info["adapter_type"]) == "CPU"


class Device:
    """A wgpu device with its caches. Thread-safe for `lock` holders only: a plan's replay takes the lock."""

    def __init__(self, adapter: Any = None):
        self.adapter = adapter or choose_adapter()
        self.lock = threading.RLock()
        self.lost: str | None = None
        self.is_cpu = is_processor(self.adapter)
        features = [name for name in WANTED_FEATURES if name in self.adapter.features]
        try:
            self.handle = self.adapter.request_device_sync(
                required_features=features, required_limits=dict(self.adapter.limits)
            )
        except Exception as error:
            raise DeviceError(f"adapter {self.name} refuses a device: {error}") from error
        self.features = frozenset(features)
        self.limits = {name.replace("_", "-"): value for name, value in self.handle.limits.items()}
        self._pipelines: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._layouts: dict[tuple[str, ...], tuple[Any, Any]] = {}
        self._layout_lock = threading.Lock()
        self._fence: Any = None  # a small buffer that `flush` reads
        self._staged = 0  # bytes written since staging memory was last freed

    @property
    def name(self) -> str:
        return str(self.adapter.info["device"])

    def limit(self, name: str) -> int:
        return int(self.limits[name])

    # -- buffers

    def buffer(self, nbytes: int, label: str = "", extra_usage: int = 0) -> Any:
        """A zero-filled storage buffer. WebGPU wants sizes in multiples of 4; an empty tensor still gets 4 bytes."""
        size = max(4, (nbytes + 3) // 4 * 4)
        for limit in ("max-storage-buffer-binding-size", "max-buffer-size"):
            if size > self.limit(limit):
                raise DeviceError(
                    f"{label or 'tensor'} needs {size / 2**20:.0f} MiB, {self.name} allows "
                    f"{self.limit(limit) / 2**20:.0f} MiB a buffer ({limit}): use a smaller shape or model, "
                    "or another adapter (ZOO_ADAPTER)"
                )
        return self.guard(
            f"allocating {size} bytes for {label or 'a tensor'}", self._create_buffer, size, extra_usage, label
        )

    def _create_buffer(self, size: int, extra_usage: int, label: str) -> Any:
        return self.handle.create_buffer(size=size, usage=_BUFFER_USAGE | extra_usage, label=label)

    def write(self, buffer: Any, data: Any, offset: int = 0) -> None:
        """Copy bytes (any contiguous buffer) to the GPU; a size that is no multiple of 4 is padded with zeros.

        However much is written, no more than `STAGED_BYTES` of it waits in staging memory. Raises `DeviceError`.
        """
        self.guard("uploading", self._write, buffer, memoryview(data).cast("B"), offset)

    def _write(self, buffer: Any, view: memoryview, offset: int) -> None:
        whole = len(view) // 4 * 4
        for start in range(0, whole, STAGED_BYTES):
            piece = view[start : min(start + STAGED_BYTES, whole)]
            if self._staged + len(piece) > STAGED_BYTES:
                self.flush()
            replay.write(self, buffer, offset + start, piece)
            self._staged += len(piece)
        if whole < len(view):
            replay.write(self, buffer, offset + whole, bytes(view[whole:]).ljust(4, b"\0"))

    def flush(self) -> None:
        """Waits until the GPU has done all that was submitted and written, which frees staging and dropped buffers."""
        self.guard("waiting for the GPU", self._flush)
        self._staged = 0

    def _flush(self) -> None:
        # Work is done in order, so reading anything back is waiting (wgpu-py 0.32's `on_submitted_work_done` fails).
        if self._fence is None:
            self._fence = self._create_buffer(4, 0, "fence")
        self.handle.queue.read_buffer(self._fence)

    def read(self, buffer: Any, nbytes: int) -> memoryview:
        """Blocking readback of the first `nbytes`, outside the planned staging path (tests, state inspection)."""
        size = max(4, (nbytes + 3) // 4 * 4)
        return self.guard("reading back", self.handle.queue.read_buffer, buffer, 0, size)[:nbytes]

    # -- pipelines

    def layout(self, slots: Sequence[str]) -> tuple[Any, Any]:
        """(bind group layout, pipeline layout) for slots of kinds READ, WRITE, UNIFORM."""
        key = tuple(slots)
        with self._layout_lock:
            if key not in self._layouts:
                self._layouts[key] = self._create_layout(key)
            return self._layouts[key]

    def _create_layout(self, slots: tuple[str, ...]) -> tuple[Any, Any]:
        entries = [
            {"binding": index, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": kind}}
            for index, kind in enumerate(slots)
        ]
        group = self.handle.create_bind_group_layout(entries=entries)
        return group, self.handle.create_pipeline_layout(bind_group_layouts=[group])

    def pipeline(self, code: str, slots: Sequence[str], label: str) -> Any:
        """The compute pipeline of `code` (entry point `main`), compiled once a device."""
        key = (code, tuple(slots))
        if key not in self._pipelines:
            self._pipelines[key] = self.guard(f"compiling {label}", self._compile, code, key[1], label)
        return self._pipelines[key]

    @contextmanager
    def compiling(self) -> Iterator[Callable[[str, Sequence[str], str], None]]:
        """Gives a function of (code, slots, label) that has pipelines compiled side by side while the block goes on.

        All are there at the end of the block. It makes no call of wgpu of its own: the library may tell one thread of
        another's failure. A pipeline that fails is left to `pipeline`, which says why.
        """
        jobs: dict[tuple[str, tuple[str, ...]], Future[Any]] = {}
        with ThreadPoolExecutor(COMPILERS) as pool:  # starts threads as they are needed

            def compile_soon(code: str, slots: Sequence[str], label: str) -> None:
                key = (code, tuple(slots))
                if key not in self._pipelines and key not in jobs:
                    jobs[key] = pool.submit(self._compile, *key, label)

            yield compile_soon
        with suppress(wgpu.GPUError, RuntimeError):  # of which thread is unknown: then none of these is trusted
            self._pipelines.update({key: job.result() for key, job in jobs.items()})

    def _compile(self, code: str, slots: tuple[str, ...], label: str) -> Any:
        module = self.handle.create_shader_module(code=code, label=label)
        return self.handle.create_compute_pipeline(
            layout=self.layout(slots)[1], compute={"module": module, "entry_point": "main"}, label=label
        )

    def bind_group(self, slots: Sequence[str], resources: Sequence[tuple[Any, int, int]]) -> Any:
        """`resources`: (buffer, byte offset, byte size) a slot."""
        entries = [
            {"binding": index, "resource": {"buffer": buffer, "offset": offset, "size": size}}
            for index, (buffer, offset, size) in enumerate(resources)
        ]
        return self.guard("binding buffers", self._bind_group, slots, entries)

    def _bind_group(self, slots: Sequence[str], entries: list[dict[str, Any]]) -> Any:
        return self.handle.create_bind_group(layout=self.layout(slots)[0], entries=entries)

    # -- errors

    def guard(self, what: str, call: Any, *args: Any) -> Any:
        """Run a wgpu call; its failure becomes a `DeviceError` that names the stage and the adapter."""
        try:
            return call(*args)
        except (wgpu.GPUError, RuntimeError) as error:
            message = str(error).strip()
            if "lost" in message.lower():
                self.lost = message
                raise DeviceLostError(f"GPU device lost while {what} on {self.name}: run again") from error
            raise DeviceError(f"{what} failed on {self.name}: {message[:2000]}") from error


_current: Device | None = None
_current_lock = threading.Lock()


def get_device() -> Device:
    """The process's device, started on first use and again after a loss. Raises `DeviceError`."""
    global _current
    with _current_lock:
        if _current is None or _current.lost is not None:
            _current = Device()
        return _current
