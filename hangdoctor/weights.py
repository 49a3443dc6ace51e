"""How far each rank has read the checkpoint, how fast, and how long the rest will take.

A fold like `facts`, of which it is a part: `loading = see_weights(loading, ...)`. It keeps a
bounded amount. Rates and remaining times are computed from it where they are shown.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.model import Checkpoint, HeldFile, Missing, Struct, Weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NETWORK = (
    "nfs",
    "lustre",
    "ceph",
    "cifs",
    "smb",
    "9p",
    "gpfs",
    "beegfs",
    "glusterfs",
    "afs",
    "gfs",
)
"""Beginnings of types of file systems that a network stands behind: they fail over, for minutes."""
SAMPLES_KEPT = 200
FIRST_WINDOW_S = 8.0
"""A rate is measured over so long at least; and over several of the gaps between two readings."""
GAPS = 4.0
SAME_RATE = 0.2
"""Two rates that differ by no more are one: the window grows back over the earlier one."""
LOOKED_INTO_LOOKS = 2
"""A file that so many looks in a row found open was not only looked into."""
HIDDEN_FACTOR = 2.0
"""A file that is read unseen may take so many times as long as the last ones went."""
MOST_SPREAD = 10.0
"""Of the rate now, to the lowest that is told: a moment without any says nothing of the rest."""
READ_SHARE = 0.1
"""A file of which less was seen, and which was closed again, was only looked into."""
LEAST_BYTES_PER_S = 64 * 1024
"""Slower is no load. As for a process's reads."""
STEADY_READINGS, STEADY_S = 5, 10.0
"""A load that was seen to advance so often, over so long, tells how long its pauses are."""
MOST_LOADED_FILES = 4000

Sample = tuple[float, int, int, int]
"""Time; bytes of finished files; resident bytes of mapped ones; bytes that were read of others."""


class FileRead(Struct, frozen=True):
    """What a process has read of a file: at the most that was seen.

    Attributes:
        read_bytes: offset, or resident bytes where it is mapped.
        size_bytes: None where not known.
        mapped, held: it is mapped; it was held at the last look.
        looks: how many looks in a row found it held.
        passed: it is held, and another one grows in its place.
    """

    read_bytes: int = 0
    size_bytes: int | None = None
    mapped: bool = False
    held: bool = True
    looks: int = 0
    passed: bool = False


class RankRead(Struct, frozen=True):
    """What one process has read of the checkpoint.

    Attributes:
        files: by path.
        rss_bytes: its private memory when an offset last moved; flight_bytes: how much that has
            grown since: read() into a new buffer moves the offset only when all of it has come.
        samples: the newest last.
        first_at_s: of the first look at it; grew_at_s: when it was last seen to read.
        from_start: it held nothing yet at the first look.
    """

    files: dict[str, FileRead] = {}
    rss_bytes: int | None = None
    flight_bytes: int = 0
    samples: tuple[Sample, ...] = ()
    first_at_s: float = 0.0
    grew_at_s: float | None = None
    from_start: bool = True


class Loading(Struct, frozen=True):
    """The load of the weights, as it has been seen.

    Attributes:
        checkpoint: as last seen; why_not: why it was not, where it never was.
        ranks: by pid.
        grew_at_s: when any of it last grew; readings: how often it did.
        began_at_s: when it was first seen to; longest_pause_s: between two readings that grew.
        downloads: times, and the bytes that were there of all files of weights, while some of them
            were still being downloaded; the newest last.
        took_s: what a look at what the ranks hold costs: of the last two, the cheaper one;
            last_took_s: what the last one cost.
    """

    checkpoint: Checkpoint | None = None
    why_not: Missing | None = None
    ranks: dict[int, RankRead] = {}
    unseen: dict[int, Missing] = {}
    grew_at_s: float | None = None
    began_at_s: float | None = None
    longest_pause_s: float = 0.0
    readings: int = 0
    downloads: tuple[tuple[float, int], ...] = ()
    took_s: float = 0.0
    last_took_s: float = 0.0

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all files of weights; None where they were not seen."""
        if self.checkpoint is None or not self.checkpoint.files:
            return None
        return sum(file.size_bytes for file in self.checkpoint.files) or None

    @property
    def unfinished(self) -> bool:
        """Whether a download still writes some of them."""
        return self.checkpoint is not None and bool(self.checkpoint.unfinished)

    @property
    def storage(self) -> str:
        """Type of the file system that the weights lie on; "" where not known."""
        mount = self.checkpoint.mount if self.checkpoint else None
        return mount.type if mount else ""

    @property
    def on_network(self) -> bool:
        """Whether they lie behind a network, or that is not known."""
        return not self.storage or self.storage.startswith(NETWORK)

    @property
    def steady(self) -> bool:
        """Whether the load was seen to advance for long enough to know its pauses."""
        if self.began_at_s is None or self.grew_at_s is None:
            return False
        return self.readings >= STEADY_READINGS and self.grew_at_s - self.began_at_s >= STEADY_S


class Pace(Struct, frozen=True):
    """How fast something goes, and how long the rest will take.

    Attributes:
        per_s: the rate now; low_per_s, high_per_s: over other spans of the time that was watched.
        window_s: what the rate was measured over.
        ago_s: how long ago that ended: what has come since is not seen.
    """

    per_s: float
    low_per_s: float
    high_per_s: float
    window_s: float
    ago_s: float = 0.0

    def left_s(self, left: float) -> tuple[float, float, float]:
        """Return how long so much more will take: as it goes now, at the least, at the most."""
        now_s, least_s, most_s = (
            max(0.0, left / each - self.ago_s)
            for each in (self.per_s, self.high_per_s, self.low_per_s)
        )
        return now_s, least_s, most_s


def see_weights(
    loading: Loading | None,
    weights: Weights,
    private_bytes: Mapping[int, int],
    at_s: float,
) -> tuple[Loading, dict[int, tuple[float, str]]]:
    """Take in a look at the weights.

    Args:
        loading: before; None before the first.
        weights: the look.
        private_bytes: resident memory of the loaders that no file backs, by pid.
        at_s: recording time.

    Returns:
        The new state, and for each process that has read since the last look its bytes a second
        and the file that it reads.
    """
    before = loading or Loading()
    checkpoint, why_not = before.checkpoint, before.why_not
    grown_files = 0
    downloads = before.downloads
    if isinstance(weights.checkpoint, Checkpoint):
        grown_files = _downloaded(checkpoint, weights.checkpoint)
        there = (*weights.checkpoint.files, *weights.checkpoint.unfinished)
        sample = (at_s, sum(file.size_bytes for file in there))
        downloads = (*downloads[-SAMPLES_KEPT:], sample) if weights.checkpoint.unfinished else ()
        checkpoint, why_not = weights.checkpoint, None
    elif isinstance(weights.checkpoint, Missing):
        why_not = weights.checkpoint
    sizes = {file.path: file.size_bytes for file in checkpoint.files} if checkpoint else {}
    ranks = dict(before.ranks)
    moved: dict[int, tuple[float, str]] = {}
    for pid, held in weights.held.items():
        if isinstance(held, Missing):
            continue
        old = ranks.get(pid)
        ranks[pid] = now = _see_rank(old, held, private_bytes.get(pid), sizes, at_s)
        if old is not None and old.samples and now.grew_at_s == at_s:
            seconds = at_s - old.samples[-1][0]
            grown = read_bytes(now) - read_bytes(old)
            moved[pid] = (grown / seconds if seconds > 0 else 0.0, _newest(now))
    changes: dict[str, object] = {}
    if moved or grown_files:
        pause_s = at_s - before.grew_at_s if before.grew_at_s is not None else 0.0
        changes = {
            "grew_at_s": at_s,
            "began_at_s": at_s if before.began_at_s is None else before.began_at_s,
            "longest_pause_s": max(before.longest_pause_s, pause_s),
            "readings": before.readings + 1,
        }
    now_loading = msgspec.structs.replace(
        before,
        checkpoint=checkpoint,
        why_not=why_not,
        downloads=downloads,
        ranks=ranks,
        unseen={pid: held for pid, held in weights.held.items() if isinstance(held, Missing)},
        **changes,
    )
    return now_loading, moved


def read_bytes(rank: RankRead) -> int:
    """Return how much of the checkpoint a process has come through, as far as that was seen."""
    return _progress(rank.samples[-1], _touched(rank)) if rank.samples else 0


def pace(rank: RankRead, at_s: float) -> Pace | None:
    """Return how fast a process reads; None before enough was seen, or where it does not."""
    share = _touched(rank)
    series = [(sample[0], _progress(sample, share)) for sample in rank.samples]
    hidden_bytes = _hidden_bytes(rank)
    if not hidden_bytes:
        return pace_of(series, at_s)
    # What a read() into memory that was there already brings is not seen before all has come.
    last_s = _last_advance_s(series)
    now = pace_of([point for point in series if point[0] <= last_s], last_s)
    if now is None or at_s - last_s > HIDDEN_FACTOR * hidden_bytes / now.per_s:
        return pace_of(series, at_s)
    return msgspec.structs.replace(now, ago_s=at_s - last_s)


def pace_of(series: Sequence[tuple[float, float]], at_s: float) -> Pace | None:
    """Return how fast a count grows that was read now and then.

    The window is the newest few seconds, or some gaps between two advances where those are longer;
    it grows back for as long as what is earlier went at the same rate, so that a change is followed
    at once and steady progress is measured over long.

    Args:
        series: times and counts, the oldest first.
        at_s: now.

    >>> quick = [(t, 100.0 * t) for t in range(0, 60, 2)]
    >>> slow = [(t, 5900 + 10.0 * (t - 59)) for t in range(60, 82, 2)]
    >>> pace_of(quick, 58).per_s, round(pace_of(quick + slow, 80).per_s)
    (100.0, 10)
    """
    # Before the first bytes came it was not slow: it had not begun.
    series = series[next((i for i, (_, n) in enumerate(series) if n > series[0][1]), 0) :]
    if len(series) < 3 or series[-1][0] - series[0][0] < FIRST_WINDOW_S / 2:
        return None
    end_s, _end = series[-1]
    first_s = series[0][0]
    span_s = end_s - first_s
    gap_s = _gap_s(series, end_s)
    if at_s - _last_advance_s(series) > max(FIRST_WINDOW_S, GAPS * gap_s):
        return None
    window_s = min(span_s, max(FIRST_WINDOW_S, GAPS * gap_s))
    # From an advance on: where they come in steps, half a step more or less is much.
    from_s = max((t for t in _advances_s(series) if t <= end_s - window_s), default=first_s)
    window_s = first = end_s - from_s
    rate = _rate(series, end_s - window_s, end_s)
    rates = [rate]
    while window_s < span_s:
        earlier_s = end_s - 2 * window_s
        earlier = _rate(series, max(earlier_s, first_s), end_s - window_s)
        if abs(earlier - rate) > SAME_RATE * max(earlier, rate):
            break
        rates.append(earlier)
        window_s = min(2 * window_s, span_s)
        rate = _rate(series, end_s - window_s, end_s)
    if rate <= 0:
        return None
    # The spread: what the rate was over other parts of what is still of the same kind.
    rates += [_rate(series, end_s - first * part, end_s) for part in (0.5, 1.0)]
    rates = [each for each in (*rates, rate) if each > 0]
    return Pace(
        per_s=rate,
        low_per_s=max(0.9 * min(rates), rate / MOST_SPREAD),
        high_per_s=max(rates) * 1.1,
        window_s=window_s,
    )


def _see_rank(
    old: RankRead | None,
    held: tuple[HeldFile, ...],
    private_bytes: int | None,
    sizes: Mapping[str, int],
    at_s: float,
) -> RankRead:
    before = old or RankRead(first_at_s=at_s, from_start=not held)
    reads_whole = any(_came_whole(file) for file in before.files.values())
    files = {
        path: _let_go(file, before.flight_bytes, reads_whole=reads_whole) if file.held else file
        for path, file in before.files.items()
    }
    offsets_moved = False
    advanced: set[str] = set()
    for each in held:
        known = before.files.get(each.path, FileRead())
        mapped = each.resident_bytes is not None
        seen = each.resident_bytes if each.resident_bytes is not None else each.position or 0
        read = max(known.read_bytes if known.mapped == mapped else 0, seen)
        offsets_moved = offsets_moved or (not mapped and read != known.read_bytes)
        size = each.size_bytes if each.size_bytes is not None else sizes.get(each.path)
        if read > known.read_bytes:
            advanced.add(each.path)
        files[each.path] = FileRead(
            read_bytes=read,
            size_bytes=size or known.size_bytes,
            mapped=mapped,
            looks=known.looks + 1 if known.held else 1,
            passed=known.passed,
        )
    if advanced:
        files |= {
            path: msgspec.structs.replace(file, passed=path not in advanced)
            for path, file in files.items()
            if file.held and file.mapped and file.read_bytes >= READ_SHARE * (file.size_bytes or 0)
        }
    if len(files) > MOST_LOADED_FILES:
        files = {path: file for path, file in files.items() if file.held}
    changed_hands = {p for p, f in files.items() if f.held} != {
        p for p, f in before.files.items() if f.held
    }
    rss, flight = before.rss_bytes, before.flight_bytes
    waiting = sum(
        max(0, (file.size_bytes or 0) - file.read_bytes)
        for file in files.values()
        if file.held and not file.mapped
    )
    if private_bytes is not None:
        if rss is None or offsets_moved or changed_hands or private_bytes < rss or not waiting:
            rss, flight = private_bytes, 0
        flight = min(waiting, max(flight, private_bytes - rss))
    now = msgspec.structs.replace(before, files=files, rss_bytes=rss, flight_bytes=flight)
    sample = _sample(now, at_s)
    samples = _thinned((*before.samples, sample))
    grew = False
    if before.samples:
        share = _touched(now)
        seconds = at_s - before.samples[-1][0]
        grown = _progress(sample, share) - _progress(before.samples[-1], share)
        grew = grown > LEAST_BYTES_PER_S * seconds
    return msgspec.structs.replace(
        now, samples=samples, grew_at_s=at_s if grew else before.grew_at_s
    )


def _hidden_bytes(rank: RankRead) -> int:
    """Return the size of the file that a process may be reading unseen; 0 for none."""
    if rank.flight_bytes:
        return 0
    return max(
        (
            file.size_bytes or 0
            for file in rank.files.values()
            if file.held and not file.mapped and not file.read_bytes
        ),
        default=0,
    )


def _let_go(file: FileRead, flight_bytes: int, *, reads_whole: bool) -> FileRead:
    """Return a file as it stands once it is held no more.

    One whose bytes were under way in a single read() was closed because all of them had come: they
    were seen to, or it was held for longer than it takes to look into it, or that is how this
    process reads.
    """
    size = file.size_bytes or 0
    read = file.read_bytes
    if size and not file.mapped:
        seen = read + flight_bytes >= READ_SHARE * size
        read = size if seen or reads_whole or file.looks >= LOOKED_INTO_LOOKS else read
    return msgspec.structs.replace(file, held=False, passed=False, read_bytes=read)


def _came_whole(file: FileRead) -> bool:
    return not (file.held or file.mapped) and 0 < (file.size_bytes or 0) <= file.read_bytes


def _sample(rank: RankRead, at_s: float) -> Sample:
    finished = mapped = other = 0
    for file in rank.files.values():
        if not file.held or file.passed:
            size = file.size_bytes or file.read_bytes
            finished += size if file.read_bytes >= READ_SHARE * size else file.read_bytes
        elif file.mapped:
            mapped += file.read_bytes
        else:
            other += file.read_bytes
    return at_s, finished, mapped, other + rank.flight_bytes


def _touched(rank: RankRead) -> float:
    """Return which part of a mapped file a process touches: of each tensor its slice, perhaps."""
    done = [
        file
        for file in rank.files.values()
        if file.mapped
        and (not file.held or file.passed)
        and file.size_bytes
        and file.read_bytes >= READ_SHARE * file.size_bytes
    ]
    size = sum(file.size_bytes or 0 for file in done)
    return min(1.0, sum(file.read_bytes for file in done) / size) if size else 1.0


def _progress(sample: Sample, touched: float) -> int:
    return sample[1] + int(sample[2] / touched) + sample[3]


def _newest(rank: RankRead) -> str:
    held = [path for path, file in rank.files.items() if file.held]
    return held[-1].rpartition("/")[2] if held else ""


def _downloaded(before: Checkpoint | None, now: Checkpoint) -> int:
    """Return the bytes by which files grew that a download writes."""
    if before is None:
        return 0
    sizes = {file.path: file.size_bytes for file in before.unfinished}
    return sum(
        max(0, file.size_bytes - sizes[file.path]) for file in now.unfinished if file.path in sizes
    )


def _thinned(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Drop every other one of the older half where there are too many."""
    if len(samples) <= SAMPLES_KEPT:
        return samples
    half = len(samples) // 2
    return (*samples[:half:2], *samples[half:])


def _rate(series: Sequence[tuple[float, float]], from_s: float, to_s: float) -> float:
    """Return the mean rate between two times, the count in between read as a straight line."""
    from_s = max(from_s, series[0][0])
    return (_at(series, to_s) - _at(series, from_s)) / (to_s - from_s) if to_s > from_s else 0.0


def _at(series: Sequence[tuple[float, float]], at_s: float) -> float:
    before = series[0]
    for point in series:
        if point[0] >= at_s:
            span = point[0] - before[0]
            part = (at_s - before[0]) / span if span > 0 else 1.0
            return before[1] + part * (point[1] - before[1])
        before = point
    return series[-1][1]


def _gap_s(series: Sequence[tuple[float, float]], end_s: float) -> float:
    """Return the usual time between two advances in the last minute."""
    advances = [at_s for at_s in _advances_s(series) if at_s >= end_s - 60]
    gaps = [later - earlier for earlier, later in itertools.pairwise(advances)]
    return sorted(gaps)[len(gaps) // 2] if gaps else 0.0


def _last_advance_s(series: Sequence[tuple[float, float]]) -> float:
    return max(_advances_s(series), default=series[0][0])


def _advances_s(series: Sequence[tuple[float, float]]) -> list[float]:
    return [point[0] for before, point in itertools.pairwise(series) if point[1] > before[1]]
