"""Compare stock, the two hidden-state patches, or one's own, by how they behave."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hangdoctor.check import environment, subjects
from hangdoctor.check.model import ROWS, Check, Column, Depth
from hangdoctor.check.reading import read
from hangdoctor.check.verdict import judge
from hangdoctor.commands.interrupt import ended_in_order
from hangdoctor.commands.sources import engine_for
from hangdoctor.errors import InputError, UsageError
from hangdoctor.render.check import to_json, to_text
from hangdoctor.streams import put, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.check.model import Cell, Subject, Verdict

RENDERERS = {"text": to_text, "json": to_json}
NOTHING_CHECKED = 3


def check_patch(
    *,
    depth: Depth | None,
    python: Path | None,
    file: Path | None,
    patch: Path | None,
    strict: bool,
    output: str,
    command: Sequence[str] = (),
    timeout_s: float = 300.0,
) -> int:
    """Print the table; return 1 where a patch breaks or hangs, 3 where nothing was checked, else 0.

    Raises:
        UsageError: options exclude each other, or the depth is not possible.
        InputError: a file cannot be read or is no Python, or a diff does not fit.
    """
    if file and patch:
        raise UsageError("--file and --patch exclude each other", hint="give one of them")
    if command and depth in ("reading", "running"):
        raise UsageError("-- COMMAND launches", hint=f"leave --depth {depth} out")
    launches = depth == "launching" or bool(command)
    world = environment.find(python or Path(sys.executable))
    notes: list[str] = []
    if world.packages is None:
        notes.append(
            "this Python has no SGLang: a file is read alone, all of it counts as new; "
            "name one with --python"
        )
    if file:
        columns = [subjects.of_file(file, world)]
    elif patch:
        columns = [subjects.of_diff(patch, world)]
    else:
        columns = list(subjects.shipped(world))
        if not columns:
            raise InputError(
                f"there is no SGLang in {python or sys.executable}",
                hint="hangdoctor check-patch --python /path/to/venv/bin/python",
            )
    package = world.packages / environment.PACKAGE if world.packages else None
    found = {one.name: dict(read(one, package)) for one in (subjects.STOCK, *columns)}
    runs = depth != "reading" and world.packages is not None and world.python is not None
    if depth == "running" and not runs:
        raise InputError("running needs a Python that has SGLang", hint="--python PATH")
    if runs:
        from hangdoctor.check.running import run_all

        with ended_in_order():
            ran = run_all((subjects.STOCK, *columns), world, say=say)
        for name, cells in ran.items():
            found[name] |= cells
    if launches:
        from hangdoctor.check.launching import launch_all

        with ended_in_order():
            launched = launch_all(
                (subjects.STOCK, *columns),
                world,
                engine_for(command, environment.PACKAGE),
                command=command,
                timeout_s=timeout_s,
                say=say,
            )
        for name, cells in launched.items():
            found[name] |= cells
    checked = [_column(one, found[one.name]) for one in (subjects.STOCK, *columns)]
    depths: tuple[Depth, ...] = (
        "reading",
        *(("running",) if runs else ()),
        *(("launching",) if launches else ()),
    )
    put(
        RENDERERS[output](
            Check(
                engine=environment.PACKAGE if package else "",
                version=world.version,
                package=str(package or ""),
                depth=depths[-1],
                shallower_because=_shallower_because(depths, depth),
                rows=tuple(row for row in ROWS if row.depth in depths),
                columns=tuple(checked),
                notes=tuple(notes),
            )
        )
    )
    return _exit_code([one.verdict for one in checked[1:]], strict=strict)


def _shallower_because(depths: tuple[Depth, ...], asked: Depth | None) -> str:
    if depths[-1] in (asked, "launching"):
        return ""
    if depths[-1] == "reading":
        return "running needs a Python that has SGLang: --python PATH"
    return "a server is started only by --depth launching or -- COMMAND"


def _column(subject: Subject, cells: dict[str, Cell]) -> Column:
    return Column(
        name=subject.name,
        title=subject.title,
        cells=cells,
        verdict=judge(subject, cells),
        files=tuple(one.path for one in subject.files),
    )


def _exit_code(verdicts: list[Verdict], *, strict: bool) -> int:
    kinds = {one.kind for one in verdicts}
    if kinds & {"breaks", "hangs"} or (strict and "invasive" in kinds):
        return 1
    return NOTHING_CHECKED if kinds <= {"unchecked"} else 0
