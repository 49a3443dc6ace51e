"""Which files of the engine read an attribute off an object that is not their own."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOST_PLACES = 4
_OWNERS = r"(?:model|batch|layer|module|args|runner|metadata|config|info)\w*(?:\(\))?"


def readers_in(package: Path | None, but: str) -> Callable[[str], tuple[str, ...]]:
    """Return what finds the readers of an attribute: "srt/layers/logits_processor.py:552".

    Args:
        package: the engine's package; None finds nothing.
        but: the patched file, whose own reads are known already.
    """

    @cache
    def texts() -> tuple[tuple[str, str], ...]:
        if package is None:
            return ()
        return tuple(
            (path.relative_to(package).as_posix(), path.read_text("utf-8", "replace"))
            for path in sorted((package / "srt").rglob("*.py"))
            if not but.endswith(path.relative_to(package).as_posix())
        )

    def find(attribute: str) -> tuple[str, ...]:
        read = re.compile(
            rf"(?:\b|_){_OWNERS}\.{re.escape(attribute)}\b(?!\s*(?:=[^=]|\())", re.IGNORECASE
        )
        found: list[str] = []
        for name, text in texts():
            if attribute in text and (match := read.search(text)):
                found.append(f"{name}:{text.count(chr(10), 0, match.start()) + 1}")
                if len(found) == MOST_PLACES:
                    break
        return tuple(found)

    return find
