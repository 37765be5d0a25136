"""One delegated method: a graph, its weights on the GPU, and plans by input shape."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from backend.blob import from_blob
from backend.graph import ITEM_BYTES, BlobError, Graph, Node, ShapeError, TensorSpec
from backend.quantization import joined_sources
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import capabilities
from backend.runtime.device import Device, get_device
from backend.runtime.device_tensor import DeviceTensor
from backend.runtime.errors import DeviceError
from backend.runtime.hostdata import release_pages, to_storage
from backend.runtime.packing import is_packed
from backend.runtime.plan import Plan
from backend.runtime.state import StateStore
from backend.runtime.tensor import STORAGE, STORAGE_BYTES, Buffer

MAX_PLANS = 32


class Delegate:
    """`execute` runs the method on live shapes; a plan is made for each new shape and kept.

    blob: what `backend.blob.to_blob` wrote. get_data: named data by key, valid as long as the delegate lives.
    states: shared by the delegates of one loaded program. keep_inputs: see `Plan`.
    Raises `BlobError` for a blob this runtime cannot run.
    """

    def __init__(
        self,
        blob: bytes | memoryview,
        get_data: Callable[[str], Any],
        states: StateStore | None = None,
        keep_inputs: bool = False,
    ):
        from backend.ops import registry

        self.graph: Graph = from_blob(blob)
        unknown = sorted({node.op for node in self.graph.nodes if registry.find(node.op) is None})
        if unknown:
            raise BlobError(f"this runtime has no kernel for {', '.join(unknown)}: export again or update")
        for node in self.graph.nodes:
            reason = _refusal(self.graph, node)
            if reason is not None:
                raise BlobError(f"{node.op}: {reason}: export again or update")
        self._get_data = get_data
        self._keep_inputs = keep_inputs
        self._states = states if states is not None else StateStore()
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._latest: Plan | None = None
        self._resources: DelegateResources | None = None
        for spec in self.graph.values:
            if spec.constant is not None:
                self._constant_bytes(spec)

    def execute(self, inputs: Sequence[np.ndarray | DeviceTensor]) -> list[np.ndarray]:
        """numpy arrays (or results on the GPU) in, fresh arrays out, in the order and dtypes of the method.

        Raises `ShapeError` for a shape or dtype the method does not take, `DeviceError` for the GPU's refusals and for
        a tensor of another GPU device, `ValueError` for a closed one. After a loss of the device, which is told once,
        states start over.
        """
        with self._states.told():
            plan, stored = self._ready(inputs)
            return plan.run(stored)

    def start(self, inputs: Sequence[np.ndarray | DeviceTensor], fetch: Sequence[int] = ()) -> list[DeviceTensor]:
        """As `execute`, but the outputs stay on the GPU; see `backend.runtime.module.Module.start`."""
        with self._states.told():
            plan, stored = self._ready(inputs)
            return plan.start(stored, tuple(fetch))

    def profile(self, inputs: Sequence[np.ndarray | DeviceTensor]) -> list[tuple[str, int]]:
        """(label, nanoseconds on the GPU) of every dispatch of one call; see `Plan.profile`."""
        with self._states.told():
            plan, stored = self._ready(inputs)
            return plan.profile(stored)

    def _ready(self, inputs: Sequence[np.ndarray | DeviceTensor]) -> tuple[Plan, list[np.ndarray | DeviceTensor]]:
        by_index = dict(zip(self.graph.inputs, inputs, strict=False))
        sizes = []
        for given in (by_index[index] for index in self.graph.sizes if index in by_index):
            # A value that decides shapes is needed here.
            sizes.append(int(given.numpy() if isinstance(given, DeviceTensor) else given))
        plan = self.plan([tuple(array.shape) for array in inputs], sizes)
        stored = [
            self._stored(array, self.graph.values[index].dtype, f"input {position}", plan.device)
            for position, (index, array) in enumerate(zip(self.graph.inputs, inputs, strict=True))
        ]
        return plan, stored

    def _stored(
        self, array: np.ndarray | DeviceTensor, dtype: str, what: str, device: Device
    ) -> np.ndarray | DeviceTensor:
        if not isinstance(array, DeviceTensor):
            array = np.asarray(array)
            return to_storage(array, dtype, what, is_packed(dtype, array.size))
        if array.dtype != np.dtype(dtype):
            raise ShapeError(f"{what} is {array.dtype}, expected {dtype}")
        if array.device is not device:
            raise DeviceError(f"{what} is a tensor of another GPU device, or of one that was lost: give an array")
        _ = array.buffer  # raises for a closed one, before anything is submitted
        return array

    def plan(self, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int] = ()) -> Plan:
        """The plan for these input shapes (and values of the inputs that are sizes). Raises `ShapeError`."""
        env = self.graph.bind(shapes, sizes)
        device = get_device()
        with device.lock:
            if self._resources is None or self._resources.device is not device:
                self._plans.clear()
                self._latest = None
                if "shader-f16" not in device.features and any(s.dtype == "float16" for s in self.graph.values):
                    raise DeviceError(f"{device.name} has no shader-f16: export with --dtype fp32 for it")
                self._resources = DelegateResources(device, self.graph, self._constant_bytes, self._states)
            key = (tuple(shapes), tuple(sizes))
            plan = self._plans.get(key)
            if plan is None:
                can = capabilities(device)
                with device.compiling() as compile_soon:
                    lowered = lower_graph(self.graph, env, can, lambda d: compile_soon(d.code, d.kinds, d.label))
                plan = Plan(lowered, self._resources, self._keep_inputs)
                self._plans[key] = plan
                if len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
            if plan is not self._latest:
                for other in self._plans.values():
                    if other is not plan:
                        other.let_go()
                self._latest = plan
            self._plans.move_to_end(key)
            return plan

    @property
    def weight_bytes(self) -> int:
        """Bytes of the method's constants, as the GPU stores them."""
        total = 0
        for spec in {spec.constant: spec for spec in self.graph.values if spec.is_constant}.values():
            total += math.prod(spec.concrete({})) * STORAGE_BYTES[STORAGE[spec.dtype]]
        return total

    def close(self) -> None:
        """Frees plans and weights. States belong to the program's `StateStore`."""
        self._plans.clear()
        self._latest = None
        self._resources = None

    def _constant_bytes(self, spec: TensorSpec) -> list[memoryview]:
        """The bytes of a constant, in as many pieces as were joined for it."""
        assert spec.constant is not None
        pieces = []
        for key in joined_sources(spec.constant):
            try:
                pieces.append(memoryview(self._get_data(key)).cast("B"))
            except (KeyError, LookupError) as error:
                raise BlobError(f"the program has no data for weight {key!r}") from error
        found, expected = sum(map(len, pieces)), math.prod(spec.concrete({})) * ITEM_BYTES[spec.dtype]
        # An empty constant has a byte in the file.
        if found < expected or (len(pieces) > 1 and found > expected):
            raise BlobError(f"weight {spec.constant!r} has {found} bytes, expected {expected}")
        return pieces if len(pieces) > 1 else [pieces[0][:expected]]


def _refusal(graph: Graph, node: Node) -> str | None:
    """What the partitioner would have said of this node, whose arguments may be anything."""
    from backend.ops import registry

    try:
        return registry.refusal(graph.call(node))
    except Exception as error:
        return f"malformed arguments ({type(error).__name__}: {error})"


class DelegateResources:
    """Weights, results computed from weights, states and scratch memory on one device."""

    def __init__(
        self, device: Device, graph: Graph, constant_bytes: Callable[[TensorSpec], list[memoryview]], states: StateStore
    ):
        self.device = device
        self.static: dict[str, Any] = {}
        self._constants: dict[str, Any] = {}
        self._constant_bytes = constant_bytes
        self.states = states
        self._planned = False
        self._by_constant = {spec.constant: spec for spec in graph.values if spec.is_constant}
        self._by_state = {spec.state: spec for spec in graph.values if spec.state is not None}

    def stored(self, buffer: Buffer, keep: bool = True) -> Any:
        if buffer.kind == "state":
            spec = self._by_state[buffer.key]
            pieces = [] if spec.constant is None else self._constant_bytes(spec)
            initial = self._as_stored(spec, pieces[0]).tobytes() if pieces else None
            return self.states.get(self.device, spec, buffer.nbytes, initial)
        if buffer.key in self._constants:
            return self._constants[buffer.key]
        spec = self._by_constant[buffer.key]
        handle = self.device.buffer(buffer.nbytes, f"weight {spec.constant}")
        offset = 0
        for data in self._constant_bytes(spec):
            piece = self._as_stored(spec, data).reshape(-1).view(np.uint8).data
            self.device.write(handle, piece, offset)
            offset += len(piece)
            release_pages(data)  # the GPU has it now, often in the same memory
        if keep:
            self._constants[buffer.key] = handle
        return handle

    def _as_stored(self, spec: TensorSpec, data: memoryview) -> np.ndarray:
        return to_storage(np.frombuffer(data, dtype=spec.dtype), spec.dtype, f"weight {spec.constant}")

    def scratch(self, sizes: Sequence[int]) -> list[Any]:
        first, self._planned = not self._planned, True
        return self.states.scratch(self.device, sizes, exact=first)
