"""What a peer opens: a method at fixed shapes, as a module and, made at its first use, as an ONNX file."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from recipes.recipe import UserError
from zoo.console import quiet_libraries
from zoo.peers.apart import Workers
from zoo.peers.session import OnnxGraph, State
from zoo.peers.table import one_line


class Graphs:
    """The methods of a bundle, in the precision of their modules, at whatever shapes they are called with."""

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        examples: Mapping[str, Sequence[torch.Tensor]] | None = None,
        workers: Workers | None = None,
    ) -> None:
        """examples: inputs of each method that may keep state between calls."""
        self.modules = {name: module.eval() for name, module in modules.items()}
        self.workers = workers or Workers()
        self._owns_workers = workers is None
        self._examples = examples or {}
        self._states: dict[str, State] | None = None
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
        # As one, so that what methods share comes once: what has moved already must not be looked up again, for its id
        # may be one that another tensor had.
        for part in torch.nn.ModuleList(copies.values()).modules():
            held: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for tensors in held:
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in moved:
                        there = tensor.detach().to(device)
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        moved[id(tensor)] = torch.nn.Parameter(there, False) if is_parameter else there
                    tensors[name] = moved[id(tensor)]
        self._copies[holder, device] = copies
        return copies

    def states(self, method: str) -> list[State]:
        """The buffers of a method that outlive a call: those that it or another method changes."""
        if self._states is None:
            changed: dict[str, torch.Tensor] = {}
            for name, inputs in self._examples.items():
                changed |= _changed(self.modules[name], inputs)
            self._states = {name: self._state(name, tensor) for name, tensor in changed.items()}
        own = dict(self.modules[method].named_buffers())
        return [state for name, state in self._states.items() if name in own]

    def _state(self, name: str, tensor: torch.Tensor) -> State:
        array = tensor.detach().numpy()
        path = None
        if array.any():
            path = self.file().with_name("state.npy")
            np.save(path, array)
        return State(name, array.shape, array.dtype.str, path)

    def file(self) -> Path:
        """A new file beside those of the other graphs."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="zoo-onnx-")
        folder = Path(self._folder.name) / str(len(list(Path(self._folder.name).iterdir())))
        folder.mkdir()
        return folder / "graph.onnx"

    def close(self) -> None:
        if self._owns_workers:
            self.workers.close()
        self._copies.clear()
        self._found.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class Graph:
    """One method at fixed shapes. `inputs`: the arrays that it was first called with."""

    def __init__(self, owner: Graphs, method: str, inputs: list[np.ndarray]) -> None:
        self.owner, self.method, self.inputs = owner, method, inputs
        self._onnx: OnnxGraph | UserError | None = None

    def module(self, holder: str, device: str = "cpu") -> torch.nn.Module:
        """The method for one peer: its state moves with that peer's calls alone."""
        return self.owner.copied(holder, device)[self.method]

    def onnx(self) -> OnnxGraph:
        """Its ONNX file, of torch's own exporter. Raises `UserError` where the exporter refuses the method."""
        if self._onnx is None:
            try:
                self._onnx = self._export()
            except Exception as error:
                self._onnx = UserError(f"the ONNX exporter refuses {self.method}: {one_line(error)}")
        if isinstance(self._onnx, UserError):
            raise self._onnx
        return self._onnx

    def _export(self) -> OnnxGraph:
        module = self.owner.modules[self.method]
        states = self.owner.states(self.method)
        inputs = tuple(torch.from_numpy(array) for array in self.inputs)
        given = (*inputs, *(torch.from_numpy(state.initial()) for state in states))
        written = tuple(state.name for state in states)
        with quiet_libraries(), torch.no_grad():
            stateless = _Stateless(module, [state.name for state in states], written)
            program = torch.export.export(stateless, given)
            if unchanged := _unchanged(program, len(written)):
                # Passed through only, so that the backend knows it for a state: to a peer it would be a copy.
                written = tuple(name for index, name in enumerate(written) if index not in unchanged)
                stateless.written = written
                program = torch.export.export(stateless, given)
            made = torch.onnx.export(program, dynamo=True, verbose=False)
            assert made is not None
            path = self.owner.file()
            made.save(path, external_data=True)
        return OnnxGraph(path, tuple(states), written)


class _Stateless(torch.nn.Module):
    """A method with its states as further inputs, and what it makes of those in `written` as further outputs."""

    def __init__(self, module: torch.nn.Module, states: Sequence[str], written: Sequence[str]) -> None:
        super().__init__()
        self.module, self.states, self.written = module, list(states), tuple(written)

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(given) - len(self.states)
        kept = {name: state.clone() for name, state in zip(self.states, given[count:], strict=True)}
        outputs = torch.func.functional_call(self.module, kept, given[:count])
        return (*torch.utils._pytree.tree_leaves(outputs), *(kept[name] for name in self.written))


def _unchanged(program: torch.export.ExportedProgram, written: int) -> set[int]:
    """Which of the last `written` outputs are the states that came in, copied at most."""
    if not written:
        return set()
    graph = program.run_decompositions({}).graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    outputs = graph.output_node().args[0]
    states = placeholders[len(placeholders) - written :]
    copies = (torch.ops.aten.clone.default, torch.ops.aten.copy.default, torch.ops.aten.alias.default)
    found = set()
    for index, node in enumerate(outputs[len(outputs) - written :]):
        while node.op == "call_function" and node.target in copies:
            node = node.args[1] if node.target is torch.ops.aten.copy.default else node.args[0]
        if node is states[index]:
            found.add(index)
    return found


def _changed(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The buffers that a call changes, by their qualified names; found without doing the work."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        fakes: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor.detach()) for name, tensor in named.items()}
        before = {name: fake._version for name, fake in fakes.items()}
        torch.func.functional_call(module, fakes, tuple(mode.from_tensor(tensor) for tensor in inputs))
    return {name: tensor for name, tensor in module.named_buffers() if fakes[name]._version != before[name]}
