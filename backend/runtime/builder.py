"""Lowers one graph at concrete shapes to a list of dispatches, fusing pointwise work on the way.

Op declarations call `Builder.pointwise`, the view functions, and `Builder.launch`. A launch is deferred until someone
needs its result in memory: pointwise nodes that follow and are its only readers move into its store. Pointwise values
with several readers, or that would be recomputed by broadcasting, are realised once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from backend.expr import evaluate
from backend.graph import ITEM_BYTES, BlobError, Call, Graph, Node, Ref, ShapeError, TensorSpec, map_arg
from backend.runtime import pointwise
from backend.runtime import value as values
from backend.runtime.capabilities import Capabilities
from backend.runtime.codegen import VECTOR, Source, in_vectors
from backend.runtime.device import WRITE
from backend.runtime.dispatch import Dispatch, Launch, Lowered, Vector, fold
from backend.runtime.errors import DeviceError
from backend.runtime.packing import is_packed, packed
from backend.runtime.tensor import STORAGE, STORAGE_BYTES, Buffer, Tensor, contiguous_strides
from backend.runtime.value import Apply, Expression, Load, Pending, Value

MAX_FUSED_COST = 64  # operations an element


class Builder:
    """`lower_graph` drives it; an op's `lower` gets it with a `Call` of values."""

    def __init__(
        self,
        graph: Graph,
        env: Mapping[str, int],
        capabilities: Capabilities,
        emitted: Callable[[Dispatch], None] | None = None,
    ):
        self.graph = graph
        self.env = env
        self.capabilities = capabilities
        self.emitted = emitted
        self.dispatches: list[Dispatch] = []
        self.live: dict[int, Value] = {}
        self.remaining = graph.use_counts()
        self.node: Node = Node("", {}, ())
        self._constants: dict[str, Buffer] = {}
        self._states: dict[str, Buffer] = {}
        self.shared: dict[Hashable, Tensor] = {}  # what several ops of a graph need alike, by what it is made of

    # -- what op declarations use: values

    def launch(
        self,
        template: str,
        *,
        shape: Sequence[int],
        dtype: str,
        reads: Mapping[str, Value | Tensor | Vector],
        groups: int,
        params: Mapping[str, Any] | None = None,
        constants: Mapping[str, Any] | None = None,
        row: int | None = None,
    ) -> Value:
        """Defers a kernel that writes one contiguous tensor through `store(i, v)`.

        reads: a `Value` is read by row-major index with its pointwise work inlined; a `Tensor` is read raw, by element
        of its buffer; a `Vector` raw, four at a time. groups: the total number of workgroups, folded into two dims.
        row: of a kernel that can store four neighbours of a row of so many at once, and is told by the constant
        `vectors` when it is to do so.
        """
        label = self._label(template)
        record = Launch(template, reads, params or {}, constants or {}, groups, tuple(shape), dtype, label, row=row)
        return Value(tuple(shape), dtype, Pending(record, dtype))

    def launch_into(
        self,
        template: str,
        *,
        targets: Mapping[str, Tensor],
        reads: Mapping[str, Value | Tensor | Vector],
        groups: int,
        params: Mapping[str, Any] | None = None,
        constants: Mapping[str, Any] | None = None,
        row: int | None = None,
    ) -> None:
        """Dispatches now a kernel that writes given tensors: several outputs, or part of a state. row: of `out`."""
        for target in targets.values():
            if target.buffer.kind == "state":
                self._before_write(target.buffer)
            reads = {name: self._detached(read, target.buffer) for name, read in reads.items()}
        label = self._label(template)
        record = Launch(template, reads, params or {}, constants or {}, groups, (), "", label, row=row)
        self._dispatch(record, targets, {})

    def pointwise(self, code: str, args: Sequence[Value], dtype: str, shape: Sequence[int]) -> Value:
        """`code` applied to the arguments broadcast to `shape`; `{0}`… are the arguments in their compute types."""
        shape = tuple(shape)
        for arg in args:
            self._refresh(arg)
        args = [self._inlinable(arg, shape) for arg in args]
        pending = {id(p.launch) for arg in args if (p := arg.pending)}
        if len(pending) > 1:
            first = next(arg for arg in args if arg.pending)
            args = [arg if arg is first or not arg.pending else self._realized(arg) for arg in args]
        root: Expression = Apply(code, tuple(values.expand(arg, shape).root for arg in args), dtype)
        result = Value(shape, dtype, root)
        if values.cost(root) > MAX_FUSED_COST or self._binding_count(result) > self.capabilities.max_storage_buffers:
            args = [self._realized(arg) for arg in args]
            result = Value(shape, dtype, Apply(code, tuple(values.expand(arg, shape).root for arg in args), dtype))
        return result

    def movable(self, value: Value) -> Value:
        """The value, realised first if it stands on a pending kernel, so that views other than reshape apply."""
        return self._realized(value) if value.pending else value

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        result = values.reshape(value, shape)
        if result is None:
            result = values.reshape(values.of_tensor(self.contiguous(value)), shape)
            assert result is not None
        return result

    def tensor(self, value: Value) -> Tensor:
        """The value in memory, with whatever strides it has."""
        self._refresh(value)
        if value.tensor is not None:
            return value.tensor
        target = self.temp(value.shape, value.dtype)
        self.write(value, target)
        value.root = Load(target)
        return target

    def contiguous(self, value: Value) -> Tensor:
        """The value in memory, contiguous (the offset may be other than 0)."""
        tensor = self.tensor(value)
        if tensor.is_contiguous:
            return tensor.with_view(tensor.shape, contiguous_strides(tensor.shape), tensor.offset)
        target = self.temp(tensor.shape, tensor.dtype)
        self.write(values.of_tensor(tensor), target)
        return target

    def temp(self, shape: Sequence[int], dtype: str, label: str = "") -> Tensor:
        """A new contiguous tensor, uninitialised."""
        nbytes = math.prod(shape) * STORAGE_BYTES[STORAGE[dtype]]
        buffer = Buffer("temp", nbytes, label or self._label("temp"))
        return Tensor(buffer, dtype, tuple(shape), contiguous_strides(shape))

    def write(self, value: Value, target: Tensor) -> None:
        """Computes the value into a contiguous tensor of the same shape and dtype."""
        if target.buffer.kind == "state":
            self._before_write(target.buffer)
        self._refresh(value)
        pending = value.pending
        if pending is not None:
            plain = isinstance(value.root, Pending)
            self._dispatch(pending.launch, {"out": target}, {} if plain else {"out": value})
            pending.launch.done = target if plain else None
            return
        workgroup, items, width = pointwise.geometry(value, target, self.capabilities)
        groups = -(-value.numel // (workgroup * items * width))
        record = Launch(
            "pointwise",
            {"x": value},
            {"count": value.numel // width},
            {"workgroup": workgroup, "items": items, "width": width},
            groups,
            (),
            "",
            self._label("pointwise"),
            width=width,
        )
        self._dispatch(record, {"out": target}, {})

    def in_place(self, value: Value, position: int = 0) -> Tensor | None:
        """The state tensor that this node may update in place of writing a new one, or None.

        `value` must be the whole state that the node's output at `position` becomes the new contents of, and nothing
        that reads its old contents may come later.
        """
        tensor = value.tensor
        output = self.node.outputs[position]
        if tensor is None or output is None or tensor.buffer.kind != "state" or not tensor.is_contiguous:
            return None
        state = next((s for s, new in self.graph.mutations.items() if new == output), None)
        chained = tensor.buffer.key == (self.graph.values[state].state if state is not None else None)
        if state is None or not chained or tensor.numel != math.prod(self.graph.values[state].concrete(self.env)):
            return None
        for index, other in self.live.items():
            if self.remaining[index] > 0 and other.tensor is not None and other.tensor.buffer is tensor.buffer:
                return None
        return tensor

    # -- the walk

    def run(self) -> Lowered:
        from backend.ops import registry

        inputs: list[Buffer] = []
        for index in self.graph.inputs:
            spec = self.graph.values[index]
            shape = spec.concrete(self.env)
            count = math.prod(shape)
            in_words = is_packed(spec.dtype, count)
            nbytes = count * (ITEM_BYTES[spec.dtype] if in_words else STORAGE_BYTES[STORAGE[spec.dtype]])
            buffer = Buffer("input", nbytes, f"input {len(inputs)}")
            inputs.append(buffer)
            tensor = Tensor(buffer, spec.dtype, shape, contiguous_strides(shape), packed=in_words)
            self.live[index] = values.of_tensor(tensor)
        for index, spec in enumerate(self.graph.values):
            if spec.state is not None or spec.constant is not None:
                self.live[index] = values.of_tensor(self._stored(spec))
        for node in self.graph.nodes:
            self.node = node
            self._lower(node, registry.get(node.op).lower)
        self.node = Node("", {}, ())  # what comes now is no operator's
        self._mutate()
        outputs = []
        for index in self.graph.outputs:
            tensor = self.contiguous(self.live[index])
            if tensor.buffer.kind != "temp" or tensor.offset:
                target = self.temp(tensor.shape, tensor.dtype, "output")
                self.write(values.of_tensor(tensor), target)
                tensor = target
            outputs.append(tensor)
        return Lowered(self.dispatches, outputs, [packed(tensor, self) for tensor in outputs], inputs)

    def _lower(self, node: Node, lower: Callable[[Call, Builder], Any]) -> None:
        def fetch(ref: Ref) -> Value:
            self.remaining[ref.value] -= 1
            return self.live[ref.value]

        args = {name: map_arg(arg, fetch, lambda expr: evaluate(expr, self.env)) for name, arg in node.args.items()}
        specs = tuple(None if out is None else self._concrete(self.graph.values[out]) for out in node.outputs)
        results = lower(Call(node.op, args, specs), self)
        results = results if isinstance(results, (tuple, list)) else (results,)
        for out, spec, result in zip(node.outputs, specs, results, strict=True):
            if out is None or spec is None:
                continue
            assert isinstance(result, Value), f"{node.op} returned {result!r}"
            assert result.shape == spec.shape, f"{node.op} gave shape {result.shape}, expected {spec.shape}"
            assert result.dtype == spec.dtype, f"{node.op} gave {result.dtype}, expected {spec.dtype}"
            self.live[out] = self._settle(result, self.remaining[out])
        for ref in node.refs():
            if self.remaining[ref] <= 0:
                self.live.pop(ref, None)

    def _settle(self, result: Value, readers: int) -> Value:
        """A value with several readers is computed once, unless it is free to recompute."""
        free = not result.pending and values.cost(result.root) == 0
        if readers > 1 and not free:
            self.tensor(result)
        return result

    def _mutate(self) -> None:
        """Writes the new contents of states that were not updated in place."""
        late: list[tuple[Tensor, Tensor]] = []
        for state, new in self.graph.mutations.items():
            target = self._stored(self.graph.values[state])
            tensor = self.tensor(self.live[new])
            if tensor.buffer is target.buffer and tensor.is_contiguous and tensor.offset == 0:
                continue
            late.append((tensor, target))
        written = {id(target.buffer) for _, target in late}
        for position, (tensor, target) in enumerate(late):
            if id(tensor.buffer) in written:
                copy = self.temp(tensor.shape, tensor.dtype)
                self.write(values.of_tensor(tensor), copy)
                late[position] = (copy, target)
        for index in self.graph.outputs:
            tensor = self.tensor(self.live[index])
            if id(tensor.buffer) in written:
                copy = self.temp(tensor.shape, tensor.dtype)
                self.write(values.of_tensor(tensor), copy)
                self.live[index] = values.of_tensor(copy)
        for tensor, target in late:
            self.write(values.of_tensor(tensor), target)

    # -- helpers

    def _concrete(self, spec: TensorSpec) -> TensorSpec:
        return replace(spec, shape=spec.concrete(self.env))

    def _label(self, template: str) -> str:
        return f"{self.node.op or 'output'}:{template}"

    def _stored(self, spec: TensorSpec) -> Tensor:
        shape = spec.concrete(self.env)
        nbytes = math.prod(shape) * STORAGE_BYTES[STORAGE[spec.dtype]]
        if spec.state is not None:
            buffer = self._states.setdefault(spec.state, Buffer("state", nbytes, spec.state, spec.state))
        else:
            assert spec.constant is not None
            key = f"{spec.dtype}:{spec.constant}"
            buffer = self._constants.setdefault(key, Buffer("constant", nbytes, spec.constant, spec.constant))
        return Tensor(buffer, spec.dtype, shape, contiguous_strides(shape))

    def _realized(self, value: Value) -> Value:
        return values.of_tensor(self.tensor(value))

    def _refresh(self, value: Value) -> None:
        """A pending kernel that has run since is read from memory."""

        def change(leaf: Expression) -> Expression:
            if isinstance(leaf, Pending) and leaf.launch.done is not None:
                done = leaf.launch.done
                return Load(done.with_view(value.shape, contiguous_strides(value.shape), done.offset))
            return leaf

        pending = value.pending
        if pending is not None and pending.launch.done is not None:
            value.root = values.map_leaves(value.root, change)

    def _detached(self, read: Value | Tensor | Vector, written: Buffer) -> Value | Tensor | Vector:
        """A read that does not touch the buffer being written: a copy where it did."""
        if isinstance(read, Value) and self._reads(read, written):
            copy = self.temp(read.shape, read.dtype)
            self.write(read, copy)
            return values.of_tensor(copy)
        return read

    def _inlinable(self, arg: Value, shape: tuple[int, ...]) -> Value:
        grows = arg.numel != math.prod(shape)
        if grows and (arg.pending or values.cost(arg.root) > 1):
            return self._realized(arg)
        if arg.pending and arg.shape != shape:  # more dims of size 1: a pending kernel moves by reshape only
            return values.reshape(arg, shape) or self._realized(arg)
        return arg

    def _binding_count(self, value: Value) -> int:
        found = {id(leaf.tensor.buffer) for leaf in values.leaves(value.root) if isinstance(leaf, Load)}
        pending = value.pending
        extra = len(pending.launch.reads) if pending else 0
        return len(found) + extra + 1

    def _before_write(self, buffer: Buffer) -> None:
        """Computes every live value that still has to read the old contents of a state."""
        for index, value in self.live.items():
            if self.remaining[index] > 0 and value.tensor is None and self._reads(value, buffer):
                self.tensor(value)

    def _reads(self, value: Value, buffer: Buffer) -> bool:
        for leaf in values.leaves(value.root):
            if isinstance(leaf, Load) and leaf.tensor.buffer is buffer:
                return True
            if isinstance(leaf, Pending):
                for read in leaf.launch.reads.values():
                    if isinstance(read, Value):
                        if self._reads(read, buffer):
                            return True
                    elif (read.tensor if isinstance(read, Vector) else read).buffer is buffer:
                        return True
        return False

    def _dispatch(self, launch: Launch, targets: Mapping[str, Tensor], epilogues: Mapping[str, Value]) -> None:
        reads = {name: self._resolved(read) for name, read in launch.reads.items()}
        if launch.groups == 0 or not targets:
            return
        self._fit_bindings(reads, len(targets))
        source = Source()
        for name, value in launch.params.items():
            source.param(value, name)
        groups = fold(launch.groups)
        source.param(launch.groups, "groups")
        for name, read in reads.items():
            if isinstance(read, Value):
                source.read_value(name, read, launch.width)
            elif isinstance(read, Vector):
                source.read_raw(name, read.tensor, read.width)
            else:
                source.read_raw(name, read)
        constants = launch.constants
        widths = dict.fromkeys(targets, launch.width)
        if launch.row is not None:
            fits = self._stores_vectors(launch.row, len(source.slots), targets, epilogues.get("out"))
            constants = {**constants, "vectors": fits}
            widths["out"] = VECTOR if fits else 1
        for name, target in targets.items():
            source.write(name, target, epilogues.get(name), launch.dtype, widths[name])
        code = source.text(launch.template, constants)
        slots = tuple((tensor.buffer, access) for tensor, access in source.slots)
        written = {id(buffer) for buffer, access in slots if access == WRITE}
        clash = [buffer.label for buffer, access in slots if access != WRITE and id(buffer) in written]
        assert not clash, f"{launch.label} reads and writes {clash[0]}"
        self.dispatches.append(Dispatch(launch.label, launch.template, code, slots, source.param_bytes(), groups))
        if self.emitted is not None:
            self.emitted(self.dispatches[-1])

    def _stores_vectors(self, row: int, read: int, targets: Mapping[str, Tensor], epilogue: Value | None) -> bool:
        """Whether four neighbours in a row of `out` can be finished and stored at once. read: bindings so far."""
        out = targets["out"]
        if row % VECTOR or epilogue is None:
            return row % VECTOR == 0 and out.offset % VECTOR == 0
        others = read + len(targets) - 1
        return in_vectors(epilogue, out, self.capabilities.max_storage_buffers - others)

    def _fit_bindings(self, reads: dict[str, Value | Tensor | Vector], targets: int) -> None:
        """Realises inlined reads, widest first, until the kernel's bindings fit the device's limit."""

        def loads(read: Value | Tensor | Vector) -> int:
            if not isinstance(read, Value):
                return 1
            return len({id(leaf.tensor.buffer) for leaf in values.leaves(read.root) if isinstance(leaf, Load)})

        while sum(map(loads, reads.values())) + targets > self.capabilities.max_storage_buffers:
            name = max(reads, key=lambda key: loads(reads[key]))
            read = reads[name]
            if not isinstance(read, Value) or loads(read) <= 1:
                break
            reads[name] = self._realized(read)

    def _resolved(self, read: Value | Tensor | Vector) -> Value | Tensor | Vector:
        """A value that is read inline cannot stand on a pending kernel: that kernel runs first."""
        if isinstance(read, Value) and read.pending:
            return self._realized(read)
        return read


def lower_graph(
    graph: Graph,
    env: Mapping[str, int],
    capabilities: Capabilities,
    emitted: Callable[[Dispatch], None] | None = None,
) -> Lowered:
    """The dispatches of `graph` with its symbols bound to `env`; `emitted` is told of each as soon as it is known.

    Raises `ShapeError` for sizes that do not work out and `BlobError` for nodes whose arguments make no sense.
    """
    builder = Builder(graph, env, capabilities, emitted)
    try:
        return builder.run()
    except (ShapeError, BlobError, DeviceError):
        raise
    except Exception as error:  # a node that export did not write: its arguments may be anything
        op = builder.node.op or "the graph"
        raise BlobError(f"{op} does not fit its arguments: {type(error).__name__}: {error}") from error
