"""PyTorch itself as a peer: eager and compiled on the CPU, eager on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from zoo.peers.graph import Graph
from zoo.peers.session import Session


class Torch(Session):
    """A module on a device; its inputs and outputs stay there."""

    def __init__(self, module: torch.nn.Module, device: str = "cpu", note: str = "") -> None:
        self._module, self._device, self.note = module, device, note

    def prepare(self, arrays: Sequence[np.ndarray]) -> Callable[[], Any]:
        tensors = self._tensors(arrays)

        def call() -> Any:
            with torch.no_grad(), _full_precision():
                outputs = self._module(*tensors)
            if self._device == "cuda":
                torch.cuda.synchronize()
            return outputs

        return call

    def fetch(self, result: Any) -> list[np.ndarray]:
        leaves = torch.utils._pytree.tree_leaves(result)
        return [leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf) for leaf in leaves]

    def repeated(self, arrays: Sequence[np.ndarray]) -> Callable[[int], float]:
        tensors = self._tensors(arrays)

        def run(count: int) -> float:
            with torch.no_grad(), _full_precision():
                if self._device == "cuda":
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for _ in range(count):
                        self._module(*tensors)
                    end.record()
                    end.synchronize()
                    return float(begin.elapsed_time(end)) / 1e3
                start = time.perf_counter()
                for _ in range(count):
                    self._module(*tensors)
                return time.perf_counter() - start

        return run

    def _tensors(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)).to(self._device) for array in arrays]


@contextmanager
def _full_precision() -> Iterator[None]:
    """Without TF32, which other sides in the process may have on."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def eager(graph: Graph) -> Torch:
    return Torch(graph.module("eager"))


def compiled(graph: Graph) -> Torch:
    module: Any = torch.compile(graph.module("compile"), dynamic=False)
    return Torch(module)


def on_cuda(graph: Graph) -> Torch:
    return Torch(
        graph.module("cuda", "cuda"), "cuda", note="inputs and outputs stay on the GPU: no copy is in the time"
    )
