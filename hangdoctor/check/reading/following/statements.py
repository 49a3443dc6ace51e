"""What each kind of statement does, and where paths part and meet."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hangdoctor.check.reading import vocabulary as words
from hangdoctor.check.reading.events import Guard
from hangdoctor.check.reading.following.assignment import assign
from hangdoctor.check.reading.following.attributes import attribute, decorated
from hangdoctor.check.reading.following.classes import method
from hangdoctor.check.reading.following.expressions import items_of, operate
from hangdoctor.check.reading.following.functions import call_value
from hangdoctor.check.reading.following.nodes import (
    at,
    canonical,
    dotted,
    is_over_layers,
    may_end,
)
from hangdoctor.check.reading.following.operators import equal
from hangdoctor.check.reading.following.state import State, join
from hangdoctor.check.reading.following.walk import evaluate, execute, truth
from hangdoctor.check.reading.values import (
    NONE,
    Alt,
    Cls,
    Cond,
    Const,
    Ext,
    Fn,
    Inst,
    Seq,
    Sym,
    Value,
    assume,
    atom,
    both,
    const,
    either,
    is_tensor,
    known,
    labels_of,
    name_of,
    negate,
    ranked,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hangdoctor.check.reading.following.walk import Execute, Walk


def _expr(walk: Walk, node: ast.Expr, state: State) -> State:
    evaluate(walk, node.value, state)
    return state


def _assign(walk: Walk, node: ast.Assign, state: State) -> State:
    value = evaluate(walk, node.value, state)
    for target in node.targets:
        assign(walk, target, value, state)
    return state


def _ann_assign(walk: Walk, node: ast.AnnAssign, state: State) -> State:
    if node.value is not None:
        assign(walk, node.target, evaluate(walk, node.value, state), state)
    return state


def _aug_assign(walk: Walk, node: ast.AugAssign, state: State) -> State:
    target = node.target
    old = evaluate(walk, target, state)
    value = evaluate(walk, node.value, state)
    if is_tensor(old) and isinstance(target, ast.Name):
        walk.event("inplace", target.id, node, state.guards, value=old)
    if isinstance(old, Seq):
        new: Value = Seq(old.kind, old.low + (value.low if isinstance(value, Seq) else 0), None)
    elif isinstance(old, Alt):
        new = old
    else:
        new = operate(walk, node.op, old, value, node, state)
    listed = isinstance(old, Seq) and isinstance(target, ast.Name)
    assign(walk, target, new, state, quiet=is_tensor(old) or listed)
    return state


def _return(walk: Walk, node: ast.Return, state: State) -> None:
    value = evaluate(walk, node.value, state) if node.value else NONE
    walk.frames[-1].returns.append((value, state))


def _raise(walk: Walk, node: ast.Raise, state: State) -> None:
    if node.exc:
        evaluate(walk, node.exc, state)
    walk.event("raise", "raise", node, state.guards)


def _leave_pass(walk: Walk, _node: ast.Continue | ast.Break, state: State) -> None:
    if walk.frames[-1].loops:
        walk.frames[-1].loops[-1].append(state)


def _assert(walk: Walk, node: ast.Assert, state: State) -> State | None:
    cond = truth(walk, evaluate(walk, node.test, state), state, node.test)
    if known(cond, state.path) is False and ranked(cond.labels):
        guard = walk.guard(cond, node.test, taken=False, decided=True)
        walk.event("raise", "assert", node, (*state.guards, guard))
        return None
    assume(cond, True, state.path)
    return state


def _function_def(walk: Walk, node: ast.FunctionDef | ast.AsyncFunctionDef, state: State) -> State:
    fn = Fn(node, walk.source, None, state.names)
    state.names[node.name] = decorated(walk, fn, state)
    return state


def _class_def(walk: Walk, node: ast.ClassDef, state: State) -> State:
    cls = Cls(node, walk.source)
    walk.classes[node.name] = cls
    state.names[node.name] = cls
    for inner in node.body:
        if isinstance(inner, ast.Assign) and len(inner.targets) == 1:
            target = inner.targets[0]
            if isinstance(target, ast.Name):
                state.heap[(node.name, target.id)] = evaluate(walk, inner.value, state)
    return state


def _import(_walk: Walk, node: ast.Import, state: State) -> State:
    for alias in node.names:
        name = alias.name if alias.asname else alias.name.split(".")[0]
        state.names[alias.asname or name] = Ext(canonical(name))
    return state


def _import_from(walk: Walk, node: ast.ImportFrom, state: State) -> State:
    for alias in node.names:
        state.names[alias.asname or alias.name] = _imported(walk, node, alias.name)
    return state


def _imported(walk: Walk, node: ast.ImportFrom, name: str) -> Value:
    module = node.module or ""
    for source in walk.sources:
        tail = source.module.rsplit(".", 1)[-1]
        if (module and words.last(module) == tail) or (not module and name == tail):
            return walk.names_of(source).get(name) or Ext(source.module)
    return Ext(canonical(f"{module}.{name}".lstrip(".")))


def _if(walk: Walk, node: ast.If, state: State) -> State | None:
    cond = truth(walk, evaluate(walk, node.test, state), state, node.test)
    return _branch(walk, cond, node.test, state, node.body, node.orelse)


def _branch(
    walk: Walk,
    cond: Cond,
    test: ast.expr,
    state: State,
    body: list[ast.stmt],
    orelse: list[ast.stmt],
) -> State | None:
    holds = known(cond, state.path)
    before = state.guards
    if holds is not None:
        guard = walk.guard(cond, test, taken=holds, decided=True)
        if not guard.labels:
            return execute(walk, body if holds else orelse, state)
        state.guards = (*before, guard)
        after = execute(walk, body if holds else orelse, state)
        if after is not None and not (may_end(body) or may_end(orelse)):
            after.guards = before
        return after
    other = walk.part(cond, test, state)
    yes = execute(walk, body, state)
    no = execute(walk, orelse, other)
    if yes is None or no is None:
        return yes or no
    return join(cond, yes, no, before)


def _for(walk: Walk, node: ast.For | ast.AsyncFor, state: State) -> State | None:
    iterable = evaluate(walk, node.iter, state)
    layers = is_over_layers(node)
    walk.layers_depth += layers
    ends: list[State] = []
    walk.frames[-1].loops.append(ends)
    current: State | None = state
    for item in items_of(iterable, node.iter):
        if current is None:
            break
        assign(walk, node.target, item, current)
        count = len(ends)
        current = execute(walk, node.body, current)
        current = _with_ends(node, current, ends[count:], state)
    walk.frames[-1].loops.pop()
    walk.layers_depth -= layers
    return execute(walk, node.orelse, current) if node.orelse else current


def _while(walk: Walk, node: ast.While, state: State) -> State | None:
    cond = truth(walk, evaluate(walk, node.test, state), state, node.test)
    if known(cond, state.path) is False:
        return state
    ends: list[State] = []
    walk.frames[-1].loops.append(ends)
    after = _branch(walk, cond, node.test, state, node.body, [])
    walk.frames[-1].loops.pop()
    return _with_ends(node, after, ends, None)


def _with_ends(
    node: ast.stmt, current: State | None, ends: Iterable[State], under: State | None
) -> State | None:
    """Return where a pass of a loop meets those that were left early, under a state's conditions.

    Without such a state, the conditions of the pass itself stay.
    """
    for ended in ends:
        if current is None:
            current = ended
        else:
            guards = (under or current).guards
            current = join(atom(f"loop at {at(node)}"), current, ended, guards)
    return current


def _with(walk: Walk, node: ast.With | ast.AsyncWith, state: State) -> State | None:
    for item in node.items:
        value = evaluate(walk, item.context_expr, state)
        if isinstance(value, Inst) and method(walk.classes, value.name, "__enter__", value):
            enter = attribute(walk, value, "__enter__", state, node)
            value = call_value(walk, enter, [], {}, state, item.context_expr)
        name = name_of(value).lower()
        if isinstance(item.context_expr, ast.Call | ast.Attribute | ast.Name) and (
            "lock" in name and not name.startswith(("torch.", "nullcontext"))
        ):
            walk.event("block", name, item.context_expr, state.guards)
        if item.optional_vars is not None:
            assign(walk, item.optional_vars, value, state)
        if name.endswith("suppress()"):
            return _guarded(walk, node.body, [], state)
    return execute(walk, node.body, state)


def _try(walk: Walk, node: ast.Try, state: State) -> State | None:
    if node.handlers:
        after = _guarded(walk, node.body, node.handlers, state)
    else:
        after = execute(walk, node.body, state)
    if node.orelse:
        after = execute(walk, node.orelse, after)
    if node.finalbody:
        kept = execute(walk, node.finalbody, after or state.copy())
        after = kept if after is not None else None
    return after


def _guarded(
    walk: Walk, body: list[ast.stmt], handlers: list[ast.ExceptHandler], state: State
) -> State | None:
    """Follow statements up to the first that may fail on one rank alone, and on from there."""
    before = state.guards
    fails = next((number for number, one in enumerate(body) if _may_fail(walk, one)), None)
    labels = frozenset({"varies"}) if fails is not None else frozenset({"exception"})
    where = body[fails] if fails is not None else body[0]
    cond = atom(f"exception at {at(where)}", labels)
    text = f"line {where.lineno} raises"
    guard = Guard(cond, False, False, text, labels, where, walk.source)
    handled = state.copy()
    if fails is None:
        after = execute(walk, body, state)
    else:
        after = execute(walk, body[: fails + 1], state)
        if after is not None:
            after.guards = (*after.guards, guard)
            assume(cond, False, after.path)
            after = execute(walk, body[fails + 1 :], after)
    handled.guards = (*before, guard._replace(taken=True))
    rest, ended = _handle(walk, handlers, handled)
    if after is None:
        return rest
    if rest is None:
        if not ended or fails is None:
            after.guards = before
        return after
    return join(negate(cond), after, rest, before)


def _handle(
    walk: Walk, handlers: list[ast.ExceptHandler], state: State
) -> tuple[State | None, bool]:
    """Return the state after the first handler that is left by its end, and whether one is not."""
    rest: State | None = None
    ended = False
    for handler in handlers:
        if any(isinstance(one, ast.Raise) for one in handler.body[-1:]):
            continue
        inner = state.copy()
        if handler.name:
            inner.names[handler.name] = Sym(f"error {at(handler)}", "error")
        got = execute(walk, handler.body, inner)
        ended = ended or got is None
        rest = got if rest is None else rest
    return rest, ended


def _may_fail(walk: Walk, statement: ast.stmt) -> bool:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if words.io(_resolve(walk, name)) or words.io(name):
                return True
    return False


def _resolve(walk: Walk, name: str) -> str:
    head, _, tail = name.partition(".")
    value = walk.names_of(walk.source).get(head)
    return f"{value.name}.{tail}".rstrip(".") if isinstance(value, Ext) else name


def _match(walk: Walk, node: ast.Match, state: State) -> State | None:
    subject = evaluate(walk, node.subject, state)
    return _cases(walk, node, node.cases, subject, state)


def _cases(
    walk: Walk, node: ast.Match, cases: list[ast.match_case], subject: Value, state: State
) -> State | None:
    if not cases:
        return state
    case, rest = cases[0], cases[1:]
    pattern = case.pattern
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and case.guard is None:
        if pattern.name:
            state.names[pattern.name] = subject
        return execute(walk, case.body, state)
    patterns = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
    cond = either([_matches(walk, one, subject, state) for one in patterns])
    if case.guard is not None:
        asked = truth(walk, evaluate(walk, case.guard, state), state, case.guard)
        cond = both([cond, asked])
    orelse: list[ast.stmt] = []
    if rest:
        orelse = [ast.copy_location(ast.Match(subject=node.subject, cases=rest), node)]
    return _branch(walk, cond, case.guard or node.subject, state, case.body, orelse)


def _matches(walk: Walk, pattern: ast.pattern, subject: Value, state: State) -> Cond:
    """Return the condition that a pattern fits; a name in it is bound."""
    mode = walk.scenario.mode
    if isinstance(pattern, ast.MatchValue):
        return equal(subject, evaluate(walk, pattern.value, state), mode)
    if isinstance(pattern, ast.MatchSingleton):
        return equal(subject, Const(pattern.value), mode)
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
        if pattern.name:
            state.names[pattern.name] = subject
        return const(True)
    return atom(f"{text_of(subject)} matches {at(pattern)}", labels_of(subject))


STATEMENTS: Mapping[type[ast.AST], Execute] = {
    ast.AnnAssign: _ann_assign,
    ast.Assert: _assert,
    ast.Assign: _assign,
    ast.AsyncFor: _for,
    ast.AsyncFunctionDef: _function_def,
    ast.AsyncWith: _with,
    ast.AugAssign: _aug_assign,
    ast.Break: _leave_pass,
    ast.ClassDef: _class_def,
    ast.Continue: _leave_pass,
    ast.Expr: _expr,
    ast.For: _for,
    ast.FunctionDef: _function_def,
    ast.If: _if,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.Match: _match,
    ast.Raise: _raise,
    ast.Return: _return,
    ast.Try: _try,
    getattr(ast, "TryStar", ast.Try): _try,  # from Python 3.11 on
    ast.While: _while,
    ast.With: _with,
}
"""The other kinds change nothing that is followed."""
