"""Qwen3: chat with Alibaba's language models of 0.6, 1.7 and 4 billion weights (`Qwen3ForCausalLM` in transformers).

    conversation ─ text.py ─► tokens ─ runner.py ─► step(tokens, position) → logits ─ sampling.py ─► token ─► text

checkpoint.py, standin.py   weights          modules.py   the exported method
build.py                    the bundle       check.py     against float64 eager
This file is the declaration and is read without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipes.qwen3.checkpoint import HUB_ID, SIZES, weights_argument
from recipes.recipe import (
    BACKENDS,
    FULL_PRECISION,
    Bundle,
    Comparison,
    ExportRequest,
    QuantMode,
    Recipe,
    Tolerance,
    UserError,
)

if TYPE_CHECKING:
    from recipes.qwen3.runner import Runnable

# No linear is kept: the output head is a third of the weights that a step of the 0.6B model reads. What is no linear
# stays: norms, and the embedding, of which a call reads only the rows of its tokens.


def _modes(*names: str) -> tuple[QuantMode, ...]:
    return tuple(QuantMode(name) for name in names)


QUANTIZATION = {
    "xnnpack": _modes("8da4w", "8da8w"),
    "cuda": _modes("4w", "8w"),
    "vulkan": _modes("4w", "8da4w"),
    "webgpu": _modes("4w", "8w", "8da4w", "8da8w"),
    "mlx": _modes("4w", "8w"),
}
CONTEXTS = tuple(str(2**power) for power in range(8, 16))
OPTIONS = {
    "kv-dtype": ("auto", "fp32", "fp16"),  # auto: as the weights
    "context": ("auto", *CONTEXTS),  # auto: 4096
}


def tolerances(dtype: str, mode: str, kv_dtype: str | None = None) -> dict[str, Tolerance]:
    """The bounds of a request; `kv_dtype` defaults to `dtype`. Weights have the same values on both sides."""
    exact = dtype == "fp32" and mode == FULL_PRECISION and kv_dtype in (None, "fp32")
    if exact:
        return {
            "logits": Tolerance(1e-3, 0, "float32 in another order of sums than eager's float64"),
            "tokens": Tolerance(0, 0, "within 1e-3 of float64 no likeliest token changes"),
        }
    if "da" in mode:
        return {
            "logits": Tolerance(
                0, 0.15, "activations of 8 bits (0.4%) at every linear; 4% was measured with XNNPACK after two layers"
            )
        }
    if dtype == "fp16":
        return {"logits": Tolerance(0, 2e-2, "linears and caches keep 11 bits (5e-4), through all layers")}
    if kv_dtype == "fp16":
        return {"logits": Tolerance(0, 1e-2, "queries, keys and values keep 11 bits (5e-4), through all layers")}
    return {"logits": Tolerance(1e-3, 0, "weights are the same on both sides: as in full precision")}


def build(request: ExportRequest) -> Bundle:
    from recipes.qwen3.build import build as build_bundle

    return build_bundle(request)


def check(program: Runnable, request: ExportRequest) -> list[Comparison]:
    from recipes.qwen3.check import check as check_program

    return check_program(program, request)


def run(
    prompt: Annotated[str | None, typer.Option(help="What to ask.")] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="A conversation: each line of stdin is a turn.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer as it is written.")] = False,
    system: Annotated[str | None, typer.Option(help="Instructions that hold for the whole conversation.")] = None,
    think: Annotated[bool, typer.Option("--think", help="Let the model think before it answers.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 512,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token: --temperature 0.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Default of this and the next: the checkpoint's.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this total probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep so many of the likeliest tokens; 0 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens of this share of the likeliest's chance.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: avoid tokens of the text so far.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same answer.")] = 0,
    size: Annotated[str | None, typer.Option("--size", "--checkpoint", help=f"{', '.join(SIZES)}.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="Precision of the caches: auto, fp32 or fp16.")] = "auto",
    context: Annotated[str, typer.Option(help=f"Capacity of the caches: auto, {', '.join(CONTEXTS)}.")] = "auto",
    backend: Annotated[str, typer.Option("--backend", "-b", help="webgpu, xnnpack or portable.")] = "webgpu",
    weights: Annotated[str, typer.Option(help="auto, synthetic, tiny, a folder or a hub id.")] = "auto",
    dtype: Annotated[str, typer.Option(help="fp32 or fp16.")] = "fp32",
    qlinear: Annotated[str, typer.Option(help="Quantization mode; `zoo list` names them.")] = FULL_PRECISION,
    runtime: Annotated[str, typer.Option(help="executorch, or direct: without torch and ExecuTorch.")] = "executorch",
    pte: Annotated[Path | None, typer.Option(help="Use this exported file instead of exporting.")] = None,
) -> None:
    """Answer a prompt, or hold a conversation."""
    from recipes.qwen3.runner import Chat, converse
    from recipes.qwen3.sampling import Sampling
    from zoo.artifact import assets_of
    from zoo.console import own_stdout, say
    from zoo.export import ensure_exported, make_request
    from zoo.program import Program
    from zoo.targets import check_target

    # What can be known to be wrong is said before the export, which takes minutes.
    if prompt is None and not interactive:
        raise UserError("give --prompt TEXT, or --interactive for a conversation")
    if prompt is not None and not prompt.strip():
        raise UserError("the prompt is empty: there is nothing to answer")
    if greedy and temperature:
        raise UserError("choose one of --greedy and --temperature")
    chosen = {
        "temperature": 0.0 if greedy else temperature,
        "top_p": top_p, "top_k": top_k, "min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    Sampling(**{name: value for name, value in chosen.items() if value is not None})  # type: ignore[arg-type]
    if max_tokens < 1:
        raise UserError(f"an answer must have at least 1 token, not {max_tokens}")
    check_target(backend, to_run=True)
    request = make_request(
        RECIPE,
        backend,
        weights=weights_argument(weights, size),
        dtype=dtype,
        qlinear=qlinear,
        options={"kv-dtype": kv_dtype, "context": context},
    )
    path = ensure_exported(RECIPE, request, pte)
    with Program.load(path, runtime) as program, own_stdout() as stdout:
        chat = Chat(program, assets_of(path), system, think)

        def answer(pieces: Iterator[str]) -> None:
            if stream or interactive:
                for piece in pieces:
                    stdout.write(piece.encode())
            else:
                stdout.write("".join(pieces).encode())
            stdout.write(b"\n")
            say(f"{chat.turn}; {path.name}, {runtime}{'' if chat.metadata['is_language'] else NOT_LANGUAGE}")

        def lines() -> Iterator[str]:
            if prompt is not None:
                yield prompt
            while interactive:
                if sys.stdin.isatty():
                    print("> ", end="", file=sys.stderr, flush=True)
                if not (line := sys.stdin.readline()):
                    return
                yield line

        ended = converse(chat, lines(), answer, (chat.sampling(**chosen), max_tokens))
    if ended is not None and (interactive or not chat.turn.tokens):
        raise UserError(ended)


NOT_LANGUAGE = "; NOT LANGUAGE: the weights are not a trained model's"

RECIPE = Recipe(
    name="qwen3",
    summary="chat: language models of 0.6, 1.7 and 4 billion weights",
    checkpoint=HUB_ID,
    methods=("step",),
    dtypes=("fp32", "fp16"),
    quantization=QUANTIZATION,
    options=OPTIONS,
    tolerances={
        (backend, dtype, mode): tolerances(dtype, mode)
        for backend in BACKENDS
        for dtype in ("fp32", "fp16")
        for mode in (FULL_PRECISION, *(mode.name for mode in QUANTIZATION.get(backend, ())))
    },
    build=build,
    check=check,
    run=run,
    sample_arguments=("--prompt", "Why is the sky blue? Answer in one sentence.", "--stream", "--max-tokens", "64"),
)
