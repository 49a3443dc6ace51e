"""Experiments as data: what tells the causes apart that are left, and what each outcome means.

`ENGINE.toml` holds those of one engine, `common.toml` those that serve every engine. An experiment
is a command with at least two outcomes that mean different things. Which ones fit a case is decided
by the findings that are there, and by whether all that the command names is known.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from hangdoctor.engines import Phase, Table

Kind = Literal[
    "wait",  # costs time only
    "look",  # a command on the launch as it stands
    "relaunch",  # the launch is ended, and started with one thing changed
]
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]  # the cheapest first


class Outcome(Table, frozen=True, kw_only=True):
    """What can come of an experiment, and what that means."""

    seen: str
    means: str


class Experiment(Table, frozen=True, kw_only=True):
    """One experiment.

    Attributes:
        after: rules of which one has a finding that is not ruled out.
        phases: in which it makes sense; empty for all.
        waits: kinds of waits (engines/*.toml) of which the suspect is in one; empty for any.
        device: it makes sense for launches on these only.
        unless: patterns of the launch's command that make it pointless: it is so already.
        unless_told: it is pointless where the kernel tells what the suspect is blocked in, or how
            it spins.
        command: what to run, or what to change in the next start. In braces what is filled in, and
            without which it is left out: `pid`, `rank` (the suspect's), `launch` (the launcher's
            pid), `file`, `skip` (a shard that it holds, and how many MiB of it have come), `lock`,
            `port`, `seconds` (that are lacking until a verdict).
        takes_s: about so long.
        consent: what it does to the processes, where it does anything.
    """

    id: str
    kind: Kind
    after: tuple[str, ...]
    phases: tuple[Phase, ...] = ()
    waits: tuple[str, ...] = ()
    device: Literal["", "cpu", "gpu"] = ""
    unless: tuple[str, ...] = ()
    unless_told: bool = False
    command: str
    takes_s: float
    consent: str = ""
    outcomes: tuple[Outcome, ...]


class _File(Table, frozen=True, kw_only=True):
    experiments: tuple[Experiment, ...]


@cache
def load(engine: str) -> tuple[Experiment, ...]:
    """Return the experiments of an engine and of all engines, the cheapest first."""
    found = _read(engine) + _read("common")
    return tuple(sorted(found, key=lambda each: (KINDS.index(each.kind), each.takes_s)))


@cache
def _read(name: str) -> tuple[Experiment, ...]:
    file = resources.files(__name__).joinpath(f"{name}.toml")
    if not file.is_file():
        return ()
    return msgspec.toml.decode(file.read_bytes(), type=_File).experiments
