"""Runs ExecuTorch's backend operator suite and writes its table: `make test-suite`.

    python -m tests.suite.run [--flow webgpu_zoo xnnpack portable] [--filter REGEX] [--dtypes] [--resume] [--out DIR]

Writes out/suite/suite.json (every outcome) and out/suite/suite.md (op × result, what failed, what stayed outside and
why). Tests run in a worker process: one that crashes or hangs is a failure of its test, and the others go on. The exit
status is 1 when a test of ours failed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.suite.flow import FLOW, Outcome, cases, run_case

RESULTS = ("delegated", "partly", "outside", "failed", "skipped")
SECONDS_PER_TEST = 180


def work() -> None:
    """The worker: a test and a flow a line in, an outcome a line out; what libraries print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        test, flow = json.loads(line)
        print(json.dumps(run_case(test, flow).json()), file=answers, flush=True)


class _Worker:
    def __init__(self, log: Path) -> None:
        self.log = log
        self.process: subprocess.Popen[str] | None = None

    def run(self, test: str, flow: str) -> Outcome:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.suite.run", "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log.open("a"),
                text=True,
            )
        process = self.process
        assert process.stdin and process.stdout
        timer = threading.Timer(SECONDS_PER_TEST, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps([test, flow]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            return Outcome(**json.loads(line))
        self.process = None
        code = process.wait()
        return Outcome(test, flow, "failed", f"the process ended with {code} (crash, or over {SECONDS_PER_TEST} s)")

    def close(self) -> None:
        if self.process is not None and self.process.stdin:
            self.process.stdin.close()
            self.process.wait()


def run(tests: Iterable[tuple[str, str]], log: Path) -> Iterator[Outcome]:
    """The outcomes of tests, each (flow, name)."""
    worker = _Worker(log)
    try:
        for flow, test in tests:
            yield worker.run(test, flow)
    finally:
        worker.close()


def markdown(outcomes: list[Outcome]) -> str:
    """The document: rates of each flow, then, of ours, op × result and the details."""
    lines = ["# ExecuTorch's backend operator suite", "", "Written by `make test-suite`; never by hand.", ""]
    lines += ["| flow | tests | " + " | ".join(RESULTS) + " | passed |", "|---|" + "---:|" * (len(RESULTS) + 2)]
    by_flow = defaultdict(list)
    for outcome in outcomes:
        by_flow[outcome.flow].append(outcome)
    for flow, found in by_flow.items():
        lines.append(f"| {flow} | {len(found)} | {_counts(found)} | {_rate(found)} |")
    lines += [
        "",
        "`delegated`: passed with every operator in the delegate; `partly`: passed, some operators left to ExecuTorch;",
        "`outside`: nothing delegated (a flow that delegates is not run then); `skipped`: what is left",
        "outside has no portable kernel either, or eager cannot run the test.",
    ]
    for flow, found in by_flow.items():
        lines += ["", f"## {flow}", "", "| operator | " + " | ".join(RESULTS) + " | largest error |"]
        lines.append("|---|" + "---:|" * (len(RESULTS) + 1))
        ops = defaultdict(list)
        for outcome in found:
            ops[outcome.op].append(outcome)
        for op, group in sorted(ops.items()):
            worst = max(outcome.error_max for outcome in group)
            lines.append(f"| {op} | {_counts(group)} | {worst:.1e} |")
        rest = [outcome for outcome in found if outcome.result != "delegated"]
        if flow == FLOW and rest:
            lines += ["", "Not delegated whole:", "", "| test | result | why |", "|---|---|---|"]
            for outcome in rest:
                why = "; ".join([outcome.error, *outcome.reasons]).strip("; ").replace("|", "\\|").replace("\n", " ")
                lines.append(f"| {outcome.test} | {outcome.result} | {why[:300]} |")
    return "\n".join(lines) + "\n"


def _counts(outcomes: list[Outcome]) -> str:
    counts = Counter(outcome.result for outcome in outcomes)
    return " | ".join(str(counts[result]) for result in RESULTS)


def _rate(outcomes: list[Outcome]) -> str:
    passed = sum(outcome.passed for outcome in outcomes)
    return f"{100 * passed / max(len(outcomes), 1):.1f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flow", nargs="+", default=[FLOW], help=f"{FLOW}, xnnpack, portable")
    parser.add_argument("--filter", default="", help="a regular expression that the test's name contains")
    parser.add_argument("--dtypes", action="store_true", help="of ours, the dtype tests in float16 and float64 too")
    parser.add_argument("--out", type=Path, default=Path("out/suite"))
    parser.add_argument("--resume", action="store_true", help="keep the outcomes that DIR has already")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    tests = [test for test in cases() if re.search(options.filter, test)]
    kept = options.out / "outcomes.jsonl"
    if not options.resume:
        kept.unlink(missing_ok=True)
    outcomes = [Outcome(**json.loads(line)) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(outcome.flow, outcome.test) for outcome in outcomes}
    # The suite itself runs its dtype tests in float32 alone, and so do the flows of other backends.
    added = {FLOW} if options.dtypes else set()
    wanted = [(flow, test) for flow in options.flow for test in tests if "[" not in test or flow in added]
    left = [item for item in wanted if item not in done]
    for outcome in run(left, options.out / "suite.log"):
        outcomes.append(outcome)
        with kept.open("a") as lines:
            print(json.dumps(outcome.json()), file=lines)
        note = outcome.error or "; ".join(outcome.reasons)
        print(f"{len(outcomes):>4}  {outcome.flow}  {outcome.result:<9}  {outcome.test}  {note[:200]}", flush=True)
    (options.out / "suite.json").write_text(json.dumps([outcome.json() for outcome in outcomes], indent=1) + "\n")
    (options.out / "suite.md").write_text(markdown(outcomes))
    rates = [f"{flow} {_rate([outcome for outcome in outcomes if outcome.flow == flow])}" for flow in options.flow]
    print(f"{options.out / 'suite.md'}: {', '.join(rates)}")
    return int(any(outcome.flow == FLOW and outcome.result == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
