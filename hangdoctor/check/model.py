"""What check-patch knows: subjects that are compared, cells of its table, and their verdicts."""

from __future__ import annotations

from typing import Literal

from hangdoctor.engines import Phase
from hangdoctor.model import Struct

Depth = Literal["reading", "running", "launching"]
DEPTHS: tuple[Depth, ...] = ("reading", "running", "launching")
"""The shallowest first."""

Effect = Literal["invasive", "breaks", "hangs"]
"""What a difference means, the least first: others see it; an exception; ranks wait for ever."""

VerdictKind = Literal["no-difference", "invasive", "breaks", "hangs", "unchecked"]


class Place(Struct, frozen=True):
    """A line of a file: of the patched one unless the file's name says another.

    Attributes:
        file: as it is shown, such as srt/models/deepseek_v2.py.
        line: from 1.
    """

    file: str
    line: int

    def __str__(self) -> str:
        """Return it as editors and compilers write it."""
        return f"{self.file}:{self.line}"


class Same(Struct, frozen=True, tag="same"):
    """As stock does it; `note` says what is new and harmless, or what was measured."""

    note: str = ""


class Difference(Struct, frozen=True):
    """One thing that is not as in stock.

    Attributes:
        how: one sentence without a full stop.
        effect: what it means.
        places: where, the decisive line first; empty where nothing has a line.
        phase: in which it would strike, or struck; None where not known.
        ranks: on which; empty where not known.
        sure: False where it only may be so: the condition cannot be followed.
        only_with: an option without which it cannot strike, such as pipeline parallelism; it
            counts as invasive then, whatever its effect.
    """

    how: str
    effect: Effect
    places: tuple[Place, ...] = ()
    phase: Phase | None = None
    ranks: tuple[str, ...] = ()
    sure: bool = True
    only_with: str = ""


class Differs(Struct, frozen=True, tag="differs"):
    """Not as stock does it, the worst difference first."""

    differences: tuple[Difference, ...]


class NotChecked(Struct, frozen=True, tag="not-checked"):
    """Nothing is known, and why."""

    why: str


Cell = Same | Differs | NotChecked


class Row(Struct, frozen=True):
    """One behaviour: its id, its title of at most 30 characters, and the depth that checks it."""

    key: str
    title: str
    depth: Depth


ROWS: tuple[Row, ...] = (
    Row(key="returns", title="what forward returns", depth="reading"),
    Row(key="aux-capture", title="aux capture: flag and list", depth="reading"),
    Row(key="collectives", title="collectives on every rank", depth="reading"),
    Row(key="host-sync", title="waits for the device", depth="reading"),
    Row(key="io", title="files, network, locks", depth="reading"),
    Row(key="stock-code", title="stock code left as it was", depth="reading"),
    Row(key="shared-state", title="attributes others read", depth="reading"),
    Row(key="forward-modes", title="forward modes of new code", depth="reading"),
    Row(key="layer-loop", title="new work in the layer loop", depth="reading"),
    Row(key="graph-replay", title="where graphs replay", depth="reading"),
    Row(key="log", title="the log of a launch with it", depth="reading"),
    Row(key="run-extend", title="forward: EXTEND", depth="running"),
    Row(key="run-decode", title="forward: DECODE", depth="running"),
    Row(key="run-idle", title="forward: IDLE", depth="running"),
    Row(key="run-pp-first", title="forward: first pipeline half", depth="running"),
    Row(key="run-pp-last", title="forward: last pipeline half", depth="running"),
    Row(key="run-hidden", title="forward: capture hidden", depth="running"),
    Row(key="ready", title="server reaches ready", depth="launching"),
    Row(key="phase-times", title="time in each phase", depth="launching"),
    Row(key="milestones", title="milestones in the log", depth="launching"),
    Row(key="tokens", title="tokens of greedy prompts", depth="launching"),
    Row(key="hidden-width", title="width of hidden states", depth="launching"),
    Row(key="dumps", title="dump files", depth="launching"),
    Row(key="clean-end", title="ends when told", depth="launching"),
)


class PatchedFile(Struct, frozen=True):
    """One file of the engine's package as it would be.

    Attributes:
        path: relative to the package's parent, such as sglang/srt/models/deepseek_v2.py.
        stock: what the environment has; None where it has no such file or there is none at all.
        text: what the patch makes of it.
    """

    path: str
    stock: str | None
    text: str


class Subject(Struct, frozen=True):
    """One column to be: stock, v1, v2, or what the user gave.

    Attributes:
        name: heads the column.
        title: what it is, in words, such as the file that was given.
        files: those that differ from the environment's; none for stock.
        refused: why there is nothing to compare, such as an anchor that this release lacks.
    """

    name: str
    title: str
    files: tuple[PatchedFile, ...] = ()
    refused: str = ""


class Verdict(Struct, frozen=True):
    """What a column comes to.

    Attributes:
        kind: the worst that its cells say.
        title: one sentence without a full stop.
        depth: the deepest that checked anything; None where nothing was.
        places: of the difference that decides.
        phase, ranks: of a hang.
    """

    kind: VerdictKind
    title: str
    depth: Depth | None = None
    places: tuple[Place, ...] = ()
    phase: Phase | None = None
    ranks: tuple[str, ...] = ()


class Column(Struct, frozen=True):
    """One subject, checked: a cell for each row's key, and the verdict."""

    name: str
    title: str
    cells: dict[str, Cell]
    verdict: Verdict
    files: tuple[str, ...] = ()


class Check(Struct, frozen=True):
    """The whole table.

    Attributes:
        engine, version: of the environment; empty where it has none.
        package: the directory of the engine's package; empty likewise.
        depth: the deepest that was asked for and possible.
        shallower_because: why it did not go deeper; empty at the deepest.
        rows: those that are shown.
        columns: stock first.
        notes: what else the reader must know, such as which file was compared.
    """

    engine: str
    version: str
    package: str
    depth: Depth
    shallower_because: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()
