"""pytest tests/ops/test_tiles.py: the choice of tiles, and calibrations. What tiles compute: test_matmul.py."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from backend.ops import calibration, tiles
from backend.ops.tiles import SHIPPED, TILES, Choice, Costs, Rate
from backend.runtime.capabilities import Capabilities, capabilities

LARGE_GPU = Capabilities(max_workgroup_bytes=49152, max_invocations=1024)
LEAST_GPU = Capabilities(max_workgroup_bytes=16384, max_invocations=256)
# As `zoo tune` would find them on an adapter of 8 processors that the smallest tile suits best.
OTHER = Costs(8, 5.0, 4.0, 9.0, tuple(Rate(0.0, 0.001 if tile == tiles.SMALL_HALVED else 9.0, 32.0) for tile in TILES))


def adapter(device: str = "A GPU", kind: str = "DiscreteGPU", driver: str = "1.0") -> SimpleNamespace:
    info = {"device": device, "adapter_type": kind, "description": driver, "vendor": "v", "backend_type": "Vulkan"}
    return SimpleNamespace(info=info)


def device(of: SimpleNamespace) -> SimpleNamespace:
    is_cpu = of.info["adapter_type"] == "CPU"
    return SimpleNamespace(adapter=of, is_cpu=is_cpu, features=frozenset(), limit=lambda name: 65536)


def choose(*sizes: int, can: Capabilities = LARGE_GPU) -> Choice:
    return tiles.choose(sizes, SimpleNamespace(capabilities=can))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration._load.cache_clear()
    yield tmp_path / "webgpu-zoo"
    calibration._load.cache_clear()


def test_the_shipped_choice():
    """Of the measured ways to sum these on an NVIDIA H200 the fastest, or within 6% of it."""
    assert choose(1, 4096, 4096, 4096) == choose(1, 2048, 2048, 2048) == Choice(tiles.HUGE)
    assert choose(1, 512, 4096, 1024) == Choice(tiles.HUGE_HALVED)
    assert choose(1, 4096, 1536, 384) == choose(1, 4900, 1152, 384) == Choice(tiles.LARGE)
    assert choose(1, 128, 4096, 1024) == Choice(tiles.MEDIUM_QUARTERED)
    assert choose(1, 512, 6144, 1024) == choose(1, 2304, 2048, 512) == choose(1, 65536, 288, 96) == Choice(tiles.MEDIUM)
    assert choose(1, 2304, 512, 512) == choose(1, 2304, 512, 2048) == Choice(tiles.HUGE, 3)
    assert choose(1, 256, 512, 512) == Choice(tiles.SMALL_HALVED)
    assert choose(1, 20, 4096, 1024) == Choice(tiles.SMALL_QUARTERED)


def test_groups_that_a_processor_works_on_at_a_time():
    """Two of 128 × 128 by 128 invocations: a third starts when these are done, and costs as much as both."""
    assert tiles.HUGE.resident == tiles.MEDIUM.resident == 2 and tiles.LARGE.resident == 1
    alone = Costs(1, 0.0, 0.0, 0.0, tuple(Rate(2.0, 0.5, 0.0) for _ in TILES))
    times = [alone.predict((1, 128 * groups, 128, 64), Choice(tiles.HUGE)) for groups in range(1, 6)]
    assert times == [128.0, 128.0, 256.0, 256.0, 384.0]


def test_a_second_dispatch_must_be_worth_it():
    """It costs the host time, and the model is some percent off."""
    two = {tiles.MEDIUM: Rate(0.0, 0.02, 0.0), tiles.SMALL_HALVED: Rate(0.0, 0.005, 0.0)}
    costs = Costs(100, 0.0, 0.0, 0.0, tuple(two.get(tile, Rate(9.0, 9.0, 0.0)) for tile in TILES))
    sizes = (1, 640, 640, 4096)  # 100 groups of MEDIUM, 400 of SMALL_HALVED
    ways = [Choice(tile, parts) for tile in two for parts in (1, 2)]
    assert costs.choose(sizes, TILES).parts == 1
    dear = replace(costs, adding=5.0)
    assert dear.choose(sizes, TILES) == costs.choose(sizes, TILES)
    assert min(ways, key=lambda way: costs.predict(sizes, way)).tile is tiles.SMALL_HALVED


def test_a_device_gets_tiles_that_it_runs():
    for sizes in ((1, 4096, 4096, 4096), (1, 1024, 1024, 1024), (1, 256, 512, 512), (64, 17, 33, 9)):
        tile = choose(*sizes, can=LEAST_GPU).tile
        assert tile.bytes <= 16384 and tile.invocations <= 256
    assert set(tiles.fitting(LARGE_GPU)) == set(TILES)
    assert tiles.usable(SimpleNamespace(capabilities=LEAST_GPU))
    assert not tiles.usable(SimpleNamespace(capabilities=replace(LEAST_GPU, on_processor=True)))


def test_parts_are_whole_steps_and_stay_small():
    for sizes in ((1, 17, 17, 36864), (3, 2048, 2048, 8192), (1, 33, 70, 1), (1, 64, 64, 4096)):
        batches, rows, cols, depth = sizes
        for choice in tiles.choices(sizes, TILES):
            chunk, parts = choice.split(depth)
            assert chunk % choice.tile.stride == 0 and (parts - 1) * chunk < depth <= parts * chunk
            assert parts == 1 or parts * batches * rows * cols <= tiles.MOST_IN_PARTS


def test_a_calibration_comes_back_and_is_followed(cache, capsys):
    own = adapter()
    assert calibration.load(own) is None
    calibration.save(own, OTHER)
    assert [path.name for path in cache.iterdir()] == [calibration.path(own).name]
    assert calibration.load(own) == OTHER
    can = capabilities(device(own))
    assert choose(1, 4096, 4096, 4096, can=replace(can, max_invocations=1024)).tile == tiles.SMALL_HALVED
    assert choose(1, 4096, 4096, 4096).tile == tiles.HUGE
    assert calibration.clear(own) and not calibration.clear(own)
    assert calibration.load(own) is None and capabilities(device(own)).tile_rule is None
    assert capsys.readouterr().err == ""


def test_another_adapters_calibration_is_not_used(capsys):
    calibration.save(adapter(), OTHER)
    for other in (adapter("B GPU"), adapter(driver="1.1"), adapter(kind="IntegratedGPU")):
        assert calibration.load(other) is None
    assert capsys.readouterr().err == ""
    calibration.path(adapter()).rename(calibration.path(adapter("C GPU")))
    assert calibration.load(adapter("C GPU")) is None
    assert "another adapter" in capsys.readouterr().err


def test_a_processor_has_none():
    own = adapter(kind="CPU")
    calibration.save(own, OTHER)
    assert capabilities(device(own)).tile_rule is None


def _without(found: dict, *path: str) -> str:
    part = found
    for name in path[:-1]:
        part = part[name]
    del part[path[-1]]
    return json.dumps(found)


DAMAGES = {
    "empty": lambda found: "",
    "cut": lambda found: json.dumps(found)[:-20],
    "no object": lambda found: "[1]",
    "older": lambda found: json.dumps({**found, "format": 0}),
    "other kernel": lambda found: json.dumps({**found, "kernel": "0"}),
    "no launch": lambda found: _without(found, "launch"),
    "no tile": lambda found: _without(found, "rates", TILES[2].name),
    "negative": lambda found: json.dumps({**found, "adding": -1}),
    "not finite": lambda found: json.dumps({**found, "element": math.nan}),
    "no number": lambda found: json.dumps({**found, "launch": "1"}),
    "no processors": lambda found: json.dumps({**found, "processors": 0}),
    "half a pair": lambda found: json.dumps({**found, "rates": {name: [1.0] for name in found["rates"]}}),
    "free": lambda found: json.dumps({**found, "rates": {name: [0, 0] for name in found["rates"]}}),
    "deep": lambda found: "[" * 60000,
    "huge": lambda found: " " * 70000 + json.dumps(found),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_calibration_is_left_alone(damage, capsys):
    own = adapter()
    target = calibration.save(own, OTHER)
    text = DAMAGES[damage](json.loads(target.read_text()))
    target.write_text(text)
    for _ in range(2):
        assert calibration.load(own) is None
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "is ignored" in told[0] and "zoo tune" in told[0]
    assert target.read_text() == text
    assert choose(1, 4096, 4096, 4096, can=replace(LARGE_GPU, tile_rule=calibration.load(own))).tile == tiles.HUGE


def test_a_cache_that_cannot_be_read(cache, capsys):
    calibration.path(adapter()).mkdir(parents=True)
    assert calibration.load(adapter()) is None
    assert "is ignored" in capsys.readouterr().err


def test_a_write_that_fails_leaves_the_old_one(cache, monkeypatch):
    target = calibration.save(adapter(), OTHER)
    before = target.read_text()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="No space"):
        calibration.save(adapter(), SHIPPED)
    assert target.read_text() == before and len(list(cache.iterdir())) == 1
