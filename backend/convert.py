"""From torch's exported program to the neutral graph: names, specs and arguments, nothing about kernels.

The partitioner converts the whole program to judge it, preprocess converts each delegated part with the same code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch._export.utils import (
    get_buffer,
    get_lifted_tensor_constant,
    get_param,
    is_buffer,
    is_lifted_tensor_constant,
    is_param,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from backend.expr import Dim, Expr
from backend.graph import Graph, Node, Ref, TensorSpec

# Arguments that say where or how a tensor is laid out: meaningless to the backend, whose tensors are its own.
_IGNORED_ARGS = ("layout", "device", "pin_memory", "memory_format", "non_blocking", "dim_order")
# Checks that export left behind.
ASSERT_OPS = (
    "aten._assert_scalar.default",
    "aten._assert_async.msg",
    "aten._assert_tensor_metadata.default",
    "aten.sym_constrain_range.default",
    "aten.sym_constrain_range_for_size.default",
)
_NARY = {sympy.Add: "+", sympy.Mul: "*"}
_BY_NAME = {
    "FloorDiv": "//",
    "CleanDiv": "//",
    "Mod": "%",
    "PythonMod": "%",
    "Max": "max",
    "Min": "min",
}


class ConvertError(ValueError):
    """A part of the program that the graph format cannot express; the message is the refusal's reason."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def op_name(target: Any) -> str:
    """`aten.add.Tensor` for edge and plain overloads; the function's name for Python operators on sizes."""
    if hasattr(target, "_schema"):
        name = target._schema.name.replace("::", ".")
        return f"{name}.{target._schema.overload_name or 'default'}"
    return getattr(target, "__name__", str(target))


def normalize(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the schema's names, defaults filled in; layout arguments dropped, dtypes as names."""
    named: dict[str, Any] = {}
    positional = list(args)
    for argument in target._schema.arguments:
        if positional and not argument.kwarg_only:
            value = positional.pop(0)
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            value = argument.default_value if argument.has_default_value() else None
        if argument.name in _IGNORED_ARGS:
            continue
        named[argument.name] = dtype_name(value) if isinstance(value, torch.dtype) else value
    return named


def to_dim(size: int | torch.SymInt) -> Dim:
    """Raises `ConvertError` for a size known only from data."""
    if isinstance(size, int):
        return size
    return from_sympy(size.node.expr)


def from_sympy(expr: Any) -> Dim:
    if isinstance(expr, (int, sympy.Integer)):
        return int(expr)
    if isinstance(expr, sympy.Symbol):
        if expr.name.startswith("u") and not expr.name.startswith("us"):
            raise ConvertError(f"size {expr.name} depends on data")
        return Expr(expr.name)
    kind = type(expr)
    op = _NARY.get(kind) or _BY_NAME.get(kind.__name__)
    if op and len(expr.args) >= 2:
        return Expr(op, tuple(from_sympy(arg) for arg in expr.args))
    if isinstance(expr, sympy.Pow) and isinstance(expr.exp, sympy.Integer) and 1 <= int(expr.exp) <= 4:
        return Expr("*", tuple(from_sympy(expr.base) for _ in range(int(expr.exp))))
    raise ConvertError(f"no integer form for size {expr}")


@dataclass
class Converted:
    """`graph`, and what only torch's side knows about it.

    `refused`: fx node name -> reason, for nodes that could not be converted. `data`: bytes of a constant by key.
    """

    graph: Graph
    refused: dict[str, str] = field(default_factory=dict)
    data: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)


def is_shape_node(node: torch.fx.Node) -> bool:
    """Arithmetic on sizes, and checks that export left behind: nothing to compute on the GPU."""
    value = node.meta.get("val")
    if node.target is operator.getitem:
        return False
    if op_name(node.target) in ASSERT_OPS:
        return True
    return isinstance(value, (int, bool, float, torch.SymInt, torch.SymBool, torch.SymFloat))


KeyOf = Callable[[str, torch.Tensor, bool], str | None]


def convert(
    program: ExportedProgram,
    key_of: KeyOf = lambda name, tensor, is_state: name,
    lowest: Mapping[str, int] = MappingProxyType({}),
) -> Converted:
    """The graph of an edge program, or of the part of one that a backend is given.

    key_of(qualified name, tensor, is_state) names a constant's bytes in named data; None for a state of zeros. lowest:
    lower bounds of symbols where they are below what the program says. Nodes that the format cannot express are listed
    in `refused`; their results get specs nevertheless, so that the rest can be judged.
    """
    return _Converter(program, key_of, lowest).run()


class _Converter:
    def __init__(self, program: ExportedProgram, key_of: KeyOf, lowest: Mapping[str, int]):
        self.lowest = lowest
        self.program = program
        self.key_of = key_of
        self.result = Converted(Graph())
        self.values: dict[torch.fx.Node, Any] = {}  # fx node -> value index, tuple of them, or dim
        signature = program.graph_signature
        self.mutated = set(signature.buffers_to_mutate.values())
        self.kinds = {spec.arg.name: spec for spec in signature.input_specs if hasattr(spec.arg, "name")}

    @property
    def graph(self) -> Graph:
        return self.result.graph

    def run(self) -> Converted:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self._attribute(node)
            elif node.op == "call_function":
                try:
                    self._call(node)
                except ConvertError as error:
                    self.result.refused[node.name] = str(error)
                    self.values[node] = self._outputs(node)
            else:
                self._output(node)
        self._declare_symbols()
        return self.result

    # -- values

    def _spec(self, tensor: torch.Tensor, constant: str | None = None, state: str | None = None) -> TensorSpec:
        try:
            shape = tuple(to_dim(size) for size in tensor.shape)
        except ConvertError:
            shape = tuple(Expr("unknown") for _ in tensor.shape)
        return TensorSpec(dtype_name(tensor.dtype), shape, constant, state)

    def _placeholder(self, node: torch.fx.Node) -> None:
        spec = self.kinds.get(node.name)
        tensor = self._stored_tensor(node)
        if tensor is None:
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                self.values[node] = self.graph.add_value(self._spec(value))
                self.graph.inputs.append(self.values[node])
            else:  # a size computed outside: an input whose value binds a symbol
                index = self.graph.add_value(TensorSpec("int64", ()))
                self.graph.inputs.append(index)
                dim = to_dim(value) if isinstance(value, (int, torch.SymInt)) else None
                if dim is not None:
                    self.graph.sizes[index] = dim
                self.values[node] = dim
            return
        assert spec is not None and spec.target is not None
        is_state = spec.kind == InputKind.BUFFER and spec.target in self.mutated
        self.values[node] = self._store(spec.target, tensor, spec.target if is_state else None)

    def _stored_tensor(self, node: torch.fx.Node) -> torch.Tensor | None:
        if is_param(self.program, node):
            return get_param(self.program, node)
        if is_buffer(self.program, node):
            return get_buffer(self.program, node)
        if is_lifted_tensor_constant(self.program, node):
            return get_lifted_tensor_constant(self.program, node)
        return None

    def _store(self, name: str, tensor: torch.Tensor, state: str | None) -> int:
        key = self.key_of(name, tensor, state is not None)
        if key is not None:
            self.result.data[key] = lambda: tensor
        index = self.graph.add_value(self._spec(tensor, key, state))
        if tensor.dim() == 0 and state is None:
            self.graph.scalars[index] = tensor.item()
        elif (
            state is None
            and tensor.dtype in (torch.int8, torch.int32, torch.int64)
            and not isinstance(tensor, FakeTensor)
        ):
            # the partitioner is given weights without contents: preprocess finds zeros that it does not
            self.graph.zeros |= set() if bool(tensor.any()) else {index}
        return index

    def _attribute(self, node: torch.fx.Node) -> None:
        target: Any = self.program.graph_module
        for part in str(node.target).split("."):
            target = getattr(target, part)
        if isinstance(target, torch.Tensor):
            self.values[node] = self._store(str(node.target), target, None)

    # -- nodes

    def _call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, torch.fx.Node) and isinstance(index, int)
            parts = self.values[source]
            self.values[node] = parts[index] if isinstance(parts, tuple) else None
            return
        if is_shape_node(node):
            value = node.meta.get("val")
            self.values[node] = to_dim(value) if isinstance(value, (int, torch.SymInt)) else None
            return
        name = op_name(node.target)
        if not hasattr(node.target, "_schema"):
            raise ConvertError(f"{name} is no operator of the edge dialect")
        args = {key: self._arg(value) for key, value in normalize(node.target, node.args, node.kwargs).items()}
        outputs = self._outputs(node)
        self.values[node] = outputs
        used = outputs if isinstance(outputs, tuple) else (outputs,)
        self.graph.nodes.append(Node(name, args, used, (node.name,)))

    def _outputs(self, node: torch.fx.Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return self.graph.add_value(self._spec(value))
        if isinstance(value, (tuple, list)):
            read = {user.args[1] for user in node.users if user.target is operator.getitem}
            return tuple(
                self.graph.add_value(self._spec(part)) if isinstance(part, torch.Tensor) and position in read else None
                for position, part in enumerate(value)
            )
        return None

    def _arg(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            held = self.values.get(value)
            if isinstance(held, Expr) or (isinstance(held, int) and not self._is_tensor(value)):
                return held
            if held is None or isinstance(held, tuple):
                raise ConvertError(f"argument {value.name} is no tensor or size")
            return Ref(held)
        if isinstance(value, (list, tuple)):
            return [self._arg(item) for item in value]
        if isinstance(value, torch.SymInt):
            return to_dim(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (torch.layout, torch.device, torch.memory_format)):
            return None
        raise ConvertError(f"argument of type {type(value).__name__}")

    @staticmethod
    def _is_tensor(node: torch.fx.Node) -> bool:
        return isinstance(node.meta.get("val"), torch.Tensor) or node.op == "get_attr"

    def _output(self, node: torch.fx.Node) -> None:
        for arg, spec in zip(node.args[0], self.program.graph_signature.output_specs, strict=True):  # type: ignore[arg-type]
            held = self.values.get(arg) if isinstance(arg, torch.fx.Node) else None
            if spec.kind == OutputKind.BUFFER_MUTATION:
                index = next((i for i, s in enumerate(self.graph.values) if s.state == spec.target), None)
                if isinstance(held, int) and index is not None:
                    self.graph.mutations[index] = held
            elif isinstance(held, int) and isinstance(arg, torch.fx.Node) and self._is_tensor(arg):
                self.graph.outputs.append(held)
            elif isinstance(held, (int, Expr)):  # a size for somebody outside: a number like any other
                index = self.graph.add_value(TensorSpec("int64", ()))
                args: dict[str, Any] = {"size": [], "fill_value": held, "dtype": "int64"}
                self.graph.nodes.append(Node("aten.full.default", args, (index,)))
                self.graph.outputs.append(index)
            else:
                self.result.refused[node.name] = "an output that is no tensor"

    def _declare_symbols(self) -> None:
        used = {
            name for spec in self.graph.values for dim in spec.shape if isinstance(dim, Expr) for name in dim.symbols()
        }
        for node in self.graph.nodes:
            used |= set(_symbols_of(list(node.args.values())))
        bounds = {str(symbol): value for symbol, value in self.program.range_constraints.items()}
        shape_env = next(
            (
                size.node.shape_env
                for node in self.program.graph.nodes
                if isinstance(node.meta.get("val"), torch.Tensor)
                for size in node.meta["val"].shape
                if isinstance(size, torch.SymInt)
            ),
            None,
        )
        if shape_env is not None:
            bounds = {**{str(s): r for s, r in shape_env.var_to_range.items()}, **bounds}
        for name in sorted(used):
            span = bounds.get(name)
            low = int(span.lower) if span is not None and span.lower.is_Integer else 0
            low = min(low, self.lowest.get(name, low))
            high = int(span.upper) if span is not None and span.upper.is_Integer else None
            # export's own lower bound of 2 means "not specialised to 0 or 1", not that 1 is refused
            self.graph.symbols[name] = (low if low > 2 else min(low, 1), high if high is None or high < 2**31 else None)


def _symbols_of(arg: Any) -> list[str]:
    if isinstance(arg, Expr):
        return list(arg.symbols())
    if isinstance(arg, (list, tuple)):
        return [name for item in arg for name in _symbols_of(item)]
    return []
