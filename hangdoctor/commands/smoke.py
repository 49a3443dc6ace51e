"""Starts a server, waits until it is ready, asks it once, and ends it for certain: for a CI."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor import engines
from hangdoctor.checks import Check
from hangdoctor.commands.interrupt import INTERRUPTED, nothing_seen
from hangdoctor.commands.sources import engine_for, longest_phases
from hangdoctor.commands.talk import Lines, Talk
from hangdoctor.commands.watch import folder_for, follow, header_of_command, screen_for
from hangdoctor.diagnose import diagnose as judge
from hangdoctor.endpoint import ask, closes, endpoint_of, holder, in_thread, is_open
from hangdoctor.errors import HangdoctorError, InputError
from hangdoctor.gpu_memory import cards_before, check_freed
from hangdoctor.launch import keeping, what_is_left
from hangdoctor.live import Live
from hangdoctor.recording import LOG_NAME
from hangdoctor.redaction import redact, redact_text
from hangdoctor.render.checks import checks_to_text
from hangdoctor.render.json import document, encode
from hangdoctor.render.junit import check_of, checks_to_junit
from hangdoctor.render.markdown import checks_to_markdown
from hangdoctor.render.markup import WIDTH
from hangdoctor.render.text import to_text
from hangdoctor.signals import ended_in_order
from hangdoctor.streams import put, say

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from hangdoctor.commands.screen import Screen
    from hangdoctor.endpoint import Answer, Endpoint
    from hangdoctor.engines import Engine
    from hangdoctor.facts import Facts
    from hangdoctor.findings import Diagnosis
    from hangdoctor.launch import Ended, Keeper
    from hangdoctor.model import Gpu

FAILED = 1
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
SHOWN_LINES = 60
_TAIL_BYTES = 1 << 16
_TITLES = {0: "PASSED", 1: "FAILED", 3: "UNDECIDED", 4: "NOT READY IN TIME", 130: "INTERRUPTED"}
_CODES = {"ready": 0, "hung": 1, "dead": 1, "unknown": 3}
_NOT_READY = 4


def smoke(
    command: Sequence[str],
    *,
    url: str | None,
    good: Sequence[Path],
    record: Path | None,
    junit: Path | None,
    output: str,
    engine_name: str | None,
    native: bool,
    stall_after_s: float,
    interval_s: float,
    timeout_s: float,
    request_timeout_s: float,
    grace_s: float,
    until: str,
    events: bool,
) -> int:
    """Try a server's command from its start to its end; return the exit code.

    Raises:
        InputError, UsageError: it was not started, such as where the port is in use.
    """
    with ended_in_order():
        try:
            normal_s = longest_phases(good, engine_name)
            engine = engine_for(command, engine_name)
            endpoint = endpoint_of(command, engine.port, url)
            _check_that_nobody_answers(endpoint)
            folder = folder_for(record)
            cards = cards_before()
        except KeyboardInterrupt:
            return nothing_seen()
        run = _Run(engine, endpoint, cards, folder / LOG_NAME)
        lines = Lines() if output == "text" and not events else None
        with keeping(grace_s) as keeper:
            try:
                started = keeper.start(command, folder / LOG_NAME)
                header = header_of_command(started, engine, stall_after_s)
                with (
                    Live(
                        (started.pid,),
                        engine,
                        msgspec.structs.replace(header, normal_s=normal_s),
                        log=started.log_path,
                        record=folder,
                        interval_s=interval_s,
                        native=native,
                        started=started,
                        own_log=True,
                        heard=lines.hear if lines else None,
                    ) as live,
                    screen_for(wanted=output == "text" and not events, lines=lines) as screen,
                ):
                    said = screen.say if screen else say
                    talk = Talk(events=events, started=started, say=said)
                    run.facts, run.interrupted = follow(
                        live, talk, screen, lines, until=until, timeout_s=timeout_s
                    )
                    run.start_up(live)
                    if run.state == "ready" and not run.interrupted:
                        run.request(
                            live, talk, screen, lines, within_s=request_timeout_s, until=until
                        )
                    if live.recording_failed:
                        talk.say(f"the recording is incomplete: {live.recording_failed.strerror}")
                if good and not run.interrupted:
                    run.compare(good, folder / LOG_NAME)
            except KeyboardInterrupt:
                run.interrupted = True
            if run.interrupted:
                run.cut_off()
            run.end(keeper)
        return _report(run, folder, record, output=output, events=events, junit=junit)


class _Run:
    """What one try came to so far."""

    def __init__(
        self, engine: Engine, endpoint: Endpoint, cards: dict[int, Gpu], log: Path
    ) -> None:
        self.engine = engine
        self.endpoint = endpoint
        self.cards = cards
        self.log = log
        self.facts: Facts | None = None
        self.diagnosis: Diagnosis | None = None
        self.interrupted = False
        self.checks: dict[str, Check] = {}
        self._began_s = time.monotonic()

    @property
    def state(self) -> str:
        """The launch's state."""
        return self.diagnosis.state if self.diagnosis else "unknown"

    @property
    def next_step(self) -> str:
        """What to do where nothing of a server of this engine was seen; "" where something was."""
        facts = self.facts
        if facts is None or self.state == "ready" or facts.ranks or facts.launch_log_phase:
            return ""
        name = self.engine.name
        return (
            f"Next\n  1. read what it said, which is no line of {name}'s start: cat {self.log}\n"
            f"  2. after -- comes the command of a {name} server, or with --engine that of another"
            f" one ({', '.join(engines.names())})"
        )

    @property
    def code(self) -> int:
        """The exit code."""
        if self.interrupted:
            return INTERRUPTED
        code = _CODES.get(self.state, _NOT_READY)
        failed = any(check.outcome == "failed" for check in self.checks.values())
        return FAILED if code == 0 and failed else code

    def start_up(self, live: Live) -> None:
        """Judge the start."""
        if self.facts is None or self.facts.at_s is None:
            return
        self.diagnosis = judge(self.facts, live.engine)
        took_s = time.monotonic() - self._began_s
        check = check_of(self.facts, self.diagnosis, took_s=took_s)
        if self.next_step:
            check = msgspec.structs.replace(check, details=f"{check.details}\n\n{self.next_step}")
        self.checks["start-up"] = check

    def request(
        self,
        live: Live,
        talk: Talk,
        screen: Screen | None,
        lines: Lines | None,
        *,
        within_s: float,
        until: str,
    ) -> None:
        """Ask once, and go on watching meanwhile."""
        talk.say(f"ready; it is asked for a completion at {self.endpoint.url}")
        began_s = time.monotonic()
        answer = in_thread(partial(ask, self.endpoint, within_s))
        over = ("dead",) if until == "ready" else ("dead", "hung")
        for facts in live.looks():
            done = answer.done()
            self.facts, self.diagnosis = facts, judge(facts, live.engine)
            if lines:
                lines.show(screen.say if screen else say)
            talk.tell(facts, self.diagnosis)
            if screen:
                screen.show(facts, self.diagnosis)
            if done or self.state in over or time.monotonic() - began_s > within_s:
                break
        self.facts = live.finish(wait=False)
        self.diagnosis = judge(self.facts, live.engine)
        self.checks["request"] = self._answered(answer, time.monotonic() - began_s)
        if self.state in ("hung", "dead"):
            after = check_of(self.facts, self.diagnosis)
            # It was ready: what went wrong did so in the request.
            self.checks["request"] = msgspec.structs.replace(
                self.checks["request"],
                outcome="failed",
                said=f"{after.said} ({self.checks['request'].said})",
                kind=self.state,
                details=after.details,
            )

    def cut_off(self) -> None:
        """Say of what was under way, or would have come next, that it was interrupted."""
        start_up = self.checks.get("start-up")
        if start_up is None:
            said = "interrupted before anything was seen"
            self.checks["start-up"] = Check("start-up", "undecided", said, kind="interrupted")
        elif start_up.outcome == "undecided":
            self.checks["start-up"] = msgspec.structs.replace(
                start_up, said=f"interrupted; until then {start_up.said}", kind="interrupted"
            )
        elif start_up.outcome == "passed" and "request" not in self.checks:
            said = "interrupted before it was answered"
            self.checks["request"] = Check("request", "undecided", said, kind="interrupted")

    def compare(self, good: Sequence[Path], log: Path) -> None:
        """Compare the log with those of good starts, as `diff-logs` does."""
        from hangdoctor.commands.diff_logs import compare_logs
        from hangdoctor.render.logdiff_answer import headline
        from hangdoctor.render.logdiff_text import to_text as diff_to_text

        try:
            diff, _ = compare_logs([*map(str, good), str(log)], self.engine.name)
        except HangdoctorError as error:
            self.checks["good-log"] = Check("good-log", "undecided", str(error), kind="unreadable")
            return
        passed = diff.outcome == "reaches-all"
        text = diff_to_text(diff, self.engine, context=3, everything=False, ranks=(), width=WIDTH)
        self.checks["good-log"] = Check(
            name="good-log",
            outcome="passed" if passed else "failed",
            said=headline(diff),
            kind="" if passed else diff.outcome,
            details="" if passed else redact_text(text),
        )

    def end(self, keeper: Keeper) -> None:
        """End everything, and make sure of it: processes, port, memory of the GPUs."""
        began_s = time.monotonic()
        problems: list[str] = []
        said, freed, cut_off = "", None, False
        try:
            ended, interrupted = _ended(keeper)
            self.interrupted |= interrupted
            problems = what_is_left(ended)
            killed = ended.killed
            said = "nothing is left" + (f"; {killed} had to be killed" if killed else "")
            if self.endpoint.local and not closes(self.endpoint):
                by = holder(self.endpoint)
                problems.append(
                    f"port {self.endpoint.port} is open still" + (f", held by {by}" if by else "")
                )
            freed = check_freed(self.cards, self.facts, ended)
        except KeyboardInterrupt:
            self.interrupted = cut_off = True
            said = "; ".join(filter(None, [said, "interrupted before all of it was looked at"]))
        took_s = time.monotonic() - began_s - (freed.took_s or 0.0 if freed else 0.0)
        self.checks["end"] = Check(
            name="end",
            outcome="failed" if problems else "undecided" if cut_off else "passed",
            said="; ".join(problems) or said,
            kind="left" if problems else "interrupted" if cut_off else "",
            took_s=took_s,
        )
        if freed:
            self.checks[freed.name] = freed

    def _answered(self, answer: Future[Answer], took_s: float) -> Check:
        if not answer.done():
            said = f"{self.endpoint.url} did not answer within {took_s:.0f} s"
            return Check("request", "failed", said, kind="no-answer", took_s=took_s)
        got = answer.result()
        return Check(
            name="request",
            outcome="passed" if got.ok else "failed",
            said=got.said,
            kind="" if got.ok else "wrong-answer",
            took_s=got.took_s,
        )


def _ended(keeper: Keeper) -> tuple[Ended, bool]:
    """End all; tell as well whether that was interrupted."""
    try:
        return keeper.end(), False
    except KeyboardInterrupt:  # which it obeyed: all has been killed
        return keeper.end(), True


def _check_that_nobody_answers(endpoint: Endpoint) -> None:
    if not is_open(endpoint):
        return
    by = holder(endpoint)
    raise InputError(
        f"port {endpoint.port} of {endpoint.host} is in use"
        + (f" by {by}" if by else "")
        + ": an old server would answer",
        hint=f"end it, or start on another port; who has it: ss -ltnp 'sport = :{endpoint.port}'",
    )


def _report(
    run: _Run, folder: Path, record: Path | None, *, output: str, events: bool, junit: Path | None
) -> int:
    """Say what came of it in all the ways that were asked for; return the exit code."""
    code = run.code
    checks = tuple(run.checks.values())
    title = f"hangdoctor smoke: {_TITLES[code]}"
    if not (run.facts and run.diagnosis):
        nothing_seen()
    kept = record is not None or code != 0
    tail = _tail(folder / LOG_NAME) if code else ""
    if junit is not None:
        _write(junit, checks_to_junit("hangdoctor smoke", checks, tail), "the JUnit report")
    if summary := os.environ.get(SUMMARY_VARIABLE):
        text = checks_to_markdown(title, checks)
        if kept:
            text += f"\n\nLog and recording: `{folder}`"
        _write(Path(summary), text + "\n", "the summary", add=True)
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)
    told: dict[str, Any] = {
        "result": _TITLES[code].lower().replace(" ", "-"),
        "exit_code": code,
        "url": run.endpoint.url,
        "checks": [msgspec.to_builtins(check) for check in checks],
        "log": str(folder / LOG_NAME) if kept else None,
        "recording": str(folder) if kept else None,
    }
    if events:
        put(encode({"smoke": told}).decode())
    elif output == "json":
        whole = document(run.facts, run.diagnosis) if run.facts and run.diagnosis else {}
        put(msgspec.json.format(encode(whole | {"smoke": told})).decode())
    else:
        text = checks_to_text(title, checks)
        if run.facts and run.diagnosis and run.state != "ready":
            text += "\n\n" + to_text(run.facts, run.diagnosis)
            text += f"\n\n{run.next_step}" if run.next_step else ""
        put(text)
    if kept:
        say(
            f"hangdoctor: log: {folder / LOG_NAME}",
            f"  what was seen, again: hangdoctor diagnose {folder}",
        )
    return code


def _tail(log: Path) -> str:
    """Return the last lines of the log, without what looks like a secret."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = redact(file.read()).decode(errors="replace").splitlines()
        return "\n".join(lines[-SHOWN_LINES:])
    return ""


def _write(path: Path, text: str, what: str, *, add: bool = False) -> None:
    """Write a report; one that cannot be written is said, and changes no verdict."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if add else "w", encoding="utf-8") as file:
            file.write(redact_text(text))
    except OSError as error:
        say(f"hangdoctor: cannot write {what} {path}: {error.strerror}")
