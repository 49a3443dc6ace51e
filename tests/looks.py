"""Looks at real programs at real times, without waiting for a clock, and at recordings."""

from __future__ import annotations

import os
import time

from hangdoctor import engines
from hangdoctor.collect import procfs
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import begin, step
from hangdoctor.model import Header

SGLANG = engines.load("sglang")
AS_RANK = ("bash", "-c", 'exec -a sglang::scheduler_TP0 "$0" "$@"')
"""Comes before a program's command to give it the title of a rank."""


class Watch:
    """Folds looks at a program; a stall is suspicious at once."""

    def __init__(self, observer, stall_after_s=0.001):
        self.observer = observer
        self.began_s = time.monotonic()
        self.facts = begin(Header(engine="sglang", stall_after_s=stall_after_s), SGLANG)

    def look(self, *due):
        at_s = time.monotonic() - self.began_s
        snapshot = self.observer.take(frozenset({"processes", *due}), at_s=at_s, wall_s=at_s)
        self.facts = step(self.facts, snapshot, (), SGLANG)
        return diagnose(self.facts, SGLANG)


def child_of(pid, *names):
    """Wait for a descendant of one of the names, and return its pid."""
    while True:
        stats = procfs.scan("/proc")
        for below in procfs.descendants(stats, [pid]):
            if stats[below].comm in names:
                return below
        os.sched_yield()


def has_used(pid, cpu_s):
    """Wait until a process has used so much CPU more."""
    until_s = procfs.read_stat("/proc", pid).cpu_s + cpu_s
    while procfs.read_stat("/proc", pid).cpu_s < until_s:
        time.sleep(0.01)  # lets it have the CPU; nothing rests on its length


def judged(recording):
    """Yield each snapshot of a recording with the facts by then, and what is said of them."""
    facts = begin(recording.header, SGLANG)
    for snapshot, blocks in recording.steps():
        facts = step(facts, snapshot, blocks, SGLANG)
        yield snapshot, facts, diagnose(facts, SGLANG)


def told_by(found, rule):
    """Return the finding of a rule; None where there is none."""
    return next((each for each in found.findings if each.rule == rule), None)
