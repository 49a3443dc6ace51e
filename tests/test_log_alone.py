"""What is left of a launch is often a log's tail: the verdicts on such logs, of several releases.

The logs are written anew, in the literal words of the engine's lines.
"""

from __future__ import annotations

import re

import pytest

from hangdoctor import engines
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.logs.timeline import detect_engine
from hangdoctor.recording import bare_log

SGLANG = engines.load("sglang")
AT = "[2025-06-01 10:00:{second:02}{rank}]"
SRT = "/opt/venv/lib/python3.12/site-packages/sglang/srt"
ARGS = "|server_args=ServerArgs(model_path='/m', device='cuda', tp_size={tp}, nnodes=1{more})"
BEGIN = "Init torch distributed begin."
ENDS = "Init torch distributed ends. mem usage=1.25 GB"
LOADS = "Load weight begin. avail mem=77.43 GB"
SHARDS = "Loading safetensors checkpoint shards:  67% Completed | 12/18 [00:53<00:13,  2.21s/it]"
HIT = "Scheduler hit an exception: Traceback (most recent call last):"
GAVE_UP = (
    "ValueError: TP rank 1 could finish the model loading, but there are other ranks that didn't "
    "finish loading. It is likely due to unexpected failures (e.g., OOM) or a slow node."
)
NCCL = "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"
SIGQUIT = "|Received sigquit from a child process. It usually means the child failed."
WATCHDOG = "Watchdog timeout (self.watchdog_timeout=300)"
BATCH = "Prefill batch. #new-seq: 1, #new-token: 25, #cached-token: 0, token usage: 0.00"


def log(*lines):
    """Return a log: "TP0|words" is a line of a rank's, "|words" the launch's, "words" bare."""
    told = []
    for number, line in enumerate(lines):
        rank, bar, words = line.partition("|")
        stamped = bar and re.fullmatch(r"[A-Z0-9 ]*", rank)
        prefix = AT.format(second=number % 60, rank=f" {rank}" if rank else "") + " "
        told.append(prefix + words if stamped else line)
    return "\n".join(told) + "\n"


def raised(rank, *places, error=NCCL):
    """Return what a rank prints as it ends: its traceback through `file.py:function`."""
    yield f"{rank}|{HIT}"
    for place in places:
        file, _, function = place.partition(":")
        yield f'  File "{SRT}/{file}", line 1816, in {function}'
        yield "    call()"
    if error:
        yield error


def verdict(text, tmp_path, *, running=False):
    path = tmp_path / "server.log"
    path.write_text(text, encoding="utf-8")
    assert detect_engine(text.encode()) == "sglang"
    return diagnose(derive(bare_log(path, still_running=running), SGLANG), SGLANG)


def rule(found, name):
    return next((finding for finding in found.findings if finding.rule == name), None)


@pytest.mark.parametrize(
    "line",
    [
        f"{AT.format(second=1, rank=' DP0 TP3')} anything that a rank says",
        "[17:43:23 TP6] Load weight end. type=M, dtype=torch.bfloat16, avail mem=20.62 GB",
        f"{AT.format(second=1, rank='')} Decode batch. #running-req: 2, #token: 4078",
        f"{AT.format(second=1, rank='')} Received sigquit from a child proces. It usually means",
        f"(Worker pid=27, ip=10.1.4.2) {AT.format(second=1, rank=' TP1')} {HIT}",
        f'  File "{SRT}/managers/scheduler.py", line 9, in run_scheduler_process',
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -3).",
        "Process 309: sglang::scheduler_TP6",
        "Capturing batches (avail_mem=7.08 GB):   0%|          | 0/17 [00:00<?, ?it/s]",
    ],
)
def test_a_tail_of_a_log_is_recognised_by_what_only_this_engine_prints(line):
    assert detect_engine(f"some words before\n{line}\n".encode()) == "sglang"


@pytest.mark.parametrize(
    "line",
    [
        "INFO:     Application startup complete.",
        "(EngineCore_DP0 pid=77) INFO 10-22 09:33:49 [kv_cache_utils.py:1087] GPU KV cache size",
        "(Worker_TP0 pid=78) INFO 10-22 09:33:48 [monitor.py:34] torch.compile takes 39.60 s",
        "Loading safetensors checkpoint shards:  14% Completed | 14/99 [00:19<02:20,  1.65s/it]",
        '  File "/opt/venv/lib/python3.12/site-packages/vllm/v1/engine/utils.py", line 7, in wait',
        "[rank1]:[E222 08:31:50 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective",
        "[21:04:27] /src/runtime.cc:12: a line of another library",
    ],
)
def test_what_other_engines_and_libraries_print_makes_no_log_this_engines(line):
    assert detect_engine(f"{line}\n".encode()) is None


def test_the_words_with_which_a_rank_ends_are_enough_to_call_the_launch_dead(tmp_path):
    places = ("managers/scheduler.py:run_scheduler_process", "model_runner.py:load_model")
    found = verdict(log("TP3|Using x", *raised("TP2", *places)), tmp_path)
    assert (found.state, found.phase, found.culprits) == ("dead", "weights", ("TP2",))
    assert (found.confidence, NCCL in found.title) == ("high", True)


def test_a_launch_that_still_runs_without_a_rank_that_has_ended_hangs(tmp_path):
    found = verdict(log(*raised("TP2")), tmp_path, running=True)
    assert (found.state, found.culprits) == ("hung", ("TP2",))


def test_a_log_cut_within_the_traceback_is_dead_of_something_that_is_not_guessed(tmp_path):
    place = "distributed/parallel_state.py:initialize_model_parallel"
    found = verdict(log("TP2|Using x", *raised("TP2", place, error="")), tmp_path)
    assert (found.state, found.phase, found.confidence) == ("dead", "distributed-init", "medium")
    assert "ends within the traceback" in found.title


def test_a_rank_that_gave_up_waiting_is_no_culprit(tmp_path):
    found = verdict(log(*raised("TP1", "model_runner.py:load_model", error=GAVE_UP)), tmp_path)
    assert (found.state, found.phase, found.culprits) == ("dead", "weights", ())


def test_a_traceback_whose_rank_nothing_tells_blames_nobody(tmp_path):
    said = "2025-06-01 10:00:00 ERROR 125 [ DP10 TP10 EP10 scheduler.py:2655] "
    found = verdict(f"{said}{HIT}\n{NCCL}\n", tmp_path)
    assert (found.state, found.culprits) == ("dead", ())
    alone = log(ARGS.format(tp=1, more=""), f"|{BEGIN}", *raised(""))
    assert verdict(alone, tmp_path).culprits == ("TP0",)


def test_a_traceback_that_was_caught_ends_nothing(tmp_path):
    caught = log(f"TP0|{LOADS}", "TP0|Traceback (most recent call last):", "KeyError: 'x'")
    found = verdict(caught, tmp_path)
    assert (found.state, found.phase) == ("unknown", "weights")
    assert "KeyError: 'x'" in found.title


@pytest.mark.parametrize(
    "cause",
    [
        "Fatal Python error: Segmentation fault",
        "Fatal Python error: Bus error",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "Memory access fault by GPU node-2 on address (nil). Reason: unknown",
    ],
)
def test_a_fault_ends_the_launch_though_no_other_line_says_so(cause, tmp_path):
    found = verdict(log(f"TP0|{LOADS}", SHARDS, cause), tmp_path)
    assert (found.state, found.phase, found.culprits) == ("dead", "weights", ())
    assert cause in found.title


def test_the_error_of_a_traceback_whose_beginning_was_cut_off_is_what_it_ended_of(tmp_path):
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.00 MiB."
    found = verdict(log(f'  File "{SRT}/x.py", line 3, in forward', error, SIGQUIT), tmp_path)
    assert (found.state, found.title.endswith(error)) == ("dead", True)


def test_a_traceback_without_its_head_tells_error_and_phase_and_no_end(tmp_path):
    frames = [f'  File "{SRT}/model_runner.py", line 3, in load_model', "    self.model = get()"]
    found = verdict("\n".join([*frames, "KeyError: 'w2_weight_scale'"]), tmp_path)
    assert (found.state, found.phase, found.culprits) == ("unknown", "weights", ())
    assert "KeyError: 'w2_weight_scale'" in found.title


def test_a_stack_that_the_soft_watchdog_prints_tells_the_phase_where_no_line_does(tmp_path):
    soft = "TP2|Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)"
    dump = ["TP2|Pyspy dump for PID 47:", "Process 47: sglang::scheduler_TP2"]
    frames = ['Thread 47 (active): "MainThread"', "    capture (cuda_graph_runner.py:867)"]
    found = verdict(log(*dump, *frames, "    run (scheduler.py:3300)", soft), tmp_path)
    assert (found.state, found.phase) == ("unknown", "graph-capture")
    assert "stops in graph-capture" in found.title


def test_a_kill_comes_before_the_errors_that_follow_from_it(tmp_path):
    trace = ["Traceback (most recent call last):", f'  File "{SRT}/x.py", line 3, in f', "EOFError"]
    dead = ["|Rank 0 scheduler is dead. Please check if there are relevant logs."]
    found = verdict(log(*dead, "|Exit code: -9", *trace), tmp_path)
    ended = rule(found, "launch-ended")
    assert "killed by SIGKILL: Rank 0 scheduler is dead" in ended.title
    assert "dmesg" in ended.advice[0]


def test_a_warm_up_that_failed_tells_its_error(tmp_path):
    said = "|Initialization failed. warmup error: Traceback (most recent call last):"
    error = "AssertionError: res=<Response [502]>, res.text=''"
    found = verdict(log(said, f'  File "{SRT}/x.py", line 3, in warm', error), tmp_path)
    assert (found.state, found.phase) == ("dead", "warmup")
    assert found.title.endswith(error)


@pytest.mark.parametrize("tp", [2, 8])
def test_ranks_that_a_release_does_not_let_print_are_not_behind(tp, tmp_path):
    first = [f"TP0|{line}" for line in (BEGIN, ENDS, LOADS)]
    found = verdict(log(ARGS.format(tp=tp, more=""), *first, SHARDS), tmp_path)
    assert (found.state, found.phase, found.culprits) == ("unknown", "weights", ())
    assert "lack" not in found.title


def test_before_the_ranks_have_met_the_silence_of_all_but_the_first_blames_nobody(tmp_path):
    text = log(ARGS.format(tp=4, more=""), f"TP0|{BEGIN}", "TP0|sglang is using nccl==2.27.3")
    found = verdict(text, tmp_path)
    assert (found.state, found.phase, found.culprits) == ("unknown", "distributed-init", ())
    assert "TP1-TP3 have printed nothing" in found.title
    stops = rule(found, "log-stops")
    assert any("on the first rank only" in need for need in stops.needs)


def test_arguments_of_a_release_in_which_every_rank_prints_make_the_silent_one_the_suspect(
    tmp_path,
):
    args = ARGS.format(tp=2, more=", sampling_defaults='model'")
    found = verdict(log(args, f"TP0|{BEGIN}"), tmp_path)
    assert (found.state, found.culprits) == ("unknown", ("TP1",))


def test_the_first_rank_of_a_stage_that_is_behind_is_named_where_the_others_print_nothing(tmp_path):
    args = ARGS.format(tp=2, more=", pp_size=2")
    found = verdict(log(args, f"PP0 TP0|{BEGIN}", f"PP0 TP0|{ENDS}", f"PP1 TP0|{BEGIN}"), tmp_path)
    assert (found.state, found.culprits) == ("unknown", ("PP1 TP0",))


def test_an_exception_that_a_launch_came_up_after_is_not_its_end(tmp_path):
    ready = "|The server is fired up and ready to roll!"
    assert verdict(log(*raised("TP0"), ready), tmp_path).state == "ready"
    after = verdict(log(ready, *raised("TP0")), tmp_path)
    assert (after.state, after.phase) == ("dead", "ready")


@pytest.mark.parametrize(("name", "state"), [("Exception: ", "dead"), ("", "unknown")])
def test_a_capture_that_failed_ends_a_rank_where_it_is_raised(name, state, tmp_path):
    text = log(f"TP0|{LOADS}", f"{name}Capture cuda graph failed: CUDA error: invalid argument")
    assert verdict(text, tmp_path).state == state


def test_where_others_print_too_the_silent_rank_is_named(tmp_path):
    heard = [f"TP{rank}|{BEGIN}" for rank in (0, 1, 3)]
    found = verdict(log(ARGS.format(tp=4, more=""), *heard), tmp_path)
    assert (found.state, found.culprits) == ("unknown", ("TP2",))


def test_a_replica_does_not_show_how_far_the_ranks_of_another_are(tmp_path):
    begun = [f"DP{dp} TP{tp}|{BEGIN}" for dp in (0, 1) for tp in (0, 1) if (dp, tp) != (1, 1)]
    ends = [f"DP0 TP{tp}|{ENDS}" for tp in (0, 1)]
    found = verdict(log(ARGS.format(tp=2, more=", dp_size=2"), *begun, *ends), tmp_path)
    assert found.culprits == ("DP1 TP0", "DP1 TP1")


def test_the_batches_of_a_server_that_serves_are_no_warm_up(tmp_path):
    found = verdict(log(f"TP0|{BATCH}", f"TP0|{BATCH}"), tmp_path)
    assert (found.state, found.phase) == ("unknown", None)
    assert "a server was at work up to line 2" in found.title
    asked = '|INFO:     127.0.0.1:46472 - "GET /model_info HTTP/1.1" 200 OK'
    assert verdict(log(f"TP0|{BATCH}", asked), tmp_path).phase is None
    started = "|INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)"
    assert verdict(log(started, f"TP0|{BATCH}"), tmp_path).phase == "warmup"


def test_a_watchdog_that_got_no_stacks_says_how_to_get_them(tmp_path):
    blind = "TP2|Pyspy failed to dump PID 546. Error: /bin/sh: 1: py-spy: not found"
    found = verdict(log(f"TP2|{WATCHDOG}", blind), tmp_path)
    assert found.state == "hung"
    advice = rule(found, "wait-given-up").advice
    assert "named rank" not in advice[0]
    assert "py-spy" in advice[1]
    assert len(rule(verdict(log(f"TP2|{WATCHDOG}"), tmp_path), "wait-given-up").advice) == 1


def test_stamps_without_a_date_are_those_of_old_releases(tmp_path):
    old = f"[17:43:23 TP6] {LOADS}\n[17:45:23 TP7] Load weight end. type=M, avail mem=20.62 GB\n"
    found = verdict(old, tmp_path)
    assert (found.state, found.phase) == ("unknown", "weights")


def test_a_traceback_behind_rays_prefix_is_read(tmp_path):
    lines = log(*raised("TP1", "model_runner.py:init_torch_distributed")).splitlines()
    text = "".join(f"(WorkerDict pid=2782, ip=10.1.4.2) {line}\n" for line in lines)
    found = verdict(text, tmp_path)
    assert (found.state, found.phase, found.culprits) == ("dead", "distributed-init", ("TP1",))


FAULT = "Fatal Python error: Segmentation fault"
TERMINATE = "terminate called after throwing an instance of 'std::system_error'"
ROCM = "Memory access fault by GPU node-2 on address (nil). Reason: unknown"
TRACED = ("Traceback (most recent call last):", '  File "/usr/lib/x.py", line 3, in f', "    f()")
READY = "|The server is fired up and ready to roll!"
CAPTURES = "Capture cuda graph begin. This can take up to several minutes. avail mem=9.00 GB"
CAPTURE_RAISED = "Exception: Capture cuda graph failed: CUDA out of memory"
POOL = "KV Cache is allocated. #tokens: 10716828, KV size: 68.99 GB"
TWO = ARGS.format(tp=2, more="")
GLOO = "attempt 1: Timed out waiting 5000ms for recv operation to complete, once more"


def fault(*places):
    """Return what faulthandler prints as a process ends, outermost frame last."""
    yield from (FAULT, "", "Current thread 0x00007f0000000002 (most recent call first):")
    yield from (f'  File "/usr/lib/{path}", line 10 in {function}' for path, function in places)
    yield from ('  File "<string>", line 1 in <module>', "", "Extension modules: numpy (total: 1)")


RANKS_OWN = tuple(
    fault(
        ("sglang/srt/model_loader/loader.py", "load_model"),
        ("sglang/srt/managers/scheduler.py", "run_scheduler_process"),
    )
)
HELPERS = tuple(fault(("torch/_inductor/compile_worker/__main__.py", "main")))


@pytest.mark.parametrize(
    "words", [(FAULT,), (TERMINATE,), (ROCM,), HELPERS], ids=("python", "c++", "rocm", "helper's")
)
def test_a_process_that_ends_is_not_the_launchs_end_where_the_launch_goes_on(words, tmp_path):
    start = (TWO, f"TP0|{LOADS}", f"TP1|{LOADS}")
    later = verdict(log(*start, *words, f"TP0|{POOL}", f"TP1|{POOL}"), tmp_path)
    assert (later.state, later.culprits) == ("unknown", ())
    assert f"what that ended the log does not tell: {words[0]}" in later.title
    assert verdict(log(*start, *words, f"TP0|{SHARDS}", SHARDS), tmp_path).state == "unknown"
    assert verdict(log(*start, *words, READY), tmp_path).state == "ready"
    served = verdict(log(*start, READY, *words, f"TP0|{BATCH}"), tmp_path)
    assert served.state == "ready"
    tail = verdict(log(f"TP0|{BATCH}", *words, f"TP0|{BATCH}"), tmp_path)
    assert tail.state == "unknown"


def test_the_stack_of_a_fault_tells_a_rank_from_a_helper(tmp_path):
    start = (TWO, f"TP0|{LOADS}", f"TP1|{LOADS}")
    assert verdict(log(*start, *RANKS_OWN), tmp_path).state == "dead"
    assert verdict(log(*start, *RANKS_OWN, f"TP0|{POOL}"), tmp_path).state == "dead"
    assert verdict(log(*start, *HELPERS), tmp_path).state == "unknown"
    assert verdict(log(*start, TERMINATE), tmp_path).state == "dead"


def test_a_rank_that_goes_on_has_not_ended_by_what_it_logged(tmp_path):
    start = (TWO, f"TP0|{LOADS}", f"TP1|{LOADS}")
    caught = verdict(log(*start, *raised("TP1"), f"TP1|{POOL}"), tmp_path)
    assert (caught.state, rule(caught, "exception-in-rank")) == ("unknown", None)
    assert "NCCL" not in caught.title
    peer = verdict(log(*start, *raised("TP1"), f"TP0|{POOL}"), tmp_path)
    assert (peer.state, peer.culprits) == ("dead", ("TP1",))
    again = log(*start, f"TP0|{CAPTURES}", CAPTURE_RAISED, f"TP0|{CAPTURES}")
    assert verdict(again, tmp_path).state == "unknown"


def test_nobody_is_blamed_for_an_exception_that_names_no_rank(tmp_path):
    start = (TWO, f"TP0|{LOADS}", f"TP1|{LOADS}", f"TP0|{CAPTURES}")
    found = verdict(log(*start, CAPTURE_RAISED), tmp_path)
    assert (found.state, found.culprits) == ("dead", ())


def test_an_exception_that_was_caught_is_not_what_a_launch_ended_of(tmp_path):
    caught = ("TP0|Ignore import error when loading x", *TRACED, "ImportError: no x")
    killed = "|Rank 1 scheduler died during initialization (exit code: -9)."
    end = (f"TP0|{LOADS}", f"TP1|{LOADS}", killed)
    found = verdict(log(TWO, f"TP0|{BEGIN}", *caught, *end), tmp_path)
    assert (found.state, found.culprits) == ("dead", ("TP1",))
    assert "ImportError" not in found.title
    assert "SIGKILL" in found.title


def test_a_wait_that_was_given_up_and_begun_again_is_not_hung(tmp_path):
    start = (TWO, f"TP0|{LOADS}", f"TP1|{LOADS}")
    assert verdict(log(*start, f"TP0|{GLOO}"), tmp_path).state == "hung"
    assert verdict(log(*start, f"TP0|{GLOO}", SHARDS), tmp_path).state == "unknown"
    assert verdict(log(*start, f"TP0|{GLOO}", f"TP0|{POOL}"), tmp_path).state == "unknown"


@pytest.mark.parametrize(
    "end",
    [
        (SIGQUIT,),
        ("|Rank 0 scheduler is dead. Please check if there are relevant logs.", "|Exit code: 1"),
        tuple(raised("TP0")),
    ],
)
def test_a_launch_that_ended_before_its_ranks_began_is_over_where_the_next_one_begins(
    end, tmp_path
):
    begun = verdict(log(TWO, *end, TWO), tmp_path)
    assert (begun.state, begun.phase) == ("unknown", "start")
    assert verdict(log(*end, TWO, f"TP0|{LOADS}"), tmp_path).state == "unknown"
    assert verdict(log(TWO, *end, TWO, f"TP0|{LOADS}", READY), tmp_path).state == "ready"


def test_where_every_rank_comes_further_after_the_launchers_last_words_another_launch_follows(
    tmp_path,
):
    ended = (TWO, f"TP0|{LOADS}", f"TP1|{LOADS}", SIGQUIT)
    assert verdict(log(*ended, f"TP0|{POOL}"), tmp_path).state == "dead"
    assert verdict(log(*ended, f"TP0|{BEGIN}", f"TP1|{BEGIN}"), tmp_path).state == "unknown"


@pytest.mark.parametrize(
    "words",
    [
        "|ninja has ended. Exit code: 0",
        "TP0|NVSHMEM Initialization failed. Falling back to NCCL.",
        "|the exporter says: SIGTERM received",
        f"TP0|a compile worker has ended: {FAULT}; its work is done here",
        "|Subprocess exporter (pid=12) crashed with exit code 1. It is begun again",
    ],
)
def test_words_that_others_use_too_are_not_the_engines_last(words, tmp_path):
    assert verdict(log(TWO, f"TP0|{LOADS}", words), tmp_path).state == "unknown"


GLOO_LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by "
    "peer [127.0.0.1]:21912"
)
BEGAN = (TWO, f"TP0|{LOADS}", f"TP1|{LOADS}")
STORE_LOST = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"
VALUE = "ValueError: too many values to unpack (expected 2)"


@pytest.mark.parametrize(
    "error",
    [
        GLOO_LOST,
        GLOO_LOST.replace("Connection closed by peer", "Read error") + ": Connection reset by peer",
        GLOO_LOST + ". This is typically caused by a remote worker crashing.",
        STORE_LOST,
        "torch.distributed.DistNetworkError: Connection reset by peer",
        "RuntimeError: NCCL error: remote process exited or there was a network error",
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process "
            "exiting prematurely."
        ),
    ],
)
def test_of_two_ranks_the_one_that_the_other_lost_is_to_blame(error, tmp_path):
    found = verdict(log(*BEGAN, *raised("TP0", error=error), SIGQUIT), tmp_path)
    assert (found.state, found.culprits, found.confidence) == ("dead", ("TP1",), "medium")
    assert found.title.endswith("TP1 ended without a word, and TP0 lost its connection to it")
    advice = str(found.findings[0].advice)
    assert "first exception" not in advice
    assert "traceback first" not in advice


@pytest.mark.parametrize(
    "error",
    [
        (
            "requests.exceptions.ConnectionError: ('Connection aborted.', "
            "ConnectionResetError(104, 'Connection reset by peer'))"
        ),
        (
            "urllib3.exceptions.ProtocolError: ('Connection broken: ConnectionResetError(104, "
            "'Connection reset by peer')', ConnectionResetError(104, 'Connection reset by peer'))"
        ),
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "httpx.RemoteProtocolError: peer closed connection without sending complete message body",
        "RuntimeError: Data processing error: Broken pipe while reading shard 3",
        NCCL,
    ],
)
def test_a_connection_to_a_server_outside_is_no_peer(error, tmp_path):
    found = verdict(log(*BEGAN, *raised("TP0", error=error), SIGQUIT), tmp_path)
    assert (found.state, found.culprits, found.confidence) == ("dead", ("TP0",), "high")
    assert error in found.title


@pytest.mark.parametrize("first", ["TP0", "TP1"])
def test_a_rank_that_raised_its_own_error_is_to_blame_for_those_that_lost_it(first, tmp_path):
    parts = {"TP0": raised("TP0", error=GLOO_LOST), "TP1": raised("TP1", error=VALUE)}
    lines = [*parts.pop(first), *(line for part in parts.values() for line in part)]
    for end in ((SIGQUIT,), ()):
        found = verdict(log(*BEGAN, *lines, *end), tmp_path)
        assert (found.culprits, found.confidence) == (("TP1",), "high")
        assert VALUE in found.title


EIGHT = tuple(f"TP{number}" for number in range(8))


@pytest.mark.parametrize(
    ("names", "more"),
    [
        (EIGHT, ""),
        ([f"DP{n // 4} TP{n}" for n in range(8)], ", dp_size=2, enable_dp_attention=True"),
    ],
)
def test_of_eight_ranks_the_only_one_that_raised_nothing_is_to_blame(names, more, tmp_path):
    start = (ARGS.format(tp=8, more=more), *(f"{name}|{LOADS}" for name in names))
    losses = [line for name in names if "TP3" not in name for line in raised(name, error=GLOO_LOST)]
    found = verdict(log(*start, *losses, SIGQUIT), tmp_path)
    assert (found.state, found.culprits, found.confidence) == ("dead", (names[3],), "medium")


def test_of_eight_ranks_of_which_one_lost_a_peer_nobody_is_guessed(tmp_path):
    start = (ARGS.format(tp=8, more=""), *(f"{name}|{LOADS}" for name in EIGHT))
    loss = tuple(raised("TP0", error=GLOO_LOST))
    found = verdict(log(*start, *loss, SIGQUIT), tmp_path)
    assert (found.state, found.culprits, found.confidence) == ("dead", (), "high")
    assert found.title.endswith("TP0 lost its connection to a peer, which had ended without a word")
    assert "TP1-TP7" in str(found.findings[0].needs)
    came = [f"{name}|{POOL}" for name in EIGHT if name != "TP5"]
    found = verdict(log(*start, *came, *loss, SIGQUIT), tmp_path)
    assert (found.state, found.culprits, found.confidence) == ("dead", ("TP5",), "low")
    assert "to a peer (perhaps TP5), which" in found.title


@pytest.mark.parametrize(
    ("words", "culprits"),
    [
        (("|Rank 3 scheduler died during initialization (exit code: 1).",), ("TP3",)),
        (("|Rank 3 scheduler is dead. Please check if", "|Exit code: 1"), ("TP3",)),
        (("|Subprocess scheduler_3 (pid=9) crashed with exit code 1. Triggering",), ("TP3",)),
        (("|Rank 0 scheduler is dead. Please check if", "|Exit code: 0"), ()),
    ],
)
def test_the_launchers_word_on_a_rank_counts_but_on_one_that_had_lost_another(
    words, culprits, tmp_path
):
    start = (ARGS.format(tp=8, more=""), *(f"{name}|{LOADS}" for name in EIGHT))
    found = verdict(log(*start, *raised("TP0", error=GLOO_LOST), *words), tmp_path)
    assert (found.state, found.culprits, found.confidence) == ("dead", culprits, "high")
    if culprits:
        assert "TP3 ended without a word (exit status 1)" in found.title


def test_a_rank_that_aborts_after_anothers_error_is_not_to_blame_for_it(tmp_path):
    aborted = "|Subprocess scheduler_0 (pid=9) crashed with exit code -6. Triggering"
    found = verdict(log(*BEGAN, *raised("TP1", error=VALUE), aborted), tmp_path)
    assert (found.culprits, VALUE in found.title) == (("TP1",), True)
    found = verdict(log(*BEGAN, *raised("TP1", error=GLOO_LOST), aborted), tmp_path)
    assert (found.culprits, found.confidence) == (("TP0",), "medium")
    assert "TP0 was killed by SIGABRT, and TP1 lost its connection to it" in found.title


@pytest.mark.parametrize("end", [SIGQUIT, "|SIGTERM received. signum=15 frame=None."])
def test_a_rank_that_lost_its_peer_as_the_launch_ended_tells_nothing_of_the_peer(end, tmp_path):
    found = verdict(log(*BEGAN, end, *raised("TP0", error=GLOO_LOST)), tmp_path)
    assert (found.state, found.culprits) == ("dead", ())
    assert "without a word" not in found.title
    assert "Connection closed" not in found.title


def test_an_exception_without_a_rank_before_the_loss_is_a_word(tmp_path):
    bare = ("Process Process-2:", *TRACED, VALUE)
    found = verdict(log(*BEGAN, *bare, *raised("TP0", error=GLOO_LOST), SIGQUIT), tmp_path)
    assert found.culprits == ("TP1",)
    assert f"TP1 ended ({VALUE}), and TP0 lost its connection to it" in found.title


def test_a_tail_or_another_nodes_log_does_not_tell_which_rank_raised_nothing(tmp_path):
    loss = tuple(raised("TP0", error=GLOO_LOST))
    tail = verdict(log(f"TP0|{LOADS}", f"TP1|{LOADS}", *loss, SIGQUIT), tmp_path)
    assert (tail.state, tail.culprits) == ("dead", ())
    args = ARGS.format(tp=4, more="").replace("nnodes=1", "nnodes=2, node_rank=0")
    node = verdict(log(args, f"TP0|{LOADS}", f"TP1|{LOADS}", *loss, SIGQUIT), tmp_path)
    assert (node.state, node.culprits) == ("dead", ())
    assert node.title.endswith("to a peer, which had ended, or cannot be reached")


def test_where_only_the_first_rank_prints_the_other_would_have_printed_its_exception(tmp_path):
    old = log(TWO, f"TP0|{BEGIN}", f"TP0|{LOADS}", *raised("TP0", error=GLOO_LOST), SIGQUIT)
    found = verdict(old, tmp_path)
    assert (found.culprits, found.confidence) == (("TP1",), "medium")


def test_a_fault_that_the_log_holds_is_a_word(tmp_path):
    found = verdict(log(*BEGAN, FAULT, *raised("TP0", error=GLOO_LOST), SIGQUIT), tmp_path)
    assert found.culprits == ("TP1",)
    assert f"TP1 ended ({FAULT}), and TP0 lost its connection to it" in found.title


def test_a_launch_that_still_runs_without_the_rank_that_another_lost_hangs(tmp_path):
    found = verdict(log(*BEGAN, *raised("TP0", error=GLOO_LOST)), tmp_path, running=True)
    assert (found.state, found.culprits, found.confidence) == ("hung", ("TP1",), "medium")


def test_a_replica_that_lost_nobody_is_not_asked(tmp_path):
    args = ARGS.format(tp=2, more=", dp_size=2")
    names = ("DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1")
    loss = raised("DP1 TP0", error=GLOO_LOST)
    found = verdict(log(args, *(f"{name}|{LOADS}" for name in names), *loss, SIGQUIT), tmp_path)
    assert (found.state, found.culprits) == ("dead", ("DP1 TP1",))


def test_a_rank_whose_traceback_the_log_cuts_short_has_not_ended_without_a_word(tmp_path):
    start = (ARGS.format(tp=8, more=""), *(f"{name}|{LOADS}" for name in EIGHT))
    cut = list(raised("TP3", "managers/scheduler.py:run_scheduler_process", error=""))
    for losers in (EIGHT[:1], [name for name in EIGHT if name != "TP3"]):
        lost = [line for name in losers for line in raised(name, error=GLOO_LOST)]
        found = verdict(log(*start, *lost, *cut), tmp_path)
        assert (found.state, found.culprits) == ("dead", ())
        assert found.title.endswith("which had ended: the log stops within what TP3 raised")
        assert "what TP3 raised" in str(found.findings[0].needs)


INTERRUPTED = (*TRACED, "KeyboardInterrupt")


@pytest.mark.parametrize(
    "lines",
    [
        ("Process SpawnProcess-1:", *INTERRUPTED, *raised("TP1", error=GLOO_LOST), SIGQUIT),
        ("^CProcess SpawnProcess-1:", *INTERRUPTED, *raised("TP1", error=GLOO_LOST)),
        (*raised("TP1", error=GLOO_LOST), "Process SpawnProcess-1:", *INTERRUPTED, SIGQUIT),
        ("INFO:     Shutting down", *raised("TP1", error=GLOO_LOST)),
    ],
)
def test_who_presses_ctrl_c_ends_every_rank_and_no_rank_is_to_blame(lines, tmp_path):
    found = verdict(log(*BEGAN, *lines), tmp_path)
    assert (found.state, found.culprits) == ("dead", ())
    assert "connection" not in found.title


@pytest.mark.parametrize(
    ("more", "names", "number", "blamed"),
    [
        (", nnodes=2, node_rank=1", ("TP4", "TP5", "TP6", "TP7"), 1, ("TP5",)),
        (", pp_size=2", [f"PP{n // 8} TP{n % 8}" for n in range(16)], 9, ("PP1 TP1",)),
        (", ep_size=8", [f"TP{n} EP{n}" for n in range(8)], 3, ("TP3 EP3",)),
        # The launcher's only process is the controller.
        (", dp_size=2", [f"DP{n // 8} TP{n % 8}" for n in range(16)], 0, ()),
    ],
)
def test_the_launcher_counts_the_ranks_of_its_node_stage_by_stage(
    more, names, number, blamed, tmp_path
):
    args = ARGS.format(tp=8, more=more)
    args = args.replace("nnodes=1, nnodes", "nnodes")
    start = (args, *(f"{name}|{LOADS}" for name in names))
    died = f"|Rank {number} scheduler died during initialization (exit code: 1)."
    assert verdict(log(*start, died), tmp_path).culprits == blamed
    found = verdict(log(*start, *raised(names[2], error=GLOO_LOST), died), tmp_path)
    assert (found.state, found.culprits) == ("dead", blamed)


STORE_GET = (
    "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving "
    "ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: "
)


def test_a_rank_to_which_the_store_gave_no_answer_is_not_to_blame(tmp_path):
    lost = (*raised("TP1", error=STORE_GET + "Connection reset by peer. This may"), SIGQUIT)
    found = verdict(log(*BEGAN, *lost), tmp_path)
    assert (found.culprits, found.confidence) == (("TP0",), "medium")
    connect = "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms "
    for error in (
        STORE_GET + "wait timeout after 600000ms, keys: /default_pg/0//cuda//0",
        connect + "while trying to connect to (10.0.0.1, 5000).",
    ):
        found = verdict(log(*BEGAN, *raised("TP1", error=error), SIGQUIT), tmp_path)
        assert (found.state, found.culprits) == ("dead", ())
        assert error[:120] in found.title


HANDLING = "During handling of the above exception, another exception occurred:"
CAUSE = "The above exception was the direct cause of the following exception:"


def chained(rank, first, words, then):
    """Return what a rank prints that raises anew as it handles its first exception."""
    return (*raised(rank, error=first), "", words, "", *TRACED, then, "")


@pytest.mark.parametrize("words", [HANDLING, CAUSE])
def test_what_was_raised_for_the_loss_of_a_peer_is_no_error_of_its_own(words, tmp_path):
    lost = chained("TP0", GLOO_LOST, words, "RuntimeError: Failed to load the model")
    found = verdict(log(*BEGAN, *lost, SIGQUIT), tmp_path)
    assert (found.culprits, found.confidence) == (("TP1",), "medium")
    again = (*lost, f"TP0|{POOL}", f"TP1|{POOL}", *raised("TP0", error=VALUE))  # it was caught
    assert verdict(log(*BEGAN, *again, SIGQUIT), tmp_path).culprits == ("TP0",)


def test_who_lost_a_peer_as_it_handled_its_own_error_may_have_failed_by_that(tmp_path):
    lost = chained("TP0", VALUE, HANDLING, GLOO_LOST)
    found = verdict(log(*BEGAN, *lost, SIGQUIT), tmp_path)
    assert (found.state, found.culprits) == ("dead", ())
    assert found.title.endswith(f"to a peer, and TP0 had raised {VALUE} before")
    assert "whether TP0 failed by what it raised" in str(found.findings[0].needs)


def test_where_all_ranks_lost_a_peer_none_is_said_to_live(tmp_path):
    lost = [line for name in ("TP0", "TP1") for line in raised(name, error=GLOO_LOST)]
    found = verdict(log(*BEGAN, *lost, SIGQUIT), tmp_path)
    assert (found.state, found.culprits) == ("dead", ())
    assert found.title.endswith("TP0 and TP1 lost their connections to one another")
