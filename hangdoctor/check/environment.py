"""Finds the SGLang of an environment by its files: nothing is imported, nothing is run in it."""

from __future__ import annotations

import re
from pathlib import Path

from hangdoctor.errors import InputError
from hangdoctor.model import Struct
from hangdoctor.patches.files import MODEL_FILE, original_of

PACKAGE = "sglang"
MOST_BYTES = 8_000_000

_VERSION = re.compile(r"^Version:\s*(\S+)", re.MULTILINE)
_MAPPED = re.compile(rf"""['"]{PACKAGE}['"]\s*:\s*['"]([^'"]+)['"]""")
"""What an editable install's finder maps the package to."""
_DEFINITION = re.compile(r"^\s*(?:class|def)\s+\w+", re.MULTILINE)


class Environment(Struct, frozen=True):
    """An installed SGLang.

    Attributes:
        python: the interpreter; None where only a folder of packages was given.
        packages: the folder that the package lies in; None where the environment has none.
        version: of the release, empty where it is not told.
        originals: text by path of the files that `patch apply` has changed, as they were before:
            they are stock, and what stands in their place is not.
    """

    python: Path | None
    packages: Path | None
    version: str = ""
    originals: dict[str, str] = {}

    def stock(self, path: str) -> str:
        """Return a file of the package as it was released.

        Raises:
            InputError: it cannot be read.
        """
        assert self.packages is not None  # noqa: S101  # who asks has looked
        return self.originals.get(path) or read_text(self.packages / path)


def find(given: Path) -> Environment:
    """Return the environment of a Python, of a virtual environment, or of a site-packages.

    Raises:
        InputError: there is no such file or folder.
    """
    if not given.exists():
        raise InputError(
            f"no such Python or environment: {given}", hint="--python /path/to/venv/bin/python"
        )
    # Not resolved: a virtual environment's python is a link to the system's.
    root = given.absolute() if given.is_dir() else given.absolute().parent.parent
    python = root / "bin" / "python" if given.is_dir() else given.absolute()
    places = [root, *sorted(root.glob("lib*/python3*/*-packages")), root / "python"]
    for place in places:
        for source in (place, *_editable(place)):
            if (source / PACKAGE / "srt").is_dir():
                return Environment(
                    python=python if python.exists() else None,
                    packages=source,
                    version=_version(place) or _version(source),
                    originals=_originals(source),
                )
    return Environment(python=python if python.exists() else None, packages=None)


def read_text(path: Path) -> str:
    """Return a source file's text.

    Raises:
        InputError: it cannot be read, is no regular file, or is too long; in one line.
    """
    hint = f"ls -ld {path}"
    try:
        if not path.is_file():
            what = f"{path} is no file" if path.exists() else f"no such file: {path}"
            raise InputError(what, hint=f"ls -ld {path if path.exists() else path.parent}")
        if path.stat().st_size > MOST_BYTES:
            what = f"{path} is too long for source: {path.stat().st_size} bytes"
            raise InputError(what, hint=hint)
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        what = f"{path} is no UTF-8 text: {error.reason} at {error.start}"
        raise InputError(what, hint=f"file {path}") from None


def stock_of(text: str, name: str, packages: Path) -> str | None:
    """Return which of the package's files a patched one replaces, relative to its folder.

    By the file's name where it says, else by the classes and functions that it defines.
    """
    tail = name.replace("\\", "/")
    if f"{PACKAGE}/" in tail:
        inside = f"{PACKAGE}/" + tail.rsplit(f"{PACKAGE}/", 1)[1]
        if (packages / inside).is_file():
            return inside
    mine = set(_DEFINITION.findall(text))
    best: tuple[float, str] = (0.0, "")
    base = Path(tail).name
    for path in sorted((packages / PACKAGE / "srt").rglob("*.py")):
        relative = path.relative_to(packages).as_posix()
        if "/models/" not in relative and path.name != base:
            continue
        theirs = set(_DEFINITION.findall(path.read_text(encoding="utf-8", errors="replace")))
        common = len(mine & theirs) / max(1, len(theirs | mine))
        best = max(best, (common + 0.2 * (path.name == base), relative))
    return best[1] if best[0] > 0.3 else None


def _originals(packages: Path) -> dict[str, str]:
    text = original_of(packages / MODEL_FILE)
    return {} if text is None else {MODEL_FILE: text}


def _editable(place: Path) -> list[Path]:
    found = []
    for path in sorted(place.glob("*.pth")) if place.name.endswith("-packages") else ():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [Path(line.strip()) for line in lines if line.startswith("/")]
    for path in sorted(place.glob("__editable___*finder.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [Path(match[1]).parent for match in _MAPPED.finditer(text)]
    return found


def _version(place: Path) -> str:
    for info in sorted(place.glob(f"{PACKAGE}-*.dist-info")):
        metadata = info / "METADATA"
        if metadata.is_file():
            match = _VERSION.search(metadata.read_text(encoding="utf-8", errors="replace"))
            return match[1] if match else ""
    return ""
