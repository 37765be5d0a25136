"""The partitioner: takes a node exactly when the declaration of its operator does.

The whole program is converted to the neutral graph and fused by the same passes that preprocess will run; each
resulting node is judged on its own specs. A node of the program is delegated when the graph node that it became part of
is accepted. Refusals keep their reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir.backend.canonical_partitioners.pattern_op_partitioner import (
    generate_partitions_from_list_of_nodes,
)
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx.passes.operator_support import OperatorSupportBase

from backend import passes
from backend.convert import convert, dtype_name, is_shape_node, normalize, op_name, to_dim
from backend.graph import BACKEND_ID, Call, TensorSpec
from backend.ops import registry
from backend.preprocess import LOWEST_SIZES, ZooWebGPU  # noqa: F401 - ExecuTorch finds the backend among BackendDetails' subclasses


@dataclass(frozen=True)
class Refusal:
    """`count` nodes of an operator were left outside the delegate, all for one reason."""

    op: str
    reason: str
    count: int


def judge(program: ExportedProgram) -> dict[str, tuple[str, str]]:
    """Refused nodes of a program: fx name -> (operator, reason)."""
    converted = convert(program)
    names = {node.name: op_name(node.target) for node in program.graph.nodes if node.op == "call_function"}
    refused = {name: (names.get(name, "output"), reason) for name, reason in converted.refused.items()}
    graph = passes.run(converted.graph)
    for node in graph.nodes:
        reason = registry.refusal(graph.call(node))
        if reason is not None:
            for name in node.origin:
                refused[name] = (node.op, node.note or reason)
    return refused


class _Support(OperatorSupportBase):
    def __init__(self, refused: dict[str, tuple[str, str]]):
        self.refused = refused

    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        if node.op != "call_function" or node.name in self.refused:
            return False
        return not is_shape_node(node) or all(_is_inside(user, self.refused) for user in node.users)


def _is_inside(node: torch.fx.Node, refused: dict[str, tuple[str, str]]) -> bool:
    """Sizes are computed where they are used: outside as soon as anybody outside needs them."""
    if node.op != "call_function" or node.name in refused:
        return False
    return not is_shape_node(node) or all(_is_inside(user, refused) for user in node.users)


class WebGPUPartitioner(Partitioner):
    """Tags what the WebGPU backend runs. `refusals` lists, after partitioning, what it left and why."""

    def __init__(self) -> None:
        super().__init__()
        self.delegation_spec = DelegationSpec(BACKEND_ID, [])
        self.refusals: list[Refusal] = []

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload], Callable[[torch.fx.Node], bool] | None]:
        """Operators with kernels of their own, kept whole where their declaration accepts the node."""
        return [_overload(name) for name in registry.preserved()], accepts_node

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Fixes the layout of what attention returns.

        Eager CPU attention answers in the layout of its query, so a reshape that follows is traced as a view of it; the
        operator kept whole answers row-major, and that view would be refused when the program is traced again. The
        clone costs nothing here.
        """
        for node in list(exported_program.graph.nodes):
            if node.target is torch.ops.aten.scaled_dot_product_attention.default:
                with exported_program.graph.inserting_after(node):
                    clone = exported_program.graph.call_function(
                        torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                    )
                node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)
                clone.meta = {key: value for key, value in node.meta.items() if key != "val"}
                clone.meta["val"] = node.meta["val"].contiguous()
        _clone_results(exported_program)
        bounds = {str(symbol): span.lower for symbol, span in exported_program.range_constraints.items()}
        lowest = {name: int(lower) for name, lower in bounds.items() if lower.is_Integer}
        specs = [CompileSpec(LOWEST_SIZES, json.dumps(lowest).encode())] if lowest else []
        self.delegation_spec = DelegationSpec(BACKEND_ID, specs)
        exported_program.graph_module.recompile()
        return exported_program

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        refused = judge(exported_program)
        counts = Counter(refused.values())
        self.refusals = [Refusal(op, reason, count) for (op, reason), count in sorted(counts.items())]
        tags = {}
        for index, nodes in enumerate(_parts(exported_program, _Support(refused))):
            if all(is_shape_node(node) for node in nodes):
                continue
            tag = f"webgpu_{index}"
            tags[tag] = self.delegation_spec
            for node in nodes:
                node.meta["delegation_tag"] = tag
        if tags:
            tag_constant_data(exported_program)
            tag_states(exported_program)
        return PartitionResult(exported_program, tags)


def _clone_results(program: ExportedProgram) -> None:
    """Keeps results apart from the new contents of states: a delegate cannot hand out one value as both."""
    if not program.graph_signature.buffers:
        return
    output = program.graph.output_node()
    results = {spec.arg.name for spec in program.graph_signature.output_specs if spec.kind == OutputKind.USER_OUTPUT}

    def cloned(node: Any) -> Any:
        if not isinstance(node, torch.fx.Node) or node.name not in results:
            return node
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return node
        with program.graph.inserting_before(output):
            clone = program.graph.call_function(torch.ops.aten.clone.default, (node,))
        clone.meta = dict(node.meta)
        return clone

    specs = program.graph_signature.output_specs
    args = list(output.args[0])
    for position, spec in enumerate(specs):
        if spec.kind == OutputKind.USER_OUTPUT:
            args[position] = cloned(args[position])
            if isinstance(args[position], torch.fx.Node) and args[position].name != getattr(spec.arg, "name", None):
                spec.arg = TensorArgument(name=args[position].name)
    output.args = (tuple(args),)


def _parts(program: ExportedProgram, support: _Support) -> list[list[torch.fx.Node]]:
    """The nodes of each delegate: one when all are supported, even where nothing connects them."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    if all(support.is_node_supported({}, node) for node in calls):
        return [calls] if calls else []
    found = generate_partitions_from_list_of_nodes(program.graph_module, op_support=support)
    return [list(partition.nodes) for partition in found]


def tag_states(program: ExportedProgram) -> None:
    """Gives a mutated buffer to the delegate that alone reads it and alone makes and reads its new contents.

    Any other mutated buffer stays with ExecuTorch, which passes it in and copies the new contents back.
    """
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    writers = {target: nodes[name] for name, target in signature.buffers_to_mutate.items()}
    written = [spec.arg.name for spec in signature.output_specs if hasattr(spec.arg, "name")]
    for name, target in signature.inputs_to_buffers.items():
        writer = writers.get(target)
        if writer is None or written.count(writer.name) > 1:
            continue
        readers = [*nodes[name].users, *(user for user in writer.users if user.op != "output"), writer]
        tags = {reader.meta.get("delegation_tag") for reader in readers}
        if len(tags) == 1 and None not in tags:
            nodes[name].meta["delegation_tag"] = tags.pop()


def _overload(name: str) -> torch._ops.OpOverload:
    namespace, op, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), kind)


def accepts_node(node: torch.fx.Node) -> bool:
    """Whether the declaration of this single node's operator accepts it, outside of any pattern."""
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return True

    def spec(item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            item = item.meta.get("val")
        if isinstance(item, torch.Tensor):
            return TensorSpec(dtype_name(item.dtype), tuple(to_dim(size) for size in item.shape))
        if isinstance(item, torch.SymInt):
            return to_dim(item)
        return [spec(part) for part in item] if isinstance(item, (list, tuple)) else item

    try:
        args = {key: spec(value) for key, value in normalize(node.target, node.args, node.kwargs).items()}
        value = node.meta.get("val")
        outputs = tuple(spec(part) for part in (value if isinstance(value, (list, tuple)) else (value,)))
    except ValueError:
        return False
    return registry.refusal(Call(op_name(node.target), args, outputs)) is None
