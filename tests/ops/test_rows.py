"""pytest tests/ops/test_rows.py: what works along an axis, with the lanes that a GPU and a processor give a row.

Tolerances: sums of n numbers of size 1 in float32, off by some roundings of their size, sqrt(n).
"""

from __future__ import annotations

import pytest
import torch

from backend.ops import rows
from backend.runtime.capabilities import Capabilities
from tests.ops.harness import check_op


class _Device:
    def __init__(self, on_processor: bool) -> None:
        self.capabilities = Capabilities(on_processor=on_processor)


@pytest.fixture(params=["gpu", "processor"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "wants_few_lanes", lambda b: request.param == "processor")


def test_lanes_of_a_row() -> None:
    processor, gpu = _Device(True), _Device(False)
    lanes = [rows.Rows(100, n, 1).geometry(processor)[0]["lanes"] for n in (1, 33, 600, 3000, 9000, 300000)]
    assert lanes == [1, 4, 8, 16, 64, 256]
    assert rows.Rows(100, 1024, 1).geometry(gpu)[0] == {"workgroup": 256, "lanes": 256, "minor": False, "flat": False}
    assert rows.Rows(9216, 1024, 1).geometry(gpu)[0] == {"workgroup": 128, "lanes": 64, "minor": False, "flat": False}
    many = [rows.Rows(1024, n, 1).geometry(gpu) for n in (1, 5, 96, 512, 1025, 2049)]
    assert [(found["lanes"], groups) for found, groups in many] == [
        (1, 16), (8, 128), (16, 256), (64, 512), (128, 1024), (256, 1024)
    ]  # fmt: skip
    for device in (processor, gpu):
        for inner in (1, 5):
            constants, groups = rows.Rows(7, 700, inner).geometry(device)
            assert groups * (constants["workgroup"] // constants["lanes"]) >= 7 * inner


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("n", [3, 40, 600, 3001, 20000])
def test_softmax_and_norms(n: int) -> None:
    x, weight, bias = torch.randn(5, n) * 3, torch.randn(n), torch.randn(n)
    for name in ("softmax", "log_softmax"):
        check_op(f"aten.{name}.int", x, -1, atol=2e-5, rtol=1e-5)
        check_op(f"aten.{name}.int", x.reshape(1, 5, n).mT.contiguous(), 1, atol=2e-5, rtol=1e-5)
    check_op("aten.logsumexp.default", x, [1], atol=1e-5, rtol=1e-5)
    check_op("aten.layer_norm.default", x + 100, [n], weight, bias, atol=2e-4, rtol=1e-5)
    check_op("aten.rms_norm.default", x, [n], weight, 1e-5, atol=2e-5, rtol=1e-5)
    hidden = torch.full((2, n), -torch.inf)
    hidden[1, n - 1] = 0.0
    check_op("aten.softmax.int", hidden, -1)  # NaN throughout, and a single 1


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("n", [3, 5, 96, 300, 1500])
def test_many_rows(n: int) -> None:
    """They get fewer lanes on a GPU; the last workgroup is not full."""
    x, weight, bias = torch.randn(1031, n) * 3, torch.randn(n), torch.randn(n)
    check_op("aten.softmax.int", x, -1, atol=2e-5, rtol=1e-5)
    check_op("aten.layer_norm.default", x, [n], weight, bias, atol=2e-5, rtol=1e-5)
    check_op("aten.rms_norm.default", x, [n], weight, 1e-5, atol=2e-5, rtol=1e-5)
    check_op("aten.amax.default", x, [1])
    check_op("aten.argmax.default", x, 1)
    check_op("aten.cumsum.default", x, 1, atol=1e-6 * n + 2e-6, rtol=1e-5)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("n", [3, 40, 600, 3001, 20000])
@pytest.mark.parametrize("inner", [1, 3])
def test_reductions(n: int, inner: int) -> None:
    x = torch.randn(3, n, inner)
    sums = {"atol": 2e-6 * n**0.5 + 1e-6 * n**0.5, "rtol": 1e-5}
    check_op("aten.sum.dim_IntList", x, [1], **sums)
    check_op("aten.mean.dim", x, [1], atol=1e-5, rtol=1e-5)
    check_op("aten.amax.default", x - 9, [1])  # idle lanes do not count as 0
    check_op("aten.max.dim", (x * 4).round(), 1)  # the first of equals
    check_op("aten.argmin.default", x, 1)
    check_op("aten.var.correction", x + 30, [1], atol=1e-4, rtol=1e-4)
    check_op("aten.cumsum.default", x, 1, atol=2e-6 * n, rtol=1e-5)
    check_op("aten.sum.dim_IntList", (x * 9).int(), [1])
