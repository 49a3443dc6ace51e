"""What the load of the weights looks like now: who reads what how fast, and when it will be done.

Made from the facts where it is shown or judged; nothing is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hangdoctor.model import Struct
from hangdoctor.weights import FIRST_WINDOW_S, Pace, RankRead, pace, pace_of, read_bytes

if TYPE_CHECKING:
    from hangdoctor.engines import Engine
    from hangdoctor.facts import Facts, RankFacts
    from hangdoctor.logs.timeline import BarLog
    from hangdoctor.weights import Loading

Doing = Literal["reading", "copying", "post-processing", "waiting", "stalled", "unknown"]

LOADED_SHARE = 0.995
"""Padding and headers are not read: so much of the files is all of them."""


class RankLoad(Struct, frozen=True):
    """How one rank's load stands.

    Attributes:
        name: of the rank.
        doing: "reading"; "copying" to the GPU, once all has been read; "post-processing" the
            weights; "waiting" for the others; "stalled", a file half read and nothing coming.
        read_bytes: how much of the checkpoint it has come through.
        pace: how fast it reads; None where it does not, or not enough was seen.
        left_s: how long the rest takes: as it goes now, at the least, at the most.
        at_most: it had begun before we came, and nothing tells how far: it may be less.
        still_s: how long nothing came; None where it was never seen to read.
        file: that it reads, or read last.
    """

    name: str
    doing: Doing
    read_bytes: int = 0
    pace: Pace | None = None
    left_s: tuple[float, float, float] | None = None
    at_most: bool = False
    still_s: float | None = None
    file: str = ""


class Download(Struct, frozen=True):
    """Files of weights that are still being downloaded.

    Attributes:
        done_bytes: that are there; total_bytes: as the index says, None without one.
        pace: how fast they come; None where they do not, or not enough was seen.
        left_s: as in RankLoad.
    """

    done_bytes: int
    total_bytes: int | None = None
    pace: Pace | None = None
    left_s: tuple[float, float, float] | None = None


class LoadReport(Struct, frozen=True):
    """The load as a whole.

    Attributes:
        directory: of the checkpoint, "" where not known; storage, source: what it lies on.
        total_bytes, files: of the checkpoint; None where not known.
        cached_bytes: what of it the page cache held when it was last asked; None where not known.
        ranks: those that load; slowest: the one that the others will wait for.
        bar: files done, and all files, by the log's bar.
        download: how the files come from elsewhere, where they still do.
    """

    directory: str = ""
    storage: str = ""
    source: str = ""
    total_bytes: int | None = None
    files: int | None = None
    cached_bytes: int | None = None
    ranks: tuple[RankLoad, ...] = ()
    slowest: str = ""
    bar: tuple[int, int] | None = None
    download: Download | None = None


def report(facts: Facts, engine: Engine) -> LoadReport | None:
    """Return how the load stands; None where no rank loads, or nothing of it was seen."""
    loading, bar = facts.loading, shard_bar(facts)
    ranks = tuple(
        rank_load(facts, rank, engine)
        for rank in facts.ranks
        if rank.phase == "weights" and rank.present
    )
    if not ranks or (loading is None and bar is None):
        return None
    checkpoint = loading.checkpoint if loading else None
    cached = [file.cached_bytes for file in checkpoint.files] if checkpoint else []
    behind = [rank for rank in ranks if rank.left_s is not None]
    stalled = [rank for rank in ranks if rank.doing == "stalled"]
    slowest = max(behind, key=lambda rank: rank.left_s or (0.0,), default=None)
    if stalled:
        slowest = max(stalled, key=lambda rank: rank.still_s or 0.0)
    mount = checkpoint.mount if checkpoint else None
    return LoadReport(
        directory=checkpoint.directory if checkpoint else "",
        storage=mount.type if mount else "",
        source=mount.source if mount else "",
        total_bytes=loading.total_bytes if loading else None,
        files=len(checkpoint.files) if checkpoint and checkpoint.files else None,
        cached_bytes=sum(each or 0 for each in cached) if cached and None not in cached else None,
        ranks=ranks,
        slowest=slowest.name if slowest and len(ranks) > 1 else "",
        bar=(bar.done, bar.total) if bar else None,
        download=_download(facts),
    )


def _download(facts: Facts) -> Download | None:
    loading = facts.loading
    if loading is None or not loading.downloads or loading.checkpoint is None:
        return None
    done, total = loading.downloads[-1][1], loading.checkpoint.index_bytes
    now = pace_of(loading.downloads, facts.at_s or 0.0)
    return Download(
        done_bytes=done,
        total_bytes=total,
        pace=now,
        left_s=now.left_s(max(0, total - done)) if now and total else None,
    )


def shard_bar(facts: Facts) -> BarLog | None:
    """Return the bar of the weights that moved last."""
    bars = [bar for bar in facts.timeline.bars.values() if bar.phase == "weights" and bar.total]
    return max(bars, key=lambda bar: bar.number, default=None)


def rank_load(facts: Facts, rank: RankFacts, engine: Engine) -> RankLoad:
    """Return how the load of one rank stands."""
    loading, at_s = facts.loading, facts.at_s or 0.0
    read = loading.ranks.get(rank.pid) if loading and rank.pid is not None else None
    total = loading.total_bytes if loading else None
    bar = shard_bar(facts)
    came = read_bytes(read) if read else 0
    late = read is None or not read.from_start
    # The bar is the first rank's. Where we came late it tells how far all of them are, about.
    if bar is not None and total and (late or rank is facts.ranks[0]):
        came = max(came, int(total * bar.done / bar.total))
    full = bool(total and came >= LOADED_SHARE * total)
    full = full or (bar is not None and bar.done >= bar.total and (late or rank is facts.ranks[0]))
    now = pace(read, at_s) if read and not full else None
    grew_at_s = read.grew_at_s if read else None
    still_s = at_s - grew_at_s if grew_at_s is not None else None
    left = now.left_s(max(0, total - came)) if now and total else None
    return RankLoad(
        name=rank.name,
        doing=_doing(rank, read, engine, full=full, still_s=still_s, reads=now is not None),
        read_bytes=came,
        pace=now,
        left_s=left,
        at_most=late and bar is None,
        still_s=still_s,
        file=_file(read),
    )


def stalls(facts: Facts, rank: RankFacts) -> bool:
    """Tell whether a rank holds a file of which a part is still to come."""
    return unread_file(facts, rank) is not None


def unread_file(facts: Facts, rank: RankFacts) -> tuple[str, int] | None:
    """Return the file that a rank holds of which a part is to come, and how much has; or None."""
    read = facts.loading.ranks.get(rank.pid) if facts.loading and rank.pid is not None else None
    held = [
        (path, file.read_bytes)
        for path, file in (read.files if read else {}).items()
        if file.held and file.size_bytes is not None and _unread(file.read_bytes, file.size_bytes)
    ]
    return held[-1] if held else None


def patience_s(
    loading: Loading | None, *, network_s: float, local_s: float, least_s: float
) -> float:
    """Return how long storage must be silent before that says anything.

    Behind a network it fails over, for minutes. Else ten times the longest pause of this very load,
    where it was seen for long enough to know that.
    """
    if loading is None or loading.on_network:
        return network_s
    if not loading.steady:
        return local_s
    return min(network_s, max(least_s, PAUSES * loading.longest_pause_s))


PAUSES = 10.0
"""A load that was never silent for longer than a second is not silent for ten of them by chance."""


def _doing(
    rank: RankFacts,
    read: RankRead | None,
    engine: Engine,
    *,
    full: bool,
    still_s: float | None,
    reads: bool,
) -> Doing:
    if rank.wait is not None and rank.wait.kind in ("peers", "rendezvous"):
        return "waiting"
    functions = {frame.function.rpartition(".")[2] for frame in rank.stack or ()}
    if any(functions & set(stage.functions) for stage in engine.load_stages):
        return "post-processing"
    if full:
        return "copying"
    if reads or (still_s is not None and still_s <= FIRST_WINDOW_S):
        return "reading"
    held = read is not None and any(file.held for file in read.files.values())
    if held and still_s is not None and rank.moving is False:
        return "stalled"
    return "unknown"


def _unread(read: int, size: int) -> bool:
    return read < LOADED_SHARE * size


def _file(read: RankRead | None) -> str:
    if read is None or not read.files:
        return ""
    held = [path for path, file in read.files.items() if file.held]
    return (held or list(read.files))[-1].rpartition("/")[2]
