"""Static analysis of patched source: nothing is imported or executed."""

from __future__ import annotations

from functools import lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from hangdoctor.check.model import Cell, NotChecked, Place, Same, Subject
from hangdoctor.check.readers import readers_in
from hangdoctor.check.reading.findings import ROWS, Pair, cells, outside_of_forwards
from hangdoctor.check.reading.source import Source, compare, parse

if TYPE_CHECKING:
    from pathlib import Path


def read(subject: Subject, package: Path | None) -> dict[str, Cell]:
    """Return the cells that reading fills.

    Args:
        subject: what is compared; without files it is stock itself.
        package: the engine's package, for who reads an attribute.

    Raises:
        InputError: a file is no Python; with the line.
    """
    if subject.refused:
        return {row: NotChecked(why=subject.refused) for row in ROWS}
    if not subject.files:
        return {row: Same() for row in ROWS}
    return cells(_pair(subject), readers_in(package, subject.files[0].path))


def before_a_forward(subject: Subject) -> tuple[Place, ...]:
    """Return the patched file's new statements that no forward reaches: they may run before one.

    Raises:
        InputError: a file is no Python; with the line.
    """
    return outside_of_forwards(_pair(subject)) if subject.files else ()


def _pair(subject: Subject) -> Pair:
    main, *beside = subject.files
    stock = _stock(main.stock, main.path) if main.stock is not None else None
    patched = [compare(parse(main.text, main.path, _module(main.path)), stock)]
    for one in beside:
        other = parse(one.stock, one.path) if one.stock is not None else None
        patched.append(compare(parse(one.text, one.path, _module(one.path)), other))
    return Pair(tuple(patched), stock)


@lru_cache(maxsize=4)
def _stock(text: str, path: str) -> Source:
    return parse(text, path, _module(path))


def _module(path: str) -> str:
    return ".".join(PurePosixPath(path).with_suffix("").parts)
