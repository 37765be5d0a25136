"""Quantization modes of linear layers: the one table that says what each mode is and where it has kernels.

A recipe opts in by name (`Recipe.quantization`) and says which modules stay in full precision and why. Adding a
mode is one row in `MODES`; which backends run it is one entry in `KERNELS` (the GPU backend keeps its own list).
Nothing here imports torch until a mode is applied: `zoo list` reads the table without it.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recipes.recipe import FULL_PRECISION, Method, QuantMode, Recipe, UserError

if TYPE_CHECKING:
    import torch


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

# Modes whose kernels the ExecuTorch wheel has, by backend. Portable has none: torchao's operators come without
# out variants. The GPU backend is asked (`kernels`), so that the list stands beside its kernels.
KERNELS: Mapping[str, frozenset[str]] = {
    "xnnpack": frozenset({"8da4w", "8da8w"}),
    "portable": frozenset(),
    "vulkan": frozenset({"4w", "8da4w"}),
    "cuda": frozenset({"4w", "8w"}),
    "mlx": frozenset({"4w", "8w"}),
}


def kernels(backend: str) -> frozenset[str]:
    """The modes that `backend` has kernels for."""
    if backend != "webgpu":
        return KERNELS[backend]
    # `find_spec`, not `except ImportError`: a module that is there and broken must say so.
    if importlib.util.find_spec("backend.quantization") is None:
        return frozenset()
    return frozenset(importlib.import_module("backend.quantization").MODES)


def available(recipe: Recipe, backend: str) -> tuple[str, ...]:
    """The modes of `recipe` that run on `backend`, full precision first."""
    have = kernels(backend)
    return tuple(mode for mode in recipe.modes(backend) if mode == FULL_PRECISION or mode in have)


def check_mode(recipe: Recipe, backend: str, mode: str) -> None:
    """Raises `UserError`, naming the modes that work, for a mode that `recipe` cannot use on `backend`."""
    works = available(recipe, backend)
    if mode in works:
        return
    offer = f"modes that work there: {', '.join(works)}"
    if mode not in MODES:
        raise UserError(f"unknown quantization mode {mode!r} for {recipe.name} on {backend}; {offer}")
    if mode not in recipe.modes(backend):
        raise UserError(f"quantization mode {mode!r} is not declared for {recipe.name} on {backend}; {offer}")
    raise UserError(
        f"quantization mode {mode!r} is declared for {recipe.name} on {backend}, but {backend} has no kernel for it; "
        f"{offer}"
    )


@dataclass
class Quantized:
    """What a mode did: names of the linears it changed, and why each other one was kept.

    `saved`: bytes of the changed weights in full precision, less what their codes (in as many bits as the mode says)
    and scales take.
    """

    changed: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    saved: int = 0


def apply(methods: Mapping[str, Method], mode: str, declared: QuantMode) -> Quantized:
    """Quantizes the linears of all `methods` in place, once each where methods share a module.

    A pattern of `declared.keeps` is a shell pattern on the module's qualified name, with or without the method's
    name before it (`flow.*`, `*.eos_head`); it keeps the module and everything in it. A linear whose K is not a
    multiple of the group is kept too. Raises `UserError` when nothing is left to quantize or a pattern meets no module.
    """
    import torch
    from torchao.quantization import quantize_

    config = _config(MODES[mode])
    group = MODES[mode].group
    done = Quantized()
    seen: set[int] = set()
    unmet = set(declared.keeps)
    for method_name, method in methods.items():
        for name, module in method.module.named_modules():
            unmet -= {pattern for pattern in unmet if _meets(pattern, method_name, name)}
            if not isinstance(module, torch.nn.Linear) or id(module) in seen:
                continue
            seen.add(id(module))
            qualified = f"{method_name}.{name}" if name else method_name
            reason = next((why for pattern, why in declared.keeps.items() if _keeps(pattern, method_name, name)), None)
            if reason is None and group and module.in_features % group:
                reason = f"K = {module.in_features} is not a multiple of the group of {group}"
            if reason is not None:
                done.kept[qualified] = reason
                continue
            count, each = module.weight.numel(), module.weight.element_size()
            scales = count // (group or module.in_features)
            done.saved += count * each - count * MODES[mode].bits // 8 - scales * each
            quantize_(module, config, filter_fn=_is_linear)
            done.changed.append(qualified)
    if unmet:
        raise UserError(f"mode {mode} keeps {', '.join(sorted(unmet))} in full precision, but no such module exists")
    if not done.changed:
        raise UserError(f"mode {mode} leaves every linear of this model in full precision")
    return done


def _is_linear(module: torch.nn.Module, _name: str) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear)


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
