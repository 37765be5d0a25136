"""pytest tests/cli/test_report.py: reports of two machines become one page."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.recipe import UserError
from tests.cli.harness import one_error_line
from zoo.bench import machine, plot
from zoo.bench.report import PAGE, write_page

Zoo = Callable[..., "subprocess.CompletedProcess[str]"]
ROW = {"model": "toy", "workload": "call", "runs": 3, "unit": "call", "s_per_unit": 0.002, "units_per_s": 500.0}
MODEL: dict[str, Any] = {
    "adapter": "Voodoo",
    "model": "toy",
    "request": {"weights": "tiny", "dtype": "fp32", "qlinear": "4w", "qembedding": "none", "options": {"size": "s"}},
    "machine": {**machine.describe(), "adapter": {"device": "Voodoo", "api": "Vulkan", "type": "GPU", "driver": "3|1"}},
    "results": [
        ROW | {"side": "webgpu", "median_ms": 2.0, "min_ms": 1.5, "times_first": 1.0},
        ROW
        | {"side": "tinygrad", "median_ms": 6.0, "min_ms": 5.5, "times_first": 3.0, "max_abs_diff": 2e-6}
        | {"max_abs_ours": 4.5, "note": "adapter: Voodoo"},
        {"model": "toy", "workload": "call", "side": "cuda", "missing": "PyTorch sees no CUDA device"},
        {"model": "toy", "workload": "again", "side": "cuda", "missing": "PyTorch sees no CUDA device"},
    ],
    "programs": [{"backend": "webgpu", "bytes": 2_500_000, "methods": {"call": {"ops": 7, "dispatches": 3}}}],
}
KERNELS: dict[str, Any] = {
    "adapter": "Banshee",
    "model": "kernels",
    "machine": {**MODEL["machine"], "adapter": {"device": "Banshee", "api": "Metal", "type": "GPU", "driver": ""}},
    "copy_gb_s": 100.0,
    "results": [
        {
            "kernel": "gemm 2x2x2",
            "templates": ["matmul"],
            "gpu_ms": 2.0,
            "wall_ms": 2.5,
            "gb_s": 25.0,
            "tflop_s": 1.5,
            "peers_ms": {"tinygrad": 3.0},
            "peers_max_abs_diff": {"tinygrad": 1e-6},
            "peers_missing": {"onnxruntime-webgpu": "no adapter"},
        }
    ],
}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """The model on two machines, and the kernels."""
    other = copy.deepcopy(MODEL)
    other["machine"] = KERNELS["machine"]
    paths = []
    for number, report in enumerate((MODEL, KERNELS, other)):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(report))
    return paths


def test_page(files: list[Path], tmp_path: Path, zoo: Zoo) -> None:
    page = tmp_path / "page"
    page.mkdir()
    (page / "tried.toml").write_text('[[tried]]\nwhere = "gemm"\nwhat = "x"\nfigures = "2 | 3 ms"\non = "Voodoo"\n')
    done = zoo("report", *map(str, files), "--page", str(page), "--no-plots")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(page / PAGE)]
    text = (page / PAGE).read_text()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Benchmarks",
        "## Machines",
        "## toy",
        "### Voodoo (machine 1): fp32, 4w, size=s, weights tiny",
        "### Banshee (machine 2): fp32, 4w, size=s, weights tiny",
        "## kernels",
        "### Banshee (machine 2)",
        "## What was tried and did not help",
    ]
    for line in (
        "| call | tinygrad | 6 | 5.5 | 3 | 3 | 500 call/s | 2.0e-06 of 4.5 | adapter: Voodoo |",
        "- without cuda (call, again): PyTorch sees no CUDA device",
        "webgpu: 2.5 MB; `call` 7 operators, 3 dispatches.",
        "| gemm 2x2x2 | 2 | 2.5 | 1.500 TFLOP/s | 25 % | 3 (1.50, 1e-06) |",
        "- without onnxruntime-webgpu (gemm 2x2x2): no adapter",
        "| gemm | x | 2 \\| 3 ms | Voodoo |",
    ):
        assert line in text.splitlines(), line
    assert "| 1 | Voodoo | Vulkan 3\\|1 | " in text and f"torch {machine.describe()['versions']['torch']}" in text
    assert sorted(path.name for path in page.iterdir()) == [PAGE, "tried.toml"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "no JSON document"), ("[]", "was not written by"), ('{"traces": [], "model": "toy"}', "was not written by")],
)
def test_no_report(files: list[Path], tmp_path: Path, content: str, reason: str) -> None:
    files[1].write_text(content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=f"{files[1].name}.*{reason}"):
        write_page(files, tmp_path, plots=False)
    assert sorted(tmp_path.iterdir()) == before


def test_mistakes(files: list[Path], tmp_path: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    one_error_line(zoo("report", "none.json", "--page", "."), "cannot read none.json")
    one_error_line(zoo("report", str(files[0]), "--page", "gone", "--no-plots"), "folder gone does not exist")
    (tmp_path / "tried.toml").write_text('[[tried]]\nwhere = "gemm"\n')
    with pytest.raises(UserError, match="must have where, what, figures, on"):
        write_page(files, tmp_path, plots=False)
    (tmp_path / "tried.toml").unlink()
    monkeypatch.setattr("zoo.bench.plot.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'webgpu-zoo\[bench\]', or give --no-plots"):
        write_page(files, tmp_path)
    assert not (tmp_path / PAGE).exists()


def test_bars() -> None:
    assert plot.bars(MODEL) == [("call: webgpu", 1.0, True), ("call: tinygrad", 3.0, False)]
    assert plot.bars(KERNELS) == [("gemm 2x2x2: webgpu", 1.0, True), ("gemm 2x2x2: tinygrad", 1.5, False)]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib: extra bench")
def test_plots_are_the_same_each_time(files: list[Path], tmp_path: Path) -> None:
    write_page(files, tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    assert set(first) == {"toy.svg", "kernels.svg"} and b"tinygrad" in first["toy.svg"]
    write_page(files, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")} == first
    assert "![toy](toy.svg)" in (tmp_path / PAGE).read_text()
