"""What an engine looks like, as data: the schema of engines/*.toml, and how one is chosen.

An engine file holds everything that belongs to one inference engine: how to recognise its
processes, its log prefix, its phases with the lines of several versions side by side, the stack
frames of each phase, and the waits. `common.toml` holds the waits that PyTorch, NCCL and Python's
own library bring into every engine. Frames are written `path:function`: the path matches at a
component boundary from the right, the function with or without its class.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Literal, TypeVar

import msgspec

Phase = Literal[
    "start",
    "distributed-init",
    "weights",
    "kv-cache",
    "graph-capture",
    "server",
    "warmup",
    "ready",
]
PHASES: tuple[Phase, ...] = Phase.__args__  # type: ignore[attr-defined]  # Literal's values, in order

ONLY_RANK = "TP0"
"""Name of the only rank of a launch, which neither titles nor prefixes name."""

PEER_KINDS = ("peers", "rendezvous")
"""Kinds of waits that end only when other ranks come."""

Section = Literal["log", "processes", "stacks", "gpus"]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all tables: a misspelt key is an error that names its path."""


class Pattern(Table, frozen=True, kw_only=True):
    """A regular expression with the evidence for it.

    Attributes:
        pattern: searched (not anchored) in a line without its prefix.
        examples: real lines that it must match; a test enforces it.
        seen_in: the releases whose source or log shows it.
    """

    pattern: str
    examples: tuple[str, ...]
    seen_in: str


class Milestone(Pattern, frozen=True, kw_only=True):
    """A log line that says how far a rank, or the launch, has come.

    Attributes:
        id: name of the milestone, the same for all versions' wordings of it.
        phase: the phase that the line belongs to.
        phase_after: the phase that the rank is in from here on.
        scope: "rank" for a line that each rank prints, "first-rank" for one that only the first
            rank prints, "launch" for one that speaks for all.
        together: a rank comes past it only when all have come to it, so that one which lacks what
            is printed before it prints no such lines at all.
        from_start: it is printed again and again later, so that without the start of the log, or
            the HTTP server's, it tells nothing of where the launch is.
        since, until: first and last release that prints it, "" for all that are known.
        depends_on: arguments of the launch that decide whether it is printed at all.
    """

    id: str
    phase: Phase
    phase_after: Phase
    scope: Literal["rank", "first-rank", "launch"] = "rank"
    together: bool = False
    from_start: bool = False
    since: str = ""
    until: str = ""
    depends_on: tuple[str, ...] = ()


class PhaseTable(Table, frozen=True, kw_only=True):
    """One phase: where its code lives, what can show progress, what is normal.

    Attributes:
        frames: a rank with one of these in its main thread's stack is in this phase.
        weak_frames: frames that only say "at least this phase": the log may know better.
        progress: the sections that could show progress in it.
        normal_max_s: the longest that is still normal, from public reports (see the file).
        normal_note: where that number comes from.
        advice: what to look at where a log stops in it.
    """

    id: Phase
    title: str
    frames: tuple[str, ...] = ()
    weak_frames: tuple[str, ...] = ()
    progress: tuple[Section, ...] = ("log", "processes", "stacks")
    normal_max_s: float
    normal_note: str = ""
    advice: tuple[str, ...] = ()


class Wait(Table, frozen=True, kw_only=True):
    """A place where a thread can stand still.

    Attributes:
        id: name, stable over versions.
        kind: who is waited for. "peers": other ranks of the group, in the same operation;
            "rendezvous": ranks that have not arrived, here or on another node; "device": the
            rank's own GPU; "child": a process it started; "lock": a lock file; "network": a
            server outside; "ranks-ready": the launcher waits for its ranks' ready message;
            "idle": requests (healthy).
        frames: innermost frames that mean it.
        under: one of these must stand further out in the stack; empty for anywhere.
    """

    id: str
    kind: Literal[
        "peers", "rendezvous", "device", "child", "lock", "network", "ranks-ready", "idle"
    ]
    title: str
    frames: tuple[str, ...]
    under: tuple[str, ...] = ()


class Limit(Table, frozen=True, kw_only=True):
    """A time-out of the engine's, or of a library's, that ends a wait by itself.

    Attributes:
        waits: ids of the waits that it ends; whoever stands in one of them is under it.
        frames: or one of these is in the stack, outermost or not.
        thread: a frame of another thread that must be there for it to be in force.
        seconds: by default; at the most late_s and late_share of it later.
        option: name in `Detect.sizes` of the option that sets the seconds.
        environment: variable of the launcher that does.
        device: it holds for launches on these only.
        not_with: names in `Detect.sizes`; with one of these it is another one.
        begins_with: milestone whose line comes when it begins to run.
        begins_after: milestones after whose lines it begins, nobody knows how long.
        ends: what happens then, for people.
        message: as the log will have it.
        seen_in: as in Pattern.
    """

    id: str
    waits: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    thread: str = ""
    seconds: float
    late_s: float = 0.0
    late_share: float = 0.0
    option: str = ""
    environment: str = ""
    device: Literal["", "cpu", "gpu"] = ""
    not_with: tuple[str, ...] = ()
    begins_with: str = ""
    begins_after: tuple[str, ...] = ()
    ends: str
    message: str
    seen_in: str


class LoadStage(Table, frozen=True, kw_only=True):
    """A part of the load that a stack shows.

    Attributes:
        title: what a rank does there, for people.
        functions: names of functions, without their class: they are in a file of each method's own.
        seen_in: as in Pattern.
    """

    id: Literal["post-processing"]
    title: str
    functions: tuple[str, ...]
    seen_in: str


class Role(Table, frozen=True, kw_only=True):
    """A kind of process of the launch.

    Attributes:
        title: searched in the process title; a group `rank` captures the rank's name.
        is_rank: it takes part in the collectives.
        helper: it works for the process that started it: a compiler, a pool.
        frames: one of these stands in its main thread's stack.
    """

    id: str
    title: str
    is_rank: bool = False
    helper: bool = False
    frames: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()


class Bar(Table, frozen=True, kw_only=True):
    """A progress bar: a pattern with the groups `done` and `total`, and perhaps `item`.

    Attributes:
        title: what it counts, for people.
        sizes: patterns of lines before it with all its items in a group `sizes`, numbers between
            commas; the largest is done first.
    """

    id: str
    phase: Phase
    title: str
    pattern: str
    sizes: tuple[str, ...] = ()
    examples: tuple[str, ...]
    seen_in: str


class Sign(Pattern, frozen=True, kw_only=True):
    """A line that means something besides progress.

    Where a line names the ranks that others waited for, or that died, a group `blamed` of the
    pattern captures their numbers; `status` the exit status that it tells, `pid` of whom; `after`
    how long a watchdog has seen no forward end, in seconds.

    Attributes:
        kind: "exception": a rank failed; "fatal": the launch is ending; "timeout": a wait was
            given up; "lost": the connection to a peer broke, no client's or server's outside;
            "signal": the launcher was told to end; "heartbeat": repeats while nothing moves;
            "stack": a watchdog tells where a rank stands; a dump of py-spy's follows where `pid`
            names its process; "warning": worth showing.
        phase: that the line comes from, where it can come from one only.
        ends_rank: the rank that prints it tells its parent and ends.
        of_any_process: a helper of the launch may print it as well as a rank, and its end need not
            be the launch's.
    """

    id: str
    kind: Literal[
        "exception", "fatal", "timeout", "lost", "signal", "heartbeat", "stack", "warning"
    ]
    phase: Phase | None = None
    ends_rank: bool = False
    of_any_process: bool = False


class Allocation(Pattern, frozen=True, kw_only=True):
    """A line that says how much host memory a rank allocates now; a group `gb`, of 10^9 bytes.

    Its pages come one by one, and silently: the process grows by them.
    """

    id: str
    title: str


class Program(Pattern, frozen=True, kw_only=True):
    """A kind of program, by its command line.

    Attributes:
        pool: its processes stay, and wait for work, when there is nothing to compile.
    """

    id: str
    pool: bool = False


class Cache(Table, frozen=True, kw_only=True):
    """Where a kernel compiler keeps what it has made.

    Attributes:
        title: of the compiler, for people.
        places: directories, with `$VARIABLE`s of the launcher's environment; the first counts whose
            variables are all set.
        code: parts of paths of the compiler's own code, a rank in which may fill it.
    """

    id: str
    title: str
    places: tuple[str, ...]
    code: tuple[str, ...]
    seen_in: str


class Detect(Table, frozen=True, kw_only=True):
    """How the engine is recognised.

    Attributes:
        launcher: patterns of the launcher's command line; `load` makes the role "launcher" of them.
        launcher_examples: real command lines, of which one must match each pattern.
        package: name of the Python package, to find the installation.
        log: patterns of lines that only this engine prints.
        cpu: patterns (command line or log) that show a launch without GPUs.
        every_rank_prints: patterns of arguments that only releases after
            `Engine.first_rank_prints_until` have.
        version, model: patterns of lines (or of the command line) whose first group is the
            engine's version, the model's path.
        sizes: patterns with a number: "tp", "pp", "dp", "nnodes", "node_rank", options in seconds;
            others, such as "dp_attention", only have to match.
        config: patterns of the command line that say that more options stand in a file.
    """

    launcher: tuple[str, ...]
    launcher_examples: tuple[str, ...]
    package: str
    log: tuple[str, ...]
    cpu: tuple[str, ...] = ()
    every_rank_prints: tuple[str, ...] = ()
    version: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    sizes: dict[str, tuple[str, ...]] = {}
    config: tuple[str, ...] = ()


class Engine(Table, frozen=True, kw_only=True):
    """One inference engine.

    Attributes:
        prefix: matches at the start of a line; groups `time`, and `rank` where the line has one.
        compile_paths: parts of file paths whose code compiles or tunes kernels: a rank that is
            busy there may show nothing for minutes.
        compilers: programs whose CPU, below a rank, is progress without limit.
        observers: programs that look at processes, whose CPU is none's progress.
        skip: literal text of frequent lines that mean nothing; looked for before any pattern.
        first_forward: the phase in which the model's forward runs for the first time; None where
            that is not known.
        first_rank_prints_until: the last release of those in which only the first rank of each
            group prints how the start goes on; "" where there was none.
        volatile: arguments that differ from launch to launch and mean nothing.
        second_model: arguments that bring a second model, whose milestones come once more.
        port: that its server listens on where its command names none.
    """

    name: str
    versions: str
    detect: Detect
    prefix: str
    time_format: str = "%Y-%m-%d %H:%M:%S"
    skip: tuple[str, ...] = ()
    first_forward: Phase | None = None
    first_rank_prints_until: str = ""
    volatile: tuple[str, ...] = ()
    second_model: tuple[str, ...] = ()
    port: int | None = None
    roles: tuple[Role, ...] = ()
    phases: tuple[PhaseTable, ...] = ()
    milestones: tuple[Milestone, ...] = ()
    bars: tuple[Bar, ...] = ()
    signs: tuple[Sign, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    waits: tuple[Wait, ...] = ()
    limits: tuple[Limit, ...] = ()
    load_stages: tuple[LoadStage, ...] = ()
    compile_paths: tuple[str, ...] = ()
    compilers: tuple[Program, ...] = ()
    observers: tuple[Program, ...] = ()
    caches: tuple[Cache, ...] = ()

    def phase(self, phase_id: str) -> PhaseTable:
        """Return the table of a phase.

        Raises:
            KeyError: the engine has no such phase.
        """
        return _by_id(self.phases, phase_id)

    def wait(self, wait_id: str) -> Wait:
        """Return a wait.

        Raises:
            KeyError: the engine has no such wait.
        """
        return _by_id(self.waits, wait_id)


_T = TypeVar("_T", PhaseTable, Wait)


def _by_id(tables: tuple[_T, ...], wanted: str) -> _T:
    for table in tables:
        if table.id == wanted:
            return table
    raise KeyError(wanted)


class Common(Table, frozen=True, kw_only=True):
    """What every engine shares; each as in Engine."""

    waits: tuple[Wait, ...]
    signs: tuple[Sign, ...] = ()
    compile_paths: tuple[str, ...] = ()
    compilers: tuple[Program, ...] = ()
    observers: tuple[Program, ...] = ()
    caches: tuple[Cache, ...] = ()


@cache
def load(name: str) -> Engine:
    """Return an engine by name, its own waits before the common ones, the launcher's role last.

    Raises:
        KeyError: there is no engine of that name.
    """
    if name not in names():
        raise KeyError(name)
    engine = msgspec.toml.decode(_read(f"{name}.toml"), type=Engine)
    detect = engine.detect
    launcher = Role(
        id="launcher", title="|".join(detect.launcher), examples=detect.launcher_examples
    )
    common = msgspec.toml.decode(_read("common.toml"), type=Common)
    return msgspec.structs.replace(
        engine,
        roles=(*engine.roles, launcher),
        waits=engine.waits + common.waits,
        signs=engine.signs + common.signs,
        compile_paths=engine.compile_paths + common.compile_paths,
        compilers=engine.compilers + common.compilers,
        observers=engine.observers + common.observers,
        caches=engine.caches + common.caches,
    )


@cache
def names() -> tuple[str, ...]:
    """Return the names of all engines, in the order in which they are tried."""
    files = resources.files(__name__).iterdir()
    stems = sorted(file.name[:-5] for file in files if file.name.endswith(".toml"))
    return tuple(stem for stem in stems if stem != "common")


def matches_any(patterns: tuple[str, ...], text: str) -> bool:
    """Tell whether one of the patterns is found in the text."""
    return any(re.search(pattern, text) for pattern in patterns)


def role_of(engine: Engine, title: str) -> Role | None:
    """Return the role of a process by its title: the first whose pattern is found."""
    return next((role for role in engine.roles if re.search(role.title, title)), None)


def rank_frames(engine: Engine) -> tuple[str, ...]:
    """Return the frames that only a rank's stack has."""
    return tuple(frame for role in engine.roles if role.is_rank for frame in role.frames)


def is_compiler(engine: Engine, title: str) -> bool:
    """Tell whether a command line is a compiler's, or a build tool's.

    >>> is_compiler(load("sglang"), "/usr/bin/ninja -v"), is_compiler(load("sglang"), "sh -c nvcc")
    (True, False)
    """
    return any(re.search(compiler.pattern, title) for compiler in engine.compilers)


def is_compiler_pool(engine: Engine, title: str) -> bool:
    """Tell whether a command line is that of compilers that also stand when nothing is compiled."""
    return any(one.pool and re.search(one.pattern, title) for one in engine.compilers)


def is_observer(engine: Engine, title: str) -> bool:
    """Tell whether a command line is that of a program which looks at processes.

    >>> is_observer(load("sglang"), "py-spy dump --native --pid 7")
    True
    >>> is_observer(load("sglang"), "sglang::scheduler_TP0")
    False
    """
    return any(re.search(observer.pattern, title) for observer in engine.observers)


def rank_name(role: Role, title: str) -> str | None:
    """Return a rank's name as the log spells it, from its process title; None for other roles.

    A title without a rank is the only rank there is, which is called TP0.

    >>> rank_name(load("sglang").roles[0], "sglang::scheduler_DP1_MOE_DP0_TP3")
    'DP1 MOE_DP0 TP3'
    >>> rank_name(load("sglang").roles[0], "sglang::scheduler")
    'TP0'
    """
    match = re.search(role.title, title)
    if not role.is_rank or match is None:
        return None
    return normal_rank(match.groupdict().get("rank") or "") or ONLY_RANK


def normal_rank(text: str) -> str:
    """Return a rank's name with one space between its parts, from a title or a log prefix."""
    return " ".join(_RANK_PART.findall(text))


@cache
def needle(pattern: str) -> str:
    r"""Return the longest literal text that every match of a pattern contains; "" if there is none.

    Looking for it costs a fraction of what the pattern costs on a line that does not match.

    >>> needle(r"Load weight end\. (?:elapsed|type)="), needle("(?:a|b)c"), needle("ab?")
    ('Load weight end. ', 'c', 'a')
    >>> needle("a|b"), needle(r"\[[^|]\] text"), needle("(?i:a)b{2}c+d")
    ('', '] text', 'cd')
    """
    runs, run, depth = [""], "", 0
    for match in _ATOM.finditer(pattern):
        atom, repeat = match[1], match[2] or ""
        if atom == "|" and depth == 0:
            return ""
        depth += {"(": 1, ")": -1}.get(atom[0], 0)
        plain = atom[0] not in ".^$()|[" and not (atom[0] == "\\" and atom[1].isalnum())
        if depth == 0 and plain and repeat in ("", "+"):
            run += atom[-1]
            if not repeat:
                continue
        runs.append(run)
        run = atom[-1] if depth == 0 and plain and repeat == "+" else ""
    return max([*runs, run], key=len)


_ATOM = re.compile(
    r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:P<\w+>|[a-z]*:))?|.)([*?+]|\{[\d,]+\})?\??"
)
"""A part of a pattern, and how often it comes: an escape, a set, a bracket or a character."""

_RANK_PART = re.compile(r"[A-Z]+(?:_[A-Z]+)*\d+")


def _read(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
