"""What a piece of source tells by its text alone."""

from __future__ import annotations

import ast

from hangdoctor.check.reading import vocabulary as words


def at(node: ast.AST) -> str:
    """Return where a node stands: line and column."""
    return f"{getattr(node, 'lineno', 0)}:{getattr(node, 'col_offset', 0)}"


def dotted(node: ast.AST) -> str:
    """Return the dotted name of an expression, with `()` and `[]` inside; empty where it has none.

    >>> dotted(ast.parse("self.layers[0].norm(x).shape", mode="eval").body)
    'self.layers[].norm().shape'
    """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{dotted(node.func)}()"
    if isinstance(node, ast.Subscript):
        return f"{dotted(node.value)}[]"
    return ""


def canonical(name: str) -> str:
    """Return an imported name under the package's own name."""
    head, _, tail = name.partition(".")
    return {"np": "numpy"}.get(head, head) + (f".{tail}" if tail else "")


def decorators(node: ast.AST) -> list[str]:
    """Return the last parts of the names of a function's decorators."""
    return [words.last(dotted(one)) for one in getattr(node, "decorator_list", ())]


def own_method(cls: ast.ClassDef, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the method that a class itself defines under a name."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    return None


def is_over_layers(node: ast.For | ast.AsyncFor) -> bool:
    """Tell whether a loop goes over the model's layers."""
    if "layers" in ast.unparse(node.iter):
        return True
    return any(
        isinstance(one, ast.Subscript) and dotted(one.value).endswith(".layers")
        for statement in node.body
        for one in ast.walk(statement)
    )


def item_name(node: ast.expr) -> str:
    """Return what the items are called of what a loop goes over; empty where that tells nothing."""
    return "layers" if "layers" in ast.unparse(node) else ""


def may_end(body: list[ast.stmt]) -> bool:
    """Tell whether statements may leave the block that they stand in."""
    return any(
        isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break)
        for statement in body
        for node in ast.walk(statement)
    )
