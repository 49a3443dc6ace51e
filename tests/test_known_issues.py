"""Known issues: each fires on what was told about in public, and not on what nearly looks like it.

The logs are written anew, in the literal words of the lines that the threads show.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest
from looks import judged

from hangdoctor import engines, known_issues
from hangdoctor.commands.explain import explain
from hangdoctor.diagnose import diagnose
from hangdoctor.engines import needle
from hangdoctor.facts.fold import derive
from hangdoctor.frames import matches
from hangdoctor.model import Frame, Installation
from hangdoctor.recording import bare_log, load
from hangdoctor.rules import RULES, rule_id
from hangdoctor.rules import known_issues as rule

sys.path.insert(0, str(Path(__file__).parent))
import scenarios as told  # test material beside the tests
from scenarios import Does, good_log, launch

SGLANG = engines.load("sglang")
ISSUES = {issue.id: issue for name in ("sglang",) for issue in known_issues.load(name)}
RECORDINGS = Path(__file__).parent / "recordings"
SAMPLES = Path(__file__).parents[1] / "sample_logs"
replace = msgspec.structs.replace

TP2 = ("TP0", "TP1")
SPINS = (100, 0, 9.0)
SERVER = "python3 -m sglang.launch_server --model-path /m"


def text(*lines, upto="capture", tp=2, args=""):
    """Return the log of a launch up to a step, and what it says after that: "TP0| words"."""
    names = [f"TP{rank}" for rank in range(tp)]
    told_so = [line for _, line in good_log(names, upto)]
    told_so[0] = told_so[0].replace("device='cuda'", f"device='cuda'{args}")
    found = []
    for number, line in enumerate([*told_so, *lines]):
        rank, bar, words = line.partition("|")
        stamp = f"2026-11-29 21:{number // 60:02}:{number % 60:02}"
        prefix = f"[{stamp}{' ' + rank if rank else ''}]" if bar and len(rank) < 12 else ""
        found.append(prefix + (words if prefix else line))
    return "\n".join(found) + "\n"


def live(ranks=2, doing=None, *, upto="capture", lines=(), seconds=120, version=None, **others):
    """Return what builds the recording of a launch that does the same for long."""

    def build(into):
        does = doing if isinstance(doing, dict) else {f"TP{r}": doing for r in range(ranks)}
        log = good_log(tuple(does), upto) if upto is not None else None
        if log is not None:
            log += [(log[-1][0], line) for line in lines]
        recording = launch(into, does, log=log, seconds=seconds, **others)
        if version is None:
            return recording
        installed = Installation(name="sglang", version=version, path="/site/sglang")
        return replace(recording, header=replace(recording.header, installation=installed))

    return build


BEGIN = "TP0| Capture cuda graph begin. This can take up to several minutes. avail mem=3.66 GB"
AT_ZERO = "Capturing batches (bs=512 avail_mem=3.10 GB):   0%|          | 0/52 [00:04<?, ?it/s]"
AT_END = "Capturing batches (bs=1 avail_mem=3.10 GB): 100%|##########| 52/52 [00:44<00:00, 1.2it/s]"
NOTHING = ("TP0| Registering 0 cuda graph addresses", "TP1| Registering 0 cuda graph addresses")
BAR = "Multi-thread loading shards: {0:>3}% Completed | {1}/64 [02:33<00:00,  2.39s/it]"
IN_USE = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
    "network address. port: 20123, useIpv6: false, code: -{0}, name: {1}, message: {2}"
)
LOOPBACK = (
    "[rank4]:[W1129 21:04:27 ProcessGroupGloo.cpp:721] Warning: Unable to resolve hostname to a "
    "(local) address. Using the loopback address as fallback."
)
SOFT_LOCK = (
    "FileSystem does not appear to support flock. Falling back to SoftFileLock for /m/a.lock"
)
GEMM = "TP0| Try DeepGEMM JIT Compiling for <GEMM_NT_F8F8BF16> N=4096, K=4096, num_groups=1"
HOST_KV = "TP1| Allocating 120.00 GB host memory for hierarchical KV cache."
TUNES = "TP0| Running FlashInfer autotune..."
HAMI = "[HAMI-core Msg(15:140523803275776:libvgpu.c:836)]: Initializing....."
TIMED_OUT = (
    "[rank0]:[E1129 22:59:01.065438311 ProcessGroupGloo.cpp:2901] [Rank 0]: Rank 1 failed to pass "
    "monitoredBarrier in 480000 ms"
)
DIED = "RuntimeError: Rank 0 scheduler died during initialization (exit code: {0})."
BATON = "[aiter] [pid=101 pname=Main] waiting for baton release at /b/lock_module_gemm_a8w8"
READ_TIMEOUT = (
    "requests.exceptions.ReadTimeout: HTTPConnectionPool(host='127.0.0.1', port=30000): "
    "Read timed out. (read timeout={0})"
)
HUB_READ = READ_TIMEOUT.replace("HTTPConnectionPool", "HTTPSConnectionPool").format(10)
NO_ROUTE = (
    "node5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> "
    "returned 113(No route to host) errno 115(Operation now in progress)"
)
UNEQUAL = "The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
SHM = "Error while creating shared memory segment /dev/shm/{0}-XXXXXX (size 9637888)"
CONTROLLER = (
    "_ConnectionBase.recv multiprocessing/connection.py:250",
    "launch_tensor_parallel_group managers/data_parallel_controller.py:501",
    "run_data_parallel_controller_process managers/data_parallel_controller.py:600",
)
STACK_IN_LOG = (
    "TP0| Pyspy dump for PID 710:",
    'Thread 710 (active+gil): "MainThread"',
    "    rendezvous (torch/distributed/_symmetric_memory/__init__.py:1991)",
    "    _alloc_symm_buffer_bytes (flashinfer/comm/torch_symmetric_memory.py:71)",
)

NCCL_ALL_REDUCE = (
    "Stream.synchronize torch/cuda/streams.py:231",
    "PyNcclCommunicator.__init__ distributed/device_communicators/pynccl.py:120",
    *told.NCCL_INIT[2:],
)
FIRST_SPINS = (
    (0.0, Does(stack=told.NCCL_INIT)),
    (40.0, Does(stack=NCCL_ALL_REDUCE, state="R", cpu_pct=100, gpu=SPINS)),
)
FIRST_WAITS = Does(stack=NCCL_ALL_REDUCE, cpu_pct=100, state="R")
COMPILES = Does(stack=told.NINJA, children=(("/usr/local/cuda/bin/nvcc -c k.cu", 100.0),))
GONE = Does(stack=told.LOADING, gone=-9)
OPTION = ", enable_symm_mem=True"
DP_OPTION = ", dp_size=2, enable_dp_attention=True"
IDLE = Does(stack=told.IDLE_BROADCAST, state="R", cpu_pct=100, writes=7000)
ON_NFS = Does(stack=told.MMAP, state="D", kernel="folio_wait_bit_common", cpu_pct=3)
OLD = ("_wait_for_scheduler_ready sglang/srt/entrypoints/engine.py:894", *told.WAITS_FOR_RANKS[3:])
WARMUP = {"launcher": told.SERVES, "launcher_threads": [told.WARMUP_THREAD], "seconds": 200}
ASKED = ('|INFO:     127.0.0.1:46472 - "GET /model_info HTTP/1.1" 200 OK',)
SYMM = Does(stack=told.SYMM_MEM)

# id: what fires, with its verdict; what nearly does
CASES = {
    "sglang-11275": (
        text(BEGIN, AT_ZERO, *NOTHING),
        "found",
        text(BEGIN, AT_ZERO, AT_END, *NOTHING),
    ),
    "sglang-29073": (
        live(8, SYMM, upto="capture"),
        "found",
        live(8, SYMM, command=f"{SERVER} --tp 8 --dp 2 --enable-dp-attention"),
    ),
    "flashinfer-3247": (
        live(4, SYMM, command=f"{SERVER} --tp 4 --dp 2 --enable-dp-attention"),
        "found",
        live(4, SYMM),
    ),
    "pytorch-189245": (
        live(2, Does(stack=told.BATON)),
        "found",
        live(2, {"TP0": Does(stack=told.BATON), "TP1": COMPILES}),
    ),
    "flashinfer-993": (
        live(2, Does(stack=told.JIT_LOCK)),
        "found",
        live(2, Does(stack=told.HUB_LOCK), upto="load-end"),
    ),
    "aiter-5266": (
        live(2, Does(stack=told.CAPTURE), lines=[BATON]),
        "found",
        live(2, COMPILES, lines=[BATON]),
    ),
    "sglang-39629": (
        text(TIMED_OUT, upto="load-end"),
        "found",
        text(TIMED_OUT, "| Exit code: -9", upto="load-end"),
    ),
    "sglang-29268": (
        text(DIED.format(-3), upto="load-end", args=DP_OPTION),
        "found",
        text(DIED.format(-3), upto="load-end"),
    ),
    "sglang-37806": (
        live(2, ON_NFS, upto="load-end"),
        "found",
        live(2, ON_NFS, upto="load-end", command=f"{SERVER} --weight-loader-disable-mmap"),
    ),
    "sglang-17970": (
        text(BAR.format(80, 51), BAR.format(100, 64), upto="load-end"),
        "undecided",
        text(BAR.format(100, 64), "TP1| Load weight end. elapsed=4 s, type=M", upto="load-end"),
    ),
    "sglang-20287": (
        live(
            2,
            {"TP0": Does(stack=told.BARRIER), "TP1": ((0.0, Does()), (20.0, GONE))},
            upto="load-end",
            launcher=OLD,
            version="0.5.9",
        ),
        "found",
        live(
            2,
            {"TP0": Does(stack=told.BARRIER), "TP1": ((0.0, Does()), (20.0, GONE))},
            upto="load-end",
            version="0.5.10.post1",
        ),
    ),
    "sglang-34233": (
        live(
            2,
            {"DP0 TP0": Does(stack=told.BARRIER), "DP0 TP1": ((0.0, Does()), (20.0, GONE))},
            upto="load-end",
            launcher=CONTROLLER,
        ),
        "found",
        live(2, Does(stack=told.BARRIER), upto="load-end", launcher=CONTROLLER),
    ),
    "sglang-3974": (
        live(
            2,
            Does(stack=told.TCP_STORE),
            upto="nccl",
            command="/venv/bin/python /venv/bin/torchrun --nproc-per-node 1 train.py",
        ),
        "found",
        live(2, Does(stack=told.TCP_STORE), upto="nccl"),
    ),
    "sglang-10693": (
        text(IN_USE.format(98, "EADDRINUSE", "address already in use"), upto="nccl"),
        "found",
        text(IN_USE.format(97, "EAFNOSUPPORT", "address family not supported"), upto="nccl"),
    ),
    "pytorch-15592": (
        text(LOOPBACK, upto="nccl", args=", nnodes=2"),
        "found",
        text(LOOPBACK, upto="nccl", args=", nnodes=1"),
    ),
    "nccl-2079": (
        live(2, FIRST_SPINS, upto="dist-end"),
        "found",
        live(2, FIRST_SPINS, upto="dist-end", command=f"{SERVER} --tp 4 --nnodes 2"),
    ),
    "hami-2641": (
        live(2, Does(stack=told.NCCL_INIT), upto="dist-end", lines=[HAMI]),
        "found",
        live(2, Does(stack=told.TCP_STORE), upto="dist-end", lines=[HAMI]),
    ),
    "nccl-286": (
        text(NO_ROUTE, upto="nccl"),
        "found",
        text(NO_ROUTE.replace("WARN", "INFO").replace("113(", "retrying ("), upto="nccl"),
    ),
    "sglang-1533": (
        text("RuntimeError: " + UNEQUAL, upto="nccl"),
        "found",
        text("TP1| " + UNEQUAL, upto="nccl"),
    ),
    "sglang-28855": (
        text("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
        "found",
        text("ValueError: Not enough host memory available. Requesting 40.00 GB"),
    ),
    "sglang-39713": (
        text("Exception: Capture cuda graph failed: CUDA error: out of memory"),
        "found",
        text("Exception: Capture cuda graph failed: CUDA error: invalid argument"),
    ),
    "sglang-4259": (
        text(SHM.format("nccl"), upto="dist-end"),
        "found",
        text(SHM.format("torch"), upto="dist-end"),
    ),
    "huggingface-hub-2399": (
        live(2, Does(stack=told.HUB_LOCK), upto="load-end", lines=[SOFT_LOCK]),
        "found",
        live(2, Does(stack=told.HUB), upto="load-end", lines=[SOFT_LOCK]),
    ),
    "llm-d-benchmark-1750": (
        text(
            "Still waiting to acquire lock on /c/.gitignore.lock (elapsed: 30.7 seconds)",
            upto="load-end",
        ),
        "found",
        text("Waiting for application startup.", upto="load-end"),
    ),
    "sglang-26568": (
        text(HOST_KV, upto="built"),
        "found",
        text(HOST_KV, "TP1| Tree cache initialized: source=default", upto="built"),
    ),
    "flashinfer-3295": (
        text(TUNES, upto="capture"),
        "found",
        text(TUNES, "TP0| FlashInfer autotune completed.", upto="capture"),
    ),
    "sglang-5580": (
        text(BEGIN, AT_ZERO, GEMM),
        "found",
        text(BEGIN, AT_ZERO, GEMM, AT_END, "TP0| Registering 2231 cuda graph addresses"),
    ),
    "sglang-26567": (
        text(GEMM, upto="prefill", args=", pp_size=4"),
        "found",
        text(GEMM, upto="prefill"),
    ),
    "sglang-18908": (
        live(
            2,
            {"TP0": Does(stack=told.CAPTURE), "TP1": Does(stack=told.CAPTURE_ALL_REDUCE)},
            command=f"{SERVER} --enable-symm-mem",
        ),
        "found",
        live(2, {"TP0": Does(stack=told.CAPTURE), "TP1": Does(stack=told.CAPTURE_ALL_REDUCE)}),
    ),
    "sglang-7341": (
        text(
            "| Initialization failed. warmup error: Traceback (most recent call last):",
            "AssertionError: res=<Response [502]>, res.text=''",
            upto="info",
        ),
        "found",
        text("AssertionError: res=<Response [200]>, res.text=''", upto="info"),
    ),
    "sglang-9814": (
        live(2, IDLE, upto="info", **WARMUP),
        "found",
        live(2, IDLE, upto="info", lines=ASKED, **WARMUP),
    ),
    "sglang-13243": (
        text(READ_TIMEOUT.format(600), upto="prefill"),
        "found",
        text(HUB_READ, upto="prefill"),
    ),
    "sglang-3708": (
        live(2, IDLE, upto=None, launcher=told.SERVES),
        "found",
        live(2, IDLE, upto=None),
    ),
}


def verdict(recording):
    return diagnose(derive(recording, SGLANG), SGLANG)


def judge(case, tmp_path):
    if not isinstance(case, str):
        return verdict(case(tmp_path))
    path = tmp_path / "server.log"
    path.write_text(case)
    return verdict(bare_log(path))


def found_in(diagnosis):
    """Return the verdict by the issue's id."""
    return {
        re.search(r"explain ([\w-]+)\)", each.advice[-1])[1]: each
        for each in diagnosis.findings
        if each.rule == "known-issue"
    }


def test_every_issue_has_a_case():
    assert set(CASES) == set(ISSUES)


@pytest.mark.parametrize("issue", CASES)
def test_an_issue_is_seen_where_it_was_told_about(issue, tmp_path):
    fires, expected, _ = CASES[issue]
    seen = found_in(judge(fires, tmp_path))
    assert set(seen) == {issue}
    finding = seen[issue]
    assert finding.verdict == expected
    assert ISSUES[issue].name in finding.title
    assert finding.title.startswith("looks like" if expected == "found" else "may be")
    assert finding.state is None
    assert finding.culprits == ()
    assert finding.because
    assert ISSUES[issue].url in finding.advice[-1]
    assert bool(finding.needs) == (expected == "undecided")


@pytest.mark.parametrize("issue", CASES)
def test_what_nearly_looks_like_an_issue_is_not_called_one(issue, tmp_path):
    assert issue not in found_in(judge(CASES[issue][2], tmp_path))


GOOD = [
    path.parent.name
    for path in sorted(RECORDINGS.glob("*/cause.toml"))
    if msgspec.toml.decode(path.read_bytes())["state"] == "ready"
]


@pytest.mark.parametrize("name", GOOD)
def test_no_issue_is_seen_at_any_moment_of_a_good_start(name):
    for snapshot, _, found in judged(load(RECORDINGS / name)):
        assert not found_in(found), snapshot


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*-good.log")), ids=lambda path: path.stem)
def test_no_issue_is_seen_in_a_good_log(path):
    assert not found_in(verdict(bare_log(path)))


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*hung.log")), ids=lambda path: path.stem)
def test_no_issue_is_made_of_a_stall_without_its_signature(path):
    assert not found_in(verdict(bare_log(path)))


@pytest.mark.parametrize("issue", [issue for issue in CASES if isinstance(CASES[issue][0], str)])
def test_no_issue_is_seen_in_a_log_that_becomes_ready_after_it(issue, tmp_path):
    ready = "|The server is fired up and ready to roll!\n"
    assert not found_in(judge(CASES[issue][0] + ready, tmp_path))


LOADS = Does(stack=told.COPY, cpu_pct=100, state="R", grows_per_s=256 << 20)


def test_a_launch_that_moves_is_told_of_what_ends_by_itself_and_of_no_hang(tmp_path):
    hidden = live(2, LOADS, lines=(BEGIN, AT_ZERO, *NOTHING))
    assert found_in(judge(hidden, tmp_path)) == {}
    compiles = live(2, COMPILES, lines=(BEGIN, AT_ZERO, GEMM))
    found = judge(compiles, tmp_path)
    assert (found.state, list(found_in(found))) == ("starting", ["sglang-5580"])


@pytest.mark.parametrize(
    "issue", [issue for issue in CASES if not isinstance(CASES[issue][0], str)]
)
def test_a_known_issue_changes_no_verdict(issue, tmp_path, monkeypatch):
    recording = CASES[issue][0](tmp_path)
    with_issues = verdict(recording)
    monkeypatch.setattr(known_issues, "load", lambda _: ())
    without = verdict(recording)
    for part in ("state", "phase", "culprits", "confidence", "still_s"):
        assert getattr(with_issues, part) == getattr(without, part), part


def test_stacks_and_processes_that_were_not_seen_leave_an_issue_undecided(tmp_path):
    build = live(8, SYMM, lines=STACK_IN_LOG, without=["stacks"])
    finding = found_in(judge(build, tmp_path))["sglang-29073"]
    assert finding.verdict == "undecided"
    assert any("stacks" in need for need in finding.needs)


def test_a_stack_that_the_watchdog_wrote_into_the_log_is_read(tmp_path):
    finding = found_in(judge(text(*STACK_IN_LOG, tp=8), tmp_path))["sglang-29073"]
    line = next(item for item in finding.because if item.log_line)
    assert line.text == STACK_IN_LOG[-1].strip()


def test_a_release_that_is_not_known_leaves_an_issue_undecided(tmp_path):
    doing = {"TP0": Does(stack=told.BARRIER), "TP1": ((0.0, Does()), (20.0, GONE))}
    for version, expected in ((None, "undecided"), ("0.5.9.post2", "found"), ("0.5.10rc1", None)):
        build = live(2, doing, upto="load-end", launcher=OLD, version=version)
        finding = found_in(judge(build, tmp_path)).get("sglang-20287")
        assert (finding.verdict if finding else None) == expected, version
        assert expected != "undecided" or any("0.5.10" in need for need in finding.needs)


def test_where_a_process_stood_before_it_ended_shows_no_issue(tmp_path):
    """The launcher and all ranks are zombies from some look on."""

    def build(into):
        doing = {"TP0": Does(stack=told.BARRIER), "TP1": ((0.0, Does()), (20.0, GONE))}
        recording = live(2, doing, upto="load-end", launcher=OLD, version="0.5.9")(into)
        return replace(recording, snapshots=tuple(map(ended, recording.snapshots)))

    def ended(snapshot):
        if snapshot.at_s < 60:
            return snapshot
        dead = tuple(replace(each, state="Z") for each in snapshot.processes.processes)
        processes = replace(snapshot.processes, processes=dead)
        return replace(snapshot, processes=processes, stacks=None)

    found = judge(build, tmp_path)
    assert found.state == "dead"
    assert not found_in(found)


def test_an_issue_of_the_launch_before_in_the_same_log_is_forgotten(tmp_path):
    assert found_in(judge(CASES["sglang-11275"][0], tmp_path))
    assert not found_in(judge(CASES["sglang-11275"][0] + text(upto="kv"), tmp_path))


def test_a_log_without_its_head_makes_no_issue_surer(tmp_path):
    for issue, (fires, _, _) in CASES.items():
        if isinstance(fires, str):
            for cut in (1, len(fires) // 2, len(fires) - 60):
                seen = found_in(judge(fires[cut:], tmp_path))
                assert all(
                    each.verdict == "undecided" for key, each in seen.items() if key != issue
                )


def test_a_capture_at_its_beginning_is_no_issue_where_the_log_lacks_its_head(tmp_path):
    tail = text(BEGIN, AT_ZERO).partition("\n")[2]
    assert "sglang-11275" not in found_in(judge(tail, tmp_path))


# --- The files


def test_every_fact_of_the_schema_is_worked_out_by_the_rule():
    assert set(rule._FACTS) == set(known_issues.FACTS)


@pytest.mark.parametrize("issue", ISSUES.values(), ids=list(ISSUES))
def test_an_issue_is_named_after_its_thread_and_says_what_it_takes(issue):
    assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", issue.id)
    assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+", issue.url)
    assert known_issues.find(issue.name) is issue
    assert issue.title
    assert not issue.title.endswith(".")
    assert issue.cause.endswith(".")
    assert issue.advice
    assert issue.seen_in


@pytest.mark.parametrize("issue", ISSUES.values(), ids=list(ISSUES))
def test_every_pattern_and_frame_of_an_issue_has_a_real_line_as_its_example(issue):
    frames = [
        Frame(match[1], match[2], int(match[3]))
        for example in issue.examples
        if (match := re.fullmatch(r"\s*([\w.]+) \(([^():]+):(\d+)\)", example))
    ]
    for pattern in issue.when.log:
        lines = [example for example in issue.examples if re.search(pattern, example)]
        assert lines, pattern
        assert all(needle(pattern) in line for line in lines)
    for pattern in issue.when.frames:
        assert any(matches(frame, pattern) for frame in frames), pattern
    used = [*issue.when.log, *issue.when.frames]
    assert len(issue.examples) >= len(used)
    assert bool(used) == bool(issue.examples)


@pytest.mark.parametrize("issue", ISSUES.values(), ids=list(ISSUES))
def test_what_an_issue_looks_for_exists_and_is_quick_to_look_for(issue):
    waits = {wait.id for wait in SGLANG.waits}
    assert {*issue.when.waits, *issue.unless.waits} <= waits
    for pattern in (*issue.when.log, *issue.unless.log):
        assert len(needle(pattern)) >= 8, pattern
    for pattern in (*issue.when.options, *issue.unless.options):
        # Of 13 kB of arguments; a pattern that begins with \b is tried at every word of them.
        assert len(needle(pattern)) >= 8, pattern
        assert not pattern.startswith("\\b"), pattern
    for frame in (*issue.when.frames, *issue.unless.frames):
        assert re.fullmatch(r"[\w./-]+\.py:\w+", frame), frame
    for example in issue.examples:
        assert not any(literal in f"] {example}" for literal in SGLANG.skip)


def test_ids_are_unique():
    assert len(known_issues.ids()) == len(set(known_issues.ids())) == len(ISSUES)


def test_a_misspelt_fact_or_key_is_an_error_that_names_it():
    with pytest.raises(msgspec.ValidationError, match="bar-at-nil"):
        msgspec.convert({"facts": ["bar-at-nil"]}, known_issues.Conditions)
    with pytest.raises(msgspec.ValidationError, match="frame"):
        msgspec.convert({"frame": ["a.py:b"]}, known_issues.Conditions)


# --- hangdoctor explain


@pytest.mark.parametrize("name", ["sglang-11275", "sglang#11275", "SGLang#11275"])
def test_explain_tells_an_issue_by_its_id_or_its_threads_name(name):
    told_so = explain(name)
    issue = ISSUES["sglang-11275"]
    for part in (issue.title, issue.cause, issue.url, *issue.advice, *issue.when.log):
        assert part in told_so


def test_explain_tells_every_issue_and_the_rule():
    assert "What it sees" in explain("known-issue")
    assert rule_id(RULES[0]) == "known-issue"
    for issue in ISSUES:
        assert explain(issue).startswith(f"{issue}: ")
