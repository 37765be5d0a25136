"""What the tests of SAM 2 share: a small picture, and a tiny model in eager PyTorch behind the runner."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from recipes.recipe import ExportRequest
from recipes.sam2.build import build
from recipes.sam2.check import EagerProgram
from recipes.sam2.runner import Segmenter
from zoo.pictures import read_rgb, sample_path

PICTURE = read_rgb(sample_path("sample:chelsea"))[::2, ::2]
HEIGHT, WIDTH = PICTURE.shape[:2]


@contextmanager
def one_thread() -> Iterator[None]:
    """Models of this size lose more time in waiting for threads than they win, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def eager_program() -> EagerProgram:
    return EagerProgram(build(ExportRequest("webgpu", "tiny")))


def write_assets(folder: Path) -> Path:
    metadata = build(ExportRequest("webgpu", "tiny")).metadata
    (folder / "recipe.json").write_text(json.dumps(metadata), encoding="utf-8")
    return folder


def make_segmenter(assets: Path) -> Segmenter:
    """One that sees `PICTURE`."""
    segmenter = Segmenter(eager_program(), assets)
    segmenter.look(PICTURE)
    return segmenter
