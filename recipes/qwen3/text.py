"""From a conversation to tokens and from tokens to text, without torch.

`TextFrontend` is the checkpoint's tokenizer and chat template (as `apply_chat_template` of transformers renders it);
`TextStream` turns tokens to text as they come, whole characters only.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from recipes.recipe import UserError

Message = Mapping[str, str]  # role, content


class TextFrontend:
    """Tokenizer and chat template of one exported program, from its assets folder."""

    def __init__(self, assets: Path, metadata: dict[str, Any]):
        from tokenizers import Tokenizer

        try:
            text = (assets / "tokenizer.json").read_text(encoding="utf-8")
            self._tokenizer = Tokenizer.from_str(text)
            added = json.loads(text)["added_tokens"]
            template = (assets / "chat_template.jinja").read_text(encoding="utf-8")
        except Exception as error:  # the tokenizers library raises plain Exception for every fault of a file
            raise UserError(f"cannot read the tokenizer in {assets}: {error}; export again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._render = _compile(template)
        self._special_tokens: dict[str, str] = metadata["special_tokens"]
        # Tokens outside the byte-level vocabulary: nothing for a special one, else its own text.
        self._added = {token["id"]: b"" if token["special"] else token["content"].encode() for token in added}
        self._bytes = {character: byte for byte, character in _byte_characters()}

    def prompt(self, messages: Sequence[Message], thinking: bool) -> list[int]:
        """The tokens of a conversation up to where the assistant's answer starts."""
        return self.encode(self.rendered(messages, thinking))

    def rendered(self, messages: Sequence[Message], thinking: bool) -> str:
        return self._render(messages, {**self._special_tokens, "enable_thinking": thinking})

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def stream(self) -> TextStream:
        return TextStream(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        piece = self._tokenizer.id_to_token(token)
        # Models have more ids than their tokenizers have tokens.
        return b"" if piece is None else bytes(self._bytes[character] for character in piece)


class TextStream:
    """Text of tokens that come one by one. A character is given out when its last byte is there.

    Bytes that can never become a character give U+FFFD; a character that is still incomplete when the text ends is
    left out.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]):
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """The characters that `token` completes: often one or more, sometimes none."""
        return self._decoder.decode(self._bytes_of(token))


def _byte_characters() -> list[tuple[int, str]]:
    """Which character stands for each byte in a byte-level vocabulary: itself where it is printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [(byte, chr(byte)) for byte in printable] + [(byte, chr(256 + n)) for n, byte in enumerate(others)]


def _compile(template: str) -> Callable[[Sequence[Message], dict[str, Any]], str]:
    """A chat template as a function, in the environment that transformers gives it (sandboxed: hub code)."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def fail(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = tojson
    try:
        compiled = environment.from_string(template)
    except jinja2.exceptions.TemplateError as error:
        raise UserError(f"the checkpoint's chat template is not understood: {error}") from error

    def render(messages: Sequence[Message], values: dict[str, Any]) -> str:
        try:
            return compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **values)
        except jinja2.exceptions.TemplateError as error:
            raise UserError(f"the checkpoint's chat template refuses this conversation: {error}") from error

    return render
