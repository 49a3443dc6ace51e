"""A copy of an engine's package in which a few files are others, without touching the original."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hangdoctor.check.environment import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Mapping


def overlay(packages: Path, into: Path, files: Mapping[str, str]) -> Path:
    """Make a folder whose package is that of `packages`, with files of its own.

    Only the folders on the way to these files are real, all else is a link, byte code too. First
    on PYTHONPATH it is what a launch imports, its spawned children too.

    Args:
        packages: the folder that has the package.
        into: the folder to make.
        files: text by path below `packages`, such as sglang/srt/models/deepseek_v2.py.
    """
    into.mkdir()
    for info in packages.glob(f"{PACKAGE}-*.dist-info"):
        (into / info.name).symlink_to(info)
    names = [PurePosixPath(name) for name in files] or [PurePosixPath(PACKAGE, "__init__.py")]
    real = {parent for name in names for parent in name.parents if str(parent) != "."}
    for folder in sorted(real, key=lambda one: len(one.parts)):
        target, source = into / folder, packages / folder
        target.mkdir()
        for entry in source.iterdir() if source.is_dir() else ():
            if entry.name == "__pycache__":
                (target / entry.name).mkdir()
                for compiled in entry.iterdir():
                    (target / entry.name / compiled.name).symlink_to(compiled)
            elif folder / entry.name not in real:
                (target / entry.name).symlink_to(entry)
    for name, text in files.items():
        path = into / name
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")
    return into
