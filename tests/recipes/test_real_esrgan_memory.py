"""Real-ESRGAN: large pictures in bounded memory, and disks without room (E1).

pytest tests/recipes/test_real_esrgan_memory.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from real_esrgan_support import program_of

from tests.cli.harness import environ

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, sets limits of the process")


def run(script: str, folder: Path, timeout: float = 300) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environ(), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["out.png", pytest.param("out.jpg", marks=pytest.mark.slow)])
def test_e1_memory_is_set_by_the_tile(name: str, tmp_path: Path) -> None:
    """4000×3000 in a process of its own: what it holds at most is a fraction of the result's 576 MB."""
    (tmp_path / "a.assets").mkdir()
    (tmp_path / "a.assets" / "recipe.json").write_text(
        '{"scale": 4, "multiple": 1, "radius": 18, "max_side": 1024, "pixel_bytes": 256, "is_real": true}'
    )
    Image.new("RGB", (4000, 3000), (30, 90, 200)).save(tmp_path / "in.png")
    script = f"""
import sys
from pathlib import Path
from recipes.real_esrgan.runner import Upscaler
from PIL import Image
class Nearest:
    def run(self, method, picture):
        return [picture.repeat(4, 2).repeat(4, 3)]
done = Upscaler(Nearest(), Path("a.assets"), "220").file(Path("in.png"), Path({name!r}))
assert (done.width, done.height) == (16000, 12000)
assert "torch" not in sys.modules
# Without what is mapped from files: the system takes that back when it needs to.
status = dict(line.split(":") for line in open("/proc/self/status"))
print(*(int(status[key].split()[0]) // 1024 for key in ("RssAnon", "VmHWM")))
"""
    anonymous, most = map(int, run(script, tmp_path).split())
    assert anonymous < 200 and (name != "out.png" or most < 300), (anonymous, most)
    Image.MAX_IMAGE_PIXELS, limit = None, Image.MAX_IMAGE_PIXELS
    try:
        with Image.open(tmp_path / name) as image:
            assert image.size == (16000, 12000)
    finally:
        Image.MAX_IMAGE_PIXELS = limit


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_e1_4000_by_3000_through_a_network(elsewhere: Path) -> None:
    """The whole way on the GPU backend: from 0.3 to 12 megapixels, the peak grows by less than the result."""
    path = program_of("general-x4v3:tiny", "webgpu")
    peaks = []
    for width, height in ((640, 480), (4000, 3000)):
        Image.effect_noise((width, height), 60).convert("RGB").save(elsewhere / "in.png")
        script = f"""
import resource
from pathlib import Path
import numpy as np
from recipes.real_esrgan.runner import Upscaler
from zoo.artifact import assets_of
from zoo.program import Program
pte = Path({str(path)!r})
with Program.load(pte, "direct") as program:
    done = Upscaler(program, assets_of(pte), "448").file(Path("in.png"), Path("out.png"))
assert (done.width, done.height) == ({4 * width}, {4 * height}), done
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
        peaks.append(int(run(script, elsewhere, 1500)))
    # The input (36 MB, decoded) and a band of tiles (16000×1936×3 = 93 MB), which the small picture has not; the
    # result is 576 MB.
    assert peaks[1] - peaks[0] < 250, peaks


@pytest.mark.parametrize("name", ["out.png", "out.jpg", "out.webp"])
def test_a_full_disk_leaves_nothing(name: str, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the error is one line, and what was there before stays."""
    (tmp_path / "a.assets").mkdir()
    (tmp_path / "a.assets" / "recipe.json").write_text(
        '{"scale": 4, "multiple": 1, "radius": 2, "max_side": 512, "pixel_bytes": 256, "is_real": true}'
    )
    Image.effect_noise((256, 256), 100).convert("RGB").save(tmp_path / "in.png")
    (tmp_path / name).write_bytes(b"the old picture")
    script = f"""
import resource
from pathlib import Path
from recipes.real_esrgan.runner import Upscaler
from recipes.recipe import UserError
class Nearest:
    def run(self, method, picture):
        return [picture.repeat(4, 2).repeat(4, 3)]
upscaler = Upscaler(Nearest(), Path("a.assets"), "64")
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    upscaler.file(Path("in.png"), Path({name!r}))
except UserError as error:
    print(error)
"""
    said = run(script, tmp_path)
    assert said.startswith(f"cannot write {name}") and len(said.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.assets", "in.png", name])
    assert (tmp_path / name).read_bytes() == b"the old picture"
