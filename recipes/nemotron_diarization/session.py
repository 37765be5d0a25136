"""What `zoo run nemotron-diarization` does once its program is there: audio in, segments out."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from recipes.nemotron_diarization import audio as sources
from recipes.nemotron_diarization.plot import Envelope, draw
from recipes.nemotron_diarization.runner import OFFLINE, Diarizer, modes, read_metadata
from recipes.nemotron_diarization.segments import Decision, Segment, Segmenter
from recipes.nemotron_diarization.segments import rttm as rttm_document
from recipes.recipe import Runnable, UserError
from zoo.console import Stdout, own_stdout, say, stderr
from zoo.files import atomic_file, check_output, staged

EXAMPLE_SECONDS = 20.0  # one chunk of offline mode


@dataclass(frozen=True)
class Source:
    """Where audio comes from: `path`, or raw samples on stdin. `stream`: in the chunks of a streaming mode."""

    path: Path | None
    stream: bool = False
    latency: str | None = None
    rate: int = 16000
    channels: int = 1

    def mode(self, assets: Path) -> str:
        """The runner's mode. Raises `UserError`, naming those there are, for an unknown one."""
        if not self.stream:
            return OFFLINE
        metadata = read_metadata(assets)
        if self.latency is None:
            default: str = metadata["streaming_mode"]
            return default
        known = [name for name in modes(metadata) if name != OFFLINE]
        if self.latency not in known:
            raise UserError(f"unknown streaming mode {self.latency!r}: this model has {', '.join(known)}")
        return self.latency


@dataclass(frozen=True)
class Outputs:
    """Files to write, and the form of what is printed."""

    rttm: Path | None = None
    plot: Path | None = None
    as_json: bool = False


def prepare(source: Source, outputs: Outputs, example: bool) -> None:
    """Writes the example when asked for, then raises `UserError` for what is wrong before anything is heard."""
    if source.path is None:
        if example:
            raise UserError("--example needs the name of the WAV file to write")
        if not source.stream:
            raise UserError("name an audio file, or use --stream to listen to raw samples on stdin")
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError(
                "--stream without a file listens to raw samples on stdin, which is a terminal: pipe them in, for "
                f"example from `arecord -q -f S16_LE -r {source.rate} -c {source.channels} -t raw`"
            )
        sources.check_rate(source.rate)
        sources.Pcm(sys.stdin.buffer, source.rate, source.channels)
    if source.latency is not None and not source.stream:
        raise UserError("--latency belongs to --stream: a whole recording is heard in chunks of its own")
    for path, ending in ((outputs.rttm, ".rttm"), (outputs.plot, ".png")):
        if path is not None:
            check_output(path)
            if path.suffix.lower() != ending:
                raise UserError(f"{path}: its name must end in {ending}")
            if source.path is not None and path.absolute() == source.path.absolute():
                raise UserError(f"{path} is the audio itself: choose another name to write to")
    if source.path is not None:
        if example:
            write_example(source.path)
        with sources.File(source.path) as file:
            sources.check_rate(file.rate)


def write_example(path: Path) -> None:
    """A WAV file with an invented conversation of two voices."""
    import soundfile

    from recipes.nemotron_diarization import voices

    if path.suffix.lower() != ".wav":
        raise UserError(f"{path}: the example is written as WAV, so the name must end in .wav")
    samples, _ = voices.conversation(EXAMPLE_SECONDS)
    with atomic_file(path) as file:
        soundfile.write(file, samples, voices.RATE, subtype="PCM_16", format="WAV")


def diarize(
    program: Runnable, assets: Path, source: Source, decision: Decision, outputs: Outputs, told: str
) -> list[Segment]:
    """Hears the source to its end; prints segments and writes the files, which appear together or not at all.

    A stream is printed as it is heard. What a whole recording holds is printed when all of it went well.
    """
    diarizer = Diarizer(program, assets, source.mode(assets))
    segmenter = Segmenter(diarizer.speakers, diarizer.frame_seconds, decision)
    envelope = Envelope()
    found: list[Segment] = []
    started = time.perf_counter()
    with own_stdout() as stdout, _opened(source) as (opened, heard):

        def tell(segments: list[Segment]) -> None:
            found.extend(segments)
            if source.stream:
                _print(stdout, segments, outputs.as_json)

        for samples in sources.at_rate(opened.blocks(), opened.rate, diarizer.sample_rate):
            if outputs.plot is not None:
                envelope.push(samples)
            for block in diarizer.feed(samples):
                tell(segmenter.push(block))
            heard(diarizer.seconds)
        for block in diarizer.finish():
            tell(segmenter.push(block))
        seconds = diarizer.seconds
        if not seconds:
            raise UserError("there is no audio: not one sample")
        tell(segmenter.finish(min(seconds, opened.seconds or seconds)))
        found.sort(key=lambda segment: (segment.start, segment.speaker))
        name = source.path.stem if source.path is not None else "stdin"
        _write(outputs, found, name, envelope, seconds)
        if not source.stream:
            _print(stdout, found, outputs.as_json)
        if isinstance(opened, sources.Pcm) and opened.cut:
            say(f"warning: stdin ended within a sample: its last {_bytes(opened.cut)} not heard")
    elapsed = time.perf_counter() - started
    speakers = len({segment.speaker for segment in found})
    say(
        f"{seconds:.2f} s of audio in {elapsed:.2f} s (real-time factor {elapsed / seconds:.2f}): "
        f"{len(found)} segments of {speakers} speakers; {told}"
        + ("" if diarizer.metadata["is_trained"] else "; MEANS NOTHING: the weights are not a trained model's")
    )
    return found


@contextmanager
def _opened(source: Source) -> Iterator[tuple[sources.File | sources.Pcm, _Heard]]:
    """The audio, and a function that is told the seconds heard so far: a progress bar for a file on a terminal."""
    if source.path is None:
        yield sources.Pcm(sys.stdin.buffer, source.rate, source.channels), _Heard(None)
        return
    with sources.File(source.path) as file:
        console = stderr()
        # Lines of a stream and a bar would write over each other.
        if source.stream or file.seconds is None or not console.is_terminal:
            yield file, _Heard(None)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
            progress.add_task(f"listening to {file.seconds:.0f} s", total=file.seconds)
            yield file, _Heard(progress)


class _Heard:
    def __init__(self, progress: Progress | None):
        self._progress = progress

    def __call__(self, seconds: float) -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=seconds)


def _print(stdout: Stdout, segments: list[Segment], as_json: bool) -> None:
    for segment in segments:
        stdout.write(((segment.json() if as_json else segment.text()) + "\n").encode())


def _bytes(count: int) -> str:
    return "byte was" if count == 1 else f"{count} bytes were"


def _write(outputs: Outputs, segments: list[Segment], name: str, envelope: Envelope, seconds: float) -> None:
    paths = [path for path in (outputs.rttm, outputs.plot) if path is not None]
    if not paths:
        return
    with staged(*paths) as parts:
        for path, part in zip(paths, parts, strict=True):
            with open(part, "wb") as file:
                if path is outputs.rttm:
                    file.write(rttm_document(segments, name).encode())
                else:
                    draw(file, segments, envelope, seconds)
