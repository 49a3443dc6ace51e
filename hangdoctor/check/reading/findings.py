"""From what is reached on each rank and in each mode to the cells of the table."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from hangdoctor.check.model import Cell, Difference, NotChecked, Place, Same
from hangdoctor.check.reading import vocabulary as words
from hangdoctor.check.reading.events import Event, Guard, Reached
from hangdoctor.check.reading.following import follow
from hangdoctor.check.reading.following.walk import TooLargeError
from hangdoctor.check.reading.scenario import RANKS, Scenario
from hangdoctor.check.reading.source import Source, head
from hangdoctor.check.reading.values import (
    Alt,
    Const,
    Labels,
    Seq,
    Sym,
    Value,
    is_made_anew,
    known,
)
from hangdoctor.check.verdict import worst_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hangdoctor.engines import Phase

ROWS = (
    "returns", "aux-capture", "collectives", "host-sync", "io", "stock-code", "shared-state",
    "forward-modes", "layer-loop", "graph-replay",
)  # fmt: skip

MODES = ("EXTEND", "DECODE", "IDLE", "MIXED", "TARGET_VERIFY")
"""Of a forward, those that code tells apart."""

FLAG, LIST = "capture_aux_hidden_states", "layers_to_capture"

_DEFAULT_PIPELINE = {"first rank of pp": True, "last rank of pp": True}
_TOLD = frozenset({"rank:tp", "rank:attn-tp", "rank:ep", "rank:world", "rank:unknown"})
"""What a scenario's rank decides, alone or with more."""

_WITHIN: dict[str, frozenset[str]] = {
    "tp": frozenset({"tp", "attn-tp", "attn-dp", "ep", "cp", "world", "unknown"}),
    "attn-tp": frozenset({"tp", "attn-tp", "ep", "world", "unknown"}),
    "attn-dp": frozenset({"tp", "attn-dp", "ep", "world"}),
    "ep": frozenset({"tp", "attn-tp", "ep", "world", "unknown"}),
    "cp": frozenset({"tp", "cp", "ep", "world"}),
    "pp": frozenset({"pp", "world"}),
    "world": frozenset({"tp", "attn-tp", "attn-dp", "ep", "cp", "pp", "world", "unknown"}),
    "unknown": frozenset({"tp", "attn-tp", "attn-dp", "ep", "cp", "world", "unknown"}),
}
"""In which groups the ranks of a group differ: those of a TP group share the PP rank."""


class Pair(NamedTuple):
    """A patched file with what belongs to it, and stock's."""

    patched: tuple[Source, ...]
    stock: Source | None


def cells(pair: Pair, readers: Callable[[str], tuple[str, ...]]) -> dict[str, Cell]:
    """Return the cells of the reading.

    Args:
        pair: what is compared; `new` of its sources is filled.
        readers: returns the places of the environment that read an attribute of another's object.
    """
    try:
        return _cells(pair, readers)
    except TooLargeError:
        why = "the file is too large to be followed"
    except RecursionError:
        why = "the file is nested too deeply to be followed"
    return {row: NotChecked(why=why) for row in ROWS}


def outside_of_forwards(pair: Pair) -> tuple[Place, ...]:
    """Return the first file's new statements that no forward of the first ranks reaches."""
    source = pair.patched[0]
    inside: set[int] = set()
    try:
        for rank in (0, 1):
            for mode in MODES:
                scenario = Scenario(rank=rank, mode=mode, capturing=False)
                inside |= follow(pair.patched, scenario).in_forward.keys()
    except (TooLargeError, RecursionError):
        inside.clear()
    return tuple(
        _place(one.node, source)
        for one in source.statements
        if id(one.node) in source.new and id(one.node) not in inside
    )


def _cells(pair: Pair, readers: Callable[[str], tuple[str, ...]]) -> dict[str, Cell]:
    found: dict[str, list[Difference]] = defaultdict(list)
    notes: dict[str, list[str]] = defaultdict(list)
    new = frozenset().union(*(source.new for source in pair.patched))
    changed = new or pair.patched[0].gone or pair.patched[0].moved_under
    if pair.stock is not None and not changed:
        return {row: Same(note="no statement differs") for row in ROWS}
    ranks = _ranks(pair.patched)
    by_rank = {rank: follow(pair.patched, Scenario(rank=rank)) for rank in ranks}
    of_stock = _stock(pair.stock)
    found["collectives"] += _divergences(by_rank, of_stock)
    found["collectives"] += _one_sided(by_rank, new)
    notes["collectives"] += _new_collectives(by_rank, new)
    extend = follow(pair.patched, Scenario(rank=0, mode="EXTEND", capturing=False))
    if pair.stock is None and not extend.in_forward:
        why = "its stock is not known, and it has no forward that could be followed"
        return {row: NotChecked(why=why) for row in ROWS}
    _returns(extend, of_stock.reached(Scenario(0, "EXTEND", capturing=False)), found)
    found["returns"] += _arities(pair)
    _capture_writes(by_rank[0], new, found)
    touched = frozenset().union(*(one.touched for one in (extend, *by_rank.values())))
    captured = [
        follow(pair.patched, Scenario(rank=rank, mode=words.CAPTURED_MODE, capturing=True), touched)
        for rank in (0, 1)
    ]
    _host(captured, extend, new, found, notes)
    found["stock-code"] += _stock_code(pair)
    _shared(pair, by_rank[0], new, readers, found)
    _reach(pair, touched, new, found, notes)
    return {
        row: worst_first(_once(found[row])) or Same(note="; ".join(dict.fromkeys(notes[row])))
        for row in ROWS
    }


# ---- collectives


class _Stock:
    def __init__(self, sources: tuple[Source, ...]) -> None:
        self._sources = sources
        self._known: dict[Scenario, Reached] = {}

    def reached(self, scenario: Scenario) -> Reached:
        if not self._sources:
            return Reached((), {}, {})
        if scenario not in self._known:
            self._known[scenario] = follow(self._sources, scenario)
        return self._known[scenario]


@lru_cache(maxsize=4)
def _stock(source: Source | None) -> _Stock:
    return _Stock((source,) if source else ())


class _Divergence(NamedTuple):
    event: Event
    guard: Guard | None
    only: tuple[int, ...]
    sure: bool

    def signature(self) -> tuple[str, str, str]:
        guard = self.guard
        return (self.event.name, self.event.group, f"{guard.taken} {guard.text}" if guard else "")


def _divergences(by_rank: dict[int, Reached], stock: _Stock) -> Iterator[Difference]:
    found = _diverge(by_rank)
    if not found:
        return
    known_ones = {
        one.signature()
        for one in _diverge({rank: stock.reached(Scenario(rank=rank)) for rank in by_rank})
    }
    for one in found:
        if one.signature() not in known_ones:
            yield _divergence(one, len(by_rank))


def _diverge(by_rank: dict[int, Reached]) -> list[_Divergence]:
    found: list[_Divergence] = []
    sequences = {
        rank: [event for event in reached.events if event.kind in ("collective", "module")]
        for rank, reached in by_rank.items()
    }
    counts = {rank: Counter(map(_key, events)) for rank, events in sequences.items()}
    keys = dict.fromkeys(key for count in counts.values() for key in count)
    for key in keys:
        most = max(count[key] for count in counts.values())
        having = tuple(rank for rank, count in counts.items() if count[key] == most)
        if len(having) == len(counts):
            continue
        # The last of them is what the others lack.
        event = [one for one in sequences[having[0]] if _key(one) == key][-1]
        guard = next(
            (one for one in reversed(event.guards) if one.decided and _ranked(one.labels)), None
        )
        if guard is None:
            guard = next((one for one in reversed(event.guards) if one.labels & _TOLD), None)
        if guard is None or _differ(guard.labels, event.group):
            found.append(_Divergence(event, guard, having, sure=True))
    if not found:
        first = [_key(event) for event in sequences[0]]
        for rank, events in sequences.items():
            order = [_key(event) for event in events]
            at = next((n for n, pair in enumerate(zip(first, order)) if pair[0] != pair[1]), None)  # noqa: B905  # their lengths are equal here
            if at is not None:
                event = sequences[0][at]
                found.append(_Divergence(event, None, tuple(r for r in by_rank if r != rank), True))
                break
    found += _undecided(sequences[0])
    return found


def _key(event: Event) -> tuple[str, str, str, tuple[tuple[bool, str], ...]]:
    guards = tuple((guard.taken, guard.text) for guard in event.guards if not guard.decided)
    name = event.name.split("\0")[0] if event.kind == "collective" else event.name
    return event.root, name, event.group, guards


def _undecided(events: list[Event]) -> Iterator[_Divergence]:
    """Yield what is reached on one side only of a condition that may differ between ranks."""
    sides: dict[tuple[str, str], dict[bool, list[Event]]] = defaultdict(
        lambda: {True: [], False: []}
    )
    guards: dict[tuple[str, str], Guard] = {}
    for event in events:
        for guard in event.guards:
            if not guard.decided and (
                _ranked(guard.labels) or guard.labels & {"varies", "exception"}
            ):
                key = (event.root, f"{id(guard.node)}")
                sides[key][guard.taken].append(event)
                guards[key] = guard
    for key, both_sides in sides.items():
        guard = guards[key]
        yes, no = (Counter(_key(one)[1:3] for one in both_sides[side]) for side in (True, False))
        for side, more, less in ((True, yes, no), (False, no, yes)):
            if "exception" in guard.labels and not side:
                continue
            for name in more - less:
                event = next(one for one in both_sides[side] if _key(one)[1:3] == name)
                ranked = _ranked(guard.labels)
                if (
                    ranked
                    and not _differ(guard.labels, event.group)
                    and not (guard.labels & {"varies"})
                ):
                    continue
                sure = ranked and not guard.labels & {"varies", "exception"}
                yield _Divergence(event, guard._replace(taken=side), (), sure=sure)


def _differ(labels: Labels, group: str) -> bool:
    return any(
        group in _WITHIN[label.removeprefix("rank:")]
        for label in labels
        if label.startswith("rank:")
    )


def _ranked(labels: Labels) -> bool:
    return any(label.startswith("rank:") for label in labels)


def _divergence(one: _Divergence, count: int) -> Difference:
    event = one.event
    name = words.last(event.name.split("\0")[-1])
    what = f"a layer that talks to the other ranks, {name}," if event.kind == "module" else name
    text = ""
    if one.guard is not None:
        text = _stated(one.guard)
    if one.guard is not None and one.guard.labels & {"exception", "varies"} and not one.only:
        how = f"{what} is reached only where {_short(text)}, which may differ between ranks"
    elif text:
        how = f"{what} is reached only by ranks where {_short(text)}; the others do not come"
    else:
        how = f"{what} is not reached by every rank in the same order"
    places = [_place(event.node, event.source)]
    places += [_place(node, source) for node, source in reversed(event.via)]
    if one.guard is not None:
        places.append(_place(one.guard.node, one.guard.source))
    ranks = tuple(f"TP{rank}" for rank in one.only) if len(one.only) < count / 2 else ()
    pp_only = (
        one.guard is not None
        and not one.guard.labels & {"exception", "varies"}
        and {label for label in one.guard.labels if label.startswith("rank:")} == {"rank:pp"}
    )
    if event.root_kind == "other":
        how += f"; nothing in this file calls {event.root}"
    # The engine's own launcher sets no rank in the environment: torchrun and srun do.
    from_outside = one.guard is not None and "rank-variable" in one.guard.labels
    return Difference(
        how=how,
        effect="hangs",
        places=tuple(dict.fromkeys(places)),
        phase=_phase(event),
        ranks=ranks,
        sure=one.sure and not from_outside and event.root_kind != "other",
        only_with="pipeline parallelism" if pp_only else "",
    )


def _stated(guard: Guard) -> str:
    """Return a guard's condition as it holds where it was passed."""
    if guard.taken:
        return guard.text
    if guard.text.endswith(" raises"):
        return f"{guard.text.removesuffix(' raises')} does not raise"
    try:
        tree = ast.parse(guard.text, mode="eval").body
    except SyntaxError:
        return f"not ({guard.text})"
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
        return ast.unparse(tree.operand)
    return ast.unparse(ast.UnaryOp(op=ast.Not(), operand=tree))


def _phase(event: Event) -> Phase | None:
    if event.root_kind in ("init", "load"):
        return "weights"
    if event.root_kind == "forward":
        return (
            "warmup" if any("mode" in guard.labels for guard in event.guards) else ("graph-capture")
        )
    return None


def _one_sided(by_rank: dict[int, Reached], new: frozenset[int]) -> Iterator[Difference]:
    halves: dict[str, Event] = {}
    for event in (one for reached in by_rank.values() for one in reached.events):
        if event.kind == "p2p":
            halves.setdefault(event.name.split("\0")[0], event)
    if len(halves) == 1 and _is_new(event := next(iter(halves.values())), new):
        side = next(iter(halves))
        other = "recv" if side == "send" else "send"
        yield Difference(
            how=f"{words.last(event.name.split(chr(0))[1])} without a {other} on the other side",
            effect="hangs",
            places=(_place(event.node, event.source),),
            phase=_phase(event),
        )


def _new_collectives(by_rank: dict[int, Reached], new: frozenset[int]) -> Iterator[str]:
    for event in by_rank[0].events:
        if event.kind == "collective" and _is_new(event, new):
            name = words.last(event.name.split("\0")[-1])
            yield f"new, on every rank: {name} ({_place(event.node, event.source)})"


# ---- what is returned, and captured


def _returns(reached: Reached, stock: Reached, found: dict[str, list[Difference]]) -> None:
    kinds = ("unpack", "tuple", "none")
    usual = {_shape(event) for event in stock.events if event.kind in kinds}
    for event in reached.events:
        if event.kind not in kinds or _shape(event) in usual:
            continue
        pipeline = any(
            known(guard.cond, _DEFAULT_PIPELINE) == (not guard.taken) for guard in event.guards
        )
        # What an unknown list of layers holds is not told: v1's comes from outside.
        if any("content" in guard.labels and not guard.decided for guard in event.guards):
            continue
        what = ast.unparse(event.node)[:60]
        if event.kind == "unpack":
            kind, _, count = event.name.rpartition(" into ")
            how = f"forward may return {kind}, which `{what}` unpacks into {count}"
        elif event.kind == "tuple":
            kind = event.name.split(" ", 1)[1].rpartition(" ")[0]
            how = f"{words.last(event.name)} gets {kind} where it takes a tensor"
        else:
            how = f"`{what}` adds a tensor and None: the first layer has no residual"
        found["aux-capture" if event.kind == "none" else "returns"].append(
            Difference(
                how=how,
                effect="breaks",
                places=(_place(event.node, event.source),),
                phase="warmup",
                only_with="pipeline parallelism" if pipeline else "",
            )
        )


def _arities(pair: Pair) -> Iterator[Difference]:
    """Yield calls of the file's own layers that unpack another number than forward returns."""
    source = pair.patched[0]
    usual = {one[:3] for one in _unpacked(pair.stock)} if pair.stock else set()
    for name, returned, count, at_return, at_call in _unpacked(source):
        if (name, returned, count) in usual:
            continue
        yield Difference(
            how=f"{name}.forward may return {returned} values, which are unpacked into {count}",
            effect="breaks",
            places=(_place(at_call, source), _place(at_return, source)),
            phase="warmup",
        )


def _unpacked(source: Source) -> Iterator[tuple[str, int, int, ast.AST, ast.AST]]:
    """Yield mismatches: class, values returned, names unpacked into, the return and the call."""
    returned = {
        node.name: found
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) and (found := _tuples_returned(node))
    }
    for scope in (node for node in source.tree.body if isinstance(node, ast.ClassDef)):
        assigned = [one for one in ast.walk(scope) if isinstance(one, ast.Assign)]
        owners: dict[str, set[str]] = defaultdict(set)
        for one in assigned:
            made = {
                call.func.id
                for call in ast.walk(one.value)
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
            }
            first = one.targets[0]
            target = first.elts[0] if isinstance(first, ast.Tuple) else first
            if isinstance(target, ast.Attribute):
                owners[target.attr] |= made & returned.keys()
        # `layer = self.layers[i]`, whose call says nothing of where it comes from.
        for one in assigned:
            target = one.targets[0]
            if (
                isinstance(target, ast.Name)
                and isinstance(one.value, ast.Subscript)
                and isinstance(one.value.value, ast.Attribute)
            ):
                owners[target.id] |= owners.get(one.value.value.attr, set())
        for one in assigned:
            target, call = one.targets[0], one.value
            if not (isinstance(target, ast.Tuple) and isinstance(call, ast.Call)):
                continue
            func = call.func.value if isinstance(call.func, ast.Subscript) else call.func
            called = getattr(func, "attr", getattr(func, "id", ""))
            if any(isinstance(part, ast.Starred) for part in target.elts):
                continue
            for name in sorted(owners.get(called, ())):
                for count, at in returned[name].items():
                    if count != len(target.elts):
                        yield name, count, len(target.elts), at, one


def _tuples_returned(cls: ast.ClassDef) -> dict[int, ast.AST]:
    """Return how many values a class's forward returns, where it says so, with the lines."""
    return {
        len(node.value.elts): node
        for method in cls.body
        if isinstance(method, ast.FunctionDef) and method.name == "forward"
        for node in ast.walk(method)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
    }


def _shape(event: Event) -> tuple[str, str, str]:
    return event.kind, event.name, ast.unparse(event.node)


def _capture_writes(
    reached: Reached, new: frozenset[int], found: dict[str, list[Difference]]
) -> None:
    written: dict[str, Event] = {}
    for event in reached.events:
        attribute = words.last(event.name)
        if event.kind != "write" or attribute not in (FLAG, LIST) or not _is_new(event, new):
            continue
        written[attribute] = event
        place = (_place(event.node, event.source),)
        found["aux-capture"].append(
            Difference(
                how=f"sets {attribute}: every forward mode captures, and states get wider",
                effect="invasive",
                places=place,
            )
        )
        value = event.value
        if _holds_zero(value):
            found["aux-capture"].append(
                Difference(
                    how="layer 0 is captured, which has no residual yet",
                    effect="breaks",
                    places=place,
                    phase="warmup",
                )
            )
    if len(written) == 1:
        name, event = next(iter(written.items()))
        value = event.value
        off = isinstance(value, Const) and not value.value
        empty = isinstance(value, Seq) and value.high == 0
        if off or empty:
            return
        other = LIST if name == FLAG else FLAG
        found["aux-capture"].append(
            Difference(
                how=f"{name} is set without {other}: forward and its caller disagree",
                effect="breaks",
                places=(_place(event.node, event.source),),
                phase="warmup",
            )
        )


def _holds_zero(value: Value | None) -> bool:
    if isinstance(value, Alt):
        return _holds_zero(value.yes) or _holds_zero(value.no)
    if isinstance(value, Sym):
        return value.made == "range" and value.name == "range from 0"
    return isinstance(value, Seq) and any(
        isinstance(item, Const) and item.value == 0 for item in value.items or ()
    )


# ---- the device and files


def _host(
    captured: list[Reached],
    extend: Reached,
    new: frozenset[int],
    found: dict[str, list[Difference]],
    notes: dict[str, list[str]],
) -> None:
    for reached in captured:
        for event in reached.events:
            if event.root_kind != "forward" or not _is_new(event, new):
                continue
            places = tuple(
                dict.fromkeys(
                    [
                        _place(event.node, event.source),
                        *(_place(node, source) for node, source in reversed(event.via)),
                    ]
                )
            )
            if event.kind == "sync":
                found["host-sync"].append(
                    Difference(
                        how=f"{event.name} waits for the device in a forward that is captured",
                        effect="breaks",
                        places=places,
                        phase="graph-capture",
                    )
                )
            elif event.kind in ("io", "block"):
                name = words.last(event.name)
                waits = event.kind == "block" and name != "sleep"
                found["io"].append(
                    Difference(
                        how=f"{event.name} in a forward that is captured: it runs then, and "
                        "never when the graph replays",
                        effect="hangs" if waits else "invasive",
                        places=places,
                        phase="graph-capture",
                        sure=not waits,
                    )
                )
    for event in extend.events:
        if event.root_kind != "forward" or not _is_new(event, new):
            continue
        row = {"sync": "host-sync", "io": "io", "block": "io"}.get(event.kind)
        if row is None:
            continue
        notes[row].append(f"new in EXTEND, never in a capture: {event.name}")
        if event.kind == "block" and words.last(event.name) == "mkfifo":
            found["io"].append(
                Difference(
                    how="a FIFO in a forward: opening it waits for its other end",
                    effect="hangs",
                    places=(_place(event.node, event.source),),
                    phase="warmup",
                    sure=False,
                )
            )


# ---- what stock code sees


def _stock_code(pair: Pair) -> Iterator[Difference]:
    source = pair.patched[0]
    for one in source.gone:
        if isinstance(one.node, ast.Import | ast.ImportFrom):
            continue
        line = one.node.lineno
        yield Difference(
            how=f"stock's line {line} is gone or changed: {_short(one.text)}", effect="invasive"
        )
    for before, after in source.moved_under:
        added = [one for one in after.under if one not in before.under]
        yield Difference(
            how=f"`{_short(after.text)}` runs only under: {_short('; '.join(added))}",
            effect="invasive",
            places=(_place(after.node, source),),
        )


def _shared(
    pair: Pair,
    reached: Reached,
    new: frozenset[int],
    readers: Callable[[str], tuple[str, ...]],
    found: dict[str, list[Difference]],
) -> None:
    own = _attributes_read(pair.stock) if pair.stock else {}
    classes = {
        node.name
        for source in pair.patched
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }
    stock_classes = (
        {node.name for node in ast.walk(pair.stock.tree) if isinstance(node, ast.ClassDef)}
        if pair.stock
        else set()
    )
    for event in reached.events:
        if not _is_new(event, new):
            continue
        place = (_place(event.node, event.source),)
        if event.kind == "replace":
            found["shared-state"].append(
                Difference(
                    how=f"puts something else in the place of {event.name}",
                    effect="invasive",
                    places=place,
                )
            )
        if (
            event.kind == "inplace"
            and event.source is pair.patched[0]
            and not is_made_anew(event.value)
        ):
            found["shared-state"].append(
                Difference(
                    how=f"changes {event.name} in place, which stock code goes on with",
                    effect="invasive",
                    places=place,
                )
            )
        if event.kind != "write" or event.source is not pair.patched[0]:
            continue
        owner, _, attribute = event.name.rpartition(".")
        if owner in classes and owner not in stock_classes:
            continue
        lines = own.get(attribute, ())
        outside = readers(attribute) if owner not in classes or lines else ()
        where = [f"{pair.patched[0].name}:{line} of stock" for line in lines[:2]]
        where += list(outside[:3])
        if where:
            found["shared-state"].append(
                Difference(
                    how=f"writes {event.name}, which is read by {', '.join(where)}",
                    effect="invasive",
                    places=place,
                )
            )
    found["shared-state"] += _locals(pair, new)


def _locals(pair: Pair, new: frozenset[int]) -> Iterator[Difference]:
    """Yield new assignments to names that the stock function uses too."""
    if pair.stock is None:
        return
    source = pair.patched[0]
    used: dict[str, set[str]] = defaultdict(set)
    for one in pair.stock.statements:
        shallow = ast.parse(one.text) if _is_simple(one.node) else None
        for node in ast.walk(shallow) if shallow else ():
            if isinstance(node, ast.Name):
                used[one.scope].add(node.id)
    for one in source.statements:
        if id(one.node) not in new or not one.scope:
            continue
        targets: list[ast.expr] = []
        if isinstance(one.node, ast.Assign):
            targets = one.node.targets
        elif isinstance(one.node, ast.AugAssign | ast.AnnAssign):
            targets = [one.node.target]
        for target in targets:
            for node in ast.walk(target):
                if (
                    isinstance(node, ast.Name)
                    and isinstance(node.ctx, ast.Store)
                    and (node.id in used[one.scope] and node.id != "_")
                ):
                    yield Difference(
                        how=f"sets {node.id} anew, which stock code goes on with",
                        effect="invasive",
                        places=(_place(one.node, source),),
                    )


def _attributes_read(source: Source) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = defaultdict(list)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found[node.attr].append(node.lineno)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in ("getattr", "hasattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            found[str(node.args[1].value)].append(node.lineno)
    return {name: tuple(sorted(set(lines))) for name, lines in found.items()}


# ---- modes, the loop, graphs


def _reach(
    pair: Pair,
    touched: frozenset[str],
    new: frozenset[int],
    found: dict[str, list[Difference]],
    notes: dict[str, list[str]],
) -> None:
    modes: dict[str, str] = {}
    for mode in MODES:
        on = []
        for rank in (0, 1):
            scenario = Scenario(rank=rank, mode=mode, capturing=False)
            reached = follow(pair.patched, scenario, touched)
            if rank == 0 and mode in ("DECODE", "IDLE") and touched:
                _returns(reached, _stock(pair.stock).reached(scenario), found)
            work = _work(reached, new, pair.patched)
            if work:
                on.append(rank)
            if rank == 1 and (loop := _work(reached, new, pair.patched, loop=True)):
                node, source = loop[0]
                found["layer-loop"].append(
                    Difference(
                        how="new code in the layer loop runs on every rank",
                        effect="invasive",
                        places=(_place(node, source),),
                    )
                )
        if on:
            modes[mode] = "every rank" if len(on) == 2 else f"TP{on[0]} alone"
    if modes:
        by_who: dict[str, list[str]] = defaultdict(list)
        for mode, who in modes.items():
            by_who[who].append(mode)
        notes["forward-modes"] += [
            f"new code in {', '.join(some)}: {who}" for who, some in by_who.items()
        ]
    else:
        notes["forward-modes"].append("no new code in a forward")
    prefill = follow(pair.patched, Scenario(rank=0, mode="EXTEND", capturing=True), touched)
    if work := _work(prefill, new, pair.patched):
        notes["graph-replay"].append(
            f"new code is traced where prefill graphs are captured ({_place(*work[0])})"
        )
    elif modes:
        notes["graph-replay"].append("skipped while a graph is captured: nothing at its replay")


def _work(
    reached: Reached, new: frozenset[int], sources: tuple[Source, ...], *, loop: bool = False
) -> list[tuple[ast.stmt, Source]]:
    """Return new statements that do something, of those that were reached.

    A call of a function of these files counts by what is reached there: one that returns at once
    is no work.
    """
    found: list[tuple[ast.stmt, Source]] = [
        (node, source)
        for key, (node, source) in (reached.in_loop if loop else reached.in_forward).items()
        if key in new
        and key not in reached.passing_on
        and isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign)
        and any(isinstance(one, ast.Call | ast.BinOp | ast.AugAssign) for one in ast.walk(node))
    ]
    if len(sources) > 1:
        found = [(node, source) for node, source in found if source is not sources[0]]
    return found


def _is_new(event: Event, new: frozenset[int]) -> bool:
    return (event.statement is not None and id(event.statement) in new) or any(
        _statement_is_new(node, source, new) for node, source in event.via
    )


def _statement_is_new(node: ast.AST, source: Source, new: frozenset[int]) -> bool:
    line = getattr(node, "lineno", 0)
    return any(first <= line <= last for first, last in _new_lines(source, new))


@lru_cache(maxsize=64)
def _new_lines(source: Source, new: frozenset[int]) -> tuple[tuple[int, int], ...]:
    return tuple(
        (one.node.lineno, one.node.end_lineno or one.node.lineno)
        for one in source.statements
        if id(one.node) in new and _is_simple(one.node)
    )


def _is_simple(node: ast.stmt) -> bool:
    return "\n" not in head(node) and isinstance(
        node, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return
    )


def _ranks(sources: tuple[Source, ...]) -> tuple[int, ...]:
    """Return the ranks that are told apart: the first ones, the last, and those that are named."""
    named = {
        node.value
        for source in sources
        for statement in source.statements
        if id(statement.node) in source.new
        for node in ast.walk(statement.node)
        if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value < RANKS
    }
    return tuple(sorted({0, 1, RANKS - 1} | (named if len(named) < 6 else set())))


def _place(node: ast.AST, source: Source) -> Place:
    return Place(file=source.name, line=getattr(node, "lineno", 0))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) < 90 else f"{line[:87]}..."


def _once(differences: Iterable[Difference]) -> list[Difference]:
    seen: dict[tuple[str, object], Difference] = {}
    for one in differences:
        key = (one.how, one.places[0] if one.places else None)
        if key not in seen or (not seen[key].sure and one.sure):
            seen[key] = one
    return list(seen.values())
