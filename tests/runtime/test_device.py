"""The device and what is written for it: pytest tests/runtime/test_device.py"""

from __future__ import annotations

import pytest
from wgpu.backends.wgpu_native._ffi import ffi

from backend.blob import to_blob
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.runtime import c_types
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import Capabilities
from backend.runtime.delegate import Delegate
from backend.runtime.device import WRITE, Device, choose_adapter, get_device
from backend.runtime.errors import DeviceError
from tests.passes.make import Maker


def test_f32_kernels_run_where_shader_f16_is_missing() -> None:
    """`enable f16` in a kernel that does not need it is refused by adapters without the feature."""
    spec = TensorSpec("float32", (3, 5))
    graph = Graph([spec, spec], [0], [1], [])
    args = {"input": Ref(0), "normalized_shape": [5], "weight": None, "bias": None, "eps": 1e-5}
    graph.nodes.append(Node("aten.layer_norm.default", args, (1,)))
    for dispatch in lower_graph(graph, {}, Capabilities()).dispatches:
        assert "enable f16" not in dispatch.code


def test_unknown_adapter_lists_those_there_are() -> None:
    with pytest.raises(DeviceError, match="matches no adapter"):
        choose_adapter("no such adapter")


def test_opengl_is_no_adapter() -> None:
    assert get_device().adapter.info["backend_type"] not in ("OpenGL", "OpenGLES")


def test_too_large_a_buffer_is_refused_before_allocation() -> None:
    """R4: more than the adapter's limit is one clear error."""
    device = get_device()
    with pytest.raises(DeviceError, match="MiB"):
        device.buffer(device.limit("max-storage-buffer-binding-size") + 4, "a weight")


def test_limits_are_the_adapters_not_the_defaults() -> None:
    """R4: WebGPU's default is 256 invocations and 128 MiB bindings; what the adapter has is asked for."""
    device = get_device()
    for name in ("max-compute-invocations-per-workgroup", "max-storage-buffer-binding-size"):
        assert device.limit(name) == device.adapter.limits[name]


def test_shader_that_does_not_compile_names_the_kernel_and_the_adapter() -> None:
    device = get_device()
    with pytest.raises(DeviceError) as caught:
        device.pipeline("@compute @workgroup_size(1) fn main() { let x: f32 = 1u; }", (), "aten.bad:kernel")
    assert "aten.bad:kernel" in str(caught.value) and device.name in str(caught.value)


def kernel(number: float) -> str:
    return (
        "@group(0) @binding(0) var<storage, read_write> out: array<f32>;\n"
        f"@compute @workgroup_size(1) fn main() {{ out[0] = {number}; }}"
    )


def compile_side_by_side(wanted: list[tuple[str, tuple[str, ...], str]]) -> None:
    with get_device().compiling() as compile_soon:
        for item in [*wanted, *wanted]:
            compile_soon(*item)


def test_pipelines_are_compiled_side_by_side_and_once() -> None:
    device = get_device()
    wanted = [(kernel(1000.5 + i), (WRITE,), f"kernel {i}") for i in range(5)]
    compile_side_by_side(wanted)
    made = [device._pipelines[code, slots] for code, slots, _ in wanted]
    assert [device.pipeline(*item) for item in wanted] == made
    compile_side_by_side(wanted)
    assert [device.pipeline(*item) for item in wanted] == made


def test_one_that_does_not_compile_does_not_spoil_the_others() -> None:
    device = get_device()
    wanted = [(kernel(2000.5 + i), (WRITE,), f"kernel {i}") for i in range(4)]
    wanted[2] = ("@compute @workgroup_size(1) fn main() { let x: f32 = 1u; }", (WRITE,), "aten.bad:kernel")
    compile_side_by_side(wanted)
    assert all((code, slots) not in device._pipelines for code, slots, _ in wanted)
    for position, item in enumerate(wanted):
        if position != 2:
            device.pipeline(*item)
    with pytest.raises(DeviceError, match=r"aten\.bad:kernel"):
        device.pipeline(*wanted[2])


def test_all_kernels_of_a_method_are_compiled_when_its_graph_is_lowered() -> None:
    m = Maker()
    x = m.input(4, 8)
    m.graph.outputs = [m("cumsum.default", self=m("_softmax.default", self=x, dim=1, half_to_float=False), dim=0).value]
    delegate = Delegate(to_blob(m.graph), {}.__getitem__)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Device, "pipeline", lambda self, code, slots, label: self._pipelines[code, tuple(slots)])
            plan = delegate.plan([(4, 8)])
        assert len(plan.steps) == 2
    finally:
        delegate.close()


def test_c_types_from_tables_are_those_that_cffi_parses() -> None:
    parser = ffi._parser
    texts = [
        text
        for name in ("WGPULimits", "WGPUBuffer", "WGPUBindGroupEntry", "WGPUFeatureName", "uint8_t", "char", "intptr_t")
        for text in (f"{name} *", f"{name}*", f"{name} []", name)
    ]
    for text in texts:
        found = c_types.simple(parser, text)
        assert found is not None, text
        with ffi._lock:
            parsed = ffi._get_cached_btype(type(parser).parse_type(parser, text))
            assert ffi._get_cached_btype(found) is parsed, text
    for text in ("void(WGPUDevice const *, void *)", "no_such_name *", "WGPULimits **"):
        assert c_types.simple(parser, text) is None
    assert parser.parse_type.__module__ == c_types.__name__
