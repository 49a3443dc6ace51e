"""Follows a launch, which it may start itself, until it is ready, stuck or dead."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hangdoctor import __version__
from hangdoctor.commands.interrupt import INTERRUPTED, finish, nothing_seen
from hangdoctor.commands.sources import (
    engine_for,
    find,
    header_of,
    log_of,
    longest_phases,
    shown,
)
from hangdoctor.commands.talk import Lines, Talk, terminal
from hangdoctor.diagnose import diagnose as judge
from hangdoctor.errors import InputError, UsageError
from hangdoctor.live import Live
from hangdoctor.model import Header, LogSource, Missing
from hangdoctor.recording import (
    LOG_NAME,
    is_recording,
)
from hangdoctor.render import RENDERERS
from hangdoctor.signals import ended_in_order
from hangdoctor.streams import put, say

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from hangdoctor.commands.screen import Screen
    from hangdoctor.engines import Engine
    from hangdoctor.facts import Facts
    from hangdoctor.findings import Diagnosis
    from hangdoctor.launch import Keeper, Started


BESIDE_LINES = 0.8
"""The part of a terminal's rows for the view, where the lines of a command are shown above it."""
PROBE_BYTES = 1 << 16
"""A directory without room for so much is not recorded into."""


def watch(
    command: Sequence[str],
    *,
    pid: int | None,
    log: str | None,
    good: Sequence[Path],
    record: Path | None,
    output: str,
    engine_name: str | None,
    native: bool,
    peek: bool,
    stall_after_s: float,
    interval_s: float,
    timeout_s: float | None,
    until: str,
    events: bool,
    kill_on_exit: bool,
) -> str | int:
    """Follow a launch until a verdict; return its state, or the exit code of a Ctrl-C.

    Where stdout is a terminal, a view of all that is known is drawn while it is followed.
    """
    with ended_in_order(), ExitStack() as exits:
        try:
            keeper: Keeper | None = None
            started: Started | None = None
            roots: tuple[int, ...]
            log_source: Path | str | Missing
            normal_s = longest_phases(good, engine_name)
            if command:
                if log is not None:
                    raise UsageError(
                        "--log and -- COMMAND exclude each other",
                        hint="its output is its log: hangdoctor watch -- COMMAND ...",
                    )
                engine = engine_for(command, engine_name)
                log_source = folder_for(record) / LOG_NAME
                if kill_on_exit:
                    from hangdoctor.launch import keeping

                    keeper = exits.enter_context(keeping())
                    started = keeper.start(command, log_source)
                else:
                    from hangdoctor.launch import start

                    started = start(command, log_source)
                roots = (started.pid,)
                header = header_of_command(started, engine, stall_after_s)
            else:
                launch, engine = find(pid, engine_name)
                roots = launch.roots
                log_source, log_name = log_of(launch, log)
                header = header_of(launch, engine, stall_after_s, log_name)
        except KeyboardInterrupt:
            return nothing_seen()
        lines = Lines() if command and output == "text" and not events else None
        try:
            with (
                Live(
                    roots,
                    engine,
                    msgspec.structs.replace(header, normal_s=normal_s),
                    log=log_source,
                    record=record,
                    interval_s=interval_s,
                    native=native,
                    peek=peek,
                    started=started,
                    own_log=started is not None,
                    heard=lines.hear if lines else None,
                ) as live,
                screen_for(wanted=output == "text" and not events, lines=lines) as screen,
            ):
                talk = Talk(events=events, started=started, say=screen.say if screen else say)
                facts, interrupted = follow(
                    live, talk, screen, lines, until=until, timeout_s=timeout_s
                )
                if live.recording_failed:
                    talk.say(f"the recording is incomplete: {live.recording_failed.strerror}")
            if facts.at_s is None:
                return nothing_seen()
            diagnosis = judge(facts, engine)
            if not events:
                put(RENDERERS[output](facts, diagnosis))
        finally:
            if started is not None:
                _leave(started, keeper)
        return INTERRUPTED if interrupted else diagnosis.state


def follow(
    live: Live,
    talk: Talk,
    screen: Screen | None,
    lines: Lines | None,
    *,
    until: str,
    timeout_s: float | None,
) -> tuple[Facts, bool]:
    """Look until it is over; return the facts at the end, and whether a Ctrl-C ended it."""
    interrupted = False
    say_ = screen.say if screen else say
    began_s = time.monotonic()
    try:
        for facts in live.looks():
            if lines:
                lines.show(say_)
            diagnosis = judge(facts, live.engine)
            is_heard = talk.tell(facts, diagnosis)
            if screen:
                screen.show(facts, diagnosis)
            if not is_heard or _is_over(diagnosis, until):
                break
            if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
                if until != "forever":
                    talk.say(f"not decided within the {timeout_s:.0f} s of --timeout")
                break
    except KeyboardInterrupt:
        interrupted = True
    facts, interrupted = finish(live, interrupted=interrupted)
    if lines:
        lines.show(say_, whole=True)
    return facts, interrupted


def screen_for(*, wanted: bool, lines: Lines | None) -> AbstractContextManager[Screen | None]:
    """Return where to draw the view; None where there is no terminal for it."""
    stream = terminal() if wanted else None
    if stream is None:
        return nullcontext()
    from hangdoctor.commands.screen import Screen  # rich takes its time to be imported

    part = BESIDE_LINES if lines else 1.0
    return Screen(stream, talks=sys.stderr.isatty(), part=part)


def _is_over(diagnosis: Diagnosis, until: str) -> bool:
    if until == "forever":
        return diagnosis.state == "dead"
    if until == "ready":
        return diagnosis.state in ("ready", "dead")
    return diagnosis.state in ("ready", "dead", "hung")


def folder_for(record: Path | None) -> Path:
    """Return a directory for a command's log and its recording, a temporary one without a name.

    Raises:
        InputError: it holds a recording already, or cannot be written.
    """
    if record is None:
        return Path(tempfile.mkdtemp(prefix="hangdoctor-"))
    if is_recording(record) or (record / LOG_NAME).exists():
        raise InputError(f"{record} holds a recording already", hint="name another directory")
    try:
        record.mkdir(parents=True, exist_ok=True)
        # Before the command runs: once it does, a recording that fails must not matter.
        probe = record / "probe"
        probe.write_bytes(bytes(PROBE_BYTES))
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"cannot record into {record}: {error.strerror}", hint="name another directory"
        ) from error
    return record


def header_of_command(started: Started, engine: Engine, stall_after_s: float) -> Header:
    """Return the header of a recording of a command that was started now."""
    return Header(
        hangdoctor=__version__,
        created_wall_s=time.time(),
        source=shown(shlex.join(started.command)),
        stall_after_s=stall_after_s,
        engine=engine.name,
        command=tuple(map(shown, started.command)),
        log=LogSource(origin=shown(started.log_path)),
    )


def _leave(started: Started, keeper: Keeper | None) -> None:
    """Say what becomes of the command that we started, or end it."""
    status = started.poll()
    if keeper is not None:
        from hangdoctor.launch import what_is_left

        ended = keeper.end()
        what = "has ended" if status is not None else "was ended"
        say(
            f"hangdoctor: pid {started.pid} {what}; log: {started.log_path}",
            *(f"  {text}" for text in what_is_left(ended)),
        )
    elif status is not None:
        say(f"hangdoctor: pid {started.pid} has ended; log: {started.log_path}")
    else:
        say(
            f"hangdoctor: pid {started.pid} runs on; log: {started.log_path}",
            f"  look deeper: hangdoctor diagnose {started.pid} --record DIR",
            f"  end it: kill -TERM -- -{started.pid}; if it hangs, kill -KILL -- -{started.pid}",
        )
