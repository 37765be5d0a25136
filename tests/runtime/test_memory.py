"""How much memory weights take: pytest tests/runtime/test_memory.py

On a processor's adapter the GPU's memory is the process's own, so a second copy of the weights, be it staging memory,
pages of the file or what was computed from them, shows in the peak of the process.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from backend.blob import to_blob
from backend.graph import Graph, Node, Ref, TensorSpec
from backend.runtime.delegate import Delegate
from backend.runtime.hostdata import release_pages

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS, DEPTH, COLUMNS = 8, 2048, 3072  # 24 MiB each
ALLOWED = (
    112 << 20
)  # beside the weights: what is staged, one weight's pages of the file, some that are computed at once

SCRIPT = """
import mmap, sys
from pathlib import Path
import numpy as np
from backend.runtime.delegate import Delegate
from zoo.peak import own_peak

folder = Path(sys.argv[1])
for size in ("small", "large"):
    with open(folder / f"{size}.bin", "rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    weights = {f"w{i}": data[at : at + len(data) // 8] for i, at in enumerate(range(0, len(data), len(data) // 8))}
    before = own_peak()
    delegate = Delegate((folder / f"{size}.blob").read_bytes(), weights.__getitem__)
    (out,) = delegate.execute([np.ones((1, delegate.graph.values[0].shape[1]), np.float32)])
    print(own_peak() - before, out.min(), out.max())
    delegate.close()
"""


def products(depth: int, columns: int, computed: bool) -> Graph:
    """Σ x @ w of all weights, or of exp(w), which is computed from constants alone."""
    graph = Graph()
    x = graph.add_value(TensorSpec("float32", (1, depth)))
    total = None
    for index in range(WEIGHTS):
        w = graph.add_value(TensorSpec("float32", (depth, columns), f"w{index}"))
        if computed:
            made = graph.add_value(TensorSpec("float32", (depth, columns)))
            graph.nodes.append(Node("aten.exp.default", {"self": Ref(w)}, (made,)))
            w = made
        y = graph.add_value(TensorSpec("float32", (1, columns)))
        graph.nodes.append(Node("aten.mm.default", {"self": Ref(x), "mat2": Ref(w)}, (y,)))
        if total is not None:
            both = graph.add_value(TensorSpec("float32", (1, columns)))
            graph.nodes.append(Node("aten.add.Tensor", {"self": Ref(total), "other": Ref(y), "alpha": 1}, (both,)))
            y = both
        total = y
    graph.inputs, graph.outputs = [x], [y]
    return graph


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of one process is Linux's to tell")
@pytest.mark.parametrize("computed", [False, True], ids=["read", "computed from"])
def test_weights_are_in_memory_once(tmp_path: Path, computed: bool) -> None:
    # A small one first: the device, its driver and its compiler are then in memory.
    for size, depth, columns in (("small", 64, 96), ("large", DEPTH, COLUMNS)):
        (tmp_path / f"{size}.blob").write_bytes(to_blob(products(depth, columns, computed)))
        with open(tmp_path / f"{size}.bin", "wb") as file:
            for index in range(WEIGHTS):
                file.write(np.full(depth * columns, index / 8, np.float32).tobytes())
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    grown, low, high = done.stdout.splitlines()[1].split()
    values = np.arange(WEIGHTS) / 8
    expected = DEPTH * (np.exp(values) if computed else values).sum()
    np.testing.assert_allclose([float(low), float(high)], expected, rtol=1e-5)
    weights = WEIGHTS * DEPTH * COLUMNS * 4
    assert int(grown) < weights + ALLOWED, f"{int(grown) / weights:.2f} times the weights"


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system does not release mapped pages")
@pytest.mark.parametrize(("start", "size"), [(0, 100_000), (4097, 1), (12_345, 54_321), (99_999, 1), (7, 0)])
def test_released_pages_read_the_same(tmp_path: Path, start: int, size: int) -> None:
    content = np.random.default_rng(0).bytes(100_000)
    path = tmp_path / "weights"
    path.write_bytes(content)
    with open(path, "rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    assert bytes(view) == content
    release_pages(view[start : start + size])
    assert bytes(view) == content


def test_memory_that_is_no_file_is_left_alone(tmp_path: Path) -> None:
    content = bytes(range(256)) * 64
    path = tmp_path / "weights"
    path.write_bytes(bytes(len(content)))
    anonymous = mmap.mmap(-1, len(content))
    with open(path, "rb") as file:
        private = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for own in (anonymous, private, bytearray(len(content))):
        own[:] = content
        release_pages(memoryview(own).toreadonly())
        assert bytes(own) == content


def test_a_weight_that_is_read_and_computed_from() -> None:
    """It is needed once for what is computed from it, and at every call."""
    graph = Graph()
    x = graph.add_value(TensorSpec("float32", (1, 4)))
    w = graph.add_value(TensorSpec("float32", (4, 4), "w"))
    made = graph.add_value(TensorSpec("float32", (4, 4)))
    y = graph.add_value(TensorSpec("float32", (1, 4)))
    z = graph.add_value(TensorSpec("float32", (1, 4)))
    graph.inputs, graph.outputs = [x], [y, z]
    graph.nodes = [
        Node("aten.exp.default", {"self": Ref(w)}, (made,)),
        Node("aten.mm.default", {"self": Ref(x), "mat2": Ref(made)}, (y,)),
        Node("aten.mm.default", {"self": Ref(x), "mat2": Ref(w)}, (z,)),
    ]
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    delegate = Delegate(to_blob(graph), {"w": weight.tobytes()}.__getitem__)
    try:
        for _ in range(2):
            first, second = delegate.execute([np.ones((1, 4), np.float32)])
            np.testing.assert_allclose(first[0], np.exp(weight).sum(0), rtol=1e-5)
            np.testing.assert_allclose(second[0], weight.sum(0), rtol=1e-4, atol=1e-6)
    finally:
        delegate.close()
