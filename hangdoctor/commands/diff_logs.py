"""Where a log parts from the logs of good starts."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from hangdoctor import engines
from hangdoctor.commands.sources import DETECT_BYTES, as_file, engine_named, shown
from hangdoctor.errors import EvidenceError, InputError, UsageError
from hangdoctor.logs.diff import compare
from hangdoctor.logs.summary import Summary, summarize
from hangdoctor.logs.timeline import detect_engine
from hangdoctor.recording import LOG_BLOCK_BYTES
from hangdoctor.redaction import redact_text
from hangdoctor.streams import put

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hangdoctor.engines import Engine
    from hangdoctor.logs.diff import LogDiff

STOPS = 1
NARROW, WIDE = 60, 160
"""Columns: a terminal is written to in full between these."""


def diff_logs(
    logs: Sequence[str],
    *,
    output: str,
    into: Path | None,
    context: int,
    everything: bool,
    ranks: str | None,
    engine_name: str | None,
) -> int:
    """Compare the last log with those before it, and put that out; return the exit code.

    Raises:
        UsageError, InputError: as `compare_logs`; or a rank that no log has.
    """
    diff, engine = compare_logs(logs, engine_name)
    wanted = _wanted(ranks, diff)
    text = _render(diff, engine, output, context=context, everything=everything, ranks=wanted)
    _write(redact_text(text), into)
    return 0 if diff.outcome == "reaches-all" else STOPS


def compare_logs(logs: Sequence[str], engine_name: str | None) -> tuple[LogDiff, Engine]:
    """Compare the last log with those before it; return what differs, and their engine.

    Raises:
        UsageError: fewer than two logs, or stdin twice.
        InputError: one cannot be read, is no engine's, or is not good though it should be.
    """
    if len(logs) < 2:
        raise UsageError(
            "a good log and another one are needed",
            hint="hangdoctor diff-logs good.log hung.log",
        )
    if list(logs).count("-") > 1:
        raise UsageError(
            "stdin can be only one of the logs", hint="hangdoctor diff-logs good.log -"
        )
    with ExitStack() as exits:
        files = [_file(log, exits) for log in logs]
        engine = _engine(files, logs, engine_name)
        *good, other = [
            summary_of(file, name, engine) for name, file in zip(logs, files, strict=True)
        ]
    for summary in good:
        _check_good(summary)
    if not any(log.milestones for log in other.timeline.ranks.values()):
        raise InputError(
            f"{other.name} holds no line that tells how far a start has come",
            hint=f"is it the whole log? head {other.name}",
        )
    return compare(good, other, engine), engine


def summary_of(file: Path, name: str, engine: Engine) -> Summary:
    """Return what of a log is compared.

    Raises:
        InputError: it cannot be read.
    """
    return summarize(shown(name), _blocks(file), engine)


def _file(log: str, exits: ExitStack) -> Path:
    try:
        return as_file(log, exits)
    except EvidenceError as error:  # here nothing is judged that could be unknown
        raise InputError(str(error), hint=error.hint) from error


def _render(
    diff: LogDiff,
    engine: Engine,
    output: str,
    *,
    context: int,
    everything: bool,
    ranks: tuple[str, ...],
) -> str:
    # Imported when asked for: a comparison of short logs takes less time than an import.
    if output == "json":
        from hangdoctor.render.logdiff_json import to_json as render
    elif output == "html":
        from hangdoctor.render.logdiff_html import to_html as render
    elif output == "markdown":
        from hangdoctor.render.logdiff_markdown import to_markdown as render
    else:
        from hangdoctor.render.logdiff_text import to_text

        columns = shutil.get_terminal_size((80, 24)).columns
        render = partial(to_text, width=max(NARROW, min(WIDE, columns)))
    return render(diff, engine, context=context, everything=everything, ranks=ranks)


def _engine(files: Sequence[Path], logs: Sequence[str], engine_name: str | None) -> Engine:
    """Return the engine that printed all logs."""
    found: dict[str, str] = {}
    for name, file in zip(logs, files, strict=True):
        with file.open("rb") as opened:
            head = opened.read(DETECT_BYTES)
        if not head.strip():
            raise InputError(f"the log {shown(name)} is empty", hint="wait until it says something")
        engine = engine_name or detect_engine(head)
        if engine is None:
            raise InputError(
                f"{shown(name)} is not recognised as the log of an engine "
                f"({', '.join(engines.names())} are known)",
                hint="name the engine to read it all the same: --engine sglang",
            )
        found.setdefault(engine, shown(name))
    if len(found) > 1:
        (one, first), (two, second) = list(found.items())[:2]
        raise InputError(
            f"{first} is a log of {one}, {second} one of {two}",
            hint="compare logs of the same engine",
        )
    return engine_named(next(iter(found)))


def _blocks(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as opened:
            yield from iter(lambda: opened.read(LOG_BLOCK_BYTES), b"")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}", hint=f"ls -l {file}") from error


def _check_good(summary: Summary) -> None:
    launch = summary.timeline.ranks.get("")
    if launch is None or launch.phase != "ready":
        several = f"; its last launch, from line {summary.timeline.first_line}, does not"
        raise InputError(
            f"{summary.name} is not the log of a good start: it does not come to ready"
            f"{several if summary.timeline.launches > 1 else ''}",
            hint=f"good logs come first, the one in question last; hangdoctor diagnose "
            f"{summary.name}",
        )


def _wanted(ranks: str | None, diff: LogDiff) -> tuple[str, ...]:
    if ranks is None:
        return ()
    names = [rank.rank for rank in diff.ranks if rank.rank]
    wanted = tuple(part.strip() for part in ranks.split(",") if part.strip())
    unknown = [rank for rank in wanted if rank not in names]
    if unknown or not wanted:
        raise UsageError(
            f"there is no rank {', '.join(unknown) or repr(ranks)} in {diff.other.name}",
            hint=f"--ranks takes some of {','.join(names)}",
        )
    return wanted


def _write(text: str, into: Path | None) -> None:
    if into is None:
        put(text)
        return
    try:
        into.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot write {shown(into)}: {error.strerror}", hint=f"ls -ld {shown(into.parent)}"
        ) from error
