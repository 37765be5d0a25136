"""Phonon on the GPU backend, end to end on tiny weights: pytest tests/recipes/test_phonon_webgpu.py"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.runtime import load
from backend.runtime.device_tensor import DeviceTensor
from recipes.phonon import RECIPE
from recipes.phonon.runner import Speaker
from recipes.recipe import UserError
from zoo.artifact import assets_of
from zoo.check import check
from zoo.export import ExportReport, export, make_request
from zoo.program import Program

ZOO = (sys.executable, "-c", "from zoo.cli import main; main()")
TEXT = "One two three. Four five, six!"
SPEAK_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["executorch"] = None
import hashlib, numpy as np
from pathlib import Path
from backend.runtime import load
from recipes.phonon.runner import Speaker
program = load(Path(sys.argv[1]))
frames = Speaker(program, Path(sys.argv[2])).stream(sys.argv[3], seed=3)
print(hashlib.sha256(np.concatenate(list(frames)).tobytes()).hexdigest())
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ExportReport]]:
    path = tmp_path_factory.mktemp("phonon") / "phonon.pte"
    yield path, export(RECIPE, make_request(RECIPE, "webgpu", weights="tiny"), path)


def samples(path: Path, runtime: str, seed: int = 3, text: str = TEXT) -> np.ndarray:
    with Program.load(path, runtime) as program:
        return np.concatenate(list(Speaker(program, assets_of(path)).stream(text, seed=seed)))


def test_every_method_is_one_partition(exported: tuple[Path, ExportReport]) -> None:
    for method in exported[1].methods.values():
        assert (method.partitions, method.undelegated) == (1, 0)


def test_check_passes(exported: tuple[Path, ExportReport]) -> None:
    report = check(RECIPE, make_request(RECIPE, "webgpu", weights="tiny"), pte=exported[0])
    assert report.passed, report


def test_both_runtimes_and_a_process_without_torch_speak_the_same(exported: tuple[Path, ExportReport]) -> None:
    path = exported[0]
    native, direct = samples(path, "executorch"), samples(path, "direct")
    assert np.array_equal(native, direct)
    command = [sys.executable, "-c", SPEAK_WITHOUT_TORCH, str(path), str(assets_of(path)), TEXT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == hashlib.sha256(native.tobytes()).hexdigest()


def test_t1_long_short_long_in_one_process(exported: tuple[Path, ExportReport]) -> None:
    """What a stream leaves in the caches is never heard in the next one."""
    with load(exported[0]) as program:
        speaker = Speaker(program, assets_of(exported[0]))
        said = [np.concatenate(list(speaker.stream(text, seed=1))) for text in (TEXT * 3, "Hi.", TEXT * 3)]
    assert np.array_equal(said[0], said[2])
    assert said[1].size and not np.array_equal(said[1], said[0][: said[1].size])


SEVERAL = TEXT * 4  # utterances, so that what one leaves behind would be heard in the next


def spoken(speaker: Speaker, text: str = SEVERAL, seed: int = 1) -> list[bytes]:
    return [frame.tobytes() for frame in speaker.stream(text, seed=seed)]


def test_frames_made_ahead_are_those_made_in_turn(exported: tuple[Path, ExportReport]) -> None:
    """Bit for bit over utterances that end by themselves, and after streams that were left in the middle."""
    path, told = exported[0], []
    with Program.load(path, "direct") as program:
        turns = Speaker(program, assets_of(path), warn=told.append, ahead=False)
        ahead = Speaker(program, assets_of(path), warn=told.append)
        assert ahead.works_ahead and not turns.works_ahead
        expected, short = spoken(turns), spoken(turns, TEXT)
        assert spoken(ahead) == expected and not told  # not one ended at its budget
        for frames in (1, 2, 4):
            stream = ahead.stream(SEVERAL, seed=5)
            for _ in range(frames):
                next(stream)
            stream.close()
            assert spoken(ahead, TEXT) == short
        assert spoken(turns) == expected


@pytest.mark.parametrize(("error", "call"), [(RuntimeError, 1), (KeyboardInterrupt, 4), (KeyboardInterrupt, 5)])
def test_an_error_in_the_middle_leaves_the_next_text_right(
    exported: tuple[Path, ExportReport], error: type[BaseException], call: int
) -> None:
    path, calls = exported[0], []
    with load(path) as module:
        expected = spoken(Speaker(module, assets_of(path), ahead=False), TEXT)

        class Failing:
            def run(self, method: str, *inputs: Any) -> list[np.ndarray]:
                raise AssertionError("works ahead")

            def start(self, method: str, *inputs: Any, **options: Any) -> list[DeviceTensor]:
                calls.append(method)
                if len(calls) == call:
                    raise error
                return module.start(method, *inputs, **options)

        speaker = Speaker(Failing(), assets_of(path))
        with pytest.raises(error):
            spoken(speaker, TEXT)
        assert spoken(speaker, TEXT) == expected


def test_the_first_frame_waits_for_nothing_else(exported: tuple[Path, ExportReport]) -> None:
    """It is handed out before the next one is begun; from then on one frame is ahead."""
    path, calls = exported[0], []
    with load(path) as module:

        class Listening:
            def run(self, method: str, *inputs: Any) -> list[np.ndarray]:
                raise AssertionError("works ahead")

            def start(self, method: str, *inputs: Any, **options: Any) -> list[DeviceTensor]:
                calls.append(method)
                return module.start(method, *inputs, **options)

        stream = Speaker(Listening(), assets_of(path)).stream(TEXT)
        seen = []
        for _ in range(3):
            next(stream)
            seen.append(list(calls))
            calls.clear()
        stream.close()
    assert seen == [["frame", "decode"], ["frame", "decode", "frame"], ["decode", "frame"]]


def test_wav_and_stream_hold_the_same_samples(exported: tuple[Path, ExportReport], tmp_path: Path) -> None:
    """T2 through the command: one header, the true length, 24 kHz mono, raw PCM of the same bytes."""
    path, wav = exported[0], tmp_path / "a.wav"
    zoo = [*ZOO, "run", "phonon", "--text", TEXT, "--weights", "tiny", "--pte", str(path)]
    file_run = subprocess.run([*zoo, "--output", str(wav)], capture_output=True, text=True, timeout=300)
    assert file_run.returncode == 0, file_run.stderr
    stream = subprocess.run([*zoo, "--stream"], capture_output=True, timeout=300)
    assert stream.returncode == 0, stream.stderr
    with wave.open(str(wav)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (24000, 1, 2)
        assert reader.readframes(reader.getnframes()) == stream.stdout
    assert len(stream.stdout) % (2 * 1920) == 0 and stream.stdout


def test_truncated_program_is_one_line(exported: tuple[Path, ExportReport], tmp_path: Path) -> None:
    cut = tmp_path / "cut.pte"
    cut.write_bytes(exported[0].read_bytes()[:-1000])
    for runtime in ("executorch", "direct"):
        with pytest.raises(UserError) as caught:
            Program.load(cut, runtime)
        assert "\n" not in str(caught.value)


def test_no_adapter_is_one_line(exported: tuple[Path, ExportReport], tmp_path: Path) -> None:
    command = [*ZOO, "run", "phonon", "--text", "Hi", "--weights", "tiny"]
    command += ["--pte", str(exported[0]), "--output", str(tmp_path / "a.wav")]
    environment = {"PATH": "/usr/bin:/bin", "VK_DRIVER_FILES": "/nowhere.json", "VK_ICD_FILENAMES": "/nowhere.json"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode != 0 and len(errors) == 1 and "adapter" in errors[0], done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_plan_names_the_kernels(exported: tuple[Path, ExportReport]) -> None:
    command = [
        *ZOO,
        "plan",
        "phonon",
        "--weights",
        "tiny",
        "--pte",
        str(exported[0]),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    methods = json.loads(done.stdout)["methods"]
    assert set(methods) == {"frame", "decode"}
    for method in methods.values():
        assert method["dispatches"] == len(method["kernels"]) > 10
        assert method["weight_bytes"] > 0
        assert 0 < method["bound_bytes"] <= method["buffer_bytes"] <= 1.15 * method["bound_bytes"]
