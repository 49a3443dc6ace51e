"""Starts a real server for each column, asks it, reads what it dumped, and ends it for certain."""

from __future__ import annotations

import json
import os
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hangdoctor import __version__
from hangdoctor.check import stage
from hangdoctor.check.logs import not_yet_run
from hangdoctor.check.model import ROWS, Cell, Difference, Differs, NotChecked, Same, Subject
from hangdoctor.check.overlay import overlay
from hangdoctor.check.verdict import worst_first
from hangdoctor.collect.installation import find_installation
from hangdoctor.diagnose import diagnose
from hangdoctor.endpoint import Endpoint, closes, endpoint_of, free_port, in_thread, is_open
from hangdoctor.errors import HangdoctorError, InputError
from hangdoctor.gpu_memory import cards_before, check_freed
from hangdoctor.launch import keeping, what_is_left
from hangdoctor.live import Live
from hangdoctor.logs.timeline import phase_durations
from hangdoctor.model import Header, Installation, LogSource, Struct
from hangdoctor.patches.dumps import read_dumps
from hangdoctor.recording import LOG_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from hangdoctor.check.environment import Environment
    from hangdoctor.engines import Engine
    from hangdoctor.logs.diff import LogDiff
    from hangdoctor.model import Missing

KEYS = tuple(row.key for row in ROWS if row.depth == "launching")
PROMPTS = ("The server is", "1 2 3 4 5", "Once upon a time there was a small model")
TOKENS = 8
DUMP_VARIABLE = "SGLANG_HS_DUMP_DIR"
STALL_AFTER_S = 20.0
REQUEST_S = 120.0
GRACE_S = 10.0
DUMPED_S = 5.0
MODEL_S = 300.0
SLOWER = 3.0
"""A phase counts as slower where it takes so many times as long, and 10 s more."""


_OWN_COMMAND = (
    "with a command of your own: hangdoctor check-patch -- python -m sglang.launch_server"
    " --port {port} ..."
)


class Answers(Struct, frozen=True):
    """What a server answered: tokens of each prompt, and the width of a hidden state.

    Attributes:
        width: None where it gave none; said: why.
    """

    tokens: tuple[tuple[int, ...], ...] = ()
    width: int | None = None
    said: str = ""


class Ran(Struct, frozen=True):
    """What one launch came to.

    Attributes:
        state, phase, culprits, title: of the diagnosis at the end of the start.
        ready_s: from the start to ready; None where it never was. durations_s: of each phase.
        seen: its recording, with its log.
        answers: None where it was not asked, or did not answer; later: the diagnosis by then.
        elsewhere: the folder of the SGLang that it ran, where that is not the patched copy; None
            where nothing told which it ran.
        left: what did not end; unsure: memory of which it cannot be told whether it is left.
        dumps: what was found; dumps_wrong: what is off in them.
    """

    state: str
    title: str
    seen: Path
    phase: Any = None
    culprits: tuple[str, ...] = ()
    ready_s: float | None = None
    durations_s: dict[str, float] = {}
    answers: Answers | None = None
    asked: str = ""
    elsewhere: str | None = None
    left: tuple[str, ...] = ()
    unsure: str = ""
    killed: int = 0
    ended_s: float = 0.0
    dumps: tuple[str, ...] = ()
    dumps_wrong: tuple[str, ...] = ()
    writers: int = 0


def launch_all(
    subjects: Sequence[Subject],
    world: Environment,
    engine: Engine,
    *,
    command: Sequence[str],
    timeout_s: float,
    records: Path,
    differ: Callable[[Path, Path], LogDiff],
    say: Callable[[str], None],
) -> dict[str, dict[str, Cell]]:
    """Return the cells of each column, launched one after the other; stock must come first.

    Args:
        subjects: the columns.
        world: whose SGLang is launched.
        engine: of its logs.
        command: with "{port}" where the port belongs; empty for a tiny model on the CPU.
        timeout_s: for each to get ready.
        records: a directory in which each column gets one, of the recording of its launch.
        differ: compares a log with the good one before it.
        say: talks of what is done.

    Raises:
        InputError: the environment cannot be launched.
    """
    if world.packages is None or (world.python is None and not command):
        raise InputError("launching needs a Python that has SGLang", hint="--python PATH")
    with stage.folder() as folder:
        shown = list(command) or _default_command(world, folder, say)
        ran: dict[str, Ran] = {}
        for number, subject in enumerate(subjects):
            if subject.refused:
                continue
            say(f"{subject.name}: starting a server ({number + 1} of {len(subjects)})")
            port = free_port()
            words = [word.replace("{port}", str(port)) for word in shown]
            ran[subject.name] = one = _launch(
                subject,
                world,
                engine,
                folder / subject.name,
                records / subject.name,
                timeout_s=timeout_s,
                own=not command,
                command=words,
            )
            say(
                f"{subject.name}: {one.state}"
                + (f" after {one.ready_s:.0f} s" if one.ready_s is not None else f": {one.title}")
            )
            if subject is subjects[0] and one.ready_s is None:
                break  # what the patches would be compared with is not there
        stock = ran.get("stock")
        return {
            subject.name: _cells(subject, ran.get(subject.name), stock, differ)
            for subject in subjects
        }


def _launch(
    subject: Subject,
    world: Environment,
    engine: Engine,
    folder: Path,
    seen: Path,
    *,
    command: list[str],
    timeout_s: float,
    own: bool,
) -> Ran:
    assert world.packages is not None  # noqa: S101  # asked above
    folder.mkdir()
    dumps = folder / "dumps"
    dumps.mkdir()
    files = world.originals | {one.path: one.text for one in subject.files}
    packages = overlay(world.packages, folder / "packages", files)
    before = [str(packages)]
    if own:
        before.append(str(stage.stand_ins(world.packages, folder / "stand_ins")))
    if os.environ.get("PYTHONPATH"):
        before.append(os.environ["PYTHONPATH"])
    environment = {"PYTHONPATH": os.pathsep.join(before), "PYTHONDONTWRITEBYTECODE": "1",
                   DUMP_VARIABLE: str(dumps)}  # fmt: skip
    if own:
        environment |= _cpu_environment(folder)
    endpoint = endpoint_of(command, engine.port, None)
    if is_open(endpoint):
        raise InputError(
            f"port {endpoint.port} is in use: an old server would answer",
            hint=f"ss -ltnp 'sport = :{endpoint.port}'",
        )
    log = seen / LOG_NAME
    seen.mkdir(parents=True, exist_ok=True)
    cards = {} if own else cards_before()  # our own command runs on the CPU
    began_s = time.monotonic()
    answers: Future[Answers] | None = None
    ready_s: float | None = None
    with keeping(GRACE_S) as keeper:
        started = keeper.start(command, log, environment=environment, cwd=folder if own else None)
        header = Header(
            hangdoctor=__version__,
            created_wall_s=time.time(),
            source=subject.name,
            stall_after_s=STALL_AFTER_S,
            engine=engine.name,
            command=tuple(command),
            log=LogSource(origin=str(log)),
        )
        with Live(
            (started.pid,), engine, header, log=log, record=seen, started=started, own_log=True
        ) as live:
            asked_s = None
            for facts in live.looks():
                found = diagnose(facts, live.engine)
                now_s = time.monotonic()
                if found.state == "ready" and answers is None:
                    ready_s, asked_s = now_s - began_s, now_s
                    answers = in_thread(partial(_ask, endpoint))
                over = found.state in ("hung", "dead") or (answers is not None and answers.done())
                late = (
                    now_s - began_s > timeout_s
                    if asked_s is None
                    else (now_s - asked_s > REQUEST_S)
                )
                if over or late:
                    break
            facts = live.finish(wait=True)
            found = diagnose(facts, live.engine)
            used = live.header.installation
            if not isinstance(used, Installation):
                pids = [pid for pid, track in facts.tracks.items() if track.present]
                used = find_installation(engine.detect.package, sorted(pids, reverse=True))
        got, asked = _got(answers)
        dumps_here = any(DUMP_VARIABLE in one.text for one in subject.files)
        wrong, dumped, writers = _dumps(dumps, wanted=got is not None and dumps_here)
        ended = keeper.end()
        left = what_is_left(ended)
        if endpoint.local and not closes(endpoint):
            left.append(f"port {endpoint.port} is open still")
        # And the next column's server needs the memory.
        freed = check_freed(cards, facts, ended)
        if freed and freed.outcome == "failed":
            left.append(freed.said)
    return Ran(
        state="ready" if got is not None else found.state,
        title=found.title,
        seen=seen,
        phase=found.phase,
        culprits=found.culprits,
        ready_s=ready_s,
        durations_s={
            str(phase): took_s for phase, took_s in phase_durations(facts.timeline).items()
        },
        answers=got,
        asked=asked,
        elsewhere=_elsewhere(used, packages),
        left=tuple(left),
        unsure=freed.said if freed and freed.outcome == "skipped" else "",
        killed=ended.killed,
        ended_s=ended.took_s,
        dumps=dumped,
        dumps_wrong=wrong,
        writers=writers,
    )


# ---- the cells


def _cells(
    subject: Subject,
    ran: Ran | None,
    stock: Ran | None,
    differ: Callable[[Path, Path], LogDiff],
) -> dict[str, Cell]:
    if ran is None:
        failed = f"stock itself did not come up: {stock.title}" if stock else "it was not launched"
        return {key: NotChecked(why=subject.refused or failed) for key in KEYS}
    # What the same command ran for stock, it runs for a patch.
    elsewhere = ran.elsewhere if ran.elsewhere is not None or stock is None else stock.elsewhere
    if elsewhere is None and ran.dumps:
        elsewhere = ""
    if elsewhere != "" and subject.files:
        why = (
            "which SGLang the command ran was not seen: perhaps not the patched copy"
            if elsewhere is None
            else f"the command ran {elsewhere} and not the patched copy, which PYTHONPATH names"
        )
        return {key: NotChecked(why=why) for key in KEYS}
    diff = None
    why = "stock itself was not ready"
    if stock is not None and stock is not ran and stock.answers is not None:
        try:
            diff = differ(stock.seen / LOG_NAME, ran.seen / LOG_NAME)
        except HangdoctorError as error:
            why = str(error)
    cells: dict[str, Cell] = {}
    cells["ready"] = _ready(ran, forward_ran=diff.forward_ran if diff else None)
    cells["phase-times"] = _times(ran, stock)
    if stock is ran:
        cells["milestones"] = Same()
    elif diff is None:
        cells["milestones"] = NotChecked(why=why)
    elif diff.outcome == "reaches-all":
        cells["milestones"] = Same(note="all of stock's")
    else:
        missing = diff.first_missing
        cells["milestones"] = NotChecked(
            why="it stops before stock's last" + (f": {missing.text}" if missing else "")
        )
    cells |= _answered(ran, stock)
    cells["dumps"] = _dumped(subject, ran)
    if ran.left:
        differs = worst_first(
            [Difference(how=f"does not end: {'; '.join(ran.left)}", effect="breaks")]
        )
        cells["clean-end"] = differs or Same()
    else:
        more = f", {ran.killed} of its processes killed" if ran.killed else ""
        more += f"; {ran.unsure}" if ran.unsure else ""
        cells["clean-end"] = Same(note=f"in {ran.ended_s:.0f} s{more}")
    return cells


def _ready(ran: Ran, *, forward_ran: bool | None) -> Cell:
    if ran.answers is not None or (ran.state == "ready" and not ran.asked):
        return Same(note=f"after {ran.ready_s:.0f} s" if ran.ready_s is not None else "")
    if ran.state in ("hung", "dead") or ran.ready_s is not None:
        if ran.state == "hung" and forward_ran is False:
            return NotChecked(
                why=f"{ran.title}; {not_yet_run(ran.phase)}",
            )
        when = "when it was asked: " if ran.ready_s is not None else ""
        return Differs(
            differences=(
                Difference(
                    how=f"{when}{ran.title or ran.asked}",
                    effect="hangs" if ran.state != "dead" else "breaks",
                    phase=ran.phase,
                    ranks=ran.culprits,
                    sure=ran.state in ("hung", "dead"),
                ),
            )
        )
    return NotChecked(why=f"neither ready nor hung in time: {ran.title}")


def _times(ran: Ran, stock: Ran | None) -> Cell:
    mine = ran.durations_s
    if not mine:
        return NotChecked(why="its log tells no phase's length")
    theirs = stock.durations_s if stock and stock is not ran else {}
    slower = [
        f"{phase} {took_s:.0f} s, stock's {theirs[phase]:.0f} s"
        for phase, took_s in mine.items()
        if phase in theirs and took_s > SLOWER * theirs[phase] and took_s > theirs[phase] + 10
    ]
    if slower:
        return Differs(
            differences=(Difference(how=f"slower: {', '.join(slower)}", effect="invasive"),)
        )
    parts = [
        f"{phase} {took_s:.0f} s" + (f" ({theirs[phase]:.0f})" if phase in theirs else "")
        for phase, took_s in mine.items()
    ]
    return Same(note=", ".join(parts) + ("; in brackets stock's" if theirs else ""))


def _answered(ran: Ran, stock: Ran | None) -> dict[str, Cell]:
    if ran.answers is None:
        not_asked = NotChecked(why=ran.asked or "it was never ready")
        return {"tokens": not_asked, "hidden-width": not_asked}
    cells: dict[str, Cell] = {}
    theirs = stock.answers if stock else None
    count = f"{len(ran.answers.tokens)} prompts of {TOKENS} tokens"
    if stock is ran:
        cells["tokens"] = Same(note=count)
        cells["hidden-width"] = _width(ran.answers, ran.answers)
    elif theirs is None:
        cells["tokens"] = cells["hidden-width"] = NotChecked(why="stock itself did not answer")
    else:
        cells["tokens"] = (
            Same(note=count)
            if ran.answers.tokens == theirs.tokens
            else Differs(
                differences=(
                    Difference(how="other tokens for the same greedy prompts", effect="invasive"),
                )
            )
        )
        cells["hidden-width"] = _width(ran.answers, theirs)
    return cells


def _width(mine: Answers, theirs: Answers) -> Cell:
    if mine.width is None or theirs.width is None:
        return NotChecked(why=mine.said or theirs.said or "it returns no hidden states")
    if mine.width != theirs.width:
        return Differs(
            differences=(
                Difference(
                    how=f"return_hidden_states gives rows of {mine.width}, stock of {theirs.width}",
                    effect="invasive",
                ),
            )
        )
    return Same(note=str(mine.width))


def _dumped(subject: Subject, ran: Ran) -> Cell:
    if not subject.files:
        return Same(note="stock dumps nothing")
    if ran.answers is None:
        return NotChecked(why="it did not answer")
    if not ran.dumps and subject.name == "mine":
        return NotChecked(why="no file in the format of the shipped patches")
    found = list(ran.dumps_wrong)
    if ran.writers > 1:
        found.append(f"{ran.writers} ranks write")
    if found:
        return Differs(differences=tuple(Difference(how=one, effect="breaks") for one in found))
    return Same(note=f"{len(ran.dumps)} files, all right, of one writer")


# ---- the server


def _default_command(world: Environment, folder: Path, say: Callable[[str], None]) -> list[str]:
    say("making a tiny random model")
    model = folder / "model"
    maker = Path(stage.__file__).parent / "make_model.py"
    try:
        done = subprocess.run(
            [str(world.python), str(maker), str(model)],
            capture_output=True,
            timeout=MODEL_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"the tiny model cannot be made: {error}", hint=_OWN_COMMAND) from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
        raise InputError(
            f"the tiny model cannot be made with {world.python}: {last[0]}",
            hint=_OWN_COMMAND,
        )
    return [
        str(world.python), "-m", "sglang.launch_server",
        "--model-path", str(model),
        "--tp", "2",
        "--host", "127.0.0.1",
        "--port", "{port}",
        "--device", "cpu",
        "--dtype", "float32",
        "--attention-backend", "torch_native",
        "--sampling-backend", "pytorch",
        "--grammar-backend", "none",
        "--disable-overlap-schedule",
        "--disable-radix-cache",
        "--context-length", "1024",
        "--max-total-tokens", "2048",
        "--max-running-requests", "4",
        "--mem-fraction-static", "0.5",
        "--enable-return-hidden-states",
    ]  # fmt: skip


def _cpu_environment(folder: Path) -> dict[str, str]:
    cpus = sorted(os.sched_getaffinity(0))
    return stage.cpu_environment(folder) | {
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cpus[at % len(cpus)]) for at in range(2)),
    }


# ---- questions


def _got(answers: Future[Answers] | None) -> tuple[Answers | None, str]:
    if answers is None:
        return None, ""
    if not answers.done():
        return None, f"no answer within {REQUEST_S:.0f} s"
    error = answers.exception()
    return (None, f"a wrong answer: {error}") if error else (answers.result(), "")


def _ask(endpoint: Endpoint) -> Answers:
    tokens = [tuple(_generate(endpoint, prompt)["output_ids"]) for prompt in PROMPTS]
    try:
        meta = _generate(endpoint, PROMPTS[0], return_hidden_states=True)["meta_info"]
        states = meta["hidden_states"]
        while isinstance(states[-1], list):
            states = states[-1]
        return Answers(tokens=tuple(tokens), width=len(states))
    except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
        return Answers(tokens=tuple(tokens), said=f"no hidden states are returned: {error!r}")


def _generate(endpoint: Endpoint, prompt: str, **more: object) -> dict[str, Any]:
    import urllib.request

    body = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
    } | more
    request = urllib.request.Request(  # noqa: S310  # http or https, by Endpoint
        f"{endpoint.url}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"}
        | ({"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}),
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=REQUEST_S) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


# ---- the rest


def _dumps(directory: Path, *, wanted: bool) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return what is off, the files, and how many wrote; dumps may come a moment later."""
    until_s = time.monotonic() + (DUMPED_S if wanted else 0)
    while wanted and time.monotonic() < until_s and not any(directory.glob("*.safetensors")):
        time.sleep(0.2)
    if wanted:
        time.sleep(1.0)  # the last of them is written by a thread
    found = read_dumps(directory)
    if not found.files:
        return ("no dump was written",) if wanted else (), (), 0
    wrong = [*found.wrong, *(f"{one.name}: {text}" for one in found.files for text in one.wrong)]
    return (
        tuple(wrong),
        tuple(one.name for one in found.files),
        len({one.writer for one in found.files}),
    )


def _elsewhere(used: Installation | Missing | None, packages: Path) -> str | None:
    if not isinstance(used, Installation):
        return None
    return "" if Path(used.path).is_relative_to(packages.resolve()) else used.path
