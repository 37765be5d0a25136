"""From a weights argument to a network with its weights.

A path is an official `.pth` (its `params_ema`, else its `params`), a `.safetensors` with the same names, either half
of an ncnn pair, or a folder with one of these under a published name. `auto` takes the first of: a package that
carries the variant as an ncnn pair, the hub, seeded weights. What a file holds decides the architecture.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.real_esrgan import locate, ncnn
from recipes.real_esrgan.networks import make_network
from recipes.real_esrgan.variants import DEFAULT, VARIANTS, Architecture, Weights, parse_weights, variant_of
from recipes.recipe import UserError

SEED = 0
_DENOISE = 0.5  # of the official script

State = dict[str, torch.Tensor]


@dataclass
class Checkpoint:
    """`source`: the file that the weights came from, if any; `is_real`: they are a trained model's."""

    network: nn.Module
    architecture: Architecture
    variant: str | None
    denoise: float | None = None
    source: Path | None = None
    is_real: bool = True
    notices: tuple[str, ...] = field(default=())

    @property
    def ncnn(self) -> Path | None:
        """The published ncnn pair that the weights came from, if they did."""
        is_pair = self.source and self.variant and self.source.stem in VARIANTS[self.variant].ncnn
        return self.source if is_pair else None


def load(text: str) -> Checkpoint:
    """The checkpoint that a weights argument names. Raises `UserError` for one that is missing or damaged."""
    weights = parse_weights(text)
    name = weights.variant or DEFAULT
    if weights.source == "synthetic":
        return _seeded(weights, name, VARIANTS[name].architecture, "as asked")
    if weights.source == "tiny":
        small = VARIANTS[name].architecture
        small = replace(small, blocks=1, features=8, growth=4 if small.kind == "rrdb" else small.growth)
        return _seeded(weights, name, small, "a small configuration for tests")
    hub_id = locate.repository(weights)
    if hub_id is None:
        path = locate.find(weights)
        assert path is not None
        return _from_file(path, weights)
    try:
        path = locate.find(weights) or _fetch(hub_id, VARIANTS[name].official)
    except _NotFetched as error:
        if weights.source != "auto":
            raise
        return _seeded(weights, name, VARIANTS[name].architecture, str(error))
    return _from_file(path, replace(weights, variant=name))


def _seeded(weights: Weights, name: str, architecture: Architecture, why: str) -> Checkpoint:
    torch.manual_seed(SEED)
    network = make_network(architecture)
    notice = f"real-esrgan {name}: the weights are seeded noise, not a trained model's ({why}): pictures mean nothing"
    return Checkpoint(network, architecture, name, weights.denoise, is_real=False, notices=(notice,))


class _NotFetched(UserError):
    pass


def _fetch(hub_id: str, stem: str) -> Path:
    """A published file in a hub repository: from the cache, else from the network."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RemoteEntryNotFoundError

    if path := locate.cached(hub_id, stem):
        return path
    why = ""
    for ending in (".pth", ".safetensors"):
        try:
            return Path(hf_hub_download(hub_id, stem + ending, etag_timeout=5))
        except RemoteEntryNotFoundError:
            why = why or f"no {stem}{ending} there"
        except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            break
        except Exception as error:
            # The hub client passes on its HTTP library's own errors, whose types are not part of its interface.
            if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2", "requests"):
                raise
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            break
    raise _NotFetched(f"{stem} is in no installed package and not in the cache, and the hub ({hub_id}) gave: {why}")


def _from_file(path: Path, weights: Weights) -> Checkpoint:
    state = read_state(path)
    architecture = architecture_of(state, path)
    expected = VARIANTS[weights.variant].architecture if weights.variant else architecture
    if architecture != expected:
        raise UserError(f"{path} holds {_describe(architecture)}, not {weights.variant}: {_describe(expected)}")
    variant = weights.variant or variant_of(architecture)
    state, denoise, notices = _blend(state, path, variant, weights.denoise)
    network = make_network(architecture)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} does not hold {_describe(architecture)} whole: {reason}") from None
    return Checkpoint(network, architecture, variant, denoise, path, notices=notices)


def _describe(architecture: Architecture) -> str:
    name = "RRDBNet" if architecture.kind == "rrdb" else "SRVGGNetCompact"
    return f"a {name} ×{architecture.scale} of {architecture.blocks} blocks, {architecture.features} features"


def _blend(
    state: State, path: Path, variant: str | None, denoise: float | None
) -> tuple[State, float | None, tuple[str, ...]]:
    """The weights on the line between a variant's two checkpoints: strength 1 is `state`, 0 the weaker denoiser."""
    other = locate.weaker(path, variant) if variant else None
    if other is None or denoise == 1:
        return state, denoise, ()
    if not other.is_file() and "snapshots" in path.parts:  # the hub's cache: beside it once fetched
        with contextlib.suppress(UserError):
            other = _fetch("/".join(_hub_folder(path)), other.stem)
    if not other.is_file():
        if denoise is not None:
            raise UserError(f"denoising below strength 1 blends {path.name} with {other.name}, which is not beside it")
        return state, 1.0, (f"{other.name} is not beside {path.name}: denoising at full strength",)
    strength = _DENOISE if denoise is None else denoise
    second = read_state(other)
    if {name: value.shape for name, value in state.items()} != {name: value.shape for name, value in second.items()}:
        raise UserError(f"{other} and {path} are not of one architecture: they cannot be blended")
    return {name: strength * value + (1 - strength) * second[name] for name, value in state.items()}, strength, ()


def _hub_folder(path: Path) -> list[str]:
    # …/models--OWNER--NAME/snapshots/REVISION/FILE
    return path.parts[path.parts.index("snapshots") - 1].split("--")[1:]


def read_state(path: Path) -> State:
    """The parameters in a file, float32, under the official names. Raises `UserError`."""
    suffix = path.suffix.lower()
    if suffix in (".param", ".bin"):
        return {name: torch.from_numpy(array) for name, array in ncnn.state_dict(path).items()}
    if suffix not in locate.ENDINGS:
        raise UserError(f"{path}: weights are read from {', '.join(locate.ENDINGS)}")
    found: Any
    try:
        if suffix == ".safetensors":
            from safetensors.torch import load_file

            found = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from error
    except Exception as error:
        if type(error).__module__.split(".")[0] != "safetensors" and type(error).__name__ != "SafetensorError":
            raise
        raise UserError(f"cannot read {path}: {error}") from error
    for key in ("params_ema", "params"):
        if isinstance(found, dict) and isinstance(inner := found.get(key), dict):
            found = inner
            break
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UserError(f"{path} holds neither params_ema, params nor plain tensors")
    return {name.removeprefix("module."): value.float() for name, value in found.items()}


def architecture_of(state: State, path: Path) -> Architecture:
    """The architecture that the names and shapes of `state` fit. Raises `UserError` when they fit none."""
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    convolutions = [shape for shape in shapes.values() if len(shape) == 4]
    try:
        if "conv_first.weight" in shapes:
            features, channels = shapes["conv_first.weight"][:2]
            growth = shapes["body.0.rdb1.conv1.weight"][0]
            scale = {3: 4, 12: 2, 48: 1}[channels]
            return Architecture("rrdb", (len(convolutions) - 6) // 15, scale, features, growth)
        scale = math.isqrt(convolutions[-1][0] // 3)
        if scale < 1 or convolutions[-1][0] != 3 * scale * scale:
            raise KeyError
        features = shapes["body.0.weight"][0]
        return Architecture("compact", len(convolutions) - 2, scale, features)
    except (KeyError, IndexError, ValueError):
        raise UserError(
            f"{path} is neither an RRDBNet nor an SRVGGNetCompact under the official parameter names"
        ) from None
