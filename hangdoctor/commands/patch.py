"""The hidden-state patches: what there is, what they add, in and out of a model file."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import msgspec

from hangdoctor import engines
from hangdoctor.check import environment
from hangdoctor.collect.installation import find_installation, find_package
from hangdoctor.errors import InputError, UsageError
from hangdoctor.model import Missing
from hangdoctor.patches import PATCHES, patch_named
from hangdoctor.patches import files as patch_files
from hangdoctor.patches.dumps import read_dumps
from hangdoctor.render.dumps import dumps_to_text
from hangdoctor.render.json import encode
from hangdoctor.render.text import clean
from hangdoctor.target import resolve


def listing() -> str:
    """Return a line for each patch."""
    return "\n".join(f"{patch.name}  {patch.title}" for patch in PATCHES)


def show(name: str) -> str:
    """Return what a patch does.

    Raises:
        UsageError: there is none of this name.
    """
    patch = patch_named(name)
    return "\n".join(
        [
            f"{patch.name}: {patch.title}",
            "",
            patch.explanation,
            "",
            f"It leaves alone: {', '.join(patch.left_alone)}.",
            "It acts only where SGLANG_HS_DUMP_DIR is set when the server starts;",
            "SGLANG_HS_DUMP_LAYERS chooses the layers, such as 3,31,59.",
        ]
    )


def find(path: Path | None, python: Path | None, pid: int | None) -> Path:
    """Return the model file that is meant: a path, or that of an environment or a server.

    Raises:
        UsageError: not exactly one of them is given.
        InputError: there is no such file, environment or server.
    """
    if sum(given is not None for given in (path, python, pid)) != 1:
        raise UsageError(
            "which file is meant: exactly one of PATH, --python ENV and --pid PID",
            hint="hangdoctor patch apply hs-dump-v2 --python $(which python)",
        )
    if python is not None:
        world = environment.find(python) if python.is_dir() else None
        # A folder of packages has no interpreter to ask.
        if world is not None and world.python is None and world.packages is not None:
            path = world.packages
        else:
            path = find_package("sglang", python).parent
    if pid is not None:
        path = _installed(pid).parent
    assert path is not None  # noqa: S101  # one of three was given
    return patch_files.model_file(path)


def apply(name: str, path: Path, *, dry_run: bool) -> str:
    """Put a patch into a file; return what was done.

    Raises:
        PatchRefusedError, InputError: see `hangdoctor.patches.files.apply`.
    """
    applied = patch_files.apply(name, path, dry_run=dry_run)
    patched = applied.patched
    if dry_run and patched.already:
        return "\n".join(map(clean, [f"{name} is in {path} already", *_since(applied)]))
    if dry_run:
        return "\n".join(
            clean(line)
            for line in difflib.unified_diff(
                applied.before.splitlines(), patched.source.splitlines(), str(path),
                f"{path} with {name}", lineterm="",
            )
        )  # fmt: skip
    lines = [f"{name} {'is in' if patched.already else 'put into'} {path}"
             + (" already" if patched.already else "")]  # fmt: skip
    lines += _since(applied)
    lines += [
        f"  line {part.line}, {part.where or 'at the top'}: {_first(part.text)}"
        for part in patched.added
    ]
    lines += [
        f"  beside it: {', '.join(name for name, _ in patched.companions)}"
        + (f"; the original: {applied.backup.name}" if applied.backup else ""),
        f"  left alone: {', '.join(patched.left_alone)}",
        "A server that runs already keeps the old code: restart it, with SGLANG_HS_DUMP_DIR set.",
    ]
    return "\n".join(clean(line) for line in lines)


def revert(path: Path) -> str:
    """Take a patch out of a file; return what was done.

    Raises:
        InputError: see `hangdoctor.patches.files.revert`.
    """
    name = patch_files.revert(path)
    return clean(f"{name} taken out of {path}: it is as it was, byte for byte")


def verify_dumps(directory: Path, output: str) -> tuple[str, int]:
    """Return what the dumps of a folder are worth, and the exit code.

    Raises:
        InputError: there is no such folder.
    """
    dumps = read_dumps(directory)
    code = 0 if dumps.all_right else 1
    if output == "text":
        return dumps_to_text(dumps), code
    document: dict[str, Any] = {"schema": 1, "all_right": dumps.all_right}
    return encode(document | msgspec.to_builtins(dumps)).decode(), code


def _installed(pid: int) -> Path:
    """Return the folder of the package that a running server uses."""
    engine = engines.load("sglang")
    launch = resolve(pid, [engine])
    found = find_installation("sglang", launch.pids)
    if isinstance(found, Missing):
        raise InputError(
            f"which sglang process {pid} uses cannot be told: {found.detail or found.reason}",
            hint="name the file: hangdoctor patch apply NAME PATH/deepseek_v2.py",
        )
    inside = Path(f"/proc/{pid}/root") / found.path.lstrip("/")
    outside = Path(found.path)
    if inside.exists() and not (outside.exists() and outside.samefile(inside)):
        return inside  # in the server's own file system, a container's
    return outside


def _since(applied: patch_files.Applied) -> list[str]:
    """Say what became of a file since it was patched."""
    path = applied.path
    original = path.with_name(path.name + patch_files.BACKUP_SUFFIX)
    if applied.edited:
        return [
            "  the file was edited after it was patched; patch revert refuses until that is undone",
            f"  what the patch and the edit changed: diff {original} {path}",
        ]
    if applied.edited is None:
        return [
            f"  whether it was edited since cannot be told without its original {original.name};",
            "  to begin anew: pip install --force-reinstall --no-deps sglang==VERSION",
        ]
    return []


def _first(text: str) -> str:
    first, _, more = text.partition("\n")
    return f"{first} ..." if more else first
