"""SAM 2 on the GPU backend, end to end on tiny weights: pytest tests/recipes/test_sam2_webgpu.py"""

from __future__ import annotations

import json
import operator
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import Takes, lose, readbacks

import backend.runtime
from backend.runtime.device import Device, get_device
from backend.runtime.errors import DeviceError
from backend.runtime.program import read_program
from recipes.recipe import UserError
from recipes.sam2 import RECIPE, standin
from recipes.sam2.prompts import Prompt
from recipes.sam2.runner import Segmenter
from tests.cli.harness import environ
from tests.passes.programs import Method, lower
from zoo.artifact import assets_of
from zoo.check import check
from zoo.export import ExportReport, export, make_request
from zoo.pictures import read_rgb, sample_path
from zoo.program import Program

PICTURE = read_rgb(sample_path("sample:chelsea"))
PROMPT = Prompt(((220, 160), (20, 20)), (1, 0), (100, 50, 400, 280))
SEGMENT_WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "executorch"):
    sys.modules[name] = None
import json
from pathlib import Path
from backend.runtime import load
from recipes.sam2.prompts import Prompt
from recipes.sam2.runner import Segmenter
from zoo.pictures import read_rgb, sample_path
segmenter = Segmenter(load(Path(sys.argv[1])), Path(sys.argv[2]))
segmenter.look(read_rgb(sample_path("sample:chelsea")))
prompt = Prompt(((220, 160), (20, 20)), (1, 0), (100, 50, 400, 280))
print(json.dumps([one.annotation for one in segmenter.masks(segmenter.ask(prompt), True)]))
"""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ExportReport]]:
    path = tmp_path_factory.mktemp("sam2") / "sam2.pte"
    yield path, export(RECIPE, make_request(RECIPE, "webgpu", weights="tiny"), path)


def test_one_partition_a_method_and_weights_once(exported: tuple[Path, ExportReport]) -> None:
    path, report = exported
    assert list(read_program(path).methods) == ["encode", "prompt"]
    for method in report.methods.values():
        assert (method.partitions, method.undelegated) == (1, 0)
    weights = sum(weight.numel() for weight in standin.tiny().model.parameters())
    assert report.bytes < 4 * weights * 1.1  # the states are zeros, which take no room


def test_windows_take_no_copies(exported: tuple[Path, ExportReport]) -> None:
    """Of a block: norm, projection, attention, its heads side by side, projection, norm, two linears; where queries
    are pooled two pools and a projection more; a pad where windows stand over; a sum where its order changes."""
    kernels = backend.runtime.load(exported[0]).plan("encode", np.zeros((1, 128, 128, 3), np.uint8))["kernels"]
    blocks = 6
    assert sum("layer_norm" in kernel for kernel in kernels) == 2 * blocks
    assert sum("pad" in kernel for kernel in kernels) == 2
    # On a processor attention is two products and a softmax between them.
    attention = ["attention" in kernel for kernel in kernels]
    assert len(kernels) - sum(map(operator.and_, attention, attention[1:])) <= 75, kernels


def test_check_passes(exported: tuple[Path, ExportReport]) -> None:
    report = check(RECIPE, make_request(RECIPE, "webgpu", weights="tiny"), pte=exported[0])
    assert report.passed, report


def test_both_runtimes_and_a_process_without_torch_agree(exported: tuple[Path, ExportReport]) -> None:
    path, answers = exported[0], []
    for runtime in ("executorch", "direct"):
        with Program.load(path, runtime) as program:
            segmenter = Segmenter(program, assets_of(path))
            segmenter.look(PICTURE)
            answers.append([one.annotation for one in segmenter.masks(segmenter.ask(PROMPT), True)])
    run = [sys.executable, "-c", SEGMENT_WITHOUT_TORCH, str(path), str(assets_of(path))]
    done = subprocess.run(run, capture_output=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == answers[0] == answers[1] and len(answers[0]) == 3


def test_nothing_of_a_picture_comes_back(exported: tuple[Path, ExportReport], monkeypatch: pytest.MonkeyPatch) -> None:
    """With results that can stay on the GPU; ExecuTorch's runtime hands out all three maps."""
    path, maps = exported[0], 4 * (64 * 8 * 8 + 16 * 16 * 16 + 8 * 32 * 32)
    for runtime, expected in (("direct", []), ("executorch", [maps])):
        with Program.load(path, runtime) as program:
            segmenter = Segmenter(program, assets_of(path))
            sizes = readbacks(monkeypatch)
            segmenter.look(PICTURE)
            assert sizes == expected
            segmenter.ask(PROMPT)
            assert len(sizes) == len(expected) + 1


def test_a_program_of_an_older_version_is_refused(exported: tuple[Path, ExportReport], tmp_path: Path) -> None:
    old = lower(tmp_path / "old.pte", {"encode": Method(Takes(), (torch.zeros(1, 3, 128, 128),))}).path
    for runtime in ("direct", "executorch"):
        with Program.load(old, runtime) as program:
            segmenter = Segmenter(program, assets_of(exported[0]))
            with pytest.raises(UserError, match="one of an older version: export again"):
                segmenter.look(PICTURE)
            with pytest.raises(UserError, match="no picture yet"):
                segmenter.ask(PROMPT)


@pytest.mark.parametrize("noticed", ["by the prompt", "elsewhere"])
def test_a_gpu_lost_while_it_encodes(
    noticed: str, exported: tuple[Path, ExportReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt says so, whoever noticed first: no masks of a picture that a new device does not have."""
    path = exported[0]
    monkeypatch.setattr("backend.runtime.device._current", lost := Device())
    with Program.load(path, "direct") as program:
        segmenter = Segmenter(program, assets_of(path))
        segmenter.look(PICTURE)
        lose(lost, noticed == "elsewhere")
        with pytest.raises(DeviceError):
            segmenter.ask(PROMPT)
        with pytest.raises(UserError, match="no picture yet"):
            segmenter.ask(PROMPT)
        segmenter.look(PICTURE)
        assert np.isfinite(segmenter.ask(PROMPT).logits).all() and get_device() is not lost


def test_two_programs_keep_two_pictures(exported: tuple[Path, ExportReport]) -> None:
    path = exported[0]
    with Program.load(path, "executorch") as one, Program.load(path, "executorch") as two:
        first, second = Segmenter(one, assets_of(path)), Segmenter(two, assets_of(path))
        first.look(PICTURE)
        before = first.ask(PROMPT).logits.copy()
        second.look(np.ascontiguousarray(PICTURE[:, ::-1]))
        assert np.abs(second.ask(PROMPT).logits - before).max() > 0.1
        np.testing.assert_array_equal(first.ask(PROMPT).logits, before)


def test_commands(exported: tuple[Path, ExportReport], tmp_path: Path) -> None:
    """One prompt with every output, and a conversation; what they say is the same."""

    def zoo(*arguments: str, lines: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from zoo.cli import main; main()", "run", "sam2", "sample:chelsea"]
        return subprocess.run(
            [*command, "--pte", str(exported[0]), "--runtime", "direct", *arguments],
            cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=300, input=lines,
        )  # fmt: skip

    outputs = ("-o", "m.png", "--overlay", "o.webp", "--rle", "r.json", "--json")
    done = zoo("--point", "220,160", "--negative", "20,20", "--box", "100,50,400,280", "--multimask", *outputs)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "r.json").read_text()) and len(document["masks"]) == 3
    names = ["m-1.png", "m-2.png", "m-3.png", "o.webp", "r.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names and "MEANINGLESS" in done.stderr
    for name, mask in zip(names, document["masks"], strict=False):
        pixels = np.array(Image.open(tmp_path / name))
        assert pixels.shape == (300, 451) and set(np.unique(pixels)) <= {0, 255}
        assert (pixels > 0).sum() == mask["area"]
    request = {"points": [[220, 160], [20, 20]], "labels": [1, 0], "box": [100, 50, 400, 280], "multimask": True}
    done = zoo("--interactive", lines=json.dumps(request) + "\nnonsense\n" + json.dumps({"mask": "previous"}) + "\n")
    assert done.returncode == 0, done.stderr
    first, second, third = (json.loads(line) for line in done.stdout.splitlines())
    assert first["masks"] == document["masks"] and "not JSON" in second["error"] and len(third["masks"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype", "mode"),
    [
        ("webgpu", "fp16", "none"),
        *(("webgpu", "fp32", mode) for mode in ("4w", "8w", "8da4w", "8da8w")),
        *(("xnnpack", "fp32", mode) for mode in ("none", "8da4w", "8da8w")),
    ],
)
def test_precisions(target: str, dtype: str, mode: str, tmp_path: Path) -> None:
    request = make_request(RECIPE, target, weights="tiny", dtype=dtype, qlinear=mode)
    report = export(RECIPE, request, tmp_path / "sam2.pte")
    if target == "webgpu":
        assert all((method.partitions, method.undelegated) == (1, 0) for method in report.methods.values())
    checked = check(RECIPE, request, pte=report.path)
    assert checked.passed, checked


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", ["tiny", "base-plus"])
def test_real_configuration(size: str, tmp_path: Path) -> None:
    request = make_request(RECIPE, "webgpu", weights="synthetic" if size == "tiny" else f"synthetic:{size}")
    report = export(RECIPE, request, tmp_path / "sam2.pte")
    assert all((method.partitions, method.undelegated) == (1, 0) for method in report.methods.values())
    checked = check(RECIPE, request, pte=report.path)
    assert checked.passed, checked


@pytest.mark.slow
def test_large_picture(exported: tuple[Path, ExportReport], tmp_path: Path) -> None:
    """12000 × 9000 pixels from file to files."""
    Image.new("RGB", (12000, 9000), "teal").save(tmp_path / "large.jpg")
    with Program.load(exported[0], "direct") as program:
        segmenter = Segmenter(program, assets_of(exported[0]))
        segmenter.look(read_rgb(tmp_path / "large.jpg"))
        (found,) = segmenter.masks(segmenter.ask(Prompt(((11999, 8999),), (1,))), False)
        assert found.mask.shape == (9000, 12000) and found.annotation["area"] == found.mask.sum()
