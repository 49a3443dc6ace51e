"""Stacks that a log holds: py-spy's text, which SGLang's watchdog prints, and faulthandler's.

A dump of py-spy names its process, and by its title the rank; what printed it may be another. One
of faulthandler names nobody. Only the main thread is kept, and what the workers of a pool do.

Ranks write to one pipe: a dump can be torn by another's, in the middle of a stack. What stands
outside of a spawned process's outermost frame, and that frame in another than the main thread, tell
that it happened.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import msgspec

from hangdoctor.engines import rank_frames, rank_name, role_of
from hangdoctor.frames import first_place, is_python, same_shape, shape
from hangdoctor.model import Frame

if TYPE_CHECKING:
    from hangdoctor.engines import Engine
    from hangdoctor.logs.parse import LogLine

MOST_FRAMES = 300
MOST_WORKERS = 32
MOST_NATIVE = 8
TEXT_LIMIT = 300
"""Characters of a title, a function or a path that are kept."""
AGAIN_FACTOR, DUMP_S = 1.5, 60.0
"""A watchdog looks every half of its time, begins anew with each dump, and dumps for so long."""
POOL = "ThreadPoolExecutor"
"""Beginning of the names of the threads besides the main thread that do a rank's own work."""


class Dump(msgspec.Struct, frozen=True):
    """One dump of one process, as far as it was read.

    Attributes:
        tool: that made it.
        number: of its first line; time_s: its stamp, or the last one before it.
        said_by: rank whose prefix the first line has; "" for none.
        pid: as the process itself sees it; title: its command line. Only py-spy tells them.
        cause: "Segmentation fault", where faulthandler tells one.
        frames: Python frames of its main thread, innermost first.
        native: the native functions upon these, innermost first, as far as they have names.
        workers: what is equal for two stacks through the same functions, of the threads of pools
            that were active.
        whole: the outermost frame of the main thread is there.
        torn: frames of another process are among them.
        thread: whose frames come now; current: these frames, native ones left out.
        paused: other lines came since the last one of it.
    """

    tool: Literal["py-spy", "faulthandler"]
    number: int
    time_s: float | None = None
    said_by: str = ""
    pid: int | None = None
    title: str = ""
    cause: str = ""
    frames: tuple[Frame, ...] = ()
    native: tuple[str, ...] = ()
    workers: tuple[tuple[str, ...], ...] = ()
    whole: bool = False
    torn: bool = False
    thread: Literal["", "main", "worker", "other"] = ""
    current: tuple[Frame, ...] = ()
    paused: bool = False


class Standing(msgspec.Struct, frozen=True):
    """What the dumps of one process show, one after the other.

    Attributes:
        dump: the newest one.
        same_dumps: how many in a row, it included, show this same stack.
        since_s: stamp of the first of these.
        moved: the one before these showed another stack.
        after_s: how long the engine's watchdog has seen no forward end, by what it said after the
            newest dump; None where it said nothing.
        final: that was the watchdog which ends the launch.
    """

    dump: Dump
    same_dumps: int = 1
    since_s: float | None = None
    moved: bool = False
    after_s: float | None = None
    final: bool = False

    @property
    def held_s(self) -> float | None:
        """How long it has stood there, from the first to the newest of at least two dumps."""
        if self.same_dumps < 2 or self.since_s is None or self.dump.time_s is None:
            return None
        return max(0.0, self.dump.time_s - self.since_s)


def begin(line: LogLine, time_s: float | None, *, dumped_pid: int | None) -> Dump | None:
    """Return the dump that a line begins; None where it begins none.

    Args:
        line: of the log.
        time_s: its stamp, or the last one before it.
        dumped_pid: the process whose dump the engine announces with it.
    """
    if dumped_pid is not None:
        return Dump("py-spy", line.number, time_s, said_by=line.rank, pid=dumped_pid)
    if line.time_s is not None:
        return None
    if match := _PROCESS.match(line.text):
        return _titled(Dump("py-spy", line.number, time_s), match)
    if match := _FATAL.match(line.text):
        return Dump("faulthandler", line.number, time_s, cause=match["cause"][:TEXT_LIMIT])
    if _FAULT_THREAD.match(line.text):
        return extend(Dump("faulthandler", line.number, time_s), line.text)
    return None


def extend(dump: Dump, text: str) -> Dump | None:
    """Return a dump with its next line; None where the line is not of it."""
    if dump.tool == "faulthandler":
        return _extend_fault(dump, text)
    if text.startswith("Process ") and (match := _PROCESS.match(text)):
        if dump.title or dump.pid not in (None, int(match["pid"])):
            return None
        return _titled(dump, match)
    if text.startswith("Python v"):
        return _going_on(dump)
    if text.startswith("Thread ") and (match := _THREAD.match(text)):
        return _next_thread(dump, match["id"], match["name"] or "", match["state"])
    match = _FRAME.match(text)
    if match is None or not dump.thread:
        return None
    return _with_frame(dump, match["function"], match["path"], int(match["line"] or 0))


def is_part(line: LogLine) -> bool:
    """Tell whether a line looks like one of a dump, but for its announcement."""
    text = line.text
    return line.time_s is None and bool(
        (text.endswith(")") and _FRAME.match(text))
        or _PROCESS.match(text)
        or _THREAD.match(text)
        or _FAULT_FRAME.match(text)
        or _FAULT_THREAD.match(text)
        or text.startswith("Python v")
    )


def close(dump: Dump) -> Dump:
    """Return a dump whose last thread has ended; of one that is torn nothing is left."""
    dump = _ended(dump)
    return msgspec.structs.replace(dump, frames=(), native=(), workers=()) if dump.torn else dump


def rank_of(dump: Dump, engine: Engine, ranks: tuple[str, ...]) -> str:
    """Return the rank that a dump is of; "" where it is another process's or that is not told.

    Args:
        dump: whole or not.
        engine: whose process titles and frames tell a rank.
        ranks: of the launch; where there is one only, a rank's stack is that one's.
    """
    role = role_of(engine, dump.title) if dump.title else None
    if role is not None and role.is_rank:
        return rank_name(role, dump.title) or ""
    if first_place(dump.frames, rank_frames(engine)) is None:
        return ""
    # The title is not the rank's own yet, or nothing tells it: the stack is a rank's.
    return dump.said_by or (ranks[0] if len(ranks) == 1 else "")


def see(standing: Standing | None, dump: Dump) -> Standing:
    """Take in the next dump of a process: where it stands, and whether that is new."""
    if standing is None or standing.dump.pid != dump.pid or not standing.dump.frames:
        return Standing(dump, since_s=dump.time_s)
    before = standing.dump
    if not dump.frames:
        return standing
    if _is_another_s(standing, dump):
        return Standing(dump, since_s=dump.time_s)
    same = same_shape(shape(before.frames), shape(dump.frames)) and before.workers == dump.workers
    if not same:
        return Standing(dump, since_s=dump.time_s, moved=True)
    return msgspec.structs.replace(
        standing, dump=dump, same_dumps=standing.same_dumps + 1, after_s=None, final=False
    )


def _is_another_s(standing: Standing, dump: Dump) -> bool:
    """Tell whether a dump is of another stall than the ones before it.

    Where nothing ends a watchdog speaks again within one and a half of its times, and py-spy's.
    """
    limit_s = standing.after_s
    if limit_s is None or dump.time_s is None or standing.dump.time_s is None:
        return False
    return dump.time_s - standing.dump.time_s > AGAIN_FACTOR * limit_s + DUMP_S


_PROCESS = re.compile(r"Process (?P<pid>\d{1,10}): (?P<title>.*)")
_THREAD = re.compile(
    r'Thread (?P<id>\d+|0x[0-9a-fA-F]+) \((?P<state>[a-z]+(?:\+gil)?)\)(?:: "(?P<name>.*)")?$'
)
_FRAME = re.compile(
    r"\s+(?P<function>\S.*?) \((?P<path>[^()]*?[.<][^()]*?)(?::(?P<line>\d{1,9}))?\)$", re.DOTALL
)
"""As py-spy writes it; native frames have no line, and names with brackets and blanks in them."""
_FATAL = re.compile(r"Fatal Python error: (?P<cause>.*)")
_FAULT_THREAD = re.compile(
    r"(?:Current thread|Thread) 0x[0-9a-fA-F]+ (?:\[.*\] )?\(most recent call first\):"
)
_FAULT_FRAME = re.compile(
    r'\s+File "(?P<path>[^"]*)", line (?P<line>\d{1,9}|\?\?\?)(?: in (?P<function>\S+))?'
)


def _titled(dump: Dump, match: re.Match[str]) -> Dump:
    return msgspec.structs.replace(
        dump, pid=int(match["pid"]), title=match["title"].strip()[:TEXT_LIMIT], paused=False
    )


def _next_thread(dump: Dump, number: str, name: str, state: str) -> Dump:
    dump = _ended(dump)
    main = name == "MainThread" and not dump.frames
    if main and number.isdecimal() and dump.pid is not None and int(number) != dump.pid:
        return msgspec.structs.replace(dump, thread="other", torn=True)
    worker = name.startswith(POOL) and state.startswith("active")
    return msgspec.structs.replace(
        dump, thread="main" if main else "worker" if worker else "other", paused=False
    )


def _ended(dump: Dump) -> Dump:
    """Return the dump with the thread that was being read put where it belongs."""
    if dump.tool == "faulthandler":
        return _ended_fault(dump)
    changes: dict[str, object] = {"thread": "", "current": ()}
    if dump.thread == "main":
        changes |= {
            "frames": dump.current,
            "whole": bool(dump.current) and dump.current[-1].function in _OUTERMOST,
        }
    elif dump.thread == "worker" and dump.current and len(dump.workers) < MOST_WORKERS:
        changes["workers"] = (*dump.workers, shape(dump.current))
    return msgspec.structs.replace(dump, **changes)


def _with_frame(dump: Dump, function: str, path: str, line: int) -> Dump:
    frame = Frame(function.strip()[:TEXT_LIMIT], path[:TEXT_LIMIT], line)
    if not is_python(frame):
        upon = dump.thread == "main" and not dump.current and len(dump.native) < MOST_NATIVE
        if upon and not function.startswith("0x"):
            dump = msgspec.structs.replace(dump, native=(*dump.native, frame.function))
        return _going_on(dump)
    if len(dump.current) >= MOST_FRAMES:
        return _going_on(dump)
    frames = (*dump.current, frame)
    below = _is_whole(dump.current)
    if dump.tool == "py-spy" and (below or (dump.thread != "main" and _is_whole(frames))):
        return msgspec.structs.replace(dump, torn=True)
    return msgspec.structs.replace(dump, current=frames, paused=False)


def _going_on(dump: Dump) -> Dump:
    return msgspec.structs.replace(dump, paused=False) if dump.paused else dump


def _extend_fault(dump: Dump, text: str) -> Dump | None:
    """Return faulthandler's dump with a line. The main thread is the one with a module's frame."""
    if _FAULT_THREAD.match(text):
        if dump.paused:
            return None
        return msgspec.structs.replace(_ended_fault(dump), thread="other")
    match = _FAULT_FRAME.match(text)
    if match is None or not dump.thread:
        return None
    return _with_frame(
        dump, match["function"] or "???", match["path"], int(match["line"].replace("?", "") or 0)
    )


def _ended_fault(dump: Dump) -> Dump:
    main = bool(dump.current) and dump.current[-1].function in _OUTERMOST
    return msgspec.structs.replace(
        dump,
        frames=dump.current if main and not dump.frames else dump.frames,
        whole=dump.whole or main,
        thread="",
        current=(),
    )


_OUTERMOST = ("<module>", "_run_module_as_main")


def _is_whole(frames: tuple[Frame, ...]) -> bool:
    """Tell whether a spawned process's main thread ends here: nothing stands further out."""
    return (
        len(frames) > 1
        and frames[-1].path == "<string>"
        and frames[-2].function.rpartition(".")[2] == "spawn_main"
    )
