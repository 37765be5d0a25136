"""A peer in a process of its own: what ends that process, or hangs in it, does not end the benchmark.

The peer measures its own time, so talking to it costs nothing in it. It gets ONNX files and arrays, and needs no torch.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.recipe import UserError
from zoo.peers.session import OnnxGraph, Session
from zoo.peers.table import PATIENCE, one_line, shorten

if TYPE_CHECKING:
    from zoo.peers.graph import Graph

_GOODBYE = 10.0


class Gone(UserError):
    """The process has ended, or was ended because it took too long; with it went the states that it kept."""


class Workers:
    """The processes of one benchmark, by the place of what they run. `patience`: seconds that each peer may take to
    get ready, over all graphs; the limit of a single call that is timed as well."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._workers: dict[str, _Worker] = {}
        self._spent: dict[str, float] = {}

    def open(self, graph: Graph, place: str) -> Session:
        """A session of the peer at `place` (`module:name`), which makes one of an `OnnxGraph` and a dict of states."""
        onnx = graph.onnx()
        worker = self._workers.get(place)
        if worker is None or worker.ended:
            if self._left(place) <= 0:
                raise UserError(f"not ready within {self.patience:g} s")
            worker = self._workers[place] = _Worker(self, place)
        return _Apart(worker, *worker.ask("open", onnx))

    def _left(self, place: str) -> float:
        return self.patience - self._spent.get(place, 0.0)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()


class _Worker:
    def __init__(self, owner: Workers, place: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._owner, self._place = owner, place
        self._folder = tempfile.TemporaryDirectory(prefix="zoo-peer-")
        self._log = Path(self._folder.name) / "log"
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, place, str(self._log)), daemon=True)
        self._process.start()
        theirs.close()
        self.ended = False
        self._busy = False  # between a question and its answer: still so in `end` where that was broken off

    def ask(self, what: str, *arguments: Any, timed: bool = False) -> Any:
        """What the process answers. Raises `UserError` with its reason, and `Gone` where there is no answer."""
        if self.ended:
            raise Gone("its process has ended")
        owner, place = self._owner, self._place
        # What is done is fetched and closed, however long getting ready took.
        least = _GOODBYE if what in ("fetch", "close") else 0.0
        limit = owner.patience if timed else max(least, owner._left(place))
        began = time.perf_counter()
        self._busy = True
        try:
            self._pipe.send((what, arguments))
            if not self._pipe.poll(limit):
                self.end(kill=True)
                raise Gone(f"not ready within {owner.patience:g} s: stopped at {what}")
            good, answer = self._pipe.recv()
            self._busy = False
        except (EOFError, OSError):
            raise Gone(f"its process ended {self._end()}") from None
        finally:
            if not timed:
                owner._spent[place] = owner._spent.get(place, 0.0) + time.perf_counter() - began
        if not good:
            raise UserError(answer)
        return answer

    def _end(self) -> str:
        """How the process ended, with the last that it said."""
        self._process.join(_GOODBYE)
        code = self._process.exitcode
        said = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        self.end(kill=True)
        name = f"with code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                name = f"by {signal.Signals(-code).name}"
        return shorten(f"{name}: {said[-1]}") if said else name

    def end(self, kill: bool = False) -> None:
        if self.ended:
            return
        self.ended = True
        if not (kill or self._busy):
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(_GOODBYE)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()
        self._folder.cleanup()


@dataclass(frozen=True)
class _Call:
    """A prepared call in the process; calling it gives itself, for `fetch`."""

    worker: _Worker
    number: int

    def __call__(self) -> _Call:
        self.worker.ask("run", [self.number])
        return self


class _Apart(Session):
    def __init__(self, worker: _Worker, number: int, note: str) -> None:
        self._worker, self._number, self.note = worker, number, note

    @property
    def gone(self) -> bool:
        return self._worker.ended

    def prepare(self, arrays: Sequence[np.ndarray]) -> Callable[[], Any]:
        return _Call(self._worker, self._worker.ask("prepare", self._number, list(arrays)))

    def fetch(self, result: Any) -> list[np.ndarray]:
        arrays: list[np.ndarray] = self._worker.ask("fetch", result.number)
        return arrays

    def repeated(self, arrays: Sequence[np.ndarray]) -> Callable[[int], float]:
        number = self._worker.ask("repeated", self._number, list(arrays))
        return lambda count: float(self._worker.ask("repeat", number, count, timed=True))

    def turn(self, ready: Sequence[Callable[[], Any]]) -> float:
        numbers = [one.number for one in ready if isinstance(one, _Call)]
        return float(self._worker.ask("run", numbers, timed=True))

    def close(self) -> None:
        if not self._worker.ended:
            with contextlib.suppress(UserError):
                self._worker.ask("close", self._number)


class _Server:
    """The other end: sessions and calls by number."""

    def __init__(self, place: str) -> None:
        module, _, name = place.partition(":")
        self._opener: Any = getattr(importlib.import_module(module), name)
        self._states: dict[str, Any] = {}
        self._sessions: dict[int, Session] = {}
        self._calls: dict[int, tuple[int, Callable[..., Any]]] = {}
        self._given: dict[int, Any] = {}
        self._count = 0

    def _number(self) -> int:
        self._count += 1
        return self._count

    def open(self, onnx: OnnxGraph) -> tuple[int, str]:
        session = self._opener(onnx, self._states)
        number = self._number()
        self._sessions[number] = session
        return number, session.note

    def prepare(self, session: int, arrays: Sequence[np.ndarray]) -> int:
        number = self._number()
        self._calls[number] = session, self._sessions[session].prepare(arrays)
        return number

    def repeated(self, session: int, arrays: Sequence[np.ndarray]) -> int:
        number = self._number()
        self._calls[number] = session, self._sessions[session].repeated(arrays)
        return number

    def run(self, numbers: Sequence[int]) -> float:
        start = time.perf_counter()
        for number in numbers:
            self._given[number] = self._calls[number][1]()
        return time.perf_counter() - start

    def repeat(self, number: int, count: int) -> float:
        return float(self._calls[number][1](count))

    def fetch(self, number: int) -> list[np.ndarray]:
        return self._sessions[self._calls[number][0]].fetch(self._given.pop(number))

    def close(self, session: int) -> None:
        for number in [number for number, (owner, _) in self._calls.items() if owner == session]:
            del self._calls[number]
            self._given.pop(number, None)
        self._sessions.pop(session).close()

    def end(self) -> None:
        # States before the sessions that made them.
        self._states.clear()
        for number in list(self._sessions):
            self.close(number)


def _end_with_parent(log: str) -> None:
    """A peer that hangs reads no pipe: it would outlive whoever asks and was ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        _leave(1, log)


def _leave(code: int, log: str) -> None:
    """Ends this process and removes the folder of its log: whoever asked may have been ended before doing so."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)  # some systems remove no file that is open
    shutil.rmtree(Path(log).parent, ignore_errors=True)
    os._exit(code)  # an engine that trips over its own end has nothing left to spoil


def _serve(pipe: Connection, place: str, log: str) -> None:
    """Answers until it is told to end, or nobody asks any more. What the peer prints goes to `log`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    threading.Thread(target=_end_with_parent, args=(log,), daemon=True).start()
    server: _Server | None = None
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            break
        if message is None:
            if server is not None:
                server.end()
            break
        try:
            server = server or _Server(place)
            answer = True, getattr(server, message[0])(*message[1])
        except UserError as error:
            answer = False, str(error)
        except Exception as error:  # whatever another engine raises is its reason
            answer = False, one_line(error)
        try:
            pipe.send(answer)
        except OSError:
            break
    _leave(0, log)
