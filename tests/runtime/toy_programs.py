"""Programs for the tests of the native shim and the `.pte` reader, delegated by a toy of a few lines.

`python tests/runtime/toy_programs.py FOLDER` writes them. It runs in a process of its own: ExecuTorch finds a backend
by its class name, and in the process of the tests our real one has that name. A toy blob is the name of an operation;
the tests say in numpy what it does.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

DTYPES = ("float32", "float16", "int64", "int32", "uint8", "bool")


@functools.cache
def _build(base: Path) -> Path:
    folder = base / "toy_programs"
    folder.mkdir()
    subprocess.run([sys.executable, __file__, str(folder)], check=True, capture_output=True, timeout=300)
    return folder


def build(factory: Any) -> Path:
    """The folder of the programs, written once a session; `factory` is pytest's `tmp_path_factory`."""
    return _build(factory.getbasetemp())


class Toy:
    """A delegate in numpy. `states` is a dict; `alive` counts the delegates that are not closed."""

    alive = 0

    def __init__(self, blob: Any, get_data: Any, states: dict[str, np.ndarray]) -> None:
        self.operation, count = bytes(blob).decode().split(":")
        self.graph = SimpleNamespace(inputs=[None] * int(count))
        self.states = states
        self.get_data = get_data
        Toy.alive += 1

    def execute(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        if self.operation == "add":
            return [inputs[0] + inputs[1]]
        if self.operation == "flip":
            return [np.flip(array, 0) for array in inputs]
        if self.operation == "write":
            self.states["kept"] = np.array(inputs[0])
            return [np.array(inputs[0])]
        if self.operation == "read":
            return [inputs[0] + self.states.get("kept", np.float32(-1))]
        if self.operation == "bias":
            return [inputs[0] + np.frombuffer(self.get_data("bias"), np.float32)]
        if self.operation == "flatten":
            return [inputs[0].reshape(-1)]
        raise AssertionError(self.operation)

    def close(self) -> None:
        Toy.alive -= 1


def _write(folder: Path) -> None:
    import torch
    from executorch.exir import to_edge_transform_and_lower
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
    from executorch.exir.backend.utils import tag_constant_data

    class ZooWebGPU(BackendDetails):
        @staticmethod
        def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
            specs = {spec.key: spec.value for spec in compile_specs}
            store = NamedDataStore()
            store.add_named_data("seen", b"the same in both methods")
            for name in edge_program.graph_signature.inputs_to_buffers.values():
                store.add_named_data(name, edge_program.state_dict[name].numpy().tobytes())
            count = len(edge_program.graph_signature.user_inputs)
            data = store.get_named_data_store_output() if specs["named"] == b"yes" else None
            blob = specs["operation"] + b":" + str(count).encode()
            return PreprocessResult(processed_bytes=blob, data_store_output=data)

    class All(Partitioner):
        def __init__(self, operation: str, only: str = "", named: bool = True) -> None:
            self.only = only
            specs = [CompileSpec("operation", operation.encode()), CompileSpec("named", b"yes" if named else b"no")]
            self.delegation = DelegationSpec("ZooWebGPU", specs)

        def partition(self, exported_program: Any) -> PartitionResult:
            for node in exported_program.graph.nodes:
                if node.op == "call_function" and self.only in str(node.target):
                    node.meta["delegation_tag"] = "toy"
            tag_constant_data(exported_program)
            return PartitionResult(exported_program, {"toy": self.delegation})

    class Call(torch.nn.Module):
        def __init__(self, function: Any, bias: torch.Tensor | None = None) -> None:
            super().__init__()
            self.function = function
            if bias is not None:
                self.register_buffer("bias", bias)

        def forward(self, *inputs: torch.Tensor) -> Any:
            return self.function(*inputs, *self.buffers())

    def save(name: str, methods: dict[str, tuple[Any, tuple[torch.Tensor, ...], Any, Any]]) -> None:
        exported, partitioners = {}, {}
        for method, (function, inputs, dynamic, partitioner) in methods.items():
            module = function if isinstance(function, torch.nn.Module) else Call(function)
            exported[method] = torch.export.export(module, inputs, dynamic_shapes=dynamic)
            partitioners[method] = [partitioner] if partitioner is not None else []
        program = to_edge_transform_and_lower(exported, partitioner=partitioners).to_executorch()
        (folder / f"{name}.pte").write_bytes(program.buffer)

    rows = torch.export.Dim("rows", max=64)
    pair = (torch.ones(7, 3), torch.ones(7, 3))
    dynamic = (({0: rows}, {0: rows}),)
    one = (torch.ones(4),)

    def many() -> tuple[torch.Tensor, ...]:
        return tuple((torch.arange(5) % 2 + 1).to(getattr(torch, name)) for name in DTYPES)

    save("add", {"forward": (torch.add, pair, dynamic, All("add"))})
    save("dtypes", {"forward": (lambda *xs: tuple(torch.flip(x, [0]) for x in xs), many(), None, All("flip"))})
    state = {name: (lambda x: x + 1, one, None, All(name)) for name in ("write", "read")}
    save("state", state)
    save("unnamed", {name: (lambda x: x + 1, one, None, All(name, named=False)) for name in ("write", "read")})
    biased = Call(lambda x, bias: x + bias, torch.arange(3.0))
    save("bias", {"forward": (biased, (torch.ones(2, 3),), None, All("bias"))})
    save("portable", {"forward": (lambda x: x * 2, one, None, None)})
    save("mixed", {"forward": (lambda x, y: (x + y) * 2, pair, dynamic, All("add", "aten.add"))})
    save("plain", {"forward": (Call(lambda x, bias: (x, bias), torch.arange(3.0)), (torch.ones(2, 2),), None, None)})
    flat = lambda x: (x * 1).reshape(x.shape[0] * 3)  # noqa: E731
    save("symint", {"forward": (flat, pair[:1], (({0: rows},),), All("flatten", "view"))})


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
