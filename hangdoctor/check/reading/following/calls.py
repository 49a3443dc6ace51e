"""What a call comes to: of these files, of Python, of a list, of the scenario, of code outside."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hangdoctor.check.reading import vocabulary as words
from hangdoctor.check.reading.following.classes import method
from hangdoctor.check.reading.following.functions import call_value
from hangdoctor.check.reading.following.growth import GROWS, ONLY_READS, grow, may_grow
from hangdoctor.check.reading.following.nodes import at, dotted
from hangdoctor.check.reading.following.outside import (
    Call,
    gathered,
    group_argument,
    note_effects,
    result,
)
from hangdoctor.check.reading.following.own_functions import call_own
from hangdoctor.check.reading.following.walk import evaluate, evaluate_again, options
from hangdoctor.check.reading.scenario import (
    captured,
    environment,
    mode_test,
    own_rank,
    rank_named,
)
from hangdoctor.check.reading.values import (
    NONE,
    Alt,
    Cls,
    Fn,
    Inst,
    Mode,
    Seq,
    Sym,
    Value,
    name_of,
)

if TYPE_CHECKING:
    from hangdoctor.check.reading.following.state import State
    from hangdoctor.check.reading.following.walk import Walk


def evaluate_call(walk: Walk, node: ast.Call, state: State) -> Value:
    """Follow a call, and what it may do to the lists that it is given."""
    walk.step()
    func = evaluate(walk, node.func, state)
    given = [evaluate(walk, one, state) for one in node.args]
    args: list[Value] = []
    for argument, value in zip(node.args, given, strict=True):
        spread = isinstance(argument, ast.Starred) and isinstance(value, Seq) and value.items
        args += spread or [value]
    keywords = {one.arg or "**": evaluate(walk, one.value, state) for one in node.keywords}
    value = _call(walk, node, func, args, keywords, state)
    if words.last(name_of(func) or dotted(node.func)) not in ONLY_READS:
        for expression, argument_value in zip(node.args, given, strict=True):
            may_grow(walk, expression, argument_value, state)
        for one in node.keywords:
            may_grow(walk, one.value, keywords[one.arg or "**"], state)
    return value


def _call(
    walk: Walk,
    node: ast.Call,
    func: Value,
    args: list[Value],
    keywords: dict[str, Value],
    state: State,
) -> Value:
    if isinstance(func, Alt):
        return _call_either(walk, node, func, args, keywords, state)
    if isinstance(func, Fn | Cls | Inst):
        return call_value(walk, func, args, keywords, state, node)
    receiver: Value | None = None
    if isinstance(node.func, ast.Attribute):
        receiver = evaluate_again(walk, node.func.value, state)
    name = name_of(func) or dotted(node.func)
    tail = words.last(name)
    if isinstance(receiver, Mode):
        return mode_test(walk.scenario, tail)
    call = Call(node, func, name, tail, receiver, args, keywords)
    if (value := call_own(walk, call, state)) is not None:
        return value
    if isinstance(receiver, Seq | Alt) and tail in GROWS and isinstance(node.func, ast.Attribute):
        grow(walk, node.func, receiver, tail, args, state)
        return NONE
    if tail == "super" or name.startswith("super()."):
        return _super(walk, call, state)
    return _call_outside(walk, call, state)


def _call_either(
    walk: Walk,
    node: ast.Call,
    func: Alt,
    args: list[Value],
    keywords: dict[str, Value],
    state: State,
) -> Value:
    value: Value = NONE
    before = state.guards
    for option, guards in options(walk, func, state):
        if option == NONE:
            continue
        state.guards = guards
        value = _call(walk, node, option, args, keywords, state)
    state.guards = before
    return value


def _super(walk: Walk, call: Call, state: State) -> Value:
    if call.tail == "super":
        return Sym("super()", "super()")
    frame = walk.frames[-1]
    for base in frame.bases:
        owner = state.names.get("self", Inst(frame.class_name))
        fn = method(walk.classes, words.last(dotted(base)), call.tail, owner)
        if fn is not None:
            return call_value(walk, fn, call.args, call.keywords, state, call.node)
    return Sym(f"super {at(call.node)}", f"super().{call.tail}()")


def _call_outside(walk: Walk, call: Call, state: State) -> Value:
    """Return what code outside these files gives: by the scenario, else by its name alone."""
    group = group_argument(call)
    if (rank := rank_named(walk.scenario, call.name, group)) is not None:
        return rank
    if words.local_device(call.name):
        return own_rank(walk.scenario, "tp")
    if words.capturing(call.name):
        return captured(walk.scenario, call.name)
    if words.reads_environment(call.name):
        variable = call.args[0] if call.args else NONE
        return environment(walk.scenario, variable, call.name or f"at {at(call.node)}")
    among = words.group_of(call.name, group)
    if (value := gathered(walk, call, among, state)) is not None:
        return value
    note_effects(walk, call, among, state)
    _hand_over(walk, call, state)
    return result(call)


def _hand_over(walk: Walk, call: Call, state: State) -> None:
    """Follow functions that are given away: hooks run in forwards, others are called now."""
    is_hook = "hook" in call.tail or "register" in call.tail
    for value in call.given:
        if not isinstance(value, Fn):
            continue
        if is_hook:
            walk.called.add(id(value.node))
            walk.hooks.append((value, walk.statement))
        elif isinstance(value.node, ast.Lambda):
            call_value(walk, value, [], {}, state, call.node)
