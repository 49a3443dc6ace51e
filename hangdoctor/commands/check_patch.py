"""Compare stock, the two hidden-state patches, or one's own, by how they behave."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hangdoctor.check import environment, subjects
from hangdoctor.check.model import DEPTHS, ROWS, Check, Column, Depth
from hangdoctor.check.reading import read
from hangdoctor.check.verdict import judge
from hangdoctor.errors import InputError, UsageError
from hangdoctor.render.check import to_json, to_text
from hangdoctor.streams import put

if TYPE_CHECKING:
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
) -> int:
    """Print the table; return 1 where a patch breaks or hangs, 3 where nothing was checked, else 0.

    Raises:
        UsageError: options exclude each other, or the depth is not possible.
        InputError: a file cannot be read or is no Python, or a diff does not fit.
    """
    if file and patch:
        raise UsageError("--file and --patch exclude each other", hint="give one of them")
    if depth not in (None, "reading"):
        raise UsageError(
            f"--depth {depth} is not built yet", hint="hangdoctor check-patch --depth reading"
        )
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
    checked = [_column(one, package) for one in (subjects.STOCK, *columns)]
    put(
        RENDERERS[output](
            Check(
                engine=environment.PACKAGE if package else "",
                version=world.version,
                package=str(package or ""),
                depth="reading",
                shallower_because="running and launching are not built yet",
                rows=tuple(row for row in ROWS if DEPTHS.index(row.depth) == 0),
                columns=tuple(checked),
                notes=tuple(notes),
            )
        )
    )
    return _exit_code([one.verdict for one in checked[1:]], strict=strict)


def _column(subject: Subject, package: Path | None) -> Column:
    cells: dict[str, Cell] = read(subject, package)
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
