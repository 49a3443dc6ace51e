"""Executes a patched model's forward on the CPU, in the environment's own Python, beside stock's.

A child runs `stage/run_forwards.py` for each column, with an overlay of the package first on its
path: the environment stays as it is, and nothing of the target is imported here.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hangdoctor.check import stage
from hangdoctor.check.model import (
    ROWS,
    Cell,
    Difference,
    Differs,
    NotChecked,
    Place,
    Same,
    Subject,
)
from hangdoctor.check.overlay import overlay
from hangdoctor.check.verdict import worst_first
from hangdoctor.errors import InputError
from hangdoctor.launch import keeping
from hangdoctor.model import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hangdoctor.check.environment import Environment
    from hangdoctor.engines import Phase
    from hangdoctor.launch import Started

KEYS = tuple(row.key for row in ROWS if row.depth == "running")
LIMIT_S = 600.0
"""Of a child, most of it for its imports on a slow disk; it gives each scenario a minute itself."""
TOLERANCE = 1e-5
"""Numbers differ where they are further apart than this, of the larger one where that is above 1.

The same float32 operations in the same order on one thread give the same bits: this is for a patch
that computes the same another way.
"""
_PIPELINE = "pipeline parallelism"
_MOST_OUTPUT_BYTES = 64 << 10
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in (\w+)', re.MULTILINE)
_MODEL_NAME = "deepseek_v2.py"


class Answer(Struct, frozen=True):
    """What a scenario came to in one child.

    Attributes:
        said: what the model and its inner model returned, as the child describes it.
        error: the exception, if it raised one.
        places: where it was raised, or where it stood when its time was over.
        stuck: its time was over.
        imported: False where the model file itself could not be imported.
        skipped: why it was not run.
    """

    said: dict[str, Any] = {}
    error: str = ""
    places: tuple[Place, ...] = ()
    stuck: bool = False
    imported: bool = True
    skipped: str = ""


class Ran(Struct, frozen=True):
    """A child: its answers by row, and why there are none of the rest."""

    answers: dict[str, Answer] = {}
    why: str = ""


def run_all(
    subjects: Sequence[Subject], world: Environment, *, say: Callable[[str], None]
) -> dict[str, dict[str, Cell]]:
    """Return the cells of each column; the children run side by side. Stock must come first.

    Takes about 10 s of a core for each column.

    Raises:
        InputError: the environment has no Python with SGLang.
    """
    if world.packages is None or world.python is None:
        raise InputError("running needs a Python that has SGLang", hint="--python PATH")
    wanted = [subject for subject in subjects if not subject.refused]
    say(f"running the forward of {', '.join(subject.name for subject in wanted)}")
    with stage.folder() as folder, ExitStack() as keepers:
        until_s = time.monotonic() + LIMIT_S
        started = [
            (subject, _start(subject, world, folder / subject.name, keepers)) for subject in wanted
        ]
        ran = {
            subject.name: _answers(child, folder / subject.name, until_s)
            for subject, child in started
        }
    stock = ran["stock"]
    return {
        subject.name: {key: _cell(key, subject, ran.get(subject.name), stock) for key in KEYS}
        for subject in subjects
    }


def compare(mine: Any, stock: Any, where: str = "it") -> Iterator[str]:
    """Say how two answers differ: their types, their shapes, or their numbers.

    >>> list(compare({"type": "float32", "shape": [2], "numbers": [1.0, 2.0]},
    ...              {"type": "float32", "shape": [2], "numbers": [1.0, 2.5]}, "logits"))
    ['logits: 1 of 2 numbers differ, by up to 0.5']
    """
    if mine.get("type") != stock.get("type"):
        yield f"{where} is {_kind(mine)} instead of {_kind(stock)}"
    elif "numbers" in stock:
        if mine["shape"] != stock["shape"]:
            yield f"{where} is {_kind(mine)} instead of {_kind(stock)}"
        else:
            yield from _numbers(mine["numbers"], stock["numbers"], where)
    elif "parts" in stock:
        if len(mine["parts"]) != len(stock["parts"]):
            yield f"{where} is {_kind(mine)} instead of {_kind(stock)}"
        else:
            for at, parts in enumerate(zip(mine["parts"], stock["parts"], strict=True)):
                yield from compare(*parts, f"{where}[{at}]")
    elif "fields" in stock:
        for name in sorted(mine["fields"].keys() | stock["fields"].keys()):
            if name not in mine["fields"] or name not in stock["fields"]:
                yield f"{where} {'lacks' if name in stock['fields'] else 'has a new'} {name}"
            else:
                yield from compare(mine["fields"][name], stock["fields"][name], name)
    elif mine.get("text") != stock.get("text"):
        yield f"{where} is {mine.get('text')} instead of {stock.get('text')}"


def _start(subject: Subject, world: Environment, folder: Path, keepers: ExitStack) -> Started:
    assert world.packages is not None  # noqa: S101  # asked above
    folder.mkdir()
    (folder / "dumps").mkdir()
    files = world.originals | {one.path: one.text for one in subject.files}
    path = [
        str(overlay(world.packages, folder / "packages", files)),
        str(stage.stand_ins(world.packages, folder / "stand_ins")),
    ]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    environment = stage.cpu_environment(folder) | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_HS_DUMP_DIR": str(folder / "dumps"),
        "OMP_NUM_THREADS": "1",
    }
    program = stage.HERE / "run_forwards.py"
    command = [str(world.python), str(program), str(folder / "model"), str(folder / "answers.json")]
    keeper = keepers.enter_context(keeping(0.0))
    return keeper.start(command, folder / "output", environment=environment, cwd=folder)


def _answers(child: Started, folder: Path, until_s: float) -> Ran:
    while child.poll() is None and time.monotonic() < until_s:
        time.sleep(0.1)
    output = _end_of(folder / "output")
    try:
        told = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        told = {}
    answers = {key: _answer(told[key], folder) for key in KEYS if key in told}
    status = child.poll()
    if status == 0:
        return Ran(answers=answers)
    frames = _frames(output, folder)
    rest = [key for key in KEYS if key not in answers]
    if "Timeout (" in output and rest:
        answers[rest[0]] = Answer(stuck=True, places=frames)
        return Ran(answers=answers, why=f"the forward before it ({rest[0]}) did not come back")
    last = (output.strip().splitlines() or [""])[-1][:300]
    ended = "it is not done" if status is None else f"it ended with {status}"
    return Ran(answers=answers, why=f"the forward cannot be run here: {ended}: {last}")


def _answer(told: dict[str, Any], folder: Path) -> Answer:
    if "skipped" in told:
        return Answer(skipped=str(told["skipped"]))
    if "error" not in told:
        return Answer(said=told["answer"])
    return Answer(
        error=str(told["error"]),
        places=(_place(str(told["file"]), int(told["line"]), folder),),
        imported=bool(told.get("imported", True)),
    )


def _cell(key: str, subject: Subject, ran: Ran | None, stock: Ran) -> Cell:
    if ran is None:
        return NotChecked(why=subject.refused)
    mine, theirs = ran.answers.get(key), stock.answers.get(key)
    if theirs is None:
        return NotChecked(why=f"of stock: {stock.why}" if subject.files else stock.why)
    if theirs.error or theirs.stuck:
        return NotChecked(why=f"stock fails here too: {theirs.error or 'it does not come back'}")
    if mine is None:
        return NotChecked(why=ran.why)
    if mine.skipped or theirs.skipped:
        return NotChecked(why=mine.skipped or f"of stock: {theirs.skipped}")
    if not mine.imported:
        how = f"it cannot be imported, and SGLang goes on with Transformers' model: {mine.error}"
        return Differs(
            differences=(Difference(how=how, effect="breaks", places=mine.places, phase="weights"),)
        )
    only_with = _PIPELINE if key.startswith("run-pp") else ""
    phase: Phase = "warmup"
    if mine.stuck:
        return Differs(
            differences=(
                Difference(
                    how="its forward does not come back",
                    effect="hangs",
                    places=mine.places,
                    phase=phase,
                    only_with=only_with,
                ),
            )
        )
    if mine.error:
        return Differs(
            differences=(
                Difference(
                    how=f"its forward raises {mine.error}",
                    effect="breaks",
                    places=mine.places,
                    phase=phase,
                    only_with=only_with,
                ),
            )
        )
    found = [
        *compare(mine.said["model"], theirs.said["model"], "what the model returns"),
        *compare(mine.said["inner"], theirs.said["inner"], "what DeepseekV2Model returns"),
    ]
    differs = worst_first(
        Difference(how=how, effect="invasive", only_with=only_with) for how in dict.fromkeys(found)
    )
    return differs or Same(note=f"same types, {_count(theirs.said)} numbers within {TOLERANCE:g}")


def _numbers(mine: list[Any], stock: list[Any], where: str) -> Iterator[str]:
    """Compare value by value; NaN is like NaN alone."""
    apart = [
        abs(one - other) for one, other in zip(mine, stock, strict=True) if not _is_near(one, other)
    ]
    if apart:
        yield (
            f"{where}: {len(apart)} of {len(stock)} numbers differ, by up to "
            f"{max(apart, default=0):.3g}"
        )


def _is_near(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    return abs(one - other) <= TOLERANCE * max(1.0, abs(one), abs(other))


def _kind(value: dict[str, Any]) -> str:
    name = str(value.get("type", "nothing")).removeprefix("torch.")
    if "shape" in value:
        return f"{name} {value['shape']}"
    if "parts" in value:
        return f"{name} of {len(value['parts'])}"
    return name


def _count(said: Any) -> int:
    if isinstance(said, dict):
        return len(said.get("numbers", ())) + sum(_count(part) for part in said.values())
    return sum(_count(part) for part in said) if isinstance(said, list) else 0


def _frames(output: str, folder: Path) -> tuple[Place, ...]:
    """Return where a stuck forward stood, the model file's lines first."""
    found = [(file, int(line)) for file, line, _ in _FRAME.findall(output)]
    own = [frame for frame in found if Path(frame[0]).name == _MODEL_NAME]
    return tuple(_place(file, line, folder) for file, line in (own or found)[:2])


def _place(file: str, line: int, folder: Path) -> Place:
    """Return a line as the reading names it, relative to the folder of the package."""
    inside = file.removeprefix(f"{folder}/packages/")
    at = inside.rfind("sglang/")
    return Place(file=inside[at:] if at >= 0 else inside, line=line)


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MOST_OUTPUT_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
