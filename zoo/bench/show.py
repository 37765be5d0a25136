"""What `zoo bench` prints of a report where no JSON was asked for."""

from __future__ import annotations

from typing import Any

import typer

from zoo.bench import kernels, models, trace
from zoo.console import table


def show(report: dict[str, Any]) -> None:
    """Tables on stdout, of whatever kind the report is."""
    title = f"adapter: {report['adapter']}"
    if "traces" in report:
        table(trace.COLUMNS, trace.rows(report), title=title)
        return
    if report["model"] == "kernels":
        table(kernels.COLUMNS, kernels.rows(report), title=f"{title}, copy {report['copy_gb_s']:.0f} GB/s")
        return
    table(models.COLUMNS, models.rows(report), title=title)
    for program in report["programs"]:
        parts = [f"{name} {row['partitions']}" for name, row in program["methods"].items()]
        peak = f", peak memory of a run {program['peak_bytes'] / 1e6:.0f} MB" if "peak_bytes" in program else ""
        typer.echo(f"{program['backend']}: {program['bytes'] / 1e6:.1f} MB, partitions: {', '.join(parts)}{peak}")
