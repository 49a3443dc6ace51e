"""A patch in a real file: in and out again, byte for byte, and what is refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest
from command_line import run_here
from models import STOCK

from hangdoctor.patches import COMPANION, PATCHES
from hangdoctor.patches.files import BACKUP_SUFFIX

NAMES = [patch.name for patch in PATCHES]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "site" / "sglang" / "srt" / "models" / "deepseek_v2.py"
    path.parent.mkdir(parents=True)
    path.write_text(STOCK)
    path.chmod(0o640)
    return path


def patch(*arguments):
    return run_here("patch", *arguments)


def folder(path):
    return {each.name: each.read_bytes() for each in path.parent.iterdir()}


@pytest.mark.parametrize("name", NAMES)
def test_apply_is_idempotent_and_revert_restores_byte_for_byte(name, model):
    before = folder(model)
    first = patch("apply", name, model)
    assert (first.returncode, first.stderr) == (0, "")
    assert f"{name} put into {model}" in first.stdout
    assert "left alone: " in first.stdout
    assert set(folder(model)) == {model.name, model.name + BACKUP_SUFFIX, COMPANION}
    assert stat.S_IMODE(model.stat().st_mode) == 0o640
    once = folder(model)
    again = patch("apply", name, model)
    assert again.returncode == 0
    assert f"{name} is in {model} already" in again.stdout
    assert "edited" not in again.stdout
    assert folder(model) == once
    back = patch("revert", model)
    assert back.returncode == 0, back.stderr
    assert folder(model) == before


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_a_patched_file_that_was_edited_since_is_told_so(dry_run, model):
    assert patch("apply", "hs-dump-v2", model).returncode == 0
    model.write_text(model.read_text() + "EDITED = True\n")
    edited = folder(model)
    again = patch("apply", "hs-dump-v2", model, *dry_run)
    assert again.returncode == 0
    assert f"hs-dump-v2 is in {model} already" in again.stdout
    assert "edited after it was patched; patch revert refuses" in again.stdout
    assert f"diff {model}{BACKUP_SUFFIX} {model}" in again.stdout
    assert folder(model) == edited
    (model.parent / (model.name + BACKUP_SUFFIX)).unlink()
    unknown = patch("apply", "hs-dump-v2", model, *dry_run).stdout
    assert "whether it was edited since cannot be told" in unknown
    assert "the original: " not in unknown


def test_a_file_that_is_a_link_to_a_shared_one_is_refused_and_a_linked_folder_is_not(model):
    shared = model.rename(model.parents[3] / "shared.py")
    model.symlink_to(shared)
    refused = patch("apply", "hs-dump-v2", model)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"cp --remove-destination {shared} {model}" in refused.stderr
    assert shared.read_text() == STOCK
    model.unlink()
    model.write_text(STOCK)
    (model.parents[3] / "linked").symlink_to(model.parents[3] / "sglang")
    assert patch("apply", "hs-dump-v2", model.parents[3] / "linked").returncode == 0


def test_a_dump_module_that_is_lost_comes_back(model):
    patch("apply", "hs-dump-v2", model)
    (model.parent / COMPANION).unlink()
    assert patch("apply", "hs-dump-v2", model).returncode == 0
    assert (model.parent / COMPANION).exists()


def test_a_dry_run_shows_the_diff_and_writes_nothing(model):
    before = folder(model)
    done = patch("apply", "hs-dump-v2", model, "--dry-run")
    assert done.returncode == 0
    added = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert any("hs_batch.capture(i, hidden_states, residual)" in line for line in added)
    assert folder(model) == before


def test_the_file_is_found_in_a_folder_and_in_an_environment(model, tmp_path):
    site = tmp_path / "site"
    (site / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert patch("apply", "hs-dump-v2", site, "--dry-run").returncode == 0
    environment = tmp_path / "env" / "bin"
    environment.mkdir(parents=True)
    # "-I" leaves out PYTHONPATH, as it should: the interpreter's own site has it.
    (environment / "python").write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(site)!r})\n"
        "code = sys.argv[3]\nsys.argv[1:] = sys.argv[4:]\nexec(code)\n"
    )
    (environment / "python").chmod(0o755)
    done = patch("apply", "hs-dump-v2", "--python", environment.parent)
    assert done.returncode == 0, done.stderr
    assert str(model) in done.stdout


def test_what_was_changed_after_the_patch_is_not_lost(model):
    patch("apply", "hs-dump-v2", model)
    model.write_text(model.read_text() + "# mine\n")
    there = folder(model)
    done = patch("revert", model)
    assert done.returncode == 2
    assert "changed after it was patched" in done.stderr
    assert folder(model) == there


def test_a_link_is_followed_and_stays(model, tmp_path):
    link = tmp_path / "deepseek_v2.py"
    link.symlink_to(model)
    assert patch("apply", "hs-dump-v2", link).returncode == 0
    assert link.is_symlink()
    assert model.read_text() != STOCK


def test_a_file_that_is_shared_by_a_hard_link_is_left_as_it_is_there(model, tmp_path):
    cached = tmp_path / "cached.py"
    os.link(model, cached)
    patch("apply", "hs-dump-v2", model)
    assert cached.read_text() == STOCK


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"print(1)\n", "no deepseek_v2.py of SGLang"),
        (b"\xff\xfe", "is not UTF-8: byte 0"),
        (STOCK.encode() + b"def broken(:\n", "syntax error"),
        (b"#" * (5 << 20), "too large"),
        (None, "No such file"),
        ("fifo", "no regular file"),
    ],
)
def test_what_cannot_be_patched_is_one_line_and_2(content, said, model):
    model.unlink()
    if content == "fifo":
        os.mkfifo(model)
    elif content is not None:
        model.write_bytes(content)
    names = set(model.parent.iterdir())
    for command in (("apply", "hs-dump-v2", model), ("revert", model)):
        done = patch(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("hangdoctor: ")
        if command[0] == "apply":
            assert said in done.stderr
    assert set(model.parent.iterdir()) == names


def test_a_read_only_file_stays_as_it_is(model):
    model.chmod(0o440)
    done = patch("apply", "hs-dump-v2", model)
    assert (done.returncode, folder(model)) == (2, {model.name: STOCK.encode()})
    assert f"{model} is read-only\n  chmod u+w {model}" in done.stderr
    assert patch("apply", "hs-dump-v2", model, "--dry-run").returncode == 0
    model.chmod(0o640)
    patch("apply", "hs-dump-v2", model)
    model.chmod(0o440)
    done = patch("revert", model)
    assert done.returncode == 2
    assert "is read-only" in done.stderr


def test_a_folder_that_cannot_be_written_leaves_the_file_alone(model):
    command = [sys.executable, "-m", "hangdoctor", "patch", "apply", "hs-dump-v2", str(model)]
    limit = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); import os; "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )  # a full disk, for whoever runs the tests as root as well
    done = subprocess.run(
        [sys.executable, "-c", limit, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "is as it was" in done.stderr
    assert folder(model) == {model.name: STOCK.encode()}


@pytest.mark.parametrize(
    "arguments", [("apply", "hs-dump-v9", "x.py"), ("apply", "hs-dump-v2"), ("show", "x")]
)
def test_wrong_usage_is_2(arguments):
    done = patch(*arguments)
    assert (done.returncode, done.stdout) == (2, "")


def test_list_and_show_name_both():
    listed = patch("list")
    assert all(name in listed.stdout for name in NAMES)
    shown = patch("show", "hs-dump-v2")
    assert "EXTEND" in shown.stdout
    assert "layers_to_capture" in shown.stdout
