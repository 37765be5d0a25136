"""Operators of pictures: resizing, pooling, borders of the picture itself, pixel shuffle and its inverse.

All see a tensor as planes of height × width; a 1-d signal has height 1.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from backend.graph import Call, ShapeError
from backend.ops.registry import ALL, FLOATS, Accepts, Lower, dtypes, every, register
from backend.runtime import value as values
from backend.runtime.builder import Builder
from backend.runtime.value import Value

WORKGROUP = 64
CHEAP = 2  # computations that are rather repeated by every reader of an element than written to memory


def _launch(
    template: str, x: Value, shape: tuple[int, ...], b: Builder, params: dict[str, Any], constants: dict[str, Any]
) -> Value:
    """A kernel over planes, one invocation a result; `shape`'s last two dims are the output's height and width."""
    count = math.prod(shape)
    if count == 0:
        return values.scalar(0, x.dtype, shape)
    return b.launch(
        template,
        shape=shape,
        dtype=x.dtype,
        reads={"x": _readable(x, b)},
        groups=-(-count // WORKGROUP),
        params=_plane_params(x, shape) | params,
        constants=constants,
    )


def _plane_params(x: Value, shape: tuple[int, ...]) -> dict[str, Any]:
    return {
        "count": math.prod(shape),
        "in_h": x.shape[-2],
        "in_w": x.shape[-1],
        "out_h": shape[-2],
        "out_w": shape[-1],
    }


def _readable(x: Value, b: Builder) -> Value:
    return x if values.cost(x.root) <= CHEAP else values.of_tensor(b.tensor(x))


def _as_picture(x: Value, shape: tuple[int, ...], dims: int, b: Builder) -> tuple[Value, tuple[int, ...]]:
    """Input and output shape with height and width: a signal gets height 1."""
    if dims == 2:
        return x, shape
    return b.reshape(x, (*x.shape[:-1], 1, x.shape[-1])), (*shape[:-1], 1, shape[-1])


# --- resizing ---------------------------------------------------------------------------------------------------------


def _scales(call: Call, dims: int) -> list[float | None]:
    """The factors that were given, height first; None where only the output's size was."""
    if "scale_factors" in call.args:
        given = call.get("scale_factors")
        return list(given) if given else [None] * dims
    return [call.get(name) for name in (("scales",) if dims == 1 else ("scales_h", "scales_w"))]


def _step(size: int, out: int, factor: float | None) -> float:
    """Input steps for one output step of nearest, rounded where torch rounds."""
    if factor is not None and factor > 0:
        return float(np.float32(1.0 / factor))
    return float(np.float32(size) / np.float32(out))


def _places(size: int, out: int, factor: float | None, align_corners: bool) -> tuple[int, np.int32, int]:
    """`(num, off, den)`: output o lies at (o * num + off) / den of the input, as torch has it in float64.

    Exact where size * out < 2**29, and for factors that are ratios of small numbers; else the nearest fraction whose
    products fit int32. Raises `ShapeError` where even whole steps do not fit.
    """
    if align_corners:
        step = Fraction(size - 1, out - 1) if out > 1 else Fraction(0)
    else:
        step = 1 / Fraction(factor) if factor is not None and factor > 0 else Fraction(size, out)
    largest = math.ceil(max(step, Fraction(1)) * (out + 1))
    if largest >= 2**30:
        raise ShapeError(f"resizing {size} elements to {out} in steps of {float(step):g}: places are beyond 2**30")
    step = step.limit_denominator((2**30 - 1) // largest)
    num, den = step.numerator, step.denominator
    return (num, np.int32(0), den) if align_corners else (2 * num, np.int32(num - den), 2 * den)


def _lower_upsample(mode: str, dims: int) -> Lower:
    def lower(call: Call, b: Builder) -> Value:
        out = call.outputs[0]
        align_corners = bool(call.get("align_corners", False))
        factors = [None] * (2 - dims) + _scales(call, dims)
        x, shape = _as_picture(call["input"] if "input" in call.args else call["self"], out.shape, dims, b)
        if math.prod(shape) == 0:
            return values.scalar(0, out.dtype, out.shape)
        params: dict[str, Any] = {}
        for d, side in ((-2, "h"), (-1, "w")):
            if mode == "nearest":
                params[f"scale_{side}"] = _step(x.shape[d], shape[d], factors[d])
            else:
                places = _places(x.shape[d], shape[d], factors[d], align_corners)
                params |= zip((f"num_{side}", f"off_{side}", f"den_{side}"), places, strict=True)
        return b.reshape(_launch("upsample", x, shape, b, params, {"MODE": mode}), out.shape)

    return lower


def _known_factors(dims: int) -> Accepts:
    def accepts(call: Call) -> str | None:
        factors = [factor for factor in _scales(call, dims) if factor is not None]
        if not all(isinstance(factor, (int, float)) for factor in factors):
            return "upsample: a scale factor that depends on the shape"
        return None if all(map(math.isfinite, factors)) else f"upsample: scale factors {factors}"

    return accepts


for _name, _mode, _dims in (
    ("nearest1d", "nearest", 1),
    ("nearest2d", "nearest", 2),
    ("bilinear2d", "linear", 2),
    ("bicubic2d", "cubic", 2),
):
    for _form in ("vec", "default"):
        register(
            f"aten.upsample_{_name}.{_form}",
            accepts=every(dtypes(FLOATS), _known_factors(_dims)),
            lower=_lower_upsample(_mode, _dims),
            # which export decomposes in any case; models call the other form
            preserve=_form != "default" or _mode == "nearest",
        )


# --- pixel shuffle ----------------------------------------------------------------------------------------------------


def _lower_shuffle(call: Call, b: Builder) -> Value:
    out = call.outputs[0]
    r = call["upscale_factor"]
    if math.prod(out.shape) == 0:  # eager keeps the shape of an empty tensor, export does not: the spec decides
        return values.scalar(0, out.dtype, out.shape)
    *lead, channels, height, width = out.shape
    x = b.movable(b.reshape(call["self"], (math.prod(lead) * channels, r, r, height // r, width // r)))
    return b.reshape(values.permute(x, (0, 3, 1, 4, 2)), out.shape)


def _lower_unshuffle(call: Call, b: Builder) -> Value:
    out = call.outputs[0]
    r = call["downscale_factor"]
    if math.prod(out.shape) == 0:  # eager keeps the shape of an empty tensor, export does not: the spec decides
        return values.scalar(0, out.dtype, out.shape)
    *lead, channels, height, width = call["self"].shape
    x = b.movable(b.reshape(call["self"], (math.prod(lead) * channels, height // r, r, width // r, r)))
    return b.reshape(values.permute(x, (0, 2, 4, 1, 3)), out.shape)


register("aten.pixel_shuffle.default", accepts=dtypes(ALL), lower=_lower_shuffle, preserve=True)
register("aten.pixel_unshuffle.default", accepts=dtypes(ALL), lower=_lower_unshuffle, preserve=True)


# --- pooling ----------------------------------------------------------------------------------------------------------


_AXES = "dhw"  # a picture has the last two of them


def _listed(item: Any, dims: int) -> list[int]:
    """One number an axis, where torch takes one for all, too."""
    numbers = [item] if isinstance(item, int) else list(item)
    return numbers * dims if len(numbers) == 1 else numbers


def _window(call: Call, dims: int) -> dict[str, int]:
    kernel = _listed(call["kernel_size"], dims)
    given = {
        "kernel": kernel,
        "stride": _listed(call.get("stride") or kernel, dims),
        "pad": _listed(call.get("padding", 0), dims),
        "dil": _listed(call.get("dilation", 1), dims),
    }
    return {f"{name}_{axis}": sizes[d] for name, sizes in given.items() for d, axis in enumerate(_AXES[-dims:])}


def _lower_pool(mode: str, dims: int, adaptive: bool = False) -> Lower:
    """Of `dims` axes; mode max or avg. A maximum has where it lies as its second output."""

    def lower(call: Call, b: Builder) -> Any:
        x = call["self"]
        found, where = (*call.outputs, None)[:2]
        spec = found if found is not None else where
        params: dict[str, Any] = {} if adaptive else _window(call, dims)
        params["count"] = math.prod(spec.shape)
        for axis, size, out in zip(_AXES[-dims:], x.shape[-dims:], spec.shape[-dims:], strict=True):
            params |= {f"in_{axis}": size, f"out_{axis}": out}
        if mode == "avg" and not adaptive:
            params["divisor"] = float(call.get("divisor_override", 0))
            params["count_pad"] = int(call.get("count_include_pad", True))
        if adaptive:
            window = [
                -(-size // max(out, 1)) + 1 for size, out in zip(x.shape[-dims:], spec.shape[-dims:], strict=True)
            ]
        else:
            window = _listed(call["kernel_size"], dims)
        b.capabilities.check_iterations(math.prod(size + 2 for size in window), f"pooling windows of {window}")
        constants = {"MODE": mode, "AXES": _AXES[-dims:], "ADAPTIVE": adaptive, "INDICES": where is not None}
        groups = -(-params["count"] // WORKGROUP)
        if where is None:
            if not groups:
                best = values.scalar(0, x.dtype, spec.shape)
            else:
                reads = {"x": _readable(x, b)}
                best = b.launch(
                    "pool", shape=spec.shape, dtype=x.dtype, reads=reads, groups=groups, params=params,
                    constants=constants,
                )  # fmt: skip
            return best if len(call.outputs) == 1 else (best, None)
        targets = {"out": b.temp(spec.shape, x.dtype), "indices": b.temp(spec.shape, "int64")}
        if groups:
            reads = {"x": _readable(x, b)}
            b.launch_into("pool", targets=targets, reads=reads, groups=groups, params=params, constants=constants)
        return values.of_tensor(targets["out"]), values.of_tensor(targets["indices"])

    return lower


def _not_of_nothing(call: Call) -> str | None:
    """An adaptive window over an empty axis holds nothing to take the maximum or the mean of."""
    return f"{call.op} of an empty picture" if 0 in call["self"].shape[1:] else None


for _dims in (2, 3):
    _floats, _something = dtypes(FLOATS, "self"), every(dtypes(FLOATS, "self"), _not_of_nothing)
    # Maxima are kept by export without asking.
    register(f"aten.max_pool{_dims}d_with_indices.default", accepts=_floats, lower=_lower_pool("max", _dims))
    register(f"aten.avg_pool{_dims}d.default", accepts=_floats, lower=_lower_pool("avg", _dims), preserve=True)
    register(
        (f"aten._adaptive_avg_pool{_dims}d.default", f"aten.adaptive_avg_pool{_dims}d.default"),
        accepts=_something,
        lower=_lower_pool("avg", _dims, adaptive=True),
        preserve=True,
    )
    register(
        f"aten.adaptive_max_pool{_dims}d.default",
        accepts=_something,
        lower=_lower_pool("max", _dims, adaptive=True),
    )


# --- borders ----------------------------------------------------------------------------------------------------------


def _lower_border(reflect: bool, dims: int) -> Lower:
    def lower(call: Call, b: Builder) -> Value:
        out = call.outputs[0]
        pads = list(call["padding"])  # pairs start at the last axis
        x, shape = _as_picture(call["self"], out.shape, dims, b)
        before = (0 if dims == 1 else pads[2], pads[0])
        params = {"before_h": np.int32(before[0]), "before_w": np.int32(before[1])}
        return b.reshape(_launch("pad_edge", x, shape, b, params, {"REFLECT": reflect}), out.shape)

    return lower


for _dims in (1, 2):
    for _name, _reflect in (("reflection", True), ("replication", False)):
        register(
            f"aten.{_name}_pad{_dims}d.default",
            accepts=dtypes(FLOATS, "self"),
            lower=_lower_border(_reflect, _dims),
            preserve=True,
        )
