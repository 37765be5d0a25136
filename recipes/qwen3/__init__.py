"""Qwen3: chat with Alibaba's language models of 0.6, 1.7 and 4 billion weights (`Qwen3ForCausalLM` in transformers).

    conversation ─ text.py ─► tokens ─ runner.py ─► step(tokens, position) → logits ─┬─ sampling.py ─► token ─► text
                                                                                     └─ likeliest, draw (on the GPU)
checkpoint.py, standin.py   weights          modules.py, choose.py   the exported methods
build.py                    the bundle       check.py                against float64 eager       bench.py  tokens/s
This file is the declaration and is read without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from recipes.command import (
    BackendOption,
    DtypeOption,
    PteOption,
    QembeddingOption,
    QlinearOption,
    RuntimeOption,
    WeightsOption,
    opened,
)
from recipes.qwen3.checkpoint import HUB_ID, SIZES, weights_argument
from recipes.recipe import (
    FULL_PRECISION,
    Recipe,
    Tolerance,
    UserError,
    deferred,
    quant_modes,
    tolerance_table,
)

# No linear is kept: the output head is a third of the weights that a step of the 0.6B model reads. Norms stay.
QUANTIZATION = {
    "xnnpack": quant_modes("8da4w", "8da8w"),
    "cuda": quant_modes("4w", "8w"),
    "vulkan": quant_modes("4w", "8da4w"),
    "webgpu": quant_modes("4w", "8w", "8da4w", "8da8w"),
    "mlx": quant_modes("4w", "8w"),
}
# A call reads only the rows of its tokens, so this saves memory and no time: with the codes of the head, where the two
# are one weight, it is stored once in place of twice.
EMBEDDINGS = {"webgpu": quant_modes("4w", "8w"), "mlx": quant_modes("4w", "8w")}
CONTEXTS = tuple(str(2**power) for power in range(8, 16))
OPTIONS = {
    "kv-dtype": ("auto", "fp32", "fp16"),  # auto: as the weights
    "context": ("auto", *CONTEXTS),  # auto: 4096
}


def tolerances(backend: str, dtype: str, mode: str, kv_dtype: str | None = None) -> dict[str, Tolerance]:
    """The bounds of a request; `kv_dtype` defaults to `dtype`. Weights have the same values on both sides."""
    choice = {"choice": Tolerance(0, 0, "the numbers drawn lie in the middle between the bounds of tokens")}
    exact = dtype == "fp32" and mode == FULL_PRECISION and kv_dtype in (None, "fp32")
    if exact:
        choice["tokens"] = Tolerance(0, 0, "within 1e-3 of float64 no likeliest token changes")
        logits = Tolerance(1e-3, 0, "float32 in another order of sums than eager's float64")
    elif "da" in mode:
        logits = Tolerance(
            0, 0.15, "activations between two of 256 codes are rounded apart, and so on: 6% over 28 layers"
        )
    elif dtype == "fp16":
        logits = Tolerance(0, 2e-2, "linears and caches keep 11 bits (5e-4), through all layers")
    elif kv_dtype == "fp16":
        logits = Tolerance(0, 1e-2, "queries, keys and values keep 11 bits (5e-4), through all layers")
    else:
        logits = Tolerance(1e-3, 0, "weights are the same on both sides: as in full precision")
    return {"logits": logits, **choice}


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
    backend: BackendOption = "webgpu",
    weights: WeightsOption = "auto",
    dtype: DtypeOption = "fp32",
    qlinear: QlinearOption = FULL_PRECISION,
    qembedding: QembeddingOption = FULL_PRECISION,
    runtime: RuntimeOption = "executorch",
    pte: PteOption = None,
) -> None:
    """Answer a prompt, or hold a conversation."""
    from recipes.qwen3.runner import Chat, converse
    from recipes.qwen3.sampling import Sampling
    from zoo.artifact import assets_of
    from zoo.console import own_stdout, say

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
    opening = opened(
        RECIPE,
        backend=backend,
        weights=weights_argument(weights, size),
        dtype=dtype,
        qlinear=qlinear,
        qembedding=qembedding,
        options={"kv-dtype": kv_dtype, "context": context},
        runtime=runtime,
        pte=pte,
    )
    with opening as (program, path), own_stdout() as stdout:
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
    methods=("step", "likeliest", "draw"),
    dtypes=("fp32", "fp16"),
    quantization=QUANTIZATION,
    embeddings=EMBEDDINGS,
    options=OPTIONS,
    tolerances=tolerance_table(tolerances, ("fp32", "fp16"), QUANTIZATION),
    build=deferred("recipes.qwen3.build:build"),
    check=deferred("recipes.qwen3.check:check"),
    run=run,
    workloads=deferred("recipes.qwen3.bench:workloads"),
    sample_arguments=("--prompt", "Why is the sky blue? Answer in one sentence.", "--stream", "--max-tokens", "64"),
)
