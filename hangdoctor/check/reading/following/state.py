"""What is known at a point of a path: copied where paths part, joined where they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hangdoctor.check.reading.values import Cond, Fn, Value, alternative

if TYPE_CHECKING:
    from hangdoctor.check.reading.events import Guard

_Key = TypeVar("_Key")


class State:
    """What is known at a point of a path.

    Attributes:
        names: local variables.
        heap: attributes, by their holder and name.
        path: conditions by their key, and whether they hold.
        guards: the conditions above, the outermost first.
    """

    def __init__(self) -> None:
        self.names: dict[str, Value] = {}
        self.heap: dict[tuple[str, str], Value] = {}
        self.path: dict[str, bool] = {}
        self.guards: tuple[Guard, ...] = ()

    def copy(self) -> State:
        """Return a state that changes by itself."""
        other = State()
        other.names, other.heap = dict(self.names), dict(self.heap)
        other.path, other.guards = dict(self.path), self.guards
        return other


def join(cond: Cond, yes: State, no: State, guards: tuple[Guard, ...]) -> State:
    """Return what is known where the paths of a condition meet."""
    joined = State()
    joined.guards = guards
    joined.path = {key: held for key, held in yes.path.items() if no.path.get(key) == held}
    _merge(cond, joined.names, yes.names, no.names)
    _merge(cond, joined.heap, yes.heap, no.heap)
    return joined


def _merge(
    cond: Cond, into: dict[_Key, Value], left: dict[_Key, Value], right: dict[_Key, Value]
) -> None:
    for key in left.keys() | right.keys():
        a, b = left.get(key), right.get(key)
        if a is b and a is not None:
            into[key] = a
        elif a is None or b is None:
            present = a if a is not None else b
            if present is not None:
                into[key] = present
        elif a == b or (isinstance(a, Fn) and isinstance(b, Fn)):
            into[key] = a
        else:
            into[key] = alternative(cond, a, b)
