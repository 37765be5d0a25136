"""C types of wgpu-py without parsing: a second less at every start.

wgpu-py names some forty C types by text, and for each one cffi parses the declarations of the whole library again,
30 ms each. Nearly all are a declared name, a pointer to one or an array of them, which cffi's own tables answer.
"""

from __future__ import annotations

import re
from typing import Any

_SIMPLE = re.compile(r"(\w+)\s*(\*|\[\])?\s*")


def install(ffi: Any) -> None:
    """Answers simple types of `ffi` from its tables, once; leaves an `ffi` alone that is not built as expected."""
    parser = getattr(ffi, "_parser", None)
    if parser is None or "parse_type" in vars(parser) or not hasattr(parser, "_declarations"):
        return
    parse = parser.parse_type

    def parse_type(text: str) -> Any:
        found = simple(parser, text)
        return parse(text) if found is None else found

    parser.parse_type = parse_type


def simple(parser: Any, text: str) -> Any:
    """cffi's model of `NAME`, `NAME *` or `NAME[]`; None for other texts and unknown names."""
    from cffi import model

    match = _SIMPLE.fullmatch(text)
    if match is None:
        return None
    if match[1] in model.PrimitiveType.ALL_PRIMITIVE_TYPES:
        type_, quals = model.PrimitiveType(match[1]), 0
    elif f"typedef {match[1]}" in parser._declarations:
        type_, quals = parser._declarations[f"typedef {match[1]}"]
    else:
        return None
    if isinstance(type_, model.RawFunctionType):
        return None
    if match[2] == "*":
        return model.PointerType(type_, quals)
    return model.ArrayType(type_, None) if match[2] else type_
