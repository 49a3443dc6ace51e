"""Rules over the GPUs' readings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hangdoctor.findings import Evidence, Finding, enumerate_names
from hangdoctor.model import Gpu
from hangdoctor.rules.deaths import kernel_messages
from hangdoctor.waitgraph import SPIN_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.rules.case import Case


def gpu_spinning(case: Case) -> Iterator[Finding]:
    """A card is busy near 100 % and does no work.

    What it sees: utilisation near 100 %, memory interface idle, power a few watts above what the
    card draws with a context and nothing to do, for more than 5 s.
    Why it matters: kernels that wait, for a peer or for ever. On all cards but one, the one that
    idles never launched its part. Healthy first prefills look like this for seconds, so that it is
    a reading and no verdict.
    What to do: look at the rank whose card idles; ask NCCL: `nc localhost 28028 <<< status`.
    """
    at_s = case.facts.at_s or 0.0
    spinning = {
        index: card
        for index, card in case.facts.cards.items()
        if card.reading == "spinning" and at_s - card.since_s >= SPIN_S
    }
    if not spinning:
        return
    ranks = [rank.name for rank in case.facts.ranks if set(rank.cards) & set(spinning)]
    idle = [
        rank.name for rank in case.facts.ranks if rank.cards and not set(rank.cards) & set(spinning)
    ]
    cards = enumerate_names([f"GPU {index}" for index in spinning])
    but = f"; {enumerate_names(idle)} never launched its part" if idle and ranks else ""
    yield Finding(
        rule="gpu-spinning",
        verdict="found",
        title=f"{cards} {'spins' if len(spinning) == 1 else 'spin'}: busy, but at idle power{but}",
        ranks=tuple(ranks),
        phase=None,
        confidence="low",
        because=tuple(
            Evidence(
                text=f"GPU {index}: {card.gpu.util_pct} % busy, memory interface "
                f"{card.gpu.memory_util_pct} %, {card.gpu.power_w:.0f} W against "
                f"{card.idle_power_w:.0f} W idle, for {at_s - card.since_s:.0f} s",
                at_s=at_s,
            )
            for index, card in spinning.items()
            if isinstance(card.gpu, Gpu) and card.gpu.power_w and card.idle_power_w
        ),
    )


def gpu_fault(case: Case) -> Iterator[Finding]:
    """The driver reported a fault of a card since the launch began.

    What it sees: lines "NVRM: Xid" in the kernel's log, newer than the launch.
    Why it matters: an Xid tells of a kernel that faulted (13, 31), a card that fell off the bus
    (79) or broken memory (48, 63, 94); a rank whose card is gone waits for it for ever. Some are
    harmless, or another process's, so that it is a reading and no verdict.
    What to do: look the number up in NVIDIA's Xid catalogue; nvidia-smi -q; reset the node.
    """
    facts = case.facts
    pids = {track.process.pid: track.rank or track.role for track in facts.tracks.values()}
    for message in kernel_messages(facts):
        match = _XID.search(message.text)
        if match is None:
            continue
        owner = pids.get(int(match["pid"])) if match["pid"] else None
        yield Finding(
            rule="gpu-fault",
            verdict="found",
            title=f"the driver reported Xid {match['number']} on {match['bus']}"
            + (f", of {owner}" if owner else ""),
            ranks=(owner,) if owner and facts.rank(owner) else (),
            confidence="medium" if owner else "low",
            because=(Evidence(text=f"kernel: {message.text}"),),
            advice=(f"look Xid {match['number']} up in NVIDIA's catalogue; nvidia-smi -q",),
        )


_XID = re.compile(r"NVRM: Xid \((?P<bus>[^)]*)\): (?P<number>\d+)(?:, pid=(?P<pid>\d+))?")
