"""What can be seen on this machine, or of one launch, and what opens the rest."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from hangdoctor import engines
from hangdoctor.collect import procfs, rights
from hangdoctor.errors import InputError
from hangdoctor.model import Missing
from hangdoctor.preflight import Target, judge
from hangdoctor.render.preflight import to_json, to_text
from hangdoctor.streams import put
from hangdoctor.target import find_launches, find_log, process_of, resolve

if TYPE_CHECKING:
    from hangdoctor.engines import Engine
    from hangdoctor.target import Launch

PROC = "/proc"
MOST_PROCESSES = 32
"""So many processes of a launch are tried, the ranks and the launcher first."""

RENDERERS = {"text": to_text, "json": to_json}


def preflight(pid: int | None, *, output: str) -> int:
    """Print what can be seen; return 0 where all main sources are open, else 1.

    Raises:
        UsageError, InputError: there is no such process, or it stands above several launches.
    """
    known = [engines.load(name) for name in engines.names()]
    target, engine = _target(pid, known)
    with ExitStack() as exits:
        pids = tuple(target.names) or (exits.enter_context(rights.sample()),)
        answers = rights.ask(
            rights.RightsLook(
                pids=pids, package=engine.detect.package, is_target=target.pid is not None
            )
        )
    report = judge(answers, target, engine)
    put(RENDERERS[output](report))
    return 1 if report.closed else 0


def _target(pid: int | None, known: list[Engine]) -> tuple[Target, Engine]:
    if pid is not None:
        try:
            launch = resolve(pid, known)
        except InputError:
            process = process_of(PROC, pid)
            stat = procfs.read_stat(PROC, process)
            if stat is None or stat.state == "Z":
                raise
            note = "it belongs to no launch that is known"
            names = {process: f"PID {process}"}
            return Target(pid=process, names=names, note=note, log=_log((process,))), known[0]
        return _of_launch(launch, pid, known)
    launches = find_launches(known)
    if len(launches) == 1:
        return _of_launch(launches[0], launches[0].roots[0], known, "the only launch here")
    note = ""
    if launches:
        roots = ", ".join(str(launch.roots[0]) for launch in launches[:8])
        note = f"{len(launches)} launches run here, name one: hangdoctor preflight PID ({roots})"
    return Target(pid=None, names={}, note=note), known[0]


def _of_launch(
    launch: Launch, pid: int, known: list[Engine], note: str = ""
) -> tuple[Target, Engine]:
    members = sorted(
        launch.members, key=lambda one: (one.pid != pid, one.rank is None, one.role == "")
    )
    names = {
        one.pid: one.rank or one.role or f"PID {one.pid}"
        for one in members[:MOST_PROCESSES]
        if one.rank or one.role or one.pid == pid
    }
    engine = next(engine for engine in known if engine.name == launch.engine)
    ranks = ", ".join(launch.ranks[:8]) + (" ..." if len(launch.ranks) > 8 else "")
    words = f"a launch of {launch.engine}" + (f" ({ranks})" if ranks else "")
    log = _log(launch.roots)
    return Target(pid=pid, names=names, launch=words, note=note, log=log), engine


def _log(pids: tuple[int, ...]) -> str | Missing:
    found = find_log(pids)
    return found if isinstance(found, Missing) else found.name
