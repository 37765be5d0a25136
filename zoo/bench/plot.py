"""A picture of a model's reports: each side's time beside ours, one panel a report. Needs matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.recipe import UserError
from zoo.bench.kernels import best_ms

_INCHES = 9.0
_BAR = 0.24  # inches


def draw(model: str, reports: Sequence[Mapping[str, Any]]) -> bytes:
    """SVG, the same bytes for the same reports. Raises `UserError` where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("plots need matplotlib: pip install 'webgpu-zoo[bench]', or give --no-plots")
    matplotlib: Any = importlib.import_module("matplotlib")
    figures: Any = importlib.import_module("matplotlib.figure")
    panels = [bars(report) for report in reports]
    with matplotlib.rc_context({"svg.hashsalt": model, "svg.fonttype": "none", "font.size": 9}):
        heights = [1 + _BAR * len(panel) for panel in panels]
        figure = figures.Figure(figsize=(_INCHES, sum(heights)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, panel, report in zip(axes, panels, reports, strict=True):
            labels, ratios, ours = zip(*panel, strict=True) if panel else ((), (), ())
            places = range(len(labels))
            axis.barh(places, ratios, color=["tab:blue" if mine else "tab:gray" for mine in ours])
            axis.set_yticks(places, labels)
            axis.invert_yaxis()
            axis.set_xscale("log")
            axis.axvline(1, color="black", linewidth=0.8)
            axis.set_xlabel("time, as a multiple of ours (less is faster)")
            axis.set_title((report["machine"]["adapter"] or {"device": "no adapter"})["device"], loc="left")
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def bars(report: Mapping[str, Any]) -> list[tuple[str, float, bool]]:
    """(label, time as a multiple of ours, whether it is ours), ours first in each workload or kernel."""
    if report["model"] != "kernels":
        return [
            (f"{row['workload']}: {row['side']}", row["times_first"], row["times_first"] == 1)
            for row in report["results"]
            if "missing" not in row
        ]
    found = []
    for row in report["results"]:
        found.append((f"{row['kernel']}: webgpu", 1.0, True))
        found += [(f"{row['kernel']}: {name}", spent / best_ms(row), False) for name, spent in row["peers_ms"].items()]
    return found
