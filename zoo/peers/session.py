"""What a peer makes of a graph. Without torch, so that a process of a peer's own needs none."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class State:
    """A buffer that outlives a call: its qualified name, and what it holds before the first (zeros without `path`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path | None = None

    def initial(self) -> np.ndarray:
        if self.path is None:
            return np.zeros(self.shape, self.dtype)
        array: np.ndarray = np.load(self.path)
        return array


@dataclass(frozen=True)
class OnnxGraph:
    """A method as an ONNX file, which cannot keep anything: its states are the last inputs, in the order of `states`,
    and what it makes of those that it writes (`written`) are the last outputs."""

    path: Path
    states: tuple[State, ...] = ()
    written: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seconds:
    """What a turn took, of a side that measures it itself."""

    seconds: float


class Session(ABC):
    """A graph made ready by a peer. `note`: what a reader of its times must know."""

    note = ""

    @property
    def gone(self) -> bool:
        """Whether it can do no more calls."""
        return False

    @abstractmethod
    def prepare(self, arrays: Sequence[np.ndarray]) -> Callable[[], Any]:
        """One call on these inputs, done when it returns: what is timed in models."""

    def fetch(self, result: Any) -> list[np.ndarray]:
        """What a call gave, as arrays on the host."""
        return [np.asarray(array) for array in result]

    def repeated(self, arrays: Sequence[np.ndarray]) -> Callable[[int], float]:
        """Seconds for a number of calls, operands on the device where the peer can keep them there."""
        call = self.prepare(arrays)

        def run(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                call()
            return time.perf_counter() - start

        return run

    def turn(self, ready: Sequence[Callable[[], Any]]) -> float:
        """Does prepared calls, of this session and others of its peer, one after the other; seconds."""
        start = time.perf_counter()
        for one in ready:
            one()
        return time.perf_counter() - start

    def close(self) -> None:  # noqa: B027 - not abstract: a session may hold nothing
        """Frees what the session holds on its device."""
