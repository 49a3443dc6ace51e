"""Values and conditions that the reading follows, as far as the source tells them."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable, Mapping

    from hangdoctor.check.reading.source import Source

Labels = frozenset[str]
"""What a value depends on: "rank:GROUP", "varies", "mode", "capture", "env", "tensor",
"rank-variable" for a rank that only some launchers put into the environment."""

NO_LABELS: Labels = frozenset()
CONTENT: Labels = frozenset({"content"})
"""It depends on what an unknown list holds."""


@dataclass(frozen=True, slots=True)
class Cond:
    """A condition: a constant, an atom by its key, or atoms joined.

    Attributes:
        op: which of them.
        value: of a constant.
        key: the same text, the same truth, as long as a path is followed.
        parts: of the others.
        labels: what it depends on.
    """

    op: Literal["const", "atom", "and", "or", "not"]
    value: bool = False
    key: str = ""
    parts: tuple[Cond, ...] = ()
    labels: Labels = NO_LABELS


@dataclass(frozen=True, slots=True)
class Const:
    """A number, text, truth value, None or the like that is known."""

    value: object
    labels: Labels = NO_LABELS


@dataclass(frozen=True, slots=True)
class Sym:
    """Something unknown.

    Attributes:
        key: the same key, the same thing.
        name: dotted, as far as it is known: get_tp_group().rank
        labels: what it depends on.
        tensor: it is a tensor.
        made: the class of an object that was made outside, such as PPProxyTensors.
        present: it is not None.
    """

    key: str
    name: str = ""
    labels: Labels = NO_LABELS
    tensor: bool = False
    made: str = ""
    present: bool = False


@dataclass(frozen=True, slots=True)
class Seq:
    """A tuple, list, set or dict of `low` to `high` items; `items` where each is known."""

    kind: Literal["tuple", "list", "set", "dict"]
    low: int
    high: int | None
    items: tuple[Value, ...] | None = None
    labels: Labels = NO_LABELS


@dataclass(frozen=True, slots=True)
class Alt:
    """One value where a condition holds, another where not."""

    cond: Cond
    yes: Value
    no: Value


@dataclass(frozen=True, slots=True)
class Truth:
    """The truth of a condition, as a value."""

    cond: Cond


@dataclass(frozen=True, slots=True, eq=False)
class Fn:
    """A function of these files, bound where `owner` is set; `closure` has its outer names."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    source: Source
    owner: Value | None = None
    closure: Mapping[str, Value] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Cls:
    """A class of these files."""

    node: ast.ClassDef
    source: Source


@dataclass(frozen=True, slots=True)
class Inst:
    """An instance of a class of these files; one stands for all of its class."""

    name: str


@dataclass(frozen=True, slots=True)
class Ext:
    """Something imported from outside."""

    name: str


@dataclass(frozen=True, slots=True)
class Mode:
    """The mode of the forward that runs."""


@dataclass(frozen=True, slots=True)
class Index:
    """A layer's number in a loop: 0, one that is asked for, one that is not."""

    at: Literal["zero", "hit", "miss"]


Value = Const | Sym | Seq | Alt | Truth | Fn | Cls | Inst | Ext | Mode | Index
NONE = Const(None)


def const(value: bool, labels: Labels = NO_LABELS) -> Cond:  # noqa: FBT001  # it is the value
    """Return a condition that is known."""
    return Cond("const", value=value, key=str(value), labels=labels)


def atom(key: str, labels: Labels = NO_LABELS) -> Cond:
    """Return a condition that is not known."""
    return Cond("atom", key=key, labels=labels)


def negate(cond: Cond) -> Cond:
    """Return the opposite."""
    if cond.op == "const":
        return const(not cond.value, cond.labels)
    if cond.op == "not":
        return cond.parts[0]
    return Cond("not", key=_short(f"not {cond.key}"), parts=(cond,), labels=cond.labels)


def both(parts: Iterable[Cond]) -> Cond:
    """Return what holds where all parts hold."""
    return _join("and", tuple(parts))


def either(parts: Iterable[Cond]) -> Cond:
    """Return what holds where one of the parts holds."""
    return _join("or", tuple(parts))


def _join(op: Literal["and", "or"], parts: tuple[Cond, ...]) -> Cond:
    decisive = op == "or"
    labels: set[str] = set()
    left: list[Cond] = []
    for part in parts:
        if part.op == "const":
            if part.value == decisive:
                # What was asked before it stays among the reasons; what comes after is not asked.
                return const(decisive, part.labels)
            labels |= part.labels
            continue
        left.append(part)
        labels |= part.labels
    if not left:
        return const(not decisive, frozenset(labels))
    if len(left) == 1 and frozenset(labels) == left[0].labels:
        return left[0]
    key = _short("(" + f" {op} ".join(part.key for part in left) + ")")
    return Cond(op, key=key, parts=tuple(left), labels=frozenset(labels))


def split(cond: Cond, yes: Cond, no: Cond) -> Cond:
    """Return what holds where one condition holds by `cond`, another where not."""
    if yes.op == "const" and no.op == "const":
        if yes.value == no.value:
            return const(yes.value, yes.labels | no.labels | cond.labels)
        return cond if yes.value else negate(cond)
    return either([both([cond, yes]), both([negate(cond), no])])


def key_of(cond: Cond) -> str:
    """Return a condition as text that is the same for the same condition."""
    return cond.key


def _short(key: str) -> str:
    return key if len(key) < 300 else f"{key[:100]}#{zlib.crc32(key.encode()):x}"


def known(cond: Cond, path: Mapping[str, bool]) -> bool | None:
    """Return whether a condition holds on a path; None where that is not known."""
    if cond.op == "const":
        return cond.value
    if (found := path.get(cond.key)) is not None:
        return found
    if cond.op == "atom":
        return None
    if cond.op == "not":
        inner = known(cond.parts[0], path)
        return None if inner is None else not inner
    return _known_parts(cond, path)


def _known_parts(cond: Cond, path: Mapping[str, bool]) -> bool | None:
    answers = [known(part, path) for part in cond.parts]
    decisive = cond.op == "or"
    if decisive in answers:
        return decisive
    return None if None in answers else not decisive


def assume(cond: Cond, holds: bool, path: dict[str, bool]) -> None:  # noqa: FBT001  # its value
    """Add to a path that a condition holds, or does not."""
    if cond.op == "const":
        return
    path[key_of(cond)] = holds
    if cond.op == "not":
        assume(cond.parts[0], not holds, path)
    elif (cond.op == "and" and holds) or (cond.op == "or" and not holds):
        for part in cond.parts:
            assume(part, holds, path)


def alternative(cond: Cond, yes: Value, no: Value) -> Value:
    """Return one value where a condition holds, another where not, as simply as it can be said."""
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


def labels_of(value: Value) -> Labels:
    """Return what a value depends on."""
    if isinstance(value, Const | Sym):
        return value.labels
    if isinstance(value, Seq):
        inside = [labels_of(item) for item in value.items or ()]
        return value.labels.union(*inside)
    if isinstance(value, Truth):
        return value.cond.labels
    if isinstance(value, Alt):
        return value.cond.labels | labels_of(value.yes) | labels_of(value.no)
    return frozenset({"mode"}) if isinstance(value, Mode) else NO_LABELS


def ranked(labels: Labels) -> Labels:
    """Return those of the labels that say whose rank it depends on."""
    return frozenset(label for label in labels if label.startswith("rank:"))


def holder_of(owner: Value) -> str:
    """Return the name under which a value's attributes are kept."""
    if isinstance(owner, Inst):
        return owner.name
    if isinstance(owner, Cls):
        return owner.node.name
    if isinstance(owner, Alt):
        return holder_of(owner.yes) if owner.yes != NONE else holder_of(owner.no)
    return text_of(owner)


def name_of(value: Value) -> str:
    """Return a value's dotted name, empty where it has none."""
    if isinstance(value, Sym | Ext):
        return value.name
    if isinstance(value, Alt):
        return name_of(value.yes) or name_of(value.no)
    if isinstance(value, Fn):
        return getattr(value.node, "name", "lambda")
    return value.node.name if isinstance(value, Cls) else ""


def text_of(value: Value) -> str:
    """Return text that is the same for the same value; long text is cut and told by a sum."""
    text = _text_of(value)
    return text if len(text) < 200 else f"{text[:80]}#{zlib.crc32(text.encode()):x}"


def _text_of(value: Value) -> str:
    if isinstance(value, Sym):
        return value.key
    if isinstance(value, Const):
        return repr(value.value)
    if isinstance(value, Seq):
        inside = ", ".join(text_of(item) for item in value.items or ())
        return (
            f"{value.kind}({inside if value.items is not None else f'{value.low}..{value.high}'})"
        )
    if isinstance(value, Truth):
        return key_of(value.cond)
    if isinstance(value, Alt):
        return f"({text_of(value.yes)} if {key_of(value.cond)} else {text_of(value.no)})"
    if isinstance(value, Index):
        return f"layer:{value.at}"
    return name_of(value) or type(value).__name__


def is_tensor(value: Value) -> bool:
    """Tell whether a value is known to be a tensor."""
    if isinstance(value, Alt):
        return is_tensor(value.yes) or is_tensor(value.no)
    return isinstance(value, Sym) and value.tensor


def is_made_anew(value: Value | None) -> bool:
    """Tell whether a tensor is known to be a fresh one: a copy, a sum, what torch.zeros() made."""
    if isinstance(value, Alt):
        return is_made_anew(value.yes) and is_made_anew(value.no)
    if not isinstance(value, Sym):
        return False
    name = value.name
    while name.endswith("[]"):
        name = name[:-2]
    if not name:
        return value.key.startswith("(")
    return name.endswith("()") and bool(_MAKES.match(name[:-2].rpartition(".")[2]))


_MAKES = re.compile(
    r"^(clone|empty|zeros|ones|full|rand|randn|randint|arange|eye|tensor|cat|concat|stack|"
    r"linspace|new_\w+|\w+_like|deepcopy)$"
)


def with_labels(value: Value, labels: Labels) -> Value:
    """Return a value that depends on more."""
    if not labels:
        return value
    if isinstance(value, Const):
        return Const(value.value, value.labels | labels)
    if isinstance(value, Sym):
        return Sym(
            value.key, value.name, value.labels | labels, value.tensor, value.made, value.present
        )
    if isinstance(value, Seq):
        return Seq(value.kind, value.low, value.high, value.items, value.labels | labels)
    return value
