"""Change a recording in a way whose effect on the verdict is known: for metamorphic tests.

Each function takes a Recording and returns another one; where the log changes, it is written to
`into`, a directory of the test's own. Snapshots that do not change are shared.
"""

from __future__ import annotations

import calendar
import re
import time
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hangdoctor.findings import weakest
from hangdoctor.model import (
    Gpus,
    Installation,
    LogPosition,
    Missing,
    NcclCommunicator,
    NcclRas,
    Process,
    Processes,
    ProcessStacks,
    ProcessWaits,
    Snapshot,
    Stacks,
    Waits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Literal

    from hangdoctor.findings import Diagnosis
    from hangdoctor.model import Gpu
    from hangdoctor.recording import Recording

PID_SHIFT = 1_000_003
RENAMED = {
    "/opt/venv/lib/python3.12": "/srv/serving/py/lib/python3.12",
    "/opt/venv": "/srv/serving/py",
    "/opt/gcc": "/usr/local/toolchain",
    "/models/tiny-deepseek-v3": "/mnt/checkpoints/42/final",
    "tiny-deepseek-v3": "final",
    "labspin": "fused_sampler_ext",
}
"""Names in the recordings that are the test machine's or the fault's, not the engine's."""

_STAMP = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_STAMP_FORMAT = "%Y-%m-%d %H:%M:%S"
_FIRST_RANK_ONLY = (b"sglang is using nccl==", b"max_total_num_tokens=", b"Tree cache initialized")


def permute_ranks(recording: Recording, names: Mapping[str, str], into: Path) -> Recording:
    """Give the ranks each other's names: titles, the log's too, its prefixes, and cards along.

    Args:
        recording: of a launch.
        names: old name to new name, such as {"TP0": "TP1", "TP1": "TP0"}; a permutation.
        into: directory for the log.

    A progress bar names no rank and stays as it is.
    """
    cards = {_number(old): _number(new) for old, new in names.items()}

    def title(text: str) -> str:
        return re.sub(r"(?<=scheduler_)TP\d+", lambda m: names.get(m[0], m[0]), text)

    def line(text: bytes) -> bytes:
        return re.sub(
            rb"(?<=\d )TP\d+(?=\])|(?<=scheduler_)TP\d+",
            lambda m: names.get(m[0].decode(), m[0].decode()).encode(),
            text,
        )

    def snapshot(old: Snapshot) -> Snapshot:
        return _map(
            old,
            process=lambda process: replace(process, title=title(process.title)),
            gpus=lambda gpus: replace(
                gpus,
                cards={
                    number: _card(gpus.cards[index], number)
                    for number, index in sorted((cards.get(i, i), i) for i in gpus.cards)
                },
            ),
        )

    return _rewritten(recording, line, snapshot, into)


def multiply_rank(recording: Recording, rank: str, copies: Sequence[str], into: Path) -> Recording:
    """Add ranks that did just what one rank did: process, stacks, log lines and card.

    Args:
        recording: of a launch.
        rank: the rank to copy, such as "TP0".
        copies: names of the new ranks, such as ["TP2", "TP3"].
        into: directory for the log; its `tp_size=` becomes the new number of ranks.

    Raises:
        ValueError: no such rank.
    """
    titles = {
        process.pid: process.title
        for snapshot in recording.snapshots
        for process in _processes(snapshot)
        if process.title.startswith("sglang::scheduler")
    }
    pids = [pid for pid, title in titles.items() if title == f"sglang::scheduler_{rank}"]
    if not pids:
        raise ValueError(f"no process of rank {rank}")
    (source,) = pids
    new_pids = {name: source + PID_SHIFT * number for number, name in enumerate(copies, start=1)}
    size = str(len(titles) + len(copies)).encode()
    tag = f" {rank}]".encode()

    def line(text: bytes) -> bytes:
        text = re.sub(rb"\btp_size=\d+", b"tp_size=" + size, text)
        start = text.rfind(b"[", 0, text.find(tag) + 1)
        if start < 0 or any(literal in text for literal in _FIRST_RANK_ONLY):
            return text
        own = text[start:].rstrip(b"\r\n") + b"\n"  # without the bar it is glued to
        return text + b"".join(own.replace(tag, f" {name}]".encode()) for name in copies)

    def snapshot(old: Snapshot) -> Snapshot:
        new = old
        if isinstance(old.processes, Processes):
            added = [
                _copied(process, pid, name, rank)
                for process in old.processes.processes
                if process.pid == source
                for name, pid in new_pids.items()
            ]
            ended = dict(old.processes.ended)
            if source in ended:
                ended |= dict.fromkeys(new_pids.values(), ended[source])
            processes = replace(
                old.processes, processes=(*old.processes.processes, *added), ended=ended
            )
            new = replace(new, processes=processes)
        if isinstance(old.stacks, Stacks) and source in old.stacks.by_pid:
            by_pid = dict(old.stacks.by_pid)
            for pid in new_pids.values():
                by_pid[pid] = _shifted_stacks(by_pid[source], pid - source)
            new = replace(new, stacks=Stacks(by_pid=by_pid))
        if isinstance(old.waits, Waits) and source in old.waits.by_pid:
            waits = dict(old.waits.by_pid)
            for pid in new_pids.values():
                # Its own threads have other ids; whom they wait for is the same.
                moved = _moved_waits(waits[source], lambda one, pid=pid: one + pid - source)
                waits[pid] = _like(moved, waits[source])
            new = replace(new, waits=replace(old.waits, by_pid=waits))
        if isinstance(old.gpus, Gpus) and _number(rank) in old.gpus.cards:
            cards = dict(old.gpus.cards)
            for name, pid in new_pids.items():
                cards[_number(name)] = _card(
                    cards[_number(rank)], _number(name), lambda _, pid=pid: pid
                )
            new = replace(new, gpus=replace(old.gpus, cards=cards))
        return new

    return _rewritten(recording, line, snapshot, into)


def rename_fault(
    recording: Recording, into: Path, names: Mapping[str, str] | None = None
) -> Recording:
    """Shift all pids, and rename paths, models and functions that are not the engine's.

    Args:
        recording: of a launch.
        into: directory for the log.
        names: text to text, in this order, replaced in titles, frames, commands and the log;
            RENAMED where None.
    """
    names = RENAMED if names is None else names

    def text(old: str) -> str:
        for before, after in names.items():
            old = old.replace(before, after)
        return old

    def line(old: bytes) -> bytes:
        for before, after in names.items():
            old = old.replace(before.encode(), after.encode())
        return re.sub(
            rb"(?<=Started server process \[)\d+",
            lambda m: str(int(m[0]) + PID_SHIFT).encode(),
            old,
        )

    def process(old: Process) -> Process:
        return replace(
            old,
            pid=old.pid + PID_SHIFT,
            ppid=old.ppid + PID_SHIFT,
            title=text(old.title),
            threads=tuple(replace(thread, tid=thread.tid + PID_SHIFT) for thread in old.threads),
            files=old.files
            and tuple(replace(each, target=text(each.target)) for each in old.files),
        )

    def stacks(old: ProcessStacks | Missing) -> ProcessStacks | Missing:
        shifted = _shifted_stacks(old, PID_SHIFT)
        if isinstance(shifted, Missing):
            return shifted
        threads = tuple(
            replace(
                thread,
                frames=tuple(
                    replace(frame, function=text(frame.function), path=text(frame.path))
                    for frame in thread.frames
                ),
            )
            for thread in shifted.threads
        )
        return replace(shifted, threads=threads)

    def snapshot(old: Snapshot) -> Snapshot:
        new = _map(
            old,
            process=process,
            gpus=lambda gpus: replace(
                gpus,
                cards={
                    index: _card(card, index, lambda pid: pid + PID_SHIFT)
                    for index, card in gpus.cards.items()
                },
            ),
        )
        if isinstance(new.processes, Processes):
            shifted = replace(
                new.processes,
                roots=tuple(pid + PID_SHIFT for pid in new.processes.roots),
                ended={pid + PID_SHIFT: status for pid, status in new.processes.ended.items()},
                parents={pid + PID_SHIFT: name for pid, name in new.processes.parents.items()},
            )
            new = replace(new, processes=shifted)
        if isinstance(old.stacks, Stacks):
            by_pid = {pid + PID_SHIFT: stacks(one) for pid, one in old.stacks.by_pid.items()}
            new = replace(new, stacks=Stacks(by_pid=by_pid))
        if isinstance(old.waits, Waits):
            waits = {
                pid + PID_SHIFT: _moved_waits(one, lambda pid: pid + PID_SHIFT)
                for pid, one in old.waits.by_pid.items()
            }
            new = replace(new, waits=replace(old.waits, by_pid=waits))
        if isinstance(old.nccl_ras, NcclRas):
            new = replace(new, nccl_ras=_shifted_ras(old.nccl_ras, PID_SHIFT))
        return new

    renamed = _rewritten(recording, line, snapshot, into)
    installation = renamed.header.installation
    if isinstance(installation, Installation):
        installation = replace(installation, path=text(installation.path))
    command = tuple(text(word) for word in renamed.header.command)
    header = replace(renamed.header, command=command, installation=installation)
    return replace(renamed, header=header)


def scale_time(recording: Recording, factor: float, into: Path) -> Recording:
    """Let everything take `factor` times as long: times, ages, silences, and the log's stamps.

    Counters stay, so that rates fall. Durations that log lines name stay too.
    """
    origin_s = recording.header.created_wall_s

    def wall(old_s: float) -> float:
        return origin_s + (old_s - origin_s) * factor

    def stamp(match: re.Match[bytes]) -> bytes:
        old_s = calendar.timegm(time.strptime(match[1].decode(), _STAMP_FORMAT))
        return b"[" + time.strftime(_STAMP_FORMAT, time.gmtime(wall(old_s))).encode()

    def scaled(value: float | None) -> float | None:
        return None if value is None else value * factor

    def snapshot(old: Snapshot) -> Snapshot:
        new = _map(old, process=lambda p: replace(p, age_s=scaled(p.age_s)))
        if isinstance(old.log, LogPosition):
            new = replace(new, log=replace(old.log, silent_s=scaled(old.log.silent_s)))
        return replace(new, at_s=old.at_s * factor, wall_s=wall(old.wall_s))

    return _rewritten(recording, lambda text: _STAMP.sub(stamp, text), snapshot, into)


def drop_section(recording: Recording, section: str) -> Recording:
    """Replace a section, wherever it was observed, by Missing(permission)."""
    refused = Missing(reason="permission", detail="Operation not permitted")
    return replace(
        recording,
        snapshots=tuple(
            snapshot
            if getattr(snapshot, section) is None
            else replace(snapshot, **{section: refused})
            for snapshot in recording.snapshots
        ),
    )


def assert_no_surer(less: Diagnosis, full: Diagnosis, what: object) -> None:
    """Check what less evidence may change: the state to unknown, culprits to fewer of them."""
    assert less.state in (full.state, "unknown"), what
    assert set(less.culprits) <= set(full.culprits), what
    if less.state == full.state:
        assert weakest(less.confidence, full.confidence) == less.confidence, what
    found = {finding.rule for finding in full.findings if finding.verdict == "found"}
    state_of = {finding.rule: finding.state for finding in full.findings}
    for finding in less.findings:
        if finding.state in ("hung", "dead"):
            assert finding.rule in found, what
            assert state_of[finding.rule] == finding.state, what


def drop_reading(recording: Recording, name: Literal["io", "wchan", "syscall", "fd"]) -> Recording:
    """Take one file of /proc/PID away from all processes, as where it may not be read."""
    refused = Missing(reason="permission", detail="Operation not permitted")

    def process(old: Process) -> Process:
        found: dict[str, object] = {"unreadable": old.unreadable | {name: refused}}
        if name == "fd":
            found["files"] = None
        elif name in ("wchan", "syscall"):
            found["threads"] = tuple(replace(thread, **{name: None}) for thread in old.threads)
        if name == "io":
            found["io"] = None
        return replace(old, **found)

    def snapshot(old: Snapshot) -> Snapshot:
        if not isinstance(old.processes, Processes):
            return old
        kept = tuple(map(process, old.processes.processes))
        return replace(old, processes=replace(old.processes, processes=kept))

    return replace(recording, snapshots=tuple(map(snapshot, recording.snapshots)))


def drop_snapshot(recording: Recording, index: int) -> Recording:
    """Leave one snapshot out; the log's lines up to it come with the next one."""
    snapshots = list(recording.snapshots)
    del snapshots[index]
    return replace(recording, snapshots=tuple(snapshots))


def cut_log_head(recording: Recording, count_bytes: int, into: Path) -> Recording:
    """Cut the first bytes off the log, as rotation does: it is no longer read from its start."""
    cut = _placed(
        recording, _log(recording)[count_bytes:], lambda old: max(0, old - count_bytes), into
    )
    source = cut.header.log
    if source is None:
        return cut
    return replace(cut, header=replace(cut.header, log=replace(source, from_start=False)))


def prefix(recording: Recording, count: int, into: Path) -> Recording:
    """Return what was known after the first `count` snapshots, 1 or more."""
    snapshots = recording.snapshots[:count]
    read = max(
        (
            snapshot.log.read_bytes
            for snapshot in snapshots
            if isinstance(snapshot.log, LogPosition)
        ),
        default=0,
    )
    shorter = replace(recording, snapshots=snapshots)
    return _placed(shorter, _log(recording)[:read], lambda old: old, into)


def _rewritten(
    recording: Recording,
    line: Callable[[bytes], bytes],
    snapshot: Callable[[Snapshot], Snapshot],
    into: Path,
) -> Recording:
    """Apply one function to each line of the log, with its end, and one to each snapshot."""
    lines = _log(recording).splitlines(keepends=True) if recording.log_path else []
    new_lines = [line(text) for text in lines]
    old_ends = [0, *accumulate(map(len, lines))]
    new_ends = [0, *accumulate(map(len, new_lines))]

    def offset(old: int) -> int:
        number = bisect_right(old_ends, old) - 1  # lines that are complete there
        inside = old - old_ends[number]
        if number == len(lines):
            return new_ends[number]
        return new_ends[number] + min(inside, len(new_lines[number]))

    changed = replace(recording, snapshots=tuple(map(snapshot, recording.snapshots)))
    return _placed(changed, b"".join(new_lines), offset, into)


def _placed(
    recording: Recording, log: bytes, offset: Callable[[int], int], into: Path
) -> Recording:
    """Write a log that replaces the recording's, and move the snapshots' positions in it."""
    if recording.log_path is None:
        return recording
    into.mkdir(parents=True, exist_ok=True)
    log_path = into / recording.log_path.name
    log_path.write_bytes(log)
    snapshots = tuple(
        replace(snapshot, log=replace(snapshot.log, read_bytes=offset(snapshot.log.read_bytes)))
        if isinstance(snapshot.log, LogPosition)
        else snapshot
        for snapshot in recording.snapshots
    )
    return replace(recording, snapshots=snapshots, log_path=log_path)


def _log(recording: Recording) -> bytes:
    return recording.log_path.read_bytes() if recording.log_path else b""


def _map(
    snapshot: Snapshot,
    *,
    process: Callable[[Process], Process],
    gpus: Callable[[Gpus], Gpus] = lambda gpus: gpus,
) -> Snapshot:
    if isinstance(snapshot.processes, Processes):
        processes = tuple(map(process, snapshot.processes.processes))
        snapshot = replace(snapshot, processes=replace(snapshot.processes, processes=processes))
    if isinstance(snapshot.gpus, Gpus):
        snapshot = replace(snapshot, gpus=gpus(snapshot.gpus))
    return snapshot


def _processes(snapshot: Snapshot) -> Iterable[Process]:
    return snapshot.processes.processes if isinstance(snapshot.processes, Processes) else ()


def _copied(process: Process, pid: int, name: str, rank: str) -> Process:
    shift = pid - process.pid
    return replace(
        process,
        pid=pid,
        start_ticks=process.start_ticks + 1,
        title=process.title.replace(f"_{rank}", f"_{name}"),
        threads=tuple(replace(thread, tid=thread.tid + shift) for thread in process.threads),
    )


def _shifted_stacks(stacks: ProcessStacks | Missing, shift: int) -> ProcessStacks | Missing:
    if isinstance(stacks, Missing):
        return stacks
    threads = tuple(
        replace(thread, tid=None if thread.tid is None else thread.tid + shift)
        for thread in stacks.threads
    )
    return replace(stacks, threads=threads)


def _moved_waits(
    waits: ProcessWaits | Missing, number: Callable[[int], int]
) -> ProcessWaits | Missing:
    """Give all processes and threads that a process's waits name other numbers."""
    if isinstance(waits, Missing):
        return waits

    def moved(pid: int | None) -> int | None:
        return None if pid is None else number(pid)

    threads = tuple(
        replace(
            thread,
            tid=number(thread.tid),
            owner_tid=moved(thread.owner_tid),
            waits_for_pid=moved(thread.waits_for_pid),
            objects=tuple(
                replace(
                    each,
                    mutual=tuple(map(number, each.mutual)),
                    others=each.others
                    and tuple(replace(holder, pid=number(holder.pid)) for holder in each.others),
                )
                for each in thread.objects
            ),
        )
        for thread in waits.threads
    )
    return replace(waits, threads=threads)


def _like(moved: ProcessWaits | Missing, source: ProcessWaits | Missing) -> ProcessWaits | Missing:
    """Return the moved threads with the other ends that the source's had."""
    if isinstance(moved, Missing) or isinstance(source, Missing):
        return moved
    return replace(
        moved,
        threads=tuple(
            replace(new, objects=old.objects, waits_for_pid=old.waits_for_pid)
            for new, old in zip(moved.threads, source.threads, strict=True)
        ),
    )


def _shifted_ras(ras: NcclRas, shift: int) -> NcclRas:
    def communicator(old: NcclCommunicator) -> NcclCommunicator:
        ranks = (
            replace(one, pid=None if one.pid is None else one.pid + shift) for one in old.ranks
        )
        return replace(old, ranks=tuple(ranks))

    return replace(ras, communicators=tuple(map(communicator, ras.communicators)))


def _card(
    card: Gpu | Missing, index: int, pid: Callable[[int], int] = lambda pid: pid
) -> Gpu | Missing:
    if isinstance(card, Missing):
        return card
    processes = card.processes
    if processes is not None:
        processes = tuple(replace(process, pid=pid(process.pid)) for process in processes)
    return replace(card, index=index, processes=processes)


def _number(rank: str) -> int:
    return int(rank.removeprefix("TP"))
