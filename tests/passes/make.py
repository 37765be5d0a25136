"""Writes neutral graphs for tests; shapes and dtypes come from torch's own operators."""

from __future__ import annotations

import torch

from backend.graph import Graph, Node, Ref, TensorSpec
from zoo.eager import DTYPES


class Maker:
    """Builds a graph by naming operators; the specs of results come from torch on the meta device."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.tensors: dict[int, torch.Tensor] = {}

    def input(self, *shape: int, dtype: str = "float32") -> Ref:
        ref = self._value(torch.empty(shape, dtype=DTYPES[dtype], device="meta"))
        self.graph.inputs.append(ref.value)
        return ref

    def _value(self, tensor: torch.Tensor) -> Ref:
        index = self.graph.add_value(TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        self.tensors[index] = tensor
        return Ref(index)

    def __call__(self, op: str, /, **args: object) -> Ref:
        name, kind = op.split(".")
        overload = getattr(getattr(torch.ops.aten, name), kind)

        def live(item: object) -> object:
            if isinstance(item, Ref):
                return self.tensors[item.value]
            return [live(part) for part in item] if isinstance(item, list) else item

        given_args = {key: DTYPES[str(value)] if key == "dtype" else live(value) for key, value in args.items()}
        ref = self._value(overload(**given_args))
        self.graph.nodes.append(Node(f"aten.{op}", args, (ref.value,)))
        return ref

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return tuple(self.tensors[ref.value].shape)
