"""The `Recipe` type: everything the project knows about one model, and nothing about any other.

A recipe module (`recipes/<model>.py` or the package `recipes/<model>/`) defines one module-level
`RECIPE`. This file never imports torch: `zoo list` and the torch-free runtime read recipes without it;
a recipe imports torch inside the functions that need it or in modules that those functions import.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch

    from backend.runtime.device_tensor import DeviceTensor

Backend = Literal["webgpu", "xnnpack", "portable", "vulkan", "cuda", "mlx"]
BACKENDS: tuple[Backend, ...] = ("webgpu", "xnnpack", "portable", "vulkan", "cuda", "mlx")
FULL_PRECISION = "none"
_SHARED = ("command", "eager", "normalize", "recipe", "transformer")  # modules of the package that are no model


class UserError(Exception):
    """A mistake that the user can put right: printed as one line, without a traceback; exit code 2."""


class Runnable(Protocol):
    """What runs the exported methods, arrays in and out: a `zoo.program.Program`, or what stands in for one."""

    def run(self, method: str, *arrays: Any) -> list[np.ndarray]: ...


class Starting(Runnable, Protocol):
    """One whose results can stay on the GPU: `backend.runtime.module.Module.start`."""

    def start(self, method: str, *inputs: Any, fetch: Sequence[int]) -> list[DeviceTensor]: ...


def keeps_on_device(program: Runnable) -> bool:
    """Whether results of `program` can stay on the GPU: it is `Starting`, and does not say otherwise, as a
    `zoo.program.Program` in ExecuTorch's runtime does."""
    return bool(getattr(program, "keeps_on_device", hasattr(program, "start")))


@dataclass(frozen=True)
class Method:
    """One method of the exported program.

    `module.forward` takes and returns tensors only. `dynamic_shapes` is what `torch.export.export` takes.
    A buffer that forward mutates stays with the backend between calls and is shared by every method of the
    program that registers it under the same qualified name.
    """

    module: torch.nn.Module
    example_inputs: tuple[torch.Tensor, ...]
    dynamic_shapes: Any = None


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be from float64 eager: passes when `max_abs <= atol + rtol * max|golden|`."""

    atol: float
    rtol: float
    why: str

    def bound(self, scale: float) -> float:
        return self.atol + self.rtol * scale


@dataclass(frozen=True)
class Comparison:
    """One row of `zoo check`: `actual` from the program against `golden`, float64 eager, as numpy arrays."""

    name: str
    actual: Any
    golden: Any
    tolerance: Tolerance


@dataclass(frozen=True)
class QuantMode:
    """A quantization mode of a model: which modules stay in full precision, and why."""

    name: str
    keeps: Mapping[str, str] = field(default_factory=dict)


def quant_modes(*names: str, keeps: Mapping[str, str] | None = None) -> tuple[QuantMode, ...]:
    """Modes that keep the same modules in full precision."""
    return tuple(QuantMode(name, keeps or {}) for name in names)


@dataclass(frozen=True)
class ExportRequest:
    """What `zoo export` was asked for, validated against the recipe's tables."""

    backend: Backend
    weights: str = "auto"  # auto | synthetic | tiny | a local path | a hub id
    dtype: str = "fp32"
    qlinear: str = FULL_PRECISION
    qembedding: str = FULL_PRECISION
    options: tuple[tuple[str, str], ...] = ()  # of `Recipe.options`, those that are not the default, sorted

    def option(self, name: str, default: Any) -> Any:
        """The value that was asked for `name`, `default` when it was left at the recipe's first choice."""
        return dict(self.options).get(name, default)


@dataclass
class Bundle:
    """A checkpoint turned into methods, ready for `zoo.export`.

    `metadata` (JSON-serialisable) and `write_assets(folder)` (tokenizer files, voices, …) are what the
    torch-free runner needs at run time; they are stored beside the `.pte` as `<stem>.assets/`, the metadata
    as `recipe.json` in it. `notices` are printed once on stderr (synthetic weights are announced here).
    """

    methods: dict[str, Method]
    metadata: dict[str, Any]
    write_assets: Callable[[Path], None] = lambda folder: None
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workload:
    """One piece of work that `zoo bench` times on several sides, in turns.

    `calls` does it once per call, by side: a backend's name, `eager`, or another implementation of the model. A call
    makes ready what it needs at its first turn, which is not timed, and raises `UserError` where a side is missing.
    """

    name: str
    unit: str  # what the work is counted in: "megapixel", "second of audio", "token"
    amount: float  # of it in one call
    calls: Mapping[str, Callable[[], object]]
    weight_bytes: int = 0  # that a call must read, where that bounds its time: beside it stands what copying them takes


def deferred(place: str) -> Callable[..., Any]:
    """The function `module:name`, imported at its first call: so a declaration is read without torch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        module, _, name = place.partition(":")
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


def tolerance_table(
    bounds: Callable[[str, str, str], Mapping[str, Tolerance]],
    dtypes: tuple[str, ...],
    quantization: Mapping[str, tuple[QuantMode, ...]],
) -> dict[tuple[str, str, str], Mapping[str, Tolerance]]:
    """`bounds(backend, dtype, mode)` for everything that a recipe declares."""
    return {
        (backend, dtype, mode): bounds(backend, dtype, mode)
        for backend in BACKENDS
        for dtype in dtypes
        for mode in (FULL_PRECISION, *(mode.name for mode in quantization.get(backend, ())))
    }


@dataclass(frozen=True)
class Recipe:
    """One model.

    build(request) -> Bundle                      checkpoint to methods (torch)
    check(program, request) -> list[Comparison]   every method and the end-to-end output against float64 eager;
                                                  `program` is a `zoo.program.Program` loaded from the `.pte`
    run                                           the function behind `zoo run <name>`: a typer command whose
                                                  parameters are the model's own options
    sample_arguments                              arguments of `zoo run <name>` used by `make <name>-<backend>`;
                                                  `{out}` in them stands for `out/<name>/<name>-<backend>`
    full_delegation                               backends on which export fails when a node stays outside a delegate
    excluded                                      backends that cannot take this model, and why
    embeddings                                    modes that embedding tables can be stored in, by backend, as
                                                  `quantization` says it of linears
    options                                       export options of this model alone: name -> choices, default first
    identity(weights) -> str                      what a weights argument stands for at this moment, when that is more
                                                  than files and a hub revision (`zoo.artifact.weights_identity`)
    workloads(programs, request)                  what `zoo bench` times: a list of `Workload`; `programs` are loaded,
                                                  by backend; without it, every method on its example inputs
    """

    name: str
    summary: str
    checkpoint: str
    methods: tuple[str, ...]
    dtypes: tuple[str, ...]
    quantization: Mapping[str, tuple[QuantMode, ...]]
    tolerances: Mapping[tuple[str, str, str], Mapping[str, Tolerance]]  # (backend, dtype, mode) -> output -> bound
    build: Callable[[ExportRequest], Bundle]
    check: Callable[..., list[Comparison]]
    run: Callable[..., None]
    sample_arguments: tuple[str, ...] = ()
    full_delegation: tuple[str, ...] = ("webgpu",)
    excluded: Mapping[str, str] = field(default_factory=dict)
    embeddings: Mapping[str, tuple[QuantMode, ...]] = field(default_factory=dict)
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    identity: Callable[[str], str] | None = None
    workloads: Callable[..., list[Workload]] | None = None

    def modes(self, backend: str) -> tuple[str, ...]:
        """Quantization modes of linears declared for `backend`, full precision first."""
        return (FULL_PRECISION, *(mode.name for mode in self.quantization.get(backend, ())))

    def embedding_modes(self, backend: str) -> tuple[str, ...]:
        """The same of embeddings."""
        return (FULL_PRECISION, *(mode.name for mode in self.embeddings.get(backend, ())))


def names() -> tuple[str, ...]:
    """Names of all models, sorted; the module name with `_` for `-` is the registry."""
    package = importlib.import_module("recipes")
    modules = (module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(sorted(name.replace("_", "-") for name in modules if name not in _SHARED))


def load(name: str) -> Recipe:
    """The recipe called `name`. Raises `UserError` for an unknown name."""
    if name not in names():
        raise UserError(f"unknown model {name!r}: choose one of {', '.join(names())}")
    recipe: Recipe = importlib.import_module(f"recipes.{name.replace('-', '_')}").RECIPE
    return recipe
