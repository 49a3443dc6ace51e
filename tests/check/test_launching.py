"""check-patch with a launch command: what it compares, and that nothing is left of what it ran."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from nvml import card, on_cards

SERVER = Path(__file__).parents[1] / "programs" / "patched_server.py"
STOCK = "TOKENS = [1, 2]\nWIDTH = 64\nSILENT = DIES = False\n"
LIMIT_S = 120


@pytest.fixture
def environment(tmp_path):
    """A Python whose SGLang is one model file."""
    root = tmp_path / "environment"
    models = root / "lib" / "python3.11" / "site-packages" / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    for folder in (models, models.parent, models.parents[1]):
        (folder / "__init__.py").touch()
    (models / "deepseek_v2.py").write_text(STOCK)
    (root / "bin").mkdir()
    (root / "bin" / "python").symlink_to(sys.executable)
    return root


def command(environment, mine, *options, server=(sys.executable, str(SERVER))):
    file = environment.parent / "deepseek_v2.py"
    file.write_text(STOCK + mine)
    return [
        sys.executable, "-m", "hangdoctor", "check-patch", "--format=json",
        f"--python={environment}", f"--file={file}", *options,
        "--", *server, "--port", "{port}",
    ]  # fmt: skip


def check(tmp_path, arguments, **more):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        arguments,
        env=os.environ | {"TMPDIR": str(temporary)} | more,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout, done.stderr
    assert left(temporary) == []
    columns = {column["name"]: column for column in json.loads(done.stdout)["columns"]}
    return done, columns, temporary


def left(folder):
    """Return what runs with this folder in its environment or command line."""
    everybody = psutil.process_iter(["environ", "cmdline"])
    return [each for each in everybody if str(folder) in str(each.info)]


def cells(column):
    return {row["key"]: row for row in column["rows"]}


def test_each_column_is_launched_with_its_own_file_and_compared_with_stock(environment, tmp_path):
    patch = "TOKENS = [1, 3]\nWIDTH = 192\n"
    done, columns, temporary = check(tmp_path, command(environment, patch))
    assert (done.returncode, columns["mine"]["verdict"]["kind"]) == (0, "invasive")
    assert cells(columns["stock"])["ready"]["is"] == "same"
    mine = cells(columns["mine"])
    assert mine["ready"]["is"] == "same"
    assert "other tokens" in mine["tokens"]["differences"][0]["how"]
    assert "rows of 192, stock of 64" in mine["hidden-width"]["differences"][0]["how"]
    assert mine["clean-end"]["is"] == "same"
    assert list(temporary.iterdir()) == []


def test_memory_that_another_process_took_of_the_card_is_not_left_behind(environment, tmp_path):
    with subprocess.Popen(["sleep", "600"]) as tenant:
        cards = on_cards(
            tmp_path,
            before=[card(used=615)],
            held=[card(("SERVER", 40000), used=40624)],
            after=[card((tenant.pid, 40000), used=40624)],
        )
        done, columns, _ = check(tmp_path, command(environment, ""), **cards)
        tenant.kill()
    assert done.returncode == 0, done.stdout
    assert [cells(columns[name])["clean-end"]["is"] for name in ("stock", "mine")] == ["same"] * 2


def test_a_launch_that_dies_breaks_and_leaves_its_log_and_recording(environment, tmp_path):
    done, columns, temporary = check(tmp_path, command(environment, "DIES = True\n"))
    assert (done.returncode, columns["mine"]["verdict"]["kind"]) == (1, "breaks")
    (kept,) = temporary.iterdir()
    assert "the patch ends it" in (kept / "mine" / "server.log").read_text()
    assert (kept / "mine" / "recording.json").exists()
    assert str(kept) in done.stderr


def test_a_command_that_does_not_run_the_patched_copy_says_nothing_of_the_patch(
    environment, tmp_path
):
    packages = next(environment.glob("lib/*/site-packages"))
    server = ("env", f"PYTHONPATH={packages}", sys.executable, str(SERVER))
    done, columns, _ = check(tmp_path, command(environment, "DIES = True\n", server=server))
    assert (done.returncode, columns["mine"]["verdict"]["kind"]) == (3, "unchecked")
    assert cells(columns["stock"])["ready"]["is"] == "same"
    mine = cells(columns["mine"])
    assert mine["ready"]["is"] == mine["tokens"]["is"] == "not checked"
    assert str(packages) in mine["ready"]["why"]


def test_where_stock_itself_does_not_come_up_nothing_is_said_of_the_patch(environment, tmp_path):
    server = ("sh", "-c", "exit 3")
    done, columns, temporary = check(tmp_path, command(environment, "WIDTH = 1\n", server=server))
    assert done.returncode == 3
    ready = cells(columns["mine"])["ready"]
    assert (ready["is"], ready["why"][:31]) == ("not checked", "stock itself did not come up: t")
    (kept,) = temporary.iterdir()
    assert [each.name for each in kept.iterdir()] == ["stock"]


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_however_the_check_ends_no_server_is_left(environment, tmp_path, how, code):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    arguments = command(environment, "SILENT = True\n", f"--record={tmp_path / 'kept'}")
    with subprocess.Popen(
        arguments,
        env=os.environ | {"TMPDIR": str(tmp_path), "SERVER_ANNOUNCES": str(fifo)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        fifo.read_text()  # stock
        server = psutil.Process(int(fifo.read_text()))
        running.send_signal(how)
        assert running.wait(LIMIT_S) == code
    server.wait(LIMIT_S)
    assert (tmp_path / "kept" / "mine" / "server.log").exists()
