"""Whether the caches of kernel compilers grow: by the time stamps of their directories."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hangdoctor import engines
from hangdoctor.collect import caches
from hangdoctor.collect.look import Look
from hangdoctor.model import Missing

SGLANG = engines.load("sglang")
PLACES = {cache.id: cache.places for cache in SGLANG.caches}
OLD_S = 1_700_000_000


@pytest.fixture
def launched(tmp_path):
    """Give a process whose home is a directory of the test's."""
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "USER": "somebody"}
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()  # its environment is there
        yield process.pid
        process.kill()


def look(pid):
    return caches.read(Look(roots={pid: 0}, caches=PLACES))


def made(directory, *, at_s=OLD_S):
    directory.mkdir(parents=True, exist_ok=True)
    for each in (directory, *directory.parents[:4]):
        os.utime(each, (at_s, at_s))
    return directory


def test_a_cache_that_is_there_tells_its_newest_time_and_one_that_is_not_is_left_out(
    launched, tmp_path
):
    made(tmp_path / ".triton" / "cache" / "ABC")
    found = look(launched).by_id
    assert list(found) == ["triton"]
    assert found["triton"].path == str(tmp_path / ".triton" / "cache")
    assert found["triton"].newest_wall_s == OLD_S


def test_a_kernel_deep_in_a_cache_makes_it_newer(launched, tmp_path):
    top = tmp_path / ".cache" / "flashinfer"
    operation = made(top / "0.4.1" / "90a" / "cached_ops" / "norm")
    before = look(launched).by_id["flashinfer"]
    assert before.newest_wall_s == OLD_S
    (operation / "norm.cuda.o").touch()
    after = look(launched).by_id["flashinfer"]
    assert after.newest_wall_s > before.newest_wall_s


def test_many_kernels_are_looked_at_in_bounds(launched, tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "MOST_DIRECTORIES", 50)
    for number in range(120):
        made(tmp_path / ".triton" / "cache" / f"kernel{number}")
    assert look(launched).by_id["triton"].directories <= 121


def test_a_variable_of_the_launch_names_another_place():
    places = PLACES["deepgemm"]
    assert caches._path(places, {"HOME": "/root"}) == "/root/.cache/deep_gemm"
    assert caches._path(places, {"HOME": "/root", "SGLANG_DG_CACHE_DIR": "/dg"}) == "/dg"
    assert caches._path(places, {}) is None


def test_a_launch_that_has_ended_is_said_to_be_gone():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert look(process.pid) == Missing(reason="gone", detail="the launcher has ended")
