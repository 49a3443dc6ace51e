"""Static analysis of patched source: nothing is imported or executed."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from hangdoctor.check.model import (
    Cell,
    Difference,
    Differs,
    NotChecked,
    Place,
    Same,
    Subject,
)
from hangdoctor.check.readers import readers_in
from hangdoctor.check.reading.findings import ROWS, Pair, cells, outside_of_forwards
from hangdoctor.check.reading.source import Source, compare, parse
from hangdoctor.check.verdict import worst_first

if TYPE_CHECKING:
    from collections.abc import Iterator
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
    pair = _pair(subject)
    found = cells(pair, readers_in(package, subject.files[0].path))
    if package is not None and (missing := list(_not_there(pair.patched[0], subject, package))):
        before = found["stock-code"]
        others = before.differences if isinstance(before, Differs) else ()
        found["stock-code"] = worst_first([*missing, *others]) or before
    return found


def before_a_forward(subject: Subject) -> tuple[Place, ...]:
    """Return the patched file's new statements that no forward reaches: they may run before one.

    Raises:
        InputError: a file is no Python; with the line.
    """
    return outside_of_forwards(_pair(subject)) if subject.files else ()


def _not_there(source: Source, subject: Subject, package: Path) -> Iterator[Difference]:
    """Yield the new imports at the top of a file that name a module which is nowhere."""
    with_it = {one.path for one in subject.files}
    for node in source.tree.body:
        if id(node) not in source.new or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""] if node.level == 0 else []
        else:
            modules = [alias.name for alias in node.names]
        for module in modules:
            inside = module.replace(".", "/")
            if module.partition(".")[0] != package.name or any(
                name in with_it or (package.parent / name).exists()
                for name in (f"{inside}.py", f"{inside}/__init__.py", inside)
            ):
                continue
            yield Difference(
                how=f"imports {module}, which is not there: the model file cannot be imported, and "
                "SGLang goes on with Transformers' model",
                effect="breaks",
                places=(Place(file=source.name, line=node.lineno),),
                phase="weights",
            )


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
