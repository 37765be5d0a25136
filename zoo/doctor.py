"""`zoo doctor`: what this machine has, what is missing and how to get it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Any

from zoo import __version__

PACKAGES = ("torch", "executorch", "torchao", "transformers", "wgpu", "numpy", "soundfile", "huggingface_hub")
# The limits that decide whether a model fits and which kernels it gets.
LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroup-storage-size",
    "max-compute-workgroups-per-dimension",
)
FEATURES = ("shader-f16", "subgroup", "timestamp-query")


@dataclass(frozen=True)
class Missing:
    """Something that is not there; `get` is how to get it."""

    what: str
    get: str


@dataclass
class Findings:
    """`adapter` is the one that programs run on, None without one: then nothing runs on the GPU backend."""

    adapter: dict[str, Any] | None = None
    adapters: list[dict[str, Any]] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    features: dict[str, bool] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    shim: dict[str, Any] = field(default_factory=dict)
    dispatch_loop: dict[str, str] = field(default_factory=dict)
    products: dict[str, str] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.adapter is not None and not self.missing

    def json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def examine() -> Findings:
    """Looks at adapters, packages and the native shim. Never raises for what is missing."""
    findings = Findings()
    findings.versions = {
        "project": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        **{name: _version(name) for name in PACKAGES},
    }
    absent = [name for name in PACKAGES if findings.versions[name] is None]
    if absent:
        findings.missing.append(Missing(f"packages: {', '.join(absent)}", "make setup"))
    _examine_adapters(findings)
    _examine_shim(findings)
    _examine_loop(findings)
    _examine_products(findings)
    return findings


def adapter_info() -> dict[str, Any] | None:
    """The adapter that programs run on, or None: device, type, api, vendor, driver."""
    findings = Findings()
    _examine_adapters(findings)
    return findings.adapter


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _examine_adapters(findings: Findings) -> None:
    # The GPU loader complains on stderr where a session has no such folder, as in a container.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    try:
        device = importlib.import_module("backend.runtime.device")
        findings.adapters = [_describe(adapter) for adapter in device.adapters()]
        chosen = device.choose_adapter()
    except Exception as error:  # any failure of the driver stack is what this command is there to report
        findings.missing.append(Missing(f"a WebGPU adapter: {_first_line(error)}", driver_advice()))
        return
    findings.adapter = _describe(chosen)
    limits = {name.replace("_", "-"): int(value) for name, value in chosen.limits.items()}
    findings.limits = {name: limits[name] for name in LIMITS if name in limits}
    features = set(chosen.features)
    findings.features = {name: name in features for name in FEATURES}


def _describe(adapter: Any) -> dict[str, Any]:
    info = adapter.info
    return {
        "device": str(info.get("device", "")),
        "type": str(info.get("adapter_type", "")),
        "api": str(info.get("backend_type", "")),
        "vendor": str(info.get("vendor", "")),
        "driver": str(info.get("description", "")),
    }


def driver_advice() -> str:
    """One line: how to get a driver that WebGPU runs on, on this system."""
    system = platform.system()
    if system == "Linux":
        if shutil.which("apt-get"):
            return "apt-get install mesa-vulkan-drivers libvulkan1 (as root), or the driver of your GPU's vendor"
        return "install a Vulkan driver: the package of Mesa's Vulkan drivers, or the driver of your GPU's vendor"
    if system == "Windows":
        return "install the driver of your GPU's vendor (Direct3D 12 or Vulkan)"
    if system == "Darwin":
        return "a Mac with Metal (macOS 11 or newer); virtual machines need a GPU passed through"
    return "install a Vulkan driver"


def _examine_shim(findings: Findings) -> None:
    # Building it is what the first run would do anyhow; its error says what is missing.
    findings.shim = {"built": False, "path": None}
    try:
        path = importlib.import_module("backend.native.build").ensure_built()
    except Exception as error:
        findings.missing.append(Missing("the native shim for ExecuTorch's runtime", _first_line(error)))
        return
    findings.shim = {"built": True, "path": str(path)}


def _examine_loop(findings: Findings) -> None:
    """Not missing where it is Python's: results are the same, at more time of the host."""
    try:
        loop, told = importlib.import_module("backend.runtime.replay").native_loop()
    except Exception as error:  # without the wgpu package, which is told elsewhere
        findings.dispatch_loop = {"runs": "not at all", "reason": _first_line(error)}
        return
    findings.dispatch_loop = {"runs": "native", "path": told} if loop else {"runs": "in Python", "reason": told}


def _examine_products(findings: Findings) -> None:
    """Which rule chooses the tiles of matrix products."""
    if findings.adapter is None or findings.adapter["type"] == "CPU":
        findings.products = {"tiles": "none", "reason": "they are for GPUs"}
        return
    from backend.ops import calibration
    from backend.runtime.device import choose_adapter

    adapter = choose_adapter()
    if calibration.load(adapter) is None:
        findings.products = {"tiles": "chosen as shipped", "to calibrate": "zoo tune"}
    else:
        findings.products = {"tiles": "chosen as calibrated", "path": str(calibration.path(adapter))}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


if __name__ == "__main__":
    # For the Makefile: is there an adapter? The one line on stderr says what to install when there is none.
    present = Findings()
    _examine_adapters(present)
    if present.adapter is None:
        sys.exit(f"error: missing {present.missing[0].what}; get it: {present.missing[0].get}")
