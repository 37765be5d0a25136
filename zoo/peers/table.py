"""The generic peers by name: what each needs, how to get it, and whether it takes part without being asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipes.recipe import UserError, deferred

if TYPE_CHECKING:
    from zoo.peers.graph import Graph
    from zoo.peers.session import Session

_EXTRA = "pip install 'webgpu-zoo[bench]'"
_ONNX = ("onnx", "onnxscript")
PATIENCE = 600.0  # seconds that a peer with a process of its own may take in all to get ready
_LONGEST = 240  # characters of a reason: its begin and its end, where it is longer


@dataclass(frozen=True)
class Peer:
    """Another engine. `opener(graph)` makes a session; `by_default`: it takes part wherever it can run."""

    name: str
    summary: str
    modules: tuple[str, ...]  # that must be importable
    opener: Callable[[Graph], Session]
    by_default: bool = True
    needs: Callable[[], str | None] = lambda: None  # a reason why it cannot run here though its modules are there

    def missing(self) -> str | None:
        """Why it cannot run here and how to change that, in one line; None where it can."""
        absent = [module for module in self.modules if importlib.util.find_spec(module) is None]
        if absent:
            return f"{self.name} is not installed (no module {', '.join(absent)}): {_EXTRA}"
        return self.needs()

    def open(self, graph: Graph) -> Session:
        """Makes `graph` ready to run. Raises `UserError` with the reason, in one line, where the peer refuses it."""
        try:
            return self.opener(graph)
        except UserError:
            raise
        except Exception as error:  # whatever another engine raises is its reason
            raise UserError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """What another engine said, short enough for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shorten(f"{type(error).__name__}: {lines[0] if lines else 'no message'}")


def shorten(said: str) -> str:
    return said if len(said) <= _LONGEST else f"{said[: _LONGEST // 2]} … {said[-_LONGEST // 2 :]}"


def _apart(place: str) -> Callable[[Graph], Session]:
    """The opener of a peer that runs ONNX files, in a process of its own."""
    return lambda graph: graph.owner.workers.open(graph, place)


def _no_cuda() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "PyTorch sees no CUDA device"


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "onnxruntime-webgpu",
            "ONNX Runtime's WebGPU provider, host arrays in and out",
            ("onnxruntime", *_ONNX),
            _apart("zoo.peers.onnx_runtime:on_webgpu"),
        ),
        Peer(
            "tinygrad",
            "tinygrad's WEBGPU device, its ONNX frontend under TinyJit, host arrays in and out",
            ("tinygrad", "pydawn", *_ONNX),
            _apart("zoo.peers.tiny_grad:TinyGrad"),
        ),
        Peer(
            "cuda",
            "PyTorch eager on an NVIDIA GPU, TF32 off; inputs and outputs stay there, so no copy is in its time",
            ("torch",),
            deferred("zoo.peers.pytorch:on_cuda"),
            needs=_no_cuda,
        ),
        # Those below run on the CPU, and torch.compile builds C++ for minutes: for who asks.
        Peer(
            "onnxruntime-cpu",
            "ONNX Runtime's CPU provider",
            ("onnxruntime", *_ONNX),
            _apart("zoo.peers.onnx_runtime:on_cpu"),
            by_default=False,
        ),
        Peer("compile", "torch.compile on the CPU", ("torch",), deferred("zoo.peers.pytorch:compiled"), False),
    )
}


def choose(wanted: Sequence[str] | None) -> list[Peer]:
    """The peers named in `wanted`, in the table's order; those that can run here and need no asking for None.

    Names that are not in the table are left to the caller. Raises `UserError` for one that cannot run here.
    """
    if wanted is None:
        return [peer for peer in PEERS.values() if peer.by_default and peer.missing() is None]
    chosen = [peer for peer in PEERS.values() if peer.name in wanted]
    for peer in chosen:
        if reason := peer.missing():
            raise UserError(reason)
    return chosen
