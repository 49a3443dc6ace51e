"""Locks as the hub's library really takes them, with the releases of SGLang's environment."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from looks import Watch

from hangdoctor.collect import Observer

PROGRAM = Path(__file__).parents[1] / "programs" / "hub_lock.py"
PATIENCE_S = 120


@pytest.fixture
def rank(sglang_environment, tmp_path):
    """Start a process under the title of a rank that takes a lock, or waits for it."""
    running = []

    def start(number, kind, lock):
        process = subprocess.Popen(
            [f"sglang::scheduler_TP{number}", PROGRAM, kind, lock],
            executable=sglang_environment.python,
            # Under another name the interpreter does not find its environment by itself.
            env=os.environ
            | {
                "HF_HUB_CACHE": str(tmp_path / "hub"),
                "PYTHONPATH": str(sglang_environment.packages),
            },
            stdout=subprocess.PIPE,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["flock", "soft"])
def test_a_lock_of_the_hub_that_a_rank_polls_for_leads_to_its_holder(kind, rank, tmp_path):
    lock = tmp_path / "hub" / ".locks" / "models--org--m" / "0a1b.lock"
    lock.parent.mkdir(parents=True)
    holder = rank(1, kind, lock)
    assert [holder.stdout.readline() for _ in range(2)] == [b"ready\n", b"held\n"]
    waiter = rank(0, kind, lock)
    assert waiter.stdout.readline() == b"ready\n"
    until_s = time.monotonic() + PATIENCE_S
    with Observer([holder.pid, waiter.pid]) as observer:
        watch = Watch(observer)
        while not (facts := watch.facts.rank("TP0")) or not facts.locks:
            assert time.monotonic() < until_s
            watch.look("stacks", "locks")
    (found,) = facts.locks
    assert (found.path, found.kind, found.owner) == (str(lock), kind, "alive")
    assert [each.pid for each in found.holders] == [holder.pid]
    assert watch.facts.rank("TP1").locks == ()
