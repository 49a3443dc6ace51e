"""What each kind of expression comes to."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hangdoctor.check.reading.following.assignment import assign
from hangdoctor.check.reading.following.attributes import attribute
from hangdoctor.check.reading.following.calls import evaluate_call
from hangdoctor.check.reading.following.growth import MOST_ITEMS
from hangdoctor.check.reading.following.nodes import at, item_name
from hangdoctor.check.reading.following.operators import calculate, compare
from hangdoctor.check.reading.following.walk import (
    evaluate,
    evaluate_again,
    look_up,
    options,
    truth,
)
from hangdoctor.check.reading.scenario import environment, rank_named
from hangdoctor.check.reading.values import (
    NO_LABELS,
    NONE,
    Alt,
    Cond,
    Const,
    Fn,
    Index,
    Inst,
    Labels,
    Seq,
    Sym,
    Truth,
    Value,
    alternative,
    assume,
    both,
    either,
    is_tensor,
    known,
    labels_of,
    name_of,
    negate,
    ranked,
    text_of,
    with_labels,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hangdoctor.check.reading.following.state import State
    from hangdoctor.check.reading.following.walk import Evaluate, Walk


def operate(
    walk: Walk, op: ast.operator, left: Value, right: Value, node: ast.AST, state: State
) -> Value:
    """Return the result of an operator between two values, and note a tensor with None."""
    if is_tensor(left) or is_tensor(right):
        for one in (left, right):
            for option, guards in options(walk, one, state):
                if option == NONE:
                    walk.event("none", "Tensor and None", node, guards)
    return calculate(op, left, right)


def items_of(iterable: Value, node: ast.expr) -> list[Value]:
    """Return what a loop over a value is followed with, at most MOST_ITEMS times."""
    if isinstance(iterable, Alt):
        iterable = iterable.yes
    if isinstance(iterable, Seq) and iterable.items is not None:
        return list(iterable.items[:MOST_ITEMS])
    name = item_name(node)
    if isinstance(iterable, Sym) and iterable.made in ("range", "enumerate"):
        passes: list[Value] = [Index("zero"), Index("hit"), Index("miss")]
        if iterable.made == "range":
            return passes
        item = Sym(f"item of {ast.unparse(node)}", name, tensor=False)
        return [Seq("tuple", 2, 2, (index, item)) for index in passes]
    item = Sym(f"item {at(node)}", name, labels_of(iterable), tensor=is_tensor(iterable))
    return [item, item]


def _constant(_walk: Walk, node: ast.Constant, _state: State) -> Value:
    return Const(node.value)


def _name(walk: Walk, node: ast.Name, state: State) -> Value:
    return look_up(walk, node.id, state)


def _attribute(walk: Walk, node: ast.Attribute, state: State) -> Value:
    return attribute(walk, evaluate(walk, node.value, state), node.attr, state, node)


def _subscript(walk: Walk, node: ast.Subscript, state: State) -> Value:
    owner = evaluate(walk, node.value, state)
    index = evaluate(walk, node.slice, state)
    name = name_of(owner)
    if name == "os.environ":
        return environment(walk.scenario, index, f"at {at(node)}")
    if isinstance(owner, Seq) and owner.items is not None and isinstance(index, Const):
        number = index.value
        if isinstance(number, int) and -len(owner.items) <= number < len(owner.items):
            return owner.items[number]
    # ranks["attn_tp_rank"]: a dict of ranks is named by its keys.
    if (
        isinstance(index, Const)
        and isinstance(index.value, str)
        and (rank := rank_named(walk.scenario, index.value)) is not None
    ):
        return rank
    labels = labels_of(owner) | labels_of(index)
    key = f"{text_of(owner)}[{text_of(index)}]"
    tensor = is_tensor(owner)
    if tensor and isinstance(index, Sym) and index.tensor and index.key.startswith("compare "):
        walk.event("sync", "picking by a mask", node, state.guards)
    return Sym(key, f"{name}[]" if name else "", labels, tensor=tensor)


def _bool_op(walk: Walk, node: ast.BoolOp, state: State) -> Value:
    is_and = isinstance(node.op, ast.And)
    conds: list[Cond] = []
    value: Value = NONE
    inner = state
    before = state.guards
    for number, part in enumerate(node.values):
        value = evaluate(walk, part, inner)
        cond = truth(walk, value, inner, part)
        conds.append(cond)
        if number == len(node.values) - 1:
            break
        holds = known(cond, inner.path)
        if holds is not None and holds != is_and:
            # Decided, and nothing after it is asked.
            break
        guard = walk.guard(cond, part, taken=is_and, decided=holds is not None)
        if holds is None:
            inner = inner.copy()
            assume(cond, is_and, inner.path)
        if guard.labels or not guard.decided:
            inner.guards = (*inner.guards, guard)
    state.guards = before
    joined = both(conds) if is_and else either(conds)
    holds = known(joined, state.path)
    if not is_and and holds is not False and not isinstance(value, Const | Truth):
        # `a or b` as a default.
        if conds[0].op == "const":
            return value
        return Alt(conds[0], evaluate_again(walk, node.values[0], state), value)
    if is_and and holds is True:
        return value if isinstance(value, Sym | Seq | Alt | Inst) else Truth(joined)
    return Truth(joined)


def _unary_op(walk: Walk, node: ast.UnaryOp, state: State) -> Value:
    value = evaluate(walk, node.operand, state)
    if isinstance(node.op, ast.Not):
        return Truth(negate(truth(walk, value, state, node.operand)))
    if (
        isinstance(node.op, ast.USub)
        and isinstance(value, Const)
        and isinstance(value.value, int | float)
    ):
        return Const(-value.value, value.labels)
    return Sym(f"-{text_of(value)}", "", labels_of(value), tensor=is_tensor(value))


def _bin_op(walk: Walk, node: ast.BinOp, state: State) -> Value:
    left, right = evaluate(walk, node.left, state), evaluate(walk, node.right, state)
    return operate(walk, node.op, left, right, node, state)


def _compare(walk: Walk, node: ast.Compare, state: State) -> Value:
    left = evaluate(walk, node.left, state)
    conds: list[Cond] = []
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        right = evaluate(walk, right_node, state)
        of_items = not isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn)
        if of_items and (is_tensor(left) or is_tensor(right)):
            labels = labels_of(left) | labels_of(right)
            return Sym(f"compare {at(node)}", "", labels, tensor=True)
        conds.append(compare(op, left, right, walk.scenario.mode))
        left = right
    return Truth(both(conds))


def _if_exp(walk: Walk, node: ast.IfExp, state: State) -> Value:
    cond = truth(walk, evaluate(walk, node.test, state), state, node.test)
    holds = known(cond, state.path)
    if holds is not None:
        before = state.guards
        guard = walk.guard(cond, node.test, taken=holds, decided=True)
        if guard.labels:
            state.guards = (*before, guard)
        value = evaluate(walk, node.body if holds else node.orelse, state)
        state.guards = before
        return with_labels(value, ranked(guard.labels)) if isinstance(value, Const) else value
    yes = state.copy()
    no = walk.part(cond, node.test, yes)
    return alternative(cond, evaluate(walk, node.body, yes), evaluate(walk, node.orelse, no))


def _named_expr(walk: Walk, node: ast.NamedExpr, state: State) -> Value:
    value = evaluate(walk, node.value, state)
    assign(walk, node.target, value, state)
    return value


def _lambda(walk: Walk, node: ast.Lambda, state: State) -> Value:
    return Fn(node, walk.source, None, state.names)


def _inner(walk: Walk, node: ast.Starred | ast.Await, state: State) -> Value:
    return evaluate(walk, node.value, state)


def _yield(walk: Walk, node: ast.Yield, state: State) -> Value:
    walk.frames[-1].yields.append(evaluate(walk, node.value, state))
    return NONE


def _sequence(walk: Walk, node: ast.Tuple | ast.List | ast.Set, state: State) -> Value:
    items = tuple(evaluate(walk, one, state) for one in node.elts)
    kind = type(node).__name__.lower()
    if any(isinstance(one, ast.Starred) for one in node.elts):
        return Seq(kind, 1, None)  # type: ignore[arg-type]
    return Seq(kind, len(items), len(items), items)  # type: ignore[arg-type]


def _dict(walk: Walk, node: ast.Dict, state: State) -> Value:
    for key, value in zip(node.keys, node.values, strict=True):
        if key is not None:
            evaluate(walk, key, state)
        evaluate(walk, value, state)
    return Seq("dict", len(node.keys), len(node.keys) or 0)


def _comprehension(walk: Walk, node: ast.expr, state: State) -> Value:
    inner = state.copy()
    labels: Labels = NO_LABELS
    low = 1
    for generator in node.generators:  # type: ignore[attr-defined]
        iterable = evaluate(walk, generator.iter, inner)
        labels |= labels_of(iterable)
        if isinstance(iterable, Seq):
            low = min(low, iterable.low)
            if iterable.high == 0:
                return Seq("list", 0, 0, ())
        items = items_of(iterable, generator.iter)
        for item in items[1:2] or items[:1]:
            assign(walk, generator.target, item, inner)
        for test in generator.ifs:
            cond = truth(walk, evaluate(walk, test, inner), inner, test)
            labels |= cond.labels
            low = 0
            decided = known(cond, inner.path) is not None
            inner.guards = (*inner.guards, walk.guard(cond, test, taken=True, decided=decided))
            if known(cond, inner.path) is False:
                return Seq("list", 0, 0, ())
    for part in ("key", "value", "elt"):
        if (element := getattr(node, part, None)) is not None:
            labels |= labels_of(evaluate(walk, element, inner))
    return Seq("list", low, None, None, labels - {"tensor"})


def _joined_str(walk: Walk, node: ast.JoinedStr, state: State) -> Value:
    labels: Labels = NO_LABELS
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            value = evaluate(walk, part.value, state)
            labels |= labels_of(value)
            if is_tensor(value):
                walk.event("sync", "formatting a tensor", part, state.guards)
    return Sym(f"text {at(node)}", "", labels, present=True)


EXPRESSIONS: Mapping[type[ast.AST], Evaluate] = {
    ast.Attribute: _attribute,
    ast.Await: _inner,
    ast.BinOp: _bin_op,
    ast.BoolOp: _bool_op,
    ast.Call: evaluate_call,
    ast.Compare: _compare,
    ast.Constant: _constant,
    ast.Dict: _dict,
    ast.DictComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.IfExp: _if_exp,
    ast.JoinedStr: _joined_str,
    ast.Lambda: _lambda,
    ast.List: _sequence,
    ast.ListComp: _comprehension,
    ast.Name: _name,
    ast.NamedExpr: _named_expr,
    ast.Set: _sequence,
    ast.SetComp: _comprehension,
    ast.Starred: _inner,
    ast.Subscript: _subscript,
    ast.Tuple: _sequence,
    ast.UnaryOp: _unary_op,
    ast.Yield: _yield,
}
"""Of the other kinds only what stands inside is followed."""
