"""What a report must name besides its figures: adapter, driver, processor, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from zoo import __version__
from zoo.doctor import adapter_info

_PACKAGES = ("wgpu", "torch", "executorch", "onnxruntime-webgpu", "onnx", "tinygrad", "dawn-python")


def describe() -> dict[str, Any]:
    """`adapter` (as `zoo doctor` describes it, or None), platform, processor, cores, versions of what is installed."""
    return {
        "adapter": adapter_info(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "versions": {
            "webgpu-zoo": __version__,
            "python": platform.python_version(),
            **{name: version for name in _PACKAGES if (version := _version(name))},
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
