"""What `zoo bench florence2` times: a picture until it can be asked about, a prompt, and tokens, greedy and with beams.

Sides: the exported programs; `eager`, the same modules in PyTorch in float32 on the CPU; `eager-cuda`, on an NVIDIA GPU
in the precision that was asked for. The picture is bytes, as the runner has them after resizing. What a picture and a
prompt become stays on the GPU where a side can leave it there: its time ends when the GPU is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
import torch

from recipes.eager import EagerProgram
from recipes.florence2.build import build
from recipes.florence2.generate import Decoder, generate, search_of
from recipes.recipe import Bundle, ExportRequest, Runnable, UserError, Workload
from zoo.program import keep

SEED = 0
PROMPT, TOKENS = 12, 32
SEARCHES = {"greedy": 1, "3 beams": 3}


def workloads(programs: Mapping[str, Runnable], request: ExportRequest) -> list[Workload]:
    """One picture, one prompt, and texts of `TOKENS` tokens. A side that cannot run says why (`UserError`)."""
    bundle = build(request)
    meta = bundle.metadata
    sides: dict[str, Runnable] = dict(programs)
    if request.dtype == "fp32":
        sides["eager"] = EagerProgram(bundle)
    sides["eager-cuda"] = _Cuda(request)
    rng = np.random.default_rng(SEED)
    side = meta["picture"]["side"]
    picture = rng.integers(0, 256, (1, side, side, 3), np.uint8)
    ids = rng.integers(0, meta["vocab_size"], (1, PROMPT))

    def encode(program: Runnable, method: str, given: np.ndarray) -> None:
        if isinstance(program, _Cuda):
            program.keep(method, given)
        else:
            keep(program, method, given).wait()

    def write(program: Runnable, beams: int) -> None:
        decoder = Decoder(program, meta["slots"], meta["image_tokens"] + PROMPT)
        list(generate(decoder, search_of(meta, beams, TOKENS), meta["generation"]["start_id"], (-1,)))

    def calls(work: Callable[[Runnable], object]) -> dict[str, Callable[[], object]]:
        return {name: functools.partial(work, program) for name, program in sides.items()}

    return [
        Workload("picture", "picture", 1, calls(lambda program: encode(program, "vision", picture))),
        Workload("prompt", "prompt", 1, calls(lambda program: encode(program, "encode", ids))),
        *(
            Workload(name, "token", TOKENS, calls(functools.partial(write, beams=beams)))
            for name, beams in SEARCHES.items()
        ),
    ]


class _Cuda:
    """The bundle on an NVIDIA GPU. Made at the first call, as another implementation may want the memory until then."""

    def __init__(self, request: ExportRequest):
        self._request = request
        self._bundle: Bundle | None = None

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        return [self._output(method, arrays).cpu().numpy()]

    def keep(self, method: str, *arrays: np.ndarray) -> None:
        """A call whose result nobody reads; returns when the GPU is done."""
        self._output(method, arrays)
        torch.cuda.synchronize()

    def _output(self, method: str, arrays: tuple[np.ndarray, ...]) -> torch.Tensor:
        if not torch.cuda.is_available():
            raise UserError("PyTorch finds no NVIDIA GPU")
        if self._bundle is None:
            self._bundle = build(self._request)
            for item in self._bundle.methods.values():
                item.module.cuda()
        with torch.no_grad():
            inputs = (torch.from_numpy(np.ascontiguousarray(array)).cuda() for array in arrays)
            output: torch.Tensor = self._bundle.methods[method].module(*inputs)
        return output
