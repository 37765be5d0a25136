"""Backends as export sees them: which partitioners each takes, and what it needs on this machine.

Imported without torch; a backend's partitioners are imported when they are asked for.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.recipe import BACKENDS, UserError
from zoo.quantize import MODES


@dataclass(frozen=True)
class Target:
    """A backend. `partitioners(method, qlinear)` are its partitioners for one method, in order.

    `runs`: this project can also run what it exports. `missing()` names what export lacks here, or None.
    """

    summary: str
    runs: bool
    partitioners: Callable[[str, str], list[Any]]
    missing: Callable[[], str | None] = lambda: None


def _webgpu(method: str, qlinear: str) -> list[Any]:
    from backend.partitioner import WebGPUPartitioner

    return [WebGPUPartitioner()]


def _xnnpack(method: str, qlinear: str) -> list[Any]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
        XnnpackDynamicallyQuantizedPartitioner,
        XnnpackPartitioner,
    )

    # Dynamically quantized linears first, with their activation's quantization; the rest in full precision.
    dynamic = qlinear in MODES and MODES[qlinear].dynamic
    return [*([XnnpackDynamicallyQuantizedPartitioner()] if dynamic else []), XnnpackPartitioner()]


def _vulkan(method: str, qlinear: str) -> list[Any]:
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    from backend.partitioner import tag_states

    class Partitioner(VulkanPartitioner):
        def partition(self, exported_program: Any) -> Any:
            """The wheel gives a state to one of several delegates that use it, which no program can hold."""
            result = super().partition(exported_program)
            program = result.tagged_exported_program
            signature = program.graph_signature
            mutated = set(signature.buffers_to_mutate.values())
            for node in program.graph.nodes:
                if node.op == "placeholder" and signature.inputs_to_buffers.get(node.name) in mutated:
                    node.meta.pop("delegation_tag", None)
            tag_states(program)
            return result

    return [Partitioner()]


def _cuda(method: str, qlinear: str) -> list[Any]:
    from executorch.backends.cuda.cuda_backend import CudaBackend
    from executorch.backends.cuda.cuda_partitioner import CudaPartitioner

    return [CudaPartitioner([CudaBackend.generate_method_name_compile_spec(method)])]


def _mlx(method: str, qlinear: str) -> list[Any]:
    from executorch.backends.mlx import MLXPartitioner

    return [MLXPartitioner()]


def _cuda_missing() -> str | None:
    import torch

    if not torch.backends.cuda.is_built():
        return "a CUDA build of PyTorch (this one is CPU only) and the CUDA toolkit (nvcc)"
    if shutil.which("nvcc") is None:
        return "the CUDA toolkit (nvcc is not on the PATH)"
    return None


def _mlx_missing() -> str | None:
    if sys.platform != "darwin":
        return "macOS on Apple silicon with Xcode's Metal toolchain"
    if shutil.which("xcrun") is None:
        return "Xcode's Metal toolchain (xcode-select --install)"
    return None


TARGETS: Mapping[str, Target] = {
    "webgpu": Target("any GPU through WebGPU; this project's backend", True, _webgpu),
    "xnnpack": Target("CPU, XNNPACK from the ExecuTorch wheel", True, _xnnpack),
    "portable": Target("CPU, ExecuTorch's portable kernels", True, lambda method, qlinear: []),
    "vulkan": Target("export only: the ExecuTorch wheel has no Vulkan runtime", False, _vulkan),
    "cuda": Target("export only, needs the CUDA toolchain", False, _cuda, _cuda_missing),
    "mlx": Target("export only, needs the Metal toolchain", False, _mlx, _mlx_missing),
}
assert tuple(TARGETS) == BACKENDS


def check_target(backend: str, *, to_run: bool = False) -> Target:
    """The target called `backend`. Raises `UserError` for an unknown one, or one that cannot run (`to_run`)."""
    if backend not in TARGETS:
        raise UserError(f"unknown backend {backend!r}: choose one of {', '.join(TARGETS)}")
    target = TARGETS[backend]
    if to_run and not target.runs:
        runnable = ", ".join(name for name, other in TARGETS.items() if other.runs)
        raise UserError(f"backend {backend!r} is for export only here: to run, choose one of {runnable}")
    return target
