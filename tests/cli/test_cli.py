"""pytest tests/cli/test_cli.py: commands, JSON shapes, one-line errors."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recipes.recipe import BACKENDS, UserError
from tests.cli.harness import command, one_error_line
from zoo.peak import peak_bytes

Zoo = Callable[..., "subprocess.CompletedProcess[str]"]


def test_list_json(zoo: Zoo) -> None:
    done = zoo("list", "--json")
    assert done.returncode == 0, done.stderr
    models = {model["name"]: model for model in json.loads(done.stdout)["models"]}
    toy = models["toy"]
    assert toy["methods"] == ["scale", "count"]
    assert tuple(toy["backends"]) == BACKENDS
    assert toy["backends"]["xnnpack"]["available"] == ["none", "8da4w", "8da8w"]
    assert toy["backends"]["portable"] == {"runs": True, "modes": ["none", "8w"], "available": ["none"]}


def test_list_table(zoo: Zoo) -> None:
    done = zoo("list")
    assert done.returncode == 0, done.stderr
    assert "toy: a toy (nobody/toy); methods: scale, count" in done.stdout
    assert "none, 8da4w, 8da8w" in done.stdout


def test_listing_does_not_import_torch(environment: dict[str, str], tmp_path: Path) -> None:
    script = command("list")[2].replace("main()", "import atexit, sys; atexit.register(")
    script += "lambda: print('torch' in sys.modules)); main()"
    done = subprocess.run(
        [command()[0], "-c", script, "list"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "False", done.stdout + done.stderr


def test_doctor_json(zoo: Zoo) -> None:
    done = zoo("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    keys = {
        "ok",
        "adapter",
        "adapters",
        "limits",
        "features",
        "versions",
        "shim",
        "dispatch_loop",
        "products",
        "missing",
    }
    assert set(found) == keys
    assert found["dispatch_loop"]["runs"] in ("native", "in Python")
    assert found["versions"]["executorch"] == "1.5.1"


def test_doctor_without_an_adapter_says_what_to_install(zoo: Zoo) -> None:
    done = zoo("doctor", "--json", env={"ZOO_ADAPTER": "no such adapter"})
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["adapter"] is None and not found["ok"]
    assert any("adapter" in missing["what"] and missing["get"] for missing in found["missing"])
    assert "Traceback" not in done.stderr


def test_help_lists_the_models_and_their_options(zoo: Zoo) -> None:
    assert "toy" in zoo("run", "--help").stdout
    done = zoo("run", "toy", "--help")
    assert "--frames" in done.stdout and "zoo run toy" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("export", "nothing"), ("unknown model 'nothing'", "toy")),
        (("run", "nothing"), ("unknown model 'nothing'", "toy")),
        (("export", "toy", "--backend", "tpu"), ("unknown backend 'tpu'", "webgpu, xnnpack")),
        (("export", "toy", "--dtype", "fp8"), ("unknown dtype 'fp8'", "fp32, fp16")),
        (("export", "toy", "--backend", "xnnpack", "--qlinear", "3w"), ("'3w'", "none, 8da4w, 8da8w")),
        (("export", "toy", "--backend", "xnnpack", "--qlinear", "4w"), ("not declared", "none, 8da4w, 8da8w")),
        (("export", "toy", "--backend", "portable", "--qlinear", "8w"), ("no kernel", "modes that work there: none")),
        (("export", "toy", "--backend", "cuda"), ("cuda", "CUDA")),
        (("export", "toy", "--backend", "mlx"), ("mlx", "macOS")),
        (("export", "toy", "--qembedding", "4w"), ("embeddings", "not declared", "work there: none")),
        (("check", "toy", "--set", "frames=3"), ("toy has no option 'frames'", "it has none")),
        (("plan", "qwen3", "--set", "kv-dtype=int8"), ("'int8'", "auto, fp32, fp16")),
        (("bench", "qwen3", "--set", "context"), ("'context'", "NAME=VALUE")),
        (("export", "qwen3", "-b", "xnnpack", "--qembedding", "8w"), ("not declared", "work there: none")),
        (("check", "toy", "--backend", "vulkan"), ("export only",)),
        (("export", "toy", "--backend", "portable", "--output", "gone/a.pte"), ("folder gone does not exist",)),
        (("export", "toy", "--backend", "portable", "--output", "a.bin"), ("must end in .pte",)),
        (("export", "toy", "--backend", "portable", "--weights", "/no/such"), ("cannot read weights /no/such",)),
        (("check", "toy", "--backend", "portable", "--pte", "none.pte"), ("no such file: none.pte",)),
        (("export", "toy", "--nonsense"), ("--nonsense", "zoo export --help")),
        (("run", "toy", "--frames", "many"), ("--frames", "zoo run toy --help")),
        (("fly",), ("fly",)),
    ],
)
def test_one_line_for_a_mistake(zoo: Zoo, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    done = zoo(*arguments)
    one_error_line(done, *parts)
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_project_is_one_line_too(zoo: Zoo, environment: dict[str, str], tmp_path: Path) -> None:
    broken = "import zoo.doctor; zoo.doctor.examine = lambda: 1 / 0; "
    script = command()[2].replace("main()", broken + "main()")
    for arguments, code in ((("doctor",), 3), (("--debug", "doctor"), 1)):
        done = subprocess.run(
            [command()[0], "-c", script, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == code
        assert ("Traceback" in done.stderr) == (code == 1)
        assert "ZeroDivisionError" in done.stderr


def test_json_into_a_closed_pipe_is_quiet(environment: dict[str, str], tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("list", "--json"), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""


def test_sample_runs_the_recipe_on_its_own_arguments(zoo: Zoo, tmp_path: Path) -> None:
    done = zoo("sample", "toy", "--backend", "portable")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "toy" / "toy-portable.wav").stat().st_size == 44 + 2 * 2 * 1920


def test_check_and_bench_end_to_end(zoo: Zoo, tmp_path: Path) -> None:
    options = ("toy", "--backend", "portable", "--weights", "tiny")
    done = zoo("check", *options, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told) == ["model", "backend", "passed", "outputs"] and told["passed"] is True
    assert set(told["outputs"]["scale"]) == {"max_abs", "max_rel", "tolerance", "passed"}
    done = zoo("bench", *options, "--runs", "2", "--no-memory", "--against", "eager", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {"adapter", "model", "request", "machine", "results", "programs"}
    sides = {(row["workload"], row["side"]) for row in told["results"]}
    assert sides == {(method, side) for method in ("scale", "count") for side in ("portable", "eager")}
    for row in told["results"]:
        assert row["runs"] == 2 and 0 < row["min_ms"] <= row["median_ms"]
        assert row["s_per_unit"] == row["median_ms"] / 1e3
    assert {row["times_first"] for row in told["results"] if row["side"] == "portable"} == {1}
    (program,) = told["programs"]
    assert set(program["methods"]) == {"scale", "count"}
    one_error_line(zoo("bench", *options, "--against", "sorcery"), "no side sorcery", "eager")
    pte = tmp_path / "out" / "toy" / "toy-portable-fp32-tiny.pte"
    pte.write_bytes(pte.read_bytes()[:-100])
    one_error_line(zoo("check", *options, "--pte", str(pte)), "is damaged")


def test_check_out_of_bounds_exits_with_1(zoo: Zoo) -> None:
    done = zoo("check", "toy", "--backend", "portable", "--dtype", "fp16", "--weights", "tiny", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1 and told["passed"] is False, done.stderr


def test_peak_memory_is_that_of_the_process_that_ran() -> None:
    """An array of 200 MB in this process must not count in the child, which lists models without torch."""
    here = np.ones(25_000_000)  # 200 MB
    peak = peak_bytes(["list", "--json"])
    assert 10e6 < peak < here.nbytes
    with pytest.raises(UserError, match="unknown model 'sorcery'"):
        peak_bytes(["export", "sorcery"])
