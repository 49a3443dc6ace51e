from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hangdoctor.collect.installation import find_installation
from hangdoctor.model import Frame, Installation, ProcessStacks, Stacks, ThreadStack

ROOT = Path(__file__).parents[2]
LONG_AGO_S = 1_600_000_000


def install(site, *, record=True, version="1.2.3"):
    """Put a wheel of the package "engine" into a site-packages, and date it back."""
    texts = {
        "engine/__init__.py": "",
        "engine/_version.py": "__version__ = version = '1.2.4.dev0'\n",
        "engine/srt/model.py": "def forward():\n    return 1\n",
        "engine/__pycache__/junk.py": "",
    }
    rows = []
    for name, text in texts.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        rows.append(f"{name},sha256={digest.rstrip('=')},{len(text)}")
    info = site / f"engine-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: engine\nVersion: {version}\n\n")
    (info / "RECORD").write_text("\n".join([*rows[: 3 if record else 0], "engine/RECORD,,"]))
    return site / "engine"


def stacks_in(path):
    threads = (ThreadStack(name="MainThread", frames=(Frame(function="f", path=str(path)),)),)
    return Stacks(by_pid={1: ProcessStacks(threads=threads)})


@pytest.fixture
def site(tmp_path):
    place = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    place.mkdir(parents=True)
    return place


def test_an_untouched_installation_has_its_release_and_no_changed_files(program, site):
    package = install(site)
    target = program("sleep", env=os.environ | {"PYTHONPATH": str(site)})
    assert find_installation("engine", [target.pid]) == Installation(
        name="engine", version="1.2.3", path=str(package)
    )


def test_the_copy_that_the_frames_name_is_the_one_that_runs(program, site, tmp_path):
    install(site)
    source = tmp_path / "checkout" / "python"
    source.mkdir(parents=True)
    package = install(source, version="9.9.9")
    target = program("sleep", env=os.environ | {"PYTHONPATH": str(site)})
    found = find_installation("engine", [target.pid], stacks_in(package / "srt" / "model.py"))
    assert (found.path, found.version) == (str(package), "9.9.9")


def test_a_patched_file_differs_from_the_release(program, site):
    package = install(site)
    (package / "srt" / "model.py").write_text("def forward():\n    return 1, []\n")
    os.utime(package / "srt" / "model.py", (LONG_AGO_S, LONG_AGO_S))
    target = program("sleep", env=os.environ | {"PYTHONPATH": str(site)})
    (changed,) = find_installation("engine", [target.pid]).changed_files
    assert changed.path == "engine/srt/model.py"
    assert changed.differs_from_release is True
    assert changed.newer_than_launch is False
    assert changed.modified_wall_s == LONG_AGO_S
    text = (package / "srt" / "model.py").read_bytes()
    assert changed.sha256 == hashlib.sha256(text).hexdigest()


def test_a_file_that_the_release_does_not_have_differs_from_it(program, site):
    package = install(site)
    (package / "srt" / "dump.py").write_text("")
    target = program("sleep", env=os.environ | {"PYTHONPATH": str(site)})
    (changed,) = find_installation("engine", [target.pid]).changed_files
    assert (changed.path, changed.differs_from_release) == ("engine/srt/dump.py", True)


def test_a_file_changed_after_the_start_is_newer_than_the_launch(program, site):
    package = install(site)
    target = program("sleep", env=os.environ | {"PYTHONPATH": str(site)})
    future_s = 4_000_000_000
    os.utime(package / "srt" / "model.py", (future_s, future_s))
    (changed,) = find_installation("engine", [target.pid]).changed_files
    assert changed.newer_than_launch is True
    assert changed.differs_from_release is False


def test_without_a_record_only_newer_files_are_told(program, site):
    package = install(site, record=False)
    (package / "srt" / "model.py").write_text("patched")
    os.utime(package / "srt" / "model.py", (LONG_AGO_S, LONG_AGO_S))
    target = program("sleep", env=os.environ | {"PYTHONPATH": str(site)})
    future_s = 4_000_000_000
    os.utime(package / "__init__.py", (future_s, future_s))
    found = find_installation("engine", [target.pid])
    assert found.version == "1.2.4.dev0"
    (changed,) = found.changed_files
    assert (changed.path, changed.differs_from_release) == ("engine/__init__.py", None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("__editable__.engine-1.pth", "{source}\n"),
        ("__editable___engine_1_finder.py", "MAPPING: dict = {{'engine': '{source}/engine'}}\n"),
    ],
)
def test_an_editable_installation_is_found_where_its_source_is(program, site, tmp_path, name, text):
    source = tmp_path / "checkout"
    source.mkdir()
    package = install(source, record=False)
    (site / name).write_text(text.format(source=source))
    target = program("sleep", env=os.environ | {"VIRTUAL_ENV": str(site.parents[2])})
    assert find_installation("engine", [target.pid]).path == str(package)


def test_a_package_that_is_nowhere_is_missing_with_what_to_do(program):
    target = program("sleep")
    missing = find_installation("no_such_engine", [target.pid])
    assert missing.reason == "failed"
    assert "stacks" in missing.hint


def test_a_shell_around_the_launch_is_not_guessed_from_but_its_frames_are(program, site):
    package = install(site)
    target = program(
        "sleep",
        before=("bash", "-c", '"$@" & wait', "bash"),
        env=os.environ | {"PYTHONPATH": str(site)},
    )
    assert find_installation("engine", [target.pid]).reason == "failed"
    found = find_installation("engine", [target.pid], stacks_in(package / "srt" / "model.py"))
    assert found.path == str(package)


def test_ended_processes_have_no_installation_to_be_found(program):
    target = program("sleep")
    target.process.kill()
    target.process.wait()
    assert find_installation("engine", [target.pid]).reason == "gone"


def test_the_copy_is_found_in_the_mount_namespace_of_the_process(program, site, tmp_path):
    # Inside, the installation lies behind an absolute link that leads elsewhere outside.
    install(site)
    hidden = tmp_path / "image"
    hidden.mkdir()
    package = install(hidden, version="7.7.7")
    link = tmp_path / "opt"
    link.symlink_to(tmp_path / "mnt")
    (tmp_path / "mnt").mkdir()
    as_root = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    mount = f'mount --bind {hidden} {tmp_path / "mnt"} && exec "$0" "$@"'
    target = program(
        "sleep",
        before=("unshare", *as_root, "-m", "sh", "-c", mount),
        env=os.environ | {"PYTHONPATH": str(link)},
    )
    assert not (tmp_path / "mnt" / "engine").exists()
    found = find_installation("engine", [target.pid])
    assert (found.path, found.version) == (str(link / "engine"), "7.7.7")
    assert package.is_dir()


def test_storage_that_does_not_answer_costs_the_deadline_and_no_more(program, site):
    package = install(site)
    (package / "_version.py").unlink()
    os.mkfifo(package / "_version.py")
    target = program("sleep", env=os.environ | {"PYTHONPATH": str(site)})
    code = """
        import sys, msgspec
        from hangdoctor.collect import installation
        installation.JOB = msgspec.structs.replace(installation.JOB, deadline_s=2.0)
        print(installation.find_installation("engine", [int(sys.argv[1])]).reason)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(target.pid)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "timeout\n"
