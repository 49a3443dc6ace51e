"""Flight Recorder dumps: who is named, who is not, and what a hostile file can do: nothing."""

from __future__ import annotations

import copyreg
import itertools
import json
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import msgspec
import pytest

from hangdoctor import engines
from hangdoctor.collect import flight_recorder
from hangdoctor.collect.look import Look
from hangdoctor.collect.worker import ask_once
from hangdoctor.collectives import compare
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import begin, see_dumps
from hangdoctor.model import FlightRecorder, FlightRecorderDump, Header, Missing

HERE = Path(__file__).parent
SGLANG = engines.load("sglang")
CASES = ["gpu_error_1st", "gpu_error_2nd", "lock_gil_1st", "lock_gil_2nd"]
RANKS = range(16)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Return a directory that holds the four cases."""
    into = tmp_path_factory.mktemp("traces")
    with tarfile.open(HERE / "traces.tar.xz") as archive:
        for member in archive:
            assert re.fullmatch(r"\w+/(_dump_\d+|fault_injection\.log)", member.name)
            path = into / member.name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(archive.extractfile(member).read())
    return into


def truth_of(traces, case):
    line = (traces / case / "fault_injection.log").read_text().splitlines()[0]
    return set(json.loads(line.partition(": ")[2]))


def raw_of(traces, case):
    """Return the dumps of a case as plain values, by rank."""
    files = {rank: traces / case / f"_dump_{rank}" for rank in RANKS}
    return {rank: pickle.loads(path.read_bytes()) for rank, path in files.items()}  # noqa: S301


def parsed(raw, *, written_s=None, form=pickle.dumps):
    """Return what plain values are, written as files and read in."""
    dumps = {}
    for rank, one in raw.items():
        dump = flight_recorder.parse_dump(form(one), rank, f"_dump_{rank}", written_s)
        assert isinstance(dump, FlightRecorderDump), dump
        dumps[rank] = dump
    return FlightRecorder(dumps=dumps)


def as_json(raw):
    """Write a dump as PyTorch does: the numbers of the status as text."""
    status = {
        pg: {key: str(value) for key, value in one.items()} for pg, one in raw["pg_status"].items()
    }
    return json.dumps(raw | {"pg_status": status}).encode()


def verdict(recorder):
    return diagnose(see_dumps(begin(Header(), SGLANG), recorder), SGLANG)


def culprits(recorder):
    return {int(name.removeprefix("rank ")) for name in verdict(recorder).culprits}


@pytest.mark.parametrize("case", CASES)
def test_the_faulty_ranks_are_named_and_nobody_else(case, traces):
    found = verdict(parsed(raw_of(traces, case)))
    assert {int(name.split()[1]) for name in found.culprits} == truth_of(traces, case)
    assert found.state == "unknown"  # files do not tell that anything stood still
    assert any("stood still" in need for need in found.findings[0].needs)


@pytest.mark.parametrize("case", CASES)
def test_pickle_and_json_say_the_same(case, traces):
    raw = raw_of(traces, case)
    assert parsed(raw, form=as_json) == parsed(raw)


def relabelled(raw, names):
    """Give each rank another number, in file names and groups alike."""

    def group(one):
        ranks = [names[rank] for rank in json.loads(one["ranks"])]
        return one | {"ranks": str(ranks)}

    return {
        names[rank]: one | {"pg_config": {k: group(v) for k, v in one["pg_config"].items()}}
        for rank, one in raw.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_the_names_follow_the_ranks_numbers(case, traces):
    raw, truth = raw_of(traces, case), truth_of(traces, case)
    for seed in range(5):
        order = list(RANKS)
        random.Random(seed).shuffle(order)  # noqa: S311
        names = dict(zip(RANKS, order, strict=True))
        assert culprits(parsed(relabelled(raw, names))) == {names[rank] for rank in truth}


@pytest.mark.parametrize("case", CASES)
def test_missing_dumps_make_nobody_guilty_who_was_not(case, traces):
    recorder, truth = parsed(raw_of(traces, case)), truth_of(traces, case)
    chance = random.Random(1)  # noqa: S311
    without = [set(each) for count in (1, 2) for each in itertools.combinations(RANKS, count)]
    without += [set(chance.sample(RANKS, count)) for count in range(3, 16) for _ in range(5)]
    for gone in without:
        left = {rank: dump for rank, dump in recorder.dumps.items() if rank not in gone}
        assert set(compare(FlightRecorder(dumps=left)).behind) <= truth - gone, gone


@pytest.mark.parametrize("case", CASES)
def test_a_faulty_rank_without_a_dump_is_asked_for_and_not_blamed(case, traces):
    truth = truth_of(traces, case)
    raw = {rank: one for rank, one in raw_of(traces, case).items() if rank not in truth}
    found = verdict(parsed(raw))
    assert not found.culprits
    (finding,) = [one for one in found.findings if one.rule == "flight-recorder-undecided"]
    assert {f"rank {rank}" for rank in truth} <= set(finding.ranks)
    assert "dumps of" in finding.needs[0]


def healthy(raw):
    """Cut all ranks back to what all members of each group had enqueued, and complete that."""
    pairs = [
        (rank, pg, status) for rank, one in raw.items() for pg, status in one["pg_status"].items()
    ]
    name_of = {
        (rank, str(entry["pg_id"])): entry["process_group"][0]
        for rank, one in raw.items()
        for entry in one["entries"]
    }
    common = {}
    for rank, pg, status in pairs:
        group = name_of.get((rank, pg))
        told = status["last_enqueued_collective"]
        common[group] = min(common.get(group, told), told)
    whole = {}
    for rank, one in raw.items():
        entries = [
            entry
            | {
                "state": "completed",
                "time_discovered_started_ns": entry["time_created_ns"] + 1000,
                "time_discovered_completed_ns": entry["time_created_ns"] + 2000,
                "retired": True,
            }
            for entry in one["entries"]
            if not entry["is_p2p"]
            and entry["collective_seq_id"] <= common[entry["process_group"][0]]
        ]
        status = {}
        for pg, told in one["pg_status"].items():
            last = told["last_completed_collective"]
            if (group := name_of.get((rank, pg))) is not None:
                last = max(last, common[group])
            status[pg] = told | {
                "last_enqueued_collective": last,
                "last_completed_collective": last,
            }
        whole[rank] = one | {"entries": entries, "pg_status": status}
    return whole


@pytest.mark.parametrize("case", CASES)
def test_a_healthy_set_gives_no_finding(case, traces):
    found = verdict(parsed(healthy(raw_of(traces, case))))
    assert [one for one in found.findings if one.rule.startswith("flight-recorder")] == []
    assert found.culprits == ()


# Small jobs, made by hand.


def entry(number, op, seq, *, state="scheduled", group="0", p2p=False, **more):
    return {
        "record_id": number,
        "pg_id": int(group),
        "process_group": (group, "tp"),
        "profiling_name": f"nccl:{op}",
        "collective_seq_id": 0 if p2p else seq,
        "p2p_seq_id": seq if p2p else 0,
        "is_p2p": p2p,
        "input_sizes": [[8, 16]],
        "input_dtypes": ["BFloat16"],
        "state": state,
        "time_created_ns": 1_700_000_000_000_000_000 + number,
        "retired": state == "completed",
    } | more


def dump(entries, *, ranks=(0, 1, 2, 3), status=None, groups=None):
    groups = groups or {"0": ranks}
    raw = {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": "tp", "ranks": str(list(members))}
            for name, members in groups.items()
        },
        "entries": entries,
    }
    if status is not None:
        raw["pg_status"] = {
            pg: {"last_enqueued_collective": told[0], "last_completed_collective": told[1]}
            for pg, told in status.items()
        }
    return raw


def ring(first, done, last, **more):
    """Return a rank's ring buffer: completed up to `done`, open up to `last`."""
    return [
        entry(n, "all_reduce", n, state="completed" if n <= done else "scheduled", **more)
        for n in range(first, last + 1)
    ]


def test_rings_that_begin_at_different_places_are_compared_by_number():
    raw = {rank: dump(ring(700 + 50 * rank, 990, 1000)) for rank in (0, 1, 3)}
    raw[2] = dump(ring(10, 990, 990))
    assert culprits(parsed(raw)) == {2}


def test_a_dump_without_a_status_is_read_by_its_entries():
    raw = {rank: dump(ring(1, 5, 6)) for rank in (0, 1, 2)} | {3: dump(ring(1, 5, 5))}
    assert culprits(parsed(raw)) == {3}


def test_the_one_that_all_wait_for_is_named_and_not_the_one_that_waits_for_it():
    groups = {"0": (0, 1), "1": (1, 2)}
    waits = {
        0: dump([entry(9, "all_reduce", 4)], groups={"0": (0, 1)}, status={"0": (4, 3)}),
        1: dump(
            [entry(9, "all_gather", 8, group="1")],
            groups=groups,
            status={"0": (3, 3), "1": (8, 7)},
        ),
        2: dump([], groups={"1": (1, 2)}, status={"1": (7, 7)}),
    }
    found = compare(parsed(waits))
    assert found.behind == (2,)
    assert found.waited_for == {2: (0, 1)}


def test_ranks_that_wait_for_each_other_are_not_blamed():
    groups = {"0": (0, 1), "1": (0, 1)}
    raw = {
        0: dump([entry(9, "all_reduce", 4)], groups=groups, status={"0": (4, 3), "1": (7, 7)}),
        1: dump(
            [entry(9, "all_reduce", 8, group="1")],
            groups=groups,
            status={"0": (3, 3), "1": (8, 7)},
        ),
    }
    found = verdict(parsed(raw))
    assert not found.culprits
    assert "wait for each other" in found.findings[0].title


def test_an_operation_that_all_have_joined_blames_nobody():
    found = verdict(parsed({rank: dump(ring(1, 5, 6)) for rank in range(4)}))
    assert not found.culprits
    assert [one.verdict for one in found.findings] == ["undecided"]
    assert "all members have enqueued all_reduce 6" in found.findings[0].title


def test_a_rank_whose_gpu_has_not_begun_what_others_have_is_behind():
    begun = [entry(6, "all_reduce", 6, state="started")]
    raw = {rank: dump([*ring(1, 5, 5), *begun]) for rank in range(3)}
    raw[3] = dump(ring(1, 5, 6))
    assert culprits(parsed(raw)) == {3}


@pytest.mark.parametrize(
    "other",
    [{"op": "all_gather"}, {"op": "all_reduce", "input_sizes": [[8, 32]]}],
    ids=["another operation", "another shape"],
)
def test_ranks_that_are_out_of_step_are_named_together_and_none_is_blamed(other):
    raw = {rank: dump([*ring(1, 5, 5), entry(6, "all_reduce", 6)]) for rank in (0, 1, 2)}
    raw[3] = dump([*ring(1, 5, 5), entry(6, other.pop("op"), 6, **other)])
    found = verdict(parsed(raw))
    assert not found.culprits
    assert found.findings[0].rule == "flight-recorder-ranks-diverged"
    assert found.findings[0].ranks == ("rank 0", "rank 1", "rank 2", "rank 3")


def test_uneven_exchanges_are_in_step():
    raw = {
        rank: dump([*ring(1, 5, 5), entry(6, "all_to_all", 6, input_sizes=[[rank + 1, 16]])])
        for rank in range(4)
    }
    assert compare(parsed(raw)).diverged == ()


def test_numbers_of_sends_mean_nothing_to_other_ranks():
    groups = {"0": (0, 1, 2)}
    raw = {
        0: dump([], groups=groups, status={"0": (7, 7)}),
        1: dump([], groups=groups, status={"0": (13, 13)}),
        2: dump([entry(3, "send 2->1", 4, p2p=True)], groups=groups, status={"0": (4, 3)}),
    }
    assert compare(parsed(raw)).waited_for == {1: (2,)}
    raw[1]["entries"] = [entry(9, "recv 1<-2", 14, p2p=True)]
    assert not compare(parsed(raw)).behind


def test_dumps_of_different_moments_are_not_compared():
    early = {rank: dump(ring(1, 5, 5)) for rank in (0, 1, 2)}
    late = {3: dump([*ring(1, 5, 5), entry(6_000_000_000, "all_reduce", 6)])}
    recorder = FlightRecorder(
        dumps=parsed(early, written_s=1_700_000_001.0).dumps
        | parsed(late, written_s=1_700_000_007.0).dumps
    )
    found = compare(recorder)
    assert (found.behind, found.outdated) == ((), (0, 1, 2))


def test_dumps_that_were_written_at_once_blame_nobody():
    raw = {rank: dump(ring(1, 5, 6)) for rank in (0, 1, 2)} | {3: dump(ring(1, 5, 5))}
    soon = verdict(parsed(raw, written_s=1_700_000_003.0))
    assert (soon.culprits, soon.findings[0].verdict) == ((), "undecided")
    later = verdict(parsed(raw, written_s=1_700_000_183.0))
    assert later.culprits == ("rank 3",)
    assert any("open for 183 s" in item.text for item in later.findings[0].because)


def test_an_operation_that_the_watchdog_gave_up_proves_the_hang():
    gave_up = {"retired": True}
    raw = {rank: dump([*ring(1, 5, 5), entry(6, "all_reduce", 6, **gave_up)]) for rank in range(3)}
    raw[3] = dump(ring(1, 5, 5))
    found = verdict(parsed(raw))
    assert (found.state, found.culprits, found.confidence) == ("hung", ("rank 3",), "high")


def test_frames_are_shown_where_the_dump_has_them():
    frames = [{"name": "all_reduce", "filename": "distributed_c10d.py", "line": 12}]
    raw = {
        rank: dump([*ring(1, 5, 5), entry(6, "all_reduce", 6, frames=frames)]) for rank in (0, 1, 2)
    }
    raw[3] = dump(ring(1, 5, 5))
    assert "all_reduce" in verdict(parsed(raw)).findings[0].because[0].frame


def test_a_full_ring_of_many_ranks_is_kept_short():
    raw = flight_recorder.parse_dump(pickle.dumps(dump(ring(1, 4000, 4005))), 0, "_dump_0", None)
    assert len(raw.entries) == 5 + flight_recorder.LAST_COMPLETED


# Files that are none, or worse.


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def hostile(mark):
    """Return pickles that ask for more than data, by what they do."""
    copyreg.add_extension("os", "system", 240)
    try:
        extension = pickle.dumps(os.system, protocol=2)
    finally:
        copyreg.remove_extension("os", "system", 240)
    names = [b"cos\nsystem\n.", b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93."]
    return {
        "a call": pickle.dumps(Evil(mark)),
        "a call in a list of a good dump": pickle.dumps(dump([Evil(mark)])),
        "a name": b"\x80\x02" + names[0],
        "a name on the stack": names[1],
        "an extension": extension,
        "a persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
        "an instance": b"\x80\x02(ios\nsystem\n.",
        "a text protocol": names[0],
        "a set state of a dict": b"\x80\x02}}b.",
    }


def test_no_pickle_can_run_code(tmp_path):
    mark = tmp_path / "ran"
    for what, data in hostile(mark).items():
        found = flight_recorder.parse_dump(data, 0, "_dump_0", None)
        assert isinstance(found, Missing), what
        assert not mark.exists(), what


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04}.",
        b"\x80\x02]" + b"]" * 1000 + b".",
        b"{" * 100_000,
        b'{"pg_config": {}}',
        b'{"version": "2.5", "pg_config": {"0": {"name": "0", "ranks": "[1]"}}}',
        pickle.dumps({"version": "2.5", "pg_config": {"0": 3}}),
        pickle.dumps(dump([]))[:-20],
        b'{"version": "2.5", "pg_config": {}, "entries": [{"state": "on fire"}]}',
    ],
)
def test_what_is_no_dump_of_this_rank_is_said_to_be_none(data):
    assert isinstance(flight_recorder.parse_dump(data, 0, "_dump_0", None), Missing)


def test_a_pickle_that_asks_for_all_memory_costs_its_worker_only(tmp_path):
    bomb = b"\x80\x02}r" + struct.pack("<I", 2**31 - 1) + b"."
    (tmp_path / "_dump_0").write_bytes(bomb)
    (tmp_path / "_dump_1").write_bytes(pickle.dumps(dump([])))
    request = flight_recorder.Paths(paths=(str(tmp_path),))
    found = ask_once("dump_files", flight_recorder.PATHS_JOB, request)
    assert list(found.dumps) == [1]
    assert "memory" in found.unusable[str(tmp_path / "_dump_0")].detail


def test_what_else_lies_in_the_directory_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe_0")
    (tmp_path / "server_1").write_text("a log with a number\n")
    (tmp_path / "_dump_2").write_bytes(pickle.dumps(dump([])))
    (tmp_path / "_dump_9").write_bytes(pickle.dumps(dump([], ranks=(8, 9))))
    os.utime(tmp_path / "_dump_9", (1, 1))
    request = flight_recorder.Paths(paths=(str(tmp_path),))
    found = ask_once("dump_files", flight_recorder.PATHS_JOB, request)
    assert list(found.dumps) == [2]
    assert {Path(path).name: missing.reason for path, missing in found.unusable.items()} == {
        "pipe_0": "failed",
        "_dump_9": "inapplicable",
    }


def test_a_launchs_own_dumps_are_found_through_its_environment(proc_tree):
    world = proc_tree.root.parent
    for directory in ("fr", "root/.cache/torch", "tmp"):
        (world / directory).mkdir(parents=True)
    own = proc_tree.add(
        700,
        "python3 -m sglang.launch_server",
        start=0,
        environ="TORCH_FR_DUMP_TEMP_FILE=/fr/trace_\0HOME=/root\0",
    )
    (own / "root").symlink_to(world)
    (world / "fr" / "trace_0").write_bytes(pickle.dumps(dump([])))
    (world / "root/.cache/torch/comm_lib_trace_rank_1").write_bytes(pickle.dumps(dump([])))
    (world / "tmp" / "nccl_trace_rank_2").write_bytes(pickle.dumps(dump([])))
    (world / "tmp" / "nccl_trace_rank_3").write_bytes(pickle.dumps(dump([])))
    os.utime(world / "tmp" / "nccl_trace_rank_3", (1, 1))  # of an earlier launch
    found = ask_once(
        "flight_recorder", flight_recorder.JOB, Look(proc=str(proc_tree.root), roots={700: 0})
    )
    assert list(found.dumps) == [0, 1, 2]
    ((left, why),) = found.unusable.items()
    assert left.endswith("/nccl_trace_rank_*")
    assert why.reason == "inapplicable"
    assert re.match(r"a file was written \d+ days before this launch began", why.detail)


@pytest.mark.parametrize(
    ("written_s", "made_s", "used"),
    [
        (600, 590, True),
        (-600, 300, True),  # the file server's clock is behind
        (-5, None, False),
        (5, None, True),
        (600, -300, False),  # an earlier launch's, which gave up when this one had begun
        (-7200, 300, False),  # nobody's clock is so wrong
    ],
)
def test_the_entries_tell_whose_a_dump_is_and_not_a_file_server_s_clock(
    written_s, made_s, used, proc_tree
):
    began_s = time.time() - 1000
    own = proc_tree.add(
        700,
        "python3 -m sglang.launch_server",
        start=int((time.clock_gettime(time.CLOCK_BOOTTIME) - 1000) * 100),
        environ="TORCH_FR_DUMP_TEMP_FILE=/fr/trace_\0",
    )
    world = proc_tree.root.parent
    (own / "root").symlink_to(world)
    (world / "fr").mkdir()
    path = world / "fr" / "trace_0"
    made_ns = None if made_s is None else int((began_s + made_s) * 1e9)
    made = entry(0, "all_reduce", 1, time_created_ns=made_ns)
    path.write_bytes(pickle.dumps(dump([made])))
    os.utime(path, (began_s + written_s, began_s + written_s))
    found = ask_once(
        "flight_recorder", flight_recorder.JOB, Look(proc=str(proc_tree.root), roots={700: 0})
    )
    assert list(found.dumps) == ([0] if used else [])
    assert [missing.reason for missing in found.unusable.values()] == (
        [] if used else ["inapplicable"]
    )
    for missing in found.unusable.values():
        assert "of an earlier launch" in missing.detail


# The command line.


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "hangdoctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_a_directory_of_dumps_is_a_source(traces):
    found = run("diagnose", traces / "lock_gil_2nd", "--format", "json")
    assert found.returncode == 3, found.stderr
    told = json.loads(found.stdout)
    assert told["culprits"] == ["rank 10", "rank 15"]
    assert told["source"] == str(traces / "lock_gil_2nd")


def test_single_dumps_are_sources(traces):
    files = [traces / "lock_gil_1st" / f"_dump_{rank}" for rank in (8, 9)]
    found = run("diagnose", *files)
    assert "rank 9" in found.stdout.splitlines()[0], found.stderr


def test_dumps_alone_name_no_engine_but_the_one_that_was_given(traces):
    told = run("diagnose", traces / "lock_gil_1st")
    assert "rank" in told.stdout.splitlines()[0], told.stderr
    assert "sglang" not in told.stdout.replace(str(traces), "")
    assert "  sglang\n" in run("diagnose", traces / "lock_gil_1st", "--engine", "sglang").stdout


def test_dumps_beside_a_recording_take_the_launchs_names(tmp_path):
    raw = {0: dump(ring(1, 5, 6), ranks=(0, 1)), 1: dump(ring(1, 5, 5), ranks=(0, 1))}
    for rank, one in raw.items():
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(one))
    recording = HERE.parent / "recordings" / "h200-tp2-forward-sleep-live"
    told = json.loads(run("diagnose", recording, tmp_path, "--format", "json").stdout)
    (finding,) = [one for one in told["findings"] if one["rule"] == "flight-recorder-ranks-behind"]
    assert finding["culprits"] == told["culprits"] == ["TP1"]
    assert finding["state"] == told["state"] == "hung"


def test_dumps_of_which_none_can_be_used_are_wrong_usage(tmp_path):
    (tmp_path / "_dump_0").write_bytes(hostile(tmp_path / "ran")["a call"])
    found = run("diagnose", tmp_path)
    assert found.returncode == 2
    assert "refused: it names posix.system" in found.stderr
    assert not found.stdout
    assert not (tmp_path / "ran").exists()


def test_hostile_text_in_a_dump_is_cleaned():
    evil = "all_reduce\x1b[31m\u202e"
    raw = {rank: dump([*ring(1, 5, 5), entry(6, evil, 6)]) for rank in (0, 1, 2)}
    raw[3] = dump(ring(1, 5, 5))
    from hangdoctor.render import RENDERERS

    facts = see_dumps(begin(Header(), SGLANG), parsed(raw))
    for render in RENDERERS.values():
        shown = render(facts, diagnose(facts, SGLANG))
        assert "\x1b" not in shown
        assert "\u202e" not in shown


def test_dumps_are_kept_in_a_recording():
    from hangdoctor.model import Snapshot

    recorder = parsed({0: dump(ring(1, 5, 6)), 1: dump(ring(1, 5, 5))})
    snapshot = Snapshot(at_s=1.0, wall_s=2.0, flight_recorder=recorder)
    kept = msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot)
    assert kept == snapshot
