"""A workload's method calls, done again by a peer.

The first side's program is listened to while the workload runs on it; a peer then gets the same methods with the same
inputs. So a peer does the GPU's part of the work alone (no tokens sampled, no tiles cut), which is in its favour, and
its outputs can be compared with ours call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backend.runtime.device_tensor import DeviceTensor
from recipes.recipe import UserError
from zoo.console import quiet_libraries
from zoo.peers.apart import Gone
from zoo.peers.graph import Graph, Graphs
from zoo.peers.session import Seconds, Session
from zoo.peers.table import Peer, one_line


@dataclass(frozen=True)
class Call:
    """One call of a method: what it was given and what it gave."""

    method: str
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]


class Listener:
    """A program that passes calls on, and keeps them while `calls` is a list."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.calls: list[Call] | None = None

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        outputs: list[np.ndarray] = self._program.run(method, *arrays)
        self._keep(method, arrays, outputs)
        return outputs

    def start(self, method: str, *inputs: Any, **options: Any) -> list[Any]:
        outputs: list[Any] = self._program.start(method, *inputs, **options)
        self._keep(method, inputs, outputs)
        return outputs

    def _keep(self, method: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        if self.calls is not None:
            # Copied, as a caller may write into its arrays again.
            self.calls.append(Call(method, *(tuple(_copied(one) for one in many) for many in (inputs, outputs))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def _copied(value: Any) -> np.ndarray:
    return np.array(value.numpy() if isinstance(value, DeviceTensor) else value)


# Outputs farther from ours than this share of the largest are those of other states, where states went wrong before.
OTHER_STATE = 0.02


@dataclass
class Replayed:
    """A peer ready for its turns. `max_abs_diff`: the farthest of its outputs from ours."""

    run: Callable[[], Seconds]
    max_abs_diff: float
    note: str


class Side:
    """A peer in one benchmark: its sessions, one a graph."""

    def __init__(self, peer: Peer, graphs: Graphs) -> None:
        self.peer = peer
        self._graphs = graphs
        self._sessions: dict[Graph, Session] = {}
        self._refused: dict[str, UserError] = {}  # by method: what one shape lacks, others do
        self._behind = ""  # why its states are not what ours are

    def replay(self, calls: Sequence[Call], before: Sequence[Call] = ()) -> Replayed:
        """Does the calls, and those that came before them, and compares what they give.

        Raises `UserError` where the peer cannot.
        """
        if not calls:
            raise UserError("the workload calls no method of the program")
        with quiet_libraries():
            try:
                # First all that it needs, so that what fails there leaves no state half-way.
                for call in (*before, *calls):
                    self._open(call)
                for call in before:
                    self._first(call)
                worst = 0.0
                ready = []
                for call in calls:
                    session, one, outputs = self._first(call)
                    worst = max(worst, difference(call.outputs, outputs))
                    ready.append((session, one))
            except Exception as error:
                raise self._failed(error, (*before, *calls)) from error
        if self._behind and worst > OTHER_STATE * max(largest(call.outputs) for call in calls):
            raise UserError(f"its state is not what ours is, for it could not do what writes it: {self._behind}")
        sessions = [session for session, _ in ready]
        prepared = [one for _, one in ready]

        def run() -> Seconds:
            try:
                return Seconds(sessions[0].turn(prepared))
            except Exception as error:
                reason = self._failed(error, calls)
                if isinstance(error, Gone):
                    self._refused |= {call.method: reason for call in calls}
                raise reason from error

        return Replayed(run, worst, "; ".join(sorted({session.note for session in sessions if session.note})))

    def _first(self, call: Call) -> tuple[Session, Callable[[], Any], list[np.ndarray]]:
        """A call made ready and done: its session, what does it again, what it gave."""
        session = self._open(call)
        try:
            one = session.prepare(call.inputs)
            return session, one, session.fetch(one())
        except Gone as error:
            self._refused[call.method] = UserError(f"{error} (in {call.method})")
            raise self._refused[call.method] from error

    def _failed(self, error: Exception, calls: Sequence[Call]) -> UserError:
        """The reason why it could not do the calls, or not to their end."""
        reason = error if isinstance(error, UserError) else UserError(one_line(error))
        if any(self._graphs.states(call.method) for call in calls):
            self._behind = str(reason)
        return reason

    def _open(self, call: Call) -> Session:
        if call.method in self._refused:
            raise self._refused[call.method]
        graph = self._graphs.at(call.method, call.inputs)
        if graph not in self._sessions or self._sessions[graph].gone:
            if graph in self._sessions and self._graphs.states(call.method):
                self._behind = "its process ended, and its states with it"
            try:
                self._sessions[graph] = self.peer.open(graph)
            except UserError as error:
                self._refused[call.method] = error
                raise
        return self._sessions[graph]

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()


def difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The largest absolute difference. Raises `UserError` where shapes differ, and where theirs alone is not finite."""
    if [one.shape for one in ours] != [one.shape for one in theirs]:
        shapes = [[list(one.shape) for one in side] for side in (theirs, ours)]
        raise UserError(f"its outputs have shapes {shapes[0]}, ours {shapes[1]}")
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        a, b = mine.astype(np.float64), other.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        apart = np.abs(a[~same] - b[~same])
        if not np.isfinite(apart).all():
            raise UserError("its outputs are not finite where ours are, or the other way round")
        worst = max(worst, float(apart.max(initial=0.0)))
    return worst


def largest(arrays: Sequence[np.ndarray]) -> float:
    """The largest finite absolute value."""
    finite = [np.abs(array.astype(np.float64)[np.isfinite(array)]).max(initial=0.0) for array in arrays]
    return float(max(finite, default=0.0))
