"""A diagnosis as people and programs read it. RENDERERS is the list of formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.render.json import to_json
from hangdoctor.render.text import to_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from hangdoctor.facts import Facts
    from hangdoctor.findings import Diagnosis

RENDERERS: dict[str, Callable[[Facts, Diagnosis], str]] = {"text": to_text, "json": to_json}
