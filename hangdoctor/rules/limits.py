"""The rule over the engine's own time-outs: whether one ends the wait by itself, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.findings import Evidence, Finding, enumerate_names
from hangdoctor.limits import countdown_words, countdowns
from hangdoctor.loads import report
from hangdoctor.units import duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.limits import Countdown
    from hangdoctor.rules.case import Case


def ends_by_itself(case: Case) -> Iterator[Finding]:
    """A time-out of the engine's own ends the wait.

    What it sees: which wait a rank or the launcher stands in, since when, by the log's stamps and
    by its stack; the options and variables that set the time-out's length.
    Why it matters: it tells how long there is to look before the processes are gone, what the log
    will say then, and that a rank that loads slowly will not be waited for.
    What to do: look, and save everything, before it ends. Where a rank is only slow, and takes
    longer than the time-out, the launch will fail: make its load quicker, not the waiting longer.
    """
    for left in countdowns(case.facts, case.engine):
        who = enumerate_names(left.ranks)
        late = _slower(case, left)
        limit = f" (a limit of {duration(left.limit_s)})" if left.limit_s is not None else ""
        yield Finding(
            rule="ends-by-itself",
            verdict="found" if left.limit_s is not None else "undecided",
            title=f"the wait of {who} ends by itself {countdown_words(left)}{limit}: {left.ends}"
            + late,
            ranks=tuple(rank.name for rank in case.facts.ranks if rank.name in left.ranks),
            confidence="high" if left.least_s is not None else "medium",
            because=(Evidence(text=f"the log will say '{left.message}'", at_s=case.facts.at_s),),
        )


def _slower(case: Case, left: Countdown) -> str:
    """Say which rank will not have loaded by then."""
    load = report(case.facts, case.engine)
    if left.id != "post-load-barrier" or left.most_s is None or load is None:
        return ""
    slow = [rank for rank in load.ranks if rank.left_s and rank.left_s[1] > left.most_s]
    if not slow:
        return ""
    takes = max(rank.left_s[0] for rank in slow if rank.left_s)
    return f", before {enumerate_names([r.name for r in slow])} has loaded ({duration(takes)})"
