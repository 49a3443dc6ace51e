"""What can be seen here, as a table of 80 columns, and as one JSON document."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor import __version__
from hangdoctor.render.json import SCHEMA, encode
from hangdoctor.render.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.preflight import Report, Source

WIDTH = 80
_INDENT = 27


def to_text(report: Report) -> str:
    """Return the report as lines of at most 80 columns; lines to be copied are left whole."""
    lines = [*_wrapped(_headline(report)), *(f"  {line}" for line in _target(report))]
    lines.append("")
    for source in report.sources:
        head = f"  {source.state:<9}{'*' if source.main else ' '} {source.title:<13} "
        body = textwrap.wrap(clean(source.seen), WIDTH - _INDENT, break_on_hyphens=False) or [""]
        lines.append(head + body[0])
        lines += [" " * _INDENT + more for more in body[1:]]
    lines += ["", "  * a main source: the exit code is 1 where one is not open"]
    needy = [one for one in report.sources if one.state in ("partly", "closed")]
    needy.sort(key=lambda one: not one.main)
    lines += _costs(needy)
    return "\n".join(lines)


def to_json(report: Report) -> str:
    """Return the report as a JSON document."""
    target = report.target
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "version": __version__,
        "open": not report.closed,
        "pid": target.pid,
        "launch": target.launch or None,
        "note": target.note or None,
        "processes": {str(pid): name for pid, name in target.names.items()},
        "user": report.user,
        "container": report.kind,
        "sources": [
            {
                "id": one.id,
                "state": one.state,
                "main": one.main,
                "seen": one.seen,
                "loses": list(one.loses) if one.state != "open" else [],
                "undecided": list(one.undecided) if one.state != "open" else [],
                "cost": one.cost if one.state != "open" else "",
                "ways": list(one.ways),
            }
            for one in report.sources
        ],
    }
    return msgspec.json.format(encode(document)).decode()


def _headline(report: Report) -> str:
    main = [one for one in report.sources if one.main and one.state != "not here"]
    if not report.closed:
        return f"OPEN: all {len(main)} main sources can be seen"
    names = ", ".join(one.title for one in report.closed)
    are = "is" if len(report.closed) == 1 else "are"
    return (
        f"CLOSED: {len(report.closed)} of {len(main)} main sources {are} not wholly open: {names}"
    )


def _target(report: Report) -> Iterator[str]:
    target = report.target
    if target.pid is None:
        what = "the machine in general, tried on a process of our own"
    else:
        what = f"PID {target.pid}" + (f" of {target.launch}" if target.launch else "")
    who = "root" if report.user == 0 else f"user {report.user}"
    yield from _wrapped(f"looked at: {what}; as {who}", 2)
    if target.note:
        yield from _wrapped(target.note, 2)


def _costs(needy: list[Source]) -> list[str]:
    """Return what the closed ones cost and what opens them; those with the same ways together."""
    lines: list[str] = []
    if needy:
        lines += ["", "What that costs"]
    said: dict[tuple[str, ...], str] = {}
    for one in needy:
        parts = []
        if one.loses:
            parts.append(f"not found: {', '.join(one.loses)}")
        if one.undecided:
            which = ", ".join(one.undecided)
            if one.undecided in said:
                which = f"the same as for {said[one.undecided]}"
            said.setdefault(one.undecided, one.title)
            parts.append(f"no longer hung, only undecided: {which}")
        if one.cost:
            parts.append(one.cost)
        lines += [
            part
            for number, text in enumerate(parts)
            for part in textwrap.wrap(
                text,
                WIDTH,
                initial_indent=f"  {one.title + ':' if not number else '':<14} ",
                subsequent_indent=" " * 17,
                break_on_hyphens=False,
            )
        ]
    by_ways: dict[tuple[str, ...], list[str]] = {}
    for one in needy:
        if one.ways:
            by_ways.setdefault(one.ways, []).append(one.title)
    if by_ways:
        lines += ["", "What opens it"]
    for ways, titles in by_ways.items():
        lines += [f"  {line}" for line in _wrapped(", ".join(titles) + ":", 2)]
        lines += [f"    {clean(way)}" for way in ways]
    return lines


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(clean(text), WIDTH - indent, break_on_hyphens=False)
