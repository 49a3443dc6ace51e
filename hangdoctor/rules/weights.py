"""Rules over the load of the weights: how far it is, and whether storage still delivers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.findings import Evidence, Finding, enumerate_names
from hangdoctor.loads import report, stalls
from hangdoctor.rules.case import evidence, judge, quiet, stands, storage_patience_s
from hangdoctor.units import amount, duration, rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.loads import Download, LoadReport, RankLoad
    from hangdoctor.rules.case import Case

DOES = {
    "reading": "reads",
    "copying": "has read all, and copies to the GPU",
    "post-processing": "post-processes the weights",
    "waiting": "waits for the others",
    "stalled": "has stalled",
    "unknown": "shows nothing of what it loads",
}


def weights_loading(case: Case) -> Iterator[Finding]:
    """The weights are being loaded, or still downloaded.

    What it sees: the files of the checkpoint; of those that the ranks hold open or mapped the
    offset and the resident pages; the bar; the stacks.
    Why it matters: a load is slow for many reasons and hung for few. What is read, how fast, and
    how long the rest takes decides whether to wait.
    What to do: wait as long as it says; the slowest rank decides. Where storage is slow, copy the
    checkpoint to a local disk for the next start.
    """
    load = report(case.facts, case.engine)
    if load is None or case.facts.at_s is None:
        return
    if load.download is not None:
        yield _downloading(case, load, load.download)
        return
    ranks = [rank for rank in load.ranks if rank.doing != "unknown"]
    if not ranks:
        return
    first = next((rank for rank in ranks if rank.name == load.slowest), None) or _first(ranks)
    yield Finding(
        rule="weights-loading",
        verdict="found",
        title=load_words(load, first),
        ranks=tuple(rank.name for rank in ranks),
        phase="weights",
        confidence="high" if first.pace is not None else "medium",
        because=evidence(
            _of_checkpoint(case, load),
            *(
                Evidence(text=rank_words(rank, load), rank=rank.name, at_s=case.facts.at_s)
                for rank in load.ranks[:8]
            ),
        ),
    )


def shard_stalled(case: Case) -> Iterator[Finding]:
    """Storage delivers no more of the weights.

    What it sees: every rank in the weights, ranks that hold a file of which a part is still to
    come, and neither its offset nor its resident pages, nor anything else, that moved for long:
    ten times the longest pause of this very load; five minutes where a network stands behind it.
    Why it matters: state D is the same for a slow read and for one that never ends. What comes of
    the file is not.
    What to do: read the file's next part by hand. Where that hangs too it is the storage.
    """
    facts, graph = case.facts, case.graph
    present = [rank for rank in facts.ranks if rank.present]
    stalled = tuple(rank for rank in present if rank.phase == "weights" and stalls(facts, rank))
    load = report(facts, case.engine)
    if load is None or not stalled or len(stalled) + len(graph.waiting) < len(present):
        return
    if any(rank.moving is not False for rank in stalled) or not set(stalled) <= set(
        graph.elsewhere
    ):
        return
    if facts.loading is None or facts.loading.grew_at_s is None:
        return  # nothing of it was ever seen to come: what stands still says so without a name
    files = enumerate_names(list(dict.fromkeys(r.file for r in load.ranks if r.file))[:3])
    names = [rank.name for rank in stalled]
    still_s = (facts.at_s or 0.0) - facts.loading.grew_at_s
    yield judge(
        case,
        stalled,
        Finding(
            rule="shard-stalled",
            verdict="found",
            title=f"nothing more comes of {files or 'the weights'} for {enumerate_names(names)}, "
            f"since {duration(still_s)}"
            + (f": the file system is {load.storage}" if load.storage else ""),
            ranks=tuple(names),
            # Where all wait for the same storage, no rank is to blame.
            culprits=tuple(names) if len(names) < len(present) else (),
            phase="weights",
            confidence="medium",
            because=evidence(
                Evidence(
                    text=f"the longest pause before was {facts.loading.longest_pause_s:.0f} s, in "
                    f"{facts.loading.readings} readings"
                ),
                _of_checkpoint(case, load),
                *(
                    Evidence(text=rank_words(rank, load), rank=rank.name, at_s=facts.at_s)
                    for rank in load.ranks[:4]
                ),
                *(item for rank in stalled[:2] for item in (stands(case, rank), quiet(case, rank))),
            ),
        ),
        needed_s=storage_patience_s(case),
        waiters=graph.waiting,
    )


def _downloading(case: Case, load: LoadReport, download: Download) -> Finding:
    does = f"come at {rate(download.pace.per_s)}" if download.pace else "have not been seen to come"
    share = f"{amount(download.done_bytes)} are there"
    if download.total_bytes:
        share += f", {100 * download.done_bytes / download.total_bytes:.0f} % of "
        share += amount(download.total_bytes)
    left = f"; the rest takes {spread_words(download.left_s)}" if download.left_s else ""
    return Finding(
        rule="weights-loading",
        verdict="found",
        title=f"the weights are being downloaded: they {does}, {share}{left}",
        ranks=tuple(rank.name for rank in load.ranks),
        phase="weights",
        confidence="high" if download.pace else "medium",
        because=evidence(_of_checkpoint(case, load)),
    )


def load_words(load: LoadReport, first: RankLoad) -> str:
    """Say in one sentence how the load stands, by the rank that decides."""
    share = ""
    if load.total_bytes:
        share = f", {100 * first.read_bytes / load.total_bytes:.0f} % of {amount(load.total_bytes)}"
    where = f" from {load.storage}" if load.storage and first.doing == "reading" else ""
    does = DOES[first.doing]
    if first.pace is not None:
        does = f"reads {rate(first.pace.per_s)}{where}"
    left = f"; the rest takes {left_words(first)}" if first.left_s else ""
    who = f"{first.name}, the slowest," if load.slowest == first.name else first.name
    return f"{who} {does}{share}{left}"


def left_words(rank: RankLoad) -> str:
    """Say how long the rest takes."""
    if rank.left_s is None:
        return ""
    return spread_words(rank.left_s, about="at most" if rank.at_most else "about")


def spread_words(left_s: tuple[float, float, float], about: str = "about") -> str:
    """Say a time with its spread.

    >>> spread_words((90.0, 80.0, 1200.0))
    'about 90 s (80 s to 20 min)'
    """
    now_s, least_s, most_s = left_s
    return f"{about} {duration(now_s)} ({duration(least_s)} to {duration(most_s)})"


def rank_words(rank: RankLoad, load: LoadReport) -> str:
    """Say how the load of one rank stands, with what it rests on."""
    does = DOES[rank.doing]
    if rank.pace is not None:
        window = f", over the last {rank.pace.window_s:.0f} s"
        does = f"reads {rate(rank.pace.per_s)}{window}"
    elif rank.doing == "stalled" and rank.still_s is not None:
        does = f"has read nothing for {duration(rank.still_s)}"
    total = f" of {amount(load.total_bytes)}" if load.total_bytes else ""
    file = f", now {rank.file}" if rank.file and rank.doing in ("reading", "stalled") else ""
    left = f", the rest takes {left_words(rank)}" if rank.left_s else ""
    return f"{rank.name} {does}: {amount(rank.read_bytes)}{total}{file}{left}"


def _first(ranks: list[RankLoad]) -> RankLoad:
    """Return the rank to speak of: one that reads, else the first that does not wait."""
    ordered = ("stalled", "reading", "post-processing", "copying", "waiting", "unknown")
    return min(ranks, key=lambda rank: ordered.index(rank.doing))


def _of_checkpoint(case: Case, load: LoadReport) -> Evidence | None:
    if not load.directory:
        return None
    parts = [f"{load.directory}: {load.files or 0} files"]
    if load.total_bytes:
        parts.append(amount(load.total_bytes))
    if load.storage:
        parts.append(f"on {load.storage}" + (f" ({load.source})" if load.source else ""))
    if load.cached_bytes is not None and load.total_bytes:
        parts.append(f"{100 * load.cached_bytes / load.total_bytes:.0f} % in the page cache")
    if load.bar:
        parts.append(f"bar at {load.bar[0]}/{load.bar[1]}")
    return Evidence(text=", ".join(parts), at_s=case.facts.at_s)
