"""A folder of hidden-state dumps, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.render.text import clean

if TYPE_CHECKING:
    from hangdoctor.patches.dumps import Dump, Dumps

MOST_SHOWN = 20


def dumps_to_text(dumps: Dumps) -> str:
    """Return a line for each writer, then what is off and what is worth knowing."""
    writers: dict[str, list[Dump]] = {}
    for file in dumps.files:
        writers.setdefault(file.writer or "(no dump)", []).append(file)
    verdict = "ALL RIGHT" if dumps.all_right else "OFF"
    lines = [f"{verdict}: {len(dumps.files)} files in {dumps.directory}"]
    for writer, own in writers.items():
        layers = sorted({layer for file in own for layer in file.layers})
        told = f"layers {', '.join(map(str, layers))}" if layers else "no layers"
        seen = (
            f"{len(own)} files",
            f"{sum(file.bytes for file in own) / 1e6:.1f} MB",
            f"{sum(file.requests for file in own)} requests",
            f"{sum(file.tokens for file in own)} tokens",
            told,
            f"{max(file.hidden for file in own)} wide",
            own[0].dtype or "type not told",
        )
        lines += [f"  {writer}", f"    {', '.join(seen)}"]
    for title, common, name in (("Off", dumps.wrong, "wrong"), ("Note", dumps.doubts, "doubts")):
        each = [f"{file.name}: {text}" for file in dumps.files for text in getattr(file, name)]
        said = [*common, *each]
        if said:
            lines += ["", title, *(f"  {text}" for text in said[:MOST_SHOWN])]
        if len(said) > MOST_SHOWN:
            lines.append(f"  and {len(said) - MOST_SHOWN} more (--format json has all)")
    return "\n".join(clean(line) for line in lines)
