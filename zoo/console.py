"""What the commands say and where: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

LINE_EVERY = 20.0  # seconds between lines of progress in a log


class ReaderClosed(Exception):
    """The reader of stdout went away (`| head`): the command ends quietly."""


def stderr() -> Console:
    """A console on stderr as it is now (tests and redirections replace it)."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """Prints one line on stderr, as it is (no markup: paths hold brackets)."""
    stderr().print(line, markup=False)


def notice(line: str) -> None:
    """Prints a line on stderr that must not be missed."""
    stderr().print(f"NOTICE: {line}", style="bold yellow", markup=False)


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[..., None]]:
    """Yields a function to call with how many units were done, 1 by default.

    A bar with the time left on a terminal; now and then a line in a log.
    """
    console = stderr()
    if total > 1 and console.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what.replace("[", r"\["), total=total)
            yield lambda count=1: bar.advance(task, count)
        return
    started = last = time.perf_counter()
    done = 0

    def advance(count: int = 1) -> None:
        nonlocal last, done
        done += count
        now = time.perf_counter()
        if now - last >= LINE_EVERY and done < total:
            last = now
            say(f"{what}: {unit} {done} of {total}, {duration((now - started) / done * (total - done))} left")

    yield advance


def duration(seconds: float) -> str:
    """`1 h 5 min`, `3 min 20 s` or `7 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )


@contextmanager
def step(what: str) -> Iterator[None]:
    """Shows `what` while the block runs: a spinner on a terminal, one plain line in a log."""
    console = stderr()
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(f"{what} …", markup=False)
        yield


def table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "", to_stderr: bool = False
) -> None:
    """Prints a table on stdout, or on stderr. Cells are shown as they are, never cut."""
    grid = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*(str(cell).replace("[", r"\[") for cell in row))
    console = Console(stderr=to_stderr, highlight=False)
    if not console.is_terminal:
        console.width = 200  # a log has no width to respect
    console.print(grid)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keeps warnings and log lines of libraries below ERROR off stderr while the block runs.

    torch, torchao and ExecuTorch print dozens a model about their own internals, some through the root logger.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class Stdout:
    """The stdout that the command was started with, as bytes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        """Writes all of `data` at once, unbuffered. Raises `ReaderClosed` when nobody reads any more."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except BrokenPipeError:
            raise ReaderClosed from None

    def write_json(self, value: Any) -> None:
        """Writes `value` as indented, strict JSON (no NaN or Infinity) and a newline."""
        self.write((json.dumps(value, indent=2, allow_nan=False) + "\n").encode())

    def is_terminal(self) -> bool:
        return os.isatty(self._descriptor)


@contextmanager
def own_stdout() -> Iterator[Stdout]:
    """Takes stdout for one purpose: until the block ends, whatever else prints there lands on stderr.

    Libraries print to stdout from Python and from C++; a stream of samples or a JSON document must not be
    mixed with that. The swap is made on the file descriptors, so it holds for both.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield Stdout(kept)
    finally:
        try:
            sys.stdout.flush()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
