"""The rules over work that the log counts: graph capture, compiles, tuning, host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.counts import counts
from hangdoctor.findings import Evidence, Finding
from hangdoctor.rules.weights import spread_words
from hangdoctor.units import amount, duration, rate
from hangdoctor.weights import pace_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.counts import Count
    from hangdoctor.rules.case import Case

MOST_ITEMS = 12


def work_counted(case: Case) -> Iterator[Finding]:
    """Graphs are captured, or kernels compiled or tuned, and a progress bar counts them.

    What it sees: the bar's count and its own clock, so how long each item took; which item is in
    progress, and since when; the list of all items, where the log has one.
    Why it matters: the first item compiles and takes longest; the others tell how long the rest
    takes. An item that takes many times as long as those before it is where to look.
    What to do: wait as long as it says. Where one item does not end, start once with graph capture
    off, or with fewer sizes.
    """
    for work in counts(case.facts, case.engine):
        yield Finding(
            rule="work-counted",
            verdict="found",
            title=count_words(work),
            ranks=tuple(rank.name for rank in case.facts.ranks if rank.phase == work.phase)[:1],
            confidence="medium",
            because=tuple(
                Evidence(text=text, at_s=case.facts.at_s)
                for text in (_took_words(work), _left_items(work))
                if text
            ),
        )


def host_memory_allocated(case: Case) -> Iterator[Finding]:
    """Ranks allocate host memory, and say nothing meanwhile.

    What it sees: a rank's line with the amount, after which it has said nothing, and how its
    resident memory grows.
    Why it matters: pages are faulted in and pinned one by one: 59 s for 8 x 120 GB, tens of minutes
    where one thread does it, and nvidia-smi does not answer meanwhile. It looks like a hang.
    What to do: wait as long as it says. Allocate less (--hicache-size, --hicache-ratio), or huge
    pages.
    """
    tables = {each.id: each for each in case.engine.allocations}
    for name, memory in case.facts.host_memory.items():
        at_s, grown = memory.samples[-1]
        now = pace_of(memory.samples, at_s)
        left = now.left_s(max(0, memory.total_bytes - grown)) if now else None
        title = f"{name} allocates {amount(memory.total_bytes)} of {tables[memory.id].title}: "
        title += f"{'at least ' * memory.late}{amount(grown)} are there"
        title += f", {rate(now.per_s)}" if now else ", and nothing comes"
        title += f"; the rest takes {spread_words(left)}" if left and not memory.late else ""
        yield Finding(
            rule="host-memory-allocated",
            verdict="found",
            title=title,
            ranks=(name,),
            confidence="high" if now else "low",
            because=(
                Evidence(text=f"said in line {memory.number}", rank=name, log_line=memory.number),
            ),
        )


def count_words(work: Count) -> str:
    """Say in one sentence how the work stands."""
    text = f"{work.title}: {work.done} of {work.total} done"
    if work.item or work.item_s is not None:
        since = f" for {duration(work.item_s)}" if work.item_s is not None else ""
        text += f", {work.item or 'the next'} in progress{since}"
    if work.left_s is None:
        return text
    _, least_s, most_s = work.left_s
    if not least_s:
        return f"{text}; the rest takes {duration(most_s)} at the most"
    return f"{text}; the rest takes {spread_words(work.left_s)}"


def _took_words(work: Count) -> str:
    newest = work.took[-MOST_ITEMS:]
    return "took: " + ", ".join(f"{item} {s:.0f} s" for item, s in newest) if newest else ""


def _left_items(work: Count) -> str:
    more = f" and {len(work.left) - MOST_ITEMS} more" if len(work.left) > MOST_ITEMS else ""
    return "to do: " + ", ".join(work.left[:MOST_ITEMS]) + more if work.left else ""
