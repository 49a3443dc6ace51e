"""Calls of the functions and classes of these files: arguments are bound, the body is followed."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hangdoctor.check.reading import vocabulary as words
from hangdoctor.check.reading.following.classes import method
from hangdoctor.check.reading.following.nodes import at, decorators
from hangdoctor.check.reading.following.state import join
from hangdoctor.check.reading.following.walk import Frame, evaluate, execute
from hangdoctor.check.reading.scenario import rank_named
from hangdoctor.check.reading.values import (
    NO_LABELS,
    NONE,
    Alt,
    Cls,
    Fn,
    Inst,
    Mode,
    Seq,
    Sym,
    Value,
    alternative,
    atom,
    both,
    negate,
)

if TYPE_CHECKING:
    from hangdoctor.check.reading.following.state import State
    from hangdoctor.check.reading.following.walk import Walk

MOST_CALLS = 12
"""Inside one another."""


def call_value(
    walk: Walk,
    func: Value,
    args: list[Value],
    keywords: dict[str, Value],
    state: State,
    node: ast.AST,
) -> Value:
    """Follow a call of a function, a class or an instance of these files, and return its value."""
    fn: Fn | None = None
    made: Value | None = None
    if isinstance(func, Cls):
        made = Inst(func.node.name)
        fn = method(walk.classes, func.node.name, "__init__", made)
    elif isinstance(func, Inst):
        fn = method(walk.classes, func.name, "forward", func)
        fn = fn or method(walk.classes, func.name, "__call__", func)
    elif isinstance(func, Fn):
        fn = func
    if fn is None or len(walk.frames) > MOST_CALLS or any(one is fn.node for one, _ in walk.via):
        return made or Sym(f"call {at(node)}", "")
    if not isinstance(fn.node, ast.Lambda):
        walk.passing_on.add(id(walk.statement))
    outer_via, walk.via = walk.via, (*walk.via, (node, walk.source))
    returned, after = call_function(walk, fn, args, keywords, state, node)
    walk.via = outer_via
    state.heap = after.heap
    return made or returned


def call_function(
    walk: Walk,
    fn: Fn,
    args: list[Value],
    keywords: dict[str, Value],
    state: State,
    node: ast.AST,
    *,
    root: bool = False,
) -> tuple[Value, State]:
    """Follow a function's body; `root` where it is begun with, so that its arguments are unknown.

    Returns:
        what it returns, and the state in which it ends: that of its caller if it never does.
    """
    walk.called.add(id(fn.node))
    inner = state.copy()
    inner.names = {}
    class_name = fn.owner.name if isinstance(fn.owner, Inst) else ""
    cls = walk.classes.get(class_name)
    frame = Frame(
        source=fn.source,
        closure=dict(fn.closure or {}),
        returns=[],
        yields=[],
        loops=[],
        depth_of_guards=len(state.guards),
        class_name=class_name,
        bases=tuple(cls.node.bases) if cls else (),
    )
    walk.frames.append(frame)
    _bind(walk, fn, args, keywords, inner, root=root)
    if isinstance(fn.node, ast.Lambda):
        if id(walk.statement) in fn.source.new:
            walk.touched.add(walk.root)
        frame.returns.append((evaluate(walk, fn.node.body, inner), inner))
    else:
        last = execute(walk, fn.node.body, inner)
        if last is not None:
            frame.returns.append((NONE, last))
    walk.frames.pop()
    if not frame.returns:
        return NONE, state
    if frame.yields:  # what a context manager gives; of another generator, one of its items
        return frame.yields[0], frame.returns[-1][1]
    return _returned(frame, state, node)


def _returned(frame: Frame, state: State, node: ast.AST) -> tuple[Value, State]:
    """Return what any of the ways through a function gives, and the state where they meet."""
    value, after = frame.returns[-1]
    value = _mark(value)
    for earlier, its_state in reversed(frame.returns[:-1]):
        new = its_state.guards[frame.depth_of_guards :]
        cond = both(
            guard.cond if guard.taken else negate(guard.cond) for guard in new if not guard.decided
        )
        if cond.op == "const":
            cond = atom(f"return {at(node)} {len(new)}")
        value = alternative(cond, _mark(earlier), value)
        after = join(cond, its_state, after, state.guards)
    return value, after


def _mark(value: Value) -> Value:
    """Return a tensor that a function returns, marked so: whoever unpacks it errs."""
    if isinstance(value, Sym) and value.tensor and not value.made:
        return Sym(value.key, value.name, value.labels, True, "returned", True)
    if isinstance(value, Alt):
        return Alt(value.cond, _mark(value.yes), _mark(value.no))
    return value


def _bind(
    walk: Walk,
    fn: Fn,
    args: list[Value],
    keywords: dict[str, Value],
    state: State,
    *,
    root: bool,
) -> None:
    parameters = fn.node.args
    names = [*parameters.posonlyargs, *parameters.args]
    values = list(args)
    if fn.owner is not None and "staticmethod" not in decorators(fn.node):
        values.insert(0, fn.owner)
    defaults: dict[str, ast.expr] = {}
    for name, default in zip(reversed(names), reversed(parameters.defaults), strict=False):
        defaults[name.arg] = default
    for name, given in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
        if given is not None:
            defaults[name.arg] = given
    for number, name in enumerate([*names, *parameters.kwonlyargs]):
        if number < len(values) and name in names:
            state.names[name.arg] = values[number]
        elif name.arg in keywords:
            state.names[name.arg] = keywords[name.arg]
        elif not root and name.arg in defaults:
            state.names[name.arg] = evaluate(walk, defaults[name.arg], state)
        else:
            state.names[name.arg] = _parameter(walk, name)
    if parameters.vararg:
        rest = tuple(values[len(names) :])
        state.names[parameters.vararg.arg] = Seq(
            "tuple", len(rest), None if root else len(rest), None if root else rest
        )
    if parameters.kwarg:
        state.names[parameters.kwarg.arg] = Sym("kwargs", "kwargs")


def _parameter(walk: Walk, name: ast.arg) -> Value:
    """Return a parameter of which nothing but its name and annotation is known."""
    if name.arg == "forward_mode":
        return Mode()
    if (rank := rank_named(walk.scenario, name.arg)) is not None:
        return rank
    annotation = ast.unparse(name.annotation) if name.annotation else ""
    tensor = name.arg in words.TENSORS or annotation == "torch.Tensor"
    return Sym(name.arg, name.arg, NO_LABELS, tensor=tensor)
