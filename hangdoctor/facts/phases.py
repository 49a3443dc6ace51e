"""Which phase a rank is in, by its stack and by the log."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from hangdoctor.engines import Engine, Phase, load
from hangdoctor.facts import Facts, phase_index, stamp_age_s
from hangdoctor.frames import first_place
from hangdoctor.logs.timeline import RankLog, phase_of
from hangdoctor.model import Frame, Struct
from hangdoctor.tracks import lives

if TYPE_CHECKING:
    from hangdoctor.facts import RankFacts


def phase_of_rank(
    stack: tuple[Frame, ...] | None,
    stack_at_s: float | None,
    by_log: Phase | None,
    log_at_s: float | None,
    engine: Engine,
) -> tuple[Phase | None, bool]:
    """Return the phase whose code a rank runs, and whether that is sure.

    The stack is the newer witness, unless the log spoke after the dump. Frames that only say "at
    least this far" leave it to the log which of the later phases it is.
    """
    if stack is None:
        return by_log, by_log is not None
    read = read_stack(engine.name, stack)
    best, weak = read.phase, read.at_least
    log_is_newer = log_at_s is not None and log_at_s > (stack_at_s or 0.0)
    if best and not (log_is_newer and phase_index(by_log) > phase_index(best)):
        return best, True
    phases: list[Phase] = [*weak, *([by_log] if by_log else []), *([best] if best else [])]
    return max(phases, key=phase_index, default=None), by_log is not None


def phase_by_log(name: str, facts: Facts) -> Phase | None:
    """Return how far a rank is by the log: its own lines, or the launch's that speak for all."""
    logs = facts.timeline.ranks
    said = any(logs[key].milestones for key in (name, "") if key in logs)
    if not said and not facts.log_is_whole:
        return facts.bar_phase  # nothing was said, or we did not hear it
    return max(phase_of(facts.timeline, name), facts.bar_phase, key=phase_index)


def phase_age_s(name: str, phase: Phase | None, facts: Facts) -> float | None:
    """Return how long ago the log's own stamps say that a rank's phase began; None if they do not.

    Only the milestones at the log's end that lead into this phase: a second model loads again.
    """
    began: list[float] = []
    for key in (name, ""):
        log = facts.timeline.ranks.get(key, RankLog())
        for reached in reversed(log.milestones):
            if reached.phase_after != phase:
                break
            if reached.time_s is not None:
                began.append(reached.time_s)
    return stamp_age_s(facts, min(began, default=None))


def earliest_phase(ranks: tuple[RankFacts, ...]) -> Phase | None:
    """Return the least advanced phase among ranks; None where none is known."""
    known = [rank.phase for rank in ranks if rank.phase]
    return min(known, key=phase_index, default=None)


def launch_phase(facts: Facts) -> Phase | None:
    """Return the least advanced rank's phase, or what the launch's own lines tell.

    Where the processes of some ranks are named already, a rank whose process is not imports still.
    None where ranks are there and neither a stack nor the log tells what they do.
    """
    imports = any(track.role == "spawn_main" and lives(track) for track in facts.tracks.values())
    named = any(rank.present for rank in facts.ranks)
    if named and imports and any(_is_to_come(rank) for rank in facts.ranks):
        return "start"
    there = tuple(rank for rank in facts.ranks if rank.present is not False)
    if phase := earliest_phase(there):
        return phase
    starts = bool(facts.tracks) and (not facts.ranks or imports)
    return facts.launch_log_phase or ("start" if starts else None)


def _is_to_come(rank: RankFacts) -> bool:
    return rank.present is False and rank.pid is None and rank.phase in (None, "start")


def raised_phase(facts: Facts, rank: str, engine: Engine) -> Phase | None:
    """Return the phase whose code a rank's last logged exception came from; None if none tells."""
    log = facts.timeline.ranks.get(rank)
    return read_stack(engine.name, log.raised_in).phase if log and log.raised_in else None


class StackRead(Struct, frozen=True):
    """What an engine's places say of a stack.

    Attributes:
        phase: whose code it runs; at_least: the phases that it has reached.
        compiling: it goes through a kernel compiler or tuner.
    """

    phase: Phase | None
    at_least: tuple[Phase, ...]
    compiling: bool


@lru_cache(maxsize=256)
def read_stack(engine_name: str, stack: tuple[Frame, ...]) -> StackRead:
    """Look for all places of an engine in a stack; it stays the same for many looks."""
    engine = load(engine_name)
    found = [(first_place(stack, table.frames), table.id) for table in engine.phases]
    best = min(
        ((index, phase) for index, phase in found if index is not None),
        key=lambda place_of_phase: place_of_phase[0],
        default=None,
    )
    return StackRead(
        phase=best[1] if best else None,
        at_least=tuple(
            table.id for table in engine.phases if first_place(stack, table.weak_frames) is not None
        ),
        compiling=any(part in f"/{frame.path}" for frame in stack for part in engine.compile_paths),
    )
