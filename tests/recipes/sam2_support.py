"""What the tests of SAM 2 share: a small picture."""

from __future__ import annotations

from zoo.pictures import read_rgb, sample_path

PICTURE = read_rgb(sample_path("sample:chelsea"))[::2, ::2]
HEIGHT, WIDTH = PICTURE.shape[:2]
