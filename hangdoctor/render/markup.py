"""Text in Markdown: what the target said stands in it as it is, and breaks nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.render.logdiff_answer import shorten
from hangdoctor.render.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

WIDTH = 160


def inline(text: str) -> str:
    r"""Return text that Markdown and HTML take as it is.

    >>> inline("a*b <i> [x](y) `z` #1")
    'a\\*b &lt;i> \\[x\\](y) \\`z\\` #\u200b1'
    """
    text = clean(text).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    for character in "*_`[]|~":
        text = text.replace(character, "\\" + character)
    return _unlinked(text)


def table_row(cells: Sequence[str]) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(inline(cell) for cell in cells) + " |"


def fenced(rows: Iterable[str], language: str = "text") -> Iterator[str]:
    """Return rows as a block of code, whatever they hold; long ones are cut."""
    texts = [shorten(clean(row), WIDTH) for row in rows]
    fence = "```"
    while any(fence in text for text in texts):
        fence += "`"
    yield fence + language
    yield from texts
    yield fence


def _unlinked(text: str) -> str:
    """Keep `#12` and `@name` from becoming links to an issue or a person."""
    return text.replace("#", "#\u200b").replace("@", "@\u200b")
