"""Integer expressions over a method's input symbols: the dims and scalar arguments of a dynamic graph.

A dim is an `int` or an `Expr`. Expressions are written in the blob as infix text (`"8*s0 + 1"`), so that a graph
can be read with any tool; parsing accepts integer literals, symbol names, `+ - * // %`, `min(…)`, `max(…)` only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAX_TEXT = 4096
MAX_NODES = 512
MAX_INT = 2**63

_BINARY = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2}
_AST_OPS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}


class ExprError(ValueError):
    """An expression that cannot be parsed or evaluated."""


@dataclass(frozen=True)
class Expr:
    """`op` is a symbol's name with no arguments, or one of `+ - * // % min max` with two or more."""

    op: str
    args: tuple[Dim, ...] = ()

    def __str__(self) -> str:
        if not self.args:
            return self.op
        if self.op in ("min", "max"):
            return f"{self.op}({', '.join(map(str, self.args))})"
        mine = _BINARY[self.op]
        parts = []
        for position, arg in enumerate(self.args):
            text = str(arg)
            inner = _BINARY.get(arg.op, 3) if isinstance(arg, Expr) and arg.args else 3
            # a product may lose its parentheses only if no rounding happens inside
            exact = self.op in ("-", "//", "%") or "//" in text or "%" in text
            if inner < mine or (inner == mine and position and exact) or text.startswith("-"):
                text = f"({text})"
            parts.append(text)
        joint = f" {self.op} " if mine == 1 else self.op
        return joint.join(parts)

    def symbols(self) -> Iterator[str]:
        if not self.args:
            yield self.op
        for arg in self.args:
            if isinstance(arg, Expr):
                yield from arg.symbols()


Dim = int | Expr


def symbol(name: str) -> Expr:
    return Expr(name)


def evaluate(dim: Dim, env: Mapping[str, int]) -> int:
    """The value of `dim` under `env`, with Python's integer arithmetic. Raises `ExprError`."""
    if isinstance(dim, int):
        return dim
    if not dim.args:
        if dim.op not in env:
            raise ExprError(f"symbol {dim.op} has no value")
        return env[dim.op]
    values = [evaluate(arg, env) for arg in dim.args]
    if dim.op in ("min", "max"):
        return min(values) if dim.op == "min" else max(values)
    result = values[0]
    for value in values[1:]:
        if dim.op in ("//", "%") and value == 0:
            raise ExprError(f"division by zero in {dim}")
        if dim.op == "+":
            result += value
        elif dim.op == "-":
            result -= value
        elif dim.op == "*":
            result *= value
        elif dim.op == "//":
            result //= value
        else:
            result %= value
    return result


def parse(text: str) -> Dim:
    """Inverse of `str(expr)`. Raises `ExprError` for anything but the grammar above."""
    if len(text) > MAX_TEXT:
        raise ExprError(f"expression of {len(text)} characters is too long")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ExprError(f"not an expression: {text!r}") from error
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ExprError("expression has too many terms")
    return _from_ast(tree, text)


def _from_ast(node: ast.expr, text: str) -> Dim:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < MAX_INT:
        return node.value
    if isinstance(node, ast.Name):
        return Expr(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _from_ast(node.operand, text)
        return -operand if isinstance(operand, int) else Expr("*", (-1, operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _AST_OPS:
        return Expr(_AST_OPS[type(node.op)], (_from_ast(node.left, text), _from_ast(node.right, text)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        if len(node.args) < 2 or node.keywords:
            raise ExprError(f"{node.func.id} needs two arguments or more: {text!r}")
        return Expr(node.func.id, tuple(_from_ast(arg, text) for arg in node.args))
    raise ExprError(f"not an expression: {text!r}")
