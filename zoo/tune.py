"""`zoo tune`: measures the tiles of matrix products on the present adapter, and keeps what a rule needs of that.

The rule is `backend.ops.tiles.Costs`: a product's time by a few terms with coefficients of the adapter and of each
tile. They are fitted, by non-negative least squares of relative errors, to times of `FITTED`; whether the rule is
better for it is measured on `HELD_OUT`, which the fit never sees.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from backend.graph import Graph, Node, Ref, TensorSpec
from backend.ops import calibration, tiles
from backend.ops.tiles import SHIPPED, TILES, Choice, Costs, Rate, Sizes, Tile
from backend.runtime.builder import lower_graph
from backend.runtime.capabilities import capabilities
from backend.runtime.delegate import DelegateResources
from backend.runtime.device import Device, get_device
from backend.runtime.plan import Plan
from backend.runtime.state import StateStore
from recipes.recipe import UserError
from zoo.bench.timing import Timer
from zoo.console import progress, step

# rows, depth, columns: from one that fills a GPU to ones of few groups, long and short sums.
FITTED = (
    (2048, 2048, 2048), (1024, 1024, 1024), (640, 512, 2048), (640, 2048, 512), (256, 512, 512), (128, 1024, 4096),
    (512, 3072, 1024), (100, 768, 768), (384, 256, 1536), (64, 4096, 256), (4096, 384, 1536), (2304, 512, 2048),
)  # fmt: skip
HELD_OUT = (
    (1536, 2048, 1536), (512, 1024, 6144), (640, 512, 512), (77, 768, 3072), (197, 768, 768), (1500, 384, 1536),
    (128, 128, 128), (333, 1000, 500), (16384, 192, 768), (4900, 384, 1152),
)  # fmt: skip
TRIED = (1, 2, 4, 8, 16)  # parts
MOST_GROUPS = 1280  # with more groups than that, parts of depth say nothing new
SECONDS = 0.003  # of work between two timestamps
ROUNDS = 3
MOST_REPEATS = 200
PROCESSORS = 256  # at most, that the fit looks for
LEAST_GAIN = 1.01  # times differ by so much from one run to the next
EDGES = (4, 8, 12, 16, 24, 32, 48, 64, 96)
FIRST_EDGE = 16
TURNS = 8  # of the fit, at most
CROWDS = (1, 2, 4, 8)  # groups on a processor from which on they are first taken to be bound by sharing it


@dataclass(frozen=True)
class Sample:
    """What one product took, in µs."""

    sizes: Sizes
    choice: Choice
    time: float


@dataclass(frozen=True)
class Row:
    """A held-out product under the shipped rule and under the new one; ms."""

    shape: tuple[int, int, int]
    before: Choice
    before_ms: float
    after: Choice
    after_ms: float


@dataclass(frozen=True)
class Report:
    """path: where the calibration was written, or None where the shipped rule is as good."""

    adapter: str
    costs: Costs
    error: float
    rows: tuple[Row, ...]
    seconds: float
    path: Path | None

    @property
    def gain(self) -> float:
        """How many times as fast the held-out products are, on geometric average."""
        return math.exp(statistics.fmean(math.log(row.before_ms / row.after_ms) for row in self.rows))

    def json(self) -> dict[str, Any]:
        return {
            "adapter": self.adapter,
            "path": self.path and str(self.path),
            "seconds": self.seconds,
            "relative_error": self.error,
            "gain": self.gain,
            "processors": self.costs.processors,
            "held_out": [
                {
                    "shape": list(row.shape),
                    "before": describe(row.before),
                    "before_ms": row.before_ms,
                    "after": describe(row.after),
                    "after_ms": row.after_ms,
                }
                for row in self.rows
            ],
        }


def describe(choice: Choice) -> str:
    return choice.tile.name + (f" parts {choice.parts}" if choice.parts > 1 else "")


def tune() -> Report:
    """Measures, fits and, where that is faster on `HELD_OUT`, writes the adapter's calibration.

    Raises `UserError` for a processor and where the cache folder cannot be written.
    """
    started = time.perf_counter()
    device = get_device()
    check(device)
    target = calibration.path(device.adapter)
    able = tiles.fitting(capabilities(device))
    samples = measure(device, able)
    with step("the rule that explains their times"):
        costs, error = fit(samples, able)
    rows = []
    with progress("products that the fit has not seen", len(HELD_OUT), "product") as advance:
        for shape in HELD_OUT:
            rows.append(_compare(device, shape, costs, able))
            advance()
    report = Report(device.name, costs, error, tuple(rows), time.perf_counter() - started, target)
    try:
        if report.gain > LEAST_GAIN:
            calibration.save(device.adapter, costs)
            return report
        calibration.clear(device.adapter)
    except OSError as error_:
        raise UserError(f"cannot write {target}: {error_.strerror or error_}") from error_
    return replace(report, path=None)


def clear() -> tuple[Path, bool]:
    """Removes the adapter's calibration: where it is, and whether there was one. Raises `UserError`."""
    adapter = get_device().adapter
    target = calibration.path(adapter)
    try:
        return target, calibration.clear(adapter)
    except OSError as error:
        raise UserError(f"cannot remove {target}: {error.strerror or error}") from error


def check(device: Device) -> None:
    """Raises `UserError` where there is nothing to tune."""
    if device.is_cpu:
        raise UserError(f"{device.name} is a processor, whose products do not go by tiles: there is nothing to tune")


def measure(device: Device, able: Sequence[Tile]) -> list[Sample]:
    """Every tile on every shape of `FITTED`, in some numbers of parts."""
    samples = []
    with progress("products by every tile", len(FITTED), "product") as advance:
        for rows, depth, cols in FITTED:
            product = _Product(device, rows, depth, cols)
            wanted = [
                choice
                for choice in tiles.choices(product.sizes, able)
                if choice.parts in TRIED
                and (choice.parts == 1 or choice.parts * choice.tile.count(rows, cols) <= MOST_GROUPS)
            ]
            samples += [Sample(product.sizes, choice, product.time(choice)) for choice in wanted]
            advance()
    return samples


class _Product:
    """x [rows, depth] times the transpose of a weight [cols, depth], on the GPU, by whatever tile is asked for."""

    def __init__(self, device: Device, rows: int, depth: int, cols: int):
        self.device = device
        self.sizes: Sizes = (1, rows, cols, depth)
        random = np.random.default_rng(0)
        self._x = random.standard_normal((rows, depth), dtype=np.float32)
        weight = random.standard_normal((cols, depth), dtype=np.float32)
        shapes: list[tuple[tuple[int, int], str | None]] = [((rows, depth), None), ((cols, depth), "w")]
        specs = [TensorSpec("float32", shape, key) for shape, key in shapes]
        self._graph = Graph([*specs, TensorSpec("float32", (rows, cols))], inputs=[0], outputs=[2])
        self._graph.nodes = [Node("aten.linear.default", {"input": Ref(0), "weight": Ref(1), "bias": None}, (2,))]
        data = weight.data.cast("B")
        self._resources = DelegateResources(device, self._graph, lambda spec: [data], StateStore())

    def time(self, choice: Choice) -> float:
        """µs, by the GPU's clock where it has one."""
        can = replace(capabilities(self.device), tile_rule=tiles.Fixed(choice))
        plan = Plan(lower_graph(self._graph, {}, can), self._resources, keep_inputs=True)
        plan.run([self._x])  # zeros would cost a GPU less power than numbers do
        timer = Timer(self.device, plan.steps, SECONDS)
        # What the host sees of few repetitions is mostly its own way to the GPU and back.
        timer.repeats = max(timer.repeats, min(MOST_REPEATS, int(SECONDS / _seconds(timer))))
        return 1e6 * statistics.median(_seconds(timer) for _ in range(ROUNDS))


def _seconds(timer: Timer) -> float:
    """Of one repetition. Timestamps may come out equal, or be missing (NaN): then as the host sees it."""
    by_gpu, seen = timer.run()
    return by_gpu if by_gpu > 0 else seen


def fit(samples: Sequence[Sample], able: Sequence[Tile]) -> tuple[Costs, float]:
    """The costs that explain the times best, and their relative error. A tile that has no times costs as shipped."""
    edges = (float(FIRST_EDGE),) * len(able)
    found = min((_fit(samples, able, processors, edges) for processors in range(1, PROCESSORS + 1)), key=_error)
    processors = found[0].processors
    for _ in range(TURNS):  # all but one stay as they are, in turn, until none gets better
        before = _error(found)
        for tile in range(len(able)):
            for edge in map(float, EDGES):
                for some in CROWDS:
                    tried = (*edges[:tile], edge, *edges[tile + 1 :])
                    one = _fit(samples, able, processors, tried, some)
                    if _error(one) < _error(found):
                        found, edges = one, tried
        if _error(found) > 0.999 * before:
            break
    return found


def _error(fitted: tuple[Costs, float]) -> float:
    return fitted[1]


def _fit(
    samples: Sequence[Sample], able: Sequence[Tile], processors: int, edges: Sequence[float], crowd: int = CROWDS[0]
) -> tuple[Costs, float]:
    """Least squares, in turn with finding out of each time which of its two bounds it is: latency or sharing."""
    at = np.array([able.index(sample.choice.tile) for sample in samples])
    terms = np.array(
        [tiles.terms(one.sizes, one.choice, processors, edges[tile]) for one, tile in zip(samples, at, strict=True)]
    )
    times = np.array([sample.time for sample in samples])
    alone, shared = terms[:, 3], terms[:, 4]
    is_shared = shared > crowd * alone
    best: tuple[Costs, float] | None = None
    for _ in range(TURNS):
        found = _least(terms, times, at, is_shared, len(able))
        costs = [max(found[3 + 2 * tile : 5 + 2 * tile]) for tile in range(len(able))]
        # A tile that was only seen on one side costs the same on the other.
        pairs = [(found[3 + 2 * i] or cost, found[4 + 2 * i] or cost) for i, cost in enumerate(costs)]
        bounds = np.array(pairs)[at] * terms[:, 3:]
        error = np.abs((terms[:, :3] @ found[:3] + bounds.max(1)) / times - 1)
        spread = math.sqrt(np.mean(np.minimum(error, 0.3) ** 2))
        if best is None or spread < best[1]:
            fitted = [Rate(float(a), float(b), edge) for (a, b), edge in zip(pairs, edges, strict=True)]
            rates = dict(zip(able, fitted, strict=True))
            launch, adding, element = (float(item) for item in found[:3])
            shipped = zip(TILES, SHIPPED.rates, strict=True)
            # A tile that no time was of has none.
            known = tuple(rates[tile] if tile in rates and any(rates[tile][:2]) else usual for tile, usual in shipped)
            best = Costs(processors, launch, adding, element, known), spread
        before, is_shared = is_shared, bounds[:, 1] >= bounds[:, 0]
        if (before == is_shared).all():
            break
    assert best is not None
    return best


def _least(terms: np.ndarray, times: np.ndarray, at: np.ndarray, is_shared: np.ndarray, count: int) -> np.ndarray:
    """launch, adding, element, then alone and shared of each of `count` tiles."""
    matrix = np.zeros((len(times), 3 + 2 * count))
    matrix[:, :3] = terms[:, :3]
    lines = np.arange(len(times))
    matrix[lines, 3 + 2 * at + is_shared] = np.where(is_shared, terms[:, 4], terms[:, 3])
    matrix /= times[:, None]
    weights = np.ones(len(times))
    for _ in range(3):  # a few times that no model explains must not bend it
        found = non_negative(matrix * weights[:, None], weights)
        weights = (1 + (np.abs(matrix @ found - 1) / 0.05) ** 2) ** -0.5
    return found


def non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares of `matrix @ x = target` with x >= 0, by active sets.

    C. Lawson and R. Hanson, "Solving Least Squares Problems", 1974, chapter 23.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    gram, right = (matrix / scale).T @ (matrix / scale), (matrix / scale).T @ target
    x = np.zeros(len(right))
    free = np.zeros(len(right), bool)
    for _ in range(3 * len(right)):
        slope = np.where(free, -np.inf, right - gram @ x)
        if slope.max() <= 1e-10:
            break
        free[int(slope.argmax())] = True
        while True:
            trial = np.zeros(len(right))
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], right[free], rcond=None)[0]
            blocked = free & (trial <= 0)
            if not blocked.any():
                break
            step = (x[blocked] / np.maximum(x[blocked] - trial[blocked], 1e-300)).min()
            x = x + step * (trial - x)
            free &= x > 1e-14
            x[~free] = 0
        x = trial
    return np.asarray(x / scale)


COLUMNS = ("rows x depth x columns", "shipped rule", "ms", "this adapter's", "ms", "")


def rows(report: Report) -> list[tuple[str, ...]]:
    """The held-out products as a table."""
    return [
        (
            "x".join(map(str, row.shape)),
            describe(row.before),
            f"{row.before_ms:.4f}",
            describe(row.after),
            f"{row.after_ms:.4f}",
            f"{row.before_ms / row.after_ms:.2f}x",
        )
        for row in report.rows
    ]


def _compare(device: Device, shape: tuple[int, int, int], costs: Costs, able: tuple[Tile, ...]) -> Row:
    rows, depth, cols = shape
    product = _Product(device, rows, depth, cols)
    before, after = (rule.choose(product.sizes, able) for rule in (SHIPPED, costs))
    before_ms = product.time(before) / 1e3
    return Row(shape, before, before_ms, after, before_ms if after == before else product.time(after) / 1e3)
