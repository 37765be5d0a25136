"""pytest tests/cli/test_export.py: the pipeline on the toy, reuse, quantization modes, check."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes import recipe as registry
from recipes.recipe import Comparison, ExportRequest, Method, QuantMode, Recipe, Tolerance, UserError
from zoo import artifact, catalog, quantize
from zoo.check import CheckReport, check, compare
from zoo.export import ExportReport, NotDelegated, ensure_exported, export, make_request, parse_options

LOOSE = Tolerance(0.0, 1e-3, "for the test")


def _export(toy: Recipe, folder: Path, backend: str, **options: str) -> ExportReport:
    return export(toy, make_request(toy, backend, weights="tiny", **options), folder / "toy.pte")


def _run(pte: Path, method: str, *inputs: np.ndarray) -> list[np.ndarray]:
    import torch
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(pte).load_method(method)
    assert program is not None
    return [output.clone().numpy() for output in program.execute([torch.from_numpy(value) for value in inputs])]


def _golden(toy: Recipe, x: np.ndarray) -> np.ndarray:
    """Full precision, in float64."""
    import torch

    module = toy.build(ExportRequest("portable", "tiny")).methods["scale"].module.double()
    return module(torch.from_numpy(x).double()).detach().numpy()


def test_portable_export_and_json_shape(toy: Recipe, tmp_path: Path) -> None:
    report = _export(toy, tmp_path, "portable")
    assert sorted(os.listdir(tmp_path)) == ["toy.assets", "toy.pte"]
    told = json.loads(json.dumps(report.json()))
    assert list(told) == ["model", "backend", "dtype", "qlinear", "path", "bytes", "methods"]
    assert told["bytes"] == (tmp_path / "toy.pte").stat().st_size
    assert set(told["methods"]) == {"scale", "count"}
    for method in told["methods"].values():
        assert method["partitions"] == 0 and method["undelegated"] == method["ops"] > 0
    assert sum(row.count for row in report.refusals if row.method == "scale") == told["methods"]["scale"]["ops"]
    value = artifact.open_artifact(tmp_path / "toy.pte", "toy")
    assert value["sample_rate"] == 24000 and (tmp_path / "toy.assets" / "words.txt").exists()


@pytest.mark.parametrize(
    ("backend", "qlinear"), [("portable", "none"), ("xnnpack", "none"), ("xnnpack", "8da8w"), ("xnnpack", "8da4w")]
)
def test_programs_give_what_eager_gives(toy: Recipe, tmp_path: Path, backend: str, qlinear: str) -> None:
    import torch

    report = _export(toy, tmp_path, backend, qlinear=qlinear)
    if backend == "xnnpack":
        assert report.methods["scale"].partitions >= 1 and report.methods["scale"].undelegated == 0
    assert (set(report.kept) == {"scale.head"}) == (qlinear != "none")
    x = np.linspace(-1, 1, 7 * 64, dtype=np.float32).reshape(7, 64)
    methods = toy.build(ExportRequest("xnnpack", "tiny")).methods
    if qlinear != "none":
        quantize.apply(methods, qlinear, next(mode for mode in toy.quantization[backend] if mode.name == qlinear))
    with torch.no_grad():
        golden = methods["scale"].module(torch.from_numpy(x)).numpy()
    (actual,) = _run(report.path, "scale", x)
    # Dynamic quantization of the activations may round one step apart in the two: 1/255 of their range.
    bound = 1e-6 if qlinear == "none" else 1e-2
    scale = np.abs(golden).max()
    assert np.abs(actual - golden).max() <= bound * scale
    assert (np.abs(actual - _golden(toy, x)).max() > 1e-4 * scale) == (qlinear != "none")


def test_vulkan_exports_with_the_partitioner_of_the_wheel(toy: Recipe, tmp_path: Path) -> None:
    """It does not run here; what it took and what not is reported, the 4-bit linear inside."""
    plain, small = (_export(toy, tmp_path, "vulkan", qlinear=mode) for mode in ("none", "8da4w"))
    assert plain.methods["scale"].partitions == 1 and plain.methods["scale"].undelegated == 0
    assert small.methods["scale"].partitions >= 1 and small.bytes_before is not None
    assert sum(row.count for row in small.refusals) == sum(row.undelegated for row in small.methods.values())
    assert set(small.kept) == {"scale.head"}
    with pytest.raises(UserError, match="export only"):
        check(toy, make_request(toy, "vulkan", weights="tiny"), pte=small.path)


def test_a_backend_that_cannot_take_a_model_is_refused_with_the_reason() -> None:
    recipe = registry.load("nemotron-diarization")
    with pytest.raises(UserError, match="nemotron-diarization cannot be exported for vulkan: the wheel's pass for rot"):
        make_request(recipe, "vulkan", weights="tiny")
    row = next(row for row in catalog.rows([recipe]) if row[1] == "vulkan")
    assert row[2] == "" and row[-1].startswith("not possible: the wheel's pass")
    assert catalog.describe(recipe)["backends"]["vulkan"]["available"] == []


@pytest.mark.slow
@pytest.mark.parametrize("model", ("phonon", "qwen3"))
def test_vulkan_exports_models_with_state(model: str, tmp_path: Path) -> None:
    """Phonon's codec reads a cache in several of the wheel's delegates, which would have given it to one of them."""
    recipe = registry.load(model)
    report = export(recipe, make_request(recipe, "vulkan", weights="tiny", qlinear="4w"), tmp_path / "model.pte")
    assert report.bytes_before is not None and report.bytes < report.bytes_before
    assert all(method.partitions >= 1 for method in report.methods.values())


def test_a_fault_in_another_backend_is_one_clear_error(
    toy: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lower(*_: Any, **__: Any) -> None:
        try:
            raise RuntimeError("expected an int\nand more")
        except RuntimeError as error:
            raise Exception("a pass failed") from error  # as ExecuTorch's pass manager does

    monkeypatch.setattr("executorch.exir.to_edge_transform_and_lower", lower)
    told = (
        r"ExecuTorch's own vulkan backend fails on toy \(RuntimeError: expected an int\); export it for another backend"
    )
    with pytest.raises(UserError, match=told):
        _export(toy, tmp_path, "vulkan")
    with pytest.raises(Exception, match="a pass failed"):
        _export(toy, tmp_path, "webgpu")
    assert list(tmp_path.iterdir()) == []


def test_state_survives_calls_of_other_methods(toy: Recipe, tmp_path: Path) -> None:
    import torch
    from executorch.runtime import Runtime

    report = _export(toy, tmp_path, "portable")
    program = Runtime.get().load_program(report.path)
    count, scale = program.load_method("count"), program.load_method("scale")
    assert count is not None and scale is not None
    totals = []
    for _ in range(3):
        totals.append(float(count.execute([torch.ones(4)])[0][0]))
        scale.execute([torch.full((16, 64), 7.0)])
    assert totals == [2.0, 4.0, 6.0]


def test_fp16_halves_weights_and_inputs(toy: Recipe, tmp_path: Path) -> None:
    report = _export(toy, tmp_path, "portable", dtype="fp16")
    x = np.linspace(-1, 1, 3 * 64, dtype=np.float32).reshape(3, 64)
    (actual,) = _run(report.path, "scale", x.astype(np.float16))
    assert actual.dtype == np.float16
    np.testing.assert_allclose(actual.astype(np.float64), _golden(toy, x), atol=2e-3)


def test_reuse_only_when_it_fits(toy: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    request = make_request(toy, "portable", weights="tiny")
    path = ensure_exported(toy, request)
    assert path == Path("out/toy/toy-portable-fp32-tiny.pte")
    stamp = path.stat().st_mtime_ns
    capfd.readouterr()
    assert ensure_exported(toy, request) == path and path.stat().st_mtime_ns == stamp
    assert "toy weights are random" in capfd.readouterr().err  # a notice is repeated, also without an export
    path.write_bytes(path.read_bytes()[:-1])  # cut short: exported again
    ensure_exported(toy, request)
    assert path.stat().st_mtime_ns != stamp
    stamp = path.stat().st_mtime_ns
    monkeypatch.setattr(artifact, "FORMAT", artifact.FORMAT + 1)
    ensure_exported(toy, request)
    assert path.stat().st_mtime_ns != stamp


def test_a_given_file_must_be_whole_and_of_this_model(toy: Recipe, tmp_path: Path) -> None:
    path = _export(toy, tmp_path, "portable").path
    request = make_request(toy, "portable", weights="tiny")
    assert ensure_exported(toy, request, path) == path
    with pytest.raises(UserError, match="is a program of toy, not of other"):
        ensure_exported(dataclasses.replace(toy, name="other"), request, path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="is damaged: it holds 100 bytes"):
        ensure_exported(toy, request, path)
    (tmp_path / "alone.pte").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no alone\.assets/ beside it"):
        ensure_exported(toy, request, tmp_path / "alone.pte")


def test_weights_identity_follows_files(toy: Recipe, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a")
    before = artifact.weights_identity(toy, str(tmp_path))
    assert before == artifact.weights_identity(toy, str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"ab")
    assert before != artifact.weights_identity(toy, str(tmp_path))
    assert artifact.weights_identity(toy, "auto") == "absent"


def test_choosing_a_cpu_kernel_bounds_no_size(toy: Recipe, tmp_path: Path) -> None:
    """torch takes another convolution above some 40 frames of 512 channels, and would hold what it chose for 2."""
    import torch

    from backend.runtime.program import TensorMeta, read_program

    class Convolution(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv1d(512, 4, 3, padding=1)

        def forward(self, frames: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.conv(frames.transpose(1, 2))
            return out

    def build(request: ExportRequest) -> Any:
        length = torch.export.Dim("length", min=1, max=408)
        method = Method(Convolution(), (torch.randn(1, 2, 512),), ({1: length},))
        return dataclasses.replace(toy.build(request), methods={"scale": method})

    report = _export(dataclasses.replace(toy, build=build), tmp_path, "portable")
    info = read_program(report.path).methods["scale"]
    frames = info.values[info.inputs[0]]
    assert isinstance(frames, TensorMeta) and frames.sizes == (1, 408, 512)
    for length in (408, 41, 40, 2, 1):
        (out,) = _run(report.path, "scale", np.zeros((1, length, 512), np.float32))
        assert out.shape == (1, 4, length)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_failed_export_leaves_nothing(
    toy: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Any
) -> None:
    monkeypatch.chdir(tmp_path)

    def write_assets(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise failure

    def build(request: ExportRequest) -> Any:
        return dataclasses.replace(toy.build(request), write_assets=write_assets)

    broken = dataclasses.replace(toy, build=build)
    expected = KeyboardInterrupt if failure is KeyboardInterrupt else UserError
    with pytest.raises(expected):
        ensure_exported(broken, make_request(broken, "portable", weights="tiny"))
    assert os.listdir(tmp_path) == []


def test_a_broken_promise_of_full_delegation_fails(toy: Recipe, tmp_path: Path) -> None:
    strict = dataclasses.replace(toy, full_delegation=("portable",))
    with pytest.raises(NotDelegated, match=r"count \d+, scale \d+") as caught:
        _export(strict, tmp_path, "portable")
    assert {row.op for row in caught.value.refusals} >= {"aten.addmm.default", "aten.relu.default"}
    assert os.listdir(tmp_path) == []


def test_q3_modes_of_the_gpu_backend_come_from_its_own_list(toy: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantize.available(toy, "webgpu") == ("none", "4w")
    make_request(toy, "webgpu", qlinear="4w")
    monkeypatch.setattr("backend.quantization.MODES", {"8w": None})
    with pytest.raises(UserError, match=r"declared for toy on webgpu, but webgpu has no kernel.*work there: none$"):
        make_request(toy, "webgpu", qlinear="4w")


def test_modes_of_embeddings_and_options(toy: Recipe) -> None:
    rich = dataclasses.replace(
        toy,
        embeddings={"webgpu": (QuantMode("4w"), QuantMode("8da4w")), "xnnpack": (QuantMode("8w"),)},
        options={"context": ("auto", "64"), "kind": ("a", "b")},
    )
    request = make_request(rich, "webgpu", qembedding="4w", options=parse_options(["kind=b", " context = 64 "]))
    assert request.qembedding == "4w" and request.options == (("context", "64"), ("kind", "b"))
    plain = make_request(rich, "webgpu")
    path, other = artifact.default_path(rich, request), artifact.default_path(rich, plain)
    assert path.name == "toy-webgpu-fp32-embedding=4w-context=64-kind=b.pte" and other.name == "toy-webgpu-fp32.pte"
    assert artifact.key(rich, request)["qembedding"] == "4w" and "qembedding" not in artifact.key(rich, plain)
    assert quantize.available(rich, "webgpu", "embedding") == ("none", "4w")  # a table has no activations
    for backend, mode in (("webgpu", "8da4w"), ("xnnpack", "8w")):
        with pytest.raises(UserError, match=r"declared for toy on .* has no kernel.*modes that work there: none"):
            make_request(rich, backend, qembedding=mode)
    for settings in (["kind"], ["=b"], ["kind="]):
        with pytest.raises(UserError, match="give NAME=VALUE"):
            parse_options(settings)
    with pytest.raises(UserError, match="gives kind twice: a and b"):
        parse_options(["kind=a", "kind=b"])


def test_keeps_must_meet_a_module(toy: Recipe) -> None:
    methods = toy.build(ExportRequest("xnnpack", "tiny")).methods
    with pytest.raises(UserError, match="keeps nowhere in full precision"):
        quantize.apply(methods, "8da8w", QuantMode("8da8w", {"nowhere": "test"}))
    methods = toy.build(ExportRequest("xnnpack", "tiny")).methods
    with pytest.raises(UserError, match="every linear"):
        quantize.apply(methods, "8da8w", QuantMode("8da8w", {"scale.*": "test"}))


def test_a_group_that_does_not_divide_is_kept_and_told(toy: Recipe) -> None:
    methods = toy.build(ExportRequest("xnnpack", "tiny")).methods
    import torch

    methods["scale"].module.head = torch.nn.Linear(33, 1)
    done = quantize.apply(methods, "8da4w", QuantMode("8da4w"))
    assert done.changed == ["scale.body"]
    assert done.kept == {"scale.head": "K = 33 is not a multiple of the group of 32"}


def _row(actual: Any, golden: Any) -> Comparison:
    return Comparison("y", np.asarray(actual), np.asarray(golden), LOOSE)


def test_compare() -> None:
    good = compare(_row([1.0, 2.0015], [1.0, 2.0]))
    assert good.passed and good.max_abs == pytest.approx(1.5e-3) and good.tolerance == pytest.approx(2e-3)
    assert good.max_rel == pytest.approx(7.5e-4)
    assert not compare(_row([1.0, 2.1], [1.0, 2.0])).passed
    assert compare(_row([0.0], [0.0])).passed
    assert compare(_row(np.zeros((0, 4)), np.zeros((0, 4)))).passed


@pytest.mark.parametrize(
    ("actual", "golden", "passed"),
    [
        ([1.0, np.nan], [1.0, 2.0], False),
        ([1.0, 2.0], [1.0, np.nan], False),
        ([1.0, np.nan], [1.0, np.nan], True),
        ([1.0, np.inf], [1.0, np.inf], True),
        ([1.0, np.inf], [1.0, -np.inf], False),
        ([1.0], [1.0, 2.0], False),
    ],
)
def test_compare_is_strict_about_nan_infinity_and_shape(actual: Any, golden: Any, passed: bool) -> None:
    outcome = compare(_row(actual, golden))
    assert outcome.passed is passed
    told = CheckReport("toy", "portable", {"y": outcome}).json()
    assert told["passed"] is passed
    json.dumps(told, allow_nan=False)


def test_check_json_shape() -> None:
    told = CheckReport("toy", "portable", {"y": compare(_row([1.0], [1.0]))}).json()
    assert told == {
        "model": "toy",
        "backend": "portable",
        "passed": True,
        "outputs": {"y": {"max_abs": 0.0, "max_rel": 0.0, "tolerance": 1e-3, "passed": True}},
    }
    assert not CheckReport("toy", "portable", {}).passed
