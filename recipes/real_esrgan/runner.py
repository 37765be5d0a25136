"""`zoo run real-esrgan`: pictures from files through an exported program into files, without torch.

    file ─ pictures.py ─► colour, alpha ─ tiling.py ─► bands of tiles ─ resample.py ─► at --scale ─ sinks.py ─► file

Colour goes through the network, alpha through Lanczos; both arrive band by band, so what is held is the input, one
row of tiles (two of a picture that is resized or has alpha), two tiles on their way, and no more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image

from recipes.real_esrgan import tiling
from recipes.real_esrgan.pictures import NOT_NUMBERS, Picture, open_picture
from recipes.real_esrgan.resample import Resizer
from recipes.real_esrgan.sinks import check_picture_output, loses, open_sink
from recipes.recipe import Runnable, Starting, UserError, keeps_on_device
from zoo.console import progress, say


@dataclass(frozen=True)
class Done:
    """What a picture took: pixels of output, tiles, seconds."""

    width: int
    height: int
    tiles: int
    seconds: float

    @property
    def megapixels(self) -> float:
        return self.width * self.height / 1e6


class Upscaler:
    """Enlarges pictures with one loaded program. `assets` is the folder beside the `.pte`.

    `tile`: auto, or the side in pixels that each tile adds; 0 takes a picture whole. `budget`: bytes that the
    largest intermediate of an automatic tile may take.
    """

    def __init__(
        self, program: Runnable, assets: Path, tile: str = "auto", budget: int = tiling.DEFAULT_BUDGET
    ) -> None:
        try:
            self.metadata: dict[str, Any] = json.loads((assets / "recipe.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {assets / 'recipe.json'}: {error}; export again") from error
        self.limits = tiling.Limits(**{item.name: self.metadata[item.name] for item in fields(tiling.Limits)})
        self._program = program
        self._tile = tiling.auto_tile(self.limits, budget) if tile == "auto" else parse_tile(tile)
        self._said: set[str] = set()

    def scale_of(self, scale: int | None) -> int:
        """The factor to enlarge by. Raises `UserError` for one that the network is too small for."""
        own = self.limits.scale
        if scale is not None and not min(2, own) <= scale <= own:
            allowed = ", ".join(str(n) for n in range(2, own + 1))
            raise UserError(f"--scale {scale}: this network enlarges ×{own}: choose one of {allowed}")
        return own if scale is None else scale

    def layout(self, picture: Picture) -> tiling.Layout:
        try:
            return tiling.plan(picture.height, picture.width, self._tile, self.limits)
        except ValueError as error:
            raise UserError(f"--tile {self._tile}: {error}: choose a smaller tile, or auto") from None

    def file(self, source: Path, output: Path, scale: int | None = None) -> Done:
        """Enlarges a picture file into another. Raises `UserError`; what was at `output` stays then."""
        factor = self.scale_of(scale)
        picture = open_picture(source)
        width, height = factor * picture.width, factor * picture.height
        check_picture_output(output, width, height)
        layout = self.layout(picture)
        channels = picture.colour.shape[2] + (picture.alpha is not None)
        deep = picture.limit > 255
        for line in (*picture.notices, *loses(output, channels, deep)):
            say(f"warning: {line}")
        if not layout.exact:
            self._once(
                f"tiles overlap by {layout.overlap} pixels and the network sees {self.limits.radius}: the result is "
                "not quite that of the whole picture at once"
            )
        started = time.perf_counter()
        with (
            open_sink(output, width, height, channels, deep, picture.icc) as sink,
            progress(source.name, layout.tiles, "tile") as advance,
        ):
            for rows in self._rows(picture, layout, width, height, advance):
                sink.write(rows)
                del rows  # a whole band, which would be held while the next one is made
        return Done(width, height, layout.tiles, time.perf_counter() - started)

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            say(f"note: {line}")

    def _rows(
        self, picture: Picture, layout: tiling.Layout, width: int, height: int, advance: Callable[[], None]
    ) -> Iterator[np.ndarray]:
        bands = enlarge(self._program, picture, layout, self.limits, advance)
        own = (self.limits.scale * picture.height, self.limits.scale * picture.width)
        if own != (height, width):
            bands = Resizer(*own, height, width).stream(bands)
        if picture.alpha is None:
            yield from bands
            return
        alpha, resizer, top = picture.alpha, Resizer(picture.height, picture.width, height, width), 0
        for band in bands:
            for start in range(0, len(band), 64):
                part = band[start : start + 64]
                rows = resizer.rows(lambda y0, y1: alpha[y0:y1], top, top + len(part))
                yield np.concatenate([part, rows], 2)
                top += len(part)

    def folder(self, source: Path, output: Path, scale: int | None = None) -> tuple[list[Done], int]:
        """Every picture of a folder into another, as PNG. A broken one is reported and counted, and the rest go on."""
        self.scale_of(scale)
        pairs = folder_pairs(source, output)
        try:
            output.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make folder {output}: {error.strerror}") from error
        done, failed = [], 0
        for number, (path, target) in enumerate(pairs, 1):
            try:
                one = self.file(path, target, scale)
            except UserError as error:
                failed += 1
                say(f"warning: {error}; going on")
            else:
                done.append(one)
                say(f"{number} of {len(pairs)}: {target} {one.width}×{one.height} in {one.seconds:.1f} s")
        return done, failed


def enlarge(
    program: Runnable,
    picture: Picture,
    layout: tiling.Layout,
    limits: tiling.Limits,
    done: Callable[[], None] = lambda: None,
) -> Iterator[np.ndarray]:
    """Bands of the picture's integers. Raises `UserError` where the network gives no numbers.

    Where the program can, it rounds to 8 bits itself, and where its results stay on the GPU, the next tile is at work
    there while this one is on its way.
    """
    is_plain = picture.colour.dtype == np.uint8 and picture.colour.shape[2] == 3
    takes_pixels = is_plain and "pixels" in getattr(program, "methods", ())
    method, outputs = ("pixels", (0, 1)) if takes_pixels else ("upscale", (0,))

    def checked(arrays: Sequence[np.ndarray]) -> np.ndarray:
        if not takes_pixels:
            return arrays[0][0].transpose(1, 2, 0)
        pixels, broken = arrays
        if broken:
            raise UserError(NOT_NUMBERS)
        return pixels[0]

    def ahead(window: np.ndarray) -> Callable[[], np.ndarray]:
        started = cast(Starting, program).start(method, window, fetch=outputs)

        def wait() -> np.ndarray:
            arrays = [tensor.numpy() for tensor in started]
            for tensor in started:
                tensor.close()
            return checked(arrays)

        return wait

    def late(window: np.ndarray) -> Callable[[], np.ndarray]:
        return lambda: checked(program.run(method, window))

    begin = ahead if keeps_on_device(program) else late
    return tiling.upscale(picture.read, begin, layout, limits, picture.empty, picture.finish, done)


def budget_of(backend: str) -> int:
    """Bytes that one intermediate of an automatic tile may take: what the adapter can bind, on WebGPU."""
    if backend != "webgpu":
        return tiling.DEFAULT_BUDGET
    from backend.runtime.device import get_device

    return get_device().limit("max-storage-buffer-binding-size")


def parse_tile(text: str) -> int:
    """Raises `UserError` for what is neither `auto` (0 here: the caller handles it) nor a whole number."""
    if text == "auto":
        return 0
    if not text.isascii() or not text.isdigit():
        raise UserError(f"--tile {text}: give auto, a number of pixels, or 0 for the whole picture at once")
    return int(text)


def folder_pairs(source: Path, output: Path) -> list[tuple[Path, Path]]:
    """The pictures of a folder by their endings, and where each goes. Raises `UserError` when there is none."""
    Image.init()
    readable = {ending for ending, kind in Image.EXTENSION.items() if kind in Image.OPEN}
    paths = sorted(
        path
        for path in source.iterdir()
        if path.is_file() and path.suffix.lower() in readable and not path.name.startswith(".")
    )
    if not paths:
        raise UserError(f"{source} holds no pictures")
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file: a folder of pictures goes into a folder")
    if output.resolve() == source.resolve():
        raise UserError("the output folder is the input folder: name another")
    stems = [path.stem for path in paths]
    names = [path.stem if stems.count(path.stem) == 1 else path.name for path in paths]
    return [(path, output / f"{name}.png") for path, name in zip(paths, names, strict=True)]
