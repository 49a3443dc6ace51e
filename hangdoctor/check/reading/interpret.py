"""Follows source without running it: which calls are reached on which rank, in which mode.

A scenario fixes the rank and the forward mode; all else that is not written in the source stays
unknown, and both ways are followed. What was reached becomes events, in order, each with the
conditions above it. Ranks whose events differ do not meet in their collectives.
"""

from __future__ import annotations

import ast
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from hangdoctor.check.reading import vocabulary as words
from hangdoctor.check.reading.values import (
    NO_LABELS,
    NONE,
    Alt,
    Cls,
    Cond,
    Const,
    Ext,
    Fn,
    Index,
    Inst,
    Labels,
    Mode,
    Seq,
    Sym,
    Truth,
    Value,
    assume,
    atom,
    both,
    const,
    either,
    is_tensor,
    key_of,
    known,
    labels_of,
    name_of,
    negate,
    text_of,
    with_labels,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hangdoctor.check.reading.source import Source

RANKS = 8
"""So many ranks are told apart: a condition may name any of them."""

MOST_STEPS = 400_000
"""Statements and calls followed in one scenario; a model file of SGLang takes some thousands."""

_MOST_CALLS = 12
_MOST_ITEMS = 16

EventKind = Literal[
    "collective", "p2p", "module", "sync", "io", "block", "write", "unpack", "tuple", "none",
    "raise", "inplace", "replace", "layers",
]  # fmt: skip
_Key = TypeVar("_Key")
Root = Literal["init", "forward", "load", "other"]


class TooLargeError(Exception):
    """There is more to follow than the limit allows."""


class Scenario(NamedTuple):
    """What is fixed: the rank within TP, the mode, whether a graph is captured; None is open."""

    rank: int | None = None
    mode: str | None = None
    capturing: bool | None = None


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


class _State:
    def __init__(self) -> None:
        self.names: dict[str, Value] = {}
        self.heap: dict[tuple[str, str], Value] = {}
        self.path: dict[str, bool] = {}
        self.guards: tuple[Guard, ...] = ()

    def copy(self) -> _State:
        other = _State()
        other.names, other.heap = dict(self.names), dict(self.heap)
        other.path, other.guards = dict(self.path), self.guards
        return other


class _Frame(NamedTuple):
    source: Source
    closure: dict[str, Value]
    returns: list[tuple[Value, _State]]
    yields: list[Value]
    depth_of_guards: int
    loops: list[list[_State]]
    class_name: str
    bases: tuple[ast.expr, ...]


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
    return _Interpreter(sources, scenario, only).run()


class _Interpreter:
    def __init__(
        self, sources: tuple[Source, ...], scenario: Scenario, only: frozenset[str] | None
    ) -> None:
        self.only = only
        self.touched: set[str] = set()
        self.passing_on: set[int] = set()
        self.sources = sources
        self.scenario = scenario
        self.events: list[Event] = []
        self.in_forward: dict[int, tuple[ast.stmt, Source]] = {}
        self.in_loop: dict[int, tuple[ast.stmt, Source]] = {}
        self.modules: dict[str, dict[str, Value]] = {}
        self.classes: dict[str, Cls] = {}
        self.called: set[int] = set()
        self.hooks: list[tuple[Fn, ast.AST | None]] = []
        self.frames: list[_Frame] = []
        self.via: tuple[tuple[ast.AST, Source], ...] = ()
        self.root = ""
        self.root_kind: Root = "other"
        self.statement: ast.AST | None = None
        self.layers_depth = 0
        self.steps = 0
        self.texts: dict[int, str] = {}

    # ---- the whole

    def run(self) -> Reached:
        base = _State()
        for source in reversed(self.sources):
            self._module(source, base)
        made = frozenset().union(*(source.called for source in self.sources))
        for name, cls in self.classes.items():
            if name not in made and self._own(cls, "__init__"):
                self._root(Fn(self._own(cls, "__init__"), cls.source, Inst(name)), "init", base)  # type: ignore[arg-type]
        forwards: list[Fn] = []
        others: list[Fn] = []
        for name, cls in self.classes.items():
            for node in cls.node.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    if node.name == "__init__":
                        continue
                    fn = Fn(node, cls.source, Inst(name))
                    forward = node.name.startswith(("forward", "op_", "__call__"))
                    (forwards if forward and cls.source is self.sources[0] else others).append(fn)
        for source in self.sources:
            others += [
                value
                for value in self.modules[id_of(source)].values()
                if isinstance(value, Fn) and value.source is source
            ]
        # What setters set may be set when a forward comes.
        for fn in others:
            if fn.owner is not None and id(fn.node) in fn.source.new:
                self._root(fn, "other", base, keep=True)
        for _ in range(2):  # what a forward leaves on its object, the next one finds
            before = dict(base.heap)
            for fn in forwards:
                if id(fn.node) in self.called and id(fn.node) in fn.source.new:
                    continue
                self._root(fn, "forward", base, keep=True)
            if before == base.heap:
                break
        for hook, registered_by in self.hooks:
            self.statement = registered_by
            self._root(hook, "forward", base)
        self.statement = None
        for fn in others:
            if id(fn.node) not in self.called:
                kind: Root = "load" if "load" in getattr(fn.node, "name", "") else "other"
                self._root(fn, kind, base)
        return Reached(
            tuple(self.events),
            self.in_forward,
            self.in_loop,
            frozenset(self.touched),
            frozenset(self.passing_on),
        )

    def _module(self, source: Source, state: _State) -> None:
        names: dict[str, Value] = {}
        self.modules[id_of(source)] = names
        frame = _Frame(source, {}, [], [], 0, [], "", ())
        inner = state.copy()
        inner.names = names
        self.frames.append(frame)
        self.root, self.root_kind = "", "init"
        after = self._block(source.tree.body, inner) or inner
        names.update(after.names)
        state.heap.update(after.heap)
        self.frames.pop()

    def _root(self, fn: Fn, kind: Root, base: _State, *, keep: bool = False) -> None:
        node = fn.node
        owner = fn.owner.name if isinstance(fn.owner, Inst) else ""
        self.root = f"{owner}.{getattr(node, 'name', 'lambda')}".lstrip(".")
        self.root_kind = kind
        if self.only is not None and kind != "init" and self.root not in self.only:
            return
        state = base.copy()
        state.path, state.guards, state.names = {}, (), {}
        before = len(self.frames)
        after = self._call_function(fn, [], {}, state, node, root=True)
        del self.frames[before:]
        self.via, self.layers_depth = (), 0
        if kind == "init":
            base.heap.update(after.heap)
        elif keep:
            for key, value in after.heap.items():
                old = base.heap.get(key)
                if old is None:
                    base.heap[key] = value
                elif old != value and _is_new_value(value, old):
                    base.heap[key] = Alt(atom(f"after {self.root}: {key}"), value, old)

    # ---- statements

    def _block(self, body: list[ast.stmt], state: _State | None) -> _State | None:
        for node in body:
            if state is None:
                return None
            self._step()
            if id(node) in self.frames[-1].source.new:
                self.touched.add(self.root)
            # What only an exception brings is no work of the mode.
            handles = any(one.taken and one.text.endswith(" raises") for one in state.guards)
            if self.root_kind == "forward" and not handles:
                place = (node, self.frames[-1].source)
                self.in_forward[id(node)] = place
                if self.layers_depth:
                    self.in_loop[id(node)] = place
            outer, self.statement = self.statement, node
            state = self._execute(node, state)
            self.statement = outer
        return state

    def _execute(self, node: ast.stmt, state: _State) -> _State | None:
        if isinstance(node, ast.Expr):
            self._ev(node.value, state)
        elif isinstance(node, ast.Assign):
            value = self._ev(node.value, state)
            for target in node.targets:
                self._assign(target, value, state)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, self._ev(node.value, state), state)
        elif isinstance(node, ast.AugAssign):
            self._augment(node, state)
        elif isinstance(node, ast.Return):
            value = self._ev(node.value, state) if node.value else NONE
            self.frames[-1].returns.append((value, state))
            return None
        elif isinstance(node, ast.If):
            return self._if(node.test, state, node.body, node.orelse)
        elif isinstance(node, ast.For | ast.AsyncFor):
            return self._for(node, state)
        elif isinstance(node, ast.While):
            return self._while(node, state)
        elif isinstance(node, ast.With | ast.AsyncWith):
            return self._with(node, state)
        elif isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            return self._try(node, state)
        elif isinstance(node, ast.Match):
            return self._match(node, state)
        elif isinstance(node, ast.Assert):
            cond = self._truth(self._ev(node.test, state), state, node.test)
            holds = known(cond, state.path)
            if holds is False and cond.labels & _RANKED(cond.labels):
                guards = (*state.guards, self._guard(cond, False, True, node.test))
                self._event("raise", "assert", node, guards=guards)
                return None
            assume(cond, True, state.path)
        elif isinstance(node, ast.Raise):
            if node.exc:
                self._ev(node.exc, state)
            self._event("raise", "raise", node, state)
            return None
        elif isinstance(node, ast.Continue | ast.Break):
            if self.frames[-1].loops:
                self.frames[-1].loops[-1].append(state)
            return None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            fn = Fn(node, self.frames[-1].source, None, state.names)
            state.names[node.name] = self._decorated(fn, state)
        elif isinstance(node, ast.ClassDef):
            cls = Cls(node, self.frames[-1].source)
            self.classes[node.name] = cls
            state.names[node.name] = cls
            for inner in node.body:
                if isinstance(inner, ast.Assign) and len(inner.targets) == 1:
                    target = inner.targets[0]
                    if isinstance(target, ast.Name):
                        state.heap[(node.name, target.id)] = self._ev(inner.value, state)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                state.names[alias.asname or name] = Ext(_canonical(name))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                state.names[alias.asname or alias.name] = self._imported(node, alias.name)
        return state

    def _imported(self, node: ast.ImportFrom, name: str) -> Value:
        module = node.module or ""
        for source in self.sources:
            tail = source.module.rsplit(".", 1)[-1]
            if (module and words.last(module) == tail) or (not module and name == tail):
                names = self.modules.get(id_of(source), {})
                if name in names:
                    return names[name]
                return Ext(source.module)
        return Ext(_canonical(f"{module}.{name}".lstrip(".")))

    def _if(
        self,
        test: ast.expr,
        state: _State,
        body: list[ast.stmt],
        orelse: list[ast.stmt],
    ) -> _State | None:
        cond = self._truth(self._ev(test, state), state, test)
        return self._branch(cond, test, state, body, orelse)

    def _branch(
        self,
        cond: Cond,
        test: ast.expr,
        state: _State,
        body: list[ast.stmt],
        orelse: list[ast.stmt],
    ) -> _State | None:
        holds = known(cond, state.path)
        before = state.guards
        if holds is not None:
            guard = self._guard(cond, holds, True, test)
            if not guard.labels:
                return self._block(body if holds else orelse, state)
            state.guards = (*before, guard)
            after = self._block(body if holds else orelse, state)
            if after is not None and not (_may_end(body) or _may_end(orelse)):
                after.guards = before
            return after
        other = state.copy()
        state.guards = (*before, self._guard(cond, True, False, test))
        other.guards = (*before, self._guard(cond, False, False, test))
        assume(cond, True, state.path)
        assume(cond, False, other.path)
        yes = self._block(body, state)
        no = self._block(orelse, other)
        if yes is None or no is None:
            return yes or no
        return self._join(cond, yes, no, before)

    def _join(self, cond: Cond, yes: _State, no: _State, guards: tuple[Guard, ...]) -> _State:
        joined = _State()
        joined.guards = guards
        joined.path = {key: held for key, held in yes.path.items() if no.path.get(key) == held}
        _merge(cond, joined.names, yes.names, no.names)
        _merge(cond, joined.heap, yes.heap, no.heap)
        return joined

    def _for(self, node: ast.For | ast.AsyncFor, state: _State) -> _State | None:
        iterable = self._ev(node.iter, state)
        layers = _is_over_layers(node)
        self.layers_depth += layers
        ends: list[_State] = []
        self.frames[-1].loops.append(ends)
        current: _State | None = state
        for item in self._items(iterable, node.iter):
            if current is None:
                break
            self._assign(node.target, item, current)
            count = len(ends)
            current = self._block(node.body, current)
            for ended in ends[count:]:
                current = (
                    ended
                    if current is None
                    else self._join(atom(f"loop at {_at(node)}"), current, ended, state.guards)
                )
        self.frames[-1].loops.pop()
        self.layers_depth -= layers
        return self._block(node.orelse, current) if node.orelse else current

    def _items(self, iterable: Value, node: ast.expr) -> list[Value]:
        if isinstance(iterable, Alt):
            iterable = iterable.yes
        if isinstance(iterable, Seq) and iterable.items is not None:
            if len(iterable.items) <= _MOST_ITEMS:
                return list(iterable.items)
            return list(iterable.items[:_MOST_ITEMS])
        if isinstance(iterable, Sym) and iterable.made in ("range", "enumerate"):
            passes: list[Value] = [Index("zero"), Index("hit"), Index("miss")]
            if iterable.made == "range":
                return passes
            item = Sym(f"item of {ast.unparse(node)}", _item_name(node), tensor=False)
            return [Seq("tuple", 2, 2, (index, item)) for index in passes]
        labels = labels_of(iterable)
        name = _item_name(node)
        item = Sym(f"item {_at(node)}", name, labels, tensor=is_tensor(iterable))
        return [item, item]

    def _while(self, node: ast.While, state: _State) -> _State | None:
        cond = self._truth(self._ev(node.test, state), state, node.test)
        if known(cond, state.path) is False:
            return state
        ends: list[_State] = []
        self.frames[-1].loops.append(ends)
        after = self._branch(cond, node.test, state, node.body, [])
        self.frames[-1].loops.pop()
        for ended in ends:
            after = (
                ended
                if after is None
                else self._join(atom(f"loop at {_at(node)}"), after, ended, after.guards)
            )
        return after

    def _with(self, node: ast.With | ast.AsyncWith, state: _State) -> _State | None:
        for item in node.items:
            value = self._ev(item.context_expr, state)
            if isinstance(value, Inst) and self._method(value.name, "__enter__"):
                enter = self._attribute(value, "__enter__", state, node)
                value = self._call_value(enter, [], {}, state, item.context_expr)
            name = name_of(value).lower()
            if isinstance(item.context_expr, ast.Call | ast.Attribute | ast.Name) and (
                "lock" in name and not name.startswith(("torch.", "nullcontext"))
            ):
                self._event("block", name, item.context_expr, state)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, value, state)
            if name.endswith("suppress()"):
                return self._guarded_try(node.body, [], node, state)
        return self._block(node.body, state)

    def _try(self, node: ast.stmt, state: _State) -> _State | None:
        handlers: list[ast.ExceptHandler] = node.handlers  # type: ignore[attr-defined]
        body: list[ast.stmt] = node.body  # type: ignore[attr-defined]
        if not handlers:
            after = self._block(body, state)
        else:
            after = self._guarded_try(body, handlers, node, state)
        if node.orelse:  # type: ignore[attr-defined]
            after = self._block(node.orelse, after)  # type: ignore[attr-defined]
        if node.finalbody:  # type: ignore[attr-defined]
            kept = self._block(node.finalbody, after or state.copy())  # type: ignore[attr-defined]
            after = kept if after is not None else None
        return after

    def _guarded_try(
        self,
        body: list[ast.stmt],
        handlers: list[ast.ExceptHandler],
        node: ast.stmt,
        state: _State,
    ) -> _State | None:
        before = state.guards
        fails = next((at for at, one in enumerate(body) if self._may_fail(one)), None)
        labels = frozenset({"varies"}) if fails is not None else frozenset({"exception"})
        where = body[fails] if fails is not None else body[0]
        cond = atom(f"exception at {_at(where)}", labels)
        text = f"line {where.lineno} raises"
        guard = Guard(cond, False, False, text, labels, where, self.frames[-1].source)
        handled = state.copy()
        if fails is None:
            after = self._block(body, state)
        else:
            after = self._block(body[: fails + 1], state)
            if after is not None:
                after.guards = (*after.guards, guard)
                assume(cond, False, after.path)
                after = self._block(body[fails + 1 :], after)
        rest: _State | None = None
        ended = False
        for handler in handlers:
            if any(isinstance(one, ast.Raise) for one in handler.body[-1:]):
                continue
            inner = handled.copy()
            inner.guards = (*before, guard._replace(taken=True))
            if handler.name:
                inner.names[handler.name] = Sym(f"error {_at(handler)}", "error")
            got = self._block(handler.body, inner)
            ended = ended or got is None
            rest = got if rest is None else rest
        if after is None:
            return rest
        if rest is None:
            if not ended or fails is None:
                after.guards = before
            return after
        return self._join(negate(cond), after, rest, before)

    def _may_fail(self, statement: ast.stmt) -> bool:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                name = _dotted(node.func)
                resolved = self._resolve(name)
                if words.io(resolved) or words.io(name):
                    return True
        return False

    def _resolve(self, dotted: str) -> str:
        head, _, tail = dotted.partition(".")
        value = self.modules.get(id_of(self.frames[-1].source), {}).get(head)
        return f"{value.name}.{tail}".rstrip(".") if isinstance(value, Ext) else dotted

    def _match(self, node: ast.Match, state: _State) -> _State | None:
        subject = self._ev(node.subject, state)
        return self._cases(node, node.cases, subject, state)

    def _cases(
        self, node: ast.Match, cases: list[ast.match_case], subject: Value, state: _State
    ) -> _State | None:
        if not cases:
            return state
        case, rest = cases[0], cases[1:]
        pattern = case.pattern
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and case.guard is None:
            if pattern.name:
                state.names[pattern.name] = subject
            return self._block(case.body, state)
        options = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
        conds = []
        for option in options:
            if isinstance(option, ast.MatchValue):
                conds.append(self._equal(subject, self._ev(option.value, state)))
            elif isinstance(option, ast.MatchSingleton):
                conds.append(self._equal(subject, Const(option.value)))
            elif isinstance(option, ast.MatchAs) and option.pattern is None:
                if option.name:
                    state.names[option.name] = subject
                conds.append(const(True))
            else:
                conds.append(atom(f"{text_of(subject)} matches {_at(option)}", labels_of(subject)))
        cond = either(conds)
        if case.guard is not None:
            cond = both([cond, self._truth(self._ev(case.guard, state), state, case.guard)])
        following = ast.Match(subject=node.subject, cases=rest) if rest else None
        orelse: list[ast.stmt] = []
        if following is not None:
            ast.copy_location(following, node)
            orelse = [following]
        return self._branch(cond, case.guard or node.subject, state, case.body, orelse)

    def _augment(self, node: ast.AugAssign, state: _State) -> None:
        target = node.target
        old = self._ev(target, state)
        value = self._ev(node.value, state)
        if is_tensor(old) and isinstance(target, ast.Name):
            self._event("inplace", target.id, node, state, value=old)
        if isinstance(old, Seq):
            new: Value = Seq(old.kind, old.low + (value.low if isinstance(value, Seq) else 0), None)
        elif isinstance(old, Alt):
            new = old
        else:
            new = self._binary(node.op, old, value, node, state)
        listed = isinstance(old, Seq) and isinstance(target, ast.Name)
        self._assign(target, new, state, quiet=is_tensor(old) or listed)

    def _assign(
        self, target: ast.expr, value: Value, state: _State, *, quiet: bool = False
    ) -> None:
        ranked = frozenset(
            label
            for guard in state.guards
            if guard.decided
            for label in guard.labels
            if label.startswith("rank:")
        )
        if ranked and isinstance(value, Const):
            value = with_labels(value, ranked)
        if isinstance(target, ast.Name):
            if target.id in words.TENSORS and isinstance(value, Sym) and not value.made:
                value = Sym(value.key, value.name, value.labels, True, "", value.present)
            state.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target, value, state)
        elif isinstance(target, ast.Attribute):
            owner = self._ev(target.value, state)
            self._write(owner, target.attr, value, target, state, quiet=quiet)
        elif isinstance(target, ast.Subscript):
            base = self._ev(target.value, state)
            self._ev(target.slice, state)
            if isinstance(base, Seq):
                self._assign(target.value, Seq(base.kind, max(base.low, 1), None), state)
            elif is_tensor(base):
                self._event("inplace", ast.unparse(target.value), target, state, value=base)
            if (
                isinstance(target.value, ast.Attribute)
                and target.value.attr == "__dict__"
                and isinstance(target.slice, ast.Constant)
            ):
                owner = self._ev(target.value.value, state)
                self._write(owner, str(target.slice.value), value, target, state)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, Seq("list", 0, None), state)

    def _write(
        self,
        owner: Value,
        attribute: str,
        value: Value,
        node: ast.AST,
        state: _State,
        *,
        quiet: bool = False,
    ) -> None:
        holder = _holder(owner)
        state.heap[(holder, attribute)] = value
        described = holder if isinstance(owner, Inst) else (name_of(owner) or holder)
        if quiet:
            return
        self._event("write", f"{described}.{attribute}", node, state, value=value)
        if (isinstance(owner, Ext) and "." in owner.name) or (
            isinstance(owner, Inst | Cls) and self._method(holder, attribute)
        ):
            self._event("replace", f"{described}.{attribute}", node, state, value=value)

    def _unpack(self, target: ast.Tuple | ast.List, value: Value, state: _State) -> None:
        count = len(target.elts)
        starred = any(isinstance(one, ast.Starred) for one in target.elts)
        for option, guards, path in self._options(value, state):
            wrong = ""
            if isinstance(option, Seq) and option.items is not None and not starred:
                wrong = "" if len(option.items) == count else f"a tuple of {len(option.items)}"
            elif isinstance(option, Sym) and option.made and option.made.startswith("object:"):
                wrong = f"a {option.made.removeprefix('object:')}"
            elif isinstance(option, Sym) and option.made == "returned" and not starred:
                wrong = "one tensor"
            elif option == NONE:
                wrong = "None"
            if wrong:
                del path
                self._event("unpack", f"{wrong} into {count}", target, guards=guards, value=option)
        chosen = _first_sequence(value, state.path)
        items: list[Value]
        if isinstance(chosen, Seq) and chosen.items is not None and len(chosen.items) == count:
            items = list(chosen.items)
        else:
            base = text_of(value)
            items = [Sym(f"{base}[{at}]", "", labels_of(value) - {"tensor"}) for at in range(count)]
        for one, item in zip(target.elts, items, strict=True):
            self._assign(one, item, state)

    def _options(
        self, value: Value, state: _State
    ) -> list[tuple[Value, tuple[Guard, ...], dict[str, bool]]]:
        """Return what a value may be, each with the conditions under which it is."""
        if not isinstance(value, Alt):
            return [(value, state.guards, state.path)]
        found = []
        node = self.statement or ast.Pass()
        for taken, option in ((True, value.yes), (False, value.no)):
            if known(value.cond, state.path) in (None, taken):
                inner = state.copy()
                assume(value.cond, taken, inner.path)
                inner.guards = (
                    *state.guards,
                    Guard(
                        value.cond,
                        taken,
                        False,
                        key_of(value.cond),
                        value.cond.labels,
                        node,
                        self.frames[-1].source,
                    ),
                )
                found += self._options(option, inner)
        return found

    # ---- expressions

    def _ev(self, node: ast.expr | None, state: _State) -> Value:
        if node is None:
            return NONE
        method = getattr(self, f"_ev_{type(node).__name__}", None)
        if method is not None:
            return method(node, state)  # type: ignore[no-any-return]
        labels: Labels = NO_LABELS
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                labels |= labels_of(self._ev(child, state))
        return Sym(f"{type(node).__name__} {_at(node)}", "", labels)

    def _ev_Constant(self, node: ast.Constant, _state: _State) -> Value:
        return Const(node.value)

    def _ev_Name(self, node: ast.Name, state: _State) -> Value:
        if node.id in state.names:
            return state.names[node.id]
        frame = self.frames[-1]
        for names in (frame.closure, self.modules.get(id_of(frame.source), {})):
            if node.id in names:
                return names[node.id]
        if node.id in self.classes:
            return self.classes[node.id]
        return Ext(node.id)

    def _ev_Attribute(self, node: ast.Attribute, state: _State) -> Value:
        return self._attribute(self._ev(node.value, state), node.attr, state, node)

    def _attribute(self, owner: Value, attr: str, state: _State, node: ast.AST) -> Value:
        if attr == "forward_mode":
            return Mode()
        if isinstance(owner, Alt):
            options = self._options(owner, state)
            made = [one for one, _, _ in options if one != NONE] or [NONE]
            if len(options) == 1 or len(made) == 1:
                return self._attribute(made[0], attr, state, node)
            return _alternative(
                owner.cond,
                self._attribute(owner.yes, attr, state, node),
                self._attribute(owner.no, attr, state, node),
            )
        if isinstance(owner, Mode):
            if attr == "name" and self.scenario.mode:
                return Const(self.scenario.mode, frozenset({"mode"}))
            return Sym(f"mode.{attr}", f"forward_mode.{attr}", frozenset({"mode"}))
        if isinstance(owner, Ext):
            for source in self.sources:
                if source.module == owner.name and attr in self.modules.get(id_of(source), {}):
                    return self.modules[id_of(source)][attr]
            return Ext(f"{owner.name}.{attr}")
        holder = _holder(owner)
        if (holder, attr) in state.heap:
            value = state.heap[(holder, attr)]
            if isinstance(value, Sym) and not value.name:
                # What it came from has no name, so the attribute's tells what it is.
                return replace(value, name=f"{holder}.{attr}")
            return value
        if isinstance(owner, Inst | Cls):
            name = owner.name if isinstance(owner, Inst) else owner.node.name
            found = self._method(name, attr)
            if found is not None:
                fn = Fn(found[0], found[1], owner)
                if any(words.last(_dotted(d)) == "property" for d in found[0].decorator_list):
                    return self._call_value(fn, [], {}, state, node)
                return self._decorated(fn, state)
            if (inherited := self._inherited(name, attr, state)) is not None:
                return inherited
            base = f"{name}.{attr}"
        else:
            base = f"{name_of(owner) or text_of(owner)}.{attr}"
        if (rank := self._rank(base, node)) is not None:
            return rank
        if attr == "index" and base.endswith("device.index"):
            return self._own_rank("tp")
        if words.capturing(base):
            return self._capture(base)
        labels = labels_of(owner) - {"tensor"}
        if base.startswith(("os.environ", "sglang.srt.environ.envs")):
            labels |= {"env"}
        if attr.startswith("extend_") and "batch" in name_of(owner):
            mode = self.scenario.mode
            if mode is not None and mode not in words.MODE_TESTS["is_extend"]:
                return Const(None, frozenset({"mode"}))
            present = mode is not None
            return Sym(base, base, labels | {"mode"}, tensor=False, present=present)
        tensor = is_tensor(owner) and attr not in words.NO_TENSOR
        if not tensor and attr in words.TENSORS and not base.endswith("_cpu"):
            tensor = attr not in ("output", "x", "h")
        return Sym(f"{text_of(owner)}.{attr}", base, labels, tensor=tensor)

    def _decorated(self, fn: Fn, state: _State) -> Fn:
        """Return what a function becomes by those of its decorators that these files define."""
        for decorator in reversed(getattr(fn.node, "decorator_list", ())):
            made = self._ev_quietly(decorator, state) if self._is_ours(decorator, state) else None
            if isinstance(made, Fn):
                self._call_value(made, [replace(fn, owner=None)], {}, state, decorator)
                if isinstance(self._returned, Fn):
                    self.called.add(id(fn.node))
                    fn = replace(self._returned, owner=fn.owner)
        return fn

    def _is_ours(self, decorator: ast.expr, state: _State) -> bool:
        head = decorator.func if isinstance(decorator, ast.Call) else decorator
        return isinstance(head, ast.Name) and isinstance(self._ev_Name(head, state), Fn)

    def _inherited(self, name: str, attr: str, state: _State) -> Value | None:
        cls = self.classes.get(name)
        for base in cls.node.bases if cls else ():
            parent = words.last(_dotted(base))
            if parent in self.classes and parent != name:
                if (parent, attr) in state.heap:
                    return state.heap[(parent, attr)]
                if (found := self._inherited(parent, attr, state)) is not None:
                    return found
        return None

    def _ev_Subscript(self, node: ast.Subscript, state: _State) -> Value:
        owner = self._ev(node.value, state)
        index = self._ev(node.slice, state)
        name = name_of(owner)
        if name == "os.environ":
            return self._environment(index, node)
        if isinstance(owner, Seq) and owner.items is not None and isinstance(index, Const):
            at = index.value
            if isinstance(at, int) and -len(owner.items) <= at < len(owner.items):
                return owner.items[at]
        # ranks["attn_tp_rank"]: a dict of ranks is named by its keys.
        if (
            isinstance(index, Const)
            and isinstance(index.value, str)
            and (rank := self._rank(index.value, node)) is not None
        ):
            return rank
        labels = labels_of(owner) | labels_of(index)
        key = f"{text_of(owner)}[{text_of(index)}]"
        tensor = is_tensor(owner)
        if tensor and isinstance(index, Sym) and index.tensor and index.key.startswith("compare "):
            self._event("sync", "picking by a mask", node, state)
        return Sym(key, f"{name}[]" if name else "", labels, tensor=tensor)

    def _ev_BoolOp(self, node: ast.BoolOp, state: _State) -> Value:
        is_and = isinstance(node.op, ast.And)
        conds: list[Cond] = []
        value: Value = NONE
        inner = state
        before = state.guards
        for at, part in enumerate(node.values):
            value = self._ev(part, inner)
            cond = self._truth(value, inner, part)
            conds.append(cond)
            if at == len(node.values) - 1:
                break
            holds = known(cond, inner.path)
            if holds is not None and holds != is_and:
                # Decided, and nothing after it is asked.
                break
            guard = self._guard(cond, is_and, holds is not None, part)
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
            return (
                Alt(conds[0], self._ev_quietly(node.values[0], state), value)
                if (conds[0].op != "const")
                else value
            )
        if is_and and holds is True:
            return value if isinstance(value, Sym | Seq | Alt | Inst) else Truth(joined)
        return Truth(joined)

    def _ev_quietly(self, node: ast.expr, state: _State) -> Value:
        count = len(self.events)
        value = self._ev(node, state.copy())
        del self.events[count:]
        return value

    def _ev_UnaryOp(self, node: ast.UnaryOp, state: _State) -> Value:
        value = self._ev(node.operand, state)
        if isinstance(node.op, ast.Not):
            return Truth(negate(self._truth(value, state, node.operand)))
        if (
            isinstance(node.op, ast.USub)
            and isinstance(value, Const)
            and isinstance(value.value, int | float)
        ):
            return Const(-value.value, value.labels)
        return Sym(f"-{text_of(value)}", "", labels_of(value), tensor=is_tensor(value))

    def _ev_BinOp(self, node: ast.BinOp, state: _State) -> Value:
        left, right = self._ev(node.left, state), self._ev(node.right, state)
        return self._binary(node.op, left, right, node, state)

    def _binary(
        self, op: ast.operator, left: Value, right: Value, node: ast.AST, state: _State
    ) -> Value:
        labels = labels_of(left) | labels_of(right)
        if is_tensor(left) or is_tensor(right):
            for one in (left, right):
                for option, guards, _ in self._options(one, state):
                    if option == NONE:
                        self._event("none", "Tensor and None", node, guards=guards)
        if isinstance(left, Index) or isinstance(right, Index):
            index = left if isinstance(left, Index) else right
            other = right if isinstance(left, Index) else left
            if isinstance(index, Index) and index.at == "zero" and isinstance(other, Const):
                pair = (0, other.value) if index is left else (other.value, 0)
                return _computed(op, pair, labels)
            return index
        if isinstance(left, Const) and isinstance(right, Const):
            return _computed(op, (left.value, right.value), labels)
        if isinstance(left, Seq) and isinstance(right, Seq) and isinstance(op, ast.Add):
            items = (
                left.items + right.items
                if left.items is not None and right.items is not None
                else None
            )
            high = None if left.high is None or right.high is None else left.high + right.high
            return Seq(left.kind, left.low + right.low, high, items)
        tensor = is_tensor(left) or is_tensor(right)
        key = f"({text_of(left)} {type(op).__name__} {text_of(right)})"
        return Sym(key, "", labels, tensor=tensor)

    def _ev_Compare(self, node: ast.Compare, state: _State) -> Value:
        left = self._ev(node.left, state)
        conds: list[Cond] = []
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self._ev(right_node, state)
            if (is_tensor(left) or is_tensor(right)) and not isinstance(
                op, ast.Is | ast.IsNot | ast.In | ast.NotIn
            ):
                labels = labels_of(left) | labels_of(right)
                return Sym(f"compare {_at(node)}", "", labels, tensor=True)
            conds.append(self._compare(op, left, right))
            left = right
        return Truth(both(conds))

    def _compare(self, op: ast.cmpop, left: Value, right: Value) -> Cond:
        if isinstance(op, ast.NotEq | ast.IsNot):
            return negate(self._equal(left, right, identity=isinstance(op, ast.IsNot)))
        if isinstance(op, ast.Eq | ast.Is):
            return self._equal(left, right, identity=isinstance(op, ast.Is))
        if isinstance(op, ast.In | ast.NotIn):
            cond = self._contains(right, left)
            return negate(cond) if isinstance(op, ast.NotIn) else cond
        labels = labels_of(left) | labels_of(right)
        if isinstance(left, Index) or isinstance(right, Index):
            return self._index_order(op, left, right, labels)
        if isinstance(left, Const) and isinstance(right, Const):
            function = _ORDER.get(type(op))
            try:
                return const(bool(function(left.value, right.value)), labels)  # type: ignore[misc]
            except TypeError:
                return atom(f"{text_of(left)} {type(op).__name__} {text_of(right)}", labels)
        return atom(f"{text_of(left)} {type(op).__name__} {text_of(right)}", labels)

    def _index_order(self, op: ast.cmpop, left: Value, right: Value, labels: Labels) -> Cond:
        """Return whether a layer's number is above or below another number.

        The first pass stands for layer 0, the others for any layer from 1 on.
        """
        flipped = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
        index, other, kind = left, right, type(op)
        if not isinstance(index, Index):
            index, other, kind = right, left, flipped.get(type(op), type(op))
        key = f"layer {text_of(index)} {kind.__name__} {text_of(other)}"
        number = other.value if isinstance(other, Const) else None
        if not isinstance(index, Index) or not isinstance(number, int):
            # A number that is not told may be 0, and be compared so that layer 0 stays out.
            return atom(key, labels | _CONTENT)
        if index.at == "zero":
            return const(bool(_ORDER[kind](0, number)), labels)
        if (kind is ast.Gt and number < 1) or (kind is ast.GtE and number <= 1):
            return const(True, labels)
        if (kind is ast.Lt and number <= 1) or (kind is ast.LtE and number < 1):
            return const(False, labels)
        return atom(key, labels)

    def _equal(self, left: Value, right: Value, *, identity: bool = False) -> Cond:
        if isinstance(left, Alt):
            return _split(
                left.cond,
                self._equal(left.yes, right, identity=identity),
                self._equal(left.no, right, identity=identity),
            )
        if isinstance(right, Alt):
            return self._equal(right, left, identity=identity)
        if isinstance(left, Mode) or isinstance(right, Mode):
            other = right if isinstance(left, Mode) else left
            mode = words.last(name_of(other))
            labels = frozenset({"mode"})
            if self.scenario.mode and mode in words.FORWARD_MODES:
                return const(mode == self.scenario.mode, labels)
            return atom(f"mode == {text_of(other)}", labels)
        labels = labels_of(left) | labels_of(right)
        if isinstance(left, Index) or isinstance(right, Index):
            index, other = (left, right) if isinstance(left, Index) else (right, left)
            if isinstance(index, Index):
                return self._index_in(index, (other,))
        if NONE in (Const(getattr(left, "value", 0)), Const(getattr(right, "value", 0))):
            other = right if isinstance(left, Const) and left.value is None else left
            if isinstance(other, Const):
                # A rank that is told is never None.
                return const(
                    other.value is None,
                    NO_LABELS if isinstance(other.value, int) else other.labels | labels,
                )
            if not isinstance(other, Sym) or other.present:
                return const(False, labels)
            return atom(f"{other.key} is None", labels)
        if isinstance(left, Const) and isinstance(right, Const):
            return const(left.value == right.value, labels)
        if left == right and isinstance(left, Sym):
            return const(True, labels)
        for one, other in ((left, right), (right, left)):
            # Which card a tensor lies on: cuda:0 is the first rank's.
            if "device" in name_of(one) and "cuda:" in f"{text_of(other)}{name_of(other)}":
                return atom(f"{text_of(left)} == {text_of(right)}", labels | {"rank:tp"})
        first, second = sorted((text_of(left), text_of(right)))
        return atom(f"{first} == {second}", labels)

    def _contains(self, container: Value, item: Value) -> Cond:
        if isinstance(container, Alt):
            return _split(
                container.cond,
                self._contains(container.yes, item),
                self._contains(container.no, item),
            )
        if isinstance(container, Seq) and container.high == 0:
            return const(False, container.labels)
        if isinstance(item, Index):
            items = container.items if isinstance(container, Seq) else None
            if items is not None:
                return self._index_in(item, items, container.labels)  # type: ignore[union-attr]
            if item.at == "zero":
                return atom(f"0 in {text_of(container)}", labels_of(container) | _CONTENT)
            return const(item.at == "hit", labels_of(container))
        if isinstance(container, Seq) and container.items is not None:
            return either(self._equal(item, one) for one in container.items)
        if name_of(container) == "os.environ":
            return atom(f"{text_of(item)} in os.environ", frozenset({"env"}))
        labels = labels_of(container) | labels_of(item)
        return atom(f"{text_of(item)} in {text_of(container)}", labels)

    def _index_in(self, index: Index, items: tuple[Value, ...], labels: Labels = NO_LABELS) -> Cond:
        numbers = [item.value for item in items if isinstance(item, Const)]
        if index.at == "zero":
            if len(numbers) == len(items):
                return const(0 in numbers, labels)
            return either(
                atom(f"0 == {text_of(item)}", labels_of(item) | _CONTENT) for item in items
            )
        positive = len(numbers) < len(items) or any(number != 0 for number in numbers)
        return const(positive and index.at == "hit", labels)

    def _ev_IfExp(self, node: ast.IfExp, state: _State) -> Value:
        cond = self._truth(self._ev(node.test, state), state, node.test)
        holds = known(cond, state.path)
        before = state.guards
        if holds is not None:
            guard = self._guard(cond, holds, True, node.test)
            if guard.labels:
                state.guards = (*before, guard)
            value = self._ev(node.body if holds else node.orelse, state)
            state.guards = before
            ranked = frozenset(one for one in guard.labels if one.startswith("rank:"))
            return with_labels(value, ranked) if isinstance(value, Const) else value
        yes, no = state.copy(), state.copy()
        yes.guards = (*before, self._guard(cond, True, False, node.test))
        no.guards = (*before, self._guard(cond, False, False, node.test))
        assume(cond, True, yes.path)
        assume(cond, False, no.path)
        return _alternative(cond, self._ev(node.body, yes), self._ev(node.orelse, no))

    def _ev_NamedExpr(self, node: ast.NamedExpr, state: _State) -> Value:
        value = self._ev(node.value, state)
        self._assign(node.target, value, state)
        return value

    def _ev_Lambda(self, node: ast.Lambda, state: _State) -> Value:
        return Fn(node, self.frames[-1].source, None, state.names)

    def _ev_Starred(self, node: ast.Starred, state: _State) -> Value:
        return self._ev(node.value, state)

    def _ev_Yield(self, node: ast.Yield, state: _State) -> Value:
        self.frames[-1].yields.append(self._ev(node.value, state))
        return NONE

    def _ev_Await(self, node: ast.Await, state: _State) -> Value:
        return self._ev(node.value, state)

    def _sequence(self, node: ast.Tuple | ast.List | ast.Set, state: _State) -> Value:
        items = tuple(self._ev(one, state) for one in node.elts)
        kind = type(node).__name__.lower()
        if any(isinstance(one, ast.Starred) for one in node.elts):
            return Seq(kind, 1, None)  # type: ignore[arg-type]
        return Seq(kind, len(items), len(items), items)  # type: ignore[arg-type]

    _ev_Tuple = _ev_List = _ev_Set = _sequence

    def _ev_Dict(self, node: ast.Dict, state: _State) -> Value:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                self._ev(key, state)
            self._ev(value, state)
        return Seq("dict", len(node.keys), len(node.keys) or 0)

    def _comprehension(self, node: ast.expr, state: _State) -> Value:
        inner = state.copy()
        labels: Labels = NO_LABELS
        low = 1
        for generator in node.generators:  # type: ignore[attr-defined]
            iterable = self._ev(generator.iter, inner)
            labels |= labels_of(iterable)
            if isinstance(iterable, Seq):
                low = min(low, iterable.low)
                if iterable.high == 0:
                    return Seq("list", 0, 0, ())
            for item in (
                self._items(iterable, generator.iter)[1:2]
                or self._items(iterable, generator.iter)[:1]
            ):
                self._assign(generator.target, item, inner)
            for test in generator.ifs:
                cond = self._truth(self._ev(test, inner), inner, test)
                labels |= cond.labels
                low = 0
                inner.guards = (
                    *inner.guards,
                    self._guard(cond, True, known(cond, inner.path) is not None, test),
                )
                if known(cond, inner.path) is False:
                    return Seq("list", 0, 0, ())
        for part in ("key", "value", "elt"):
            if (element := getattr(node, part, None)) is not None:
                labels |= labels_of(self._ev(element, inner))
        return Seq("list", low, None, None, labels - {"tensor"})

    _ev_ListComp = _ev_SetComp = _ev_GeneratorExp = _ev_DictComp = _comprehension

    def _ev_JoinedStr(self, node: ast.JoinedStr, state: _State) -> Value:
        labels: Labels = NO_LABELS
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self._ev(part.value, state)
                labels |= labels_of(value)
                if is_tensor(value):
                    self._event("sync", "formatting a tensor", part, state)
        return Sym(f"text {_at(node)}", "", labels, present=True)

    def _ev_Call(self, node: ast.Call, state: _State) -> Value:
        self._step()
        func = self._ev(node.func, state)
        given = [self._ev(one, state) for one in node.args]
        args: list[Value] = []
        for argument, value in zip(node.args, given, strict=True):
            spread = isinstance(argument, ast.Starred) and isinstance(value, Seq) and value.items
            args += spread or [value]
        keywords = {one.arg or "**": self._ev(one.value, state) for one in node.keywords}
        result = self._call(node, func, args, keywords, state)
        if words.last(name_of(func) or _dotted(node.func)) not in _ONLY_READS:
            for expression, value in zip(node.args, given, strict=True):
                self._may_grow(expression, value, state)
            for one in node.keywords:
                self._may_grow(one.value, keywords[one.arg or "**"], state)
        return result

    def _may_grow(self, expression: ast.expr, value: Value, state: _State) -> None:
        """Forget how much a list holds that was given to a call: it may have been added to."""
        if not any(
            isinstance(one, Seq) and one.kind != "tuple"
            for one, _, _ in self._options(value, state)
        ):
            return
        if isinstance(expression, ast.IfExp):
            given = [expression.body, expression.orelse]
        else:
            given = [expression.value if isinstance(expression, ast.Starred) else expression]
        for one in given:
            if isinstance(one, ast.Name | ast.Attribute):
                holder = ast.copy_location(ast.Attribute(value=one, attr="extend"), one)
                self._grow(holder, self._ev_quietly(one, state), "extend", [], state, quiet=True)

    def _call(
        self,
        node: ast.Call,
        func: Value,
        args: list[Value],
        keywords: dict[str, Value],
        state: _State,
    ) -> Value:
        if isinstance(func, Alt):
            return self._call_either(node, func, args, keywords, state)
        if isinstance(func, Fn | Cls | Inst):
            return self._call_value(func, args, keywords, state, node)
        receiver: Value | None = None
        if isinstance(node.func, ast.Attribute):
            receiver = self._ev_quietly(node.func.value, state)
        name = name_of(func) or _dotted(node.func)
        tail = words.last(name)
        if isinstance(receiver, Mode):
            return self._mode_test(tail)
        if (special := self._builtin(name, args, keywords, node, state)) is not None:
            return special
        if (
            isinstance(receiver, Seq | Alt)
            and tail in _GROWS
            and isinstance(node.func, ast.Attribute)
        ):
            self._grow(node.func, receiver, tail, args, state)
            return NONE
        if tail == "super" or name.startswith("super()."):
            return self._super(tail, args, keywords, state, node)
        text = ", ".join(
            [ast.unparse(one.value) for one in node.keywords if one.arg in ("group", "pg")]
            + [
                f"{text_of(one)} {name_of(one)}"
                for key, one in keywords.items()
                if key in ("group", "pg")
            ]
        )
        if text and name.startswith("torch.distributed."):
            text = f"group {text}"
        if (rank := self._rank(name, node, text)) is not None:
            return rank
        if words.local_device(name):
            return self._own_rank("tp")
        if words.capturing(name):
            return self._capture(name)
        labels = frozenset().union(
            *(labels_of(one) for one in (*args, *keywords.values())), labels_of(func)
        ) - {"tensor"}
        if name.startswith(("os.environ", "os.getenv", "sglang.srt.environ")) or tail in (
            "get_bool_env_var",
            "get_int_env_var",
            "getenv",
        ):
            return self._environment(args[0] if args else NONE, node, name)
        group = words.group_of(name, text)
        if op := words.collective(name):
            self._event("collective", f"{op}\0{name}", node, state, group=group)
            return Sym(f"{op} {_at(node)}", f"{name}()", NO_LABELS, tensor=True, present=True)
        if side := words.point_to_point(name):
            self._event("p2p", f"{side}\0{name}", node, state, group=group)
        if self._is_parallel(func, node, name):
            self._event("module", name, node, state, group="tp")
        self._touches_host(node, name, tail, receiver, args, keywords, state)
        self._passes_tuple(node, name, args, keywords, state)
        self._hand_over(name, node, [*args, *keywords.values()], state)
        if words.varies(name):
            labels |= {"varies"}
        made = ""
        if tail[:1].isupper() and not name.endswith("()"):
            made = f"object:{tail}"
        elif name in ("range", "enumerate", "zip"):
            made = name
        tensor = (
            name.startswith("torch.") and not name.startswith(("torch.cuda", "torch.distributed"))
        ) or (receiver is not None and is_tensor(receiver) and tail not in _NO_TENSOR_RESULT)
        if tail in words.NO_TENSOR or tail in ("cpu", "numpy", "item", "tolist"):
            tensor = False
        pure = not args and not keywords
        key = f"{name}()" if pure and "." not in name else f"{name}() at {_at(node)}"
        if pure and isinstance(receiver, Sym):
            key = f"{receiver.key}.{tail}()"
        present = bool(made) or tensor
        return Sym(key, f"{name}()", labels, tensor=tensor, made=made, present=present)

    def _call_either(
        self,
        node: ast.Call,
        func: Alt,
        args: list[Value],
        keywords: dict[str, Value],
        state: _State,
    ) -> Value:
        result: Value = NONE
        before = state.guards
        for option, guards, _ in self._options(func, state):
            if option == NONE:
                continue
            state.guards = guards
            result = self._call(node, option, args, keywords, state)
        state.guards = before
        return result

    def _super(
        self,
        tail: str,
        args: list[Value],
        keywords: dict[str, Value],
        state: _State,
        node: ast.AST,
    ) -> Value:
        if tail == "super":
            return Sym("super()", "super()")
        frame = self.frames[-1]
        for base in frame.bases:
            found = self._method(words.last(_dotted(base)), tail)
            if found is not None:
                fn = Fn(found[0], found[1], state.names.get("self", Inst(frame.class_name)))
                return self._call_value(fn, args, keywords, state, node)
        return Sym(f"super {_at(node)}", f"super().{tail}()")

    def _builtin(
        self,
        name: str,
        args: list[Value],
        keywords: dict[str, Value],
        node: ast.Call,
        state: _State,
    ) -> Value | None:
        first = args[0] if args else None
        if name == "getattr" and len(args) > 1 and isinstance(args[1], Const):
            return self._attribute(args[0], str(args[1].value), state, node)
        if name in ("setattr", "object.__setattr__") and len(args) == 3:
            if isinstance(args[1], Const):
                self._write(args[0], str(args[1].value), args[2], node, state)
            return NONE
        if name == "hasattr" and len(args) == 2 and isinstance(args[1], Const):
            if (_holder(args[0]), str(args[1].value)) in state.heap:
                return Const(True)
            return Truth(atom(f"hasattr({text_of(args[0])}, {args[1].value!r})"))
        if name == "isinstance" and len(args) == 2:
            return Truth(self._is_instance(args[0], node.args[1]))
        if name == "bool" and first is not None:
            return Truth(self._truth(first, state, node))
        if name in ("int", "str", "float", "abs", "min", "max") and first is not None:
            if is_tensor(first):
                self._event("sync", f"{name} of a tensor", node, state)
            if all(isinstance(one, Const) for one in args) and not keywords:
                try:
                    function = {"int": int, "str": str, "float": float, "abs": abs,
                                "min": min, "max": max}[name]  # fmt: skip
                    value = function(*(one.value for one in args))  # type: ignore[operator, union-attr]
                    return Const(value, frozenset().union(*map(labels_of, args)))
                except (TypeError, ValueError):
                    pass
            key = f"{name}({', '.join(map(text_of, args))})"
            return Sym(key, name_of(first), frozenset().union(*map(labels_of, args)), present=True)
        if name == "len" and first is not None:
            if isinstance(first, Seq) and first.low == first.high:
                return Const(first.low, first.labels)
            if isinstance(first, Alt):
                return _alternative(
                    first.cond,
                    *(
                        Const(one.low)
                        if isinstance(one, Seq) and one.low == one.high
                        else Sym(f"len({text_of(one)})", "", labels_of(one) | _CONTENT)
                        for one in (first.yes, first.no)
                    ),
                )
            if isinstance(first, Seq) and first.low > 0:
                return Sym(f"positive len {_at(node)}", "positive", first.labels)
            return Sym(f"len({text_of(first)})", "", labels_of(first) | _CONTENT)
        if name == "range" and args and all(isinstance(one, Const) for one in args):
            try:
                numbers = range(*(one.value for one in args))  # type: ignore[arg-type, union-attr]
            except (TypeError, ValueError):
                return None
            labels = frozenset().union(*map(labels_of, args))
            if len(numbers) <= _MOST_ITEMS:
                items = tuple(Const(one, labels) for one in numbers)
                return Seq("list", len(items), len(items), items, labels)
            return Sym(f"range {_at(node)}", "range", labels, made="range")
        if name == "range" and args and (len(args) == 1 or args[0] == Const(0)):
            labels = frozenset().union(*map(labels_of, args))
            return Sym(f"range {_at(node)}", "range from 0", labels, made="range", present=True)
        if name in ("list", "tuple", "set", "sorted", "dict", "frozenset"):
            if first is None:
                return Seq("list", 0, 0, ())
            ranged = isinstance(first, Sym) and first.made == "range"
            return first if ranged or isinstance(first, Seq | Alt) else None
        if name == "print" or words.last(name) in ("info", "warning", "debug", "error"):
            if any(is_tensor(one) for one in args):
                self._event("sync", f"{words.last(name)} of a tensor", node, state)
            if name == "print":
                return NONE
        if name in ("functools.partial", "partial") and isinstance(first, Fn | Ext | Alt):
            return first
        return None

    def _is_instance(self, value: Value, kind: ast.expr) -> Cond:
        if isinstance(value, Alt):
            return _split(
                value.cond, self._is_instance(value.yes, kind), self._is_instance(value.no, kind)
            )
        names = {words.last(_dotted(one)) for one in getattr(kind, "elts", [kind])}
        if isinstance(value, Seq):
            return const(value.kind in names)
        if isinstance(value, Sym):
            if value.made.startswith("object:"):
                return const(value.made.removeprefix("object:") in names)
            if value.tensor or value.made == "returned":
                return const("Tensor" in names)
        return atom(f"isinstance({text_of(value)}, {sorted(names)})", labels_of(value))

    def _grow(
        self,
        func: ast.Attribute,
        receiver: Value,
        tail: str,
        args: list[Value],
        state: _State,
        *,
        quiet: bool = False,
    ) -> None:
        def grown(value: Value) -> Value:
            if isinstance(value, Alt):
                return Alt(value.cond, grown(value.yes), grown(value.no))
            if not isinstance(value, Seq):
                return value
            if tail == "clear":
                return Seq(value.kind, 0, 0, ())
            if tail in ("extend", "update", "pop", "remove"):
                return Seq(value.kind, 0 if tail in ("pop", "remove") else value.low, None)
            items = None
            if value.items is not None and len(value.items) < _MOST_ITEMS and args:
                items = (*value.items, args[-1])
            high = None if items is None else len(items)
            return Seq(value.kind, value.low + 1, high, items, value.labels)

        new = grown(receiver)
        if isinstance(func.value, ast.Name):
            state.names[func.value.id] = new
        elif isinstance(func.value, ast.Attribute):
            owner = self._ev_quietly(func.value.value, state)
            self._write(owner, func.value.attr, new, func, state, quiet=quiet)

    def _mode_test(self, tail: str) -> Value:
        labels = frozenset({"mode"})
        modes = words.MODE_TESTS.get(tail)
        if modes is not None and self.scenario.mode is not None:
            return Const(self.scenario.mode in modes, labels)
        return Truth(atom(f"mode.{tail}()", labels))

    def _environment(self, name: Value, node: ast.AST, called: str = "") -> Value:
        text = str(name.value) if isinstance(name, Const) and name.value else ""
        if not text:
            text = called or f"at {_at(node)}"
        if words.is_rank_variable(text):
            own = self._own_rank("unknown")
            if isinstance(own, Const):
                return Const(str(own.value), own.labels | {"rank-variable"})
            return own
        return Sym(f"env:{text}", f"env:{text}", frozenset({"env"}))

    def _rank(self, name: str, node: ast.AST, arguments: str = "") -> Value | None:
        found = words.rank_of(name)
        if found is None:
            return None
        group, how = found
        tail = words.last(name)
        if _SOMEBODYS_RANK.search(tail.lower()):
            return None
        if arguments:
            group = words.group_of(name, arguments)
        own = self._own_rank(group)
        if how == "number":
            return own
        labels = frozenset({f"rank:{group}"})
        if group == "unknown":
            labels = frozenset({"rank:unknown"})
        if isinstance(own, Const) and isinstance(own.value, int):
            return Const(own.value == (0 if how == "first" else RANKS - 1), labels)
        return Sym(f"{how} rank of {group}", name, labels, present=True)

    def _own_rank(self, group: words.Group) -> Value:
        labels = frozenset({f"rank:{group}"})
        if group in ("pp", "attn-dp", "cp") or self.scenario.rank is None:
            return Sym(f"rank of {group}", f"{group}_rank", labels, present=True)
        return Const(self.scenario.rank, labels)

    def _capture(self, name: str) -> Value:
        labels = frozenset({"capture"})
        if words.compiling(name) and self.scenario.mode == words.CAPTURED_MODE:
            # The graphs of decoding are captured from code that is not compiled.
            return Const(False, labels)
        if self.scenario.capturing is not None:
            return Const(self.scenario.capturing, labels)
        return Truth(atom("a graph is captured", labels))

    def _is_parallel(self, func: Value, node: ast.Call, name: str) -> bool:
        made = func.made.removeprefix("object:") if isinstance(func, Sym) else ""
        if made and words.is_parallel_layer(made):
            return True
        tail = words.last(name).removesuffix("[]")
        if tail in words.PARALLEL_FUNCTIONS:
            return True
        if isinstance(node.func, ast.Attribute) and "communicator" in name.lower():
            return words.last(name).startswith(("prepare", "postprocess"))
        return isinstance(func, Sym) and tail in words.PARALLEL_ATTRIBUTES

    def _touches_host(
        self,
        node: ast.Call,
        name: str,
        tail: str,
        receiver: Value | None,
        args: list[Value],
        keywords: dict[str, Value],
        state: _State,
    ) -> None:
        on_cpu = receiver is not None and (
            "cpu" in name_of(receiver).lower() or "cpu" in text_of(receiver).lower()
        )
        tensor = receiver is not None and is_tensor(receiver)
        named = receiver is not None and isinstance(receiver, Sym) and not receiver.made
        if not on_cpu and receiver is not None:
            if words.sync_method(tail) and (tensor or (named and tail != "unique")):
                self._event("sync", f".{tail}()", node, state)
            elif tail == "to" and (tensor or named) and _says_cpu([*args, *keywords.values()]):
                self._event("sync", '.to("cpu")', node, state)
        if words.sync_function(name) and (
            "synchronize" in tail
            or any(is_tensor(one) for one in args)
            or any(isinstance(one, Seq) for one in args)
        ):
            self._event("sync", name, node, state)
        of_unknown_size = (name == "torch.where" and len(args) + len(keywords) == 1) or (
            tail == "repeat_interleave"
            and "output_size" not in keywords
            and any(
                is_tensor(one) for one in [*args[name.startswith("torch.") :], *keywords.values()]
            )
        )
        if of_unknown_size:
            self._event("sync", name, node, state)
        if (
            name in ("torch.tensor", "torch.as_tensor", "torch.from_numpy")
            and ("device" in keywords and not _says_cpu([keywords["device"]]))
            and not (args and is_tensor(args[0]))
        ):
            self._event("sync", f"{name} on a device", node, state)
        if words.io(name):
            self._event("io", name, node, state)
        elif words.blocking(name):
            self._event("block", name, node, state)
        if tail.endswith("_") and not tail.startswith("_") and tensor and tail != "requires_grad_":
            owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            self._event("inplace", ast.unparse(owner), node, state, value=receiver)
        into = [one.value for one in node.keywords if one.arg == "out"]
        function = name.startswith("torch.") and "()" not in name
        if (tail.endswith("_") and function) or keywords.get("inplace") == Const(True):
            into += node.args[:1]
        for written in into:
            parts = written.elts if isinstance(written, ast.List | ast.Tuple) else [written]
            for one in parts:
                value = self._ev_quietly(one, state)
                if is_tensor(value):
                    self._event("inplace", ast.unparse(one), node, state, value=value)

    def _passes_tuple(
        self,
        node: ast.Call,
        name: str,
        args: list[Value],
        keywords: dict[str, Value],
        state: _State,
    ) -> None:
        if words.last(_dotted(node.func)) not in _TAKES_A_TENSOR:
            return
        named = [(str(at), value) for at, value in enumerate(args)] + list(keywords.items())
        for place, value in named:
            for option, guards, _ in self._options(value, state):
                if isinstance(option, Seq) and option.kind == "tuple" and option.low > 0:
                    self._event("tuple", f"{place} a tuple {name}", node, guards=guards)
                elif (
                    option == NONE
                    and words.last(_dotted(node.func)) == "logits_processor"
                    and place
                    in (
                        "1",
                        "hidden_states",
                    )
                ):
                    self._event("tuple", f"{place} None {name}", node, guards=guards)

    def _hand_over(self, name: str, node: ast.Call, values: Iterable[Value], state: _State) -> None:
        """Follow functions that are given away: hooks run in forwards, others are called now."""
        for value in values:
            if not isinstance(value, Fn):
                continue
            if "hook" in words.last(name) or "register" in words.last(name):
                self.called.add(id(value.node))
                self.hooks.append((value, self.statement))
            elif isinstance(value.node, ast.Lambda):
                self._call_value(value, [], {}, state, node)

    # ---- calls into these files

    def _call_value(
        self,
        func: Value,
        args: list[Value],
        keywords: dict[str, Value],
        state: _State,
        node: ast.AST,
    ) -> Value:
        fn: Fn | None = None
        result: Value | None = None
        if isinstance(func, Cls):
            result = Inst(func.node.name)
            found = self._method(func.node.name, "__init__")
            if found is not None:
                fn = Fn(found[0], found[1], result)
        elif isinstance(func, Inst):
            for name in ("forward", "__call__"):
                found = self._method(func.name, name)
                if found is not None:
                    fn = Fn(found[0], found[1], func)
                    break
        elif isinstance(func, Fn):
            fn = func
        if fn is None:
            return result or Sym(f"call {_at(node)}", "")
        if len(self.frames) > _MOST_CALLS or any(one is fn.node for one, _ in self.via):
            return result or Sym(f"call {_at(node)}", "")
        if not isinstance(fn.node, ast.Lambda):
            self.passing_on.add(id(self.statement))
        outer_via, self.via = self.via, (*self.via, (node, self.frames[-1].source))
        after = self._call_function(fn, args, keywords, state, node)
        self.via = outer_via
        state.heap = after.heap
        return result or self._returned

    def _call_function(
        self,
        fn: Fn,
        args: list[Value],
        keywords: dict[str, Value],
        state: _State,
        node: ast.AST,
        *,
        root: bool = False,
    ) -> _State:
        self.called.add(id(fn.node))
        inner = state.copy()
        inner.names = {}
        class_name = fn.owner.name if isinstance(fn.owner, Inst) else ""
        cls = self.classes.get(class_name)
        frame = _Frame(
            fn.source,
            dict(fn.closure or {}),
            [],
            [],
            len(state.guards),
            [],
            class_name,
            tuple(cls.node.bases) if cls else (),
        )
        self.frames.append(frame)
        self._bind(fn, args, keywords, inner, root=root)
        if isinstance(fn.node, ast.Lambda):
            if id(self.statement) in fn.source.new:
                self.touched.add(self.root)
            frame.returns.append((self._ev(fn.node.body, inner), inner))
        else:
            last = self._block(fn.node.body, inner)
            if last is not None:
                frame.returns.append((NONE, last))
        self.frames.pop()
        self._returned: Value = NONE
        if not frame.returns:
            return state
        value, after = frame.returns[-1]
        if frame.yields:  # what a context manager gives; of another generator, one of its items
            self._returned = frame.yields[0]
            return after
        value = self._mark(value)
        for earlier, its_state in reversed(frame.returns[:-1]):
            new = its_state.guards[frame.depth_of_guards :]
            cond = both(
                guard.cond if guard.taken else negate(guard.cond)
                for guard in new
                if not guard.decided
            )
            if cond.op == "const":
                cond = atom(f"return {_at(node)} {len(new)}")
            value = _alternative(cond, self._mark(earlier), value)
            after = self._join(cond, its_state, after, state.guards)
        self._returned = value
        return after

    def _mark(self, value: Value) -> Value:
        """Return a tensor that a function returns, marked so: whoever unpacks it errs."""
        if isinstance(value, Sym) and value.tensor and not value.made:
            return Sym(value.key, value.name, value.labels, True, "returned", True)
        if isinstance(value, Alt):
            return Alt(value.cond, self._mark(value.yes), self._mark(value.no))
        return value

    def _bind(
        self,
        fn: Fn,
        args: list[Value],
        keywords: dict[str, Value],
        state: _State,
        *,
        root: bool,
    ) -> None:
        parameters = fn.node.args
        names = [*parameters.posonlyargs, *parameters.args]
        values = list(args)
        decorators = {words.last(_dotted(one)) for one in getattr(fn.node, "decorator_list", ())}
        if fn.owner is not None and "staticmethod" not in decorators:
            values.insert(0, fn.owner)
        defaults: dict[str, ast.expr] = {}
        for name, default in zip(reversed(names), reversed(parameters.defaults), strict=False):
            defaults[name.arg] = default
        for name, given in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
            if given is not None:
                defaults[name.arg] = given
        for at, name in enumerate([*names, *parameters.kwonlyargs]):
            if at < len(values) and name in names:
                state.names[name.arg] = values[at]
            elif name.arg in keywords:
                state.names[name.arg] = keywords[name.arg]
            elif not root and name.arg in defaults:
                state.names[name.arg] = self._ev(defaults[name.arg], state)
            else:
                state.names[name.arg] = self._parameter(name)
        if parameters.vararg:
            rest = tuple(values[len(names) :])
            state.names[parameters.vararg.arg] = Seq(
                "tuple", len(rest), None if root else len(rest), None if root else rest
            )
        if parameters.kwarg:
            state.names[parameters.kwarg.arg] = Sym("kwargs", "kwargs")

    def _parameter(self, name: ast.arg) -> Value:
        if name.arg == "forward_mode":
            return Mode()
        if (rank := self._rank(name.arg, name)) is not None:
            return rank
        annotation = ast.unparse(name.annotation) if name.annotation else ""
        tensor = name.arg in words.TENSORS or annotation == "torch.Tensor"
        return Sym(name.arg, name.arg, NO_LABELS, tensor=tensor)

    def _method(
        self, class_name: str, name: str
    ) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, Source] | None:
        cls, seen = self.classes.get(class_name), 0
        queue = [cls] if cls else []
        while queue and seen < 20:
            seen += 1
            cls = queue.pop(0)
            if (own := self._own(cls, name)) is not None:
                return own, cls.source
            for base in cls.node.bases:
                parent = self.classes.get(words.last(_dotted(base)))
                if parent is not None:
                    queue.append(parent)
        return None

    def _own(self, cls: Cls, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        for node in cls.node.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return node
        return None

    # ---- truth, guards, events

    def _truth(self, value: Value, state: _State, node: ast.expr) -> Cond:
        if isinstance(value, Const):
            return const(bool(value.value), value.labels)
        if isinstance(value, Truth):
            return value.cond
        if isinstance(value, Seq):
            if value.high == 0:
                return const(False, value.labels)
            if value.low > 0:
                return const(True, value.labels)
            return atom(f"{text_of(value)} {_at(node)}", value.labels | _CONTENT)
        if isinstance(value, Alt):
            yes, no = self._truth(value.yes, state, node), self._truth(value.no, state, node)
            if known(value.cond, state.path) is not None:
                return yes if known(value.cond, state.path) else no
            return _split(value.cond, yes, no)
        if isinstance(value, Sym):
            if value.tensor and not value.name.endswith(("_cpu", "()_cpu")):
                self._event("sync", "the truth of a tensor", node, state)
            if value.name == "positive":
                return const(True, value.labels)
            if value.made.startswith("object:"):
                return const(True, value.labels)
            return atom(value.key, value.labels)
        if isinstance(value, Index):
            return const(value.at != "zero")
        return const(True)

    def _guard(
        self, cond: Cond, taken: bool, decided: bool, test: ast.AST
    ) -> Guard:  # both are named at their use
        labels = frozenset(
            label
            for label in cond.labels
            if not decided
            or label.startswith("rank:")
            or label in ("varies", "mode", "capture", "rank-variable")
        )
        text = self.texts.get(id(test)) or self.texts.setdefault(id(test), ast.unparse(test))
        return Guard(cond, taken, decided, text, labels, test, self.frames[-1].source)

    def _event(
        self,
        kind: EventKind,
        name: str,
        node: ast.AST,
        state: _State | None = None,
        *,
        guards: tuple[Guard, ...] = (),
        group: words.Group = "unknown",
        value: Value | None = None,
    ) -> None:
        self.events.append(
            Event(
                kind, name, node, self.frames[-1].source, group,
                state.guards if state is not None else guards,
                self.via, self.root, self.root_kind, self.statement, value,
            )
        )  # fmt: skip

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooLargeError


_ORDER: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
}
_TAKES_A_TENSOR = frozenset({"logits_processor", "norm", "lm_head", "layer"})
_GROWS = frozenset(
    {"append", "extend", "add", "update", "insert", "clear", "pop", "setdefault", "remove"}
)
_ONLY_READS = frozenset(
    {
        "len", "range", "enumerate", "zip", "sorted", "reversed", "list", "tuple", "set", "dict",
        "frozenset", "isinstance", "print", "max", "min", "sum", "any", "all", "bool", "str",
        "repr", "iter", "next", "map", "filter", "getattr", "hasattr", "id", "type", "cat",
        "stack", "concat", "tensor", "as_tensor", "append", "add", "insert", "extend", "update",
        "debug", "info", "warning", "error", "join", "format", "dumps",
    }
)  # fmt: skip
"""Functions and methods that leave a list as it is that they are given."""
_NO_TENSOR_RESULT = frozenset({"split", "chunk", "unbind", "topk", "sort", "aminmax", "tolist"})


_CONTENT: Labels = frozenset({"content"})
"""It depends on what an unknown list holds."""


class _SomebodysRank:
    _NAMES = (
        "src", "dst", "root", "target", "owner", "dump", "main", "writer", "leader", "peer",
        "first", "last", "other", "next", "prev", "source", "save", "master",
    )  # fmt: skip

    def search(self, text: str) -> bool:
        """Tell whether a name means some rank's number, not the own one."""
        return not text.startswith("is_") and any(
            text.lstrip("_").startswith(f"{name}_rank") for name in self._NAMES
        )


_SOMEBODYS_RANK = _SomebodysRank()


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
            into[key] = _alternative(cond, a, b)


def id_of(source: Source) -> str:
    """Return what a file is known by."""
    return source.module or source.name


def _RANKED(labels: Labels) -> Labels:
    return frozenset(label for label in labels if label.startswith("rank:"))


def _computed(op: ast.operator, pair: tuple[object, object], labels: Labels) -> Value:
    function = _ARITHMETIC.get(type(op))
    numbers = all(isinstance(one, int | float | bool) for one in pair)
    if function is not None and numbers:
        try:
            return Const(function(*pair), labels)
        except (ArithmeticError, TypeError, ValueError):
            pass
    return Sym(f"{pair[0]!r} {type(op).__name__} {pair[1]!r}", "", labels)


def _alternative(cond: Cond, yes: Value, no: Value) -> Value:
    if yes == no:
        return yes
    if isinstance(yes, Const) and isinstance(no, Const) and cond.op != "const":
        if yes.value is True and no.value is False:
            return Truth(cond)
        if yes.value is False and no.value is True:
            return Truth(negate(cond))
    if _depth(yes) + _depth(no) > 12:
        labels = labels_of(yes) | labels_of(no) | cond.labels
        return Sym(f"one of many by {key_of(cond)[:80]}", name_of(yes), labels)
    return Alt(cond, yes, no)


def _depth(value: Value) -> int:
    return 1 + _depth(value.yes) + _depth(value.no) if isinstance(value, Alt) else 0


def _split(cond: Cond, yes: Cond, no: Cond) -> Cond:
    if yes.op == "const" and no.op == "const":
        if yes.value == no.value:
            return const(yes.value, yes.labels | no.labels | cond.labels)
        return cond if yes.value else negate(cond)
    return either([both([cond, yes]), both([negate(cond), no])])


def _first_sequence(value: Value, path: dict[str, bool]) -> Value:
    while isinstance(value, Alt):
        holds = known(value.cond, path)
        if holds is not None:
            value = value.yes if holds else value.no
        else:
            value = value.yes if isinstance(value.yes, Seq) else value.no
    return value


def _is_new_value(value: Value, old: Value) -> bool:
    return not isinstance(value, Alt) or value.no != old


def _holder(owner: Value) -> str:
    if isinstance(owner, Inst):
        return owner.name
    if isinstance(owner, Cls):
        return owner.node.name
    if isinstance(owner, Alt):
        return _holder(owner.yes) if owner.yes != NONE else _holder(owner.no)
    return text_of(owner)


def _canonical(name: str) -> str:
    head, _, tail = name.partition(".")
    return {"np": "numpy"}.get(head, head) + (f".{tail}" if tail else "")


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{_dotted(node.func)}()"
    if isinstance(node, ast.Subscript):
        return f"{_dotted(node.value)}[]"
    return ""


def _item_name(node: ast.expr) -> str:
    text = ast.unparse(node)
    return "layers" if "layers" in text else ""


def _is_over_layers(node: ast.For | ast.AsyncFor) -> bool:
    if "layers" in ast.unparse(node.iter):
        return True
    return any(
        isinstance(one, ast.Subscript) and _dotted(one.value).endswith(".layers")
        for statement in node.body
        for one in ast.walk(statement)
    )


def _says_cpu(values: Iterable[Value]) -> bool:
    return any(
        (isinstance(one, Const) and one.value == "cpu") or "cpu" in text_of(one).lower().split("'")
        for one in values
    )


def _may_end(body: list[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break)
        for statement in body
        for node in ast.walk(statement)
    )


def _at(node: ast.AST) -> str:
    return f"{getattr(node, 'lineno', 0)}:{getattr(node, 'col_offset', 0)}"
