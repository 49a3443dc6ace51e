"""Takes the Python stacks of the launch's processes with py-spy, without stopping them.

`py-spy dump --nonblocking` only reads the target's memory. Every dump that stops the target hangs
where one of its threads is in state D, and keeps the others stopped meanwhile; so that is done
only where native frames are asked for, and never beside a thread in D, a stopped one, or a tracer.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.collect import processes, procfs
from hangdoctor.collect.permissions import refused
from hangdoctor.model import Frame, Missing, ProcessStacks, Stacks, ThreadStack

if TYPE_CHECKING:
    from hangdoctor.collect.look import Look
    from hangdoctor.collect.procfs import Stat

DUMP_DEADLINE_S = 8.0
"""For one dump; eight busy processes on two cores need 0.4 s, all of them together."""

MOST_DUMPS = 64
"""Processes dumped at once: more than the ranks, launcher and helpers of one node have."""

_GRACE_S = 1.0
_PYTHON = re.compile(r"^(?:python|pypy|pt_main_thread)", re.IGNORECASE)
# What a process calls itself, where its program may not be seen: engines set their own titles.
_PYTHON_NAME = re.compile(r"^(?:python|pypy|pt_main_thread|sglang|vllm)", re.IGNORECASE)
# Pools that torch.compile keeps, and multiprocessing's own helper: they never hold up a start.
_HELPERS = re.compile(r"multiprocessing\.\w+_tracker import main|/_inductor/compile_worker/")
_RACES = re.compile(r"Failed to copy|Bad address|No such process|os error 3\b")


class _DumpFrame(msgspec.Struct):
    name: str
    filename: str
    line: int = 0


class _DumpThread(msgspec.Struct):
    frames: list[_DumpFrame]
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool | None = None
    owns_gil: bool | None = None


_decoder = msgspec.json.Decoder(list[_DumpThread])


def read(look: Look) -> Stacks | Missing:
    """Dump all Python processes of the tree, in parallel.

    A root that is not Python is there as unsupported; other programs, such as compilers, and
    Python's own helper processes are left out.
    """
    tool = find_py_spy()
    if tool is None:
        return no_py_spy()
    stats = procfs.scan(look.proc)
    by_pid: dict[int, ProcessStacks | Missing] = {}
    tree = processes.tree(stats, look)
    python = [stats[pid] for pid in tree if _is_python(look.proc, stats[pid])]
    titles = processes.titles_of(look.proc, python)
    wanted = [pid for pid, title in titles.items() if not _HELPERS.search(title)]
    for pid in tree:
        if pid in look.roots and pid not in titles:
            name = stats[pid].comm
            by_pid[pid] = _ended(look.proc, pid) or Missing(
                reason="unsupported", detail=f"{name} is not Python"
            )
    for pid in wanted[MOST_DUMPS:]:
        by_pid[pid] = Missing(reason="not-tried", detail=f"more than {MOST_DUMPS} processes")
    wanted = wanted[:MOST_DUMPS]
    if wanted:
        with ThreadPoolExecutor(len(wanted)) as pool:
            dumps = pool.map(lambda pid: dump(tool, look.proc, pid, native=look.native), wanted)
            by_pid.update(zip(wanted, dumps, strict=True))
    return Stacks(by_pid={pid: by_pid[pid] for pid in sorted(by_pid)})


def dump(tool: str, proc: str, pid: int, *, native: bool = False) -> ProcessStacks | Missing:
    """Dump one process, twice where it was starting or changing while we looked.

    With `native`, a process that must not be stopped is dumped without native frames.
    """
    native = native and stoppable(proc, pid)
    for last in (False, True):
        if ended := _ended(proc, pid):
            return ended
        code, out, err = _run(tool, pid, native=native)
        if code is None:
            return _gave_up(proc, pid, native=native)
        if code == 0:
            try:
                return parse_dump(out, main_tids(proc, pid), native=native)
            except msgspec.DecodeError as error:
                return Missing(reason="failed", detail=f"py-spy's answer makes no sense: {error}")
        if last or not _RACES.search(err):
            break
    return _ended(proc, pid) or explain(err, proc, pid)


def parse_dump(out: bytes, main: frozenset[int] = frozenset(), *, native: bool) -> ProcessStacks:
    """Parse what `py-spy dump --json` prints; the main thread comes first.

    Args:
        out: a JSON list of threads, innermost frame first.
        main: thread ids of the main thread, as seen from here and from inside its namespace.
        native: the frames may be native ones.

    >>> parse_dump(
    ...     b'[{"thread_name": null, "os_thread_id": 8, "active": false, "owns_gil": false,'
    ...     b' "frames": []}, {"thread_name": "MainThread", "os_thread_id": 7, "active": true,'
    ...     b' "owns_gil": true, "frames": [{"name": "f", "filename": "/a.py", "line": 3}]}]',
    ...     frozenset({7}), native=False,
    ... ).threads[0]
    ThreadStack(name='MainThread', frames=(Frame(function='f', path='/a.py', line=3),), tid=7, active=True, owns_gil=True)
    """  # noqa: E501  # a value's whole text
    threads = _decoder.decode(out)
    known = any(thread.os_thread_id in main for thread in threads)

    def is_main(thread: _DumpThread) -> bool:
        # Python 3.10 and older tell no thread ids to a reader that does not stop them.
        return thread.os_thread_id in main if known else thread.thread_name == "MainThread"

    return ProcessStacks(
        threads=tuple(
            ThreadStack(
                name=thread.thread_name or "",
                frames=tuple(
                    Frame(function=frame.name, path=frame.filename, line=frame.line)
                    for frame in thread.frames
                ),
                tid=thread.os_thread_id,
                active=thread.active,
                owns_gil=thread.owns_gil,
            )
            for thread in sorted(threads, key=is_main, reverse=True)
        ),
        native=native,
    )


def explain(err: str, proc: str, pid: int) -> Missing:
    """Say in our words what py-spy's error means (texts of py-spy 0.4)."""
    detail = " / ".join(line.strip() for line in err.strip().splitlines()[:4])[:300]
    status = _status(proc, pid)
    if "Failed to find python version" in err:
        return Missing(reason="unsupported", detail="it is not a Python process")
    if (tracer := status.get("TracerPid", "0")) != "0" and "EPERM" in err:
        return Missing(
            reason="permission", detail=f"a debugger is attached: PID {tracer}", hint="detach it"
        )
    if re.search(r"Permission [Dd]enied|os error 13|EPERM|os error 1\b|not permitted", err):
        user = status.get("Uid", "").split()
        return refused(detail, int(user[1]) if len(user) > 1 else None)
    return Missing(reason="failed", detail=detail)


def stoppable(proc: str, pid: int) -> bool:
    """Tell whether a debugger may stop this process: no thread in D, T, t or Z, and no tracer."""
    try:
        tids = os.listdir(f"{proc}/{pid}/task")
        for tid in tids:
            status = procfs.parse_status(procfs.read(f"{proc}/{pid}/task/{tid}/status"))
            if status.get("State", "D")[0] in "DTtZX" or status.get("TracerPid") != "0":
                return False
    except OSError:
        return False
    return bool(tids)


def main_tids(proc: str, pid: int) -> frozenset[int]:
    """Return the ids of the main thread in all PID namespaces that we can see.

    Called after the dump, since py-spy tells the inner one where the namespaces differ.
    """
    inner = _status(proc, pid).get("NSpid", "").split()
    return frozenset({pid, *map(int, inner)})


def find_py_spy() -> str | None:
    """Return the path of py-spy: beside the Python that runs us or our own package, else on PATH.

    `pip install --target DIR` puts a script into DIR/bin, and PATH does not lead there.
    """
    for folder in (Path(sys.executable).parent, Path(__file__).parents[2] / "bin"):
        if os.access(folder / "py-spy", os.X_OK):
            return str(folder / "py-spy")
    return shutil.which("py-spy")


def no_py_spy() -> Missing:
    """Say that there is no py-spy, and how to get it."""
    return Missing(
        reason="not-installed",
        detail="py-spy is neither beside this Python or hangdoctor nor on PATH",
        hint=f"{sys.executable} -m pip install py-spy",
    )


def _is_python(proc: str, stat: Stat) -> bool:
    if stat.state == "Z":
        return False
    try:
        program = os.path.basename(os.readlink(f"{proc}/{stat.pid}/exe"))
    except OSError:
        return bool(_PYTHON_NAME.match(stat.comm))
    return bool(_PYTHON.match(program))


def _run(tool: str, pid: int, *, native: bool) -> tuple[int | None, bytes, str]:
    """Run py-spy; the status is None where it had to be given up."""
    try:
        process = subprocess.Popen(
            [tool, "dump", "--pid", str(pid), "--json", "--native" if native else "--nonblocking"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"RUST_BACKTRACE": "0"},
        )
    except OSError as error:  # py-spy belongs to somebody else, or to another machine
        return 126, b"", f"cannot start {tool}: {error.strerror}"
    try:
        out, err = process.communicate(timeout=DUMP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        # SIGTERM first: the kernel lets go of what it traces in any case (PTRACE_SEIZE).
        for number in (signal.SIGTERM, signal.SIGKILL):
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S / 2)
                break
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
        return None, b"", ""
    return process.returncode, out, err.decode(errors="replace")


def _gave_up(proc: str, pid: int, *, native: bool) -> Missing:
    """Say that there was no answer, and whether a dump that stops the target left it stopped."""
    if native and _left_stopped(proc, pid):
        return Missing(
            reason="failed",
            detail="py-spy was killed while the process was stopped, and it still is",
            hint=f"kill -CONT {pid}",
        )
    return Missing(reason="timeout", detail=f"py-spy gave no answer in {DUMP_DEADLINE_S:g} s")


def _left_stopped(proc: str, pid: int) -> bool:
    until_s = time.monotonic() + _GRACE_S
    while time.monotonic() < until_s:
        stat = procfs.read_stat(proc, pid)
        if stat is None or stat.state not in "Tt":
            return False
        time.sleep(0.05)
    return True


def _ended(proc: str, pid: int) -> Missing | None:
    """py-spy calls zombies and missing processes by the same name; /proc knows."""
    stat = procfs.read_stat(proc, pid)
    if stat is None:
        return Missing(reason="gone", detail="the process has ended")
    if stat.state == "Z":
        return Missing(reason="gone", detail="it has ended, and its parent has not waited for it")
    return None


def _status(proc: str, pid: int) -> dict[str, str]:
    try:
        return procfs.parse_status(procfs.read(f"{proc}/{pid}/status"))
    except OSError:
        return {}
