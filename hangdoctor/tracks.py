"""One process over time: what of it moved between two looks, and what only span.

*Moving* is progress towards the next milestone. Bytes from regular files, memory that grows
beyond all it had, a stack never seen before, and work of descendants count. CPU alone, and bytes
on eventfds, pipes and sockets do not: a stuck rank can read 13 MB/s from an eventfd.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor.busy import Busy, BusyStack, busy_threads, is_runaway, see_busy_stacks
from hangdoctor.frames import find_wait, main_thread, python_frames, same_shape, shape
from hangdoctor.model import (
    Frame,
    Missing,
    OpenFile,
    Process,
    ProcessStacks,
    ProcessWaits,
    Struct,
    ThreadWait,
)
from hangdoctor.units import rate
from hangdoctor.waits import same_wait

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from hangdoctor.engines import Wait

DISK_BYTES_PER_S = 64 * 1024
"""Slower reading is a log or an import, not a load: the slowest load on record made 28 MiB/s."""
GROWTH_BYTES = 4 << 20
"""Growth of resident memory below this is an allocator's noise."""
FILE_GROWTH_BYTES = 1 << 20
GROWTH_WINDOW_S = 10.0
"""Growth adds up for so long: eight ranks that share a slow network file system get little each."""
WRITE_BYTES_PER_S = 1 << 20
"""A download that fills a file, or a compiler's output; logs are slower."""
EXIT_CPU_S = 0.05
"""More than a process needs to end: 16 idle workers of an inductor pool took 0.19 s together."""
EXIT_BYTES = 128 << 20
"""What takes time is to give memory back: one that has less, such as a shell, needs less."""
SHAPES_REMEMBERED = 32
"""A stack seen among the last so many different ones is not progress but a loop."""
STORAGE_WAITS = (
    "request_wait_answer",
    "fuse_",
    "nfs",
    "rpc_wait",
    "folio_wait",
    "wait_on_page",
    "io_schedule",
    "cl_sync_io",
    "ll_",
    "ceph_",
    "netfs_",
    "p9_",
)
"""Beginnings of kernel functions (/proc/PID/wchan) in which a thread waits for a file system."""
OUTER_FRAMES = 3
"""Frames kept of the threads besides the main thread, to say where they stand."""
WORKERS = ("ThreadPoolExecutor",)
"""Threads besides the main thread that do a rank's own work; all others only keep it company."""


class Track(Struct, frozen=True):
    """What is known of one process.

    Attributes:
        process: as last seen.
        role, rank: what it is in the launch; rank is None for processes that are none.
        owner: pid of the nearest ancestor with a role of its own; None for such a process itself.
        first_at_s, seen_at_s: recording time of the first and the last look at it.
        present: it was there at the last look at processes.
        exit_status: as in Processes.ended, or of a zombie.
        ended_at_s: since when it is gone or a zombie.
        stopped_since_s: since when it is in state T or t.
        cpu_pct: of one core, between the last two looks.
        children_pct: the same of the children that it has waited for in between, as far as they
            used it since they were last seen; reaped_s: of what is no news, what its counter is
            still to take in.
        sleeps_per_s: how often its main thread went to sleep in between.
        compiles: it is a compiler or a build tool, by its command line.
        observes: it is a program that looks at processes, by its command line.
        observed_at_s: when such a one was last seen below it, or holding it, or in the log.
        logged_line: where the log's newest stack of it begins.
        lent_since_s: since when its only progress is CPU of descendants that are no compilers;
            lent_at_s: when that counted last.
        compiled_at_s: when a compiler was last seen at work below it.
        write_calls_per_s, bytes_per_write, read_calls_per_s, bytes_per_read: from /proc/PID/io.
        busy: its threads that used CPU between the last two looks; busy_stacks: what the dumps
            showed of them, by thread id.
        stops: by thread, how often we stopped it to peek at it since its counters were last read:
            each counts there as a sleep.
        files: its descriptors when they were last looked at; files_missing: what was left out.
        runaway_since_s: since then it makes tiny writes at a rate no event explains.
        peak_rss_bytes: the most it had GROWTH_WINDOW_S ago, or when it last moved by growing.
        positions: offsets of its open files at files_at_s, by descriptor and path.
        peak_rss_at_s: when that was.
        peak_rss_file_bytes: the most of files that it had when that last counted as progress.
        stack: Python frames of the main thread, innermost first; None where never seen.
        stack_missing: why the last dump of it failed.
        dumps: how often it was dumped.
        settled_at_s: time of the last dump with a stack that was new; settled_dumps: how many
            dumps there were since, that one included.
        wait: the wait that its stack stands in, and the index of that frame.
        held_since_s: time of the first of the dumps in a row that show it in this same operation.
        idle_at_s: time of the last dump that showed it waiting for requests.
        python_tids: threads that its last dump listed, in our numbers; empty where not known.
        gil_tid: of them the one that held the GIL.
        stands: of them the names and innermost frames.
        waits: its blocked threads when they were last looked at; waits_missing: why they could not
            be looked at after that.
        waits_at_s: when that was.
        blocked_since: by thread, the time of the first look at the wait that it is still in.
        awake: threads that wait for Python's lock and were awake at the last look.
        gil_wait_at_s: of those that wait for it, when each was last seen asleep there.
        shared_work_at_s: when a card of it last worked that others are on as well: for it or them.
        moved_at_s: when it last moved; None if never seen to.
        moved_by: how, for people.
    """

    process: Process
    role: str = ""
    rank: str | None = None
    owner: int | None = None
    first_at_s: float = 0.0
    seen_at_s: float = 0.0
    present: bool = True
    exit_status: int | None = None
    ended_at_s: float | None = None
    stopped_since_s: float | None = None
    cpu_pct: float | None = None
    children_pct: float | None = None
    reaped_s: float = 0.0
    sleeps_per_s: float | None = None
    compiles: bool = False
    observes: bool = False
    observed_at_s: float | None = None
    logged_line: int = 0
    lent_since_s: float | None = None
    lent_at_s: float | None = None
    compiled_at_s: float | None = None
    write_calls_per_s: float | None = None
    bytes_per_write: float | None = None
    read_calls_per_s: float | None = None
    bytes_per_read: float | None = None
    busy: tuple[Busy, ...] = ()
    busy_stacks: dict[int, BusyStack] = {}
    stops: dict[int, int] = {}
    files: tuple[OpenFile, ...] | None = None
    files_missing: Missing | None = None
    runaway_since_s: float | None = None
    peak_rss_bytes: int = 0
    peak_rss_at_s: float = 0.0
    peak_rss_file_bytes: int = 0
    positions: dict[tuple[int, str], int] = {}
    files_at_s: float = 0.0
    stack: tuple[Frame, ...] | None = None
    stack_at_s: float | None = None
    stack_missing: Missing | None = None
    other_threads: tuple[tuple[Frame, ...], ...] = ()
    dumps: int = 0
    settled_at_s: float | None = None
    settled_dumps: int = 0
    shapes: tuple[tuple[str, ...], ...] = ()
    wait: tuple[str, int] | None = None
    held_since_s: float | None = None
    idle_at_s: float | None = None
    python_tids: frozenset[int] = frozenset()
    gil_tid: int | None = None
    stands: dict[int, tuple[str, tuple[Frame, ...]]] = {}
    waits: ProcessWaits | None = None
    waits_missing: Missing | None = None
    waits_at_s: float = 0.0
    blocked_since: dict[int, float] = {}
    awake: frozenset[int] = frozenset()
    gil_wait_at_s: dict[int, float] = {}
    shared_work_at_s: float | None = None
    moved_at_s: float | None = None
    moved_by: str = ""


def see_process(
    track: Track | None, process: Process, at_s: float, *, reaped_s: float = 0.0
) -> Track:
    """Take in a process as it is now; derive rates, and whether it moved, from the last look.

    reaped_s: what `reaped` says that its counter of children's CPU has taken in of old work.
    """
    if track is None:
        return Track(
            process=process,
            first_at_s=at_s,
            seen_at_s=at_s,
            peak_rss_at_s=at_s,
            peak_rss_bytes=process.rss_bytes or 0,
            peak_rss_file_bytes=process.rss_file_bytes or 0,
            positions=_positions(process),
            files_at_s=at_s,
            files=process.files,
            files_missing=process.unreadable.get("fd"),
            **_state_changes(None, process, at_s),
        )
    seconds = at_s - track.seen_at_s
    if seconds <= 0:
        return track
    old_s = track.reaped_s + reaped_s
    changes: dict[str, Any] = dict(_rates(track.process, process, seconds, old_s))
    # Its counter was read before those who are gone were looked for: the rest shows next time.
    added_s = (process.children_cpu_s or 0.0) - (track.process.children_cpu_s or 0.0)
    changes["reaped_s"] = min(reaped_s, max(0.0, old_s - added_s))
    busy = busy_threads(track.process, process, seconds, track.stops)
    changes |= {"busy": busy, "stops": {}}
    counted = [thread for thread in busy if thread.write_calls_per_s is not None]
    if counted:
        runaway = any(map(is_runaway, counted))
    elif any(thread.hot for thread in process.threads):  # which has only just begun, or rests
        runaway = track.runaway_since_s is not None and not busy
    else:  # an older recording: by the process as a whole
        whole = Busy(
            tid=process.pid,
            name=process.comm,
            cpu_pct=changes["cpu_pct"],
            system_pct=0.0,
            write_calls_per_s=changes["write_calls_per_s"],
            bytes_per_write=changes["bytes_per_write"],
        )
        runaway = is_runaway(whole)
    changes["runaway_since_s"] = (track.runaway_since_s or track.seen_at_s) if runaway else None
    if changes["write_calls_per_s"] is None:
        changes["runaway_since_s"] = track.runaway_since_s
    moved_by = _progress(track, process, seconds)
    if moved_by:
        changes |= {"moved_at_s": at_s, "moved_by": moved_by}
    return msgspec.structs.replace(
        track,
        process=process,
        present=True,
        seen_at_s=at_s,
        positions=track.positions if process.files is None else _positions(process),
        files_at_s=track.files_at_s if process.files is None else at_s,
        files=track.files if process.files is None else process.files,
        files_missing=track.files_missing
        if process.files is None and "fd" not in process.unreadable
        else process.unreadable.get("fd"),
        **_peaks(track, process, at_s),
        **_state_changes(track, process, at_s),
        **changes,
    )


def reaped(known: Mapping[int, Track], present: Collection[int]) -> dict[int, float]:
    """Return by process how much CPU of children that are gone is no news, in seconds.

    A process that is waited for adds all its CPU, with that of its own children, to its parent's
    counter at once: what was seen of it before is no work of this moment, nor is its exit. One that
    was seen once since we came has done all of its work between then and the looks beside it: of a
    build of many short compilers nothing else would be left.
    """
    old_s: dict[int, float] = {}
    first_at_s = min((track.first_at_s for track in known.values()), default=0.0)
    for pid, track in known.items():
        if pid in present or not track.present:
            continue
        if first_at_s < track.first_at_s == track.seen_at_s:
            continue
        heir = track.process.ppid
        while heir in known and heir not in present and known[heir].present:
            heir = known[heir].process.ppid
        seen_s = track.process.cpu_s + (track.process.children_cpu_s or 0.0)
        rss_bytes = track.process.rss_bytes
        exit_s = EXIT_CPU_S * min(
            1.0, (EXIT_BYTES if rss_bytes is None else rss_bytes) / EXIT_BYTES
        )
        old_s[heir] = old_s.get(heir, 0.0) + seen_s + exit_s
    return old_s


def see_end(track: Track, at_s: float, status: int | None) -> Track:
    """Take in that a process is gone, and how it ended where that is known."""
    return msgspec.structs.replace(
        track,
        present=False,
        ended_at_s=at_s if track.ended_at_s is None else track.ended_at_s,
        exit_status=track.exit_status if status is None else status,
    )


def own_pids(known: Iterable[Track]) -> frozenset[int]:
    """Return the PIDs under which the driver may know processes: as seen from here, and inside."""
    pids = [(track.process.pid, track.process.inner_pid) for track in known]
    return frozenset(pid for pair in pids for pid in pair if pid is not None)


def lives(track: Track) -> bool:
    """Tell whether a process is there and no zombie."""
    return track.present and track.process.state not in "ZX"


def see_stacks(
    track: Track, stacks: ProcessStacks | Missing, at_s: float, waits: Sequence[Wait]
) -> Track:
    """Take in a dump of the process: where it stands, since when, and whether that is new."""
    if isinstance(stacks, Missing):
        return msgspec.structs.replace(track, stack_missing=stacks)
    main = main_thread(stacks)
    frames = python_frames(main) if main else ()
    if main is None or not frames:  # py-spy now and then catches a thread between two frames
        return msgspec.structs.replace(track, stack_missing=None)
    others = tuple(python_frames(thread) for thread in stacks.threads if thread is not main)
    now = shape(frames)
    workers = [
        shape(python_frames(thread))
        for thread in stacks.threads
        if thread.name.startswith(WORKERS) and thread.active
    ]
    novel = [each for each in (now, *workers) if not _remembered(each, track.shapes)]
    wait = find_wait(frames, waits)
    changes: dict[str, object] = {}
    idle = wait is not None and wait[0].kind == "idle"
    if novel and track.dumps and not idle:
        changes = {
            "moved_at_s": at_s,
            "moved_by": f"its stack changes, now in {frames[0].function}",
        }
    return msgspec.structs.replace(
        track,
        stack=frames,
        stack_at_s=at_s,
        stack_missing=None,
        other_threads=others,
        busy_stacks=see_busy_stacks(
            track.busy_stacks,
            track.busy,
            stacks,
            track.process,
        ),
        dumps=track.dumps + 1,
        settled_at_s=at_s if novel else track.settled_at_s,
        settled_dumps=1 if novel else track.settled_dumps + 1,
        shapes=(*track.shapes, *novel)[-SHAPES_REMEMBERED:],
        wait=(wait[0].id, wait[1]) if wait else None,
        held_since_s=_held_since(track, frames, wait, at_s),
        idle_at_s=at_s if idle else track.idle_at_s,
        **_threads_of(track.process, stacks),
        # A dump with native frames reads the target's libraries, and so maps pages of them.
        peak_rss_file_bytes=0 if stacks.native else track.peak_rss_file_bytes,
        **changes,
    )


def see_waits(track: Track, waits: ProcessWaits | Missing, at_s: float) -> Track:
    """Take in a look at the blocked threads: since when each has been in the wait it is in."""
    if isinstance(waits, Missing):
        return msgspec.structs.replace(track, waits_missing=waits)
    before = {wait.tid: wait for wait in track.waits.threads} if track.waits else {}
    awake = _awake(track, waits)
    seen = {wait.tid: at_s for wait in waits.threads if wait.futex == "gil"}
    waits = msgspec.structs.replace(waits, threads=(*waits.threads, *awake))
    since = {
        wait.tid: track.blocked_since.get(wait.tid, at_s)
        if wait.tid in before and same_wait(before[wait.tid], wait)
        else at_s
        for wait in waits.threads
    }
    return msgspec.structs.replace(
        track,
        waits=waits,
        waits_missing=None,
        waits_at_s=at_s,
        blocked_since=since,
        awake=frozenset(wait.tid for wait in awake),
        gil_wait_at_s={
            tid: before_s for tid, before_s in track.gil_wait_at_s.items() if tid in since
        }
        | seen,
        stops={waits.peek.tid: waits.peek.peeks} if waits.peek else {},
    )


def _awake(track: Track, waits: ProcessWaits) -> tuple[ThreadWait, ...]:
    """Return the waits for Python's lock that one look has missed.

    Who waits for it wakes every 5 ms, and then runs, or waits for a CPU: on a machine with more to
    do than CPUs in look after look. One that got the lock and goes on is missed twice as well, but
    gets it only from a holder that goes on too.
    """
    seen = {wait.tid for wait in waits.threads}
    kept = _holder_waits_on(track, waits)
    there = {thread.tid for thread in track.process.threads}
    return tuple(
        wait
        for wait in (track.waits.threads if track.waits else ())
        if wait.futex == "gil"
        and wait.tid not in seen
        and wait.tid in there
        and (wait.tid not in track.awake or (kept and waits_for_gil_holder(track, wait.tid)))
    )


def _holder_waits_on(track: Track, waits: ProcessWaits) -> bool:
    """Tell whether the thread that held Python's lock has not gone to sleep anew since."""
    before, now = (
        next((wait for wait in each.threads if wait.tid == track.gil_tid), None) if each else None
        for each in (track.waits, waits)
    )
    return (
        before is not None
        and now is not None
        and None not in (before.switches, now.switches)
        and same_wait(before, now)
    )


def waits_for_gil_holder(track: Track, tid: int) -> bool:
    """Tell whether a thread that waits for Python's lock can get it from its holder alone.

    The holder was in its wait before the dump showed it as the holder, and still is; and the thread
    was seen to wait for the lock after that wait had begun: before, it may have got it and have let
    go of it again.
    """
    since_s = track.blocked_since.get(track.gil_tid) if track.gil_tid is not None else None
    if since_s is None or track.stack_at_s is None or since_s >= track.stack_at_s:
        return False
    return track.gil_wait_at_s.get(tid, since_s) > since_s


def on_storage(process: Process) -> str | None:
    """Return what a thread waits for in a file system, in the kernel's words; "" if none does.

    None where the kernel's words could not be read.

    A thread in state D does; one that waits for FUSE, NFS or Lustre may be in state S. The threads
    of a multi-thread loader wait in the main thread's place.
    """
    for thread in process.threads:
        kernel = thread.wchan or ""
        if thread.state == "D" or (thread.state == "S" and kernel.startswith(STORAGE_WAITS)):
            return kernel if kernel not in ("", "0") else "state D"
    return None if "wchan" in process.unreadable else ""


def moved(track: Track, at_s: float, moved_by: str) -> Track:
    """Return the track with progress that was seen elsewhere: the log, the GPU, a descendant."""
    return msgspec.structs.replace(track, moved_at_s=at_s, moved_by=moved_by)


def _state_changes(track: Track | None, process: Process, at_s: float) -> dict[str, Any]:
    """Return since when a process is dead or stopped, and how a zombie ended."""
    changes: dict[str, Any] = {}
    if process.state in ("Z", "X"):
        changes["ended_at_s"] = (
            at_s if track is None or track.ended_at_s is None else track.ended_at_s
        )
        if process.exit_code is not None:
            changes["exit_status"] = os.waitstatus_to_exitcode(process.exit_code)
    stopped_since_s = track.stopped_since_s if track else None
    changes["stopped_since_s"] = (
        None if process.state not in "Tt" else at_s if stopped_since_s is None else stopped_since_s
    )
    return changes


def _rates(before: Process, now: Process, seconds: float, old_s: float) -> dict[str, float | None]:
    rates: dict[str, float | None] = {"cpu_pct": 100 * (now.cpu_s - before.cpu_s) / seconds}
    if before.children_cpu_s is not None and now.children_cpu_s is not None:
        worked_s = max(0.0, now.children_cpu_s - before.children_cpu_s - old_s)
        rates["children_pct"] = 100 * worked_s / seconds
    if before.sleeps is not None and now.sleeps is not None:
        rates["sleeps_per_s"] = (now.sleeps - before.sleeps) / seconds
    if before.io is None or now.io is None:
        nothing = ("write_calls_per_s", "bytes_per_write", "read_calls_per_s", "bytes_per_read")
        return rates | dict.fromkeys(nothing)
    writes, reads = now.io.syscw - before.io.syscw, now.io.syscr - before.io.syscr
    rates["write_calls_per_s"] = writes / seconds
    rates["read_calls_per_s"] = reads / seconds
    rates["bytes_per_write"] = (now.io.wchar - before.io.wchar) / writes if writes else None
    rates["bytes_per_read"] = (now.io.rchar - before.io.rchar) / reads if reads else None
    return rates


def _progress(track: Track, now: Process, seconds: float) -> str:
    """Say by what a process moved since the last look; empty if by nothing."""
    before = track.process
    if before.io and now.io:
        disk = (now.io.read_bytes - before.io.read_bytes) / seconds
        if disk > DISK_BYTES_PER_S:
            return f"reads {rate(disk)} from disk"
        written = (now.io.write_bytes - before.io.write_bytes) / seconds
        if written > WRITE_BYTES_PER_S:
            return f"writes {rate(written)} to disk"
    files_s = track.seen_at_s + seconds - track.files_at_s  # files are looked at less often
    for file, position in _positions(now).items():
        if position > track.positions.get(file, position):
            speed = (position - track.positions[file]) / files_s
            if speed > DISK_BYTES_PER_S:
                return f"reads {rate(speed)} of {file[1].rpartition('/')[2]}"
    since_s = max(seconds, track.seen_at_s + seconds - track.peak_rss_at_s)
    if _grown(track.peak_rss_file_bytes, now.rss_file_bytes) > FILE_GROWTH_BYTES:
        grown = _grown(track.peak_rss_file_bytes, now.rss_file_bytes)
        return f"maps {rate(grown).removesuffix('/s')} more of files"
    if _grown(track.peak_rss_bytes, now.rss_bytes) > GROWTH_BYTES:
        return f"its memory grows by {rate(_grown(track.peak_rss_bytes, now.rss_bytes) / since_s)}"
    return ""


def _held_since(
    track: Track, frames: tuple[Frame, ...], wait: tuple[Wait, int] | None, at_s: float
) -> float | None:
    """Return since when every dump shows the operation that the newest one shows."""
    if wait is None:
        return None
    if track.wait is None or track.stack is None or track.held_since_s is None:
        return at_s
    same = track.wait[0] == wait[0].id and same_shape(
        shape(track.stack[track.wait[1] :]), shape(frames[wait[1] :])
    )
    return track.held_since_s if same else at_s


def _threads_of(process: Process, stacks: ProcessStacks) -> dict[str, Any]:
    """Return the ids of Python's threads, where they are told in the numbers that we use."""
    tids = frozenset(thread.tid for thread in stacks.threads if thread.tid is not None)
    if process.inner_pid is not None or len(tids) < len(stacks.threads):
        return {"python_tids": frozenset(), "gil_tid": None, "stands": {}}
    holder = next((thread.tid for thread in stacks.threads if thread.owns_gil), None)
    stands = {
        thread.tid: (thread.name, python_frames(thread)[:OUTER_FRAMES])
        for thread in stacks.threads
        if thread.tid is not None
    }
    return {"python_tids": tids, "gil_tid": holder, "stands": stands}


def _grown(peak_bytes: int, now_bytes: int | None) -> int:
    """Return the growth beyond a peak; 0 where one of them is not known."""
    return max(0, now_bytes - peak_bytes) if peak_bytes and now_bytes else 0


def _peaks(track: Track, now: Process, at_s: float) -> dict[str, Any]:
    """Return the peaks to measure the next growth by.

    Pages of files that were never mapped before add up for ever: what is stuck maps none. Other
    memory leaks, so that its growth counts only if it is quick.
    """
    peaks: dict[str, Any] = {}
    mapped = _grown(track.peak_rss_file_bytes, now.rss_file_bytes)
    if mapped > FILE_GROWTH_BYTES or not track.peak_rss_file_bytes:
        peaks["peak_rss_file_bytes"] = now.rss_file_bytes or 0
    grown = _grown(track.peak_rss_bytes, now.rss_bytes)
    if grown > GROWTH_BYTES or at_s - track.peak_rss_at_s >= GROWTH_WINDOW_S:
        peaks["peak_rss_bytes"] = max(track.peak_rss_bytes, now.rss_bytes or 0)
        peaks["peak_rss_at_s"] = at_s
    return peaks


def _remembered(one: tuple[str, ...], shapes: Sequence[tuple[str, ...]]) -> bool:
    return any(same_shape(one, other) for other in shapes)


def _positions(process: Process) -> dict[tuple[int, str], int]:
    """Return the offsets of its open regular files, by descriptor and path."""
    return {
        (file.fd, file.target): file.position
        for file in process.files or ()
        if file.kind == "file" and file.position is not None
    }
