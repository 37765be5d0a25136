"""What a peer opens: a method at fixed shapes, as a module and, made at its first use, as an ONNX file."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.recipe import UserError
from zoo.console import quiet_libraries
from zoo.peers.table import one_line


class Session:
    """A graph made ready by a peer. `note`: what a reader of its times must know."""

    note = ""

    def prepare(self, arrays: Sequence[np.ndarray]) -> Callable[[], Any]:
        """One call on these inputs, done when it returns: what is timed in models."""
        raise NotImplementedError

    def fetch(self, result: Any) -> list[np.ndarray]:
        """What a call gave, as arrays on the host."""
        return [np.asarray(array) for array in result]

    def repeated(self, arrays: Sequence[np.ndarray]) -> Callable[[int], float]:
        """Seconds for a number of calls, operands on the device where the peer can keep them there."""
        call = self.prepare(arrays)

        def run(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                call()
            return time.perf_counter() - start

        return run

    def close(self) -> None:
        """Frees what the session holds on its device."""


class Graphs:
    """The methods of a bundle, in the precision of their modules, at whatever shapes they are called with."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self.modules = {name: module.eval() for name, module in modules.items()}
        self._found: dict[tuple[Any, ...], Graph] = {}
        self._copies: dict[tuple[str, str], Mapping[str, torch.nn.Module]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def at(self, method: str, arrays: Sequence[np.ndarray]) -> Graph:
        key = (method, *((array.shape, array.dtype.str) for array in arrays))
        if key not in self._found:
            self._found[key] = Graph(self, method, [np.ascontiguousarray(array) for array in arrays])
        return self._found[key]

    def copied(self, holder: str, device: str) -> Mapping[str, torch.nn.Module]:
        """The modules as `holder` alone runs them, on a torch device; methods share what they share here."""
        if (holder, device) in self._copies:
            return self._copies[holder, device]
        # Copied together, which keeps what methods share; `Module.to` would give each method its own copy of a buffer.
        copies = copy.deepcopy(self.modules)
        moved: dict[int, torch.Tensor] = {}
        for module in copies.values():
            for part in module.modules():
                for tensors in (part._parameters, part._buffers):
                    for name, tensor in tensors.items():
                        if tensor is None:
                            continue
                        if id(tensor) not in moved:
                            there = tensor.detach().to(device)
                            is_parameter = isinstance(tensor, torch.nn.Parameter)
                            moved[id(tensor)] = torch.nn.Parameter(there, False) if is_parameter else there
                        tensors[name] = moved[id(tensor)]  # type: ignore[assignment]
        self._copies[holder, device] = copies
        return copies

    def file(self) -> Path:
        """A new file beside those of the other graphs."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="zoo-onnx-")
        folder = Path(self._folder.name) / str(len(list(Path(self._folder.name).iterdir())))
        folder.mkdir()
        return folder / "graph.onnx"

    def close(self) -> None:
        self._copies.clear()
        self._found.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class Graph:
    """One method at fixed shapes. `inputs`: the arrays that it was first called with."""

    def __init__(self, owner: Graphs, method: str, inputs: list[np.ndarray]) -> None:
        self.owner, self.method, self.inputs = owner, method, inputs
        self._onnx: Path | UserError | None = None

    def module(self, holder: str, device: str = "cpu") -> torch.nn.Module:
        """The method for one peer: its state moves with that peer's calls alone."""
        return self.owner.copied(holder, device)[self.method]

    def onnx(self) -> Path:
        """Its ONNX file, of torch's own exporter. Raises `UserError` where the method keeps state, which an ONNX graph
        cannot, and where the exporter refuses it."""
        if self._onnx is None:
            try:
                self._onnx = self._export()
            except UserError as error:
                self._onnx = error
            except Exception as error:
                self._onnx = UserError(f"the ONNX exporter refuses {self.method}: {one_line(error)}")
        if isinstance(self._onnx, UserError):
            raise self._onnx
        return self._onnx

    def _export(self) -> Path:
        tensors = tuple(torch.from_numpy(array) for array in self.inputs)
        with quiet_libraries(), torch.no_grad():
            program = torch.export.export(self.owner.modules[self.method], tensors)
            # Only a program without in-place operators says which buffers it changes; the exporter would drop that.
            signature = program.run_decompositions({}).graph_signature
            if state := sorted(set(signature.buffers_to_mutate.values())):
                raise UserError(f"{self.method} keeps state between calls ({state[0]}), an ONNX graph cannot")
            made = torch.onnx.export(program, dynamo=True, verbose=False)
            assert made is not None
            path = self.owner.file()
            made.save(path, external_data=True)
        return path
