"""Whose the memory is that a card holds when a launch has ended."""

from __future__ import annotations

import pytest

from hangdoctor.gpu_memory import SLACK_BYTES, whose
from hangdoctor.model import Gpu, GpuProcess

GIB = 1 << 30
DRIVER = 615 << 20
"""In use on an H200 without any process."""
OWN, RANK, TENANT, OTHER, GONE = 710, 711, 4711, 4712, 4713
HIDDEN = 0  # stands for memory of no listed process
NAMES = {GONE: "", OWN: "", RANK: ""}


def gpu(holds=None, *, told=True):
    """Return a card on which processes hold so many GiB each."""
    holds = holds or {}
    return Gpu(
        index=0,
        memory_used_bytes=DRIVER + sum(holds.values()) * GIB,
        processes=tuple(
            GpuProcess(pid, size * GIB, NAMES.get(pid, "python3"))
            for pid, size in holds.items()
            if pid != HIDDEN
        )
        if told
        else None,
    )


ALL, OURS = {"sees_all": True}, {"sees_all": False}  # the first PID namespace, a container's
LOST = {"sees_all": True, "left": None}
CASES = {
    "all is free": (ALL, {}, {OWN: 40}, {}, (0, 0)),
    "a tenant came": (ALL, {}, {OWN: 40, TENANT: 30}, {TENANT: 30}, (0, 0)),
    "a tenant came as the launch ended": (ALL, {}, {OWN: 40}, {TENANT: 40}, (0, 0)),
    "a tenant was there and took more": (ALL, {TENANT: 5}, {OWN: 40, TENANT: 5}, {TENANT: 50},
                                         (0, 0)),
    "memory of no process": (ALL, {}, {OWN: 40}, {HIDDEN: 40}, (40, 0)),
    "the same, hidden by a tenant that frees as much": (
        ALL, {TENANT: 50}, {OWN: 40, TENANT: 50}, {TENANT: 10, HIDDEN: 40}, (40, 0)),
    "the same beside a tenant": (ALL, {}, {OWN: 40, TENANT: 30}, {TENANT: 30, HIDDEN: 40}, (40, 0)),
    "a process of the launch that could not be ended": (
        ALL | {"left": {OWN}}, {}, {OWN: 40}, {OWN: 40}, (40, 0)),
    "a process of the launch that is no more": (ALL, {}, {OWN: 40}, {OWN: 40}, (40, 0)),
    "a process that is no more and was not seen": (ALL, {}, {OWN: 40}, {GONE: 40}, (0, 40)),
    "a tenant that was there has ended": (ALL, {TENANT: 30}, {OWN: 40, TENANT: 30}, {HIDDEN: 40},
                                          (10, 30)),
    "a tenant that came meanwhile has ended, too": (ALL, {}, {OWN: 40, TENANT: 30}, {HIDDEN: 30},
                                                    (0, 30)),
    "a tenant took more and has ended": (ALL, {TENANT: 5}, {OWN: 40, TENANT: 30}, {HIDDEN: 30},
                                         (0, 30)),
    "memory that was no process's while the launch ran": (
        ALL, {}, {OWN: 40, HIDDEN: 9}, {HIDDEN: 9}, (0, 9)),
    "the keeper was killed and somebody is there": (LOST, {}, {OWN: 40}, {TENANT: 40}, (0, 40)),
    "the keeper was killed and nobody is there": (LOST, {}, {OWN: 40}, {HIDDEN: 40}, (0, 40)),
    "a container, and nothing is listed of others": (OURS, {}, {OWN: 40}, {HIDDEN: 40}, (0, 40)),
    "a container, and a tenant in it": (OURS, {}, {OWN: 40}, {TENANT: 40}, (0, 0)),
    "a container, and a rank that is no more": (OURS, {}, {OWN: 40, RANK: 2}, {RANK: 2}, (2, 0)),
    "a container, and the host's numbers": (OURS, {}, {OTHER: 40}, {TENANT: 40}, (0, 40)),
    "the same, and a tenant from before": (OURS, {TENANT: 5}, {OTHER: 40, TENANT: 5}, {TENANT: 50},
                                           (0, 0)),
    "the same, and memory of no process": (OURS, {}, {OTHER: 40}, {HIDDEN: 40}, (40, 0)),
    "a container, and nothing is listed": (OURS, {}, {HIDDEN: 40}, {HIDDEN: 40}, (0, 40)),
    "one number for the whole of a sandbox": (OURS, {OTHER: 1}, {OTHER: 41}, {OTHER: 41}, (0, 40)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_memory_is_the_launchs_only_where_that_is_certain(case):
    how, before, held, after, (left, unsure) = CASES[case]
    share = whose(gpu(before), gpu(held), gpu(after), **{"launch": {OWN, RANK}, "left": ()} | how)
    assert (share.left_bytes, share.unsure_bytes) == (left * GIB, unsure * GIB)
    assert bool(share.why) == bool(unsure)


@pytest.mark.parametrize("silent", range(3))
def test_where_the_driver_does_not_tell_the_processes_more_memory_is_nobodys_for_certain(silent):
    looks = [gpu(holds, told=at != silent) for at, holds in enumerate(({}, {OWN: 40}, {HIDDEN: 9}))]
    share = whose(*looks, launch={OWN}, left=(), sees_all=True)
    assert (share.left_bytes, share.unsure_bytes) == (0, 9 * GIB)


def test_what_the_driver_itself_takes_more_is_not_spoken_of():
    after = Gpu(index=0, memory_used_bytes=DRIVER + SLACK_BYTES, processes=())
    share = whose(gpu(), gpu({OWN: 40}), after, launch={OWN}, left=(), sees_all=True)
    assert share.left_bytes <= SLACK_BYTES
