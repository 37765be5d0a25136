"""pytest tests/cli/test_audio.py: WAV and PCM (T2), closed pipes and Ctrl-C."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from recipes.recipe import UserError
from tests.cli.harness import command, one_error_line
from zoo.audio import open_sink, to_pcm

Zoo = Callable[..., "subprocess.CompletedProcess[str]"]
RATE = 24000


def _write(path: Path, frames: list[np.ndarray]) -> bytes:
    with open_sink(path, False, RATE) as sink:
        for frame in frames:
            sink.write(frame)
    return path.read_bytes()


def test_t2_samples_are_clamped_not_wrapped() -> None:
    values = np.array([1.5, -1.5, 1.0, -1.0, 0.0, 1e30, -np.inf], np.float32)
    pcm = np.frombuffer(to_pcm(values), "<i2")
    assert pcm.tolist() == [32767, -32768, 32767, -32767, 0, 32767, -32768]


def test_rounding_is_to_the_nearest_ties_to_even() -> None:
    values = np.array([0.5, 1.5, -0.5, 2.4, -2.6], np.float64) / 32767
    # f32 cannot hold a tie after the division exactly, so ties are tested where it can: at one half of full scale.
    assert np.frombuffer(to_pcm(values), "<i2").tolist()[3:] == [2, -3]
    assert np.frombuffer(to_pcm(np.array([0.5, -0.5], np.float32)), "<i2").tolist() == [16384, -16384]


def test_nan_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="NaN"), open_sink(tmp_path / "a.wav", False, RATE) as sink:
        sink.write(np.zeros(10, np.float32))
        sink.write(np.array([np.nan], np.float32))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("samples", [0, 1, 1920, 4001])
def test_t2_one_header_with_the_true_length(tmp_path: Path, samples: int) -> None:
    signal_ = np.linspace(-1.5, 1.5, samples, dtype=np.float32)
    data = _write(tmp_path / "a.wav", [signal_[:700], signal_[700:]])
    assert data.count(b"RIFF") == data.count(b"WAVE") == data.count(b"fmt ") == 1
    assert struct.unpack("<I", data[4:8])[0] == len(data) - 8
    assert data[36:40] == b"data" and struct.unpack("<I", data[40:44])[0] == 2 * samples == len(data) - 44
    assert data[44:] == to_pcm(signal_)
    info = soundfile.info(tmp_path / "a.wav")
    assert (info.samplerate, info.channels, info.subtype, info.frames) == (RATE, 1, "PCM_16", samples)


@pytest.mark.parametrize("frame", [1, 3, 7, 1921])
def test_t2_bytes_do_not_depend_on_how_it_is_cut(tmp_path: Path, frame: int) -> None:
    signal_ = np.random.default_rng(0).normal(0, 0.7, 5000).astype(np.float32)
    cut = [signal_[start : start + frame] for start in range(0, len(signal_), frame)]
    assert _write(tmp_path / "cut.wav", cut) == _write(tmp_path / "whole.wav", [signal_])


@pytest.mark.parametrize(
    ("name", "stream", "what"),
    [
        ("a.mp3", False, "must end in .wav"),
        ("gone/a.wav", False, "does not exist"),
        ("a.wav", True, "one of --output and --stream"),
        (None, False, "--output"),
    ],
)
def test_refused_destinations(tmp_path: Path, name: str | None, stream: bool, what: str) -> None:
    path = tmp_path / name if name else None
    with pytest.raises(UserError, match=what), open_sink(path, stream, RATE):
        pass
    assert os.listdir(tmp_path) == []


def test_stream_and_file_hold_the_same_samples(zoo: Zoo, tmp_path: Path, environment: dict[str, str]) -> None:
    done = zoo("run", "toy", "--output", "a.wav", "--frames", "5")
    assert done.returncode == 0, done.stderr
    streamed = subprocess.run(
        command("run", "toy", "--stream", "--frames", "5"),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=120,
    )
    # What the library printed to stdout is on stderr; stdout holds samples and nothing else.
    assert streamed.stderr.count(b"a library that prints") == 5
    assert streamed.stdout == (tmp_path / "a.wav").read_bytes()[44:]
    assert len(streamed.stdout) == 2 * 5 * 1920
    samples = np.frombuffer(streamed.stdout, "<i2")
    assert samples.max() == 32767 and samples.min() == -32768


def test_frames_leave_at_once_and_odd_reads_join(environment: dict[str, str], tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("run", "toy", "--stream", "--frames", "3", "--delay", "0.2"),
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
    )  # fmt: skip
    assert process.stdout is not None
    parts = [process.stdout.read(3)]
    assert process.poll() is None, "the first frame came only when the command had ended"
    while part := process.stdout.read(777):
        parts.append(part)
    assert process.wait(timeout=60) == 0
    whole = np.frombuffer(b"".join(parts), "<i2")
    assert len(whole) == 3 * 1920 and whole[0] == 0


def test_closed_pipe_ends_quietly(environment: dict[str, str], tmp_path: Path) -> None:
    line = " ".join(f"'{part}'" if " " not in part else f'"{part}"' for part in command("run", "toy", "--stream"))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line} --frames 100000 | head -c 10000"],
        cwd=tmp_path, env=environment, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout) == 10000
    assert set(done.stderr.splitlines()) <= {b"a library that prints to stdout"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_leaves_no_file(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = subprocess.Popen(
        command("run", "toy", "--output", "a.wav", "--frames", "1000", "--delay", "0.05"),
        cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not os.listdir(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert os.listdir(tmp_path), "it never began to write"
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert b"Traceback" not in stderr
    assert os.listdir(tmp_path) == []


def test_missing_folder_is_one_line(zoo: Zoo, tmp_path: Path) -> None:
    one_error_line(zoo("run", "toy", "--output", "gone/a.wav"), "folder gone does not exist")
    assert os.listdir(tmp_path) == []
