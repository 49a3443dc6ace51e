"""Public reports of launches that were taken for hung and were not, told anew: none is called hung.

Each is replayed look by look, as somebody would have seen it who watched at the default settings.
The names are those of the threads; the numbers are theirs where they fit into a test.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from looks import judged

from hangdoctor import engines
from hangdoctor.commands.talk import Talk

sys.path.insert(0, str(Path(__file__).parent))
import scenarios as told  # test material beside the tests
from scenarios import Does, good_log, launch

SGLANG = engines.load("sglang")
JOINS = Does(stack=told.DIST)
FOUR = ("TP0", "TP1", "TP2", "TP3")
LOAD = good_log(FOUR, "load-end")
LOAD_S = LOAD[-1][0]
POOL = good_log(FOUR, "capture")
POOL_S = POOL[-1][0]
MULTI = (
    "Multi-thread loading shards: {percent:3}% Completed | {done}/{total} [00:23<05:46,  5.77s/it]"
)


def shards(*points, total=64):
    """Return the load's log with its bar at so many shards after so many seconds."""
    bars = [
        (LOAD_S + at_s, MULTI.format(percent=100 * done // total, done=done, total=total))
        for at_s, done in points
    ]
    return [*LOAD, *bars]


def all_do(*parts, began_s=LOAD_S, names=FOUR, before=JOINS):
    """Return that all ranks do the same, each part from its second on."""
    doing = ((0.0, before), *((began_s + after_s, does) for after_s, does in parts))
    return dict.fromkeys(names, doing)


READS = Does(stack=told.MMAP, state="D", kernel="folio_wait_bit_common", loads_per_s=28e6)
PAUSES = Does(stack=told.MMAP, state="D", kernel="folio_wait_bit_common", cpu_pct=0)
COPIES = Does(stack=told.COPY, cpu_pct=90, state="R", gpu_grows_per_s=40 << 20)
THREADS = Does(stack=told.FUTURES, kernel="futex_wait_queue", cpu_pct=180, reads_per_s=300e6)
PINS = Does(stack=told.HOST_KV, cpu_pct=100, state="R", grows_per_s=2 << 30)
TUNES = Does(stack=told.AUTOTUNE, cpu_pct=100, state="R", gpu=(30, 1, 40))
NVCC = tuple((f"/usr/local/cuda/bin/nvcc -c kernel{n}.cu", 99.0) for n in range(4))
BUILDS = Does(stack=told.NINJA, children=(("ninja -v -C /cache/fused_moe", 0.0), *NVCC))
WAITS_FOR_STAGE = Does(stack=told.PP_RECV)
CAPTURES = Does(stack=told.CAPTURE, cpu_pct=100, state="R", gpu=(40, 5, 90))

CASES = {
    # Shards at 10 s each; a rank is done and waits in the barrier for those that still read.
    "sglang#5457": {
        "ranks": all_do((0, READS))
        | {"TP0": ((0, JOINS), (LOAD_S, READS), (LOAD_S + 60, Does(stack=told.BARRIER)))},
        "log": [
            *LOAD,
            (LOAD_S + 60, "TP0| Load weight end. elapsed=60 s, type=M, avail mem=9 GB."),
        ],
        "seconds": LOAD_S + 200,
        "storage": "nfs4",
    },
    # The bar is full after half a minute, and the copies to the GPUs take many more.
    "sglang#17970": {
        "ranks": all_do((0, THREADS), (30, COPIES)),
        "log": shards((1, 0), (10, 20), (30, 64)),
        "seconds": LOAD_S + 240,
        "storage": "lustre",
    },
    # 64 threads that end together: 4 shards in 23 s, none for 126 s, then all.
    "sglang#18124": {
        "ranks": all_do((0, THREADS)),
        "log": shards((0, 0), (23, 4), (149, 5), (152, 51), (153, 64)),
        "seconds": LOAD_S + 160,
        "storage": "ext4",
    },
    # 1 of 163 for 82 s, 163 in the next moment, three seconds from there to the KV cache.
    "sglang#7277": {
        "ranks": all_do((0, THREADS)),
        "log": shards((0, 0), (82, 1), (82.4, 163), total=163),
        "seconds": LOAD_S + 84,
        "storage": "xfs",
    },
    # From a file system behind a network, whose rate goes up and down between nothing and much.
    "modelplane#204": {
        "ranks": all_do(
            *((40 * n + 12 * k, PAUSES if k else READS) for n in range(9) for k in (0, 1))
        ),
        "log": shards((0, 0)),
        "seconds": LOAD_S + 240,
        "storage": "nfs4",
    },
    # Host memory for a hierarchical cache is faulted in and pinned, silently, for a minute.
    "sglang#31600": {
        "ranks": all_do((0, PINS), began_s=POOL_S, before=Does(stack=told.MMAP)),
        "log": [
            *POOL,
            *(
                (POOL_S, f"{n}| Allocating 120.00 GB host memory for hierarchical KV cache.")
                for n in FOUR
            ),
        ],
        "seconds": POOL_S + 60,
    },
    # The same by one thread, for tens of minutes; nvidia-smi does not answer meanwhile.
    "TensorRT-LLM#15430": {
        "ranks": all_do(
            (0, Does(stack=told.HOST_KV, cpu_pct=100, state="R", grows_per_s=30 << 20)),
            began_s=POOL_S,
            before=Does(stack=told.MMAP),
        ),
        "log": POOL,
        "seconds": POOL_S + 200,
        "without": ("gpus",),
    },
    # Each candidate is compiled inside the process, for more than five minutes.
    "flashinfer#3295": {
        "ranks": all_do((0, TUNES), began_s=POOL_S, before=Does(stack=told.MMAP)),
        "log": [*POOL, (POOL_S, "TP0| Running FlashInfer autotune...")],
        "seconds": POOL_S + 400,
    },
    # Every start compiles 180 files again, as a shared file system changes their time stamps.
    "flashinfer#3556": {
        "ranks": all_do((0, BUILDS), began_s=POOL_S, before=Does(stack=told.MMAP)),
        "log": POOL,
        "seconds": POOL_S + 200,
    },
    # One stage of the pipeline compiles in the warm-up, and the next waits for it.
    "sglang#26567": {
        "ranks": {"PP0": BUILDS, "PP1": WAITS_FOR_STAGE},
        "log": good_log(("PP0", "PP1"), "prefill"),
        "command": "python3 -m sglang.launch_server --model-path /m --tp 1 --pp 2",
        "seconds": 300,
        "launcher": told.SERVES,
    },
    # A graph that uses no custom all-reduce; it says so, and takes 46 s.
    "vllm#46367": {
        "ranks": all_do((0, CAPTURES), began_s=POOL_S, before=Does(stack=told.MMAP)),
        "log": [*POOL, *((POOL_S + 3, f"{n}| Registering 0 cuda graph addresses") for n in FOUR)],
        "seconds": POOL_S + 50,
    },
    # Idle schedulers poll, and use a core each.
    "sglang#1730": {
        "ranks": {"TP0": Does(stack=told.RECEIVE, cpu_pct=100, state="R")},
        "log": good_log(("TP0",), ""),
        "seconds": 300,
        "launcher": told.SERVES,
    },
    "sglang#9863": {
        "ranks": dict.fromkeys(
            ("TP0", "TP1"),
            Does(
                stack=told.IDLE_BROADCAST, cpu_pct=100, state="R", writes=9000, bytes_per_write=40
            ),
        ),
        "log": good_log(("TP0", "TP1"), ""),
        "seconds": 300,
        "launcher": told.SERVES,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_not_hung_is_called_hung_in_no_look(name, tmp_path):
    case = dict(CASES[name])
    recording = launch(tmp_path, case.pop("ranks"), **case)
    said = {}
    for snapshot, _, found in judged(recording):
        said.setdefault(found.state, snapshot.at_s)
    assert not said.keys() & {"hung", "dead"}, said
    assert said.keys() & {"starting", "slow", "ready"}


LATE = {
    "load": (Does(stack=told.BARRIER), Does(stack=told.LOADING, kernel="hrtimer_nanosleep"), LOAD),
    "rendezvous": (
        Does(stack=told.TCP_STORE),
        Does(stack=told.DIST, kernel="hrtimer_nanosleep"),
        good_log(("TP0", "TP1"), "nccl"),
    ),
}


@pytest.mark.parametrize("where", LATE)
def test_a_rank_that_sleeps_for_two_minutes_is_never_hung_for_sure_and_is_cleared_at_once(
    where, tmp_path
):
    waits, sleeps, log = LATE[where]
    since_s = log[-1][0]
    goes_on = Does(stack=told.MMAP, loads_per_s=50e6, reads_per_s=50e6)
    ranks = {
        "TP0": ((0, JOINS), (since_s, waits)),
        "TP1": ((0, JOINS), (since_s, sleeps), (since_s + 120, goes_on)),
    }
    recording = launch(tmp_path, ranks, log=log, seconds=since_s + 130, storage="ext4")
    hung = {}
    for snapshot, _, found in judged(recording):
        if found.state == "hung":
            hung[snapshot.at_s - since_s] = found.confidence
    assert hung, "it was still for long enough"
    assert set(hung.values()) == {"medium"}
    assert max(hung) <= 121


@pytest.mark.parametrize("events", [True, False])
def test_who_watches_is_told_that_hung_is_withdrawn(events, tmp_path, capfd):
    waits, sleeps, log = LATE["load"]
    since_s = log[-1][0]
    goes_on = Does(stack=told.MMAP, loads_per_s=50e6, reads_per_s=50e6)
    ranks = {"TP0": waits, "TP1": ((0, JOINS), (since_s, sleeps), (since_s + 60, goes_on))}
    recording = launch(tmp_path, ranks, log=log, seconds=since_s + 70, storage="ext4")
    lines = []
    talk = Talk(events=events, started=None, say=lines.append)
    for _, facts, found in judged(recording):
        talk.tell(facts, found)
    if events:
        said = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        hung = [each["state"] for each in said].index("hung")
        assert [each["withdrawn"] for each in said].index(True) > hung
        assert sum(each["withdrawn"] for each in said) == 1
    else:
        (line,) = (line for line in lines if "hung is withdrawn" in line)
        assert "HUNG" not in line
