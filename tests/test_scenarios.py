"""Verdicts on launches that were told about in public, and on those that nearly look like them."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import msgspec
import pytest
from looks import judged

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.findings import weakest
from hangdoctor.frames import call_path, shape
from hangdoctor.model import SECTIONS, FileLock, Frame, Holder, Missing, Stacks
from hangdoctor.recording import bare_log, load
from hangdoctor.render.text import to_text

sys.path.insert(0, str(Path(__file__).parent))
import logged
import scenarios as told  # test material beside the tests
import transform
from scenarios import Does, good_log, launch

SGLANG = engines.load("sglang")
replace = msgspec.structs.replace
RECORDINGS = Path(__file__).parent / "recordings"
MANY_LOOKS = 125
CHECKED = set()
"""Launches from which each source was taken away already."""


@pytest.fixture(autouse=True)
def _less_evidence_makes_no_verdict_surer(monkeypatch):
    """Take each source away from every short launch that a test has told of, all but processes.

    Without those only the log is left, and what that says was true when it was written.
    """
    launches = []
    tell = launch

    @functools.wraps(tell)
    def kept(*arguments, **settings):
        launches.append(tell(*arguments, **settings))
        return launches[-1]

    monkeypatch.setitem(globals(), "launch", kept)
    monkeypatch.setattr(told, "launch", kept)
    yield
    for recording in launches:
        if len(recording.snapshots) > MANY_LOOKS:
            continue  # it takes its time, and the short ones show as much
        log = recording.log_path.read_bytes() if recording.log_path else None
        seen = (msgspec.json.encode((recording.header, recording.snapshots)), log)
        if seen in CHECKED:
            continue  # several tests tell of one launch
        CHECKED.add(seen)
        full = verdict(recording)
        for section in set(SECTIONS) - {"processes"}:
            if section != "log" and all(getattr(x, section) is None for x in recording.snapshots):
                continue
            less = verdict(transform.drop_section(recording, section))
            transform.assert_no_surer(less, full, section)
        for name in ("io", "wchan", "syscall", "fd"):
            less = verdict(transform.drop_reading(recording, name))
            transform.assert_no_surer(less, full, name)


def ranks(count, does, **others):
    """Return what `count` ranks do; `TP2=Does(...)` for the one that does something else."""
    return {f"TP{rank}": does for rank in range(count)} | others


def verdict(recording):
    return diagnose(derive(recording, SGLANG), SGLANG)


def states(recording):
    """Return the states that someone who watched would have been told, in their order."""
    return [found.state for _, _, found in judged(recording)]


@pytest.mark.parametrize(
    "slow",
    [
        {"reads_per_s": 28 << 20, "cpu_pct": 97},
        {"maps_per_s": 400 << 10},
        {"grows_per_s": 1 << 20},
        {"gpu_grows_per_s": 512 << 10},
    ],
    ids=["bytes from disk", "pages of files", "memory", "memory of the GPU"],
)
def test_a_load_that_crawls_from_a_network_file_system_is_not_hung(slow, tmp_path):
    load = Does(stack=told.MMAP, state="D", kernel="folio_wait_bit_common", **slow)
    names = [f"TP{rank}" for rank in range(4)]
    recording = launch(tmp_path, ranks(4, load), log=good_log(names, "load-end"), seconds=200)
    assert set(states(recording)[30:]) == {"starting"}


SERVES = {
    "TP0": Does(stacks=(told.BATCH_ALL_REDUCE, told.RECEIVE, told.RECEIVE), cpu_pct=30),
    "TP1": Does(stacks=(told.BATCH_FORWARD, told.IDLE_BROADCAST, told.RECEIVE), cpu_pct=30),
}


@pytest.mark.parametrize("gpus", [True, False], ids=["with GPUs", "without"])
def test_a_server_with_a_request_now_and_then_is_ready_in_every_look(gpus, tmp_path):
    log = good_log(("TP0", "TP1"), "")
    recording = launch(
        tmp_path, SERVES, log=log, seconds=3900, began_s=3600, launcher=told.SERVES, gpus=gpus
    )
    assert set(states(recording)) == {"ready"}


def test_a_busy_server_whose_gpus_cannot_be_seen_is_ready_in_every_look(tmp_path):
    busy = Does(
        stacks=(told.BATCH_ALL_REDUCE, told.BATCH_FORWARD, told.BATCH_ALL_GATHER),
        state="R",
        cpu_pct=100,
    )
    recording = launch(
        tmp_path,
        ranks(2, busy),
        log=good_log(("TP0", "TP1"), ""),
        seconds=3900,
        began_s=3600,
        launcher=told.SERVES,
        gpus=False,
    )
    assert set(states(recording)) == {"ready"}


@pytest.mark.parametrize(
    "does",
    [
        Does(stack=told.MMAP, state="D", cpu_pct=0),
        Does(stack=told.MMAP, kernel="request_wait_answer", cpu_pct=0),
        Does(stack=told.REPACK, state="R", cpu_pct=100),
        Does(stack=told.NINJA, children=(("/usr/bin/ld -o kernel.so", 0.5),)),
    ],
    ids=["on storage", "on FUSE", "busy", "on a linker"],
)
def test_a_short_look_and_a_silent_log_do_not_make_a_rank_hung_that_may_be_at_work(does, tmp_path):
    waits = Does(stack=told.BARRIER)
    log = good_log(("TP0", "TP1"), "load-end")
    recording = launch(tmp_path, ranks(2, waits, TP1=does), log=log, seconds=615, began_s=600)
    found = verdict(recording)
    assert (found.state, found.culprits) == ("unknown", ("TP1",))


def test_a_short_look_and_a_silent_log_are_enough_for_a_rank_that_sleeps(tmp_path):
    waits, sleeps = Does(stack=told.BARRIER), Does(stack=told.LOADING, cpu_pct=0)
    log = good_log(("TP0", "TP1"), "load-end")
    recording = launch(tmp_path, ranks(2, waits, TP1=sleeps), log=log, seconds=615, began_s=600)
    found = verdict(recording)
    assert (found.state, found.culprits, found.confidence) == ("hung", ("TP1",), "medium")


def test_storage_that_pauses_for_two_minutes_is_not_hung(tmp_path):
    load = Does(stack=told.MMAP, state="D", reads_per_s=90 << 20)
    pause = Does(stack=told.MMAP, state="D", cpu_pct=0)
    doing = ((0.0, load), (60.0, pause), (180.0, load))
    names = [f"TP{rank}" for rank in range(8)]
    recording = launch(tmp_path, ranks(8, doing), log=good_log(names, "load-end"), seconds=200)
    assert "hung" not in states(recording)


def test_a_rank_that_sleeps_for_half_a_minute_and_goes_on_was_never_hung(tmp_path):
    load = Does(stack=told.COPY, state="R", cpu_pct=100, grows_per_s=256 << 20)
    sleeps = Does(stack=told.LOADING, cpu_pct=0)
    doing = {
        "TP0": ((0.0, load), (30.0, Does(stack=told.BARRIER))),
        "TP1": ((0.0, load), (30.0, sleeps), (62.0, load)),
    }
    recording = launch(tmp_path, doing, log=good_log(tuple(doing), "load-end"), seconds=100)
    found = states(recording)
    assert "hung" not in found
    assert found[-1] == "starting"


SPINS = (100, 0, 9.0)
SYNC_IN_CAPTURE = (*told.SYNC[:1], *told.CAPTURE)


@pytest.mark.parametrize(("count", "culprits"), [(1, ("TP0",)), (8, ())])
def test_a_kernel_that_never_ends_is_hung_and_names_a_rank_only_where_there_is_one(
    count, culprits, tmp_path
):
    captures = Does(stack=told.CAPTURE)
    spins = Does(stack=SYNC_IN_CAPTURE, state="R", cpu_pct=100, gpu=SPINS)
    doing = ((0.0, captures), (40.0, spins))
    names = [f"TP{rank}" for rank in range(count)]
    recording = launch(
        tmp_path, ranks(count, doing), log=good_log(names, "capture-end"), seconds=220
    )
    found = verdict(recording)
    assert (found.state, found.phase, found.culprits) == ("hung", "graph-capture", culprits)
    assert states(recording)[:160].count("hung") == 0


def test_a_kernel_that_is_met_late_is_not_called_hung_without_the_cards_idle_power(tmp_path):
    spins = Does(stack=SYNC_IN_CAPTURE, state="R", cpu_pct=100, gpu=SPINS)
    log = good_log(("TP0", "TP1"), "capture-end")
    recording = launch(tmp_path, ranks(2, spins), log=log, seconds=800, began_s=600)
    found = verdict(recording)
    assert (found.state, found.culprits) == ("unknown", ())
    assert "wait for their GPUs" in found.title


def test_ranks_at_different_steps_of_the_rendezvous_are_hung_only_after_long(tmp_path):
    doing = ranks(4, Does(stack=told.NCCL_INIT), TP3=Does(stack=told.NEW_GROUP))
    log = good_log(tuple(doing), "dist-end")
    recording = launch(tmp_path, doing, log=log, seconds=200)
    found = verdict(recording)
    assert (found.state, found.phase, found.culprits) == ("hung", "distributed-init", ())
    assert states(recording)[:130].count("hung") == 0


def test_another_node_may_come_four_minutes_late(tmp_path):
    doing = ranks(4, Does(stack=told.TCP_STORE))
    command = "python3 -m sglang.launch_server --model-path /m --tp 8 --nnodes 2 --node-rank 0"
    log = good_log(tuple(doing), "nccl")
    recording = launch(tmp_path, doing, log=log, seconds=400, command=command)
    found = verdict(recording)
    assert "hung" not in states(recording)[:300]
    assert (found.state, found.culprits) == ("hung", ())
    assert "another of the 2 nodes" in found.title


def test_a_lock_file_is_advised_on_as_one(tmp_path):
    recording = launch(
        tmp_path,
        ranks(2, Does(stack=told.JIT_LOCK)),
        log=good_log(("TP0", "TP1"), "capture-end"),
        seconds=300,
    )
    found = verdict(recording)
    assert found.state == "unknown"
    assert "wait for a lock file" in found.title
    assert any("fuser" in advice for advice in found.findings[0].advice)


TWO_REPLICAS = "python3 -m sglang.launch_server --model-path /m --tp 2 --dp 2"


def test_an_idle_replica_is_no_part_of_another_replicas_waits(tmp_path):
    idle, waits = Does(stack=told.IDLE_BROADCAST, state="R"), Does(stack=told.BATCH_ALL_REDUCE)
    doing = {"DP0 TP0": idle, "DP0 TP1": idle, "DP1 TP0": waits, "DP1 TP1": waits}
    recording = launch(
        tmp_path,
        doing,
        log=good_log(tuple(doing), ""),
        seconds=300,
        command=TWO_REPLICAS,
        launcher=told.SERVES,
    )
    found = verdict(recording)
    assert (found.state, found.culprits) == ("hung", ())
    assert found.findings[0].rule == "all-ranks-in-same-wait"
    assert found.findings[0].ranks == ("DP1 TP0", "DP1 TP1")


def test_a_replica_that_loads_is_not_to_blame_for_another_replicas_collective(tmp_path):
    waits, loads = Does(stack=told.CAPTURE_ALL_REDUCE), Does(stack=told.HUB, cpu_pct=1)
    doing = {"DP0 TP0": waits, "DP0 TP1": waits, "DP1 TP0": loads, "DP1 TP1": loads}
    recording = launch(
        tmp_path,
        doing,
        log=good_log(("DP0 TP0", "DP0 TP1"), "capture-end")
        + good_log(("DP1 TP0", "DP1 TP1"), "load-end"),
        seconds=300,
        command=TWO_REPLICAS,
    )
    assert verdict(recording).culprits == ()


def test_a_rank_that_still_imports_is_whom_the_others_wait_for(tmp_path):
    imports = Does(stack=told.IMPORTS, state="D", kernel="nfs_wait_bit_killable")
    doing = {"TP0": Does(stack=told.TCP_STORE), "TP1": imports}
    log = [(0, "|server_args=ServerArgs(model_path='/m', tp_size=2)")]
    log += [(18, "TP0|Init torch distributed begin.")]
    recording = launch(tmp_path, doing, log=log, seconds=120)
    found = verdict(recording)
    assert (found.state, found.phase, found.culprits) == ("unknown", "start", ("TP1",))
    assert "still starts" in found.title


@pytest.mark.parametrize("upto", ["prefill", None], ids=["with a log", "without"])
def test_a_warm_up_request_without_an_answer_is_seen_with_and_without_a_log(upto, tmp_path):
    idle = Does(stack=told.IDLE_BROADCAST, state="R", cpu_pct=100, writes=7000)
    recording = launch(
        tmp_path,
        ranks(2, idle),
        log=good_log(("TP0", "TP1"), upto) if upto else None,
        seconds=200,
        launcher=told.SERVES,
        launcher_threads=[told.WARMUP_THREAD],
    )
    found = verdict(recording)
    assert "the warm-up request has no answer" in found.title
    assert (found.state, found.phase) == ("hung" if upto else "unknown", "warmup")


def test_idle_ranks_whose_launcher_still_waits_for_them_are_told_as_such(tmp_path):
    idle = Does(stack=told.IDLE_BROADCAST, state="R", cpu_pct=100, writes=7000)
    log = good_log(("TP0", "TP1"), "http")
    found = verdict(launch(tmp_path, ranks(2, idle), log=log, seconds=140))
    assert (found.state, found.phase, found.culprits) == ("hung", "server", ())
    assert "still waits for their ready message" in found.title


BUILDS_ITS_CACHE = (
    "HostKVCache.init_kv_buffer mem_cache/memory_pool_host.py:188",
    "Scheduler.init_cache_with_memory_pool scheduler.py:912",
    *told.SCHEDULER,
)


@pytest.mark.parametrize(
    ("does", "launcher", "state"),
    [
        ({}, None, "hung"),
        ({"grows_per_s": 2 << 20}, None, "starting"),
        ({}, told.SERVES, "unknown"),
    ],
    ids=["still", "it grows", "the launcher does not wait for it"],
)
def test_a_rank_that_is_not_built_is_whom_the_launcher_waits_for(does, launcher, state, tmp_path):
    idle = Does(stack=told.IDLE_BROADCAST, state="R", cpu_pct=100, writes=7000)
    doing = ranks(4, idle, TP2=Does(stack=BUILDS_ITS_CACHE, **does))
    log = good_log(tuple(doing), "http")
    found = verdict(launch(tmp_path, doing, log=log, seconds=140, launcher=launcher))
    assert (found.state, found.phase) == (state, "server")
    assert (found.culprits == ("TP2",)) is (launcher is None)
    assert ("the launcher waits for TP2" in found.title) is (launcher is None)


def test_a_gpu_on_which_somebody_else_computes_moves_no_launch_without_gpus(tmp_path):
    doing = ranks(2, Does(stack=told.BARRIER), TP1=Does(stack=told.LOADING, gpu=(100, 60, 400)))
    recording = launch.__wrapped__(  # it is no launch yet: its card is its own
        tmp_path,
        doing,
        log=good_log(("TP0", "TP1"), "load-end"),
        seconds=140,
        command="python3 -m sglang.launch_server --model-path /models/m --device cpu",
    )

    def another_ones(snapshot):
        cards = {index: replace(card, processes=()) for index, card in snapshot.gpus.cards.items()}
        return replace(snapshot, gpus=replace(snapshot.gpus, cards=cards))

    recording = replace(recording, snapshots=tuple(map(another_ones, recording.snapshots)))
    found = verdict(recording)
    assert (found.state, found.phase, found.culprits) == ("hung", "weights", ("TP1",))


def test_the_log_of_an_earlier_launch_makes_no_loading_launch_ready(tmp_path):
    doing = ranks(2, Does(stack=told.BARRIER), TP1=Does(stack=told.LOADING, cpu_pct=0))
    tell = launch.__wrapped__  # without the stacks, the log would be believed
    recording = tell(tmp_path, doing, log=good_log(("TP0", "TP1"), ""), seconds=620, began_s=500)
    assert "ready" not in states(recording)


def test_no_phase_is_named_where_neither_stacks_nor_a_log_tell_it(tmp_path):
    idle = Does(stack=told.IDLE_BROADCAST, state="R", cpu_pct=100, writes=7000)
    recording = launch(tmp_path, ranks(2, idle), log=None, seconds=100, without=["stacks"])
    found = verdict(recording)
    assert (found.state, found.phase) == ("unknown", None)


def log_verdict(tmp_path, *lines):
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines) + "\n")
    return verdict(bare_log(path))


def logged_dump(rank, pid, inner, at_s):
    """Return the lines that SGLang's soft watchdog prints with a stack of py-spy's."""
    first, *others = logged.dump(f" {rank}", pid, inner).splitlines()
    announced = first.partition("] ")[2]
    said = others.pop().partition("] ")[2]
    stack = [(at_s, line) for line in others if line]
    batch = f"scheduler.cur_batch.reqs=[Req(rid={at_s:08x}{'abcdefghij'[int(at_s) % 10]})]"
    debug = [(at_s, f"{rank}| Scheduler debug info:"), (at_s, batch)]
    return [*debug, (at_s, f"{rank}| {announced}"), *stack, (at_s, f"{rank}| {said}")]


def test_stacks_in_the_log_stand_in_for_those_that_we_may_not_take(tmp_path):
    refused = Missing(reason="permission", detail="Operation not permitted")
    lines = good_log(("TP0", "TP1"), "ready")
    for at_s in (60, 100):
        lines += logged_dump("TP0", told.FIRST_RANK, logged.OPENS, at_s)
        lines += logged_dump("TP1", told.FIRST_RANK + 1, logged.REDUCES, at_s)
    unseen = ranks(2, Does(unseen=refused))
    recording = launch(tmp_path, unseen, log=lines, seconds=130)
    facts = derive(recording, SGLANG)
    stood = facts.rank("TP0")
    assert (stood.place, stood.settled_s, stood.stack_native) == (
        "forward (deepseek_v2.py:2744)", 40.0, ("open64",),
    )  # fmt: skip
    assert stood.stack_age_s == pytest.approx(30, abs=2)
    found = diagnose(facts, SGLANG)
    assert found.state in ("unknown", "starting")
    assert found.confidence == "low"
    assert "for TP0, which is in open64 at forward" in found.title
    shown = next(each for each in found.findings[0].because + found.findings[1].because
                 if each.log_line)  # fmt: skip
    assert shown.at_s == pytest.approx(100, abs=2)
    assert "of the log, 30 s old)" in shown.text


def test_a_dump_of_another_process_in_the_log_is_no_stack_of_this_launch(tmp_path):
    refused = Missing(reason="permission", detail="Operation not permitted")
    lines = good_log(("TP0", "TP1"), "ready") + logged_dump("TP0", 4711, logged.OPENS, 60)
    recording = launch(tmp_path, ranks(2, Does(unseen=refused)), log=lines, seconds=130)
    assert derive(recording, SGLANG).rank("TP0").stack is None


def test_a_dump_in_the_log_is_no_progress(tmp_path):
    lines = good_log(("TP0", "TP1"), "load-end")
    for at_s in (70, 78, 86, 94):
        lines += logged_dump("TP0", told.FIRST_RANK, logged.OPENS, at_s)
    doing = ranks(2, Does(stack=told.BARRIER), TP1=Does(stack=told.LOADING, cpu_pct=0))
    found = verdict(launch(tmp_path, doing, log=lines, seconds=100))
    assert (found.state, found.culprits) == ("hung", ("TP1",))
    assert found.still_s > 60


def test_a_bar_tells_the_phase_of_a_log_that_lost_its_head(tmp_path):
    bar = "Loading safetensors checkpoint shards: 100% Completed | 163/163 [31:58<00:00, 10.12s/it]"
    begin_line = "[2025-12-22 15:01:54 TP7] Init torch distributed begin."
    for lines in ((bar,), (begin_line, bar)):
        found = log_verdict(tmp_path, *lines)
        assert (found.state, found.phase, found.culprits) == ("unknown", "weights", ())


def test_a_log_without_a_known_line_tells_no_phase(tmp_path):
    line = "[2025-06-26 07:25:31 DP4 TP4] Pyspy failed to dump PID 113688."
    found = log_verdict(tmp_path, line)
    assert (found.state, found.phase) == ("unknown", None)


def test_a_rank_is_not_behind_in_a_log_that_lost_its_head(tmp_path):
    found = log_verdict(
        tmp_path,
        "[2025-10-06 20:05:22 DP0 TP0] Capture cuda graph begin. This can take up to several "
        "minutes. avail mem=3.66 GB",
        "Capturing batches (bs=512 avail_mem=3.10 GB):   0%|          | 0/52 [00:04<?, ?it/s]",
        "[2025-10-06 20:05:27 DP0 TP0] Registering 0 cuda graph addresses",
        "[2025-10-06 20:05:27 DP6 TP6] Registering 0 cuda graph addresses",
    )
    assert (found.state, found.phase, found.culprits) == ("unknown", "graph-capture", ())


def test_a_server_that_was_ready_and_waits_for_its_gpus_is_ready_with_a_doubt_only(tmp_path):
    waits = Does(stack=(*told.REPLAY, *told.RUN_BATCH), state="R", cpu_pct=100, gpu=SPINS)
    recording = launch(
        tmp_path,
        ranks(2, waits),
        log=good_log(("TP0", "TP1"), ""),
        seconds=900,
        began_s=600,
        launcher=told.SERVES,
    )
    found = verdict(recording)
    assert (found.state, found.confidence) == ("ready", "low")
    assert "no rank was seen to move" in found.title


def with_child_of_a_rank(recording, index):
    """Add what a fork of TP0 looks like before it runs a program of its own, in one snapshot."""
    snapshots = list(recording.snapshots)
    section = snapshots[index].processes
    rank = next(p for p in section.processes if p.title.endswith("scheduler_TP0"))
    child = replace(rank, pid=99_999, ppid=rank.pid, start_ticks=rank.start_ticks + 10_000)
    section = replace(section, processes=(*section.processes, child))
    snapshots[index] = replace(snapshots[index], processes=section)
    return replace(recording, snapshots=tuple(snapshots))


def test_a_fork_of_a_rank_that_is_gone_again_is_no_rank_that_died(tmp_path):
    waiting = ranks(2, Does(stack=told.BARRIER), TP1=Does(stack=told.LOADING, cpu_pct=0))
    recording = launch(tmp_path, waiting, log=good_log(("TP0", "TP1"), "load-end"), seconds=100)
    plain = verdict(recording)
    assert (plain.state, plain.culprits) == ("hung", ("TP1",))
    found = verdict(with_child_of_a_rank(recording, 50))
    assert (found.state, found.culprits) == ("hung", ("TP1",))


def test_a_culprit_that_could_not_be_dumped_of_late_is_not_called_hung(tmp_path):
    waiting = ranks(2, Does(stack=told.BARRIER), TP1=Does(stack=told.LOADING, cpu_pct=0))
    recording = launch(tmp_path, waiting, log=good_log(("TP0", "TP1"), "load-end"), seconds=100)
    refused = Missing(reason="permission")
    pid = next(
        process.pid
        for process in recording.snapshots[0].processes.processes
        if process.title.endswith("TP1")
    )
    snapshots = [
        replace(each, stacks=replace(each.stacks, by_pid=each.stacks.by_pid | {pid: refused}))
        if isinstance(each.stacks, Stacks) and each.at_s > 30
        else each
        for each in recording.snapshots
    ]
    found = verdict(replace(recording, snapshots=tuple(snapshots)))
    assert (found.state, found.culprits) == ("unknown", ("TP1",))


def test_two_lines_of_one_forward_are_two_places():
    frames = [
        Frame("all_reduce", "/site/torch/distributed/distributed_c10d.py", 10),
        Frame("DecoderLayer.forward", "/site/sglang/srt/models/deepseek_v2.py", 2700),
    ]
    other = [frames[0], replace(frames[1], line=2760)]
    assert shape(frames) == shape(other)
    assert call_path(frames) != call_path(other)


def appended(name, tmp_path):
    """Return a recording whose log holds an earlier good start before its own."""
    recording = load(RECORDINGS / name)
    old = (RECORDINGS / "h200-tp2-good-warm" / "server.log").read_bytes()
    log = tmp_path / "server.log"
    log.write_bytes(old + recording.log_path.read_bytes())
    first = recording.snapshots[0]
    began_s = next((p.age_s for p in first.processes.processes if p.age_s is not None), 0.0)
    snapshots = [
        replace(
            each,
            log=replace(
                each.log,
                read_bytes=each.log.read_bytes + len(old),
                silent_s=each.log.silent_s
                if each.log.read_bytes
                else 3600.0 + each.at_s - first.at_s + began_s,
            ),
        )
        for each in recording.snapshots
    ]
    return replace(recording, snapshots=tuple(snapshots), log_path=log)


@pytest.mark.parametrize("name", ["h200-tp2-good-cold", "h200-tp2-load-sleep-r1"])
def test_a_log_that_holds_an_earlier_start_changes_nothing(name, tmp_path):
    told_so = states(appended(name, tmp_path))
    plain = states(load(RECORDINGS / name))
    assert told_so[-1] == plain[-1]
    assert "ready" not in told_so[: len(told_so) // 2]
    assert "hung" not in told_so or "hung" in plain


def test_a_rank_that_died_before_we_came_is_the_launchers_zombie(tmp_path):
    waiting = ranks(2, Does(stack=told.BARRIER), TP1=Does(stack=told.LOADING, cpu_pct=0))
    recording = launch(
        tmp_path, waiting, log=good_log(("TP0", "TP1"), "load-end"), seconds=120, began_s=100
    )

    def bury(process):
        if not process.title.endswith("TP1"):
            return process
        return replace(process, title="", state="Z", threads=(), io=None)

    snapshots = []
    for each in recording.snapshots:
        buried = tuple(map(bury, each.processes.processes))
        snapshots.append(replace(each, processes=replace(each.processes, processes=buried)))
    found = verdict(replace(recording, snapshots=tuple(snapshots)))
    assert (found.state, found.culprits) == ("dead", ("TP1",))


DENIED = Missing(reason="permission", detail="Operation not permitted")
HOOK = ("save_hidden_states /opt/hooks/dump.py:40", *told.BATCH_FORWARD)
SENDS = ("hand_over /opt/hooks/dump.py:88", *told.BATCH_FORWARD)


def test_without_stacks_the_connection_that_a_rank_reads_tells_whom_it_waits_for(tmp_path):
    reads, blind = Does(unseen=DENIED, reads_from="TP1"), Does(unseen=DENIED)
    log = good_log(("TP0", "TP1"), "load-end")
    recording = launch(tmp_path, {"TP0": reads, "TP1": blind}, log=log, seconds=120)
    found = verdict(recording)
    # TP1 may wait in a collective for TP0: nobody is blamed before its stack was seen.
    assert (found.state, found.culprits, found.phase) == ("unknown", (), "weights")
    assert "recv from TP1 (unix socket)" in to_text(derive(recording, SGLANG), found)


@pytest.mark.parametrize(
    "does",
    [
        Does(unseen=DENIED, reads_from="TP1", served=True),
        Does(unseen=DENIED, reads_from="TP1", wakes=True),
    ],
    ids=["a server thread has the other end", "its reads come back"],
)
def test_nobody_is_blamed_for_a_connection_that_works(does, tmp_path):
    ranks = {"TP0": does, "TP1": Does(unseen=DENIED)}
    log = good_log(("TP0", "TP1"), "load-end")
    found = verdict(launch(tmp_path, ranks, log=log, seconds=120))
    assert (found.state, found.culprits) == ("unknown", ())


def test_a_rank_that_reads_from_another_in_code_that_nobody_knows_waits_for_it(tmp_path):
    ranks = {
        "TP0": Does(stack=HOOK, reads_from="TP1"),
        "TP1": Does(stack=SENDS, kernel="futex_wait_queue"),
    }
    recording = launch(
        tmp_path, ranks, log=good_log(("TP0", "TP1"), "prefill"), seconds=120, launcher=told.SERVES
    )
    found = verdict(recording)
    assert (found.state, found.culprits) == ("hung", ("TP1",))
    assert "TP0 waits in recv for TP1" in found.title


CHAIN = {
    "TP0": Does(stack=told.BATCH_ALL_REDUCE),
    "TP1": Does(stack=HOOK, reads_from="TP2"),
    "TP2": Does(stack=SENDS),
}


def test_of_two_ranks_elsewhere_the_one_that_the_other_waits_for_is_to_blame(tmp_path):
    log = good_log(tuple(CHAIN), "prefill")
    recording = launch(tmp_path, CHAIN, log=log, seconds=120, launcher=told.SERVES)
    found = verdict(recording)
    assert (found.state, found.culprits) == ("hung", ("TP2",))


def test_who_waits_for_whom_is_drawn_down_to_who_waits_for_nobody(tmp_path):
    log = good_log(tuple(CHAIN), "prefill")
    recording = launch(tmp_path, CHAIN, log=log, seconds=120, launcher=told.SERVES)
    facts = derive(recording, SGLANG)
    lines = to_text(facts, diagnose(facts, SGLANG)).splitlines()
    at = lines.index("Waits")
    drawn = [" ".join(line.split()) for line in lines[at + 1 : at + 3]]
    assert drawn[0] == "TP1 -> TP2 recv from TP2 (unix socket), for 120 s"
    assert drawn[1].startswith("TP2 waits for none of them: hand_over")


def test_of_two_ranks_elsewhere_none_is_blamed_where_their_waits_were_refused(tmp_path):
    log = good_log(tuple(CHAIN), "prefill")
    recording = launch(
        tmp_path, CHAIN, log=log, seconds=120, launcher=told.SERVES, without=("waits",)
    )
    found = verdict(recording)
    assert found.culprits == ()
    assert "TP1 and TP2" in str(found.findings[0].needs)


def test_a_rank_that_reads_from_one_that_waits_in_a_collective_is_who_that_one_waits_for(tmp_path):
    ranks = {
        "TP0": Does(stack=told.BATCH_ALL_REDUCE),
        "TP1": Does(stack=HOOK, reads_from="TP0"),
    }
    log = good_log(tuple(ranks), "prefill")
    found = verdict(launch(tmp_path, ranks, log=log, seconds=120, launcher=told.SERVES))
    assert (found.state, found.culprits) == ("hung", ("TP1",))


def test_ranks_that_read_from_each_other_are_a_circle_without_a_culprit(tmp_path):
    ranks = {
        "TP0": Does(stack=HOOK, reads_from="TP1"),
        "TP1": Does(stack=HOOK, reads_from="TP0"),
    }
    log = good_log(tuple(ranks), "prefill")
    found = verdict(launch(tmp_path, ranks, log=log, seconds=120, launcher=told.SERVES))
    assert (found.state, found.culprits) == ("hung", ())
    assert found.findings[0].rule == "waits-in-a-circle"


@pytest.mark.parametrize("section", ["processes", "stacks", "waits", "gpus", "log"])
@pytest.mark.parametrize(
    "ranks",
    [
        CHAIN,
        {"TP0": Does(stack=HOOK, reads_from="TP1"), "TP1": Does(stack=SENDS)},
        {"TP0": Does(unseen=DENIED, reads_from="TP1"), "TP1": Does(unseen=DENIED)},
        {"TP0": Does(stack=HOOK, reads_from="TP1"), "TP1": Does(stack=HOOK, reads_from="TP0")},
    ],
    ids=["chain", "pair", "blind", "circle"],
)
def test_less_of_the_waits_between_ranks_makes_no_verdict_surer(ranks, section, tmp_path):
    log = good_log(tuple(ranks), "prefill")
    seen = {"log": log, "seconds": 120, "launcher": told.SERVES}
    full = verdict(launch(tmp_path / "full", ranks, **seen))
    less = verdict(launch(tmp_path / "less", ranks, without=(section,), **seen))
    assert less.state in (full.state, "unknown")
    assert set(less.culprits) <= set(full.culprits)
    if less.state == full.state:
        assert weakest(less.confidence, full.confidence) == less.confidence


BATON_FILE = FileLock(
    path="/root/.cache/torch_extensions/py311_cu128/moe/lock",
    kind="file",
    owner="dead",
    age_s=90000.0,
    older_than_all=True,
)
WAITS_FOR_BATON = {
    "TP0": Does(stack=told.BATON, kernel="hrtimer_nanosleep"),
    "TP1": Does(stack=told.CAPTURE_ALL_REDUCE),
}


def lock_case(ranks, locks, tmp_path, **options):
    log = good_log(("TP0", "TP1"), "capture-end")
    return verdict(launch(tmp_path, ranks, log=log, seconds=100, locks=locks, **options))


def rules_of(found):
    return {finding.rule: finding for finding in found.findings}


def test_a_lock_file_whose_owner_is_gone_is_named_and_will_not_be_released(tmp_path):
    found = lock_case(WAITS_FOR_BATON, (BATON_FILE,), tmp_path)
    assert (found.state, found.culprits) == ("hung", ("TP0",))
    stale = rules_of(found)["stale-lock-file"]
    path = BATON_FILE.path
    assert stale.title == f"TP0 waits for a lock file whose owner is gone: {path}; delete it"
    assert (stale.verdict, stale.confidence) == ("found", "high")
    (advice,) = stale.advice
    assert advice.startswith("make sure that nobody builds")
    assert advice.endswith(f"rm {path}")
    assert found.findings[0].advice[0] == stale.advice[0]


@pytest.mark.parametrize(
    "lock",
    [
        replace(BATON_FILE, owner="unknown", why="it lies on nfs4: another machine may hold it"),
        replace(BATON_FILE, owner="alive", holders=(Holder(4242, "ninja"),)),
        replace(BATON_FILE, kind="flock"),
    ],
    ids=["unknown owner", "living owner", "a lock of another kind"],
)
def test_a_lock_file_that_may_be_released_is_not_called_stale(lock, tmp_path):
    found = lock_case(WAITS_FOR_BATON, (lock,), tmp_path)
    assert found.state == "unknown"
    assert "stale-lock-file" not in rules_of(found)


def test_a_lock_file_whose_owner_cannot_be_seen_is_named_with_the_reason(tmp_path):
    why = "it lies on nfs4: another machine may hold it"
    found = lock_case(WAITS_FOR_BATON, (replace(BATON_FILE, owner="unknown", why=why),), tmp_path)
    unknown = rules_of(found)["lock-owner-unknown"]
    assert unknown.title == f"TP0 waits for the lock {BATON_FILE.path}: {why}"
    assert (unknown.verdict, unknown.culprits) == ("undecided", ())


def test_a_soft_lock_of_the_hub_whose_owner_is_gone_is_stale(tmp_path):
    ranks = dict.fromkeys(("TP0", "TP1"), Does(stack=told.HUB_LOCK, kernel="hrtimer_nanosleep"))
    path = f"/tmp/{'0a' * 32}meta-llama-Llama-3.lock"  # noqa: S108  # where it is in life
    found = lock_case(ranks, (replace(BATON_FILE, kind="soft", path=path),), tmp_path)
    assert path in rules_of(found)["stale-lock-file"].title
    assert found.culprits == ()


def test_files_that_were_left_out_may_show_progress(tmp_path):
    log = good_log(("TP0", "TP1"), "capture-end")
    recording = launch(tmp_path, WAITS_FOR_BATON, log=log, seconds=100, locks=(BATON_FILE,))
    left_out = Missing(reason="not-tried", detail="12 of its open files were not looked at")

    def cut(process):
        return replace(process, unreadable={"fd": left_out}) if "TP0" in process.title else process

    def of(snapshot):
        section = snapshot.processes
        processes = tuple(map(cut, section.processes))
        return replace(snapshot, processes=replace(section, processes=processes))

    first, *others = recording.snapshots
    found = verdict(replace(recording, snapshots=(of(first), *others)))  # what is seldom looked at
    assert found.state == "unknown"
    assert f"all open files of TP0: {left_out.detail}" in found.findings[0].needs
    assert ("fd of TP0", left_out) in [(each.what, each.missing) for each in found.unseen]


def test_ranks_that_all_wait_for_a_lock_file_without_an_owner_are_hung_and_none_to_blame(tmp_path):
    ranks = dict.fromkeys(("TP0", "TP1"), WAITS_FOR_BATON["TP0"])
    found = lock_case(ranks, (BATON_FILE,), tmp_path)
    assert (found.state, found.culprits) == ("hung", ())
    assert rules_of(found)["stale-lock-file"].title.startswith("TP0 and TP1 wait for a lock file")


def test_of_several_lock_files_none_is_named_for_certain(tmp_path):
    other = replace(BATON_FILE, path="/root/.cache/torch_extensions/py311_cu128/fused/lock")
    found = lock_case(WAITS_FOR_BATON, (BATON_FILE, other), tmp_path)
    stale = rules_of(found)["stale-lock-file"]
    assert stale.verdict == "undecided"
    assert "which of the files it is" in stale.needs


def test_a_lock_file_that_nobody_waits_for_is_nothing(tmp_path):
    ranks = {name: Does(stack=told.CAPTURE_ALL_REDUCE) for name in ("TP0", "TP1")}
    assert "stale-lock-file" not in rules_of(lock_case(ranks, (BATON_FILE,), tmp_path))


def test_without_the_locks_a_wait_for_one_may_still_end(tmp_path):
    found = lock_case(WAITS_FOR_BATON, (BATON_FILE,), tmp_path, without=("waits",))
    assert (found.state, found.culprits) == ("unknown", ("TP0",))


def test_a_lock_that_another_rank_holds_leads_to_that_rank(tmp_path):
    ranks = {
        "TP0": Does(stack=told.JIT_LOCK, kernel="hrtimer_nanosleep"),
        "TP1": Does(stack=told.NINJA, kernel="poll_schedule_timeout"),
    }
    held = FileLock(
        path="/root/.cache/flashinfer/cached_ops/tmp/norm.lock",
        kind="flock",
        owner="alive",
        holders=(Holder(told.FIRST_RANK + 1, "sglang::schedul"),),
    )
    found = lock_case(ranks, (held,), tmp_path)
    assert found.culprits == ("TP1",)
    assert rules_of(found)["lock-held"].title.endswith(f"{held.path}, held by TP1")


@pytest.mark.parametrize("path", ["/run/dnf.lock", "/srv/other/.locks/job.lock"])
def test_a_lock_of_other_code_is_not_what_a_rank_polls_for(path, tmp_path):
    ranks = dict.fromkeys(("TP0", "TP1"), Does(stack=told.JIT_LOCK, kernel="hrtimer_nanosleep"))
    held = FileLock(path=path, kind="flock", owner="alive", holders=(Holder(77, "dnf"),))
    assert "lock-held" not in rules_of(lock_case(ranks, (held,), tmp_path))


def test_a_lock_that_somebody_else_holds_is_named_and_nobody_is_to_blame_for_it(tmp_path):
    ranks = dict.fromkeys(("TP0", "TP1"), Does(stack=told.HUB_LOCK, kernel="hrtimer_nanosleep"))
    held = FileLock(
        path=f"/tmp/{'0a' * 32}meta-llama-Llama-3.lock",  # noqa: S108  # where it is in life
        kind="flock",
        owner="alive",
        holders=(Holder(4242, "huggingface-cli"),),
    )
    found = lock_case(ranks, (held,), tmp_path)
    assert (found.state, found.culprits) == ("unknown", ())
    assert "held by pid 4242 (huggingface-cli)" in rules_of(found)["lock-held"].title
