"""Help, near misses, and what a shell completes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hangdoctor import known_issues
from hangdoctor.cli import app, main
from hangdoctor.commands import completion
from hangdoctor.commands.explain import explain
from hangdoctor.errors import UsageError
from hangdoctor.rules import RULES, rule_id

ROOT = Path(__file__).parents[1]
LIMIT_S = 120
COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]


def hangdoctor(*arguments, **variables):
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    return subprocess.run(
        [sys.executable, "-m", "hangdoctor", *arguments],
        capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=ROOT,
        stdin=subprocess.DEVNULL, env=environment | variables,
    )  # fmt: skip


@pytest.fixture
def script(tmp_path):
    """A directory for PATH with the script `hangdoctor` in it."""
    place = tmp_path / "bin"
    place.mkdir()
    runs = f'exec {shlex.quote(sys.executable)} -m hangdoctor "$@"'
    (place / "hangdoctor").write_text(f"#!/bin/sh\ncd {shlex.quote(str(ROOT))}\n{runs}\n")
    (place / "hangdoctor").chmod(0o755)
    return place


def complete(*words, cword=None, **variables):
    return hangdoctor(
        COMP_WORDS=" ".join(("hangdoctor", *words)),
        COMP_CWORD=str(len(words) if cword is None else cword),
        _HANGDOCTOR_COMPLETE="complete_bash",
        **variables,
    )


# Help


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_an_example_and_keeps_to_80_columns(command, flag, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*filter(None, [command]), flag])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    examples = [line for line in out.splitlines() if "Example: hangdoctor" in line]
    assert len(examples) == 1


def test_the_name_is_the_same_however_it_was_started():
    assert "Usage: hangdoctor explain" in hangdoctor("explain", "-h").stdout


def test_what_follows_two_dashes_may_be_h():
    done = hangdoctor("watch", "--timeout=5", "--", "echo", "-h")
    assert "DEAD" in done.stdout


# Near misses


def test_explain_without_a_rule_lists_all_of_them_one_a_line():
    done = hangdoctor("explain")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    named = [line.split()[0] for line in lines]
    assert named == [*(rule_id(rule) for rule in RULES), *known_issues.ids()]
    assert all(len(line.split()) > 2 for line in lines)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("waiting-for-rank-elsewere", "waiting-for-rank-elsewhere"),
        ("rank-dead", "rank-died"),
        ("eventfd", "eventfd-runaway"),
        ("stand-still", "all-ranks-stand-still"),
        ("gpu-spin", "gpu-spinning"),
    ],
)
def test_a_misspelt_rule_is_answered_with_the_one_that_was_meant(given, meant):
    with pytest.raises(UsageError) as raised:
        explain(given)
    assert "did you mean" in str(raised.value)
    assert meant in str(raised.value)
    assert raised.value.hint.startswith("hangdoctor explain ")


@pytest.mark.parametrize("given", ["RANK-DIED", "rank_died", "[rank-died]"])
def test_a_rule_is_found_however_it_is_copied(given):
    assert explain(given) == explain("rank-died")


def test_a_rule_that_is_like_none_is_answered_with_the_list():
    with pytest.raises(UsageError) as raised:
        explain("0123456789")
    assert "did you mean" not in str(raised.value)
    assert raised.value.hint == "all there are: hangdoctor explain"


def test_a_misspelt_command_is_answered_with_the_one_that_was_meant():
    done = hangdoctor("diagnos")
    assert "Did you mean 'diagnose'?" in done.stderr
    assert "hangdoctor --help" in done.stderr


def test_a_value_that_is_missing_is_answered_with_the_help_of_that_command():
    assert "\n  hangdoctor diagnose --help" in hangdoctor("diagnose", "--for").stderr


def test_a_command_without_the_dashes_is_answered_with_them():
    done = hangdoctor("watch", "python", "-m", "sglang.launch_server")
    assert done.returncode == 2
    assert "hangdoctor watch -- python -m sglang.launch_server" in done.stderr


# Completion


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("expl",), ["explain"]),
        (("explain", "rank-d"), ["rank-died"]),
        (("explain", "nothing"), []),
        (("diagnose", "--engine", ""), ["sglang"]),
        (("watch", "--engine", "sg"), ["sglang"]),
        (("preflight", "--format", "j"), ["json"]),
        (("diagnose", "server.l"), []),
        (("diagnose", "99999999"), []),
    ],
)
def test_the_protocol_of_completion_offers_what_fits(words, offered):
    done = complete(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == offered


@pytest.mark.parametrize("words", [("diagnose",), ("watch", "--pid-tree"), ("preflight",)])
def test_the_pids_of_running_launches_are_offered(program, words):
    launcher = program("launch_server", "sglang::scheduler_TP0")
    done = complete(*words, str(launcher.pid)[:-1])
    assert str(launcher.pid) in done.stdout.split()
    assert done.stderr == ""


def test_what_fails_while_pids_are_looked_for_is_silent(monkeypatch):
    def fail(*_):
        raise RuntimeError

    monkeypatch.setattr("hangdoctor.target.find_launches", fail)
    assert completion.launch_pids("") == []


def test_a_title_that_zsh_would_evaluate_is_passed_on_without_what_it_would(program):
    launcher = program("launch_server", "sglang::scheduler_TP0", "`id`$(id)';id;\"\\")
    found = dict(completion.launch_pids(str(launcher.pid)))
    assert re.fullmatch(r"[A-Za-z0-9_./=, @?+-]+", found[str(launcher.pid)])


def test_a_real_bash_completes(script):
    asked = """
        source <(_HANGDOCTOR_COMPLETE=source_bash hangdoctor)
        complete -p hangdoctor
        COMP_WORDS=(hangdoctor explain eventfd); COMP_CWORD=2
        _hangdoctor_completion hangdoctor
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", asked], capture_output=True, text=True, check=False,
        timeout=LIMIT_S, env=os.environ | {"PATH": f"{script}:{os.environ['PATH']}"},
    )  # fmt: skip
    first, *offered = done.stdout.splitlines()
    assert "-o default -F _hangdoctor_completion" in first  # files where nothing is offered
    assert (offered, done.stderr) == (["eventfd-runaway"], "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_is_given_its_script(shell):
    done = hangdoctor(_HANGDOCTOR_COMPLETE=f"source_{shell}")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"complete_{shell}" in done.stdout


def test_completion_is_installed_for_the_shell_that_asks(script, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        ["bash", "--norc", "-c", "hangdoctor --install-completion; echo code $?"],
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
        env=os.environ | {"PATH": f"{script}:{os.environ['PATH']}", "HOME": str(home)},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "code 0", done
    assert "_HANGDOCTOR_COMPLETE" in (home / ".bash_completions" / "hangdoctor.sh").read_text()


@pytest.mark.parametrize("option", ["--install-completion", "--show-completion"])
def test_a_shell_that_cannot_be_told_is_2_with_the_command_that_helps(option, tmp_path):
    # shellingham asks for the processes above, then for SHELL: here there is neither.
    done = subprocess.run(
        [
            "unshare", *([] if os.geteuid() == 0 else ["-Ur"]), "-pf", "--mount-proc",
            sys.executable, "-m", "hangdoctor", option,
        ],
        capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=ROOT,
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 2
    assert "_HANGDOCTOR_COMPLETE=source_bash hangdoctor" in done.stderr
