"""What a device can do, as far as the choice of kernels may depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backend.runtime.device import Device
from backend.runtime.errors import DeviceError

# llvmpipe ends all loops of an invocation, without a word, after 65535 iterations together.
_LLVMPIPE_ITERATIONS = 60000


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The defaults are what WebGPU promises of every device."""

    features: frozenset[str] = frozenset()
    max_storage_buffers: int = 8
    max_workgroup_bytes: int = 16384
    max_invocations: int = 256
    on_processor: bool = False  # the adapter is a processor that stands in for a GPU
    tile_rule: Any = None  # a `backend.ops.tiles.Rule` of this adapter, or None for the shipped one
    most_iterations: int | None = None  # that the loops of an invocation may make together, where there is a limit

    def check_iterations(self, count: int, what: str) -> None:
        """Raises `DeviceError` where an invocation would need more: its loops would end early, without a word."""
        if self.most_iterations is not None and count > self.most_iterations:
            raise DeviceError(
                f"{what} takes loops of {count} iterations, and this adapter ends them after {self.most_iterations}: "
                "use another adapter (ZOO_ADAPTER; `zoo doctor` lists them)"
            )


def capabilities(device: Device) -> Capabilities:
    """Of this device, with what `zoo tune` measured on its adapter."""
    from backend.ops import calibration

    return Capabilities(
        features=device.features,
        max_storage_buffers=device.limit("max-storage-buffers-per-shader-stage"),
        max_workgroup_bytes=device.limit("max-compute-workgroup-storage-size"),
        max_invocations=device.limit("max-compute-invocations-per-workgroup"),
        on_processor=device.is_cpu,
        tile_rule=None if device.is_cpu else calibration.load(device.adapter),  # no product takes a tile there
        most_iterations=_LLVMPIPE_ITERATIONS if "llvmpipe" in device.adapter.info["device"] else None,
    )
