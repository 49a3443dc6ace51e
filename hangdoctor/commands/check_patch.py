"""Compare stock, the two hidden-state patches, or one's own, by how they behave."""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from hangdoctor.check import environment, subjects
from hangdoctor.check.model import ROWS, Check, Column, Depth, Differs, NotChecked
from hangdoctor.check.reading import before_a_forward, read
from hangdoctor.check.verdict import judge
from hangdoctor.commands.interrupt import INTERRUPTED
from hangdoctor.commands.sources import as_file, engine_for
from hangdoctor.commands.watch import folder_for
from hangdoctor.errors import EvidenceError, InputError, UsageError
from hangdoctor.render.check import to_json, to_text
from hangdoctor.signals import ended_in_order
from hangdoctor.streams import put, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.check.environment import Environment
    from hangdoctor.check.model import Cell, Subject, Verdict
    from hangdoctor.engines import Engine

RENDERERS = {"text": to_text, "json": to_json}
NOTHING_CHECKED = 3
_NAME_ONE = "hangdoctor check-patch --python /path/to/venv/bin/python"
_NO_STOCK = (
    "this Python has no SGLang: a file is read alone, all of it counts as new; "
    "name one with --python"
)
_OF_A_PATCH = NotChecked(why="the log is that of a launch with a patch")

Found = dict[str, dict[str, "Cell"]]
"""Cells by column and row."""


def check_patch(
    *,
    depth: Depth | None,
    python: Path | None,
    file: Path | None,
    patch: Path | None,
    log: str | None,
    record: Path | None,
    strict: bool,
    output: str,
    command: Sequence[str] = (),
    timeout_s: float = 300.0,
) -> int:
    """Print the table; return the exit code.

    1 where a patch breaks or hangs; 3 where nothing was checked, or nothing at the depth that was
    asked for; else 0.

    Raises:
        UsageError: options exclude each other, or the depth is not possible.
        InputError: a file cannot be read or is no Python, or a diff does not fit.
    """
    if file and patch:
        raise UsageError(
            "--file and --patch exclude each other", hint="hangdoctor check-patch --file FILE.py"
        )
    if command and depth in ("reading", "running"):
        raise UsageError(
            f"-- COMMAND is to be launched, and --depth {depth} launches nothing",
            hint="hangdoctor check-patch --depth launching -- COMMAND ...",
        )
    launches = depth == "launching" or bool(command)
    if record and not launches:
        raise UsageError(
            "--record keeps what is launched, and nothing is",
            hint="hangdoctor check-patch --depth launching --record DIR",
        )
    if command and shutil.which(command[0]) is None:
        raise InputError(
            f"no such command: {command[0]}",
            hint="a patched file is given with --file, a diff with --patch",
        )
    world = environment.find(python or Path(sys.executable))
    if python is not None and world.packages is None:
        raise InputError(f"there is no SGLang in {python}", hint=_NAME_ONE)
    columns = (subjects.STOCK, *_columns(world, file, patch))
    runs = depth != "reading" and world.packages is not None and world.python is not None
    if depth == "running" and not runs:
        raise InputError("running needs a Python that has SGLang", hint="--python PATH")
    with ended_in_order():
        try:
            logged = _logged(columns, log) if log is not None else {}
            records = folder_for(record) if record is not None else None
            package = world.packages / environment.PACKAGE if world.packages else None
            found = {one.name: dict(read(one, package)) for one in columns}
            _add(found, logged)
            depths: list[Depth] = ["reading"]
            if runs:
                from hangdoctor.check.running import run_all

                ran = run_all(columns, world, say=say)
                _add(found, ran)
                if _is_checked(ran):
                    depths.append("running")
            if launches:
                _add(found, _launched(columns, world, command, timeout_s, records))
                depths.append("launching")
        except KeyboardInterrupt:
            say(
                "hangdoctor: interrupted: nothing is compared, and what was launched has been ended"
            )
            return INTERRUPTED
    checked = [_column(one, found[one.name]) for one in columns]
    put(
        RENDERERS[output](
            Check(
                engine=environment.PACKAGE if package else "",
                version=world.version,
                package=str(package or ""),
                depth=depths[-1],
                shallower_because=_shallower_because(depths[-1], found),
                rows=tuple(
                    row for row in ROWS if row.depth in depths and (row.key != "log" or log)
                ),
                columns=tuple(checked),
                notes=_notes(world),
            )
        )
    )
    asked: Depth = "launching" if launches else (depth or depths[-1])
    reached = asked in depths and _is_checked(found, asked)
    return _exit_code([one.verdict for one in checked[1:]], strict=strict, reached=reached)


def _is_checked(found: Found, depth: Depth = "running") -> bool:
    """Tell whether a depth has checked anything of a patch."""
    keys = {row.key for row in ROWS if row.depth == depth and row.key != "log"}
    return any(
        key in keys and not isinstance(cell, NotChecked)
        for name, cells in found.items()
        if name != subjects.STOCK.name
        for key, cell in cells.items()
    )


def _columns(world: Environment, file: Path | None, patch: Path | None) -> tuple[Subject, ...]:
    if file:
        return (subjects.of_file(file, world),)
    if patch:
        return (subjects.of_diff(patch, world),)
    if not (found := subjects.shipped(world)):
        raise InputError(f"there is no SGLang in {sys.executable}", hint=_NAME_ONE)
    return found


def _notes(world: Environment) -> tuple[str, ...]:
    if world.packages is None:
        return (_NO_STOCK,)
    return tuple(
        f"{path} is patched here: stock is the original beside it" for path in world.originals
    )


def _add(found: Found, more: Found) -> None:
    for name, cells in more.items():
        found[name] |= cells


def _logged(columns: Sequence[Subject], log: str) -> Found:
    """Return what a log says of each patch that it may be of."""
    from hangdoctor.check.logs import cell_of
    from hangdoctor.commands.diagnose import facts_of_log
    from hangdoctor.commands.diff_logs import summary_of
    from hangdoctor.diagnose import diagnose
    from hangdoctor.logs.diff import forward_ran

    with ExitStack() as exits:
        try:
            file = as_file(log, exits)
            facts, engine = facts_of_log(file, log, None, still_running=False, normal_s={})
        except EvidenceError as error:
            raise InputError(str(error), hint="is it the log of an SGLang server?") from None
        ran = forward_ran(summary_of(file, log, engine), engine)
    diagnosis = diagnose(facts, engine)
    return {
        one.name: {
            "log": cell_of(diagnosis, forward_ran=ran, outside=before_a_forward(one))
            if one.files
            else _OF_A_PATCH
        }
        for one in columns
    }


def _launched(
    columns: Sequence[Subject],
    world: Environment,
    command: Sequence[str],
    timeout_s: float,
    record: Path | None,
) -> Found:
    """Launch all; keep the recordings where that was asked for, or one did not become ready."""
    from hangdoctor.check.launching import launch_all
    from hangdoctor.commands.diff_logs import compare_logs

    engine: Engine = engine_for(command, environment.PACKAGE)
    records, keep = record or folder_for(None), record is not None
    try:
        found = launch_all(
            columns,
            world,
            engine,
            command=command,
            timeout_s=timeout_s,
            records=records,
            differ=lambda good, other: compare_logs([str(good), str(other)], engine.name)[0],
            say=say,
        )
        keep |= any(isinstance(cells["ready"], Differs | NotChecked) for cells in found.values())
    finally:
        if keep:
            say(
                f"hangdoctor: logs and recordings: {records}",
                f"  what was seen, again: hangdoctor diagnose {records}/COLUMN",
            )
        else:
            shutil.rmtree(records, ignore_errors=True)
    return found


def _shallower_because(reached: Depth, found: Found) -> str:
    if reached == "launching":
        return ""
    if reached == "running":
        return "a server is started only by --depth launching or -- COMMAND"
    whys = {
        cell.why
        for cells in found.values()
        for row in ROWS
        if row.depth == "running" and isinstance(cell := cells.get(row.key), NotChecked)
    }
    return next(iter(sorted(whys)), "running needs a Python that has SGLang: --python PATH")


def _column(subject: Subject, cells: dict[str, Cell]) -> Column:
    return Column(
        name=subject.name,
        title=subject.title,
        cells=cells,
        verdict=judge(subject, cells),
        files=tuple(one.path for one in subject.files),
    )


def _exit_code(verdicts: list[Verdict], *, strict: bool, reached: bool) -> int:
    kinds = {one.kind for one in verdicts}
    if kinds & {"breaks", "hangs"} or (strict and "invasive" in kinds):
        return 1
    return NOTHING_CHECKED if kinds <= {"unchecked"} or not reached else 0
