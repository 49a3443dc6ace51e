"""What the README shows is run: commands that can, transcripts word for word, the rest parsed.

The kind of a block is the first word behind its fence:

    sh       runs anywhere, in a new virtual environment; "exit=1" where it does not end with 0
    console  "$ command", and below it exactly what it prints; "..." stands for lines left out
    view     what the live view shows of the first transcript's recording, at 80x24
    text     needs hardware or a cluster: every hangdoctor command in it must be one there is
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import typer
from rich.console import Console

from hangdoctor import engines
from hangdoctor.cli import app
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.recording import load
from hangdoctor.render.live import view

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = ("sh", "console", "view", "text", "python", "toml", "yaml")
CLI = typer.main.get_command(app)


def blocks(*kinds):
    text = (ROOT / "README.md").read_text()
    found = [(match["info"].split(), match["text"]) for match in FENCE.finditer(text)]
    return [(info, body) for info, body in found if (info or [""])[0] in kinds]


def named(found):
    return [pytest.param(info, body, id=body.splitlines()[0][:60]) for info, body in found]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout beside a new virtual environment, which its scripts come from."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(
        ROOT, folder / "hangdoctor", ignore=shutil.ignore_patterns(".*", "__pycache__", "wheels")
    )
    venv.create(folder / "venv", with_pip=True)
    return folder / "hangdoctor", {
        "PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder / "venv"),
        "HOME": os.environ.get("HOME", "/"),
        "TMPDIR": str(folder),
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
    }


def test_every_block_says_what_it_is():
    assert all(info and info[0] in KINDS for info, _ in blocks(*KINDS, ""))


@pytest.mark.parametrize(("info", "body"), named(blocks("sh")))
def test_what_can_be_run_runs(info, body, checkout):
    if "pytest" in body:
        pytest.skip("that is what runs this")
    folder, environment = checkout
    done = subprocess.run(
        ["bash", "-euc", body], cwd=folder, env=environment, capture_output=True, check=False
    )
    expected = next((int(word[5:]) for word in info if word.startswith("exit=")), 0)
    assert done.returncode == expected, done


@pytest.mark.parametrize(("info", "body"), named(blocks("console")))
def test_a_transcript_is_what_is_printed(info, body):
    for command, printed in transcripts(body):
        program, *arguments = shlex.split(command)
        assert program == "hangdoctor"
        done = subprocess.run(
            [sys.executable, "-m", "hangdoctor", *arguments],
            cwd=ROOT,
            env=os.environ | {"NO_COLOR": "1", "COLUMNS": "100"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        shown = "(?:.*\n)*?".join(map(re.escape, f"{printed.rstrip()}\n".split("...\n")))
        assert re.fullmatch(shown, f"{done.stdout.rstrip()}\n"), done.stdout
        expected = next((int(word[5:]) for word in info if word.startswith("exit=")), 0)
        assert done.returncode == expected


def test_the_view_is_what_is_drawn():
    (_, body), *_ = blocks("view")
    command, _ = transcripts(blocks("console")[0][1])[0]
    facts = derive(load(ROOT / command.split()[-1]), engines.load("sglang"))
    console = Console(file=io.StringIO(), width=80, height=24)
    with console.capture() as drawn:
        console.print(view(facts, diagnose(facts, engines.load("sglang")), 80, 24))
    assert [line.rstrip() for line in drawn.get().splitlines()] == body.splitlines()


def transcripts(body):
    """Return the commands of a console block, each with what is shown below it."""
    _, *parts = re.split(r"^\$ ", body, flags=re.MULTILINE)
    return [part.split("\n", 1) for part in parts]


def test_every_command_that_is_shown_exists():
    shown = [
        line for _, body in blocks("sh", "text") for line in body.replace("\\\n", " ").splitlines()
    ]
    shown += [command for _, body in blocks("console") for command, _ in transcripts(body)]
    shown += re.findall(r"`(hangdoctor [^`\n]+)`", (ROOT / "README.md").read_text())
    commands = [command for line in shown for command in hangdoctor_commands(line)]
    assert len(commands) > 10
    for command in commands:
        check_command(command)


def hangdoctor_commands(line):
    """Return the arguments of every call of hangdoctor in a line of shell."""
    calls = re.split(r"\||&&|;", line.partition("  #")[0])
    found = []
    for call in calls:
        words = shlex.split(call.replace("[", "").replace("]", "").replace("...", ""))
        for at, word in enumerate(words):
            if word == "hangdoctor" and words[at - 1 : at] not in (["pip"], ["install"]):
                found.append(words[at + 1 :])
                break
    return [words for words in found if words and "hangdoctor" not in words]


def check_command(words):
    if words[0] in ("--help", "--install-completion"):
        return
    assert words[0] in CLI.commands, f"there is no command {words[0]!r}: {words}"
    command = CLI.commands[words[0]]
    if hasattr(command, "commands"):
        assert words[1] in command.commands, f"there is no command {words[:2]}"
        command = command.commands[words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    known |= {option for parameter in command.params for option in parameter.secondary_opts}
    known.add("--help")
    given = words[: words.index("--")] if "--" in words else words
    options = [word.split("=")[0] for word in given if word.startswith("--")]
    assert set(options) <= known, f"hangdoctor {words[0]} has no {set(options) - known}"
