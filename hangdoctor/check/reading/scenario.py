"""What a scenario settles: the rank, the mode of a forward, whether a graph is captured."""

from __future__ import annotations

from typing import NamedTuple

from hangdoctor.check.reading import vocabulary as words
from hangdoctor.check.reading.values import Const, Labels, Sym, Truth, Value, atom

RANKS = 8
"""So many ranks are told apart: a condition may name any of them."""


class Scenario(NamedTuple):
    """What is fixed: the rank within TP, the mode, whether a graph is captured; None is open."""

    rank: int | None = None
    mode: str | None = None
    capturing: bool | None = None


def own_rank(scenario: Scenario, group: words.Group) -> Value:
    """Return the own rank in a group."""
    labels = frozenset({f"rank:{group}"})
    if group in ("pp", "attn-dp", "cp") or scenario.rank is None:
        return Sym(f"rank of {group}", f"{group}_rank", labels, present=True)
    return Const(scenario.rank, labels)


def rank_named(scenario: Scenario, name: str, arguments: str = "") -> Value | None:
    """Return what a name tells of the own rank: its number, or the truth of "is it the first".

    Args:
        scenario: what is settled.
        name: dotted; of an attribute, a parameter or a call.
        arguments: of the call, as far as they tell the group.

    Returns:
        None where the name is none of the own rank's.
    """
    found = words.rank_of(name)
    if found is None or words.is_somebodys_rank(words.last(name).lower()):
        return None
    group, how = found
    if arguments:
        group = words.group_of(name, arguments)
    own = own_rank(scenario, group)
    if how == "number":
        return own
    labels = frozenset({f"rank:{group}"})
    if isinstance(own, Const) and isinstance(own.value, int):
        return Const(own.value == (0 if how == "first" else RANKS - 1), labels)
    return Sym(f"{how} rank of {group}", name, labels, present=True)


def environment(scenario: Scenario, name: Value, otherwise: str) -> Value:
    """Return a variable of the environment, called `otherwise` where its name is not known."""
    text = str(name.value) if isinstance(name, Const) and name.value else ""
    text = text or otherwise
    if words.is_rank_variable(text):
        own = own_rank(scenario, "unknown")
        if isinstance(own, Const):
            return Const(str(own.value), own.labels | {"rank-variable"})
        return own
    return Sym(f"env:{text}", f"env:{text}", frozenset({"env"}))


def mode_test(scenario: Scenario, test: str) -> Value:
    """Return what one of ForwardMode's tests, such as is_decode, answers."""
    modes = words.MODE_TESTS.get(test)
    if modes is not None and scenario.mode is not None:
        return Const(scenario.mode in modes, _MODE)
    return Truth(atom(f"mode.{test}()", _MODE))


def of_the_mode(scenario: Scenario, attribute: str) -> Value:
    """Return an attribute of the mode."""
    if attribute == "name" and scenario.mode:
        return Const(scenario.mode, _MODE)
    return Sym(f"mode.{attribute}", f"forward_mode.{attribute}", _MODE)


def of_an_extend(scenario: Scenario, name: str, labels: Labels) -> Value:
    """Return an attribute of the batch that is there in the modes that extend, else None."""
    if scenario.mode is not None and scenario.mode not in words.MODE_TESTS["is_extend"]:
        return Const(None, _MODE)
    return Sym(name, name, labels | _MODE, tensor=False, present=scenario.mode is not None)


def captured(scenario: Scenario, name: str) -> Value:
    """Return the answer to a name that asks whether a graph is captured or compiled now."""
    labels = frozenset({"capture"})
    if words.compiling(name) and scenario.mode == words.CAPTURED_MODE:
        # The graphs of decoding are captured from code that is not compiled.
        return Const(False, labels)
    if scenario.capturing is not None:
        return Const(scenario.capturing, labels)
    return Truth(atom("a graph is captured", labels))


_MODE: Labels = frozenset({"mode"})
