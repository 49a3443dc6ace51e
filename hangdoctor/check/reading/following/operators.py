"""What operators come to on values: numbers, and conditions where something is not known."""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING, Any

from hangdoctor.check.reading import vocabulary as words
from hangdoctor.check.reading.following.nodes import dotted
from hangdoctor.check.reading.values import (
    CONTENT,
    NO_LABELS,
    NONE,
    Alt,
    Cond,
    Const,
    Index,
    Labels,
    Mode,
    Seq,
    Sym,
    Value,
    atom,
    const,
    either,
    is_tensor,
    labels_of,
    name_of,
    negate,
    split,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def calculate(op: ast.operator, left: Value, right: Value) -> Value:
    """Return the result of an operator between two values."""
    labels = labels_of(left) | labels_of(right)
    if isinstance(left, Index) or isinstance(right, Index):
        index, other = (left, right) if isinstance(left, Index) else (right, left)
        if isinstance(index, Index) and index.at == "zero" and isinstance(other, Const):
            pair = (0, other.value) if index is left else (other.value, 0)
            return _computed(op, pair, labels)
        return index
    if isinstance(left, Const) and isinstance(right, Const):
        return _computed(op, (left.value, right.value), labels)
    if isinstance(left, Seq) and isinstance(right, Seq) and isinstance(op, ast.Add):
        items = (
            left.items + right.items if left.items is not None and right.items is not None else None
        )
        high = None if left.high is None or right.high is None else left.high + right.high
        return Seq(left.kind, left.low + right.low, high, items)
    tensor = is_tensor(left) or is_tensor(right)
    key = f"({text_of(left)} {type(op).__name__} {text_of(right)})"
    return Sym(key, "", labels, tensor=tensor)


def compare(op: ast.cmpop, left: Value, right: Value, mode: str | None) -> Cond:
    """Return the condition that one comparison asks for; `mode` is the forward's, where known."""
    if isinstance(op, ast.NotEq | ast.IsNot):
        return negate(equal(left, right, mode))
    if isinstance(op, ast.Eq | ast.Is):
        return equal(left, right, mode)
    if isinstance(op, ast.In | ast.NotIn):
        cond = _contains(right, left, mode)
        return negate(cond) if isinstance(op, ast.NotIn) else cond
    labels = labels_of(left) | labels_of(right)
    if isinstance(left, Index) or isinstance(right, Index):
        return _index_order(op, left, right, labels)
    if isinstance(left, Const) and isinstance(right, Const):
        try:
            return const(bool(_ORDER[type(op)](left.value, right.value)), labels)
        except TypeError:
            pass
    return atom(f"{text_of(left)} {type(op).__name__} {text_of(right)}", labels)


def equal(left: Value, right: Value, mode: str | None) -> Cond:
    """Return the condition that two values are the same; `mode` is the forward's, where known."""
    if isinstance(left, Alt):
        return split(left.cond, equal(left.yes, right, mode), equal(left.no, right, mode))
    if isinstance(right, Alt):
        return equal(right, left, mode)
    if isinstance(left, Mode) or isinstance(right, Mode):
        return _is_mode(right if isinstance(left, Mode) else left, mode)
    labels = labels_of(left) | labels_of(right)
    if isinstance(left, Index) or isinstance(right, Index):
        index, other = (left, right) if isinstance(left, Index) else (right, left)
        if isinstance(index, Index):
            return _index_in(index, (other,))
    if NONE in (Const(getattr(left, "value", 0)), Const(getattr(right, "value", 0))):
        return _is_none(right if isinstance(left, Const) and left.value is None else left, labels)
    if isinstance(left, Const) and isinstance(right, Const):
        return const(left.value == right.value, labels)
    if left == right and isinstance(left, Sym):
        return const(True, labels)
    for one, other in ((left, right), (right, left)):
        # Which card a tensor lies on: cuda:0 is the first rank's.
        if "device" in name_of(one) and "cuda:" in f"{text_of(other)}{name_of(other)}":
            return atom(f"{text_of(left)} == {text_of(right)}", labels | {"rank:tp"})
    first, second = sorted((text_of(left), text_of(right)))
    return atom(f"{first} == {second}", labels)


def is_instance(value: Value, kind: ast.expr) -> Cond:
    """Return the condition that a value is of a class, or one of a tuple of classes."""
    if isinstance(value, Alt):
        return split(value.cond, is_instance(value.yes, kind), is_instance(value.no, kind))
    names = {words.last(dotted(one)) for one in getattr(kind, "elts", [kind])}
    if isinstance(value, Seq):
        return const(value.kind in names)
    if isinstance(value, Sym):
        if value.made.startswith("object:"):
            return const(value.made.removeprefix("object:") in names)
        if value.tensor or value.made == "returned":
            return const("Tensor" in names)
    return atom(f"isinstance({text_of(value)}, {sorted(names)})", labels_of(value))


def _computed(op: ast.operator, pair: tuple[object, object], labels: Labels) -> Value:
    function = _ARITHMETIC.get(type(op))
    numbers = all(isinstance(one, int | float | bool) for one in pair)
    if function is not None and numbers:
        try:
            return Const(function(*pair), labels)
        except (ArithmeticError, TypeError, ValueError):
            pass
    return Sym(f"{pair[0]!r} {type(op).__name__} {pair[1]!r}", "", labels)


def _is_mode(value: Value, mode: str | None) -> Cond:
    labels = frozenset({"mode"})
    name = words.last(name_of(value))
    if mode and name in words.FORWARD_MODES:
        return const(name == mode, labels)
    return atom(f"mode == {text_of(value)}", labels)


def _is_none(value: Value, labels: Labels) -> Cond:
    if isinstance(value, Const):
        # A rank that is told is never None.
        told = isinstance(value.value, int)
        return const(value.value is None, NO_LABELS if told else value.labels | labels)
    if not isinstance(value, Sym) or value.present:
        return const(False, labels)
    return atom(f"{value.key} is None", labels)


def _contains(container: Value, item: Value, mode: str | None) -> Cond:
    if isinstance(container, Alt):
        return split(
            container.cond,
            _contains(container.yes, item, mode),
            _contains(container.no, item, mode),
        )
    if isinstance(container, Seq) and container.high == 0:
        return const(False, container.labels)
    if isinstance(item, Index):
        if isinstance(container, Seq) and container.items is not None:
            return _index_in(item, container.items, container.labels)
        if item.at == "zero":
            return atom(f"0 in {text_of(container)}", labels_of(container) | CONTENT)
        return const(item.at == "hit", labels_of(container))
    if isinstance(container, Seq) and container.items is not None:
        return either(equal(item, one, mode) for one in container.items)
    if name_of(container) == "os.environ":
        return atom(f"{text_of(item)} in os.environ", frozenset({"env"}))
    labels = labels_of(container) | labels_of(item)
    return atom(f"{text_of(item)} in {text_of(container)}", labels)


def _index_in(index: Index, items: tuple[Value, ...], labels: Labels = NO_LABELS) -> Cond:
    numbers = [item.value for item in items if isinstance(item, Const)]
    if index.at == "zero":
        if len(numbers) == len(items):
            return const(0 in numbers, labels)
        return either(atom(f"0 == {text_of(item)}", labels_of(item) | CONTENT) for item in items)
    positive = len(numbers) < len(items) or any(number != 0 for number in numbers)
    return const(positive and index.at == "hit", labels)


def _index_order(op: ast.cmpop, left: Value, right: Value, labels: Labels) -> Cond:
    """Return whether a layer's number is above or below another number.

    The first pass stands for layer 0, the others for any layer from 1 on.
    """
    flipped = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
    index, other, kind = left, right, type(op)
    if not isinstance(index, Index):
        index, other, kind = right, left, flipped.get(type(op), type(op))
    key = f"layer {text_of(index)} {kind.__name__} {text_of(other)}"
    number = other.value if isinstance(other, Const) else None
    if not isinstance(index, Index) or not isinstance(number, int):
        # A number that is not told may be 0, and be compared so that layer 0 stays out.
        return atom(key, labels | CONTENT)
    if index.at == "zero":
        return const(bool(_ORDER[kind](0, number)), labels)
    if (kind is ast.Gt and number < 1) or (kind is ast.GtE and number <= 1):
        return const(True, labels)
    if (kind is ast.Lt and number <= 1) or (kind is ast.LtE and number < 1):
        return const(False, labels)
    return atom(key, labels)


_ORDER: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
}
