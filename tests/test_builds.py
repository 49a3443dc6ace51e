"""What a rank has started: compilers at work, builds that stand still, and helpers that spin."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
import restricted
from looks import Watch, child_of, has_used, judged, told_by

from hangdoctor import engines
from hangdoctor.collect import Observer, procfs
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.facts.looks import next_looks
from hangdoctor.model import CacheDirectory, Caches

sys.path.insert(0, str(Path(__file__).parent))
import logged
import scenarios as told  # test material beside the tests
from scenarios import Does, good_log, launch

SGLANG = engines.load("sglang")
replace = msgspec.structs.replace
LOG = good_log(("TP0", "TP1"), "capture-end")
WAITS = Does(stack=told.CAPTURE_ALL_REDUCE)
NVCC = "/usr/local/cuda/bin/nvcc -arch=sm_90a -c csrc/moe_gemm.cu -o moe_gemm.o"
CICC = "cicc --c++17 --orig_src_file_name csrc/moe_gemm.cu -o /tmp/x.ptx"
POOL = "/usr/bin/python3 /site-packages/torch/_inductor/compile_worker/__main__.py --workers=16"
HELPER = "/usr/bin/python3 /srv/probe.py --all"
needs_ninja = pytest.mark.skipif(
    not (shutil.which("ninja") or (Path(sys.executable).parent / "ninja").exists()),
    reason="no ninja here: pip install 'hangdoctor[test]'",
)


def diagnoses(recording):
    return (found for _, _, found in judged(recording))


def verdict(recording):
    return diagnose(derive(recording, SGLANG), SGLANG)


def builds(tmp_path, *children, seconds=400):
    does = Does(stack=told.NINJA, children=children)
    return launch(tmp_path, {"TP0": WAITS, "TP1": does}, log=LOG, seconds=seconds)


def test_a_compiler_counts_as_long_as_it_works_and_is_named_with_its_file(tmp_path):
    recording = builds(tmp_path, (NVCC, 0.0), (CICC, 97.0), seconds=900)
    found = list(diagnoses(recording))
    assert {each.state for each in found[30:]} <= {"starting", "slow"}
    compiling = told_by(found[-1], "compile-running")
    assert compiling.title == (
        "TP1 compiles moe_gemm.cu: cicc at work below it (97 % CPU); TP0 waits for it meanwhile"
    )


def test_a_helper_that_is_no_compiler_counts_for_two_minutes_only(tmp_path):
    found = list(diagnoses(builds(tmp_path, (HELPER, 100.0))))
    assert {each.state for each in found[60:130]} == {"starting"}
    assert found[-1].state == "unknown"
    helper = told_by(found[-1], "descendant-busy")
    assert "is no known compiler: after 120 s it no longer counts" in helper.title
    assert told_by(found[-1], "compile-running") is None


def test_a_rank_that_moves_by_itself_may_have_a_busy_helper_for_as_long_as_it_likes(tmp_path):
    does = Does(stack=told.MMAP, reads_per_s=90 << 20, children=((HELPER, 100.0),))
    recording = launch(tmp_path, {"TP0": does, "TP1": does}, log=LOG, seconds=400)
    assert {each.state for each in list(diagnoses(recording))[30:]} == {"starting"}


def test_helpers_that_end_one_after_the_other_count_no_longer_than_one(tmp_path):
    recording = builds(tmp_path)

    def worked(snapshot):
        processes = tuple(
            replace(process, children_cpu_s=0.5 * snapshot.at_s)
            if process.title.endswith("TP1")
            else process
            for process in snapshot.processes.processes
        )
        return replace(snapshot, processes=replace(snapshot.processes, processes=processes))

    snapshots = tuple(map(worked, recording.snapshots))
    found = list(diagnoses(replace(recording, snapshots=snapshots)))
    assert {each.state for each in found[60:130]} == {"starting"}
    assert found[-1].state in ("unknown", "hung")


def observed(tmp_path, title):
    """Return the verdicts on a hang below which a program runs for two seconds every twenty."""
    still = Does(stack=told.LOADING, cpu_pct=0)
    looked_at = replace(still, children=((title, 90.0),))
    parts = tuple((at_s + part, does) for at_s in range(40, 200, 20)
                  for part, does in ((0.0, looked_at), (2.0, still)))  # fmt: skip
    log = good_log(("TP0", "TP1"), "load-end")
    doing = {"TP0": Does(stack=told.BARRIER), "TP1": ((0.0, still), *parts)}
    recording = launch(tmp_path, doing, log=log, seconds=120)

    def waited_for(snapshot):
        """Count what the programs that have ended used, as their parent's wait does."""
        ended = max(0, (int(snapshot.at_s) - 40) // 20 + (int(snapshot.at_s) % 20 >= 2))
        processes = tuple(
            replace(process, children_cpu_s=1.8 * ended)
            if process.title.endswith("TP1")
            else process
            for process in snapshot.processes.processes
        )
        return replace(snapshot, processes=replace(snapshot.processes, processes=processes))

    snapshots = tuple(map(waited_for, recording.snapshots))
    return list(diagnoses(replace(recording, snapshots=snapshots)))


@pytest.mark.parametrize(
    "title", ["py-spy dump --native --pid 711", "/bin/sh -c py-spy dump --native --pid 711"]
)
def test_what_a_watchdog_has_look_at_a_rank_does_not_work_for_it(title, tmp_path):
    found = observed(tmp_path, title)[-1]
    assert (found.state, found.culprits) == ("hung", ("TP1",))
    assert found.still_s > 60
    assert told_by(found, "descendant-busy") is None


@pytest.mark.parametrize("how", ["held", "logged"])
def test_an_observer_that_was_not_seen_itself_is_told_by_its_hold_or_by_the_log(how, tmp_path):
    """It is there for a fifth of a second."""
    still = Does(stack=told.LOADING, cpu_pct=0)
    log = good_log(("TP0", "TP1"), "load-end")
    looks = range(45, 120, 15)
    if how == "logged":
        for at_s in looks:
            lines = logged.dump(" TP1", 711, logged.OPENS, soft=True).splitlines()[:-1]
            log += [(at_s, f"TP1| {lines[0].partition('] ')[2]}")]
            log += [(at_s, line) for line in lines[1:] if line]
    doing = {"TP0": Does(stack=told.BARRIER), "TP1": still}
    recording = launch(tmp_path, doing, log=log, seconds=120)

    def looked_at(process, at_s):
        if not process.title.endswith("TP1"):
            return process
        held = how == "held" and int(at_s) in looks
        ended = sum(at_s >= look_s for look_s in looks)
        state = "t" if held else process.state
        return replace(process, children_cpu_s=0.2 * ended, state=state)

    def changed(snapshot):
        section = snapshot.processes
        processes = tuple(looked_at(each, snapshot.at_s) for each in section.processes)
        return replace(snapshot, processes=replace(section, processes=processes))

    snapshots = tuple(map(changed, recording.snapshots))
    found = list(diagnoses(replace(recording, snapshots=snapshots)))
    assert (found[-1].state, found[-1].culprits) == ("hung", ("TP1",))
    assert found[-1].still_s > 60
    hung = [each for each in found if each.state == "hung"]
    assert {each.findings[0].rule for each in hung} == {"waiting-for-rank-elsewhere"}


def test_what_is_started_now_and_then_and_no_observer_counts_for_a_while(tmp_path):
    assert observed(tmp_path, HELPER)[-1].state == "starting"


@pytest.mark.parametrize("state", ["T", "S"])
def test_a_build_whose_compilers_stand_still_is_no_progress_and_its_end_is_named(state, tmp_path):
    recording = builds(tmp_path, ("ninja -v", 0.0), seconds=300)

    def with_compiler(snapshot):
        ninja = next(
            p for p in snapshot.processes.processes if p.comm == "ninja"[-15:] or "ninja" in p.title
        )
        compiler = replace(
            ninja,
            pid=ninja.pid + 50,
            ppid=ninja.pid,
            title="/usr/lib/gcc/cc1plus -quiet moe.cpp",
            comm="cc1plus",
            state=state,
        )
        section = snapshot.processes
        ninja = replace(ninja, state="S")
        rest = tuple(p for p in section.processes if p.pid != ninja.pid)
        return replace(snapshot, processes=replace(section, processes=(*rest, ninja, compiler)))

    found = verdict(replace(recording, snapshots=tuple(map(with_compiler, recording.snapshots))))
    assert (found.state, found.culprits) == ("hung", ("TP1",))
    stands = told_by(found, "build-stands-still")
    assert "cc1plus (pid " in stands.title
    assert ("is stopped" in stands.title) == (state == "T")


@pytest.mark.parametrize("waits", [True, False])
def test_a_pool_of_compilers_is_a_build_only_for_who_waits_for_it(waits, tmp_path):
    does = Does(stack=told.NINJA if waits else told.COPY, children=((POOL, 0.0),))
    recording = launch(tmp_path, {"TP0": WAITS, "TP1": does}, log=LOG, seconds=300)
    rules = {finding.rule for finding in verdict(recording).findings}
    assert ("build-stands-still" in rules) == waits


@pytest.mark.parametrize("parent", ["pool", "pool, read too early", "rank"])
def test_idle_workers_that_end_add_no_work_though_their_parent_inherits_their_cpu(parent, tmp_path):
    """Inductor ends its pool after a minute of idleness: 16 workers, in the midst of a hang."""
    does = Does(stack=told.LOADING, cpu_pct=0, children=((POOL, 0.0),))
    log = good_log(("TP0", "TP1"), "load-end")
    doing = {"TP0": Does(stack=told.BARRIER), "TP1": does}
    recording = launch(tmp_path, doing, log=log, seconds=180)

    def with_workers(snapshot):
        section = snapshot.processes
        pool = next(each for each in section.processes if each.title == POOL)
        rank = next(each for each in section.processes if each.pid == pool.ppid)
        rest = tuple(each for each in section.processes if each.pid not in (pool.pid, rank.pid))
        pool = replace(pool, state="S")
        workers = tuple(
            replace(pool, pid=pool.pid + number, ppid=pool.pid, cpu_s=cpu_s)
            for number, cpu_s in enumerate((0.0, 14.0), start=1)
        )
        gone = snapshot.at_s >= 120
        if gone and parent != "rank":
            early = parent != "pool" and snapshot.at_s < 121
            pool, workers = replace(pool, children_cpu_s=3.5 if early else 14.03), ()
        elif gone:
            found = (*rest, replace(rank, children_cpu_s=14.05))
            return replace(snapshot, processes=replace(section, processes=found))
        return replace(
            snapshot, processes=replace(section, processes=(*rest, rank, pool, *workers))
        )

    found = list(
        diagnoses(replace(recording, snapshots=tuple(map(with_workers, recording.snapshots))))
    )
    assert {each.state for each in found[100:]} == {"hung"}
    assert found[-1].culprits == ("TP1",)


def test_many_short_compilers_are_work_though_none_is_seen_twice(tmp_path):
    """As of a build with 16 jobs whose compilers take 30 ms of CPU each, on two cores."""
    recording = builds(tmp_path, ("ninja -v", 0.0), seconds=120)

    def with_compilers(snapshot):
        section, at = snapshot.processes, int(snapshot.at_s)
        ninja = next(each for each in section.processes if each.title == "ninja -v")
        rest = tuple(each for each in section.processes if each.pid != ninja.pid)
        ninja = replace(ninja, state="S", children_cpu_s=2.0 * at)
        jobs = tuple(
            replace(
                ninja,
                pid=100_000 + 100 * at + number,
                ppid=ninja.pid,
                title=f"sh -c c++ -c moe{number}.cpp",
                cpu_s=0.03,
                children_cpu_s=0.0,
            )
            for number in range(64)
        )
        return replace(snapshot, processes=replace(section, processes=(*rest, ninja, *jobs)))

    found = list(
        diagnoses(replace(recording, snapshots=tuple(map(with_compilers, recording.snapshots))))
    )
    assert {each.state for each in found[50:]} == {"starting"}


# --- On real processes ----------------------------------------------------------------------------


@needs_ninja
def test_a_real_ninja_build_is_a_compile_and_none_when_its_compiler_is_stopped(program, tmp_path):
    build = program("ninja_build", tmp_path)
    compiler = child_of(build.pid, "cc1plus")
    with Observer([build.pid]) as observer:
        watch = Watch(observer)
        watch.look()
        has_used(compiler, 0.3)
        found = watch.look()
        compiling = told_by(found, "compile-running")
        assert "TP0 compiles moe.cpp: cc1plus" in compiling.title
        assert compiling.verdict == "found"
        assert "compiles" in watch.facts.rank("TP0").moved_by

        os.kill(compiler, signal.SIGSTOP)
        while procfs.read_stat("/proc", compiler).state != "T":
            os.sched_yield()
        watch.look()
        moved_at_s = watch.facts.track(watch.facts.rank("TP0")).moved_at_s
        found = watch.look()
        assert told_by(found, "compile-running") is None
        assert watch.facts.track(watch.facts.rank("TP0")).moved_at_s == moved_at_s


@needs_ninja
def test_a_real_ninja_build_that_waits_for_a_lock_is_no_progress(program, tmp_path):
    lock = tmp_path / "lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        place = tmp_path / "build"
        place.mkdir()
        build = program("ninja_build", place, f"flock {lock}")
        waiting = child_of(build.pid, "flock")
        with Observer([build.pid]) as observer:
            watch = Watch(observer)
            watch.look()
            while "lock" not in procfs.read(f"/proc/{waiting}/wchan").decode():
                os.sched_yield()
            watch.look()
            moved_at_s = watch.facts.track(watch.facts.rank("TP0")).moved_at_s
            found = watch.look()
        assert told_by(found, "compile-running") is None
        assert watch.facts.track(watch.facts.rank("TP0")).moved_at_s == moved_at_s


def test_a_real_helper_that_spins_is_no_compiler(program):
    helper = program("helper_spin")
    rank = helper.said["rank"]
    while not (below := procfs.children(procfs.scan("/proc")).get(rank)):
        os.sched_yield()
    with Observer([helper.pid]) as observer:
        watch = Watch(observer)
        watch.look()
        has_used(below[0], 0.2)
        watch.look()
        has_used(below[0], 0.2)
        found = watch.look()
    busy = told_by(found, "descendant-busy")
    assert f"(pid {below[0]}) below TP0 uses" in busy.title
    assert "no longer counts as progress" in busy.title
    assert told_by(found, "compile-running") is None


@needs_ninja
def test_another_users_build_is_seen_as_a_compile_too(program):
    with tempfile.TemporaryDirectory(prefix="hangdoctor-rights-") as place:
        Path(place).chmod(0o755)
        work = Path(place) / "work"
        work.mkdir()
        build = program("ninja_build", work)
        child_of(build.pid, "cc1plus")
        done = subprocess.run(
            restricted.hangdoctor(
                place,
                "diagnose",
                build.said["rank"],
                "--for=4",
                "--format=json",
                user=restricted.NOBODY,
            ),
            capture_output=True,
            text=True,
            check=False,
        )
    assert "Traceback" not in done.stderr
    assert "TP0 compiles moe.cpp: cc1plus" in done.stdout


def compiles_itself(tmp_path, *, grows, cpu_pct=100.0, stack=told.TRITON_COMPILE, seconds=300):
    """Return a launch one rank of which is in Triton's own code; its cache may grow meanwhile."""
    does = Does(stack=stack, state="R", cpu_pct=cpu_pct)
    recording = launch(tmp_path, {"TP0": WAITS, "TP1": does}, log=LOG, seconds=seconds)

    def cached(snapshot):
        at_s = snapshot.at_s if grows else 0.0
        cache = CacheDirectory("/root/.triton/cache", snapshot.wall_s - snapshot.at_s + at_s, 7)
        due = snapshot.at_s % 5 == 0
        return msgspec.structs.replace(
            snapshot, caches=Caches(by_id={"triton": cache}) if due else None
        )

    return msgspec.structs.replace(recording, snapshots=tuple(map(cached, recording.snapshots)))


def test_a_rank_that_compiles_itself_moves_while_its_cache_grows(tmp_path):
    found = list(diagnoses(compiles_itself(tmp_path, grows=True)))
    assert {each.state for each in found[60:]} == {"starting"}
    compiling = told_by(found[-1], "compile-running")
    assert compiling.verdict == "found"
    assert "Triton's cache /root/.triton/cache grew 0 s ago" in compiling.title
    assert compiling.title.endswith("; TP0 waits for it meanwhile")


def test_a_cache_that_does_not_grow_leaves_it_open_whether_it_compiles(tmp_path):
    found = verdict(compiles_itself(tmp_path, grows=False))
    assert found.state == "unknown"
    compiling = told_by(found, "compile-running")
    assert compiling.verdict == "undecided"
    assert compiling.because[0].text == "Triton's cache /root/.triton/cache did not grow"


@pytest.mark.parametrize(
    "other",
    [{"cpu_pct": 0.0}, {"stack": told.CAPTURE}],
    ids=["uses no CPU", "is in no compiler's code"],
)
def test_a_cache_that_another_launch_fills_moves_no_rank(other, tmp_path):
    recording = compiles_itself(tmp_path, grows=True, **other)
    facts = derive(recording, SGLANG)
    assert facts.rank("TP1").moving is False
    assert facts.rank("TP1").still_s > 200


def test_caches_are_looked_at_while_a_rank_compiles(tmp_path):
    assert next_looks(derive(compiles_itself(tmp_path, grows=True, seconds=50), SGLANG))["caches"]
    reads = launch(tmp_path / "b", {"TP0": Does(stack=told.MMAP)}, log=LOG, seconds=50)
    assert "caches" not in next_looks(derive(reads, SGLANG))
