"""What `zoo bench nemotron-diarization` times: seconds for each second of audio, that is, the real-time factor.

`offline` is a recording, heard as a whole. `stream` is one chunk of the checkpoint's default streaming mode, at the
moment when the speaker cache and the queue are full: the longest step, which must be over before the next chunk is.
Both from samples to probabilities, speaker cache included.

Sides: the exported programs; `eager`, PyTorch in float32 on the CPU; `eager-cuda`, PyTorch in float32 on an NVIDIA GPU.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.eager import EagerProgram
from recipes.nemotron_diarization import checkpoint as checkpoints
from recipes.nemotron_diarization import voices
from recipes.nemotron_diarization.build import make_bundle
from recipes.nemotron_diarization.runner import OFFLINE, Diarizer
from recipes.recipe import Bundle, ExportRequest, Runnable, UserError, Workload

RECORDING = {True: 180.0, False: 10.0}  # seconds, on a GPU and where a processor stands in for one
STEPS = 120  # of a stream, until its cache and queue have been full more than once
UNIT = "second of audio"


def workloads(programs: Mapping[str, Runnable], request: ExportRequest) -> list[Workload]:
    """A recording and a step of a stream. A side that cannot run says why at its first call (`UserError`)."""
    bundle = make_bundle(checkpoints.load(request.weights))
    sides: dict[str, tuple[Runnable, type[np.floating[Any]]]] = {
        backend: (program, np.float16 if request.dtype == "fp16" else np.float32)
        for backend, program in programs.items()
    }
    sides |= {"eager": (EagerProgram(bundle), np.float32), "eager-cuda": (_Cuda(bundle), np.float32)}
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder)
        bundle.write_assets(assets)
        (assets / "recipe.json").write_text(json.dumps(bundle.metadata), encoding="utf-8")
        fresh = {side: Diarizer(program, assets, OFFLINE, kind) for side, (program, kind) in sides.items()}
        streams = {kind: _full_stream(assets, bundle, kind) for kind in {kind for _, kind in sides.values()}}
    full = {side: streams[kind].copy(program) for side, (program, kind) in sides.items()}
    recording = voices.conversation(RECORDING[_is_gpu()], voices=3)[0]
    chunk = voices.conversation(_chunk(bundle.metadata) / voices.RATE)[0]
    return [
        _workload("offline", recording, fresh, to_end=True),
        _workload(f"stream, {bundle.metadata['streaming_mode']}", chunk, full, to_end=False),
    ]


def _workload(name: str, samples: np.ndarray, diarizers: Mapping[str, Diarizer], to_end: bool) -> Workload:
    def hear(diarizer: Diarizer) -> None:
        stream = diarizer.copy()
        blocks = stream.feed(samples)
        if to_end:
            blocks += stream.finish()
        if not blocks:
            raise RuntimeError(f"{name}: no step was run")

    calls: dict[str, Callable[[], object]] = {
        side: functools.partial(hear, diarizer) for side, diarizer in diarizers.items()
    }
    return Workload(name, UNIT, len(samples) / voices.RATE, calls)


def _full_stream(assets: Path, bundle: Bundle, kind: type[np.floating[Any]]) -> Diarizer:
    """A stream before its longest step. What it has heard until then was made up: a model would take minutes."""
    meta = bundle.metadata
    invented = _Invented(bundle.methods["encode"].example_inputs[0].shape[2], meta)
    diarizer = Diarizer(invented, assets, meta["streaming_mode"], kind)
    rng = np.random.default_rng(0)
    longest, found = 0, diarizer
    for _ in range(STEPS):
        before = diarizer.copy()
        blocks = diarizer.feed(rng.normal(0, 0.1, _chunk(meta)).astype(np.float32))
        if blocks and invented.frames > longest:
            longest, found = invented.frames, before
    return found


def _chunk(meta: Mapping[str, Any]) -> int:
    """Samples from one step of a stream to the next."""
    size: int = meta["streaming_modes"][meta["streaming_mode"]][0]
    return size * int(meta["subsampling_factor"]) * int(meta["hop_length"])


class _Invented:
    """Answers with noise of the right shape, and remembers how many frames it was given last."""

    def __init__(self, width: int, metadata: Mapping[str, Any]):
        self.frames = 0
        self._width, self._meta = width, metadata
        self._rng = np.random.default_rng(0)

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        count = arrays[0].shape[1]
        if method == "stack":
            return [self._rng.normal(0, 1, (1, count, self._width)).astype(np.float32)]
        self.frames = int(arrays[1][1])
        shape = (1, count * self._meta["subsampling_factor"], self._meta["num_speakers"])
        return [self._rng.uniform(0, 1, shape).astype(np.float32)]


class _Cuda:
    """The methods in eager PyTorch on an NVIDIA GPU, copied there at the first call."""

    def __init__(self, bundle: Bundle):
        self._bundle = bundle
        self._methods: dict[str, torch.nn.Module] = {}

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        if not torch.cuda.is_available():
            raise UserError("PyTorch sees no CUDA device")
        if method not in self._methods:
            self._methods[method] = copy.deepcopy(self._bundle.methods[method].module).to("cuda")
        with torch.no_grad():
            output = self._methods[method](*(torch.from_numpy(array).to("cuda") for array in arrays))
        array: np.ndarray = output.cpu().numpy()
        return [array]


def _is_gpu() -> bool:
    """Whether WebGPU's adapter is a GPU; without an adapter there is none."""
    from backend.runtime.device import DeviceError, choose_adapter, is_processor

    try:
        return not is_processor(choose_adapter())
    except DeviceError:
        return False
