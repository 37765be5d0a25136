"""The torch-free runtime. `load("model.pte")` runs a fully delegated program with numpy and wgpu alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend.runtime.module import Module


def load(path: str | os.PathLike[str]) -> Module:
    """See `backend.runtime.module.Module.load`."""
    from backend.runtime.module import Module

    return Module.load(path)
