"""Ranks and other processes that die or stop: who, how, and whether memory had run out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
import restricted
from looks import judged, told_by

from hangdoctor import engines
from hangdoctor.collect import Observer, exits, host, procfs
from hangdoctor.collect.look import Look
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import begin, derive, step
from hangdoctor.model import Header, Host, KernelMessage, Missing

sys.path.insert(0, str(Path(__file__).parent))
import scenarios as told  # test material beside the tests
from scenarios import DETOKENIZER, FIRST_RANK, LAUNCHER, Does, good_log, launch

SGLANG = engines.load("sglang")
TITLES = ("sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer")
LIMIT_S = 120
replace = msgspec.structs.replace
BARRIER, LOADS = Does(stack=told.BARRIER), Does(stack=told.LOADING, cpu_pct=0)
LOG = good_log(("TP0", "TP1"), "load-end")
TELLS_EXITS = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15)


def verdict(recording):
    return diagnose(derive(recording, SGLANG), SGLANG)


def died(tmp_path, status=-9, *, before=None, after=None, log=LOG, zombie=False, seconds=60):
    """TP1 ends at 40 s; what the machine looks like before and after."""
    gone = Does(gone=-9 if status is None else status, zombie=zombie)
    recording = launch(
        tmp_path,
        {"TP0": BARRIER, "TP1": ((0.0, LOADS), (40.0, gone))},
        log=log,
        seconds=seconds,
    )
    if status is None:
        recording = with_snapshots(
            recording,
            lambda each: replace(
                each,
                processes=replace(each.processes, ended=dict.fromkeys(each.processes.ended)),
            ),
        )
    before = before or Host(oom_kills=0, kernel_log=())
    after = after or before
    return with_snapshots(
        recording, lambda each: replace(each, host=before if each.at_s < 40 else after)
    )


def with_snapshots(recording, change):
    return replace(recording, snapshots=tuple(map(change, recording.snapshots)))


def with_processes(recording, change):
    """Change each process; None takes it away. `change` gets the time and the process."""

    def changed(snapshot):
        kept = tuple(
            new
            for process in snapshot.processes.processes
            if (new := change(snapshot.at_s, process)) is not None
        )
        return replace(snapshot, processes=replace(snapshot.processes, processes=kept))

    return with_snapshots(recording, changed)


def kernel_says(pid, comm, boot_s=1000.0):
    text = f"Memory cgroup out of memory: Killed process {pid} ({comm}) total-vm:68372kB"
    return (KernelMessage(boot_s=boot_s, text=text),)


TP1 = FIRST_RANK + 1
COMM = "sglang::schedul"


def test_a_rank_that_the_kernel_killed_is_told_with_the_counter_that_rose(tmp_path):
    found = verdict(died(tmp_path, after=Host(oom_kills=1, kernel_log=())))
    assert (found.state, found.culprits) == ("dead", ("TP1",))
    assert found.title.startswith(
        "TP1 was killed by SIGKILL: the cgroup's oom_kill rose from 0 to 1, out of memory"
    )


def test_the_kernels_own_line_is_the_best_witness(tmp_path):
    message = kernel_says(TP1, COMM)
    recording = died(tmp_path, None, after=Host(oom_kills=0, kernel_log=message))
    recording = with_processes(recording, lambda _, process: replace(process, comm=COMM))
    found = verdict(recording)
    assert "killed by SIGKILL: out of memory, by the kernel's log" in found.title
    assert any(message[0].text in item.text for item in found.findings[0].because)


@pytest.mark.parametrize(
    "message",
    [kernel_says(TP1, "stress"), kernel_says(TP1 + 1, COMM), kernel_says(TP1, COMM, boot_s=1.0)],
    ids=["another name", "another number", "before it was born"],
)
def test_a_line_on_another_process_is_no_witness(message, tmp_path):
    recording = died(tmp_path, after=Host(oom_kills=0, kernel_log=message))
    recording = with_processes(recording, lambda _, process: replace(process, comm=COMM))
    found = verdict(recording)
    assert "out of memory" not in found.title
    assert "killed by SIGKILL" in found.title


def test_a_kill_without_a_trace_of_the_kernel_was_somebodys(tmp_path):
    found = verdict(died(tmp_path))
    assert found.title == "TP1 was killed by SIGKILL while TP0 still waits"
    assert any("somebody sent the signal" in item.text for item in found.findings[0].because)


def test_without_the_kernels_log_it_is_asked_for_and_nobody_is_accused(tmp_path):
    unread = Host(oom_kills=0, kernel_log=Missing(reason="permission"))
    found = verdict(died(tmp_path, before=unread))
    assert "somebody" not in str(found.findings[0].because)
    assert any("dmesg" in advice for advice in found.findings[0].advice)


def test_a_rank_that_ended_by_itself_did_not_run_out_of_memory_with_a_neighbour(tmp_path):
    found = verdict(died(tmp_path, 1, after=Host(oom_kills=1)))
    assert found.title == "TP1 has died (exit status 1) while TP0 still waits"


def test_a_full_cgroup_before_a_kill_is_told_and_is_no_verdict_by_itself(tmp_path):
    full = Host(oom_kills=0, cgroup_used_bytes=99 << 30, cgroup_limit_bytes=100 << 30)
    found = verdict(died(tmp_path, before=full))
    assert any("the cgroup was 99 % full" in item.text for item in found.findings[0].because)
    recording = launch(tmp_path / "b", {"TP0": BARRIER, "TP1": LOADS}, log=LOG, seconds=30)
    alive = verdict(with_snapshots(recording, lambda each: replace(each, host=full)))
    assert alive.state in ("unknown", "starting")
    assert "full" in told_by(alive, "machine-short").title


def test_the_status_of_a_zombie_is_told(tmp_path):
    recording = died(tmp_path, -9, zombie=True)
    recording = with_processes(
        recording, lambda _, p: replace(p, exit_code=signal.SIGSEGV) if p.state == "Z" else p
    )
    assert "TP1 was killed by SIGSEGV" in verdict(recording).title


@pytest.mark.parametrize(
    "lines",
    [
        [
            "|Rank 1 scheduler is dead. Please check if there are relevant logs.",
            "|Exit code: -9",
        ],
        ["|Rank 1 scheduler died during initialization (exit code: -9). If exit code is -9"],
        [f"|Subprocess scheduler_1 (pid={TP1}) crashed with exit code -9. Triggering SIGQUIT"],
    ],
    ids=["0.5.9", "0.5.10", "watchdog"],
)
def test_the_launchers_log_line_tells_the_status(lines, tmp_path):
    log = [*LOG, *((41.0, line) for line in lines)]
    found = verdict(died(tmp_path, None, log=log))
    assert "TP1 was killed by SIGKILL" in found.title


def test_a_line_on_another_rank_tells_nothing_of_this_one(tmp_path):
    log = [*LOG, (41.0, "|Rank 3 scheduler is dead. Please check"), (41.0, "|Exit code: -9")]
    assert verdict(died(tmp_path, None, log=log)).title == "TP1 has died while TP0 still waits"


def without(pid, from_s, until_s=1e9):
    def change(at_s, process):
        return None if process.pid == pid and from_s <= at_s < until_s else process

    return change


def waits_for_ranks(tmp_path, seconds=60):
    return launch(tmp_path, {"TP0": BARRIER, "TP1": BARRIER}, log=LOG, seconds=seconds)


def test_a_launcher_that_dies_leaves_orphans_that_hold_their_gpus(tmp_path):
    recording = waits_for_ranks(tmp_path)
    found = verdict(with_processes(recording, without(LAUNCHER, 40)))
    assert (found.state, found.culprits) == ("dead", ("launcher",))
    assert "TP0 and TP1 live on without it, with 4.3 GB of GPU memory" in found.title
    assert any(f"kill {FIRST_RANK} {TP1}" in advice for advice in found.findings[0].advice)


def test_ranks_that_follow_their_launcher_within_moments_are_no_orphans(tmp_path):
    recording = with_processes(waits_for_ranks(tmp_path), without(LAUNCHER, 40))
    for pid in (FIRST_RANK, TP1, DETOKENIZER):
        recording = with_processes(recording, without(pid, 42))
    rules = set()
    for _, _, found in judged(recording):
        rules |= {each.rule for each in found.findings if each.state == "dead"}
    assert rules == {"launch-ended"}


@pytest.mark.parametrize(
    ("parent", "orphans"),
    [("/sbin/init", True), ("python serve.py", False), (None, False)],
    ids=["init", "an engine inside a program", "unknown"],
)
def test_ranks_without_a_launcher_are_orphans_only_below_what_starts_none(
    parent, orphans, tmp_path
):
    recording = with_processes(waits_for_ranks(tmp_path), without(LAUNCHER, 0))
    recording = with_processes(recording, lambda _, p: replace(p, ppid=1))
    recording = with_snapshots(
        recording,
        lambda each: replace(
            each,
            processes=replace(
                each.processes, roots=(FIRST_RANK, TP1), parents={1: parent} if parent else {}
            ),
        ),
    )
    found = verdict(recording)
    assert (told_by(found, "launcher-died") is not None) == orphans
    assert (found.state == "dead") == orphans


LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by "
    "peer [127.0.0.1]:21912"
)
SIGQUIT = "| Received sigquit from a child process. It usually means the child failed."


def ended(tmp_path, statuses, *, lost=("TP0",), error=LOST, at_s=None, end=SIGQUIT, launcher=-9):
    """A launch that ends at 40 s: each rank with its status, at its second; some lost a peer."""
    log = good_log(tuple(statuses), "load-end")
    for name in lost:
        log += [
            (40.0, f"{name}| Scheduler hit an exception: Traceback (most recent call last):"),
            (40.0, f'  File "/x/sglang/srt/{told.DIST[0].split()[1].split(":")[0]}", line 9, in f'),
            (40.0, error),
        ]
    at_s = at_s or {}
    ranks = {
        name: ((0.0, LOADS), (at_s.get(name, 40.0), Does(gone=status)))
        for name, status in statuses.items()
    }
    recording = launch(tmp_path, ranks, log=[*log, (40.0, end)] if end else log, seconds=60)
    if launcher is None:
        return recording
    for pid in (LAUNCHER, DETOKENIZER):
        recording = with_processes(recording, without(pid, 40))
    return with_snapshots(
        recording,
        lambda each: (
            replace(
                each,
                processes=replace(
                    each.processes, ended={**each.processes.ended, LAUNCHER: launcher}
                ),
            )
            if each.at_s >= 40
            else each
        ),
    )


def test_the_rank_that_ended_by_itself_is_to_blame_for_the_one_that_lost_it(tmp_path):
    found = verdict(ended(tmp_path, {"TP0": -9, "TP1": 1}))
    assert (found.state, found.culprits, found.confidence) == ("dead", ("TP1",), "high")
    assert found.title == (
        "the launch has ended: TP1 ended without a word (exit status 1), and TP0 lost its "
        "connection to it"
    )
    because = [item.text for item in found.findings[0].because]
    assert because[0] == "TP1: exit status 1"
    assert any("os._exit" in advice for advice in found.findings[0].advice)


@pytest.mark.parametrize(
    ("status", "confidence", "how"),
    [(-11, "high", "was killed by SIGSEGV"), (-6, "medium", "was killed by SIGABRT")],
)
def test_of_eight_ranks_the_one_that_faulted_is_to_blame(status, confidence, how, tmp_path):
    statuses = {f"TP{n}": -9 for n in range(8)} | {"TP3": status}
    found = verdict(ended(tmp_path, statuses, lost=("TP0", "TP6")))
    assert (found.culprits, found.confidence) == (("TP3",), confidence)
    assert f"TP3 {how}, and TP0 and TP6 lost their connections to it" in found.title


def test_ranks_that_were_all_killed_at_once_do_not_tell_which_was_first(tmp_path):
    statuses = {f"TP{n}": -9 for n in range(8)}
    found = verdict(ended(tmp_path, statuses))
    assert (found.state, found.culprits, found.confidence) == ("dead", (), "high")
    assert "TP0 lost its connection to a peer, which had ended without a word" in found.title
    earlier = verdict(ended(tmp_path, statuses, at_s={"TP3": 38.0}))
    assert (earlier.culprits, earlier.confidence) == (("TP3",), "medium")
    assert "TP3 was killed by SIGKILL, and TP0 lost" in earlier.title


def test_the_kernels_line_on_a_rank_makes_it_the_one_that_the_others_lost(tmp_path):
    recording = ended(tmp_path, {f"TP{n}": -9 for n in range(8)})
    message = kernel_says(FIRST_RANK + 5, COMM)
    recording = with_processes(recording, lambda _, process: replace(process, comm=COMM))
    recording = with_snapshots(
        recording, lambda each: replace(each, host=Host(oom_kills=0, kernel_log=message))
    )
    found = verdict(recording)
    assert (found.culprits, found.confidence) == (("TP5",), "high")
    assert "TP5 was killed by SIGKILL: out of memory" in found.title


@pytest.mark.parametrize(
    ("launcher", "statuses"),
    [(-15, (-15, -15)), (-2, (1, 1)), (-9, (-9, -9))],
)
def test_who_ends_the_launch_from_outside_ends_its_ranks(launcher, statuses, tmp_path):
    # A signal to all of its processes, or the kernel's that come with their parent's end.
    given = dict(zip(("TP0", "TP1"), statuses, strict=True))
    found = verdict(ended(tmp_path, given, end="", launcher=launcher))
    assert (found.state, found.culprits) == ("dead", ())
    assert found.title.startswith("the launch was killed by SIG")
    assert "connection" not in found.title
    before = verdict(ended(tmp_path, given, end="", launcher=launcher, at_s={"TP1": 38.0}))
    assert before.culprits == ("TP1",)


def test_a_rank_that_ended_and_one_that_lost_it_are_told_apart_below_a_launcher_that_lives(
    tmp_path,
):
    found = verdict(ended(tmp_path, {"TP0": 0, "TP1": 1}, end="", launcher=None))
    assert (found.state, found.culprits, found.confidence) == ("dead", ("TP1",), "high")
    assert found.title == (
        "TP1 ended without a word (exit status 1), and TP0 lost its connection to it"
    )


def test_a_peer_that_still_lives_has_not_ended(tmp_path):
    recording = launch(
        tmp_path,
        {"TP0": ((0.0, LOADS), (40.0, Does(gone=0))), "TP1": LOADS},
        log=[
            *LOG,
            (40.0, "TP0| Scheduler hit an exception: Traceback (most recent call last):"),
            (40.0, LOST),
        ],
        seconds=60,
    )
    found = verdict(recording)
    assert (found.state, found.culprits) == ("dead", ())
    assert found.title.startswith("TP0 lost its connection to a peer, which lives, and has closed")


def test_the_rank_that_ended_by_itself_is_to_blame_for_the_one_that_gave_up_waiting(tmp_path):
    error = (
        "ValueError: TP rank 0 could finish the model loading, but there are other ranks that "
        "didn't finish loading. It is likely due to unexpected failures (e.g., OOM) or a slow node."
    )
    found = verdict(ended(tmp_path, {"TP0": -9, "TP1": 1}, error=error))
    assert (found.culprits, found.confidence) == (("TP1",), "high")
    assert "TP1 ended without a word (exit status 1), and TP0 gave up waiting" in found.title


def test_a_launch_that_was_killed_is_called_so_only_where_the_log_does_not_say_why(tmp_path):
    killed = verdict(ended(tmp_path, {"TP0": -9, "TP1": -9}, lost=(), end=""))
    assert killed.title.startswith("the launch was killed by SIGKILL")
    by_itself = verdict(ended(tmp_path, {"TP0": -9, "TP1": -9}, lost=()))
    assert by_itself.title.startswith("the launch has ended")


def test_a_dead_detokenizer_is_named(tmp_path):
    recording = with_processes(waits_for_ranks(tmp_path), without(DETOKENIZER, 40))
    recording = with_snapshots(
        recording,
        lambda each: (
            replace(each, processes=replace(each.processes, ended={DETOKENIZER: -11}))
            if each.at_s >= 40
            else each
        ),
    )
    found = verdict(recording)
    assert (found.state, found.culprits) == ("dead", ("detokenizer",))
    assert found.title == "the detokenizer has died (killed by SIGSEGV)"


def test_a_detokenizer_that_was_a_zombie_when_we_came_is_known_by_its_short_name(tmp_path):
    def bury(_, process):
        if process.pid != DETOKENIZER:
            return process
        name = "sglang::detoken"
        return replace(process, title=name, comm=name, state="Z", threads=(), exit_code=9)

    found = verdict(with_processes(waits_for_ranks(tmp_path), bury))
    assert (found.state, found.culprits) == ("dead", ("detokenizer",))
    assert "SIGKILL" in found.title


def test_a_fork_of_the_detokenizer_that_is_gone_again_is_none_that_died(tmp_path):
    recording = waits_for_ranks(tmp_path)

    def forked(snapshot):
        if snapshot.at_s != 40:
            return snapshot
        section = snapshot.processes
        parent = next(p for p in section.processes if p.pid == DETOKENIZER)
        fork = replace(parent, pid=9999, ppid=parent.pid, start_ticks=parent.start_ticks + 50)
        return replace(snapshot, processes=replace(section, processes=(*section.processes, fork)))

    found = verdict(with_snapshots(recording, forked))
    assert told_by(found, "engine-process-died") is None


def test_a_detokenizer_that_was_started_anew_has_not_died(tmp_path):
    def renewed(at_s, process):
        if process.pid == DETOKENIZER and at_s >= 40:
            return replace(process, pid=9999, start_ticks=99_999)
        return process

    found = verdict(with_processes(waits_for_ranks(tmp_path), renewed))
    assert told_by(found, "engine-process-died") is None


@pytest.mark.parametrize(
    ("pid", "name"), [(LAUNCHER, "launcher"), (DETOKENIZER, "detokenizer"), (TP1, "TP1")]
)
def test_a_stopped_process_is_named_whatever_its_role(pid, name, tmp_path):
    def stop(at_s, process):
        return replace(process, state="T") if process.pid == pid and at_s >= 20 else process

    found = verdict(with_processes(waits_for_ranks(tmp_path), stop))
    assert (found.state, found.culprits) == ("hung", (name,))
    assert "stopped by a signal" in found.title


def test_a_server_that_is_ready_is_not_hung_by_a_stop_of_moments(tmp_path):
    idle = Does(stack=told.IDLE_BROADCAST, state="R", cpu_pct=100)
    recording = launch(
        tmp_path,
        {"TP0": idle, "TP1": idle},
        log=good_log(("TP0", "TP1"), ""),
        seconds=3700,
        began_s=3600,
        launcher=told.SERVES,
    )

    def stop(at_s, process):
        return replace(process, state="T") if process.pid == LAUNCHER and at_s >= 95 else process

    found = verdict(with_processes(recording, stop))
    assert found.state == "ready"
    assert told_by(found, "rank-stopped").needs


@pytest.mark.parametrize(
    ("text", "title"),
    [
        (
            f"NVRM: Xid (PCI:0000:3b:00): 31, pid={TP1}, name=python3, Ch 00000008, intr 00000000",
            "the driver reported Xid 31 on PCI:0000:3b:00, of TP1",
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off",
            "the driver reported Xid 79 on PCI:0000:3b:00",
        ),
    ],
)
def test_an_xid_since_the_launch_began_is_a_reading(text, title, tmp_path):
    recording = waits_for_ranks(tmp_path, seconds=20)

    def at(boot_s):
        log = (KernelMessage(boot_s=boot_s, text=text),)
        told_so = Host(oom_kills=0, kernel_log=log)
        return verdict(with_snapshots(recording, lambda each: replace(each, host=told_so)))

    found = told_by(at(1000.0), "gpu-fault")
    assert (found.title, found.state) == (title, None)
    assert told_by(at(1.0), "gpu-fault") is None


# --- On real processes ----------------------------------------------------------------------------


def seen(observer, seconds=1.0):
    """Look twice, and return what is said of it."""
    facts = begin(Header(engine="sglang"), SGLANG)
    for at_s in (0.0, seconds):
        due = frozenset({"processes", "host"}) if at_s == 0 else frozenset({"processes"})
        facts = step(facts, observer.take(due, at_s=at_s, wall_s=at_s), (), SGLANG)
        yield diagnose(facts, SGLANG)


def end_and_wait(pid, number):
    """Send a signal, and wait until the process is gone or a zombie."""
    os.kill(pid, number)
    while (stat := procfs.read_stat("/proc", pid)) is not None and stat.state != "Z":
        os.sched_yield()


@pytest.mark.skipif(not TELLS_EXITS, reason="before Linux 6.15 only the parent knows the status")
def test_a_rank_whose_parent_took_its_status_is_told_by_its_pidfd(program):
    launcher = program("launch_server", *TITLES, env=os.environ | {"REAPS": "1"})
    with Observer([launcher.pid]) as observer:
        looks = seen(observer)
        next(looks)
        rank = launcher.said["children"][1]
        os.kill(rank, signal.SIGTERM)
        while procfs.read_stat("/proc", rank) is not None:
            os.sched_yield()
        found = next(looks)
    assert (found.state, found.culprits) == ("dead", ("TP1",))
    assert "killed by SIGTERM" in found.title


def test_a_dead_rank_that_nobody_waited_for_has_its_zombies_status(program):
    launcher = program("launch_server", *TITLES)
    with Observer([launcher.pid]) as observer:
        looks = seen(observer)
        next(looks)
        end_and_wait(launcher.said["children"][1], signal.SIGKILL)
        found = next(looks)
    assert (found.state, found.culprits) == ("dead", ("TP1",))
    assert "TP1 was killed by SIGKILL" in found.title


@pytest.mark.parametrize("rights", ["own", "another user's"])
def test_a_rank_that_dies_under_watch_is_dead_with_few_rights_too(rights, program):
    launcher = program("launch_server", *TITLES, env=os.environ | {"REAPS": "1"})
    restrictions = {} if rights == "own" else {"user": restricted.NOBODY}
    with tempfile.TemporaryDirectory(prefix="hangdoctor-rights-") as place:
        Path(place).chmod(0o755)
        command = restricted.hangdoctor(
            place, "watch", "--pid-tree", launcher.pid, "--format=json", **restrictions
        )
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as watching:
            assert "UNKNOWN" in watching.stderr.readline()  # it has looked
            os.kill(launcher.said["children"][1], signal.SIGKILL)
            out, err = watching.communicate(timeout=LIMIT_S)
    assert "Traceback" not in err
    found = json.loads(out)
    assert (found["state"], found["culprits"]) == ("dead", ["TP1"])
    if TELLS_EXITS:
        assert "SIGKILL" in found["title"]


@pytest.fixture
def tight_cgroup():
    """A memory cgroup with a limit, where we may make one (version 1)."""
    group = Path(f"/sys/fs/cgroup/memory/hangdoctor-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(200 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    while not removed(group):  # until what died in it has been waited for
        os.sched_yield()


def removed(group):
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def test_a_rank_that_really_runs_out_of_memory_is_told_so(tight_cgroup, program):
    enter = ("sh", "-c", f'echo $$ >{tight_cgroup}/cgroup.procs; exec "$@"', "sh")
    launcher = program("launch_server", *TITLES, before=enter)
    with Observer([launcher.pid]) as observer:
        looks = seen(observer)
        next(looks)
        end_and_wait(launcher.said["children"][1], signal.SIGUSR1)
        found = next(looks)
    assert (found.state, found.culprits) == ("dead", ("TP1",))
    assert "TP1 was killed by SIGKILL: " in found.title
    assert "out of memory" in found.title
    assert "oom_kill rose from 0 to 1" in str(found.findings[0].because)


def test_the_limit_of_a_cgroup_is_told_without_the_page_cache(proc_tree):
    proc_tree.add(10, "python -m server", cgroup="0::/pod/server\n")
    world = proc_tree.root.parent
    for path, text in {
        "pod/memory.max": "1000\n",
        "pod/memory.current": "990\n",
        "pod/memory.stat": "anon 100\nfile 800\nactive_file 500\ninactive_file 300\n",
        "pod/memory.events": "low 0\nmax 7\noom_kill 0\n",
        "pod/server/memory.max": "max\n",
        "pod/server/memory.current": "10\n",
    }.items():
        at = world / "sys/fs/cgroup" / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)
    look = Look(proc=str(proc_tree.root), roots={10: 1000})
    found = host.read(look)
    assert (found.cgroup_used_bytes, found.cgroup_limit_bytes) == (190, 1000)
    assert found.cgroup_limit_hits == 7


def test_the_kernels_log_is_read_where_it_can_be_and_missing_where_not(proc_tree):
    proc_tree.add(10, "python -m server")
    look = Look(proc=str(proc_tree.root), roots={10: 1000})
    assert host.read(look).kernel_log.reason == "unsupported"
    kmsg = proc_tree.root.parent / "dev" / "kmsg"
    kmsg.parent.mkdir(exist_ok=True)
    kmsg.write_text("3,1,5000000,-;Out of memory: Killed process 10 (a) b) total-vm:1kB\n")
    (message,) = host.read(look).kernel_log
    assert message.boot_s == 5.0
    assert host.read(look).kernel_log == (message,)


def test_a_process_that_is_not_what_it_was_is_not_held(program):
    target = program("sleep")
    held = exits.Exits("/proc")
    held.hold(target.pid, start_ticks=1)
    assert held.status(target.pid) is None
    held.close()


@pytest.mark.parametrize(("held_s", "hung"), [(15, False), (60, True)])
def test_a_rank_that_a_debugger_holds_is_to_blame_once_it_has_held_it_for_long(
    held_s, hung, tmp_path
):
    """A watchdog has py-spy hold a rank for some seconds, whoever it is that hangs."""
    recording = launch(tmp_path, {"TP0": BARRIER, "TP1": LOADS}, log=LOG, seconds=100)

    def hold(at_s, process):
        held = process.pid == FIRST_RANK and at_s >= 100 - held_s
        return replace(process, state="t", tracer_pid=4711) if held else process

    found = verdict(with_processes(recording, hold))
    assert found.state == "hung"
    assert (told_by(found, "rank-stopped").state == "hung") == hung
    if not hung:
        assert found.culprits == ("TP1",)
