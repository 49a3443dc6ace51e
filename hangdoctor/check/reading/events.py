"""What is reached where source is followed: events in order, each with the conditions above it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import ast

    from hangdoctor.check.reading import vocabulary as words
    from hangdoctor.check.reading.source import Source
    from hangdoctor.check.reading.values import Cond, Labels, Value

EventKind = Literal[
    "collective", "p2p", "module", "sync", "io", "block", "write", "unpack", "tuple", "none",
    "raise", "inplace", "replace",
]  # fmt: skip
Root = Literal["init", "forward", "load", "other"]


class Guard(NamedTuple):
    """A condition above an event; `decided` where the scenario settles it."""

    cond: Cond
    taken: bool
    decided: bool
    text: str
    labels: Labels
    node: ast.AST
    source: Source


class Event(NamedTuple):
    """Something that was reached; `via` are the calls that led there, the outermost first."""

    kind: EventKind
    name: str
    node: ast.AST
    source: Source
    group: words.Group = "unknown"
    guards: tuple[Guard, ...] = ()
    via: tuple[tuple[ast.AST, Source], ...] = ()
    root: str = ""
    root_kind: Root = "other"
    statement: ast.AST | None = None
    value: Value | None = None


class Reached(NamedTuple):
    """All of a scenario: events in order, statements reached in forwards and in layer loops.

    `touched` are the functions that were begun with and reach something new, `passing_on` the
    statements that call a function of these files.
    """

    events: tuple[Event, ...]
    in_forward: dict[int, tuple[ast.stmt, Source]]
    in_loop: dict[int, tuple[ast.stmt, Source]]
    touched: frozenset[str] = frozenset()
    passing_on: frozenset[int] = frozenset()
