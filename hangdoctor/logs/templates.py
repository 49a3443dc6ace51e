"""Lines to templates: the text of a line without what differs from launch to launch.

Masked are numbers, times, paths, URLs, hexadecimal ids and the numbers of ranks; kept are digits
inside a word, since `fa3` and `fa4`, `fp8` and `bf16` are different things. A template is what two
lines have in common where they come from the same place of a program.
"""

from __future__ import annotations

import re

KNOWN_LIMIT = 50_000
"""Templates that a masker remembers; then it starts over, so that its memory stays bounded."""

# No digit is written here but as \d or in a set that holds all of them: Masker rests on it.
_MASKED = re.compile(
    r"(?P<url>\b[a-z]+://[^\s'\",)]+)"
    r"|(?P<path>(?<![\w.<>])~?/(?:[\w.@+=~%-]+/)+(?P<file>[\w.@+=~%-]*\.py\b)?[\w.@+=~%-]*)"
    r"|(?P<id>\b[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}\b|\b\dx[\da-fA-F]+\b"
    r"|\b(?=[a-f]*\d)[\da-f]{12,64}\b)"
    r"|(?P<rank>\b(?:TP|PP|DP|EP|ATTN_CP|MOE_DP|[Rr]ank|GPU|gpu|cuda)(?=\d))\d+\b"
    r"|(?P<number>(?<!\w)\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?)"
)
_LIST = re.compile(r"#(?:, ?#(?!\w))+")
_DIGITS = str.maketrans("123456789", "000000000")


def mask(text: str) -> str:
    """Return the template of a line's text.

    >>> mask("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 10716828, KV size: 68.99 GB")
    'KV Cache is allocated. dtype: torch.bfloat16, #tokens: #, KV size: # GB'
    >>> mask("/usr/lib/python3.12/site-packages/sglang/srt/awq.py:76: UserWarning: Only CUDA")
    '<path>/awq.py:#: UserWarning: Only CUDA'
    >>> mask("Use fa3 on cuda0 for TP3, bs [1, 2, 4], id 0x7f3a"), mask("at http://10.0.0.1:80/x")
    ('Use fa3 on cuda# for TP#, bs [#, ..], id <id>', 'at <url>')
    """
    masked = _MASKED.sub(_replace, text)
    return _LIST.sub("#, ..", masked) if ", #" in masked or ",#" in masked else masked


class Masker:
    """`mask`, several times faster on lines that differ in their digits only.

    Which parts are masked depends on where digits are and not on which. So two texts that are equal
    with all digits set to 0 have the same template, if no digit is left in it.
    """

    def __init__(self) -> None:
        self._known: dict[str, str | None] = {}

    def __call__(self, text: str) -> str:
        """Return the template of a line's text."""
        key = text.translate(_DIGITS)
        template = self._known.get(key, "")
        if template == "":
            template = mask(key)
            if len(self._known) >= KNOWN_LIMIT:
                self._known.clear()
            self._known[key] = template if "0" not in template else None
        return mask(text) if template is None or "0" in template else template


def _replace(match: re.Match[str]) -> str:
    kind = match.lastgroup
    if kind == "number":
        return "#"
    if kind == "rank":
        return match["rank"] + "#"
    if match["path"] is not None:
        return f"<path>/{match['file']}" if match["file"] else "<path>"
    return f"<{kind}>"
