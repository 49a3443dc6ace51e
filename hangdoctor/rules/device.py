"""Rules over the GPUs' readings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hangdoctor import gpus
from hangdoctor.findings import Evidence, Finding, enumerate_names
from hangdoctor.model import Gpu, Missing
from hangdoctor.rules.case import replicas
from hangdoctor.rules.exits import kernel_messages
from hangdoctor.tracks import own_pids
from hangdoctor.waitgraph import SPIN_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.findings import Confidence
    from hangdoctor.rules.case import Case


def gpu_spinning(case: Case) -> Iterator[Finding]:
    """A card is busy near 100 % and does no work.

    What it sees: utilisation near 100 %, memory interface idle, power a few watts above what the
    card draws with a context and nothing to do, for more than 5 s.
    Why it matters: kernels that wait, for a peer or for ever. Of ranks that wait for each other,
    one whose card idles beside such cards never launched its part, unless others are on those, or
    it waits for its peers on the host. Healthy first prefills look like this for seconds, so that
    it is a reading and no verdict.
    What to do: look at the rank whose card idles; ask NCCL: `nc localhost 28028 <<< status`.
    """
    at_s = case.facts.at_s or 0.0
    waiting = {rank.name for rank in case.graph.waiting}
    spinning = {
        index: card
        for index, card in case.facts.cards.items()
        if card.reading == "spinning" and at_s - card.since_s >= SPIN_S
    }
    if not spinning:
        return
    ranks = [rank.name for rank in case.facts.ranks if set(rank.cards) & set(spinning)]
    its_own = {index for index, card in spinning.items() if not card.shared}
    idle = [
        rank.name
        for part in replicas(case)
        if any(set(rank.cards) & its_own for rank in part.facts.ranks)
        for rank in part.facts.ranks
        if rank.cards and all(_idles(case, index) for index in rank.cards)
    ]
    cards = enumerate_names([f"GPU {index}" for index in spinning])
    # One that waits for its peers on the host has come to another operation, or the kernel is in
    # none: that it lacks in the kernel's is not known.
    absent = [name for name in idle if name not in waiting]
    its = "its" if len(absent) == 1 else "their"
    but = f"; {enumerate_names(absent)} never launched {its} part" if absent else ""
    yield Finding(
        rule="gpu-spinning",
        verdict="found",
        title=f"{cards} {'spins' if len(spinning) == 1 else 'spin'}: busy, but at idle power{but}",
        ranks=tuple(ranks),
        phase=None,
        confidence="low",
        because=tuple(
            Evidence(
                text=f"{_spins(card.gpu, card.idle_power_w)}, for {at_s - card.since_s:.0f} s"
                + (", and not the launch alone is on it" if card.shared else ""),
                at_s=at_s,
            )
            for card in spinning.values()
            if isinstance(card.gpu, Gpu)
        ),
    )


def gpu_lost(case: Case) -> Iterator[Finding]:
    """A card no longer answers the driver: it fell off the bus.

    What it sees: NVML's error "GPU is lost" for a card.
    Why it matters: its rank can never come up, and waits for the card or dies; its peers wait for
    the rank.
    What to do: look for the Xid in the kernel's log; reset the card or reboot the machine.
    """
    for index, card in sorted(case.facts.cards.items()):
        if card.reading != "lost" or not isinstance(card.gpu, Missing):
            continue
        ranks = _ranks_on(case, index)
        on = f", on which {enumerate_names(ranks)} ran" if ranks else ""
        yield _reading(
            case,
            "gpu-lost",
            f"GPU {index} is lost{on}",
            ranks=ranks,
            confidence="medium",
            seen=[card.gpu.detail],
            advice=card.gpu.hint,
        )


def driver_does_not_answer(case: Case) -> Iterator[Finding]:
    """The GPU driver does not answer: a call of NVML has not come back.

    What it sees: the look at the GPUs was given up at its deadline of some seconds.
    Why it matters: a driver that holds a lock for long (memory being pinned on the host, a reset, a
    card in trouble) holds up every CUDA call of the ranks as well; nvidia-smi hangs too.
    What to do: do not start nvidia-smi in a loop, each one may hang for good; look at what the
    kernel waits for: cat /proc/PID/wchan; dmesg | grep -i -e nvrm -e xid.
    """
    missing = case.facts.sections.get("gpus")
    if missing is None or missing.reason != "timeout":
        return
    yield _reading(
        case,
        "driver-does-not-answer",
        "the GPU driver does not answer",
        ranks=[],
        confidence="medium",
        seen=[f"NVML: {missing.detail}"],
        advice="dmesg | grep -i -e nvrm -e xid; start no nvidia-smi beside it, it may hang too",
    )


def gpu_memory_full(case: Case) -> Iterator[Finding]:
    """A card of the launch has no memory left.

    What it sees: less than 256 MiB free on a card on which a rank runs.
    Why it matters: an allocation that fails ends the rank, or makes it try again after it has
    emptied its caches, which is slow; with managed memory it thrashes.
    What to do: look for who else holds memory on the card; a smaller --mem-fraction-static.
    """
    for index, card in sorted(case.facts.cards.items()):
        ranks = _ranks_on(case, index)
        if not ranks or not gpus.is_full(card) or not isinstance(card.gpu, Gpu):
            continue
        used, total = card.gpu.memory_used_bytes or 0, card.gpu.memory_total_bytes or 0
        yield _reading(
            case,
            "gpu-memory-full",
            f"GPU {index} of {enumerate_names(ranks)} is full: {(total - used) / 2**20:.0f} MiB "
            "free",
            ranks=ranks,
            confidence="low",
            seen=[f"GPU {index}: {used / 2**30:.1f} of {total / 2**30:.1f} GiB in use"],
            advice="relaunch with a smaller --mem-fraction-static",
        )


def gpu_shared(case: Case) -> Iterator[Finding]:
    """Somebody else uses a card of the launch, or its memory is held by nobody who lives.

    What it sees: a process outside the launch with more than 512 MiB on a card on which a rank
    runs; one that no longer exists; or more than 4 GiB in use by no process that the driver names.
    Why it matters: the launch has less memory than it takes for granted, and what the card does is
    not all its own. The usual cause is a server before this one that did not end.
    What to do: end what was left behind, if it is yours; else give the launch cards of its own.
    """
    facts = case.facts
    ours = own_pids(facts.tracks.values())
    for index, card in sorted(facts.cards.items()):
        ranks = _ranks_on(case, index)
        named = [
            process
            for process in (card.last.processes if card.last else None) or ()
            if process.pid in ours
        ]
        if not ranks or not named:
            continue  # PIDs that name none of ours may be those of another namespace
        holders = [
            f"pid {process.pid} ({process.name}), outside the launch, holds "
            f"{(process.used_bytes or 0) / 1e9:.1f} GB of it"
            for process in gpus.strangers(card, ours)
        ]
        holders += [
            f"pid {process.pid}, which no longer exists, holds "
            f"{(process.used_bytes or 0) / 1e9:.1f} GB of it"
            for process in gpus.left_behind(card, ours)
        ]
        if not holders and (untold := gpus.untold_bytes(card)):
            holders = [f"{untold / 1e9:.1f} GB of it belong to no process that the driver names"]
        if holders:
            yield _reading(
                case,
                "gpu-shared",
                f"GPU {index} of {enumerate_names(ranks)} is not its own: {holders[0]}",
                ranks=ranks,
                confidence="low",
                seen=[f"GPU {index}: {one}" for one in holders],
                advice="nvidia-smi: who else is on the GPUs? End what was left behind, if yours",
            )


def gpu_slowed(case: Case) -> Iterator[Finding]:
    """A card's clocks are held down by heat or by its power supply.

    What it sees: NVML's reasons "hardware slowdown", heat or power brake. A power cap under load is
    normal, and not meant.
    Why it matters: one slow card makes all of its group slow: capture, autotune and warm-up take
    several times as long, which is slow and not hung.
    What to do: nvidia-smi -q -d PERFORMANCE,TEMPERATURE; look at cooling and power.
    """
    for index, card in sorted(case.facts.cards.items()):
        gpu = card.gpu
        if not isinstance(gpu, Gpu):
            continue
        reasons = [reason for reason in gpu.slowed_by or () if reason != "power cap"]
        if not reasons or not (ranks := _ranks_on(case, index)):
            continue
        clock = "" if gpu.sm_clock_mhz is None else f", its clock is at {gpu.sm_clock_mhz} MHz"
        heat = "" if gpu.temperature_c is None else f", {gpu.temperature_c} degrees Celsius"
        yield _reading(
            case,
            "gpu-slowed",
            f"GPU {index} of {enumerate_names(ranks)} is slowed down: {', '.join(reasons)}",
            ranks=ranks,
            confidence="low",
            seen=[f"GPU {index}: {', '.join(reasons)}{clock}{heat}"],
            advice=f"nvidia-smi -i {index} -q -d PERFORMANCE,TEMPERATURE",
        )


def gpu_fault(case: Case) -> Iterator[Finding]:
    """The driver reported a fault of a card since the launch began.

    What it sees: lines "NVRM: Xid" in the kernel's log, newer than the launch; Xids that NVML told
    while watching; uncorrected errors of a card's memory that came while watching.
    Why it matters: an Xid tells of a kernel that faulted (13, 31), a card that fell off the bus
    (79) or broken memory (48, 63, 94); a rank whose card is gone waits for it for ever. Some are
    harmless, or another process's, so that it is a reading and no verdict.
    What to do: look the number up in NVIDIA's Xid catalogue; nvidia-smi -q; reset the node.
    """
    facts = case.facts
    pids = {track.process.pid: track.rank or track.role for track in facts.tracks.values()}
    logged = set()
    for message in kernel_messages(facts):
        match = _XID.search(message.text)
        if match is None:
            continue
        logged.add((_bus(match["bus"]), int(match["number"])))
        owner = pids.get(int(match["pid"])) if match["pid"] else None
        yield _fault(
            f"the driver reported Xid {match['number']} on {match['bus']}"
            + (f", of {owner}" if owner else ""),
            [owner] if owner and facts.rank(owner) else [],
            f"kernel: {message.text}",
            f"look Xid {match['number']} up in NVIDIA's catalogue; nvidia-smi -q",
        )
    for index, card in sorted(facts.cards.items()):
        gpu, ranks = card.last, _ranks_on(case, index)
        of = f" of {enumerate_names(ranks)}" if ranks else ""
        for number in dict.fromkeys(gpu.xids or () if gpu else ()):
            if gpu and (_bus(gpu.bus), number) not in logged:
                yield _fault(
                    f"the driver reported Xid {number} on GPU {index}{of}",
                    ranks,
                    f"NVML: Xid {number} on GPU {index} ({gpu.bus})",
                    f"look Xid {number} up in NVIDIA's catalogue; nvidia-smi -i {index} -q",
                )
        errors = gpu.uncorrected_errors if gpu else None
        if errors and card.errors_first is not None and errors > card.errors_first:
            yield _fault(
                f"the memory of GPU {index}{of} has uncorrected errors",
                ranks,
                f"NVML: {errors - card.errors_first} uncorrected errors on GPU {index} while "
                "watching",
                f"nvidia-smi -i {index} -q -d ECC,ROW_REMAPPER; drain the node",
            )


def _idles(case: Case, index: int) -> bool:
    card = case.facts.cards[index]
    return card.reading == "idle" and (case.facts.at_s or 0.0) - card.since_s >= SPIN_S


def _fault(title: str, ranks: list[str], seen: str, advice: str) -> Finding:
    return Finding(
        rule="gpu-fault",
        verdict="found",
        title=title,
        ranks=tuple(ranks),
        confidence="medium" if ranks else "low",
        because=(Evidence(text=seen),),
        advice=(advice,),
    )


def _reading(
    case: Case,
    rule: str,
    title: str,
    *,
    ranks: list[str],
    confidence: Confidence,
    seen: list[str],
    advice: str,
) -> Finding:
    """Return a finding that only describes a card as it is now."""
    return Finding(
        rule=rule,
        verdict="found",
        title=title,
        ranks=tuple(ranks),
        confidence=confidence,
        because=tuple(Evidence(text=text, at_s=case.facts.at_s) for text in seen),
        advice=(advice,),
    )


def _spins(gpu: Gpu, idle_power_w: float | None) -> str:
    power = "" if gpu.power_w is None else f", {gpu.power_w:.0f} W"
    if idle_power_w is not None:
        power += f" against {idle_power_w:.0f} W idle"
    elif gpu.power_limit_w is not None:
        power += (
            f", little of the {gpu.power_limit_w:.0f} W that it may draw (what it draws idle was "
            "not seen)"
        )
    return (
        f"GPU {gpu.index}: {gpu.util_pct} % busy, memory interface {gpu.memory_util_pct} %{power}"
    )


def _ranks_on(case: Case, index: int) -> list[str]:
    return [rank.name for rank in case.facts.ranks if index in rank.cards]


def _bus(address: str) -> str:
    """Return a bus address as the kernel's log and NVML both write it, but for leading zeros.

    >>> _bus("PCI:0000:1b:00") == _bus("00000000:1B:00.0")
    True
    """
    parts = address.upper().removeprefix("PCI:").split(".")[0].split(":")
    return ":".join(part.lstrip("0") or "0" for part in parts)


_XID = re.compile(r"NVRM: Xid \((?P<bus>[^)]*)\): (?P<number>\d+)(?:, pid=(?P<pid>\d+))?")
