"""What assignments leave: in names, attributes, items and what is unpacked."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hangdoctor.check.reading import vocabulary as words
from hangdoctor.check.reading.following.classes import method
from hangdoctor.check.reading.following.walk import evaluate, options
from hangdoctor.check.reading.values import (
    NONE,
    Alt,
    Cls,
    Const,
    Ext,
    Inst,
    Seq,
    Sym,
    Value,
    holder_of,
    is_tensor,
    known,
    labels_of,
    name_of,
    ranked,
    text_of,
    with_labels,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hangdoctor.check.reading.following.state import State
    from hangdoctor.check.reading.following.walk import Walk


def assign(
    walk: Walk, target: ast.expr, value: Value, state: State, *, quiet: bool = False
) -> None:
    """Give a target a value; `quiet` where no attribute is written by it, only what it holds."""
    labels = ranked(frozenset().union(*(guard.labels for guard in state.guards if guard.decided)))
    if labels and isinstance(value, Const):
        value = with_labels(value, labels)
    if isinstance(target, ast.Name):
        if target.id in words.TENSORS and isinstance(value, Sym) and not value.made:
            value = Sym(value.key, value.name, value.labels, True, "", value.present)
        state.names[target.id] = value
    elif isinstance(target, ast.Tuple | ast.List):
        _unpack(walk, target, value, state)
    elif isinstance(target, ast.Attribute):
        owner = evaluate(walk, target.value, state)
        write(walk, owner, target.attr, value, target, state, quiet=quiet)
    elif isinstance(target, ast.Subscript):
        _assign_item(walk, target, value, state)
    elif isinstance(target, ast.Starred):
        assign(walk, target.value, Seq("list", 0, None), state)


def write(
    walk: Walk,
    owner: Value,
    attribute: str,
    value: Value,
    node: ast.AST,
    state: State,
    *,
    quiet: bool = False,
) -> None:
    """Set an attribute of an object; of code outside, or in place of a method, that replaces it."""
    holder = holder_of(owner)
    state.heap[(holder, attribute)] = value
    if quiet:
        return
    described = holder if isinstance(owner, Inst) else (name_of(owner) or holder)
    name = f"{described}.{attribute}"
    walk.event("write", name, node, state.guards, value=value)
    if (isinstance(owner, Ext) and "." in owner.name) or (
        isinstance(owner, Inst | Cls) and method(walk.classes, holder, attribute, owner)
    ):
        walk.event("replace", name, node, state.guards, value=value)


def _assign_item(walk: Walk, target: ast.Subscript, value: Value, state: State) -> None:
    base = evaluate(walk, target.value, state)
    evaluate(walk, target.slice, state)
    if isinstance(base, Seq):
        assign(walk, target.value, Seq(base.kind, max(base.low, 1), None), state)
    elif is_tensor(base):
        walk.event("inplace", ast.unparse(target.value), target, state.guards, value=base)
    if (
        isinstance(target.value, ast.Attribute)
        and target.value.attr == "__dict__"
        and isinstance(target.slice, ast.Constant)
    ):
        owner = evaluate(walk, target.value.value, state)
        write(walk, owner, str(target.slice.value), value, target, state)


def _unpack(walk: Walk, target: ast.Tuple | ast.List, value: Value, state: State) -> None:
    count = len(target.elts)
    starred = any(isinstance(one, ast.Starred) for one in target.elts)
    for option, guards in options(walk, value, state):
        if wrong := _no_fit(option, count, starred=starred):
            walk.event("unpack", f"{wrong} into {count}", target, guards, value=option)
    chosen = _first_sequence(value, state.path)
    if isinstance(chosen, Seq) and chosen.items is not None and len(chosen.items) == count:
        items = list(chosen.items)
    else:
        base = text_of(value)
        items = [Sym(f"{base}[{at}]", "", labels_of(value) - {"tensor"}) for at in range(count)]
    for one, item in zip(target.elts, items, strict=True):
        assign(walk, one, item, state)


def _no_fit(value: Value, count: int, *, starred: bool) -> str:
    """Say what a value is that cannot be unpacked into so many; empty where it may be."""
    if isinstance(value, Seq) and value.items is not None and not starred:
        return "" if len(value.items) == count else f"a tuple of {len(value.items)}"
    if isinstance(value, Sym) and value.made.startswith("object:"):
        return f"a {value.made.removeprefix('object:')}"
    if isinstance(value, Sym) and value.made == "returned" and not starred:
        return "one tensor"
    return "None" if value == NONE else ""


def _first_sequence(value: Value, path: Mapping[str, bool]) -> Value:
    while isinstance(value, Alt):
        holds = known(value.cond, path)
        if holds is not None:
            value = value.yes if holds else value.no
        else:
            value = value.yes if isinstance(value.yes, Seq) else value.no
    return value
