"""Puts a patch into a model file and takes it out again, byte for byte.

The file is replaced, not written into: a reader sees the old one or the new one, and a package
manager's cache that shares it by hard links keeps its own.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hangdoctor.errors import InputError
from hangdoctor.model import Struct
from hangdoctor.patches import (
    COMPANION,
    PATCHES,
    Patched,
    PatchRefusedError,
    companion_text,
    transform,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKUP_SUFFIX = ".hangdoctor-orig"
MODEL_FILE = "sglang/srt/models/deepseek_v2.py"
MOST_BYTES = 4 << 20
"""A larger file is no model file."""


class Applied(Struct, frozen=True):
    """What `apply` did, or would do.

    Attributes:
        path: of the model file, with links resolved.
        before: its text as it was found.
        backup: where the original bytes lie; None where nothing was written, or they are not there.
        edited: a file that was patched before was edited since; None where nothing tells.
    """

    path: Path
    before: str
    patched: Patched
    backup: Path | None
    edited: bool | None = False


def model_file(path: Path) -> Path:
    """Return the model file that is meant by a path: it, or the one in that folder or package.

    Raises:
        InputError: there is no such file.
    """
    if path.is_dir():
        inside = (path / MODEL_FILE, path / MODEL_FILE.partition("/")[2], path / "deepseek_v2.py")
        path = next((each for each in inside if each.is_file()), inside[0])
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)  # of a FIFO the reading would not end
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint=_WHERE) from error
    if not is_file:
        raise InputError(f"{path} is no regular file", hint=_WHERE)
    # A link that a user made is followed. One in the package leads to what others share, and the
    # dump module beside its target would not be in this package.
    if path.is_symlink() and path.absolute().as_posix().endswith(MODEL_FILE):
        target = path.resolve()
        raise InputError(
            f"{path} is a link to {target}, which other environments may share",
            hint=f"make it a file of its own: cp --remove-destination {target} {path}",
        )
    return path.resolve()


def apply(name: str, path: Path, *, dry_run: bool = False) -> Applied:
    """Put a patch into a file, the dump module beside it, and keep the original bytes.

    Idempotent: where the patch is there already, only a dump module that is missing or of another
    version is written again.

    Raises:
        PatchRefusedError: the patch does not fit; nothing was changed.
        InputError: the file cannot be read or written; nothing was changed.
    """
    data, text = _read(path)
    try:
        patched = transform(name, text)
    except PatchRefusedError as error:
        raise PatchRefusedError(f"{path}: {error}", hint=error.hint) from None
    backup = _backup_of(path)
    edited = _edited(name, data, backup) if patched.already else False
    if dry_run:
        return Applied(path=path, before=text, patched=patched, backup=None, edited=edited)
    _refuse_read_only(path)
    companion = path.with_name(COMPANION)
    wanted = companion_text().encode()
    if companion.is_symlink() or (companion.exists() and not companion.is_file()):
        raise InputError(f"{companion} is there and no file of ours", hint="move it away")
    with _said(path):
        if not companion.exists() or companion.read_bytes() != wanted:
            _replace(companion, wanted, like=path)
        if not patched.already:
            _replace(backup, data, like=path)
            _replace(path, patched.source.encode(), like=path)
    return Applied(
        path=path,
        before=text,
        patched=patched,
        backup=backup if backup.is_file() else None,
        edited=edited,
    )


def revert(path: Path) -> str:
    """Put the original bytes back and take the dump module away; return the patch's name.

    Raises:
        InputError: it is not patched, or was changed since, or its backup is not what it was made
            from. Nothing was changed then.
    """
    data, text = _read(path)
    backup = _backup_of(path)
    if not backup.is_file() or backup.is_symlink():
        raise InputError(
            f"there is no backup {backup.name} beside it: hangdoctor did not patch {path}",
            hint="pip install --force-reinstall --no-deps sglang==VERSION brings the original",
        )
    original, source = _read(backup)
    name = _patch_in(text)
    if name is None and data == original:
        name = "nothing"
    elif name is None or transform(name, source).source.encode() != data:
        raise InputError(
            f"{path} was changed after it was patched; what was changed would be lost",
            hint=f"diff {backup} {path}; to give it up: mv {backup} {path}",
        )
    _refuse_read_only(path)
    companion = path.with_name(COMPANION)
    with _said(path):
        if data != original:
            _replace(path, original, like=path)
        backup.unlink()
        if companion.is_file() and companion.read_bytes() == companion_text().encode():
            companion.unlink()
    return name


def original_of(path: Path) -> str | None:
    """Return the text that a file had before `apply`; None where none of our patches is in it."""
    backup = _backup_of(path)
    if not (path.is_file() and backup.is_file()):
        return None
    text = _read(path)[1]
    return _read(backup)[1] if _patch_in(text) else None


def _edited(name: str, data: bytes, backup: Path) -> bool | None:
    """Tell whether a patched file is other than its original with the patch; None if unknown."""
    if not backup.is_file() or backup.is_symlink():
        return None
    with contextlib.suppress(InputError, PatchRefusedError):
        return transform(name, _read(backup)[1]).source.encode() != data
    return None


def _patch_in(text: str) -> str | None:
    return next((each.name for each in PATCHES if f"# {each.name}" in text), None)


def _read(path: Path) -> tuple[bytes, str]:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint=_WHERE) from error
    if len(data) > MOST_BYTES:
        raise InputError(f"{path} is too large for a model file", hint=_WHERE)
    try:
        return data, data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: byte {error.start}", hint=_WHERE) from error


def _refuse_read_only(path: Path) -> None:
    """Refuse where nobody may write; its folder would let it be replaced, and root always."""
    if not path.stat().st_mode & 0o222:
        raise InputError(f"{path} is read-only", hint=f"chmod u+w {path}")


def _backup_of(path: Path) -> Path:
    return path.with_name(path.name + BACKUP_SUFFIX)


def _replace(path: Path, data: bytes, *, like: Path) -> None:
    """Write a file under another name and rename it, with the mode and owner of another."""
    known = like.stat()
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), stat.S_IMODE(known.st_mode))
            with contextlib.suppress(PermissionError):  # another's file, in a folder of ours
                os.fchown(file.fileno(), known.st_uid, known.st_gid)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


@contextlib.contextmanager
def _said(path: Path) -> Iterator[None]:
    """Say an error of the system as one of ours."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {error.filename or path}: {error.strerror}; {path.name} is as it was",
            hint="a copy can be patched and put first on PYTHONPATH, as a whole package",
        ) from error


_WHERE = "the file is sglang/srt/models/deepseek_v2.py of the environment that runs the server"
