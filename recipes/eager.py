"""The methods of a bundle as plain PyTorch: what a recipe's check and its benchmark hold a program against."""

from __future__ import annotations

import numpy as np
import torch

from recipes.recipe import Bundle, ExportRequest, Recipe
from zoo import quantize


class EagerProgram:
    """A bundle with the interface of a loaded program. `dtype`: what floats are turned into before a call, if anything.

    Outputs are copies: what a method returns may be a view of a state.
    """

    def __init__(self, bundle: Bundle, dtype: torch.dtype | None = None):
        self._methods = {name: method.module for name, method in bundle.methods.items()}
        self._dtype = dtype

    def run(self, method: str, *arrays: np.ndarray) -> list[np.ndarray]:
        tensors = [torch.from_numpy(np.array(array, order="C")) for array in arrays]
        if self._dtype is not None:
            tensors = [tensor.to(self._dtype) if tensor.is_floating_point() else tensor for tensor in tensors]
        with torch.no_grad():
            outputs = self._methods[method](*tensors)
        return [output.numpy().copy() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]


def in_float64(recipe: Recipe, request: ExportRequest, bundle: Bundle) -> Bundle:
    """The bundle in float64 on the values that the program's weights stand for, rounded or quantized as they are, with
    the inputs of linears rounded where the mode does that.

    So a check sees the errors of the arithmetic and of caches, not those of the mode's grids.
    """
    quantize.settle(recipe, request, bundle.methods)
    for method in bundle.methods.values():
        method.module.double()
    return bundle
