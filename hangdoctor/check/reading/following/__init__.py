"""Follows source without running it: which calls are reached on which rank, in which mode.

A scenario fixes the rank and the forward mode; all else that is not written in the source stays
unknown, and both ways are followed. What was reached becomes events, in order, each with the
conditions above it. Ranks whose events differ do not meet in their collectives.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hangdoctor.check.reading.following.expressions import EXPRESSIONS
from hangdoctor.check.reading.following.functions import call_function
from hangdoctor.check.reading.following.nodes import own_method
from hangdoctor.check.reading.following.state import State
from hangdoctor.check.reading.following.statements import STATEMENTS
from hangdoctor.check.reading.following.walk import Frame, Walk, execute
from hangdoctor.check.reading.values import Alt, Fn, Inst, Value, atom

if TYPE_CHECKING:
    from hangdoctor.check.reading.events import Reached, Root
    from hangdoctor.check.reading.scenario import Scenario
    from hangdoctor.check.reading.source import Source


def follow(
    sources: tuple[Source, ...], scenario: Scenario, only: frozenset[str] | None = None
) -> Reached:
    """Return what a scenario reaches in files that belong together, the model file first.

    Args:
        sources: the files.
        scenario: what is fixed.
        only: the functions to begin with, besides constructors; None for all.

    Raises:
        TooLargeError: there is too much to follow.
    """
    walk = Walk(sources, scenario, EXPRESSIONS, STATEMENTS)
    base = State()
    for source in reversed(sources):
        _read_module(walk, source, base)
    _construct(walk, base)
    forwards, others = _functions(walk)
    # What setters set may be set when a forward comes.
    for fn in others:
        if fn.owner is not None and id(fn.node) in fn.source.new:
            _begin_with(walk, fn, "other", base, only, keep=True)
    for _ in range(2):  # what a forward leaves on its object, the next one finds
        before = dict(base.heap)
        for fn in forwards:
            if id(fn.node) in walk.called and id(fn.node) in fn.source.new:
                continue
            _begin_with(walk, fn, "forward", base, only, keep=True)
        if before == base.heap:
            break
    for hook, registered_by in walk.hooks:
        walk.statement = registered_by
        _begin_with(walk, hook, "forward", base, only)
    walk.statement = None
    for fn in others:
        if id(fn.node) not in walk.called:
            kind: Root = "load" if "load" in getattr(fn.node, "name", "") else "other"
            _begin_with(walk, fn, kind, base, only)
    return walk.reached()


def _read_module(walk: Walk, source: Source, state: State) -> None:
    names: dict[str, Value] = {}
    walk.modules[source.module or source.name] = names
    inner = state.copy()
    inner.names = names
    walk.frames.append(Frame(source=source, closure={}, returns=[], yields=[], loops=[]))
    walk.root, walk.root_kind = "", "init"
    after = execute(walk, source.tree.body, inner) or inner
    names.update(after.names)
    state.heap.update(after.heap)
    walk.frames.pop()


def _construct(walk: Walk, base: State) -> None:
    """Make one object of each class that these files themselves do not make one of."""
    made = frozenset().union(*(source.called for source in walk.sources))
    for name, cls in tuple(walk.classes.items()):  # a constructor may define more
        init = own_method(cls.node, "__init__")
        if name not in made and init is not None:
            _begin_with(walk, Fn(init, cls.source, Inst(name)), "init", base, None)


def _functions(walk: Walk) -> tuple[list[Fn], list[Fn]]:
    """Return what may be begun with: the model file's forwards, and all other functions."""
    forwards: list[Fn] = []
    others: list[Fn] = []
    for name, cls in walk.classes.items():
        for node in cls.node.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name == "__init__":
                continue
            forward = node.name.startswith(("forward", "op_", "__call__"))
            into = forwards if forward and cls.source is walk.sources[0] else others
            into.append(Fn(node, cls.source, Inst(name)))
    for source in walk.sources:
        others += [
            value
            for value in walk.names_of(source).values()
            if isinstance(value, Fn) and value.source is source
        ]
    return forwards, others


def _begin_with(
    walk: Walk, fn: Fn, kind: Root, base: State, only: frozenset[str] | None, *, keep: bool = False
) -> None:
    """Follow a function that nothing here calls; `keep` what it leaves on objects."""
    owner = fn.owner.name if isinstance(fn.owner, Inst) else ""
    walk.root = f"{owner}.{getattr(fn.node, 'name', 'lambda')}".lstrip(".")
    walk.root_kind = kind
    if only is not None and kind != "init" and walk.root not in only:
        return
    state = base.copy()
    state.path, state.guards, state.names = {}, (), {}
    before = len(walk.frames)
    _, after = call_function(walk, fn, [], {}, state, fn.node, root=True)
    del walk.frames[before:]
    walk.via, walk.layers_depth = (), 0
    if kind == "init":
        base.heap.update(after.heap)
    elif keep:
        _keep(walk, after, base)


def _keep(walk: Walk, after: State, base: State) -> None:
    for key, value in after.heap.items():
        old = base.heap.get(key)
        if old is None:
            base.heap[key] = value
        elif old != value and not (isinstance(value, Alt) and value.no == old):
            base.heap[key] = Alt(atom(f"after {walk.root}: {key}"), value, old)
