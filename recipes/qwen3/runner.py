"""A conversation with an exported Qwen3, without torch: messages in, pieces of the answer out as they are written.

Every turn the whole conversation is laid out by the chat template, as transformers would, and compared with the
tokens whose keys and values are in the caches: only what follows their common start is read. A new turn reads itself
and, where the template lays out the last answer in another way than it was written (without its thoughts), that
answer once more; never the turns before.

Where results can stay on the GPU (the direct runtime) and the program has the method that chooses as is asked for, the
logits stay there too: a step takes the token of the one before from the GPU's memory, and is at work while that token
is on its way to the host. A step that was begun beyond the last token is dropped.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from backend.runtime.device_tensor import DeviceTensor
from backend.runtime.errors import DeviceError
from recipes.qwen3.sampling import Sampler, Sampling
from recipes.qwen3.text import Message, TextFrontend
from recipes.recipe import Runnable, Starting, UserError, keeps_on_device

_NOT_FINITE = "the program produced logits that are not finite: nothing more is written"


class ContextFull(UserError):
    """The conversation is longer than the caches: it cannot go on."""


@dataclass
class Turn:
    """What one answer took. `end`: stop (the model's own end), length (`max_tokens`), context (the caches are full)."""

    prompt_tokens: int = 0  # of the whole conversation
    read_tokens: int = 0  # of those, the ones that were not in the caches
    prompt_seconds: float = 0.0
    tokens: int = 0  # of the answer, its stop token included
    seconds: float = 0.0  # from the first token of the answer to its end
    end: str = ""

    def __str__(self) -> str:
        ends = {"length": "; stopped at --max-tokens", "context": "; stopped: the context is full"}
        steps = max(self.tokens - 1, 0)  # the first token comes from the prompt
        return (
            f"prompt: {self.read_tokens} of {self.prompt_tokens} tokens read in {self.prompt_seconds:.2f} s "
            f"({_rate(self.read_tokens, self.prompt_seconds)}); answer: {self.tokens} tokens, "
            f"{_rate(steps, self.seconds)}{ends.get(self.end, '')}"
        )


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else "no steps"


class Writer:
    """Tokens from one loaded program, whose caches are the writer's. Texts that are written in turns are read again.

    `ahead=False` makes one call after the other also where the program keeps results on the GPU.
    """

    def __init__(self, program: Runnable, metadata: dict[str, Any], ahead: bool = True):
        self.capacity: int = metadata["capacity"]
        self.stop_ids = frozenset(metadata["stop_ids"])
        self._program = program
        self._max_prompt: int = metadata["max_prompt"]
        self._candidates: int = metadata.get("candidates", 0)  # programs of before cannot choose
        self.works_ahead: bool = ahead and keeps_on_device(program) and self._candidates > 0
        self.cached: list[int] = []  # tokens whose keys and values are in the caches, by position
        self._text: Sequence[int] = ()  # the one that was read last, itself

    def read(self, ids: Sequence[int]) -> tuple[np.ndarray, int]:
        """Makes `ids` the text so far. Returns the logits `[V]` after it and how many tokens had to be read.

        Raises `ContextFull` when it is longer than the caches, `UserError` for logits that are not finite, and what
        the program raises.
        """
        logits, count = self._fill(ids, lambda *inputs: self._program.run("step", *inputs)[0])
        if not np.isfinite(logits).all():
            raise UserError(_NOT_FINITE)
        return logits[0], count

    def _fill(self, ids: Sequence[int], step: Callable[..., Any]) -> tuple[Any, int]:
        """Fills the caches with `ids` by calls of `step`: the logits of the last, and how many tokens were read."""
        if len(ids) > self.capacity:
            raise ContextFull(
                f"the context is full: the conversation has {len(ids)} tokens, the program was exported for "
                f"{self.capacity} (--context makes a larger one)"
            )
        self._text = ids
        # The last token is always run: its logits are what is wanted.
        start = min(_common(ids, self.cached), len(ids) - 1)
        for first in range(start, len(ids), self._max_prompt):
            part = np.array([ids[first : min(first + self._max_prompt, len(ids))]], dtype=np.int64)
            del self.cached[first:]
            with self._forgetful():
                logits = step(part, np.array([first]))
            self.cached.extend(int(token) for token in part[0])
        return logits, len(ids) - start

    @contextlib.contextmanager
    def _forgetful(self) -> Iterator[None]:
        """The GPU's failure may have taken the caches along."""
        try:
            yield
        except DeviceError:
            self.cached.clear()
            self._text = ()
            raise

    def generate(self, ids: Sequence[int], sampling: Sampling, max_tokens: int, turn: Turn) -> Generator[int]:
        """Tokens that follow `ids`, a stop token included; `turn` is filled in as they come.

        Raises as `read` does.
        """
        method = sampling.method(self._candidates) if self.works_ahead else None
        turn.prompt_tokens = len(ids)
        room = self.capacity + 1 - len(ids)  # the last token needs no place in the caches
        count = min(max_tokens, room)
        started = time.perf_counter()
        sampler = Sampler(sampling)
        turn.end = "length"
        if method is None:
            made = self._made_in_turn(list(ids), sampler, count, turn)
        else:
            made = self._made_ahead(list(ids), sampler, method, count, turn)
        with contextlib.closing(made):
            for token in made:
                turn.tokens += 1
                if turn.tokens == 1:
                    now = time.perf_counter()
                    turn.prompt_seconds, started = now - started, now
                turn.seconds = time.perf_counter() - started
                ends_here = token in self.stop_ids
                turn.end = "stop" if ends_here else "context" if turn.tokens == room else turn.end
                yield token
                if ends_here:
                    return

    def _made_in_turn(self, text: list[int], sampler: Sampler, count: int, turn: Turn) -> Generator[int]:
        logits, turn.read_tokens = self.read(text)
        for made in range(count):
            if made:
                logits, _ = self.read(text)
            text.append(sampler.choose(logits, text))
            yield text[-1]

    def _made_ahead(self, text: list[int], sampler: Sampler, method: str, count: int, turn: Turn) -> Generator[int]:
        """The step after a token is begun before that token is known here; not so with the first one, which nothing
        may delay."""
        program = cast(Starting, self._program)

        def step(token: Any, position: np.ndarray) -> DeviceTensor:
            (logits,) = program.start("step", token, position, fetch=())
            return logits

        def choose(logits: DeviceTensor) -> DeviceTensor:
            (token,) = program.start(method, logits, *sampler.inputs(), fetch=(0,))
            return token

        def after(token: DeviceTensor, position: int) -> DeviceTensor:
            if self._text is not text:  # another one was read in between
                self._fill(text, step)
            del self.cached[position:]
            return choose(step(token, np.array([position])))

        logits, turn.read_tokens = self._fill(text, step)
        with self._forgetful():
            token = choose(logits)
        for made in range(count):
            with self._forgetful():
                following = after(token, len(text)) if 0 < made < count - 1 else None
                value = int(token.numpy()[0, 0])
            if value < 0:
                raise UserError(_NOT_FINITE)
            if made and self._text is text:
                self.cached[len(text) - 1 :] = text[-1:]  # the step that read it is done
            text.append(value)
            yield value
            if made < count - 1:
                with self._forgetful():
                    token = after(token, len(text) - 1) if following is None else following


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts start with alike."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:  # nearly always, and many times as fast as one by one
        return shorter
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), shorter)


class Chat:
    """A conversation. `assets` is the folder beside the `.pte`."""

    def __init__(self, program: Runnable, assets: Path, system: str | None = None, thinking: bool = False):
        try:
            self.metadata: dict[str, Any] = json.loads((assets / "recipe.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {assets / 'recipe.json'}: {error}; export again") from error
        self.text = TextFrontend(assets, self.metadata)
        self.writer = Writer(program, self.metadata)
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.thinking = thinking
        self.turn = Turn()  # of the last answer

    def sampling(self, **chosen: Any) -> Sampling:
        """The checkpoint's own way to sample, with what was `chosen` (and is not None) in its place."""
        return Sampling(**{**self.metadata["sampling"], **{k: v for k, v in chosen.items() if v is not None}})

    def reply(self, content: str, sampling: Sampling, max_tokens: int) -> Iterator[str]:
        """Pieces of the answer to `content`. What is wrong with the arguments is raised here and now.

        Question and answer join the conversation as far as the answer was consumed; `turn` says what it took.
        """
        if not content.strip():
            raise UserError("the prompt is empty: there is nothing to answer")
        if max_tokens < 1:
            raise UserError(f"an answer must have at least 1 token, not {max_tokens}")
        ids = self.text.prompt([*self.messages, {"role": "user", "content": content}], self.thinking)
        if len(ids) > self.writer.capacity:
            self.writer.read(ids)  # says what is wrong
        self.turn = Turn()
        return self._answer(content, self.writer.generate(ids, sampling, max_tokens, self.turn))

    def _answer(self, content: str, tokens: Iterator[int]) -> Iterator[str]:
        stream = self.text.stream()
        answer: list[str] = []
        try:
            for token in tokens:
                if piece := stream.add(token):
                    answer.append(piece)
                    yield piece
        finally:
            if self.turn.tokens:
                self.messages.append({"role": "user", "content": content})
                self.messages.append({"role": "assistant", "content": "".join(answer)})


def converse(
    chat: Chat, lines: Iterator[str], answer: Callable[[Iterator[str]], None], options: tuple[Sampling, int]
) -> str | None:
    """A turn for each line that is not empty. Returns why it ended before the lines did: the context is full."""
    for line in lines:
        if not line.strip():
            continue
        try:
            answer(chat.reply(line.strip(), *options))
        except ContextFull as error:
            return str(error)
        if chat.turn.end == "context":
            return f"the context of {chat.writer.capacity} tokens is full: the conversation ends here"
    return None
