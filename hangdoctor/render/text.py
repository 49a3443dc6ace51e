"""The diagnosis for a terminal at three in the morning: the verdict first, then why, then what."""

from __future__ import annotations

import shutil
import sys
import textwrap
import unicodedata
from typing import TYPE_CHECKING

from hangdoctor.gpus import COPY_BYTES_PER_S
from hangdoctor.model import Installation, Missing
from hangdoctor.render.json import engine_version
from hangdoctor.rules.case import waits_in
from hangdoctor.units import duration
from hangdoctor.waitgraph import links

if TYPE_CHECKING:
    from hangdoctor.engines import Phase
    from hangdoctor.facts import Facts, RankFacts
    from hangdoctor.findings import Diagnosis, Evidence, Finding, Normal

MOST_RANKS = 16
MOST_EVIDENCE = 6
MOST_UNSEEN = 6
LIMIT_RULE = "ends-by-itself"
"""Said at the head of the report."""
MOST_OF_A_LINE = 160
"""Characters of an evidence that quotes the log."""


def to_text(facts: Facts, diagnosis: Diagnosis) -> str:
    """Return the diagnosis as plain lines without a newline at the end.

    Where stdout is a terminal, what is only read is wrapped to its width; advice and hints, whose
    commands are copied, are left whole, as everything is for a file or a pipe.
    """
    lines = [verdict_line(diagnosis), f"  {diagnosis.title}"]
    lines.append("  " + ", ".join(how_sure(facts, diagnosis)))
    if diagnosis.normal:
        lines.append("  " + _normal_words(diagnosis.normal, diagnosis.phase))
    lines += [f"  {each.title}; {each.because[0].text}" for each in ends_by_itself(diagnosis)]
    if where := _what_runs(facts):
        lines.append("  " + where)
    if facts.ranks:
        lines += ["", "Ranks"]
        lines += [f"  {_rank_line(rank)}" for rank in facts.ranks[:MOST_RANKS]]
        if len(facts.ranks) > MOST_RANKS:
            lines.append(f"  and {len(facts.ranks) - MOST_RANKS} more")
    waits = _wait_lines(facts) if diagnosis.state != "ready" else []
    if waits:
        lines += ["", "Waits", *waits]
    if facts.cards:
        lines += ["", "GPUs"]
        lines += [f"  {_gpu_line(facts, index)}" for index in sorted(facts.cards)]
    shown = _worth_showing(diagnosis)
    if shown:
        lines += ["", "Because"]
        for finding in shown:
            mark = {"found": "+", "undecided": "?", "ruled-out": "-"}[finding.verdict]
            lines.append(f"  {mark} {finding.title}  [{finding.rule}]")
            lines += [f"      {_evidence(item)}" for item in finding.because[:MOST_EVIDENCE]]
    decided = diagnosis.state == "hung"  # then what is undecided besides decides nothing any more
    open_ones = [finding for finding in shown if finding.verdict == "found" or not decided]
    needs = list(dict.fromkeys(need for finding in open_ones for need in finding.needs))
    if needs and diagnosis.state not in ("ready", "dead"):
        lines += ["", "What would decide it"]
        lines += [f"  - {need}" for need in needs[:6]]
    width = _terminal_width()
    lines = [part for line in lines for part in _wrapped(clean(line), width)]
    advice = list(dict.fromkeys(tip for finding in shown for tip in finding.advice))
    if advice:
        lines += ["", "Next"]
        lines += [f"  {number}. {clean(tip)}" for number, tip in enumerate(advice[:6], start=1)]
    if diagnosis.experiments:
        lines += ["", "To tell the causes apart, the cheapest first"]
        lines += [clean(line) for line in _experiment_lines(diagnosis)]
    if diagnosis.unseen:
        lines += ["", "Not seen"]
        lines += [clean(line) for line in _unseen_lines(diagnosis)]
    return "\n".join(lines)


def verdict_line(diagnosis: Diagnosis) -> str:
    """Return the verdict in one line: state, phase, culprits."""
    phase = "" if diagnosis.state == "ready" else f" in {diagnosis.phase or 'an unknown phase'}"
    who = f": {', '.join(diagnosis.culprits)}" if diagnosis.culprits else ""
    return f"{diagnosis.state.upper()}{phase}{who}"


def clean(text: str) -> str:
    r"""Return text from the target without what a terminal would obey.

    >>> clean("a\x1b[31mb\u202ec\td")
    'a\\x1b[31mb\\u202ec d'
    """
    return "".join(_clean_character(character) for character in text.replace("\t", " "))


def _clean_character(character: str) -> str:
    if character == " " or unicodedata.category(character)[0] not in "CZ":
        return character
    return character.encode("unicode_escape").decode() if character != "\u00a0" else " "


def _terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is, None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _wrapped(line: str, width: int | None) -> list[str]:
    """Return a line as several, the later ones further in; words are left whole."""
    if width is None or len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line,
        max(width, 40),
        subsequent_indent=indent,
        break_long_words=False,  # a path can still be copied
        break_on_hyphens=False,
    )


def _evidence(item: Evidence) -> str:
    if item.log_line is None or len(item.text) <= MOST_OF_A_LINE:
        return item.text
    return item.text[: MOST_OF_A_LINE - 3] + "..."


def how_sure(facts: Facts, diagnosis: Diagnosis) -> list[str]:
    """Return the confidence, and what it rests on."""
    parts = [f"confidence {diagnosis.confidence}"]
    if diagnosis.still_s is not None and diagnosis.still_s >= 1:
        parts.append(f"nothing moved for {diagnosis.still_s:.0f} s")
    if facts.at_s is not None:
        parts.append(f"watched for {facts.watched_s:.0f} s")
    if facts.log_silent_s is not None and facts.log_silent_s >= 1:
        parts.append(f"log silent for {facts.log_silent_s:.0f} s")
    return parts


def _normal_words(normal: Normal, phase: Phase | None) -> str:
    """Say how long it is in its phase, what is normal, and who says so."""
    said = f"{duration(normal.in_phase_s)} in {phase}, "
    longest = duration(normal.longest_s)
    if normal.overdue:
        said += f"longer than the {longest} that are normal"
    else:
        said += f"up to {longest} is normal"
    return f"{said}, by {normal.by} ({normal.note})"


def ends_by_itself(diagnosis: Diagnosis) -> list[Finding]:
    """Return what says which time-out ends this first, and when; empty where none is known to."""
    if diagnosis.state in ("ready", "dead"):
        return []
    counted = [
        each for each in diagnosis.findings if each.rule == LIMIT_RULE and each.verdict == "found"
    ]
    return counted[:1]


def _what_runs(facts: Facts) -> str:
    """Return the engine with its version and place; "" where nothing tells which one it is."""
    version = engine_version(facts)
    name = f"{facts.engine} {version}" if version else facts.engine
    installation = facts.header.installation
    if isinstance(installation, Installation):
        return f"{name} in {installation.path}"
    return name if facts.header.engine or version else ""


def _rank_line(rank: RankFacts) -> str:
    if rank.present is False:
        return f"{rank.name:<6} {'ended' if rank.pid else 'not there'}"
    pid = f"pid {rank.pid}" if rank.pid is not None else "pid ?"
    does = waits_in(rank.wait) if rank.wait else (rank.place or "no stack seen")
    call = rank.blocked.text if rank.blocked else rank.caught_in
    if rank.moving:
        moves = f"moves: {rank.moved_by}" if rank.moved_by else "moves"
    elif rank.still_s is not None:
        moves = f"still for {rank.still_s:.0f} s"
    else:
        moves = ""
    cpu = "" if rank.cpu_pct is None else f"CPU {rank.cpu_pct:.0f} %"
    state = f"state {rank.state}" if rank.state else ""
    details = ", ".join(part for part in (state, call, cpu, moves) if part)
    return f"{rank.name:<6} {pid:<10} {rank.phase or '?':<16} {does}" + (
        f" ({details})" if details else ""
    )


def _wait_lines(facts: Facts) -> list[str]:
    """Return who waits for whom through a descriptor, and where that ends; empty if nobody does."""
    found = links(facts)
    lines = [
        f"  {link.waiter:<10} {'->' if link.sure else '?>'} {link.target:<10} {link.text}, "
        f"for {link.for_s:.0f} s"
        for link in found[:MOST_RANKS]
    ]
    waiters = {link.waiter for link in found}
    for name in dict.fromkeys(link.target for link in found if link.target not in waiters):
        rank = facts.rank(name)
        if rank is None:
            continue
        call = rank.blocked.text if rank.blocked else ""
        does = ", ".join(part for part in (rank.place, call) if part)
        end = waits_in(rank.wait) if rank.wait else "waits for none of them"
        lines.append(f"  {name:<10} {end}{f': {does}' if does and not rank.wait else ''}")
    return lines


def _gpu_line(facts: Facts, index: int) -> str:
    card = facts.cards[index]
    nobody = "no rank" if facts.cards_untold is None else "rank not known"
    ranks = ", ".join(rank.name for rank in facts.ranks if index in rank.cards) or nobody
    gpu = card.gpu
    if isinstance(gpu, Missing):
        return f"{index:<3} {ranks:<10} {card.reading}"
    used = "" if gpu.memory_used_bytes is None else f"{gpu.memory_used_bytes / 2**30:.1f} GiB"
    power = "" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
    busy = "" if gpu.util_pct is None else f"{gpu.util_pct} % busy"
    rate = card.copies_per_s or 0
    copies = f"{rate / 1e6:.0f} MB/s or more over PCIe" if rate >= COPY_BYTES_PER_S else ""
    parts = ", ".join(part for part in (busy, used, power, copies) if part)
    return f"{index:<3} {ranks:<10} {card.reading:<10} {parts}"


def _worth_showing(diagnosis: Diagnosis) -> list[Finding]:
    if diagnosis.state == "ready":
        return list(diagnosis.findings[:1]) + [
            finding for finding in diagnosis.findings[1:] if finding.rule == "files-changed"
        ]
    return [finding for finding in diagnosis.findings if finding.rule != LIMIT_RULE][:5]


def _experiment_lines(diagnosis: Diagnosis) -> list[str]:
    lines = []
    for number, step in enumerate(diagnosis.experiments, start=1):
        start = "relaunch with " if step.kind == "relaunch" else ""
        lines.append(
            f"  {number}. {start}{step.command}" + (f"  ({step.consent})" * bool(step.consent))
        )
        lines += [f"       {seen}: {means}" for seen, means in step.outcomes]
    return lines


def _unseen_lines(diagnosis: Diagnosis) -> list[str]:
    by_reason: dict[tuple[str, str, str], list[str]] = {}
    for unseen in diagnosis.unseen:
        missing = unseen.missing
        by_reason.setdefault((missing.reason, missing.detail, missing.hint), []).append(unseen.what)
    lines = []
    for (reason, detail, hint), whats in list(by_reason.items())[:MOST_UNSEEN]:
        what = ", ".join(whats[:4]) + (f" and {len(whats) - 4} more" if len(whats) > 4 else "")
        lines.append(f"  {what}: {reason}" + (f" ({detail})" if detail else ""))
        if hint:
            lines.append(f"    {hint}")
    return lines
