"""Nemotron diarization at its real size, and recordings of hours: minutes a test on a machine without a GPU.

Run: pytest -m slow tests/recipes/test_nemotron_full.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from nemotron_support import RATE, make_ready, offline, talk

from recipes.nemotron_diarization import RECIPE, standin, voices
from recipes.recipe import ExportRequest
from zoo.check import compare
from zoo.export import export
from zoo.peak import peak_bytes
from zoo.program import Program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """31 layers for WebGPU, on seeded weights."""
    path = tmp_path_factory.mktemp("real") / "nemotron.pte"
    report = export(RECIPE, ExportRequest("webgpu", "synthetic"), path)
    assert {(row.partitions, row.undelegated) for row in report.methods.values()} == {(1, 0)}
    return path


def test_synthetic_is_the_real_configuration(tmp_path: Path) -> None:
    source = standin.synthetic("test")
    audio = source.model.config.audio_config
    assert (audio.num_hidden_layers, audio.hidden_size) == (31, 512)
    ready = make_ready(source, tmp_path / "assets")
    samples = talk(40.0)
    np.testing.assert_allclose(ready.run(samples), offline(ready, samples), atol=1e-4, rtol=0)
    assert ready.run(np.zeros(3 * RATE, np.float32)).max() < 0.5


def test_three_minutes_are_within_tolerance(real: Path) -> None:
    with Program.load(real) as program:
        outcomes = {row.name: compare(row) for row in RECIPE.check(program, ExportRequest("webgpu", "synthetic"))}
    assert all(outcome.passed for outcome in outcomes.values()), outcomes
    assert {"offline[180 s].probabilities", "offline[180 s].decisions"} <= set(outcomes)


@pytest.mark.parametrize("runtime", ["direct", "executorch"])
def test_memory_is_bounded_by_the_weights(real: Path, tmp_path: Path, runtime: str) -> None:
    """Less than a second copy of the weights would take; ExecuTorch's runtime brings torch along."""
    samples = voices.conversation(30.0)[0]  # a chunk, and one with a cache before it
    soundfile.write(tmp_path / "talk.wav", samples, RATE)
    peak = peak_bytes(["run", RECIPE.name, str(tmp_path / "talk.wav"), "--pte", str(real), "--runtime", runtime])
    assert peak < 1.5 * real.stat().st_size + {"direct": 300e6, "executorch": 500e6}[runtime]


def test_two_hours_take_no_more_memory_than_minutes(tmp_path: Path) -> None:
    pte = tmp_path / "nemotron.pte"
    export(RECIPE, ExportRequest("webgpu", "tiny"), pte)
    minute = voices.conversation(60.0)[0][::2]
    peaks = []
    for minutes in (2, 120):
        path = tmp_path / f"{minutes}.wav"
        with soundfile.SoundFile(path, "w", RATE // 2, 1, "PCM_16") as file:
            for _ in range(minutes):
                file.write(minute)
        outputs = ["--rttm", str(tmp_path / "talk.rttm"), "--plot", str(tmp_path / "talk.png")]
        peaks.append(peak_bytes(["run", RECIPE.name, str(path), *outputs, "--pte", str(pte), "--runtime", "direct"]))
    assert peaks[1] < peaks[0] + 64e6
