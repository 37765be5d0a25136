"""A peer for test_bench.py that runs in a process of its own: what a graph does is in its file's name."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zoo.peers.session import OnnxGraph, Session


class Fake(Session):
    """Twice its input (`add`), twice the sum of all (`count`), or something worse."""

    def __init__(self, graph: OnnxGraph, states: dict[str, Any]) -> None:
        self._what, self._states = graph.path.name, states
        if self._what not in ("add", "count", "crash", "hang"):
            raise NotImplementedError(f"no operator {self._what}")
        for state in graph.states:
            states.setdefault(state.name, state.initial())
        self.note = f"with {', '.join(state.name for state in graph.states)}" if graph.states else ""

    def prepare(self, arrays: Sequence[np.ndarray]) -> Callable[[], Any]:
        def call() -> list[np.ndarray]:
            if self._what == "crash":
                print("about to crash", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGSEGV)
            if self._what == "hang":
                print("hanging", file=sys.stderr, flush=True)
                time.sleep(600)
            if self._what == "count":
                self._states["total"] = self._states["total"] + arrays[0]
                return [2 * self._states["total"]]
            return [2 * arrays[0]]

        return call
