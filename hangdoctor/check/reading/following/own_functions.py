"""What calls of Python's own functions come to, such as len, range, getattr and print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.check.reading.following.assignment import write
from hangdoctor.check.reading.following.attributes import attribute
from hangdoctor.check.reading.following.growth import MOST_ITEMS
from hangdoctor.check.reading.following.nodes import at
from hangdoctor.check.reading.following.operators import is_instance
from hangdoctor.check.reading.following.walk import truth
from hangdoctor.check.reading.values import (
    CONTENT,
    NONE,
    Alt,
    Const,
    Ext,
    Fn,
    Labels,
    Seq,
    Sym,
    Truth,
    Value,
    alternative,
    atom,
    holder_of,
    is_tensor,
    labels_of,
    name_of,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hangdoctor.check.reading.following.outside import Call
    from hangdoctor.check.reading.following.state import State
    from hangdoctor.check.reading.following.walk import Walk


def call_own(walk: Walk, call: Call, state: State) -> Value | None:
    """Return what a call of one of Python's own functions gives; None where it is like any other.

    What a logger says needs a tensor's content, as what is printed does.
    """
    how = _OWN.get(call.name)
    if how is not None:
        return how(walk, call, state)
    if call.tail in ("info", "warning", "debug", "error"):
        _print(walk, call, state)
    return None


def _getattr(walk: Walk, call: Call, state: State) -> Value | None:
    if len(call.args) > 1 and isinstance(call.args[1], Const):
        return attribute(walk, call.args[0], str(call.args[1].value), state, call.node)
    return None


def _setattr(walk: Walk, call: Call, state: State) -> Value | None:
    if len(call.args) != 3:
        return None
    owner, name, value = call.args
    if isinstance(name, Const):
        write(walk, owner, str(name.value), value, call.node, state)
    return NONE


def _hasattr(_walk: Walk, call: Call, state: State) -> Value | None:
    if len(call.args) != 2 or not isinstance(call.args[1], Const):
        return None
    owner, name = call.args[0], call.args[1].value
    if (holder_of(owner), str(name)) in state.heap:
        return Const(True)
    return Truth(atom(f"hasattr({text_of(owner)}, {name!r})"))


def _isinstance(_walk: Walk, call: Call, _state: State) -> Value | None:
    if len(call.args) != 2 or len(call.node.args) != 2:
        return None
    return Truth(is_instance(call.args[0], call.node.args[1]))


def _bool(walk: Walk, call: Call, state: State) -> Value | None:
    return Truth(truth(walk, call.args[0], state, call.node)) if call.args else None


def _convert(walk: Walk, call: Call, state: State) -> Value | None:
    """Return a number or text made of others; of a tensor, that waits for the device."""
    if not call.args:
        return None
    name, args = call.name, call.args
    if is_tensor(args[0]):
        walk.event("sync", f"{name} of a tensor", call.node, state.guards)
    labels = _labels(args)
    if all(isinstance(one, Const) for one in args) and not call.keywords:
        try:
            return Const(_CONVERT[name](*(one.value for one in args)), labels)  # type: ignore[operator, union-attr]
        except (ArithmeticError, TypeError, ValueError):
            pass
    return Sym(f"{name}({', '.join(map(text_of, args))})", name_of(args[0]), labels, present=True)


def _len(_walk: Walk, call: Call, _state: State) -> Value | None:
    if not call.args:
        return None
    value = call.args[0]
    if isinstance(value, Alt):
        return alternative(value.cond, _length(value.yes), _length(value.no))
    length = _length(value)
    if isinstance(value, Seq) and isinstance(length, Const):
        return Const(length.value, value.labels)
    if isinstance(value, Seq) and value.low > 0:
        return Sym(f"positive len {at(call.node)}", "positive", value.labels)
    return length


def _length(value: Value) -> Value:
    if isinstance(value, Seq) and value.low == value.high:
        return Const(value.low)
    return Sym(f"len({text_of(value)})", "", labels_of(value) | CONTENT)


def _range(_walk: Walk, call: Call, _state: State) -> Value | None:
    args, key = call.args, f"range {at(call.node)}"
    labels = _labels(args)
    if args and all(isinstance(one, Const) for one in args):
        try:
            numbers = range(*(one.value for one in args))  # type: ignore[arg-type, union-attr]
        except (TypeError, ValueError):
            return None
        if not numbers[MOST_ITEMS:]:  # it may have more than len() can tell
            items = tuple(Const(one, labels) for one in numbers)
            return Seq("list", len(items), len(items), items, labels)
        return Sym(key, "range", labels, made="range")
    if args and (len(args) == 1 or args[0] == Const(0)):
        return Sym(key, "range from 0", labels, made="range", present=True)
    return None


def _collection(_walk: Walk, call: Call, _state: State) -> Value | None:
    if not call.args:
        return Seq("list", 0, 0, ())
    value = call.args[0]
    ranged = isinstance(value, Sym) and value.made == "range"
    return value if ranged or isinstance(value, Seq | Alt) else None


def _print(walk: Walk, call: Call, state: State) -> Value:
    if any(is_tensor(one) for one in call.args):
        walk.event("sync", f"{call.tail} of a tensor", call.node, state.guards)
    return NONE


def _partial(_walk: Walk, call: Call, _state: State) -> Value | None:
    return call.args[0] if call.args and isinstance(call.args[0], Fn | Ext | Alt) else None


def _labels(values: list[Value]) -> Labels:
    return frozenset().union(*map(labels_of, values))


_CONVERT = {"int": int, "str": str, "float": float, "abs": abs, "min": min, "max": max}
_OWN: dict[str, Callable[[Walk, Call, State], Value | None]] = {
    "getattr": _getattr,
    "setattr": _setattr,
    "object.__setattr__": _setattr,
    "hasattr": _hasattr,
    "isinstance": _isinstance,
    "bool": _bool,
    **dict.fromkeys(_CONVERT, _convert),
    "len": _len,
    "range": _range,
    **dict.fromkeys(("list", "tuple", "set", "sorted", "dict", "frozenset"), _collection),
    "print": _print,
    "functools.partial": _partial,
    "partial": _partial,
}
