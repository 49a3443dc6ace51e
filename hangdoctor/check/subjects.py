"""The columns to be: stock, the two patches, or a file or diff of one's own."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hangdoctor import patches
from hangdoctor.check import environment, unified
from hangdoctor.check.model import PatchedFile, Subject
from hangdoctor.check.reading.source import parse
from hangdoctor.errors import InputError
from hangdoctor.patches import COMPANION, companion_text
from hangdoctor.patches.files import MODEL_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.check.environment import Environment

STOCK = Subject(name="stock", title="the environment's own files")
_SHIPPED = (("v1", patches.V1.name), ("v2", patches.V2.name))


def shipped(world: Environment) -> tuple[Subject, ...]:
    """Return the two patches, applied to the environment's model file."""
    if world.packages is None:
        return ()
    stock = world.stock(MODEL_FILE)
    return tuple(_shipped(name, patch, stock) for name, patch in _SHIPPED)


def of_file(path: Path, world: Environment) -> Subject:
    """Return a whole patched file as a subject; its stock is found by its name or what it defines.

    Raises:
        InputError: it cannot be read.
    """
    text = environment.read_text(path)
    inside = environment.stock_of(text, path.as_posix(), world.packages) if world.packages else None
    stock = world.stock(inside) if inside else None
    name = inside or f"sglang/srt/models/{path.name}"
    try:
        parse(text, str(path))
    except InputError as error:
        raise InputError(str(error), hint="a diff is given with --patch") from None
    files = (PatchedFile(path=name, stock=stock, text=text),)
    return Subject(
        name="mine",
        title=f"{path} against {inside}" if inside else f"{path}, whose stock is not known",
        files=files + _with_dump_module(files),
    )


def of_diff(path: Path, world: Environment) -> Subject:
    """Return what a diff makes of the environment's files.

    Raises:
        InputError: it cannot be read, is no diff, or does not fit.
    """
    if world.packages is None:
        raise InputError(
            "a diff needs the files that it changes, and this Python has no SGLang",
            hint="--python /path/to/venv/bin/python",
        )
    files: list[PatchedFile] = []
    diffs = unified.parse(environment.read_text(path))
    # What a checkout has beside the package runs in no server: tests, documents, how it is built.
    beside = [one for one in diffs if not _may_be_of_the_package(one.old or one.new)]
    for diff in diffs:
        if diff in beside and len(beside) < len(diffs):
            continue
        name = _inside(diff.old or diff.new, world.packages, new=not diff.old)
        stock = world.stock(name) if diff.old else None
        files.append(PatchedFile(path=name, stock=stock, text=unified.apply(diff, stock or "")))
    files.sort(key=lambda one: (one.stock is None, "/models/" not in one.path))
    files += _with_dump_module(files)
    title = f"{path} on {', '.join(one.path for one in files)}"
    if len(files) < len(diffs):
        title += f"; left out: {', '.join(one.old or one.new for one in beside)}"
    return Subject(name="mine", title=title, files=tuple(files))


def _with_dump_module(files: Sequence[PatchedFile]) -> tuple[PatchedFile, ...]:
    """Return the dump module that the shipped patches import, where it is not among the files."""
    path = str(PurePosixPath(MODEL_FILE).with_name(COMPANION))
    module = path.removesuffix(".py").replace("/", ".")
    wanted = any(module in one.text for one in files) and all(one.path != path for one in files)
    return (PatchedFile(path=path, stock=None, text=companion_text()),) if wanted else ()


def _shipped(name: str, patch: str, stock: str) -> Subject:
    try:
        patched = patches.transform(patch, stock)
    except patches.PatchRefusedError as error:
        return Subject(name=name, title=patch, refused=str(error))
    folder = PurePosixPath(MODEL_FILE).parent
    beside = tuple(
        PatchedFile(path=str(folder / file), stock=None, text=text)
        for file, text in patched.companions
    )
    return Subject(
        name=name,
        title=patch,
        files=(PatchedFile(path=MODEL_FILE, stock=stock, text=patched.source), *beside),
    )


def _may_be_of_the_package(name: str) -> bool:
    parts = PurePosixPath(name).parts
    outside = {"test", "tests", "docs", "benchmark", "examples", "scripts", ".github"}
    return name.endswith(".py") and ("sglang" in parts or not outside & set(parts[:-1]))


def _inside(name: str, packages: Path, *, new: bool) -> str:
    """Return a diff's name for a file as the package has it: python/sglang/... is a checkout's."""
    parts = PurePosixPath(name).parts
    if ".." in parts:
        raise InputError(
            f"the diff names a file outside of the package: {name}",
            hint="make it in the folder that holds sglang/: git diff, or diff -u OLD NEW",
        )
    for at, part in enumerate(parts):
        inside = "/".join(parts[at:])
        if part == "sglang" and (new or (packages / inside).is_file()):
            return inside
    tail = parts[-1] if parts else ""
    found = sorted((packages / "sglang" / "srt").rglob(tail)) if tail and not new else []
    if len(found) == 1:
        return found[0].relative_to(packages).as_posix()
    if new:
        return f"sglang/srt/models/{tail}"
    raise InputError(
        f"the diff's file is not in this SGLang: {name} (looked in {packages})",
        hint="the diff must name it as sglang/srt/models/...; or give the patched file with --file",
    )
