"""Counts the drawn nodes of test_registry.py and says at the end how many there were."""

from __future__ import annotations

from collections import Counter

import pytest

_DRAWN = pytest.StashKey[Counter[str]]()


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> Counter[str]:
    """Nodes that ran and agreed, by operator, over the whole session."""
    return request.config.stash.setdefault(_DRAWN, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    drawn = config.stash.get(_DRAWN, None)
    if drawn is not None:
        terminalreporter.write_line(f"{drawn.total()} drawn nodes of {len(drawn)} operators ran and agreed")
