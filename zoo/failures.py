"""The one place where errors become lines and exit codes: a command never ends in a traceback that nobody asked for.

Exit codes: 0 done, 1 a check did not pass, 2 a mistake that the user can put right, 3 a fault of this project,
130 Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from backend.runtime.errors import DeviceError
from recipes.recipe import UserError
from zoo.console import ReaderClosed, quiet_libraries, say


def guarded(command: Callable[[], Any], debug: Callable[[], bool]) -> int:
    """The exit code of `command`, what went wrong in it said on stderr; with `debug`, its exceptions are raised."""
    try:
        with quiet_libraries():
            result = command()
        code = result if isinstance(result, int) else 0
        if code == 130:
            say("interrupted")
        return code
    except (ReaderClosed, BrokenPipeError):
        return 0  # the reader has what it wanted
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except Exception as error:
        if debug():
            raise
        return _explain(error)


def _explain(error: Exception) -> int:
    """Prints what went wrong as one line on stderr and returns the exit code."""
    if isinstance(error, UserError | DeviceError):
        _say_error(str(error))
        return 2
    if isinstance(error, typer.TyperException):
        # A mistake in the command line; its context knows which command's help has the answer.
        context = getattr(error, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context is not None else ""
        _say_error(error.format_message() + hint)
        return 2
    _say_error(f"internal: {type(error).__name__}: {error}; re-run as `zoo --debug …` for the traceback")
    return 3


def _say_error(message: str) -> None:
    say("error: " + " ".join(message.split()))
