"""Plays a pretend launch, watches it as any other, and says whether the verdict was right."""

from __future__ import annotations

import random
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from hangdoctor import engines, recording
from hangdoctor.commands.watch import watch
from hangdoctor.demo.plan import compare, make_plan
from hangdoctor.demo.play import play
from hangdoctor.diagnose import diagnose
from hangdoctor.errors import HangdoctorError, UsageError
from hangdoctor.facts.fold import derive
from hangdoctor.rules.case import HUNG_FACTOR
from hangdoctor.streams import say

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hangdoctor.demo.kinds import Fault, StallPhase
    from hangdoctor.demo.plan import Plan
    from hangdoctor.demo.play import Played

INTERRUPTED = 130


def demo(
    *,
    phase: StallPhase | None,
    fault: Fault | None,
    rank: int | None,
    ranks: int,
    stall_after_s: float,
    usual_stall_after_s: float,
    timeout_s: float,
    output: str,
    record: Path | None,
    events: bool,
) -> str | int:
    """Play a launch and watch it; return what `watch` returns.

    The default of `watch` is given as `usual_stall_after_s`, to compare with.
    """
    if rank is not None and rank >= ranks:
        raise UsageError(
            f"there is no rank {rank} among {ranks}: they are counted from 0",
            hint=f"hangdoctor demo --ranks {ranks} --rank {ranks - 1}",
        )
    plan = make_plan(
        fault,
        phase,
        rank=random.randrange(ranks) if rank is None else rank,  # noqa: S311  # no secret
        ranks=ranks,
        stall_after_s=stall_after_s,
    )
    with _ended_by_signals(), play(plan) as played:
        kept = record or played.folder / "recording"
        say(
            f"hangdoctor: a pretend SGLang launch of {ranks} ranks: real processes, no GPU, no "
            f"model; {plan.done}",
            f"  its log: {played.log}",
            f"  watched as by: hangdoctor watch --pid-tree {played.pid} --stall-after "
            f"{stall_after_s:g}",
            f"  so that hung may be said after {HUNG_FACTOR * stall_after_s:g} s of stillness; "
            f"watch alone takes {HUNG_FACTOR * usual_stall_after_s:g} s",
        )
        began_s = time.monotonic()
        state = watch(
            [],
            pid=played.pid,
            log=str(played.log),
            good=(),
            record=kept,
            output=output,
            engine_name=None,
            native=False,
            peek=False,
            stall_after_s=stall_after_s,
            interval_s=1.0,
            timeout_s=timeout_s,
            until="verdict",
            events=events,
            kill_on_exit=False,
        )
        spent_s = time.monotonic() - began_s
        worth = _compared(plan, played, kept)
    if state != INTERRUPTED:
        say(
            f"hangdoctor: {worth}",
            f"  it took {spent_s:.0f} s; all processes and files of the launch are gone again",
            "  a launch of your own: hangdoctor watch -- python -m sglang.launch_server ...",
        )
    return state


def _compared(plan: Plan, played: Played, kept: Path) -> str:
    """Return what the verdict of the recording, which is the one that was printed, is worth."""
    if plan.fault != "none" and not played.struck:
        return f"the launch did not come to the fault in this time; it would have been: {plan.done}"
    try:
        seen = recording.load(kept)
        engine = engines.load(seen.header.engine or engines.names()[0])
        diagnosis = diagnose(derive(seen, engine), engine)
    except HangdoctorError as error:
        return f"whether that is right cannot be told: {error}"
    differs = compare(plan, diagnosis)
    if diagnosis.state == "unknown":
        worth = "the verdict leaves it open"
    else:
        worth = f"the verdict is not right: {differs}" if differs else "the verdict is right"
    return f"{worth}; what was done: {plan.done}"


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and a hang-up end us by an exception, so that all is cleaned up before."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores the hang-up
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
