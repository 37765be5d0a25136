"""Florence-2 on the GPU backend, end to end: pytest tests/recipes/test_florence2_webgpu.py [-m slow]"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from florence2_support import PICTURE
from PIL import Image
from support import Takes, lose, readbacks

from backend.runtime.device import Device, get_device
from backend.runtime.errors import DeviceError
from recipes.florence2 import RECIPE
from recipes.florence2.runner import Florence
from recipes.recipe import UserError
from tests.passes.programs import Method, lower
from zoo.artifact import assets_of
from zoo.check import check
from zoo.export import ExportReport, export, make_request
from zoo.program import Program

MAIN = "from zoo.cli import main; main()"
WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "executorch"):
    sys.modules[name] = None
from pathlib import Path
from backend.runtime import load
from recipes.florence2.runner import Florence
from zoo.pictures import read_rgb
florence = Florence(load(Path(sys.argv[1])), Path(sys.argv[2]))
florence.see(read_rgb(Path(sys.argv[3])))
list(florence.ask("<OD>", None, 3, 16))
print(florence.answer.text)
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ExportReport]]:
    path = tmp_path_factory.mktemp("florence2") / "florence2.pte"
    yield path, export(RECIPE, make_request(RECIPE, "webgpu", weights="tiny"), path)


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.fromarray(PICTURE).save(path)
    return path


def test_one_partition_a_method(exported: tuple[Path, ExportReport]) -> None:
    found = {name: (report.partitions, report.undelegated) for name, report in exported[1].methods.items()}
    assert found == dict.fromkeys(("vision", "encode", "step"), (1, 0))


def test_check_passes(exported: tuple[Path, ExportReport]) -> None:
    """Every method within 1e-4 of float64; the tokens of 64 greedy steps and of a beam search are the same."""
    report = check(RECIPE, make_request(RECIPE, "webgpu", weights="tiny"), pte=exported[0])
    assert report.passed, report
    assert {"greedy.tokens", "beams.tokens"} <= set(report.outputs)


def test_both_runtimes_and_a_process_without_torch_say_the_same(
    exported: tuple[Path, ExportReport], photo: Path
) -> None:
    path, texts = exported[0], []
    for runtime in ("executorch", "direct"):
        with Program.load(path, runtime) as program:
            florence = Florence(program, assets_of(path))
            florence.see(PICTURE)
            list(florence.ask("<OD>", None, 3, 16))
            texts.append(florence.answer.text)
    run = [sys.executable, "-c", WITHOUT_TORCH, str(path), str(assets_of(path)), str(photo)]
    done = subprocess.run(run, capture_output=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().rstrip("\n") == texts[0] == texts[1] != ""


def test_nothing_comes_back_before_the_first_logits(
    exported: tuple[Path, ExportReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With results that can stay on the GPU; ExecuTorch's runtime hands out features and encoding."""
    for runtime, before in (("direct", 0), ("executorch", 2)):
        with Program.load(exported[0], runtime) as program:
            florence = Florence(program, assets_of(exported[0]))
            sizes = readbacks(monkeypatch)
            florence.see(PICTURE)
            assert len(sizes) == before // 2
            list(florence.ask("<OD>", None, 1, 4))
            assert sizes[before:] == [4 * 1408] * 4 and len(sizes) == before + 4
        assert florence.answer.first_seconds > 0 and florence.answer.seconds > 0


def test_a_program_of_an_older_version_is_refused(exported: tuple[Path, ExportReport], tmp_path: Path) -> None:
    old = lower(tmp_path / "old.pte", {"vision": Method(Takes(), (torch.zeros(1, 3, 96, 96),))}).path
    for runtime in ("direct", "executorch"):
        with Program.load(old, runtime) as program, pytest.raises(UserError, match="one of an older version: export"):
            Florence(program, assets_of(exported[0])).see(PICTURE)


@pytest.mark.parametrize("noticed", ["by the answer", "elsewhere"])
def test_a_gpu_lost_while_it_sees(
    noticed: str, exported: tuple[Path, ExportReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer says so, whoever noticed first: none about a picture that a new device does not have."""
    monkeypatch.setattr("backend.runtime.device._current", lost := Device())
    with Program.load(exported[0], "direct") as program:
        florence = Florence(program, assets_of(exported[0]))
        florence.see(PICTURE)
        lose(lost, noticed == "elsewhere")
        with pytest.raises(DeviceError):
            list(florence.ask("<OD>", None, 1, 4))
        with pytest.raises(UserError, match="no picture yet"):
            florence.ask("<OD>", None, 1, 4)
        florence.see(PICTURE)
        list(florence.ask("<OD>", None, 1, 4))
        assert florence.answer.tokens == 4 and get_device() is not lost


def test_the_command(exported: tuple[Path, ExportReport], photo: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", MAIN, "run", "florence2", *arguments, "--pte", str(exported[0])]
        root = Path(__file__).parents[2]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)

    out = tmp_path / "boxes.png"
    options = ("--weights", "tiny", "--max-tokens", "12", "--runtime", "direct")
    done = run(str(photo), "--task", "<OD>", "--json", "-o", str(out), *options)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["task"] == "<OD>" and answer["image"] == {"width": 70, "height": 50} and answer["tokens"] == 12
    assert set(answer["result"]) == {"bboxes", "labels"} and "NOT A TRAINED MODEL" in done.stderr
    with Image.open(out) as image:
        assert image.height > 50
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff\xe0 not a picture")
    done = run(str(broken), "--task", "<OD>", *options)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


MODES = [("fp32", mode) for mode in RECIPE.modes("webgpu")[1:]] + [("fp16", "none")]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "mode"), MODES)
def test_modes(tmp_path: Path, dtype: str, mode: str) -> None:
    request = make_request(RECIPE, "webgpu", weights="tiny", dtype=dtype, qlinear=mode)
    report = check(RECIPE, request, pte=export(RECIPE, request, tmp_path / "mode.pte").path)
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("mode", RECIPE.modes("xnnpack"))
def test_xnnpack(tmp_path: Path, mode: str) -> None:
    request = make_request(RECIPE, "xnnpack", weights="tiny", qlinear=mode)
    report = check(RECIPE, request, pte=export(RECIPE, request, tmp_path / "mode.pte").path)
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_real_configuration(tmp_path: Path) -> None:
    """Florence-2 base on seeded weights."""
    request = make_request(RECIPE, "webgpu", weights="synthetic")
    exported = export(RECIPE, request, tmp_path / "base.pte")
    assert all((report.partitions, report.undelegated) == (1, 0) for report in exported.methods.values())
    report = check(RECIPE, request, pte=exported.path)
    assert report.passed, report
