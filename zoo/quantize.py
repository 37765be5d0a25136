"""Quantization modes of linear layers and embeddings: what each mode is and where it has kernels.

A recipe opts in by name (`Recipe.quantization`, `Recipe.embeddings`) and says which modules stay in full precision and
why. Adding a mode is one row in `MODES`; which backends run it is one entry in `KERNELS` (the GPU backend keeps its own
list).
Nothing here imports torch until a mode is applied: `zoo list` reads the table without it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from recipes.recipe import FULL_PRECISION, ExportRequest, Method, QuantMode, Recipe, UserError


@dataclass(frozen=True)
class Mode:
    """`bits` a weight; one scale for `group` weights along K, or for a whole output row when `group` is 0.

    `dynamic` modes also quantize the activations to 8 bits, per token, at run time.
    """

    bits: int
    group: int
    dynamic: bool
    what: str


MODES: Mapping[str, Mode] = {
    "4w": Mode(4, 32, False, "4-bit weights in groups of 32"),
    "8w": Mode(8, 0, False, "8-bit weights, one scale a row"),
    "8da4w": Mode(4, 32, True, "8-bit dynamic activations, 4-bit weights in groups of 32"),
    "8da8w": Mode(8, 0, True, "8-bit dynamic activations, 8-bit weights, one scale a row"),
}
# Where the scales of groups are kept in bfloat16: by ExecuTorch's XNNPACK partitioner (operators/node_visitor.py).
BFLOAT16_SCALES = ("xnnpack",)

# Modes whose kernels the ExecuTorch wheel has, by backend. Portable has none: torchao's operators come without
# out variants. The GPU backend is asked (`kernels`), so that the list stands beside its kernels.
KERNELS: Mapping[str, frozenset[str]] = {
    "xnnpack": frozenset({"8da4w", "8da8w"}),
    "portable": frozenset(),
    "vulkan": frozenset({"4w", "8da4w"}),
    "cuda": frozenset({"4w", "8w"}),
    "mlx": frozenset({"4w", "8w"}),
}
# The same of embeddings; what is not named has none.
EMBEDDING_KERNELS: Mapping[str, frozenset[str]] = {"mlx": frozenset({"4w", "8w"})}

Kind = Literal["linear", "embedding"]


def kernels(backend: str, kind: Kind = "linear") -> frozenset[str]:
    """The modes that `backend` has kernels for."""
    if backend != "webgpu":
        return KERNELS[backend] if kind == "linear" else EMBEDDING_KERNELS.get(backend, frozenset())
    # `find_spec`, not `except ImportError`: a module that is there and broken must say so.
    if importlib.util.find_spec("backend.quantization") is None:
        return frozenset()
    own = importlib.import_module("backend.quantization")
    return frozenset(own.MODES if kind == "linear" else own.EMBEDDING_MODES)


def available(recipe: Recipe, backend: str, kind: Kind = "linear") -> tuple[str, ...]:
    """The modes of `recipe` that run on `backend`, full precision first."""
    have = kernels(backend, kind)
    return tuple(mode for mode in _declared(recipe, backend, kind) if mode == FULL_PRECISION or mode in have)


def _declared(recipe: Recipe, backend: str, kind: Kind) -> tuple[str, ...]:
    return recipe.modes(backend) if kind == "linear" else recipe.embedding_modes(backend)


def check_mode(recipe: Recipe, backend: str, mode: str, kind: Kind = "linear") -> None:
    """Raises `UserError`, naming the modes that work, for a mode that `recipe` cannot use on `backend`."""
    works = available(recipe, backend, kind)
    if mode in works:
        return
    what = "quantization mode" if kind == "linear" else "quantization mode of embeddings"
    offer = f"modes that work there: {', '.join(works)}"
    if mode not in MODES:
        raise UserError(f"unknown {what} {mode!r} for {recipe.name} on {backend}; {offer}")
    if mode not in _declared(recipe, backend, kind):
        raise UserError(f"{what} {mode!r} is not declared for {recipe.name} on {backend}; {offer}")
    raise UserError(
        f"{what} {mode!r} is declared for {recipe.name} on {backend}, but {backend} has no kernel for it; {offer}"
    )


@dataclass
class Quantized:
    """What modes did: names of the modules they changed, and why each other one was kept.

    `saved`: bytes that the program is smaller than without the modes (`stored_bytes` before and after).
    """

    changed: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    saved: int = 0


def apply_request(recipe: Recipe, request: ExportRequest, methods: Mapping[str, Method]) -> Quantized:
    """Quantizes `methods` in place as `request`, which `check_mode` passed, asks for linears and embeddings."""
    before = stored_bytes(methods)
    done = Quantized()
    asked: tuple[tuple[Kind, str, Mapping[str, tuple[QuantMode, ...]]], ...] = (
        ("linear", request.qlinear, recipe.quantization),
        ("embedding", request.qembedding, recipe.embeddings),
    )
    for kind, mode, table in asked:
        if mode == FULL_PRECISION:
            continue
        declared = next(declared for declared in table[request.backend] if declared.name == mode)
        part = apply(methods, mode, declared, kind)
        done.changed += part.changed
        done.kept |= part.kept
    done.saved = before - stored_bytes(methods)
    return done


def settle(recipe: Recipe, request: ExportRequest, methods: Mapping[str, Method]) -> None:
    """Gives the weights of `methods`, in float32 (torchao takes no float64), the values that they stand for once
    quantized as `request` asks, and makes linears of a dynamic mode round their inputs as it does: what a check
    compares with, so that it sees the errors of kernels, not those of the mode's grids. The methods work in float64
    after that, too."""
    if {request.qlinear, request.qembedding} == {FULL_PRECISION}:
        return
    import torch
    from torchao.utils import TorchAOBaseTensor

    from zoo.eager import rounded_rows

    apply_request(recipe, request, methods)
    for method in methods.values():
        for module in method.module.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, TorchAOBaseTensor):
                if getattr(weight, "activation_quantization", None) is not None:
                    module.register_forward_pre_hook(lambda _, inputs: (rounded_rows(inputs[0]), *inputs[1:]))
                held: Any = weight
                if request.backend in BFLOAT16_SCALES and held.scale.shape[-1] > 1:
                    held.scale = held.scale.to(torch.bfloat16).to(held.scale.dtype)
                module.weight = torch.nn.Parameter(weight.dequantize(), requires_grad=False)


def stored_bytes(methods: Mapping[str, Method]) -> int:
    """Bytes of all weights as a program stores them: equal ones once, codes in as many bits as their mode says."""
    from torchao.utils import TorchAOBaseTensor

    stored: dict[Any, int] = {}
    for method in methods.values():
        for tensor in (*method.module.parameters(), *method.module.buffers()):
            if not isinstance(tensor, TorchAOBaseTensor):
                stored[tensor.data_ptr(), tensor.dtype, tensor.shape] = tensor.nbytes
                continue
            # By content, as export does: a table and a head that were one weight have equal codes.
            codes: Any = tensor
            bits = int(str(codes.target_dtype).removeprefix("torch.int"))
            content = hashlib.blake2b(codes.qdata.contiguous().numpy()).digest()
            stored[content, bits, tensor.shape] = codes.qdata.numel() * bits // 8 + codes.scale.nbytes
    return sum(stored.values())


def apply(methods: Mapping[str, Method], mode: str, declared: QuantMode, kind: Kind = "linear") -> Quantized:
    """Quantizes the linears (or embeddings) of all `methods` in place, once each where methods share a module.

    A pattern of `declared.keeps` is a shell pattern on the module's qualified name, with or without the method's
    name before it (`flow.*`, `*.eos_head`); it keeps the module and everything in it. One whose rows are not a
    multiple of the group is kept too. Raises `UserError` when nothing is left to quantize or a pattern meets no module.
    """
    import torch
    from torchao.quantization import quantize_

    taken = torch.nn.Linear if kind == "linear" else torch.nn.Embedding
    config = _config(MODES[mode])
    done = Quantized()
    seen: set[int] = set()
    unmet = set(declared.keeps)
    for method_name, method in methods.items():
        for name, module in method.module.named_modules():
            unmet -= {pattern for pattern in unmet if _meets(pattern, method_name, name)}
            if not isinstance(module, taken) or id(module) in seen:
                continue
            seen.add(id(module))
            qualified = f"{method_name}.{name}" if name else method_name
            reason = next((why for pattern, why in declared.keeps.items() if _keeps(pattern, method_name, name)), None)
            if reason is None:
                reason = _misfit(module.weight.shape[1], MODES[mode])
            if reason is not None:
                done.kept[qualified] = reason
                continue
            quantize_(module, config, filter_fn=lambda part, _name: isinstance(part, taken))
            done.changed.append(qualified)
    if unmet:
        raise UserError(f"mode {mode} keeps {', '.join(sorted(unmet))} in full precision, but no such module exists")
    if not done.changed:
        raise UserError(f"mode {mode} leaves every {kind} of this model in full precision")
    return done


def weight_bytes(rows: int, depth: int, item: int, mode: str) -> int:
    """What a weight of `rows` x `depth` numbers of `item` bytes takes under `mode`: its codes and scales."""
    if mode == FULL_PRECISION or _misfit(depth, MODES[mode]):
        return rows * depth * item
    return rows * depth * MODES[mode].bits // 8 + rows * (depth // (MODES[mode].group or depth)) * item


def _misfit(depth: int, mode: Mode) -> str | None:
    """Why a row of `depth` weights stays in full precision."""
    return f"K = {depth} is not a multiple of the group of {mode.group}" if mode.group and depth % mode.group else None


def _meets(pattern: str, method: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f"{method}.{name}", pattern)


def _keeps(pattern: str, method: str, name: str) -> bool:
    # The module itself or any module around it.
    parts = name.split(".")
    return any(_meets(pattern, method, ".".join(parts[:end])) for end in range(1, len(parts) + 1))


def _config(mode: Mode) -> Any:
    import torch
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerAxis, PerGroup

    dtype = getattr(torch, f"int{mode.bits}")  # torch.int4 is not in torch's stubs
    granularity = PerGroup(mode.group) if mode.group else PerAxis(0)
    if mode.dynamic:
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)
    return IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)
