"""Ahead of time: one delegated part of a program becomes a blob (graph) and named data (weights).

1. convert the part to the neutral graph, constants keyed by the hash of their content
2. run the passes
3. check that every node is accepted: what the partitioner took, the runtime can run
4. store the constants that are still read (quantized codes packed), write the blob
"""

from __future__ import annotations

import hashlib
import json
from typing import final

import torch
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from backend import passes
from backend.blob import to_blob
from backend.convert import Converted, convert
from backend.ops import registry
from backend.quantization import joined_sources, pack, packed_source

ALIGNMENT = 16
# ExecuTorch tells programs apart by their named data; a program with state needs some, so that its methods share it.
LOWEST_SIZES = "lowest_sizes"
PRESENCE_KEY = "zoo.webgpu"


def content_key(name: str, tensor: torch.Tensor, is_state: bool) -> str | None:
    """dtype, shape and SHA-256 of the bytes: equal tensors are stored once, whatever they are called.

    A state that starts as zeros has no bytes: GPU buffers are made zero.
    """
    if is_state and not bool(tensor.any()):
        return None
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')}-{shape}-{hashlib.sha256(tensor_bytes(tensor)).hexdigest()[:32]}"


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().cpu().contiguous()
    return data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""


def lowest_sizes(specs: list[CompileSpec]) -> dict[str, int]:
    """Lower bounds of the symbols as the user declared them: the edge program has 2 where 0 or 1 was said."""
    return next((json.loads(spec.value) for spec in specs if spec.key == LOWEST_SIZES), {})


def constant_bytes(converted: Converted, key: str) -> bytes:
    """Bytes of a constant of the program, or of the packed form of quantized codes."""
    packed = packed_source(key)
    if packed is None:
        return tensor_bytes(converted.data[key]())
    source, bits = packed
    return pack(converted.data[source]().detach().cpu().numpy(), bits).tobytes()


@final
class ZooWebGPU(BackendDetails):
    """The class name is the backend's id in the program."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        converted = convert(edge_program, content_key, lowest_sizes(compile_specs))
        if converted.refused:
            raise RuntimeError(f"cannot serialise: {converted.refused}")
        graph = passes.run(converted.graph).compacted()
        for node in graph.nodes:
            reason = registry.refusal(graph.call(node))
            if reason is not None:
                raise RuntimeError(f"{node.op} was taken by the partitioner, but is refused: {reason}")
        store = NamedDataStore()
        store.add_named_data(PRESENCE_KEY, b"\0", alignment=ALIGNMENT)
        stored = {spec.constant for spec in graph.values if spec.constant is not None}
        for key in sorted({source for whole in stored for source in joined_sources(whole)}):
            store.add_named_data(key, constant_bytes(converted, key) or b"\0", alignment=ALIGNMENT)
        return PreprocessResult(processed_bytes=to_blob(graph), data_store_output=store.get_named_data_store_output())
