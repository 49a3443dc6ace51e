"""Whose the memory is that cards hold when a launch has ended: its own, left behind, or another's.

The memory of a card is shared, and what the launch under test left there counts alone. So it is
told by process: the driver lists who holds how much of a card. Measured on an H200 (driver
580.159), what is in use without a process stands at 615 MiB, 9 more with a process on the card and
6 more for each further one, whatever they hold; for a moment, while memory is taken, it was 270 MiB
less or 60 MiB more.

In a PID namespace (a container) this driver lists the namespace's own processes, by the numbers
that they have there, and leaves out all others, whose memory is in use all the same
(`os_find_ns_pid` of NVIDIA's open kernel module); older ones list all, by the host's numbers. So
memory that no listed process holds is nobody's only where the list was seen to be whole.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hangdoctor.checks import Check
from hangdoctor.collect import COLLECTORS, procfs
from hangdoctor.collect.look import Look
from hangdoctor.collect.worker import ask_once
from hangdoctor.model import Gpu, GpuProcess, Gpus, Struct

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from hangdoctor.facts import Facts
    from hangdoctor.launch import Ended

FREED_S = 15.0
"""The driver may take seconds to free the memory of a killed process; an H200 took below 0.5."""
SLACK_BYTES = 256 << 20
"""Less is not spoken of: what the driver itself holds comes and goes."""
DECIDES = "nvidia-smi --query-compute-apps=gpu_bus_id,pid,process_name,used_memory --format=csv"

_PROC = "/proc"
_PAUSE_S = 0.1


class Share(Struct, frozen=True):
    """Whose the memory is by which a card holds more after a launch than before it.

    Attributes:
        index: of the card.
        nobodys_bytes: of no process, and surely since the launch.
        still: processes of the launch that hold memory still.
        unsure_bytes: of the launch or of somebody else; why: why that cannot be told.
        others: processes that are not of the launch, and what they hold more than before it.
    """

    index: int
    nobodys_bytes: int = 0
    still: tuple[GpuProcess, ...] = ()
    unsure_bytes: int = 0
    why: str = ""
    others: tuple[GpuProcess, ...] = ()

    @property
    def left_bytes(self) -> int:
        """What the launch surely left behind."""
        return self.nobodys_bytes + sum(one.used_bytes or 0 for one in self.still)


def cards_before() -> dict[int, Gpu]:
    """Return the cards before a start: of those in use the calmer of two looks.

    A look while somebody takes memory can show less without a process than there is.
    """
    first = cards_now()
    if not any(card.processes for card in first.values()):
        return first
    second = cards_now()
    return {
        index: max(card, second.get(index, card), key=lambda gpu: _untold(gpu) or 0)
        for index, card in first.items()
    }


def cards_now() -> dict[int, Gpu]:
    """Return the cards that tell how much of their memory is in use; none where nothing tells."""
    found = ask_once("gpus", COLLECTORS["gpus"], Look())
    cards = found.cards.items() if isinstance(found, Gpus) else ()
    return {
        index: card
        for index, card in cards
        if isinstance(card, Gpu) and card.memory_used_bytes is not None
    }


def check_freed(before: dict[int, Gpu], facts: Facts | None, ended: Ended) -> Check | None:
    """Tell whether the cards that a launch used are free of it, for which the driver gets a while.

    Args:
        before: the cards before the start.
        facts: of the launch, with the cards as they were when it was last seen on them.
        ended: how it was ended.

    Returns:
        None where it was seen on no card. "skipped" where it cannot be told whose the memory is.
    """
    held = {
        index: card.held
        for index, card in sorted(facts.cards.items() if facts else ())
        if card.held is not None and index in before
    }
    if not held or facts is None:
        return None
    began_s = time.monotonic()
    sees_all = procfs.sees_all_pids(_PROC)
    while True:
        now = cards_now()
        shares = [
            whose(
                before[index],
                gpu,
                now[index],
                launch=facts.tracks.keys(),
                left=None if ended.lost else {each.pid for each in ended.left},
                sees_all=sees_all,
            )
            for index, gpu in held.items()
            if index in now
        ]
        silent = held.keys() - now.keys()
        free = not silent and all(
            share.left_bytes + share.unsure_bytes <= SLACK_BYTES for share in shares
        )
        took_s = time.monotonic() - began_s
        if free or took_s >= FREED_S:
            return _check(shares, sorted(silent), took_s)
        time.sleep(_PAUSE_S)


def whose(
    before: Gpu,
    held: Gpu,
    after: Gpu,
    *,
    launch: Collection[int],
    left: Collection[int] | None,
    sees_all: bool,
) -> Share:
    """Tell whose the memory is by which a card holds more after a launch than before it.

    Args:
        before: the card before the start.
        held: as it was when the launch was last seen on it.
        after: when all of it has ended.
        launch: PIDs of all its processes that were seen.
        left: PIDs of those that could not be ended; None where others may run still.
        sees_all: we are in the first PID namespace, whose numbers are the driver's own.
    """
    first, then, now = _sizes(before), _sizes(held), _sizes(after)
    untold = [bytes_ for gpu in (before, held, after) if (bytes_ := _untold(gpu)) is not None]
    if len(untold) < 3 or not then.keys() - first.keys():
        more = (after.memory_used_bytes or 0) - (before.memory_used_bytes or 0)
        why = (
            "the driver does not tell which process holds how much"
            if len(untold) < 3
            else "the driver named no process of the launch, as in a container"
        )
        return Share(index=after.index, unsure_bytes=max(0, more), why=why)
    named = not then.keys().isdisjoint(launch)  # by the numbers that they have here
    still, others, doubts = [], [], []
    unsure_bytes = 0
    for process in after.processes or ():
        pid, name = process.pid, process.name
        grown = GpuProcess(pid, max(0, now[pid] - first.get(pid, 0)), name)
        doubt = ""
        if pid in first:
            others.append(grown)
        elif left and pid in left:
            still.append(grown)
        elif not (sees_all or named):
            doubt = f"the driver's pid {pid} is of another PID namespace"
        elif name == "":
            if pid in launch:
                still.append(grown)
            else:
                doubt = f"pid {pid} is no more, and was not seen in the launch"
        elif left is None:
            doubt = f"{_name(grown)} may be of the launch"
        else:
            others.append(grown)
        if doubt:
            unsure_bytes += grown.used_bytes or 0
            doubts.append(doubt)
    nobodys = max(0, untold[2] - untold[0])
    # While it ran nothing was nobody's; and the list does not end at the namespace.
    whole = untold[1] - untold[0] <= SLACK_BYTES and (sees_all or not named)
    # What a tenant held that has ended meanwhile may be what is there still.
    strangers = first.keys() | (then.keys() - launch if sees_all or named else set())
    ended = sum(max(first.get(pid, 0), then.get(pid, 0)) for pid in strangers - now.keys())
    sure = max(0, nobodys - ended) if whole and left is not None else 0
    if nobodys - sure > SLACK_BYTES:
        if left is None:
            doubts.append("processes of the launch may run still")
        elif whole:
            doubts.append("a process that is not of the launch held memory and has ended meanwhile")
        elif sees_all:
            doubts.append("some of it was no process's while the launch ran, too")
        else:
            doubts.append("in a container the driver names no process of another one")
    return Share(
        index=after.index,
        nobodys_bytes=sure,
        still=tuple(still),
        unsure_bytes=unsure_bytes + nobodys - sure,
        why="; ".join(doubts),
        others=tuple(others),
    )


def _sizes(gpu: Gpu) -> dict[int, int]:
    return {process.pid: process.used_bytes or 0 for process in gpu.processes or ()}


def _untold(gpu: Gpu) -> int | None:
    """Return what no listed process holds; None where the driver does not tell."""
    if gpu.memory_used_bytes is None or gpu.processes is None:
        return None
    if any(process.used_bytes is None for process in gpu.processes):
        return None
    return gpu.memory_used_bytes - sum(_sizes(gpu).values())


def _check(shares: Sequence[Share], silent: Sequence[int], took_s: float) -> Check:
    failed, unsure, passed = [], [], []
    for share in shares:
        at = f"GPU {share.index}"
        if share.left_bytes > SLACK_BYTES:
            failed += [
                f"{_name(one)} of the launch holds {_size(one)} of {at}" for one in share.still
            ]
            if share.nobodys_bytes > SLACK_BYTES:
                failed.append(
                    f"{at} holds {share.nobodys_bytes / 2**30:.1f} GiB of no process, which were"
                    " not there before the start"
                )
        elif share.left_bytes + share.unsure_bytes > SLACK_BYTES:
            unsure.append(
                f"{at} holds {share.unsure_bytes / 2**30:.1f} GiB of which it cannot be told"
                f" whether the launch left them: {share.why}"
            )
        passed += [
            f"{_size(one)} more of {at} are of {_name(one)}, which is not of the launch"
            for one in share.others
            if (one.used_bytes or 0) > SLACK_BYTES
        ]
    unsure += [f"GPU {index} does not answer any more" for index in silent]
    if unsure:
        unsure.append(f"what decides it, on the host: {DECIDES}")
    nothing = "what the launch held is free"
    return Check(
        name="gpu-memory",
        outcome="failed" if failed else "skipped" if unsure else "passed",
        said="; ".join([*failed, *unsure, *passed] if failed or unsure else [nothing, *passed]),
        kind="left" if failed else "",
        took_s=took_s,
    )


def _name(process: GpuProcess) -> str:
    return f"{process.name} (pid {process.pid})" if process.name else f"pid {process.pid}"


def _size(process: GpuProcess) -> str:
    return f"{(process.used_bytes or 0) / 2**30:.1f} GiB"
