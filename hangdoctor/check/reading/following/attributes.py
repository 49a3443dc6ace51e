"""What an attribute is: of an object, a class, a module, the batch; and what decorators make."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from hangdoctor.check.reading import vocabulary as words
from hangdoctor.check.reading.following.classes import inherited, method
from hangdoctor.check.reading.following.functions import call_value
from hangdoctor.check.reading.following.nodes import decorators
from hangdoctor.check.reading.following.walk import evaluate_again, look_up, options
from hangdoctor.check.reading.scenario import (
    captured,
    of_an_extend,
    of_the_mode,
    own_rank,
    rank_named,
)
from hangdoctor.check.reading.values import (
    NONE,
    Alt,
    Cls,
    Ext,
    Fn,
    Inst,
    Mode,
    Sym,
    Value,
    alternative,
    holder_of,
    is_tensor,
    labels_of,
    name_of,
    text_of,
)

if TYPE_CHECKING:
    from hangdoctor.check.reading.following.state import State
    from hangdoctor.check.reading.following.walk import Walk


def attribute(walk: Walk, owner: Value, attr: str, state: State, node: ast.AST) -> Value:
    """Return an attribute of a value."""
    if attr == "forward_mode":
        return Mode()
    if isinstance(owner, Alt):
        return _of_either(walk, owner, attr, state, node)
    if isinstance(owner, Mode):
        return of_the_mode(walk.scenario, attr)
    if isinstance(owner, Ext):
        for source in walk.sources:
            if source.module == owner.name and attr in walk.names_of(source):
                return walk.names_of(source)[attr]
        return Ext(f"{owner.name}.{attr}")
    holder = holder_of(owner)
    if (holder, attr) in state.heap:
        value = state.heap[(holder, attr)]
        if isinstance(value, Sym) and not value.name:
            # What it came from has no name, so the attribute's tells what it is.
            return replace(value, name=f"{holder}.{attr}")
        return value
    if isinstance(owner, Inst | Cls):
        if (found := method(walk.classes, holder, attr, owner)) is not None:
            if "property" in decorators(found.node):
                return call_value(walk, found, [], {}, state, node)
            return decorated(walk, found, state)
        if (kept := inherited(walk.classes, state.heap, holder, attr)) is not None:
            return kept
        name = f"{holder}.{attr}"
    else:
        name = f"{name_of(owner) or text_of(owner)}.{attr}"
    return _unknown(walk, owner, attr, name)


def decorated(walk: Walk, fn: Fn, state: State) -> Fn:
    """Return what a function becomes by those of its decorators that these files define."""
    for decorator in reversed(getattr(fn.node, "decorator_list", ())):
        made = evaluate_again(walk, decorator, state) if _is_ours(walk, decorator, state) else None
        if isinstance(made, Fn):
            given: list[Value] = [replace(fn, owner=None)]
            returned = call_value(walk, made, given, {}, state, decorator)
            if isinstance(returned, Fn):
                walk.called.add(id(fn.node))
                fn = replace(returned, owner=fn.owner)
    return fn


def _is_ours(walk: Walk, decorator: ast.expr, state: State) -> bool:
    head = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(head, ast.Name) and isinstance(look_up(walk, head.id, state), Fn)


def _of_either(walk: Walk, owner: Alt, attr: str, state: State, node: ast.AST) -> Value:
    """Return an attribute of what has two values; of the other, where one is None."""
    found = options(walk, owner, state)
    made = [one for one, _ in found if one != NONE] or [NONE]
    if len(found) == 1 or len(made) == 1:
        return attribute(walk, made[0], attr, state, node)
    return alternative(
        owner.cond,
        attribute(walk, owner.yes, attr, state, node),
        attribute(walk, owner.no, attr, state, node),
    )


def _unknown(walk: Walk, owner: Value, attr: str, name: str) -> Value:
    """Return an attribute of which only the name tells something."""
    if (rank := rank_named(walk.scenario, name)) is not None:
        return rank
    if attr == "index" and name.endswith("device.index"):
        return own_rank(walk.scenario, "tp")
    if words.capturing(name):
        return captured(walk.scenario, name)
    labels = labels_of(owner) - {"tensor"}
    if name.startswith(("os.environ", "sglang.srt.environ.envs")):
        labels |= {"env"}
    if attr.startswith("extend_") and "batch" in name_of(owner):
        return of_an_extend(walk.scenario, name, labels)
    tensor = is_tensor(owner) and attr not in words.NO_TENSOR
    if not tensor and attr in words.TENSORS and not name.endswith("_cpu"):
        tensor = attr not in ("output", "x", "h")
    return Sym(f"{text_of(owner)}.{attr}", name, labels, tensor=tensor)
