"""What `zoo bench qwen3` times: prompts, steps with more and more of the context filled, and texts, in tokens.

A step is one call, from a token to its logits on the host. A text is `TEXT` tokens after `BEFORE` of a prompt that was
read already, greedy or drawn as Qwen3's own settings say, as `zoo run` writes them: without a stop token.

Sides: the exported programs, and `eager`, the same module in PyTorch in float32 on the CPU, without quantization.
A step must read every weight of the linears once: what that takes at the adapter's copy bandwidth stands beside it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np
import torch

from recipes.eager import EagerProgram
from recipes.qwen3.build import build
from recipes.qwen3.runner import Turn, Writer
from recipes.qwen3.sampling import Sampling
from recipes.recipe import FULL_PRECISION, ExportRequest, Runnable, Workload
from zoo import quantize

PROMPTS = (128, 512)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
BEFORE, TEXT = 448, 64
TEXTS = {"greedy": Sampling(), "drawn": Sampling(0.6, top_k=20, top_p=0.95)}
SEED = 7


def workloads(programs: Mapping[str, Runnable], request: ExportRequest) -> list[Workload]:
    """`PROMPTS` and one step at the end of each of `CONTEXTS`, as far as the caches reach, and `TEXTS`."""
    options = tuple((name, value) for name, value in request.options if name != "kv-dtype")
    plain = dataclasses.replace(
        request, dtype="fp32", qlinear=FULL_PRECISION, qembedding=FULL_PRECISION, options=options
    )
    bundle = build(plain)
    capacity, longest = bundle.metadata["capacity"], bundle.metadata["max_prompt"]
    sides: dict[str, Runnable] = {**programs, "eager": EagerProgram(bundle)}
    ids = np.random.default_rng(SEED).integers(0, bundle.metadata["vocab_size"], (1, max(PROMPTS)))

    def read(program: Runnable, length: int) -> np.ndarray:
        for first in range(0, length, longest):
            (logits,) = program.run("step", ids[:, first : min(first + longest, length)], np.array([first]))
        return logits

    def step(program: Runnable, context: int) -> np.ndarray:
        (logits,) = program.run("step", ids[:, :1], np.array([context - 1]))
        return logits

    writers = {side: Writer(program, bundle.metadata | {"stop_ids": ()}) for side, program in sides.items()}
    before = ids[0, : min(BEFORE, capacity // 2)].tolist()

    def write(side: str, sampling: Sampling) -> list[int]:
        return list(writers[side].generate(before, sampling, TEXT, Turn()))

    def calls(work: Callable[[Runnable, int], np.ndarray], length: int) -> dict[str, Callable[[], object]]:
        return {side: functools.partial(work, program, length) for side, program in sides.items()}

    weights = weight_bytes(bundle.methods["step"].module, request)
    prompts = [length for length in PROMPTS if length <= capacity]
    contexts = [context for context in CONTEXTS if context <= capacity]
    return [
        *(Workload(f"prompt of {length}", "token", length, calls(read, length)) for length in prompts),
        *(Workload(f"step at {context}", "token", 1, calls(step, context), weights) for context in contexts),
        *(
            Workload(
                f"{TEXT} tokens, {name}",
                "token",
                TEXT,
                {side: functools.partial(write, side, sampling) for side in sides},
                TEXT * weights,
            )
            for name, sampling in TEXTS.items()
        ),
    ]


def weight_bytes(module: torch.nn.Module, request: ExportRequest) -> int:
    """Bytes of the weights of all linears of the float32 `module`, as the program of `request` holds them."""
    linears = [part for part in module.modules() if isinstance(part, torch.nn.Linear)]
    item = 2 if request.dtype == "fp16" else 4
    shapes = [(linear.weight.shape[0], linear.weight.shape[1]) for linear in linears]
    return sum(quantize.weight_bytes(rows, depth, item, request.qlinear) for rows, depth in shapes)
