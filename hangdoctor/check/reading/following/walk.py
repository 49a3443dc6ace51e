"""One way through the source in one scenario: where it stands, what it has come by, and how far.

What each kind of node does stands in two tables, `expressions` and `statements`, which a walk is
given: so the modules that fill them can evaluate and execute whatever stands inside their nodes.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, NamedTuple

from hangdoctor.check.reading.events import Event, EventKind, Guard, Reached, Root
from hangdoctor.check.reading.following.nodes import at
from hangdoctor.check.reading.values import (
    CONTENT,
    NO_LABELS,
    NONE,
    Alt,
    Cls,
    Cond,
    Const,
    Ext,
    Fn,
    Index,
    Labels,
    Seq,
    Sym,
    Truth,
    Value,
    assume,
    atom,
    const,
    key_of,
    known,
    labels_of,
    split,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hangdoctor.check.reading import vocabulary as words
    from hangdoctor.check.reading.following.state import State
    from hangdoctor.check.reading.scenario import Scenario
    from hangdoctor.check.reading.source import Source

    Evaluate = Callable[["Walk", Any, State], Value]
    Execute = Callable[["Walk", Any, State], State | None]

MOST_STEPS = 400_000
"""Statements and calls followed in one scenario; a model file of SGLang takes some thousands."""


class TooLargeError(Exception):
    """There is more to follow than the limit allows."""


class Frame(NamedTuple):
    """A call that is being followed, or a module.

    Attributes:
        source, closure: of the function.
        returns, yields: what it has given so far.
        loops: of each loop around, the states in which a pass was left early.
        depth_of_guards: how many conditions stand above the call.
        class_name, bases: of the method's class; empty for a function.
    """

    source: Source
    closure: Mapping[str, Value]
    returns: list[tuple[Value, State]]
    yields: list[Value]
    loops: list[list[State]]
    depth_of_guards: int = 0
    class_name: str = ""
    bases: tuple[ast.expr, ...] = ()


class Walk:
    """One way through files that belong together.

    Attributes:
        sources: the files, the model file first; scenario: what is fixed.
        expressions, statements: what is done at each kind of node.
        events, in_forward, in_loop, touched, passing_on: as in Reached.
        modules: the names of each file; classes: of all of them.
        called: ids of the functions that were followed; hooks: functions that were handed over to
            run in forwards, with the statement that did so.
        frames: the calls that are being followed, the innermost last; via: their places.
        root, root_kind: the function that was begun with; statement: the one that is executed.
        layers_depth: loops over layers around.
    """

    def __init__(
        self,
        sources: tuple[Source, ...],
        scenario: Scenario,
        expressions: Mapping[type[ast.AST], Evaluate],
        statements: Mapping[type[ast.AST], Execute],
    ) -> None:
        self.sources = sources
        self.scenario = scenario
        self.expressions = expressions
        self.statements = statements
        self.events: list[Event] = []
        self.in_forward: dict[int, tuple[ast.stmt, Source]] = {}
        self.in_loop: dict[int, tuple[ast.stmt, Source]] = {}
        self.touched: set[str] = set()
        self.passing_on: set[int] = set()
        self.modules: dict[str, dict[str, Value]] = {}
        self.classes: dict[str, Cls] = {}
        self.called: set[int] = set()
        self.hooks: list[tuple[Fn, ast.AST | None]] = []
        self.frames: list[Frame] = []
        self.via: tuple[tuple[ast.AST, Source], ...] = ()
        self.root = ""
        self.root_kind: Root = "other"
        self.statement: ast.AST | None = None
        self.layers_depth = 0
        self._steps = 0
        self._texts: dict[int, str] = {}

    @property
    def source(self) -> Source:
        """The file that is read now."""
        return self.frames[-1].source

    def names_of(self, source: Source) -> dict[str, Value]:
        """Return the names at the top of a file, as far as it was read."""
        return self.modules.get(source.module or source.name, {})

    def step(self) -> None:
        """Count a statement or a call.

        Raises:
            TooLargeError: it is one too many.
        """
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise TooLargeError

    def event(
        self,
        kind: EventKind,
        name: str,
        node: ast.AST,
        guards: tuple[Guard, ...],
        *,
        group: words.Group = "unknown",
        value: Value | None = None,
    ) -> None:
        """Note that something is reached, under these conditions."""
        self.events.append(
            Event(
                kind, name, node, self.source, group, guards, self.via, self.root, self.root_kind,
                self.statement, value,
            )
        )  # fmt: skip

    def guard(self, cond: Cond, test: ast.AST, *, taken: bool, decided: bool) -> Guard:
        """Return the condition above what follows where `test` holds, or does not."""
        labels = frozenset(
            label
            for label in cond.labels
            if not decided
            or label.startswith("rank:")
            or label in ("varies", "mode", "capture", "rank-variable")
        )
        text = self._texts.get(id(test)) or self._texts.setdefault(id(test), ast.unparse(test))
        return Guard(cond, taken, decided, text, labels, test, self.source)

    def part(self, cond: Cond, test: ast.AST, state: State) -> State:
        """Let a state go on where a condition holds, and return the one where it does not."""
        other, before = state.copy(), state.guards
        state.guards = (*before, self.guard(cond, test, taken=True, decided=False))
        other.guards = (*before, self.guard(cond, test, taken=False, decided=False))
        assume(cond, True, state.path)
        assume(cond, False, other.path)
        return other

    def reached(self) -> Reached:
        """Return what it has come by."""
        return Reached(
            tuple(self.events),
            self.in_forward,
            self.in_loop,
            frozenset(self.touched),
            frozenset(self.passing_on),
        )


def execute(walk: Walk, body: list[ast.stmt], state: State | None) -> State | None:
    """Follow statements, and return the state after them; None where none gets there."""
    for node in body:
        if state is None:
            return None
        walk.step()
        if id(node) in walk.source.new:
            walk.touched.add(walk.root)
        # What only an exception brings is no work of the mode.
        handles = any(one.taken and one.text.endswith(" raises") for one in state.guards)
        if walk.root_kind == "forward" and not handles:
            place = (node, walk.source)
            walk.in_forward[id(node)] = place
            if walk.layers_depth:
                walk.in_loop[id(node)] = place
        outer, walk.statement = walk.statement, node
        how = walk.statements.get(type(node))
        if how is not None:
            state = how(walk, node, state)
        walk.statement = outer
    return state


def evaluate(walk: Walk, node: ast.expr | None, state: State) -> Value:
    """Return an expression's value, and follow the calls in it."""
    if node is None:
        return NONE
    how = walk.expressions.get(type(node))
    if how is not None:
        return how(walk, node, state)
    labels: Labels = NO_LABELS
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            labels |= labels_of(evaluate(walk, child, state))
    return Sym(f"{type(node).__name__} {at(node)}", "", labels)


def evaluate_again(walk: Walk, node: ast.expr, state: State) -> Value:
    """Return an expression's value once more: what it reaches was noted, what it changes is not."""
    count = len(walk.events)
    value = evaluate(walk, node, state.copy())
    del walk.events[count:]
    return value


def truth(walk: Walk, value: Value, state: State, node: ast.AST) -> Cond:
    """Return the condition that a value counts as true; that of a tensor waits for the device."""
    if isinstance(value, Const):
        return const(bool(value.value), value.labels)
    if isinstance(value, Truth):
        return value.cond
    if isinstance(value, Seq):
        if value.high == 0:
            return const(False, value.labels)
        if value.low > 0:
            return const(True, value.labels)
        return atom(f"{text_of(value)} {at(node)}", value.labels | CONTENT)
    if isinstance(value, Alt):
        yes, no = truth(walk, value.yes, state, node), truth(walk, value.no, state, node)
        if known(value.cond, state.path) is not None:
            return yes if known(value.cond, state.path) else no
        return split(value.cond, yes, no)
    if isinstance(value, Sym):
        if value.tensor and not value.name.endswith(("_cpu", "()_cpu")):
            walk.event("sync", "the truth of a tensor", node, state.guards)
        if value.name == "positive" or value.made.startswith("object:"):
            return const(True, value.labels)
        return atom(value.key, value.labels)
    if isinstance(value, Index):
        return const(value.at != "zero")
    return const(True)


def options(walk: Walk, value: Value, state: State) -> list[tuple[Value, tuple[Guard, ...]]]:
    """Return what a value may be, each with the conditions under which it is."""
    if not isinstance(value, Alt):
        return [(value, state.guards)]
    found = []
    node = walk.statement or ast.Pass()
    cond = value.cond
    for taken, option in ((True, value.yes), (False, value.no)):
        if known(cond, state.path) in (None, taken):
            inner = state.copy()
            assume(cond, taken, inner.path)
            guard = Guard(cond, taken, False, key_of(cond), cond.labels, node, walk.source)
            inner.guards = (*state.guards, guard)
            found += options(walk, option, inner)
    return found


def look_up(walk: Walk, name: str, state: State) -> Value:
    """Return what a name stands for."""
    if name in state.names:
        return state.names[name]
    frame = walk.frames[-1]
    for names in (frame.closure, walk.names_of(frame.source)):
        if name in names:
            return names[name]
    return walk.classes.get(name) or Ext(name)
