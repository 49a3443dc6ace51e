"""Who has come to a rendezvous: by the connections to the store that a rank holds."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.model import ProcessWaits, ThreadWait, WaitObject, Waits

sys.path.insert(0, str(Path(__file__).parent))
import scenarios as told  # test material beside the tests
from scenarios import FIRST_RANK, Does, good_log, launch

SGLANG = engines.load("sglang")
COMMAND = "python3 -m sglang.launch_server --model-path /m --tp 4 --nnodes 2 --node-rank 0"
LISTENS = WaitObject(kind="tcp", target="[::]:5000", state="listen")


def connection(host, *, port=5000, state="established"):
    target = f"[::ffff:10.0.0.1]:{port} -> [::ffff:{host}]:48410"
    return WaitObject(kind="tcp", target=target, state=state)


def said(tmp_path, *objects, count=None):
    """Return what is said of who has come to a store with these ends."""
    log = good_log(("TP0", "TP1"), "nccl")
    does = dict.fromkeys(("TP0", "TP1"), Does(stack=told.TCP_STORE))
    recording = launch(tmp_path, does, log=log, seconds=log[-1][0] + 40, command=COMMAND)
    thread = ThreadWait(
        tid=99, call="epoll_wait", objects=(LISTENS, *objects), count=count or 1 + len(objects)
    )
    waits = Waits(by_pid={FIRST_RANK: ProcessWaits(threads=(thread,))})
    snapshots = tuple(msgspec.structs.replace(s, waits=waits) for s in recording.snapshots)
    facts = derive(msgspec.structs.replace(recording, snapshots=snapshots), SGLANG)
    (finding,) = (
        each for each in diagnose(facts, SGLANG).findings if each.rule == "waiting-for-other-node"
    )
    return [item.text for item in finding.because if "have connected" in item.text]


def test_ranks_of_this_machine_and_of_others_are_counted_by_their_hosts(tmp_path):
    ends = [connection("10.0.0.1"), connection("10.0.0.1"), connection("10.0.0.7")]
    assert said(tmp_path, *ends) == [
        (
            "to the store of TP0 on port 5000 have connected 3 of 4 ranks: 2 from this machine, "
            "1 from 10.0.0.7"
        )
    ]


def test_more_connections_than_were_listed_are_at_least_so_many(tmp_path):
    (text,) = said(tmp_path, connection("10.0.0.7"), count=90)
    assert "have connected at least 1 of 4 ranks: 1 from 10.0.0.7" in text


@pytest.mark.parametrize(
    "other",
    [[], [connection("10.0.0.7", port=6000)], [connection("10.0.0.7", state="syn-recv")]],
    ids=["none", "to another port", "not established"],
)
def test_other_ends_are_nobody_who_has_come(other, tmp_path):
    assert said(tmp_path, *other) == []
