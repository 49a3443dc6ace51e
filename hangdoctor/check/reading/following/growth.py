"""How much a list may hold after a call of its methods, or of a function that it is given to."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hangdoctor.check.reading.following.assignment import write
from hangdoctor.check.reading.following.walk import evaluate_again, options
from hangdoctor.check.reading.values import Alt, Seq, Value

if TYPE_CHECKING:
    from hangdoctor.check.reading.following.state import State
    from hangdoctor.check.reading.following.walk import Walk

MOST_ITEMS = 16
"""Of a list whose items are told apart."""

GROWS = frozenset(
    {"append", "extend", "add", "update", "insert", "clear", "pop", "setdefault", "remove"}
)
ONLY_READS = frozenset(
    {
        "len", "range", "enumerate", "zip", "sorted", "reversed", "list", "tuple", "set", "dict",
        "frozenset", "isinstance", "print", "max", "min", "sum", "any", "all", "bool", "str",
        "repr", "iter", "next", "map", "filter", "getattr", "hasattr", "id", "type", "cat",
        "stack", "concat", "tensor", "as_tensor", "append", "add", "insert", "extend", "update",
        "debug", "info", "warning", "error", "join", "format", "dumps",
    }
)  # fmt: skip
"""Functions and methods that leave a list as it is that they are given."""


def grow(
    walk: Walk,
    func: ast.Attribute,
    receiver: Value,
    how: str,
    args: list[Value],
    state: State,
    *,
    quiet: bool = False,
) -> None:
    """Follow `how`, one of the methods in GROWS; `quiet` where nobody has written the call."""
    new = _grown(receiver, how, args)
    if isinstance(func.value, ast.Name):
        state.names[func.value.id] = new
    elif isinstance(func.value, ast.Attribute):
        owner = evaluate_again(walk, func.value.value, state)
        write(walk, owner, func.value.attr, new, func, state, quiet=quiet)


def may_grow(walk: Walk, expression: ast.expr, value: Value, state: State) -> None:
    """Forget how much a list holds that was given to a call: it may have been added to."""
    if not any(
        isinstance(one, Seq) and one.kind != "tuple" for one, _ in options(walk, value, state)
    ):
        return
    if isinstance(expression, ast.IfExp):
        given = [expression.body, expression.orelse]
    else:
        given = [expression.value if isinstance(expression, ast.Starred) else expression]
    for one in given:
        if isinstance(one, ast.Name | ast.Attribute):
            extend = ast.copy_location(ast.Attribute(value=one, attr="extend"), one)
            grow(walk, extend, evaluate_again(walk, one, state), "extend", [], state, quiet=True)


def _grown(value: Value, how: str, args: list[Value]) -> Value:
    if isinstance(value, Alt):
        return Alt(value.cond, _grown(value.yes, how, args), _grown(value.no, how, args))
    if not isinstance(value, Seq):
        return value
    if how == "clear":
        return Seq(value.kind, 0, 0, ())
    if how in ("extend", "update", "pop", "remove"):
        return Seq(value.kind, 0 if how in ("pop", "remove") else value.low, None)
    items = None
    if value.items is not None and len(value.items) < MOST_ITEMS and args:
        items = (*value.items, args[-1])
    high = None if items is None else len(items)
    return Seq(value.kind, value.low + 1, high, items, value.labels)
