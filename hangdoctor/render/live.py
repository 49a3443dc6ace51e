"""The diagnosis while a launch is watched: as much of it as a terminal has room for, each look.

Sections have several forms, the fullest first. Where all together are too tall, one after another
takes its next form, in the order of `_SHORTER`, until they fit. The text is the target's in part,
so that nothing here is ever read as rich's markup.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.text import Text

from hangdoctor.engines import Phase, load
from hangdoctor.facts import stamp_age_s
from hangdoctor.facts.rank_view import MOVING_S
from hangdoctor.frames import place
from hangdoctor.launches import ranges
from hangdoctor.model import Gpu, Missing, Struct
from hangdoctor.render.json import engine_version
from hangdoctor.render.text import clean, ends_by_itself, how_sure
from hangdoctor.rules.case import waits_in
from hangdoctor.units import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from hangdoctor.facts import Facts, RankFacts
    from hangdoctor.findings import Diagnosis
    from hangdoctor.tracks import Track

STATE_STYLES = {
    "hung": "bold red",
    "dead": "bold red",
    "unknown": "bold yellow",
    "slow": "bold yellow",
    "starting": "bold cyan",
    "ready": "bold green",
}
FEW = 4
"""So many ranks or cards have a line each; of more, equal ones share one."""
MOST_NAMED = 8
"""More culprits than so many that do the same share a line, too."""
FRAMES_SHOWN = 5
BUSY_PCT = 50.0
MEMORY_STEP = 1.1
MEMORY_SLACK_BYTES = 256 << 20
"""Cards whose memory differs by no more than this tenth and this much are equal."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SHORTER = (
    *("ranks", "next", "footer", "log", "ranks", "unseen", "gaps", "next", "verdict", "log"),
    *("ranks", "gpus", "ranks", "unseen", "gpus", "ranks", "next", "verdict", "log", "gpus"),
    *("next", "log", "ranks", "verdict"),
)


class Row(Struct, frozen=True):
    """A line of the table of ranks and other processes.

    Attributes:
        name, pid, phase: None and "" for what it has not.
        phase_s: how long it is in the phase; at_least: that it was in it when we came.
        moves: "moves", "idle", "still", "ended", "-" (not there) or "?"; still_s goes with "still".
        does: where it is, or by what it moves.
        same: what must be equal besides for two of them to do the same.
        is_rank, is_culprit: of the launch.
        details: lines below it, where there is room.
    """

    name: str
    pid: int | None = None
    phase: Phase | None = None
    phase_s: float | None = None
    at_least: bool = False
    moves: str = "?"
    still_s: float | None = None
    does: str = ""
    same: tuple[str, ...] = ()
    is_rank: bool = True
    is_culprit: bool = False
    details: tuple[str, ...] = ()


class CardRow(Struct, frozen=True):
    """A line of the table of GPUs: a card, or several of which the numbers are ranges."""

    indices: tuple[int, ...]
    ranks: tuple[str, ...]
    reading: str
    is_culprit: bool
    since_s: tuple[float, ...]
    gpus: tuple[Gpu | Missing, ...]


def view(facts: Facts, diagnosis: Diagnosis, width: int, height: int) -> Group:
    """Return the view: at most `height` lines, none wider than `width` cells."""
    width, height = max(width, 1), max(height, 1)
    forms: dict[str, list[list[Text]]] = {
        "verdict": _verdict_forms(facts, diagnosis, width),
        "next": _next_forms(diagnosis, width),
        "ranks": _rank_forms(facts, diagnosis, width),
        "gpus": _card_forms(facts, diagnosis, width),
        "log": _log_forms(facts, diagnosis, width),
        "unseen": _unseen_forms(diagnosis, width),
        "footer": [[_footer(facts)], []],
        "gaps": [[Text()], []],
    }
    for name in _SHORTER:
        if len(_stacked(forms)) <= height:
            break
        if len(forms[name]) > 1:
            forms[name].pop(0)
    lines = _stacked(forms)[:height]
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
        line.truncate(width, overflow="crop")
    return Group(*lines)


def _stacked(forms: dict[str, list[list[Text]]]) -> list[Text]:
    """Return the lines of all sections as they stand now."""
    lines: list[Text] = []
    for name, section in forms.items():
        if name != "gaps" and section[0]:
            lines += [gap.copy() for gap in forms["gaps"][0] if lines]
            lines += section[0]
    return lines


def _verdict_forms(facts: Facts, diagnosis: Diagnosis, width: int) -> list[list[Text]]:
    style = STATE_STYLES[diagnosis.state]
    names = [rank.name for rank in facts.ranks]
    phase = "" if diagnosis.state == "ready" else f" in {diagnosis.phase or 'an unknown phase'}"
    who = f": {', '.join(ranges(diagnosis.culprits, names))}" if diagnosis.culprits else ""
    head = Text(diagnosis.state.upper(), style)
    head.append(clean(phase + who), "bold")
    sure, *more = how_sure(facts, diagnosis)
    if head.cell_len + cell_len(sure) + 2 <= width:
        head.append(" " * (width - head.cell_len - cell_len(sure)) + sure, "dim")
    else:
        more.insert(0, sure)
    if head.cell_len > width > 16:  # narrower, the state alone fits
        head.truncate(width - 3, overflow="crop")
        head.append("...")
    version = engine_version(facts)
    more.append(f"{facts.engine} {version}" if version else facts.engine)
    about = [Text(line, "dim") for line in _wrap(", ".join(more), width - 2, 1)]
    titles = [_wrap(diagnosis.title, width - 2, most) for most in (3, 2, 1)]
    filled = [[Text(f"  {line}") for line in title] for title in titles]
    indented = [Text("  ").append_text(line) for line in about]
    ends = [
        Text(f"  {line}")
        for each in ends_by_itself(diagnosis)
        for line in _wrap(each.title, width - 2, 2)
    ]
    return [
        [head, *filled[0], *ends, *indented],
        [head, *filled[1], *ends[:1], *indented],
        [head, *filled[2]],
        [head],
    ]


def _next_forms(diagnosis: Diagnosis, width: int) -> list[list[Text]]:
    findings = diagnosis.findings[:5]
    needs = list(dict.fromkeys(need for finding in findings for need in finding.needs))
    advice = list(dict.fromkeys(tip for finding in findings for tip in finding.advice))
    if diagnosis.state in ("ready", "dead", "hung"):
        needs = []
    if diagnosis.state == "ready":
        advice = []

    def lines(most: int, deep: int) -> list[Text]:
        said = [("To decide  ", need) for need in needs[: 2 if most > 2 else 1]]
        tips = advice[: most - (most < 3 and bool(said))]
        said += [("Next  ", f"{number}. {tip}") for number, tip in enumerate(tips, start=1)]
        found: list[Text] = []
        before = ""
        for label, text in said:
            for part in _wrap(text, width - len(label), deep):
                shown = label if label != before else " " * len(label)
                found.append(Text(shown, "bold").append(part, ""))
                before = label
        return found

    return [lines(4, 3), lines(2, 2), lines(1, 2), lines(1, 1), []]


def _rank_forms(facts: Facts, diagnosis: Diagnosis, width: int) -> list[list[Text]]:
    ranks = [_rank_row(facts, rank, diagnosis) for rank in facts.ranks]
    others = [_other_row(facts, track) for track in _others(facts)]
    telling = [row for row in others if not ranks or row.moves == "ended"]
    style = STATE_STYLES[diagnosis.state]
    equal = _grouped(ranks, _all_that_shows)
    apart = ranks if len(ranks) <= FEW else equal

    def table(
        rows: list[Row], beside: list[Row], *, wrap: int, details: bool = False
    ) -> list[Text]:
        details = details and diagnosis.state != "ready"
        shown = [*rows, *_grouped(beside, _all_that_shows)]
        return _rank_table(shown, style, width, wrap=wrap, details=details) if shown else []

    return [
        table(apart, others, wrap=3, details=True),
        table(apart, others, wrap=2),
        table(apart, telling, wrap=1),
        table(equal, telling, wrap=1),
        table(_grouped(ranks, _where_it_is), telling, wrap=1),
        table(_grouped(ranks, _how_it_goes), telling[:1], wrap=1),
        table(_grouped(ranks, lambda row: row.is_culprit), [], wrap=1),
    ]


def _all_that_shows(row: Row) -> Hashable:
    return (*_where(row), _NUMBER.sub("#", row.does) if row.moves == "moves" else "")


def _where_it_is(row: Row) -> Hashable:
    return _where(row)


def _where(row: Row) -> tuple[Hashable, ...]:
    return row.is_rank, row.is_culprit, row.phase, row.moves, *row.same


def _how_it_goes(row: Row) -> Hashable:
    return row.is_culprit, row.phase, row.moves


def _grouped(rows: Sequence[Row], key: Callable[[Row], Hashable]) -> list[Row]:
    """Return a row for each group of equal rows, where the first of them stands."""
    named = sum(row.is_culprit for row in rows) <= MOST_NAMED
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        own = row.name if row.is_culprit and named else ""
        groups.setdefault((key(row), own), []).append(row)
    names = [row.name for row in rows]
    return [_together(group, names) for group in groups.values()]


def _together(group: list[Row], names: Sequence[str]) -> Row:
    first = group[0]
    if len(group) == 1:
        return first
    phases = {row.phase for row in group}
    still = [row.still_s for row in group if row.still_s is not None]
    moves = {row.moves for row in group}
    if not first.is_rank:
        name = f"{first.name} ({len(group)})"
    else:
        name = _counted([row.name for row in group], names)
    return Row(
        name=name,
        phase=first.phase if len(phases) == 1 else None,
        phase_s=min((row.phase_s for row in group if row.phase_s is not None), default=None),
        at_least=any(row.at_least for row in group) or len({row.phase_s for row in group}) > 1,
        moves=first.moves if len(moves) == 1 else "differs",
        still_s=min(still, default=None) if moves == {"still"} else None,
        does=_in_common([row.does for row in group]),
        is_rank=first.is_rank,
        is_culprit=first.is_culprit,
        details=first.details,
    )


def _in_common(texts: Sequence[str]) -> str:
    """Return one text for several: numbers that differ become a range.

    >>> _in_common(["reads 5.2 MB/s", "reads 61.0 MB/s"]), _in_common(["grows", "reads 5 MB/s"])
    ('reads 5.2-61.0 MB/s', 'such as: grows')
    """
    if len(set(texts)) == 1:
        return texts[0]
    if len({_NUMBER.sub("#", text) for text in texts}) > 1:
        return f"such as: {texts[0]}"
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    filled = iter(
        low if low == high else f"{low}-{high}"
        for low, high in ((min(c, key=float), max(c, key=float)) for c in columns)
    )
    return _NUMBER.sub(lambda _: next(filled), texts[0])


def _rank_row(facts: Facts, rank: RankFacts, diagnosis: Diagnosis) -> Row:
    track = facts.track(rank)
    where = waits_in(rank.wait) if rank.wait else rank.place
    if not where and rank.stack_missing is not None:
        where = f"no stack: {rank.stack_missing.reason}"
    moves, does = _movement(rank), where or "no stack seen yet"
    if rank.present is False:
        does = _how_it_ended(track) if track else "not there yet"
    elif moves == "moves":
        does = "; ".join(part for part in (rank.moved_by, waits_in(rank.wait) if rank.wait else ""))
        does = does.strip("; ") or where
    busy = moves == "still" and rank.cpu_pct is not None and rank.cpu_pct >= BUSY_PCT
    if busy:
        does += f", CPU {rank.cpu_pct:.0f} %"
    waits = rank.wait.id if rank.wait else ""
    came = rank.phase_since_s == facts.first_at_s
    return Row(
        name=rank.name,
        pid=rank.pid,
        phase=rank.phase,
        phase_s=rank.in_phase_s,
        at_least=came and rank.in_phase_s == (facts.at_s or 0.0) - rank.phase_since_s,
        moves=moves,
        still_s=rank.still_s if moves == "still" else None,
        does=does,
        same=(waits, "" if moves == "moves" or waits else does, str(busy)),
        is_culprit=rank.name in diagnosis.culprits,
        details=_details(facts, rank),
    )


def _movement(rank: RankFacts) -> str:
    if rank.present is False:
        return "ended" if rank.pid is not None else "-"
    if rank.moving:
        return "moves"
    if rank.wait and rank.wait.kind == "idle":
        return "idle"
    return "still" if rank.still_s is not None else "?"


def _details(facts: Facts, rank: RankFacts) -> tuple[str, ...]:
    """Return what more there is to say of a rank: its stack, the kernel's words, its last line."""
    found = []
    if rank.stack and rank.present is not False:
        frames = rank.stack[:FRAMES_SHOWN]
        found.append("stack: " + " < ".join(place(frame) for frame in frames))
    state = f"state {rank.state}" if rank.state else ""
    kernel = f"in {rank.kernel}" if rank.kernel not in ("", "0") else ""
    cpu = "" if rank.cpu_pct is None else f"CPU {rank.cpu_pct:.0f} %"
    said = [" ".join(part for part in (state, kernel) if part), cpu]
    if rank.present is not False and any(said):
        found.append("seen: " + ", ".join(part for part in said if part))
    log = facts.timeline.ranks.get(rank.name)
    if log is not None and log.last is not None:
        found.append(f"log: {log.last.text}")
    return tuple(found)


def _how_it_ended(track: Track) -> str:
    if track.exit_status is not None:
        by = f"killed by signal {-track.exit_status}"
        return by if track.exit_status < 0 else f"exit status {track.exit_status}"
    return "ended, its parent has not asked how" if track.process.state == "Z" else "ended"


def _others(facts: Facts) -> list[Track]:
    """Return the processes with a role that are no ranks; of those that ended only the lasting."""
    return [
        track
        for track in facts.tracks.values()
        if track.role
        and not track.rank
        and track.role != "wrapper"
        and (track.present or track.role != "spawn_main")
    ]


def _other_row(facts: Facts, track: Track) -> Row:
    at_s = facts.at_s or 0.0
    wait = load(facts.engine).wait(track.wait[0]) if track.wait else None
    where = waits_in(wait) if wait else (place(track.stack[0]) if track.stack else "no stack seen")
    moves, still_s, does = "?", None, where
    if not track.present or track.process.state in "ZX":
        moves, does = "ended", _how_it_ended(track)
    elif track.moved_at_s is not None and at_s - track.moved_at_s <= MOVING_S:
        moves, does = "moves", track.moved_by
    elif wait and wait.kind == "idle":
        moves = "idle"
    elif at_s - track.first_at_s >= MOVING_S:
        moves, still_s = "still", at_s - max(track.first_at_s, track.moved_at_s or 0.0)
    return Row(
        name=track.role,
        pid=track.process.pid,
        moves=moves,
        still_s=still_s,
        does=does,
        same=(track.role, "" if moves == "moves" else does),
        is_rank=False,
    )


def _rank_table(
    rows: Sequence[Row], style: str, width: int, *, wrap: int, details: bool
) -> list[Text]:
    """Return the table of ranks; `wrap` lines for what a rank does, and its details below it."""
    columns = [("RANK", [row.name for row in rows], 24)]
    if width >= 60 and any(row.pid is not None for row in rows):
        columns.append(("PID", ["" if row.pid is None else str(row.pid) for row in rows], 10))
    columns.append(("PHASE", [row.phase or ("?" if row.is_rank else "") for row in rows], 16))
    if width >= 50:
        columns.append(("FOR", [_for(row) for row in rows], 8))
    columns.append(("MOVES", [_moves(row) for row in rows], 13))
    heads, cells, widths = _laid_out(columns)
    left = 2 + sum(widths) + 2 * len(widths)
    room = max(8, width - left)
    lines = [Text("  " + heads + "DOES", "dim")]
    few = sum(row.is_rank for row in rows) <= FEW
    for row, cell in zip(rows, cells, strict=True):
        does, *rest = _wrap(row.does, room, wrap if row.is_rank else 1) or [""]
        row_style = style if row.is_culprit else _row_style(row)
        lines.append(
            Text("> " if row.is_culprit else "  ", style)
            .append(cell, row_style)
            .append(does, row_style)
        )
        lines += [Text(" " * left).append(part, row_style) for part in rest]
        if details and (row.is_culprit or (few and row.is_rank)):
            for detail in row.details:
                parts = _wrap(detail, width - 4, 2 if row.is_culprit else 1, indent=6)
                lines += [Text("    ").append(part, "dim") for part in parts]
    return lines


def _row_style(row: Row) -> str:
    return {"moves": "green", "idle": "green", "ended": "bold red", "-": "dim"}.get(
        row.moves, "" if row.is_rank else "dim"
    )


def _for(row: Row) -> str:
    if row.phase_s is None:
        return ""
    return f"{'>' if row.at_least else ''}{duration(row.phase_s)}"


def _moves(row: Row) -> str:
    return f"still {duration(row.still_s)}" if row.still_s is not None else row.moves


def _card_forms(facts: Facts, diagnosis: Diagnosis, width: int) -> list[list[Text]]:
    if not facts.cards:
        return [[]]
    cards = [_card_row(facts, index, diagnosis) for index in sorted(facts.cards)]
    together = _grouped_cards(cards)
    names = [rank.name for rank in facts.ranks]
    style = STATE_STYLES[diagnosis.state]
    readings: dict[str, int] = {}
    for card in cards:
        readings[card.reading] = readings.get(card.reading, 0) + 1
    summary = ", ".join(f"{count} {reading}" for reading, count in readings.items())
    apart = cards if len(cards) <= FEW else together
    return [
        _card_table(facts, apart, names, style, width),
        _card_table(facts, together, names, style, width),
        [Text(f"  GPUs: {summary}")],
        [],
    ]


def _card_row(facts: Facts, index: int, diagnosis: Diagnosis) -> CardRow:
    card = facts.cards[index]
    ranks = tuple(rank.name for rank in facts.ranks if index in rank.cards)
    return CardRow(
        indices=(index,),
        ranks=ranks,
        reading=card.reading,
        is_culprit=bool(set(ranks) & set(diagnosis.culprits)),
        since_s=((facts.at_s or 0.0) - card.since_s,),
        gpus=(card.gpu,),
    )


def _grouped_cards(cards: Sequence[CardRow]) -> list[CardRow]:
    """Put cards together that read the same and whose memory is about the same."""
    groups: dict[Hashable, list[CardRow]] = {}
    for card in sorted(cards, key=_used):
        base = (card.reading, card.is_culprit, bool(card.ranks))
        near = [
            key
            for key, group in groups.items()
            if isinstance(key, tuple)
            and key[:3] == base
            and _used(card) <= _used(group[-1]) * MEMORY_STEP + MEMORY_SLACK_BYTES
        ]
        groups.setdefault(near[-1] if near else (*base, len(groups)), []).append(card)
    joined = [
        CardRow(
            indices=tuple(sorted(index for card in group for index in card.indices)),
            ranks=tuple(name for card in group for name in card.ranks),
            reading=group[0].reading,
            is_culprit=group[0].is_culprit,
            since_s=tuple(since_s for card in group for since_s in card.since_s),
            gpus=tuple(gpu for card in group for gpu in card.gpus),
        )
        for group in groups.values()
    ]
    return sorted(joined, key=lambda card: card.indices)


def _used(card: CardRow) -> int:
    return max((gpu.memory_used_bytes or 0 for gpu in card.gpus if isinstance(gpu, Gpu)), default=0)


def _card_table(
    facts: Facts, cards: Sequence[CardRow], names: Sequence[str], style: str, width: int
) -> list[Text]:
    all_indices = [str(index) for index in sorted(facts.cards)]
    columns = [
        ("GPU", [_counted(list(map(str, card.indices)), all_indices) for card in cards], 16),
        ("RANKS", [", ".join(ranges(card.ranks, names)) or "no rank" for card in cards], 24),
        ("READING", [card.reading for card in cards], 10),
        ("BUSY", [_span(card, lambda gpu: gpu.util_pct, "%") for card in cards], 10),
        ("MEMORY", [_memory(card) for card in cards], 20),
        ("POWER", [_span(card, lambda gpu: gpu.power_w, "W") for card in cards], 10),
    ]
    if width >= 100:
        columns.insert(3, ("FOR", [f"{duration(min(card.since_s))}" for card in cards], 8))
        columns.append(
            (
                "MEMORY BUSY",
                [_span(card, lambda gpu: gpu.memory_util_pct, "%") for card in cards],
                11,
            )
        )
    heads, cells, _ = _laid_out(columns)
    lines = [Text("  " + heads.rstrip(), "dim")]
    for card, cell in zip(cards, cells, strict=True):
        row_style = {"spinning": "yellow", "lost": "bold red", "computing": "green"}.get(
            card.reading, ""
        )
        mark = "> " if card.is_culprit else "  "
        lines.append(Text(mark, style).append(cell.rstrip(), row_style))
    return lines


def _counted(names: Sequence[str], all_names: Sequence[str]) -> str:
    count = f" ({len(names)})" if len(names) > 1 else ""
    return ", ".join(ranges(names, all_names)) + count


def _span(card: CardRow, value: Callable[[Gpu], float | None], unit: str) -> str:
    known = [value(gpu) for gpu in card.gpus if isinstance(gpu, Gpu)]
    found = sorted(each for each in known if each is not None)
    if not found:
        return "?"
    low, high = f"{found[0]:.0f}", f"{found[-1]:.0f}"
    return f"{low} {unit}" if low == high else f"{low}-{high} {unit}"


def _memory(card: CardRow) -> str:
    gpus = [gpu for gpu in card.gpus if isinstance(gpu, Gpu)]
    used = sorted(gpu.memory_used_bytes for gpu in gpus if gpu.memory_used_bytes is not None)
    totals = {gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes}
    if not used:
        return "?"
    low, high = f"{used[0] / 2**30:.1f}", f"{used[-1] / 2**30:.1f}"
    of = f" of {totals.pop() / 2**30:.0f}" if len(totals) == 1 else ""
    return f"{low if low == high else f'{low}-{high}'}{of} GiB"


def _log_forms(facts: Facts, diagnosis: Diagnosis, width: int) -> list[list[Text]]:
    bars = [_bar_line(line, width) for line in _bars(facts, diagnosis)]
    timeline = facts.timeline
    silent = facts.log_silent_s
    missing = facts.sections.get("log")
    if missing is not None and timeline.last is None:
        said = [f"not seen: {missing.detail or missing.reason}"]
    elif facts.lacks_log:
        said = ["has said nothing of this launch yet"]
    elif timeline.last is None:
        said = ["nothing in it yet" if silent is not None else "not seen"]
    else:
        said = [] if silent is None or silent < 1 else [f"silent for {duration(silent)}"]
        ranks = timeline.ranks.items()
        who = [name for name, log in ranks if log.last and log.last.number == timeline.last.number]
        said.append(f"{who[0]}: {timeline.last.text}" if who and who[0] else timeline.last.text)
    last = ", ".join(said)
    wide = [Text("Log  ", "bold").append(part, "") for part in _wrap(last, width - 5, 2)]
    wide[1:] = [Text("     ").append(part, "") for part in _wrap(last, width - 5, 2)[1:]]
    short = [Text("Log  ", "bold").append(part, "") for part in _wrap(last, width - 5, 1)]
    reached = _last_milestone(facts)
    milestone = [Text(f"     {reached}")] if reached else []
    return [[*bars, *wide, *milestone], [*bars, *short, *milestone], [*bars, *short], bars[:1], []]


def _bars(facts: Facts, diagnosis: Diagnosis) -> Iterator[tuple[str, int, int, str]]:
    """Yield the bars that run, with how long ago each advanced."""
    phases = {rank.phase for rank in facts.ranks if rank.present is not False} | {diagnosis.phase}
    for bar in facts.timeline.bars.values():
        if bar.phase in phases and 0 <= bar.done < bar.total and diagnosis.state != "ready":
            ago_s = stamp_age_s(facts, bar.time_s)
            yield bar.id, bar.done, bar.total, "" if ago_s is None else f"{duration(ago_s)} ago"


def _bar_line(bar: tuple[str, int, int, str], width: int) -> Text:
    name, done, total, ago = bar
    after = f" {done}/{total}" + (f", last {ago}" if ago else "")
    room = max(4, min(40, width - len(name) - len(after) - 4))
    filled = room * done // max(1, total)
    return (
        Text(f"{name} ", "bold")
        .append("[" + "#" * filled + "-" * (room - filled) + "]")
        .append(after)
    )


def _last_milestone(facts: Facts) -> str:
    passed = [
        (reached.number, name, reached)
        for name, log in facts.timeline.ranks.items()
        for reached in log.milestones
    ]
    if not passed:
        return ""
    _, name, reached = max(passed, key=lambda each: each[0])
    ago_s = stamp_age_s(facts, reached.time_s)
    ago = "" if ago_s is None else f", {duration(ago_s)} ago"
    return clean(f"last milestone: {reached.id}{f' of {name}' if name else ''}{ago}")


def _unseen_forms(diagnosis: Diagnosis, width: int) -> list[list[Text]]:
    by_reason: dict[str, list[str]] = {}
    for unseen in diagnosis.unseen:
        by_reason.setdefault(unseen.missing.reason, []).append(unseen.what)
    parts = [
        ", ".join(whats[:3])
        + (f" and {len(whats) - 3} more" if len(whats) > 3 else "")
        + f" ({reason})"
        for reason, whats in by_reason.items()
    ]
    if not parts:
        return [[]]
    label = "Not seen  "
    texts = [_wrap("; ".join(parts), width - len(label), most) for most in (2, 1)]
    return [
        [
            Text(label if number == 0 else " " * len(label), "bold").append(part, "")
            for number, part in enumerate(text)
        ]
        for text in texts
    ] + [[]]


def _footer(facts: Facts) -> Text:
    source = _cut(clean(facts.header.source), 30)
    return Text(f"watching {source}; Ctrl-C ends it with the verdict so far", "dim")


def _laid_out(columns: Sequence[tuple[str, list[str], int]]) -> tuple[str, list[str], list[int]]:
    """Return the heads and the rows as strings, each column as wide as it must be, and the widths.

    Columns are a head, cells, and the most cells that it may take.
    """
    cleaned = [(head, [clean(cell) for cell in cells], most) for head, cells, most in columns]
    widths = [
        min(
            most,
            max(
                map(
                    cell_len,
                    (head, *cells),
                ),
                default=0,
            ),
        )
        for head, cells, most in cleaned
    ]

    def row(cells: Iterable[str]) -> str:
        return "".join(
            set_cell_size(_cut(cell, wide), wide) + "  "
            for cell, wide in zip(cells, widths, strict=True)
        )

    rows = [row(cells) for cells in zip(*(cells for _, cells, _ in cleaned), strict=True)]
    return row(head for head, _, _ in cleaned), rows, widths


def _cut(text: str, width: int) -> str:
    """Return a text in so many cells, with dots where something is left out."""
    if cell_len(text) <= width:
        return text
    return (set_cell_size(text, width - 3) + "...") if width > 6 else set_cell_size(text, width)


def _wrap(text: str, width: int, most: int, *, indent: int = 0) -> list[str]:
    """Return a text as at most so many lines, clean, with dots where something is left out."""
    width = max(width, 8)
    words = clean(text).split(" ")
    pieces = [piece for word in words for piece in _chopped(word, width - indent)]
    lines: list[str] = []
    for piece in pieces:
        margin = indent if lines else 0
        if lines and cell_len(lines[-1]) + 1 + cell_len(piece) <= width:
            lines[-1] += f" {piece}"
        else:
            lines.append(" " * margin + piece)
    if len(lines) > most:
        rest = " ".join(itertools.chain([lines[most - 1]], (line.strip() for line in lines[most:])))
        lines = [*lines[: most - 1], _cut(rest, width)]
    return lines


def _chopped(word: str, width: int) -> list[str]:
    """Return a word in pieces of at most so many cells, and none for an empty one."""
    if cell_len(word) <= width:
        return [word] if word else []
    pieces = [""]
    for character in word:
        if cell_len(pieces[-1] + character) > width:
            pieces.append("")
        pieces[-1] += character
    return pieces
