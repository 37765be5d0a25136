"""The typed graph that both halves of the backend share; `backend.blob` writes and reads it.

A `Graph` is a list of nodes in execution order over numbered values. Every value has a `TensorSpec`; nodes hold
named arguments (the operator schema's own names) in which tensors are `Ref`s. Neither torch nor executorch is
imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backend.expr import Dim, Expr, evaluate

BACKEND_ID = "ZooWebGPU"

DTYPES = ("float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
MAX_RANK = 8


class BlobError(ValueError):
    """A delegate blob that is truncated, corrupt, newer than this runtime, or inconsistent."""


class ShapeError(ValueError):
    """An input whose shape or dtype the program does not take."""


@dataclass(frozen=True)
class TensorSpec:
    """dtype (torch's name), shape (ints or expressions), and where the data lives when it is not computed.

    `constant`: key of the initial bytes in named data. `state`: qualified name of a mutable buffer that outlives the
    call; its initial contents are `constant`, or zeros when that is None.
    """

    dtype: str
    shape: tuple[Dim, ...]
    constant: str | None = None
    state: str | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        return all(isinstance(dim, int) for dim in self.shape)

    @property
    def is_constant(self) -> bool:
        return self.constant is not None and self.state is None

    def concrete(self, env: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(evaluate(dim, env) for dim in self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Ref:
    """A tensor argument: the index of a value."""

    value: int


@dataclass(frozen=True)
class Node:
    """One operator. `outputs` holds value indices, None where an output of the operator is not used.

    `origin` names the nodes of the exported program that this node stands for, `note` says why a pass that knows the
    operator left it as it is: the reason of its refusal. Neither is serialised.
    """

    op: str
    args: Mapping[str, Any]
    outputs: tuple[int | None, ...]
    origin: tuple[str, ...] = ()
    note: str | None = None

    def refs(self) -> Iterator[int]:
        for arg in self.args.values():
            yield from _refs(arg)


@dataclass
class Graph:
    """`mutations` maps the value of a state to the value of its contents after the call.

    `sizes` names the inputs that are sizes, not data: a number that binds a symbol. For passes to look at, `scalars`
    holds the numbers of zero-dimensional constants and `zeros` the constants of whole numbers that are all 0; neither
    is serialised.
    """

    values: list[TensorSpec] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    mutations: dict[int, int] = field(default_factory=dict)
    symbols: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    sizes: dict[int, Dim] = field(default_factory=dict)
    scalars: dict[int, int | float | bool] = field(default_factory=dict)
    zeros: set[int] = field(default_factory=set)

    def add_value(self, spec: TensorSpec) -> int:
        self.values.append(spec)
        return len(self.values) - 1

    def call(self, node: Node) -> Call:
        """The node with its tensors' specs in place of references: what op declarations see."""
        specs = {name: map_arg(arg, lambda ref: self.values[ref.value]) for name, arg in node.args.items()}
        outputs = tuple(None if out is None else self.values[out] for out in node.outputs)
        return Call(node.op, specs, outputs)

    def use_counts(self) -> list[int]:
        """How often each value is read by nodes, outputs and mutations."""
        counts = [0] * len(self.values)
        for node in self.nodes:
            for ref in node.refs():
                counts[ref] += 1
        for value in [*self.outputs, *self.mutations.values()]:
            counts[value] += 1
        return counts

    def constants(self) -> list[int]:
        return [index for index, spec in enumerate(self.values) if spec.constant is not None]

    def producers(self) -> dict[int, Node]:
        return {out: node for node in self.nodes for out in node.outputs if out is not None}

    def rewired(self, nodes: Sequence[Node], renames: Mapping[int, int]) -> Graph:
        """This graph with other nodes, and reads of the keys of `renames` replaced by its values."""

        def rename(value: int) -> int:
            while value in renames:
                value = renames[value]
            return value

        def rename_node(node: Node) -> Node:
            args = {name: map_arg(arg, lambda ref: Ref(rename(ref.value))) for name, arg in node.args.items()}
            return replace(node, args=args)

        return Graph(
            self.values,
            self.inputs,
            [rename(value) for value in self.outputs],
            [rename_node(node) for node in nodes],
            {state: rename(value) for state, value in self.mutations.items()},
            self.symbols,
            self.sizes,
            self.scalars,
            self.zeros,
        )

    def compacted(self) -> Graph:
        """Without the nodes whose results nobody reads and the values that nothing refers to."""
        needed = {*self.outputs, *self.mutations, *self.mutations.values()}
        nodes: list[Node] = []
        for node in reversed(self.nodes):
            if any(out in needed for out in node.outputs):
                outputs = tuple(out if out in needed or i == 0 else None for i, out in enumerate(node.outputs))
                nodes.append(replace(node, outputs=outputs))
                needed.update(node.refs())
                needed.update(out for out in outputs if out is not None)
        kept = sorted(needed | set(self.inputs))
        number = {old: new for new, old in enumerate(kept)}

        def renumber(node: Node) -> Node:
            args = {name: map_arg(arg, lambda ref: Ref(number[ref.value])) for name, arg in node.args.items()}
            return replace(node, args=args, outputs=tuple(None if out is None else number[out] for out in node.outputs))

        return Graph(
            [self.values[index] for index in kept],
            [number[index] for index in self.inputs],
            [number[index] for index in self.outputs],
            [renumber(node) for node in reversed(nodes)],
            {number[state]: number[new] for state, new in self.mutations.items()},
            self.symbols,
            {number[index]: dim for index, dim in self.sizes.items()},
            {number[index]: held for index, held in self.scalars.items() if index in number},
            {number[index] for index in self.zeros if index in number},
        )

    def bind(self, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int] = ()) -> dict[str, int]:
        """Values of the symbols from the live shapes of the inputs, and from the inputs that are sizes.

        Every dim is checked against the spec and the bounds known to export. Raises `ShapeError`, naming the input and
        the dimension.
        """
        if len(shapes) != len(self.inputs):
            raise ShapeError(f"{len(shapes)} inputs given, the method takes {len(self.inputs)}")
        env: dict[str, int] = {}
        pending: list[tuple[int, int, Dim, int]] = []
        for position, (index, shape) in enumerate(zip(self.inputs, shapes, strict=True)):
            spec = self.values[index]
            if len(shape) != spec.rank:
                raise ShapeError(f"input {position} has {len(shape)} dimensions, expected {spec}")
            pending += [
                (position, axis, dim, size) for axis, (dim, size) in enumerate(zip(spec.shape, shape, strict=True))
            ]
        for (index, dim), size in zip(self.sizes.items(), sizes, strict=True):
            pending.append((self.inputs.index(index), 0, dim, size))
        progress = True
        while pending and progress:
            progress = False
            for item in list(pending):
                position, axis, dim, size = item
                unknown = set() if isinstance(dim, int) else {name for name in dim.symbols() if name not in env}
                if len(unknown) > 1:
                    continue
                if unknown:
                    name = unknown.pop()
                    solved = _solve(dim, name, size, env)
                    if solved is None:
                        continue
                    env[name] = solved
                expected = evaluate(dim, env)
                if expected != size:
                    raise ShapeError(
                        f"input {position}, dimension {axis} is {size}, expected {_describe(dim, expected)}"
                    )
                for name in [] if isinstance(dim, int) else dim.symbols():
                    low, high = self.symbols.get(name, (0, None))
                    if env[name] < low or (high is not None and env[name] > high):
                        span = [evaluate(dim, {**env, name: bound}) for bound in (low, high) if bound is not None]
                        limit = f"{span[0]} to {span[1]}" if len(span) == 2 else f"{span[0]} or more"
                        raise ShapeError(f"input {position}, dimension {axis} is {size}, allowed {limit}")
                pending.remove(item)
                progress = True
        if pending:
            position, axis, dim, size = pending[0]
            raise ShapeError(f"input {position}, dimension {axis} is {size}, which {dim} cannot be solved for")
        return env

    def check(self) -> None:
        """Raises `BlobError` unless the graph is well formed: indices in range, values defined before use."""
        count = len(self.values)
        for index in [*self.inputs, *self.outputs, *self.mutations, *self.mutations.values()]:
            if not 0 <= index < count:
                raise BlobError(f"value {index} does not exist")
        for index, spec in enumerate(self.values):
            if spec.dtype not in DTYPES:
                raise BlobError(f"value {index} has unknown dtype {spec.dtype!r}")
            if spec.rank > MAX_RANK:
                raise BlobError(f"value {index} has rank {spec.rank}, the limit is {MAX_RANK}")
            for dim in spec.shape:
                if isinstance(dim, int) and not 0 <= dim < 2**40:
                    raise BlobError(f"value {index} has dimension {dim}")
                self._check_symbols(dim, f"value {index}")
            if not isinstance(spec.constant, str | None) or not isinstance(spec.state, str | None):
                raise BlobError(f"value {index} is stored under a name that is no text")
            if (spec.constant is not None or spec.state is not None) and not spec.is_static:
                raise BlobError(f"value {index} is stored but has a dynamic shape")
        if len(set(self.inputs)) != len(self.inputs):
            raise BlobError("a value is two inputs")
        for index, dim in self.sizes.items():
            if index not in self.inputs or self.values[index].rank:
                raise BlobError(f"size {dim} is no input")
            self._check_symbols(dim, f"size {index}")
        stored = {i for i, spec in enumerate(self.values) if spec.constant is not None or spec.state is not None}
        if stored & set(self.inputs):
            raise BlobError("an input is a stored value")
        defined = set(self.inputs) | stored
        for node in self.nodes:
            self._check_symbols(list(node.args.values()), node.op)
            for ref in node.refs():
                if ref not in defined:
                    raise BlobError(f"{node.op} reads value {ref} before it is computed")
            for out in node.outputs:
                if out is None:
                    continue
                if not 0 <= out < count or out in defined:
                    raise BlobError(f"{node.op} writes value {out}, which does not exist or is already defined")
                defined.add(out)
        for index in [*self.outputs, *self.mutations.values()]:
            if index not in defined:
                raise BlobError(f"output value {index} is never computed")
        for index in self.mutations:
            if self.values[index].state is None:
                raise BlobError(f"value {index} is mutated but is no state")

    def _check_symbols(self, arg: Any, where: str) -> None:
        for dim in _exprs(arg):
            for name in dim.symbols():
                if name not in self.symbols:
                    raise BlobError(f"{where} uses undeclared symbol {name!r}")


@dataclass(frozen=True)
class Call:
    """An operator with what its declaration may look at: specs (or, at run time, values), scalars, strings, lists."""

    op: str
    args: Mapping[str, Any]
    outputs: tuple[Any, ...]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.args.get(name, default)
        return default if value is None else value

    def tensors(self) -> Iterator[Any]:
        """Every tensor argument, lists included."""
        for arg in self.args.values():
            for item in arg if isinstance(arg, (list, tuple)) else (arg,):
                if hasattr(item, "dtype") and hasattr(item, "shape"):
                    yield item


def map_arg(arg: Any, on_ref: Callable[[Ref], Any], on_expr: Callable[[Expr], Any] = lambda expr: expr) -> Any:
    if isinstance(arg, Ref):
        return on_ref(arg)
    if isinstance(arg, Expr):
        return on_expr(arg)
    if isinstance(arg, (list, tuple)):
        return [map_arg(item, on_ref, on_expr) for item in arg]
    return arg


def _refs(arg: Any) -> Iterator[int]:
    if isinstance(arg, Ref):
        yield arg.value
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            yield from _refs(item)


def _exprs(arg: Any) -> Iterator[Expr]:
    if isinstance(arg, Expr):
        yield arg
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            yield from _exprs(item)


def _solve(dim: Dim, name: str, size: int, env: Mapping[str, int]) -> int | None:
    """The value of `name` for which `dim` equals `size`, when `dim` is linear in it; None when it is not."""
    if isinstance(dim, int):
        return None
    at = [evaluate(dim, {**env, name: value}) for value in (0, 1, 2)]
    slope = at[1] - at[0]
    if slope == 0 or at[2] - at[1] != slope:
        return None
    return (size - at[0]) // slope


def _describe(dim: Dim, expected: int) -> str:
    return str(expected) if isinstance(dim, int) else f"{expected} ({dim})"
