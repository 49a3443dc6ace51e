"""Finds the launch that is meant: from a pid anywhere in it, or from nothing; and its log.

A launch is a launcher (its command line matches the engine's) with everything below it, or what a
launcher that died left behind: processes with the engine's titles, in one session and group.
"""

from __future__ import annotations

import os
import re
import stat as stat_bits
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.collect import processes, procfs
from hangdoctor.collect.bounded import Bounded
from hangdoctor.collect.permissions import refused
from hangdoctor.collect.procfs import Stat
from hangdoctor.engines import matches_any, rank_name, role_of
from hangdoctor.errors import InputError, UsageError
from hangdoctor.model import Missing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hangdoctor.engines import Engine

_LOG_DEADLINE_S = 3.0
_PYTHON = re.compile(r"^(?:python|pypy|pt_main_thread|sglang|vllm)", re.IGNORECASE)
_SPAWN_MAIN = re.compile(r"\bmultiprocessing\.(?:spawn|forkserver) import\b")
_OURSELVES = re.compile(
    r"^(?:\S*python\S*\s+)?(?:\S*/)?hangdoctor(?:\s|$)|\s-m\s+hangdoctor(?:[.\s]|$)"
)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a launch.

    Attributes:
        role: "launcher", the id of one of the engine's roles, or "" for other processes.
        rank: as the engine's log names it ("TP0", "DP1 TP3"); None for what is no rank.
    """

    pid: int
    title: str
    role: str = ""
    rank: str | None = None


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One server, starting or running, on this machine.

    Attributes:
        engine: name of the engine.
        roots: pids that the tree begins at: the launcher, and orphans that belong to it.
        title: command line of the launcher; of the first orphan where it is gone.
        age_s: seconds since the oldest root started.
        members: its processes, the roots first.
        launcher_pid: None where the launcher has died.
    """

    engine: str
    roots: tuple[int, ...]
    title: str
    age_s: float
    members: tuple[Member, ...]
    launcher_pid: int | None = None

    @property
    def ranks(self) -> tuple[str, ...]:
        """Return the names of the ranks that have their title by now."""
        return tuple(member.rank for member in self.members if member.rank is not None)

    @property
    def pids(self) -> tuple[int, ...]:
        """Return all pids."""
        return tuple(member.pid for member in self.members)


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """Where a launch writes its log.

    Attributes:
        path: what to open; under /proc where the file is not to be seen from here.
        name: what to call it: the path as the launch knows it.
    """

    path: Path
    name: str


class _Seen(msgspec.Struct, frozen=True):
    """All processes of the machine, with what find_launches needs of them."""

    proc: str
    stats: dict[int, Stat]
    titles: dict[int, str]


def find_launches(engines: Sequence[Engine], proc: Path = Path("/proc")) -> tuple[Launch, ...]:
    """Return all launches on this machine, the oldest first."""
    return _launches(engines, _look(str(proc)))


def resolve(pid: int | None, engines: Sequence[Engine], proc: Path = Path("/proc")) -> Launch:
    """Return the launch that a pid belongs to or stands above; without one, the only launch.

    Args:
        pid: a process of the launch, a thread of one, or a wrapper (shell, tini) above it.
        engines: those to look for.
        proc: root of the processes' world.

    Raises:
        UsageError: several launches, and none was chosen; the message lists them.
        InputError: no such process, one that has ended, one of no launch, or no launch at all.
    """
    seen = _look(str(proc))
    launches = _launches(engines, seen)
    if pid is None:
        if not launches:
            names = ", ".join(engine.name for engine in engines)
            raise InputError(
                f"no running launch found (looked for: {names})",
                hint="hangdoctor diagnose PID, or a log: hangdoctor diagnose server.log",
            )
        return _only(launches, "there are several launches")
    process = process_of(str(proc), pid)
    inside = [launch for launch in launches if process in launch.pids]
    stat = seen.stats.get(process)
    if not inside and stat and stat.state == "Z":  # perhaps a launcher that left orphans behind
        mates = {pid for pid, mate in seen.stats.items() if _session(mate) == _session(stat)}
        inside = [launch for launch in launches if mates.intersection(launch.roots)]
    if inside:
        return _only(inside, f"PID {pid} belongs to several launches")
    if stat and stat.state != "Z":
        below = set(procfs.descendants(seen.stats, [process]))
        above = [launch for launch in launches if below.intersection(launch.roots)]
        if above:
            return _only(above, f"PID {pid} stands above several launches")
    raise InputError(_no_launch(seen, process, pid), hint=_listing(launches))


def role_patterns(engine: Engine) -> tuple[str, ...]:
    """Return the titles by which an orphan of the engine is known, for the observer to adopt."""
    return tuple(role.title for role in engine.roles if role.id != "launcher")


def find_log(pids: Sequence[int], proc: Path = Path("/proc")) -> Log | Missing:
    """Return the regular file that one of the processes has as its stderr or stdout.

    It is opened through /proc where it is not to be seen from here (another mount namespace, or
    deleted). stderr comes first, Python's logging writes there. A pipe into `tee` is followed.

    Returns:
        A Missing says what the output is instead, and how to get at it.
    """
    one: Bounded[str, Log | Missing] = Bounded()  # the file may lie on dead storage
    found = one.run({"log": partial(_find_log, pids, str(proc))}, within_s=_LOG_DEADLINE_S)
    return found.get("log") or Missing(
        reason="timeout",
        detail="the file that the launcher writes to does not answer",
        hint="is its storage there? df, mount",
    )


def _find_log(pids: Sequence[int], proc: str) -> Log | Missing:
    answer: Missing | None = None
    for pid in pids:
        for fd in (2, 1):
            found = _log_of(proc, pid, fd)
            if isinstance(found, Log):
                return found
            answer = answer or found
    return answer or Missing(reason="gone", detail="the launcher has ended")


def _look(proc: str) -> _Seen:
    stats = procfs.scan(proc)
    # One that blocks its command line must not block the search.
    titles = processes.titles_of(proc, stats.values())
    return _Seen(proc, stats, titles)


def _launches(engines: Sequence[Engine], seen: _Seen) -> tuple[Launch, ...]:
    """Find launchers, then what is left of those that died."""
    found = []
    for engine in engines:
        launchers = _launchers(engine, seen)
        taken = {pid for root in launchers for pid in procfs.descendants(seen.stats, [root])}
        groups = _orphan_groups(engine, seen, taken)
        roots: dict[int, list[int]] = {root: [root] for root in launchers}
        for orphans in groups:
            launcher = _launcher_of(orphans, launchers, seen)
            roots.setdefault(launcher or orphans[0], []).extend(orphans)
        found += [
            _launch(engine, first, all_roots, seen, has_launcher=first in launchers)
            for first, all_roots in roots.items()
        ]
    return tuple(sorted(found, key=lambda launch: (-launch.age_s, launch.roots)))


def _launchers(engine: Engine, seen: _Seen) -> list[int]:
    """Return the Python processes with a launcher's command line, without wrappers and copies.

    A wrapper names the launcher's command line within its own; a copy is a child that was forked
    and has not changed its title. So of two in one line the upper one is meant where their
    command lines are the same, else the lower one.
    """
    match = [
        pid
        for pid, title in seen.titles.items()
        if seen.stats[pid].state != "Z"
        and not _OURSELVES.search(title)
        and _launches_it(engine, title)
        and _is_python(seen, pid)
    ]
    chosen = set(match)
    for pid in match:
        for above in _ancestors(seen.stats, pid):
            if above in match:
                chosen.discard(pid if seen.titles[pid] == seen.titles[above] else above)
    return sorted(chosen, key=lambda pid: (seen.stats[pid].start_ticks, pid))


def _orphan_groups(engine: Engine, seen: _Seen, taken: set[int]) -> list[list[int]]:
    """Return the topmost processes with the engine's titles that no launcher is above of.

    They are one launch where session and group are the same; children of the same session and
    group that still bear multiprocessing's title, and have lost their parent too, belong to it.
    """
    titled = [
        pid
        for pid, title in seen.titles.items()
        if pid not in taken and _is_own(engine, title) and seen.stats[pid].state != "Z"
    ]
    groups: dict[tuple[int, int], list[int]] = {}
    for pid in titled:
        if not set(titled).intersection(_ancestors(seen.stats, pid)):
            groups.setdefault(_session(seen.stats[pid]), []).append(pid)
    for pid, title in seen.titles.items():
        stat = seen.stats[pid]
        mates = groups.get(_session(stat))
        if mates is None or pid in taken or pid in titled or not _SPAWN_MAIN.search(title):
            continue
        parent = seen.stats.get(stat.ppid)
        if parent is None or parent.session != stat.session:
            mates.append(pid)
    for mates in groups.values():
        mates.sort(key=lambda pid: (seen.stats[pid].start_ticks, pid))
    return list(groups.values())


def _is_own(engine: Engine, title: str) -> bool:
    """Tell whether only this engine's processes are called so; any program has resource trackers.

    Engines put their own name in front: "sglang::scheduler_TP0", "VLLM::EngineCore".
    """
    own_name = title.casefold().startswith(engine.detect.package.casefold())
    return own_name and role_of(engine, title) is not None and not _launches_it(engine, title)


def _launches_it(engine: Engine, title: str) -> bool:
    return matches_any(engine.detect.launcher, title)


def _launcher_of(orphans: list[int], launchers: list[int], seen: _Seen) -> int | None:
    """Return the living launcher that orphans belong to: theirs by group, the last before them."""
    first = seen.stats[orphans[0]]
    before = [
        pid
        for pid in launchers
        if _session(seen.stats[pid]) == _session(first)
        and seen.stats[pid].start_ticks <= first.start_ticks
    ]
    return before[-1] if before else None


def _launch(
    engine: Engine, first: int, roots: list[int], seen: _Seen, *, has_launcher: bool
) -> Launch:
    members = []
    for pid in procfs.descendants(seen.stats, roots):
        title = seen.titles.get(pid, seen.stats[pid].comm)
        role = role_of(engine, title)
        rank = rank_name(role, title) if role else None
        name = role.id if role else ""
        if has_launcher and pid == first:
            name, rank = "launcher", None
        members.append(Member(pid=pid, title=title, role=name, rank=rank))
    return Launch(
        engine=engine.name,
        roots=tuple(roots),
        title=seen.titles.get(first, ""),
        age_s=round(procfs.age_s(min(seen.stats[pid].start_ticks for pid in roots)), 1),
        members=tuple(members),
        launcher_pid=first if has_launcher else None,
    )


def _only(launches: Sequence[Launch], trouble: str) -> Launch:
    if len(launches) == 1:
        return launches[0]
    raise UsageError(
        f"{trouble}:\n" + "\n".join(_line(launch) for launch in launches),
        hint="choose one: hangdoctor watch --pid-tree PID, or hangdoctor diagnose PID",
    )


def _listing(launches: Sequence[Launch]) -> str:
    if not launches:
        return "there is no launch on this machine; a log can be read: hangdoctor diagnose FILE"
    return "launches found:\n" + "\n".join(_line(launch) for launch in launches)


def _line(launch: Launch) -> str:
    """Return a launch as one line of a list.

    >>> _line(Launch(engine="sglang", roots=(7,), title="python -m sglang.launch_server --tp 2",
    ...     age_s=75.2, members=(Member(pid=7, title="", rank="TP0"),), launcher_pid=7))
    '  PID 7  sglang  1 rank (TP0), 1 min 15 s old  python -m sglang.launch_server --tp 2'
    """
    count = len(launch.ranks)
    ranks = f"{count} rank{'' if count == 1 else 's'}"
    if launch.ranks:
        ranks += f" ({', '.join(launch.ranks)})"
    minutes, seconds = divmod(int(launch.age_s), 60)
    hours, minutes = divmod(minutes, 60)
    age = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
    gone = "" if launch.launcher_pid else "  (its launcher is gone)"
    title = _one_line(launch.title)
    return f"  PID {launch.roots[0]}  {launch.engine}  {ranks}, {age} old{gone}  {title}"


def process_of(proc: str, pid: int) -> int:
    """Return the process of a pid that may be a thread's, as `top -H` shows them."""
    try:
        return int(procfs.parse_status(procfs.read(f"{proc}/{pid}/status")).get("Tgid", pid))
    except OSError:
        return pid


def _no_launch(seen: _Seen, process: int, pid: int) -> str:
    stat = seen.stats.get(process)
    if stat is None:
        return f"there is no process with PID {pid}"
    if stat.state == "Z":
        return f"PID {pid} ({stat.comm}) has ended; its parent, PID {stat.ppid}, has not noticed"
    title = _one_line(seen.titles.get(process) or stat.comm)
    return f"PID {pid} belongs to no launch that is known: it is {title}"


def _one_line(title: str) -> str:
    """Return a title for a list: `python -c` may have a whole program in it."""
    title = " ".join(title.split())
    return title if len(title) <= 100 else title[:97] + "..."


def _log_of(proc: str, pid: int, fd: int) -> Log | Missing:
    link = Path(f"{proc}/{pid}/fd/{fd}")
    try:
        name = str(link.readlink())
        info = link.stat()
    except PermissionError as error:
        return refused(f"{error.strerror}: {link}", None)
    except OSError as error:
        return Missing(reason="gone", detail=f"{error.strerror}: {link}")
    if stat_bits.S_ISREG(info.st_mode):
        return _log(link, name, info)
    if name.startswith("pipe:") and (log := _behind_tee(proc, pid, name)):
        return log
    kind = "a pipe" if name.startswith("pipe:") else name
    hint = (
        "give its output to --log: kubectl logs -f POD | hangdoctor diagnose PID --log -"
        if name.startswith("pipe:")
        else "start the server with its output in a file, or give its log with --log FILE"
    )
    return Missing(reason="unsupported", detail=f"the launcher writes to {kind}", hint=hint)


def _log(link: Path, name: str, info: os.stat_result) -> Log | Missing:
    """Prefer the real path where it is the same file: it stays when the process has ended."""
    path = link
    try:
        if os.path.samestat(Path(name).stat(), info):
            path = Path(name)
    except OSError:
        pass
    if not os.access(path, os.R_OK):
        return refused(f"Permission denied: {name}", info.st_uid)
    shown = os.fsencode(name.removesuffix(" (deleted)")).decode(errors="replace")
    return Log(path=path, name=shown)


def _behind_tee(proc: str, pid: int, pipe: str) -> Log | None:
    """Return the file that `tee` writes what comes through this pipe to."""
    stats = procfs.scan(proc)
    if pid not in stats:
        return None
    for stat in stats.values():
        if stat.comm != "tee" or stat.session != stats[pid].session:
            continue
        at = Path(f"{proc}/{stat.pid}/fd")
        try:
            if str((at / "0").readlink()) != pipe:
                continue
            for link in sorted(at.iterdir(), key=lambda link: int(link.name)):
                info = link.stat()
                if int(link.name) > 2 and stat_bits.S_ISREG(info.st_mode):
                    log = _log(link, str(link.readlink()), info)
                    return log if isinstance(log, Log) else None
        except OSError:
            continue
    return None


def _is_python(seen: _Seen, pid: int) -> bool:
    try:
        program = Path(f"{seen.proc}/{pid}/exe").readlink().name
    except OSError:
        program = Path(seen.titles[pid].split(" ", 1)[0]).name
        return bool(_PYTHON.match(program) or _PYTHON.match(seen.stats[pid].comm))
    return bool(_PYTHON.match(program))


def _ancestors(stats: dict[int, Stat], pid: int) -> Iterable[int]:
    passed = {pid}
    while pid in stats and (pid := stats[pid].ppid) in stats and pid not in passed:
        passed.add(pid)
        yield pid


def _session(stat: Stat) -> tuple[int, int]:
    return stat.session, stat.group
