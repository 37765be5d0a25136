"""pytest tests/cli/test_tune.py"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backend.ops import calibration, tiles
from backend.ops.tiles import SHIPPED, TILES, Choice, Costs, Rate
from backend.runtime.device import get_device
from recipes.recipe import UserError
from zoo import tune
from zoo.tune import Sample

Zoo = Callable[..., subprocess.CompletedProcess[str]]
# An adapter of few processors, slow to start a dispatch, that does best with small tiles.
SLOW = Costs(
    12,
    20.0,
    15.0,
    30.0,
    tuple(
        Rate((1 + 0.1 * i) * rate, rate, float(tune.EDGES[i]))
        for i, rate in enumerate(0.002 * tile.rows * tile.cols / 64 + 0.01 * i for i, tile in enumerate(TILES))
    ),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration._load.cache_clear()


def samples(costs: Costs, noise: float) -> list[Sample]:
    drawn = random.Random(0)
    return [
        Sample(sizes, choice, costs.predict(sizes, choice) * drawn.uniform(1 - noise, 1 + noise))
        for rows, depth, cols in tune.FITTED
        for sizes in [(1, rows, cols, depth)]
        for choice in tiles.choices(sizes, TILES)
        if choice.parts in tune.TRIED
    ]


@pytest.mark.parametrize("costs", [SHIPPED, SLOW], ids=["large", "small"])
def test_the_fit_finds_an_adapter_again(costs: Costs) -> None:
    """From times with 3% of noise: its choices for shapes that were not measured cost at most 5% more than the best."""
    found, error = tune.fit(samples(costs, 0.03), TILES)
    assert error < 0.03
    for rows, depth, cols in tune.HELD_OUT:
        sizes = (1, rows, cols, depth)
        best, chosen = (rule.choose(sizes, TILES) for rule in (costs, found))
        assert costs.predict(sizes, chosen) <= 1.05 * costs.predict(sizes, best)
    assert tune.fit(samples(costs, 0.03), TILES)[0] == found


def test_a_tile_without_times_costs_as_shipped() -> None:
    able = TILES[4:]
    timed = [s for s in samples(SLOW, 0) if s.choice.tile in able]
    found, _ = tune.fit(timed, able)
    assert found.rates[:4] == SHIPPED.rates[:4]
    # Not by their numbers: what no time shows, like one group alone of a tile with many, may be any.
    for sample in timed:
        if sample.choice.tile is TILES[6]:
            assert found.predict(sample.sizes, sample.choice) == pytest.approx(sample.time, rel=0.08)


def test_non_negative_least_squares() -> None:
    """Against a search over all sets of free coefficients."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        matrix, target = generator.standard_normal((12, 5)), generator.standard_normal(12)
        found = tune.non_negative(matrix, target)
        best = np.inf
        for mask in range(32):
            free = [i for i in range(5) if mask >> i & 1]
            x = np.zeros(5)
            if free:
                x[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(matrix @ x - target)))
        assert (found >= 0).all() and np.linalg.norm(matrix @ found - target) == pytest.approx(best, rel=1e-9)


def test_measuring_and_choosing_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way on this device, with two tiles and small products."""
    device = get_device()
    monkeypatch.setattr(tiles, "usable", lambda b: True)
    monkeypatch.setattr(tiles, "fitting", lambda can: (tiles.SMALL_HALVED, tiles.SMALL_QUARTERED))
    monkeypatch.setattr(tune, "check", lambda device: None)
    monkeypatch.setattr(tune, "FITTED", ((33, 64, 40), (64, 300, 33), (20, 40, 24)))
    monkeypatch.setattr(tune, "HELD_OUT", ((40, 128, 33),))
    monkeypatch.setattr(tune, "PROCESSORS", 3)
    monkeypatch.setattr(tune, "LEAST_GAIN", 0.0)
    report = tune.tune()
    assert report.path == calibration.path(device.adapter) and calibration.load(device.adapter) == report.costs
    assert all(row.before_ms > 0 and row.after_ms > 0 for row in report.rows) and report.costs.processors <= 3
    assert json.loads(json.dumps(report.json()))["held_out"][0]["shape"] == [40, 128, 33]
    # Where it gains nothing, the shipped rule comes back.
    monkeypatch.setattr(tune, "LEAST_GAIN", 1e9)
    monkeypatch.setattr(tune, "measure", lambda device, able: samples(SLOW, 0))
    monkeypatch.setattr(tune, "fit", lambda samples, able: (SLOW, 0.0))
    assert tune.tune().path is None and calibration.load(device.adapter) is None


def test_the_table() -> None:
    row = tune.Row((1, 2, 3), Choice(tiles.HUGE, 2), 2.0, Choice(tiles.SMALL_HALVED), 1.0)
    report = tune.Report("a", SHIPPED, 0.0, (row, replace(row, after_ms=0.5)), 1.0, None)
    assert report.gain == pytest.approx(8**0.5) and report.json()["path"] is None
    assert tune.rows(report)[0][-1] == "2.00x" and len(tune.rows(report)[0]) == len(tune.COLUMNS)
    assert "parts 2" in tune.rows(report)[0][1]


def test_a_processor_has_nothing_to_tune(zoo: Zoo) -> None:
    if not get_device().is_cpu:
        pytest.skip("the adapter is a GPU")
    with pytest.raises(UserError, match="is a processor"):
        tune.tune()
    done = zoo("tune")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "is a processor" in done.stderr


def test_clear(zoo: Zoo) -> None:
    adapter = get_device().adapter
    calibration.save(adapter, SLOW)
    for there in (True, False):
        found = json.loads(zoo("tune", "--clear", "--json").stdout)
        assert found == {"path": str(calibration.path(adapter)), "removed": there}
    assert not calibration.path(adapter).exists()
