"""`zoo report`: the JSON of one or several `zoo bench` runs, of one or several machines, as one Markdown page.

What the folder's `tried.toml` lists comes at the end of it. Nothing on the page is written by hand, so that its figures
can be made again.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.recipe import FULL_PRECISION, UserError
from zoo.bench.kernels import best_ms
from zoo.files import check_output, staged

PAGE, TRIED = "results.md", "tried.toml"
_TRIED_KEYS = ("where", "what", "figures", "on")
_HEAD = """# Benchmarks

Written by `zoo report` from what `zoo bench … --json` measured; never by hand. Sides of one table took turns in one
run on one adapter; times of different tables are not to be compared. `× ours` above 1 is slower than ours. `off by`
is the largest absolute difference from our outputs, of the largest value that they have.
"""


def write_page(reports: Sequence[Path], folder: Path, *, plots: bool = True) -> Path:
    """Writes `results.md` and, with `plots`, one picture a model into `folder`; returns the page's path.

    Raises `UserError` for a file that is no report, for a broken `tried.toml`, for a folder that is missing and, with
    `plots`, where matplotlib is not installed. Nothing is written then.
    """
    read = [_read(path) for path in reports]
    page = folder / PAGE
    check_output(page)
    tried = _tried(folder / TRIED)
    models = list(dict.fromkeys(report["model"] for report in read))
    pictures: dict[str, bytes] = {}
    if plots:
        from zoo.bench.plot import draw

        pictures = {model: draw(model, [one for one in read if one["model"] == model]) for model in models}
    with staged(page, *(folder / f"{model}.svg" for model in pictures)) as (written, *drawn):
        written.write_text(text(read, tried, pictures), encoding="utf-8")
        for part, picture in zip(drawn, pictures.values(), strict=True):
            part.write_bytes(picture)
    return page


def text(reports: Sequence[Mapping[str, Any]], tried: Sequence[Mapping[str, str]], pictures: Iterable[str] = ()) -> str:
    """The page. `pictures`: the models that have one beside it."""
    machines: list[Any] = []
    for report in reports:
        if report["machine"] not in machines:
            machines.append(report["machine"])
    lines = [_HEAD, "## Machines", "", *_machines(machines), ""]
    for model in dict.fromkeys(report["model"] for report in reports):
        lines += [f"## {model}", ""]
        if model in pictures:
            lines += [f"![{model}]({model}.svg)", ""]
        for report in reports:
            if report["model"] == model:
                number = machines.index(report["machine"]) + 1
                lines += [*(_kernels if model == "kernels" else _model)(report, number), ""]
    if tried:
        lines += ["## What was tried and did not help", ""]
        lines += _table(("where", "what", "figures", "on"), [[row[key] for key in _TRIED_KEYS] for row in tried])
    return "\n".join(lines).rstrip() + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON document: {error}") from error
    if not isinstance(report, dict) or not all(key in report for key in ("model", "machine", "results")):
        raise UserError(f"{path} was not written by `zoo bench … --json`")
    return report


def _tried(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("tried", [])
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    for row in rows:
        if sorted(row) != sorted(_TRIED_KEYS):
            raise UserError(f"{path}: an entry has {', '.join(row)}; it must have {', '.join(_TRIED_KEYS)}")
    return list(rows)


def _machines(machines: Sequence[Any]) -> list[str]:
    rows = []
    for number, machine in enumerate(machines, 1):
        adapter = machine["adapter"] or {"device": "none", "api": "", "type": "", "driver": ""}
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        processor = f"{machine['processor']}, {machine['cores']} cores"
        driver = " ".join(filter(None, (adapter["api"], adapter["driver"])))
        rows.append([str(number), adapter["device"], driver, processor, machine["platform"], versions])
    return _table(("", "adapter", "driver", "processor", "system", "versions"), rows)


def _title(report: Mapping[str, Any], number: int) -> str:
    adapter = (report["machine"]["adapter"] or {"device": "no adapter"})["device"]
    request = report.get("request", {})
    modes = [request.get(key, FULL_PRECISION) for key in ("qlinear", "qembedding")]
    asked = [request["dtype"], *(mode for mode in modes if mode != FULL_PRECISION)] if request else []
    asked += [f"{name}={value}" for name, value in request.get("options", {}).items()]
    if request and request["weights"] != "auto":
        asked.append(f"weights {request['weights']}")
    return f"### {adapter} (machine {number}){': ' if asked else ''}{', '.join(asked)}"


def _model(report: Mapping[str, Any], number: int) -> list[str]:
    rows = []
    for row in report["results"]:
        if "missing" in row:
            continue
        times = [_number(row[key]) for key in ("median_ms", "min_ms", "times_first")]
        rate = f"{_number(row['units_per_s'])} {row['unit']}/s"
        off = f"{row['max_abs_diff']:.1e} of {row['max_abs_ours']:.2g}" if "max_abs_diff" in row else ""
        notes = [row["note"]] if "note" in row else []
        if "weight_copy_ms" in row:
            notes.append(f"{100 * row['weight_copy_ms'] / row['median_ms']:.0f} % of the copy bandwidth")
        rows.append([row["workload"], row["side"], *times, str(row["runs"]), rate, off, "; ".join(notes)])
    columns = ("workload", "side", "median ms", "min ms", "× ours", "runs", "rate", "off by", "")
    lines = [_title(report, number), "", *_table(columns, rows, right=range(2, 6))]
    left_out: dict[tuple[str, str], list[str]] = {}
    for row in report["results"]:
        if "missing" in row:
            left_out.setdefault((row["side"], row["missing"]), []).append(row["workload"])
    for (side, reason), workloads in left_out.items():
        lines += ["", f"- without {side} ({', '.join(workloads)}): {_cell(reason)}"]
    for program in report.get("programs", ()):
        parts = []
        for name, method in program["methods"].items():
            dispatches = f", {method['dispatches']} dispatches" if "dispatches" in method else ""
            parts.append(f"`{name}` {method['ops']} operators{dispatches}")
        peak = f"; peak memory of a run {program['peak_bytes'] / 1e6:.0f} MB" if "peak_bytes" in program else ""
        start = f"; loaded in {program['load_ms']:.0f} ms" if "load_ms" in program else ""
        firsts = [
            f"{row['first_ms']:.0f} ms (`{row['workload']}`)"
            for row in report["results"]
            if row["side"] == program["backend"] and "first_ms" in row
        ]
        start += f", first calls {', '.join(firsts)}" if firsts else ""
        lines += ["", f"{program['backend']}: {program['bytes'] / 1e6:.1f} MB; {'; '.join(parts)}{peak}{start}."]
    return lines


def _kernels(report: Mapping[str, Any], number: int) -> list[str]:
    names = list(dict.fromkeys(name for row in report["results"] for name in row["peers_ms"]))
    rows = []
    for row in report["results"]:
        ours = best_ms(row)
        rate = f"{row['tflop_s']:.3f} TFLOP/s" if "tflop_s" in row else f"{row['gb_s']:.1f} GB/s"
        share = f"{100 * row['gb_s'] / report['copy_gb_s']:.0f} %"
        peers = [_peer(row, name, ours) for name in names]
        rows.append([row["kernel"], _number(ours), _number(row["wall_ms"]), rate, share, *peers])
    columns = ("kernel", "gpu ms", "wall ms", "rate", "of copy", *(f"{name} ms (× ours, off by)" for name in names))
    copied = f"Copy bandwidth, read and written: {report['copy_gb_s']:.0f} GB/s."
    lines = [_title(report, number), "", copied, "", *_table(columns, rows, right=range(1, len(columns)))]
    left_out: dict[tuple[str, str], list[str]] = {}
    for row in report["results"]:
        for name, reason in row["peers_missing"].items():
            left_out.setdefault((name, reason), []).append(row["kernel"])
    for (name, reason), kernels in left_out.items():
        lines += ["", f"- without {name} ({', '.join(kernels)}): {_cell(reason)}"]
    return lines


def _peer(row: Mapping[str, Any], name: str, ours: float) -> str:
    if name not in row["peers_ms"]:
        return ""
    spent = row["peers_ms"][name]
    return f"{_number(spent)} ({spent / ours:.2f}, {row['peers_max_abs_diff'][name]:.0e})"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    rule = ["---:" if index in set(right) else "---" for index in range(len(columns))]
    return [f"| {' | '.join(map(_cell, line))} |" for line in (columns, rule, *rows)]


def _number(value: float) -> str:
    """Four figures, without an exponent where they are many."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
