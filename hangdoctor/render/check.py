"""The table of check-patch, in 80 columns, and as one JSON document."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor import __version__
from hangdoctor.check.model import Differs, NotChecked, Same
from hangdoctor.render.json import SCHEMA, encode
from hangdoctor.render.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.check.model import Cell, Check, Column

WIDTH = 80
_TITLE = 32
_WORDS = {"same": "same", "invasive": "differs", "breaks": "BREAKS", "hangs": "HANGS"}


def to_text(check: Check) -> str:
    """Return the table, what its cells mean, and a verdict a column."""
    what = f"{check.engine} {check.version}".strip() or "no engine"
    lines = _wrapped(
        f"Checked by {check.depth}: {what}" + (f" in {check.package}" if check.package else "")
    )
    if check.shallower_because:
        lines += _wrapped(f"not deeper: {check.shallower_because}", "  ")
    lines += [line for note in check.notes for line in _wrapped(note, "  ")]
    wide = max(9, min(12, (WIDTH - _TITLE) // max(1, len(check.columns))))
    lines += [
        "",
        "  " + " " * (_TITLE - 2) + "".join(f"{one.name:<{wide}}" for one in check.columns),
    ]
    for row in check.rows:
        words = [_word(one.cells.get(row.key)) for one in check.columns]
        lines.append(f"  {row.title:<{_TITLE - 2}}" + "".join(f"{word:<{wide}}" for word in words))
    for column in check.columns:
        lines += list(_details(column, check))
    lines += ["", "Verdicts"]
    for column in check.columns:
        lines += _wrapped(f"{column.name + ':':<7}{column.verdict.title}", "  ", 9)
        lines += [f"         {clean(str(place))}" for place in column.verdict.places[:4]]
        if column.verdict.phase:
            who = f", {', '.join(column.verdict.ranks)}" if column.verdict.ranks else ""
            lines.append(f"         phase {column.verdict.phase}{who}")
    return "\n".join(line.rstrip() for line in lines)


def to_json(check: Check) -> str:
    """Return the table as a JSON document."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "version": __version__,
        "engine": {"name": check.engine or None, "version": check.version or None},
        "package": check.package or None,
        "depth": check.depth,
        "not_deeper_because": check.shallower_because or None,
        "notes": list(check.notes),
        "columns": [
            {
                "name": one.name,
                "title": one.title,
                "files": list(one.files),
                "verdict": {
                    "kind": one.verdict.kind,
                    "title": one.verdict.title,
                    "depth": one.verdict.depth,
                    "phase": one.verdict.phase,
                    "ranks": list(one.verdict.ranks),
                    "places": [msgspec.to_builtins(place) for place in one.verdict.places],
                },
                "rows": [
                    {"key": row.key, "title": row.title, "depth": row.depth}
                    | _cell(one.cells.get(row.key))
                    for row in check.rows
                ],
            }
            for one in check.columns
        ],
    }
    return msgspec.json.format(encode(document)).decode()


def _cell(cell: Cell | None) -> dict[str, Any]:
    if isinstance(cell, Same):
        return {"is": "same", "note": cell.note}
    if isinstance(cell, Differs):
        return {
            "is": "differs",
            "differences": [
                {
                    "how": one.how,
                    "effect": one.effect,
                    "places": [msgspec.to_builtins(place) for place in one.places],
                    "phase": one.phase,
                    "ranks": list(one.ranks),
                    "sure": one.sure,
                    "only_with": one.only_with or None,
                }
                for one in cell.differences
            ],
        }
    return {"is": "not checked", "why": cell.why if cell else "not asked for"}


def _word(cell: Cell | None) -> str:
    if isinstance(cell, Same):
        return "same"
    if isinstance(cell, Differs):
        worst = cell.differences[0]
        return _WORDS["invasive" if worst.only_with else worst.effect]
    return "-"


def _details(column: Column, check: Check) -> Iterator[str]:
    lines: list[str] = []
    whys: dict[str, list[str]] = {}
    for row in check.rows:
        cell = column.cells.get(row.key)
        if isinstance(cell, Same) and cell.note:
            lines += _wrapped(f"{row.title}: {cell.note}", "  = ", 4)
        elif isinstance(cell, NotChecked):
            whys.setdefault(cell.why, []).append(row.title)
        elif isinstance(cell, Differs):
            for one in cell.differences:
                more = f", with {one.only_with}" if one.only_with else ""
                doubt = "" if one.sure else "perhaps: "
                lines += _wrapped(f"{row.title}: {doubt}{one.how}{more}", "  ! ", 4)
                lines += [f"      {clean(str(place))}" for place in one.places[:4]]
    for why, titles in whys.items():
        lines += _wrapped(f"not checked: {', '.join(titles)}: {why}", "  - ", 4)
    if lines:
        yield ""
        yield from _wrapped(f"{column.name}: {column.title}")
        yield from lines


def _wrapped(text: str, lead: str = "", indent: int | None = None) -> list[str]:
    return textwrap.wrap(
        clean(text),
        WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * (len(lead) if indent is None else indent),
        break_on_hyphens=False,
    )
