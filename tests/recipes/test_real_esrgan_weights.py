"""Real-ESRGAN: checkpoints of every form, and what a weights argument stands for.

pytest tests/recipes/test_real_esrgan_weights.py
"""

from __future__ import annotations

import importlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_esrgan_support import PACKAGED, needs_package
from safetensors.torch import save_file

from recipes.real_esrgan import RECIPE, checkpoint, locate, ncnn, weights_argument
from recipes.real_esrgan.networks import make_network
from recipes.real_esrgan.variants import VARIANTS, Architecture, Weights, parse_weights
from recipes.recipe import UserError
from zoo import artifact
from zoo.export import make_request

pytestmark = pytest.mark.usefixtures("one_thread")


def test_weights_argument() -> None:
    assert parse_weights("auto") == Weights(None, None, "auto")
    assert parse_weights("x2plus") == Weights("x2plus", None, "auto")
    assert parse_weights("general-x4v3@0.25:tiny") == Weights("general-x4v3", 0.25, "tiny")
    assert parse_weights("C:/x/y.pth") == Weights(None, None, "C:/x/y.pth")
    assert weights_argument("auto", None, None) == weights_argument("auto", "x4plus", None) == "auto"
    assert weights_argument("tiny", "x2plus", None) == "x2plus:tiny"
    assert weights_argument("auto", None, 0.5) == "general-x4v3@0.5:auto"
    for wrong in (("auto", "x9", None), ("auto", "x2plus", 0.5), ("auto", None, 1.5), ("x2plus:tiny", "x4plus", None)):
        with pytest.raises(UserError):
            weights_argument(*wrong)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("key", ["params_ema", "params", None, "safetensors"])
def test_official_checkpoint_forms(name: str, key: str | None, tmp_path: Path) -> None:
    small = checkpoint.load(f"{name}:tiny")
    state = small.network.state_dict()
    path = tmp_path / ("model.safetensors" if key == "safetensors" else "model.pth")
    if key == "safetensors":
        save_file(state, path)
    else:
        torch.save({key: state} if key else state, path)
    loaded = checkpoint.load(str(path))
    assert loaded.architecture == small.architecture
    assert all(torch.equal(value, state[key]) for key, value in loaded.network.state_dict().items())
    # A checkpoint of another size than the variant that was asked for is refused, not loaded in part.
    with pytest.raises(UserError, match="holds a"):
        checkpoint.load(f"{name}:{path}")


def test_the_averaged_weights_are_taken_and_no_code_is_run(tmp_path: Path) -> None:
    small = checkpoint.load("animevideov3:tiny").network.state_dict()
    zeros = {name: torch.zeros_like(value) for name, value in small.items()}
    torch.save({"params": zeros, "params_ema": small}, tmp_path / "both.pth")
    loaded = checkpoint.load(str(tmp_path / "both.pth")).network.state_dict()
    assert all(torch.equal(value, small[name]) for name, value in loaded.items())

    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"params": Harmful()}, tmp_path / "harmful.pth")
    with pytest.raises(UserError, match=r"harmful\.pth"):
        checkpoint.load(str(tmp_path / "harmful.pth"))
    assert not (tmp_path / "ran").exists()


def test_official_names_of_the_real_size() -> None:
    for name, count, parameters in (
        ("x4plus", 702, 16.70e6),
        ("x4plus-anime", 192, 4.47e6),
        ("animevideov3", 53, 0.62e6),
    ):
        state = make_network(VARIANTS[name].architecture).state_dict()
        assert len(state) == count
        assert sum(value.numel() for value in state.values()) == pytest.approx(parameters, rel=5e-3)
    assert "body.22.rdb3.conv5.bias" in make_network(VARIANTS["x2plus"].architecture).state_dict()


def test_damaged_weights(tmp_path: Path) -> None:
    cases = {
        "a.pth": b"PK\x03\x04 nothing",
        "b.safetensors": b"\x10",
        "c.onnx": b"",
        "d.bin": b"",
        "e.param": b"7767517\n",
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=name[0]):
            checkpoint.load(str(tmp_path / name))
    with pytest.raises(UserError, match="no such file"):
        checkpoint.load("./missing.pth")
    torch.save({"params": {"a": torch.zeros(2)}}, tmp_path / "f.pth")
    with pytest.raises(UserError, match="neither an RRDBNet"):
        checkpoint.load(str(tmp_path / "f.pth"))


def test_denoising_is_the_line_between_two_checkpoints(tmp_path: Path) -> None:
    architecture = checkpoint.load("general-x4v3:tiny").architecture
    states = []
    for name in ("realesr-general-x4v3.pth", "realesr-general-wdn-x4v3.pth"):
        states.append({key: torch.rand_like(value) for key, value in make_network(architecture).state_dict().items()})
        torch.save({"params": states[-1]}, tmp_path / name)
    full = VARIANTS["general-x4v3"]
    blend: Any = checkpoint._blend
    for strength in (0.0, 0.25, 1.0):
        state, said, notices = blend(states[0], tmp_path / f"{full.official}.pth", "general-x4v3", strength)
        assert said == strength and not notices
        for key, value in state.items():
            torch.testing.assert_close(value, strength * states[0][key] + (1 - strength) * states[1][key])
    (tmp_path / f"{full.weak}.pth").unlink()
    state, said, notices = blend(states[0], tmp_path / f"{full.official}.pth", "general-x4v3", None)
    assert said == 1.0 and "full strength" in notices[0] and state is states[0]
    with pytest.raises(UserError, match="blends"):
        blend(states[0], tmp_path / f"{full.official}.pth", "general-x4v3", 0.5)


def write_pair(folder: Path, tag: int) -> tuple[Path, dict[str, np.ndarray]]:
    """An ncnn pair of a compact network of 3 features and one inner convolution, weights as `tag` says."""
    rng = np.random.default_rng(1)
    lines, data, state = ["7767517", "", "Input in 0 1 in"], b"", {}
    for index, (inputs, outputs) in enumerate(((3, 3), (3, 3), (3, 12))):
        weight, bias = rng.random((outputs, inputs, 3, 3)).astype("<f2"), rng.random(outputs).astype("<f4")
        lines.append(f"Convolution c{index} 1 1 a b 0={outputs} 1=3 4=1 5=1 6={weight.size}")
        raw = weight.tobytes() if tag == ncnn.TAG_FLOAT16 else weight.astype("<f4").tobytes()
        data += struct.pack("<I", tag) + raw + bytes(-len(raw) % 4) + bias.tobytes()
        state |= {f"body.{2 * index}.weight": weight.astype(np.float32), f"body.{2 * index}.bias": bias}
        if index < 2:
            slope = rng.random(3).astype("<f4")
            lines.append(f"PReLU p{index} 1 1 b a 0=3")
            data += slope.tobytes()
            state[f"body.{2 * index + 1}.weight"] = slope
    lines.append("PixelShuffle s 1 1 b out 0=2")
    lines[1] = f"{len(lines) - 2} 9"
    (folder / "net.param").write_text("\n".join(lines) + "\n")
    (folder / "net.bin").write_bytes(data)
    return folder / "net.bin", state


@pytest.mark.parametrize("tag", [0, 0x0002C056, ncnn.TAG_FLOAT16])
def test_ncnn_pair(tag: int, tmp_path: Path) -> None:
    path, state = write_pair(tmp_path, tag)
    loaded = checkpoint.load(str(path))
    assert loaded.architecture == Architecture("compact", 1, scale=2, features=3)
    for name, value in loaded.network.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), state[name])
    data = path.read_bytes()
    for damaged in (data[:-4], data + b"\0\0\0\0", b"\x38\x4b\x0d\x00" + data[4:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"net\.bin"):
            checkpoint.load(str(path))


@needs_package
@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_weights(name: str) -> None:
    loaded = checkpoint.load(name)
    assert loaded.architecture == VARIANTS[name].architecture and loaded.is_real and not loaded.notices
    picture = np.full((1, 3, 12, 12), 0.5, np.float32)
    with torch.no_grad():
        result = loaded.network(torch.from_numpy(picture)).numpy()
    assert result.shape == (1, 3, 48, 48) and abs(result[..., 16:32, 16:32] - 0.5).max() < 0.1  # grey stays grey


# ---------------------------------------------------------------- what an argument stands for, now


def key(weights: str) -> dict[str, Any]:
    return artifact.key(RECIPE, make_request(RECIPE, "webgpu", weights=weights))


def test_a_package_that_comes_later_replaces_seeded_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "PACKAGES", ("carries_weights",))
    monkeypatch.setattr(locate, "cached", lambda hub_id, stem: None)
    monkeypatch.syspath_prepend(tmp_path)
    before = key("animevideov3")
    assert before["weights_id"] == "absent" and before == key("animevideov3")
    models = tmp_path / "carries_weights" / "models"
    models.mkdir(parents=True)
    importlib.invalidate_caches()
    write_pair(models, 0)
    for ending in (".param", ".bin"):
        (models / f"net{ending}").rename(models / f"realesr-animevideov3-x4{ending}")
    after = key("animevideov3")
    assert before != after == key("animevideov3")
    assert key("x4plus")["weights_id"] == "absent"  # the package does not carry that one
    assert key("synthetic")["weights_id"] == key("x4plus:synthetic")["weights_id"] == "synthetic"


@pytest.mark.parametrize("changed", ["general.pth", "general-wdn.pth"])
def test_a_file_that_changed_is_exported_again(changed: str, tmp_path: Path) -> None:
    """Also the second half of what is blended, and what a folder was searched for."""
    for name in ("general.pth", "general-wdn.pth"):
        (tmp_path / name).write_bytes(b"weights")
    text = f"general-x4v3@0.5:{tmp_path / 'general.pth'}"
    before = key(text)
    assert before == key(text)
    (tmp_path / changed).write_bytes(b"other weights")
    assert before != key(text)


def test_both_halves_of_a_pair_count(tmp_path: Path) -> None:
    path, _ = write_pair(tmp_path, 0)
    for name in ("net.param", "net.bin"):
        before = key(str(path))
        os.utime(tmp_path / name, (1, 1))
        assert before != key(str(path))


def test_an_argument_is_judged_without_torch(tmp_path: Path) -> None:
    """What `zoo run` asks first; the direct runtime then needs no torch at all."""
    import subprocess
    import sys

    from tests.cli.harness import environ

    script = (
        "import sys; from recipes.real_esrgan.locate import identity; print(identity('auto'), identity('x2plus:tiny'));"
        " assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environ(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.split()[-1] == "tiny", done.stderr
    with pytest.raises(UserError, match="no such file"):
        locate.identity("x2plus:./missing.pth")
