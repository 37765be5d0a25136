"""What `zoo tune` measured on an adapter: `Costs` of its tiles, in a file of the user's cache folder.

A file belongs to one adapter, driver and version of wgpu (its name has their hash), and to one state of the kernel and
its tiles. One that does not fit, or is not whole, is left alone with one line on stderr, and the shipped rule is used:
a calibration decides how fast results come, and in which order sums are added, never whether they are right.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import wgpu

from backend.files import cache_folder, replacing
from backend.ops.tiles import TILES, Costs, Rate

_FORMAT = 2
_MOST_BYTES = 1 << 16
_NUMBERS = ("launch", "adding", "element")
_INFO = ("device", "vendor", "description", "backend_type", "adapter_type")


def identity(adapter: Any) -> dict[str, str]:
    """What the times depend on: adapter, driver, runtime."""
    return {**{name: str(adapter.info.get(name, "")) for name in _INFO}, "wgpu": str(wgpu.__version__)}


def path(adapter: Any) -> Path:
    """Where the adapter's calibration is, or would be."""
    digest = hashlib.sha256(json.dumps(identity(adapter), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"tiles-{digest[:16]}.json"


def load(adapter: Any) -> Costs | None:
    """The adapter's calibration, or None where there is none that can be used. A file is read once a process."""
    return _load(path(adapter), tuple(identity(adapter).items()))


def save(adapter: Any, costs: Costs) -> Path:
    """Writes the calibration, whole or not at all. Raises `OSError`."""
    target = path(adapter)
    rates = {tile.name: list(rate) for tile, rate in zip(TILES, costs.rates, strict=True)}
    numbers = {name: getattr(costs, name) for name in ("processors", *_NUMBERS)}
    content = {"format": _FORMAT, "adapter": identity(adapter), "kernel": _kernel(), **numbers, "rates": rates}
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(target) as part:
            part.write_text(json.dumps(content, indent=1) + "\n")
    finally:
        _load.cache_clear()
    return target


def clear(adapter: Any) -> bool:
    """Removes the adapter's calibration; whether there was one. Raises `OSError`."""
    target = path(adapter)
    there = target.exists()
    target.unlink(missing_ok=True)
    _load.cache_clear()
    return there


@functools.cache
def _load(target: Path, owner: tuple[tuple[str, str], ...]) -> Costs | None:
    try:
        with target.open("rb") as file:
            return _costs(file.read(_MOST_BYTES + 1), dict(owner))
    except FileNotFoundError:
        return None
    except _Unusable as error:
        reason = str(error)
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = "damaged"
    print(f"calibration {target} is ignored ({reason}): `zoo tune` makes a new one", file=sys.stderr)
    return None


class _Unusable(Exception):
    """A whole calibration, but not one for here."""


def _costs(content: bytes, owner: dict[str, str]) -> Costs:
    """Raises `_Unusable`, and `ValueError`, `KeyError`, `TypeError` or `RecursionError` for what is no calibration."""
    if len(content) > _MOST_BYTES:
        raise ValueError("too long")
    found = json.loads(content)
    if found["format"] != _FORMAT:
        raise _Unusable("of another version")
    if found["adapter"] != owner or found["kernel"] != _kernel():
        raise _Unusable("made for another adapter, or for other kernels")
    processors = found["processors"]
    if type(processors) is not int or not 1 <= processors <= 1 << 16:
        raise ValueError("processors")
    rates = [Rate(*found["rates"][tile.name]) for tile in TILES]
    numbers = [found[name] for name in _NUMBERS]
    if any(type(item) not in (int, float) or not 0 <= item < math.inf for items in (numbers, *rates) for item in items):
        raise ValueError("numbers")
    if any(rate.alone + rate.shared <= 0 for rate in rates):
        raise ValueError("rates")
    launch, adding, element = map(float, numbers)
    return Costs(processors, launch, adding, element, tuple(Rate(*map(float, rate)) for rate in rates))


@functools.cache
def _kernel() -> str:
    """The kernel's text and the tiles: a calibration of others says nothing."""
    digest = hashlib.sha256(resources.files("shaders").joinpath("gemm_wide.wgsl").read_bytes())
    digest.update(" ".join(tile.name for tile in TILES).encode())
    return digest.hexdigest()[:16]
