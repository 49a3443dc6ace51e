"""The command line: a command parses options, calls one function, renders, and exits."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from hangdoctor import __version__
from hangdoctor.demo.kinds import FAULTS, STALL_PHASES, Fault, StallPhase
from hangdoctor.errors import HangdoctorError, UsageError
from hangdoctor.streams import put, say

EXIT_CODES: dict[str, int] = {"ready": 0, "hung": 1, "dead": 1, "unknown": 3, "slow": 4}
INTERRUPTED = 130
NAME = "hangdoctor"
SHOW_HINT = "print it, here for bash: _HANGDOCTOR_COMPLETE=source_bash hangdoctor"
OUR_FAULT = 2
STALL_AFTER_S = 20.0
DAY_S = 86400.0
"""No option takes a longer time: infinity is no number to wait for."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: hangdoctor preflight; hangdoctor diagnose",
    help="Says where an LLM inference server's start-up stalls, which rank is to blame, whether it "
    "is hung or only slow, how sure that is, and what to do next.",
)


def _engine_names(incomplete: str) -> list[str]:
    from hangdoctor.commands.completion import engine_names

    return engine_names(incomplete)


def _rule_ids(incomplete: str) -> list[tuple[str, str]]:
    from hangdoctor.commands.completion import rule_ids

    return rule_ids(incomplete)


def _launch_pids(incomplete: str) -> list[tuple[str, str]]:
    from hangdoctor.commands.completion import launch_pids

    return launch_pids(incomplete)


LOOKS = "What is looked at"
TIMES = "How long"
ANSWERS = "What comes of it"
_STILLNESS = "Stillness that is suspicious, in seconds; hung may be said after twice that."


def _seconds(name: str, text: str, *, least_s: float = 0.0, most_s: float | None = DAY_S) -> Any:
    """Declare an option that takes a time."""
    return typer.Option(
        name, metavar="S", min=least_s, max=most_s, help=text, rich_help_panel=TIMES
    )


Log = Annotated[
    str | None,
    typer.Option(
        "--log",
        metavar="FILE|-",
        help="The launch's log; - reads stdin.",
        rich_help_panel=LOOKS,
    ),
]
Good = Annotated[
    list[Path] | None,
    typer.Option(
        "--good",
        metavar="FILE",
        help="Log or recording of a good start here: what is normal. Repeatable.",
        rich_help_panel=LOOKS,
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        "--record", metavar="DIR", help="Keep all that was seen in DIR.", rich_help_panel=ANSWERS
    ),
]
Format = Annotated[
    Literal["text", "json"],
    typer.Option("--format", help="Form of the answer.", rich_help_panel=ANSWERS),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Read the launch as this engine.",
        autocompletion=_engine_names,
        rich_help_panel=LOOKS,
    ),
]
Native = Annotated[
    bool,
    typer.Option(
        "--native",
        help="Native frames too: stops each process for some ten milliseconds.",
        rich_help_panel=LOOKS,
    ),
]
Peek = Annotated[
    bool,
    typer.Option(
        "--peek",
        help="Registers of busy threads too, which tell their calls: stops each for some 40 us.",
        rich_help_panel=LOOKS,
    ),
]
StallAfter = Annotated[float, _seconds("--stall-after", _STILLNESS, least_s=0.5)]
StallAfterIfGiven = Annotated[
    float | None,
    _seconds(
        "--stall-after",
        f"{_STILLNESS} A recording has its own, else it is {STALL_AFTER_S:g}.",
        least_s=0.5,
    ),
]
Interval = Annotated[float, _seconds("--interval", "Between two looks.", least_s=0.2)]
Events = Annotated[
    bool,
    typer.Option("--events", help="One JSON line a change, on stdout.", rich_help_panel=ANSWERS),
]


class CommandAfterDashes(TyperCommand):
    """A command that takes the command line of another one after "--"."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Say where the "--" is missing: the options of the other are none of ours."""
        given = list(args)  # click empties it
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if given and not given[0].startswith("-") and "--" not in given and _is_usage(error):
                raise UsageError(
                    f"{given[0]} is a command, and a command comes after --",
                    hint=f"hangdoctor {self.name} -- {' '.join(given)}",
                ) from None
            raise


class OptionalPidCommand(CommandAfterDashes):
    """A command whose --pid-tree may stand without a value, which typer does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare --pid-tree the value "auto", before the first "--"."""
        return super().parse_args(ctx, give_pid_tree_a_value(args))


def give_pid_tree_a_value(args: list[str]) -> list[str]:
    """Return the arguments with a value for a --pid-tree that has none.

    >>> give_pid_tree_a_value(["--pid-tree", "--log", "F"])
    ['--pid-tree=auto', '--log', 'F']
    >>> give_pid_tree_a_value(["--pid-tree", "12", "--", "run", "--pid-tree"])
    ['--pid-tree', '12', '--', 'run', '--pid-tree']
    """
    end = args.index("--") if "--" in args else len(args)
    given = list(args)
    for index in range(end):
        if given[index] == "--pid-tree":
            following = given[index + 1] if index + 1 < end else "-"
            if following.startswith("-"):
                given[index] = "--pid-tree=auto"
    return given


@app.callback(invoke_without_command=True)
def _root(
    *, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        put(f"hangdoctor {__version__}")
        raise typer.Exit


@app.command()
def diagnose(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE]...",
            help="A PID, a recording's directory, a log, Flight Recorder dumps or their directory.",
            autocompletion=_launch_pids,
        ),
    ] = None,
    *,
    log: Log = None,
    good: Good = None,
    for_s: Annotated[float, _seconds("--for", "How long to look at a PID.")] = 15.0,
    record: Record = None,
    format: Format = "text",  # noqa: A002  # the option's name
    engine: EngineName = None,
    native: Native = False,
    peek: Peek = False,
    stall_after: StallAfterIfGiven = None,
    still_running: Annotated[
        bool,
        typer.Option(
            "--still-running",
            help="The log is whole, and its launch is alive now.",
            rich_help_panel=LOOKS,
        ),
    ] = False,
) -> None:
    """One verdict from a PID, a recording, a log, dumps, or several of them together.

    Without a source it finds the launch that runs on this machine.

    Example: hangdoctor diagnose 4748 --record /tmp/before-i-kill-it
    """
    from hangdoctor.commands.diagnose import diagnose as run

    _exit(
        run(
            sources or [],
            log=log,
            good=good or (),
            for_s=for_s,
            record=record,
            output=format,
            engine_name=engine,
            native=native,
            peek=peek,
            stall_after_s=stall_after,
            still_running=still_running,
        ),
        starting=0,
    )


@app.command(cls=OptionalPidCommand)
def watch(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="Start this and watch it."),
    ] = None,
    *,
    pid_tree: Annotated[
        str | None,
        typer.Option(
            "--pid-tree",
            metavar="[PID]",
            help="A process of the launch; found if bare.",
            autocompletion=_launch_pids,
            rich_help_panel=LOOKS,
        ),
    ] = None,
    log: Log = None,
    good: Good = None,
    record: Record = None,
    format: Format = "text",  # noqa: A002  # the option's name
    engine: EngineName = None,
    native: Native = False,
    peek: Peek = False,
    stall_after: StallAfter = STALL_AFTER_S,
    interval: Interval = 1.0,
    timeout: Annotated[
        float | None, _seconds("--timeout", "Give up after this.", most_s=None)
    ] = None,
    until: Annotated[
        Literal["ready", "verdict", "forever"],
        typer.Option("--until", help="What ends the watching.", rich_help_panel=TIMES),
    ] = "verdict",
    events: Events = False,
    kill_on_exit: Annotated[
        bool,
        typer.Option(
            "--kill-on-exit",
            help="End COMMAND when the watching ends.",
            rich_help_panel=ANSWERS,
        ),
    ] = False,
) -> None:
    """Follow a launch until it is ready, stuck or dead, and say which.

    COMMAND lives on whatever happens to hangdoctor, unless --kill-on-exit is given.

    Example: hangdoctor watch -- python -m sglang.launch_server --model-path M
    """
    from hangdoctor.commands.watch import watch as run

    if command and pid_tree is not None:
        raise UsageError(
            "--pid-tree and -- COMMAND exclude each other",
            hint="hangdoctor watch --pid-tree PID, or: hangdoctor watch -- COMMAND ...",
        )
    if command and len(command) == 1 and command[0].isdigit():
        raise UsageError(
            f"{command[0]} is a PID and no command",
            hint=f"hangdoctor watch --pid-tree {command[0]}",
        )
    if kill_on_exit and not command:
        raise UsageError(
            "--kill-on-exit needs -- COMMAND: hangdoctor ends only what it started",
            hint="hangdoctor watch --kill-on-exit -- COMMAND ...",
        )
    _exit(
        run(
            command or [],
            pid=_pid(pid_tree),
            log=log,
            good=good or (),
            record=record,
            output=format,
            engine_name=engine,
            native=native,
            peek=peek,
            stall_after_s=stall_after,
            interval_s=interval,
            timeout_s=timeout,
            until=until,
            events=events,
            kill_on_exit=kill_on_exit,
        ),
        starting=4,
    )


@app.command(cls=CommandAfterDashes)
def smoke(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND...", help="The server's command, as one types it."),
    ],
    *,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Where it answers; else by the command's --host and --port.",
            rich_help_panel=LOOKS,
        ),
    ] = None,
    good: Good = None,
    record: Record = None,
    junit: Annotated[
        Path | None,
        typer.Option(
            "--junit", metavar="FILE", help="A JUnit report too.", rich_help_panel=ANSWERS
        ),
    ] = None,
    format: Format = "text",  # noqa: A002  # the option's name
    engine: EngineName = None,
    native: Native = False,
    stall_after: StallAfter = STALL_AFTER_S,
    interval: Interval = 1.0,
    timeout: Annotated[float, _seconds("--timeout", "Until it is ready.")] = 1800.0,
    request_timeout: Annotated[
        float,
        _seconds(
            "--request-timeout",
            "For the answer; the first request may compile kernels.",
            least_s=0.1,
        ),
    ] = 120.0,
    grace: Annotated[float, _seconds("--grace", "From SIGTERM to SIGKILL at the end.")] = 10.0,
    until: Annotated[
        Literal["ready", "verdict"],
        typer.Option(
            "--until",
            help="What ends the waiting, besides the timeout; ready sits a hang out.",
            rich_help_panel=TIMES,
        ),
    ] = "verdict",
    events: Events = False,
) -> None:
    """For a CI: start a server, wait until it is ready, ask it once, and end it for certain.

    Nothing of COMMAND is left running, whatever ends hangdoctor. Where it fails, its log and the
    recording are kept; with $GITHUB_STEP_SUMMARY a summary is added to it.

    Exit code 0: ready, answered, all that the good logs have; 1: not so; 2: not started, such as
    where the port is in use; 3: undecided; 4: not ready in time, but at work.

    Example: hangdoctor smoke --timeout 900 -- python -m sglang.launch_server --model-path M
    """
    from hangdoctor.commands.smoke import smoke as run

    _exit(
        run(
            command,
            url=url,
            good=good or (),
            record=record,
            junit=junit,
            output=format,
            engine_name=engine,
            native=native,
            stall_after_s=stall_after,
            interval_s=interval,
            timeout_s=timeout,
            request_timeout_s=request_timeout,
            grace_s=grace,
            until=until,
            events=events,
        ),
        starting=4,
    )


@app.command("diff-logs")
def diff_logs(
    logs: Annotated[
        list[str],
        typer.Argument(metavar="GOOD... OTHER", help="Logs of good starts, then the one; - stdin."),
    ],
    *,
    format: Annotated[  # noqa: A002  # the option's name
        Literal["text", "html", "json", "markdown"], typer.Option("--format", help="Form.")
    ] = "text",
    into: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it there.")
    ] = None,
    context: Annotated[
        int, typer.Option("--context", metavar="N", min=0, help="Lines around where they part.")
    ] = 3,
    everything: Annotated[bool, typer.Option("--all", help="Cut no list short.")] = False,
    ranks: Annotated[
        str | None, typer.Option("--ranks", metavar="TP0,TP3", help="Show these ranks only.")
    ] = None,
    engine: EngineName = None,
) -> None:
    """Say where a log parts from the logs of good starts: what they did that it did not.

    Logs may be packed (gz, xz, zst), prefixed by docker, Kubernetes or journald, and hold several
    launches, of which the last counts. Exit code 0: it reaches all that they reach; 1: it does not.

    Example: hangdoctor diff-logs good.log yesterday.log.gz hung.log
    """
    from hangdoctor.commands.diff_logs import diff_logs as run

    _exit(
        run(
            logs,
            output=format,
            into=into,
            context=context,
            everything=everything,
            ranks=ranks,
            engine_name=engine,
        ),
        starting=0,
    )


@app.command("check-patch")
def check_patch(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="Launch this for each column."),
    ] = None,
    *,
    depth: Annotated[
        Literal["reading", "running", "launching"] | None,
        typer.Option("--depth", help="How deep; the deepest possible here without a server."),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option("--python", metavar="PATH", help="Python or environment that has SGLang."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="F", help="A patched file of one's own.")
    ] = None,
    patch: Annotated[
        Path | None, typer.Option("--patch", metavar="F.diff", help="A unified diff of one's own.")
    ] = None,
    log: Annotated[
        str | None,
        typer.Option("--log", metavar="FILE|-", help="Log of a launch with the patch that failed."),
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="DIR", help="Keep what was launched.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 for an invasive patch too.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="S", min=1.0, help="For each launch to get ready."),
    ] = 300.0,
    format: Format = "text",  # noqa: A002  # the option's name
) -> None:
    """Compare stock, the hidden-state patches or one's own: what they would change, or hang.

    Where --python has SGLang, its own Python runs the patched forward on the CPU, in a process of
    its own; --depth reading runs nothing. Exit code 0: no difference, or invasive; 1: it breaks or
    hangs; 3: nothing could be checked.

    Example: hangdoctor check-patch --file patched_deepseek_v2.py
    """
    from hangdoctor.commands.check_patch import check_patch as run

    _exit(
        run(
            depth=depth,
            python=python,
            file=file,
            patch=patch,
            log=log,
            record=record,
            strict=strict,
            output=format,
            command=command or (),
            timeout_s=timeout,
        ),
        starting=0,
    )


patch_app = typer.Typer(
    no_args_is_help=True,
    help="Put a hidden-state patch into SGLang's deepseek_v2.py, take it out, check what it wrote.",
    epilog="Example: hangdoctor patch apply hs-dump-v2 --python $(which python)",
)
app.add_typer(patch_app, name="patch")

PatchName = Annotated[str, typer.Argument(metavar="NAME", help="hs-dump-v1 or hs-dump-v2.")]
ModelFile = Annotated[
    Path | None, typer.Argument(metavar="[PATH]", help="The file, or a folder that has it.")
]
OfEnvironment = Annotated[
    Path | None,
    typer.Option("--python", metavar="ENV", help="Of an interpreter or virtual environment."),
]
OfServer = Annotated[
    int | None, typer.Option("--pid", metavar="PID", min=1, help="Of a server that runs.")
]


@patch_app.command("list")
def patch_list() -> None:
    """List the patches, a line each."""
    from hangdoctor.commands.patch import listing

    put(listing())


@patch_app.command("show")
def patch_show(name: PatchName) -> None:
    """Say what a patch adds, what it leaves alone, and what follows from it.

    Example: hangdoctor patch show hs-dump-v2
    """
    from hangdoctor.commands.patch import show

    put(show(name))


@patch_app.command("apply")
def patch_apply(
    name: PatchName,
    path: ModelFile = None,
    *,
    python: OfEnvironment = None,
    pid: OfServer = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the diff, write nothing.")] = (
        False
    ),
) -> None:
    """Put a patch into a model file, with the dump module beside it. Twice is once.

    The original is kept beside it, for `patch revert`. Refused (2), with nothing changed, where the
    file is none of SGLang's, has another patch, or is built differently: the anchor is named.

    Example: hangdoctor patch apply hs-dump-v2 --python $(which python)
    """
    from hangdoctor.commands.patch import apply, find

    put(apply(name, find(path, python, pid), dry_run=dry_run))


@patch_app.command("revert")
def patch_revert(
    path: ModelFile = None, *, python: OfEnvironment = None, pid: OfServer = None
) -> None:
    """Take a patch out of a model file again, byte for byte.

    Refused (2) where the file was changed since: nothing of yours is lost.

    Example: hangdoctor patch revert --python $(which python)
    """
    from hangdoctor.commands.patch import find, revert

    put(revert(find(path, python, pid)))


@patch_app.command("verify-dumps")
def patch_verify_dumps(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What SGLANG_HS_DUMP_DIR named.")
    ],
    format: Format = "text",  # noqa: A002  # the option's name
) -> None:
    """Read the files that a patched server wrote, and say what is off.

    Exit code 0: all right; 1: a file is cut off or holds NaN, a layer or a batch is missing, two
    ranks write.

    Example: hangdoctor patch verify-dumps /dev/shm/hs
    """
    from hangdoctor.commands.patch import verify_dumps

    text, code = verify_dumps(directory, format)
    put(text)
    _exit(code, starting=0)


@app.command()
def explain(
    rule: Annotated[
        str | None,
        typer.Argument(
            metavar="[RULE]", help="A finding's rule, as printed.", autocompletion=_rule_ids
        ),
    ] = None,
) -> None:
    """Say what a finding sees, why it matters, and what to do.

    Without a rule or a known issue it lists them all.

    Example: hangdoctor explain waiting-for-rank-elsewhere
    """
    from hangdoctor.commands.explain import explain as run

    put(run(rule))


@app.command()
def demo(
    *,
    stall: Annotated[
        StallPhase | None,
        typer.Option(
            "--stall", metavar="PHASE", help=f"Where it goes wrong: {', '.join(STALL_PHASES)}."
        ),
    ] = None,
    fault: Annotated[
        Fault | None,
        typer.Option("--fault", metavar="KIND", help=f"What goes wrong: {', '.join(FAULTS)}."),
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=2, max=16, help="How many ranks.")
    ] = 4,
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="N", min=0, help="Which it strikes; else drawn by lot."),
    ] = None,
    stall_after: Annotated[
        float,
        _seconds(
            "--stall-after",
            "As of watch; shorter, since nothing here is slow by surprise.",
            least_s=2.0,
        ),
    ] = 5.0,
    timeout: Annotated[float, _seconds("--timeout", "Give up after this.", most_s=None)] = 45.0,
    format: Format = "text",  # noqa: A002  # the option's name
    record: Record = None,
    events: Events = False,
) -> None:
    """A pretend launch of real processes that goes wrong, diagnosed live.

    It needs no server, no GPU and no model, and leaves nothing behind.

    Example: hangdoctor demo --stall graph-capture --fault eventfd
    """
    from hangdoctor.commands.demo import demo as run

    _exit(
        run(
            phase=stall,
            fault=fault,
            rank=rank,
            ranks=ranks,
            stall_after_s=stall_after,
            usual_stall_after_s=STALL_AFTER_S,
            timeout_s=timeout,
            output=format,
            record=record,
            events=events,
        ),
        starting=4,
    )


@app.command()
def preflight(
    pid: Annotated[
        int | None,
        typer.Argument(
            metavar="[PID]",
            help="A process of a launch; else the only launch here.",
            autocompletion=_launch_pids,
        ),
    ] = None,
    *,
    format: Format = "text",  # noqa: A002  # the option's name
) -> None:
    """Say what can be seen here, what cannot, and the command that changes it.

    Main sources: stacks, I/O counters; GPUs where there are any; the log of a launch.

    Exit code 0: all of these are open; 1: one is not.

    Example: hangdoctor preflight 4748
    """
    from hangdoctor.commands.preflight import preflight as run

    _exit(run(pid, output=format), starting=2)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every way out has its exit code.

    An exception of our own is 2 and never 1, which would read as a verdict.
    """
    try:
        # The same name however it was started: completion asks for it by a variable.
        code = app(args=arguments, prog_name=NAME, standalone_mode=False)
    except HangdoctorError as error:
        _complain(str(error), error.hint)
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except SystemExit as end:  # typer's own, of its options for completion
        code = end.code
    except Exception as error:  # noqa: BLE001  # the last net: it must not look like a verdict
        # Usage errors are click's; newer typers bring a copy of click that has no public name.
        if _is_usage(error):
            context = getattr(error, "ctx", None)
            # A wrong choice is told in the words of a library below click.
            if said := error.format_message().replace("Value error, ", ""):  # type: ignore[attr-defined]  # empty where the help was asked for and printed
                _complain(said, f"{context.command_path if context else _command()} --help")
            sys.exit(OUR_FAULT)
        if isinstance(error, OSError) and _is_about_completion():
            _complain(f"cannot install the completion: {error}", SHOW_HINT)
            sys.exit(OUR_FAULT)
        if os.environ.get("HANGDOCTOR_DEBUG"):
            traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        _complain(
            f"a fault of hangdoctor's own: {type(error).__name__}: {error} "
            f"({Path(where.filename).name}:{where.lineno})",
            "run it again with HANGDOCTOR_DEBUG=1 and report what it prints",
        )
        sys.exit(OUR_FAULT)
    if code and _is_about_completion():
        _complain("it cannot be told which shell this is", SHOW_HINT)
        sys.exit(OUR_FAULT)
    sys.exit(code if isinstance(code, int) else 0)


def _is_usage(error: Exception) -> bool:
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _is_about_completion() -> bool:
    return sys.argv[1:2] in (["--install-completion"], ["--show-completion"])


def _command() -> str:
    """Return what was asked for, as far as it is a command of ours."""
    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    return f"{NAME} {sys.argv[1]}" if sys.argv[1:] and sys.argv[1] in names else NAME


def _pid(value: str | None) -> int | None:
    if value in (None, "auto"):
        return None
    try:
        return int(value or "")
    except ValueError:
        raise UsageError(
            f"--pid-tree takes a PID, not {value!r}", hint="hangdoctor watch --pid-tree 4748"
        ) from None


def _exit(state: str | int, *, starting: int) -> None:
    code = state if isinstance(state, int) else EXIT_CODES.get(state, starting)
    raise typer.Exit(code)


def _complain(message: str, hint: str = "") -> None:
    first, *more = message.splitlines() or [""]
    say(f"hangdoctor: {first}", *more, *(f"  {line}" for line in hint.splitlines()))
