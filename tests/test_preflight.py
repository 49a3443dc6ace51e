"""What preflight says can be seen, with rights that are really missing."""

from __future__ import annotations

import inspect
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

import msgspec
import nvml
import pytest
import restricted
from nvml import card

from hangdoctor import engines
from hangdoctor.collect import procfs, rights
from hangdoctor.collect.rights import Answers, Dumps, Place, Rights
from hangdoctor.diagnose import diagnose
from hangdoctor.facts.fold import derive
from hangdoctor.model import Gpu, GpuProcess, Gpus, Missing, Processes, Stacks
from hangdoctor.preflight import JUDGED, Target, container, judge
from hangdoctor.recording import load
from hangdoctor.render.preflight import to_text
from hangdoctor.rules import RULES, rule_id

RECORDINGS = Path(__file__).parent / "recordings"
sys.path.insert(0, str(RECORDINGS))
import transform  # noqa: E402  # test material beside the recordings

TITLES = ("sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer")
SGLANG = engines.load("sglang")
LIMIT_S = 120
FULL = 0x1FFFFFFFFFF
HOSTILE = "\x1b[2J\u202egnp\x07"
replace = msgspec.structs.replace


@pytest.fixture
def place():
    """A directory that everybody can enter; a test's own is closed to others."""
    with tempfile.TemporaryDirectory(prefix="hangdoctor-preflight-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def launch(program, tmp_path):
    """Start a launch in name only whose output is a file."""

    def start(**options):
        with (tmp_path / "server.log").open("wb") as log:
            return program("launch_server", *TITLES, stdout=log, stderr=log, **options)

    return start


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "hangdoctor", "preflight", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=restricted.ROOT,
        **options,
    )  # fmt: skip


def sources_of(done):
    assert "Traceback" not in done.stderr
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["open"] is (done.returncode == 0)
    return {each["id"]: each for each in report["sources"]}


def look(place, *arguments, **restrictions):
    done = subprocess.run(
        restricted.hangdoctor(place, "preflight", "--format=json", *arguments, **restrictions),
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    return done.returncode, sources_of(done)


def states(sources, *names):
    return {name: sources[name]["state"] for name in names}


# Real processes, real rights


def test_of_a_launch_of_ones_own_all_main_sources_are_open(launch):
    launcher = launch()
    done = run(launcher.pid, "--format=json")
    found = sources_of(done)
    main = {name for name, each in found.items() if each["main"]}
    assert main >= {"stacks", "io", "log"}
    assert set(states(found, "stacks", "io", "log", "fd", "syscall").values()) == {"open"}
    assert "4 of 4 processes dumped" in found["stacks"]["seen"]
    assert found["log"]["seen"].endswith("/server.log")
    assert json.loads(done.stdout)["processes"][str(launcher.pid)] == "launcher"
    assert done.stderr == ""


@pytest.mark.skipif(not restricted.IS_ROOT, reason="only root can become another user")
def test_another_users_launch_is_closed_and_the_command_is_named(launch, place):
    launcher = launch()
    code, found = look(place, launcher.pid, user=restricted.NOBODY)
    assert code == 1
    closed = ("stacks", "io", "log", "fd", "syscall", "wchan", "other-users")
    assert set(states(found, *closed).values()) == {"closed"}
    assert "waiting-for-rank-elsewhere" in found["stacks"]["loses"]
    assert "waiting-for-rank-elsewhere" in found["io"]["undecided"]
    assert f"hangdoctor preflight {launcher.pid}" in "\n".join(found["stacks"]["ways"])
    for child in (launcher.pid, *launcher.said["children"]):
        assert procfs.read_stat("/proc", child).state in "SR"


@pytest.mark.skipif(not restricted.IS_ROOT, reason="only root can hide py-spy")
def test_without_py_spy_its_installation_is_the_way(launch, place):
    code, found = look(place, launch().pid, py_spy=False)
    assert (code, found["stacks"]["state"], found["io"]["state"]) == (1, "closed", "open")
    assert found["stacks"]["ways"][0].endswith("-m pip install py-spy")


@pytest.mark.skipif(not restricted.IS_ROOT, reason="only root can hide files of /proc")
def test_with_tracing_denied_stacks_and_system_calls_are_closed_and_the_rest_is_open(launch, place):
    launcher = launch()
    pids = (launcher.pid, *launcher.said["children"])
    code, found = look(place, launcher.pid, deny_tracing=True, hide=pids)
    assert code == 1
    assert states(found, "stacks", "syscall", "io", "log") == {
        "stacks": "closed", "syscall": "closed", "io": "open", "log": "open",
    }  # fmt: skip
    assert found["seccomp"]["state"] == "partly"


@pytest.mark.skipif(not restricted.IS_ROOT, reason="only root can hide files of /proc")
def test_one_process_that_refuses_makes_a_source_partly_open(launch, place):
    launcher = launch()
    code, found = look(place, launcher.pid, deny_tracing=True, hide=(launcher.said["children"][0],))
    assert (code, found["stacks"]["state"]) == (1, "partly")
    assert "3 of 4 processes dumped; TP0: " in found["stacks"]["seen"]


def test_the_machine_in_general_is_tried_on_a_process_of_our_own():
    # From a world of processes without a launch.
    done = subprocess.run(
        ["unshare", *([] if restricted.IS_ROOT else ["-Ur"]), "-pf", "--mount-proc",
         sys.executable, "-m", "hangdoctor", "preflight", "--format=json"],
        capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=restricted.ROOT,
    )  # fmt: skip
    found = sources_of(done)
    assert json.loads(done.stdout)["pid"] is None
    assert states(found, "stacks", "io") == {"stacks": "open", "io": "open"}
    assert "log" not in found
    assert "a process of our own dumped" in found["stacks"]["seen"]


@pytest.mark.skipif(not restricted.IS_ROOT, reason="only root can become another user")
def test_without_rights_ones_own_processes_are_open_and_others_are_told_to_be_closed(place):
    # With py-spy's own ptrace rights: as on a desktop without Yama.
    done = subprocess.run(
        ["unshare", "-pf", "--mount-proc",
         *restricted.hangdoctor(place, "preflight", "--format=json", user=restricted.NOBODY)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    found = sources_of(done)
    assert states(found, "stacks", "io", "other-users") == {
        "stacks": "open", "io": "open", "other-users": "closed",
    }  # fmt: skip


def test_a_stopped_process_is_not_dumped(program):
    sleeper = program("sleep")
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    found = sources_of(run(sleeper.pid, "--format=json"))
    assert (
        "not dumped; its syscall file, which needs the same right, may be read"
        in (found["stacks"]["seen"])
    )
    assert found["stacks"]["state"] == "open"
    assert procfs.read_stat("/proc", sleeper.pid).state == "T"


def test_a_process_in_uninterruptible_sleep_is_not_dumped(program, tmp_path):
    sleeper = program("uninterruptible", tmp_path / "never")
    while procfs.read_stat("/proc", sleeper.pid).state != "D":
        os.sched_yield()
    found = sources_of(run(sleeper.pid, "--format=json"))
    assert "state D" in found["stacks"]["seen"]
    assert "not dumped" in found["stacks"]["seen"]


def test_a_process_of_no_launch_is_looked_at_all_the_same(program):
    sleeper = program("sleep", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    done = run(sleeper.pid, "--format=json")
    found = sources_of(done)
    assert json.loads(done.stdout)["note"] == "it belongs to no launch that is known"
    assert found["stacks"]["state"] == "open"


def test_a_log_in_a_pipe_is_closed_and_the_command_that_brings_it_is_named(program):
    launcher = program("launch_server", *TITLES, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done = run(launcher.pid, "--format=json")
    log = sources_of(done)["log"]
    launcher.process.stdout.close()
    launcher.process.stderr.close()
    assert (done.returncode, log["state"], log["main"]) == (1, "closed", True)
    assert "a pipe" in log["seen"]
    assert any("hangdoctor diagnose" in way for way in log["ways"])


@pytest.mark.parametrize("pid", ["0", "-1", "99999999", "2147483648", "two", HOSTILE])
def test_a_pid_that_is_none_is_one_line_with_a_hint_and_2(pid):
    done = run("--", pid)
    assert (done.returncode, done.stdout) == (2, "")
    first, *hint = done.stderr.splitlines()
    assert first.startswith("hangdoctor: ")
    assert hint
    assert "fault of hangdoctor's own" not in done.stderr
    assert not set(done.stderr) & set("\x1b\u202e\x07")


def test_a_process_that_has_ended_is_2():
    process = subprocess.Popen(["true"])
    process.wait()
    done = run(process.pid)
    assert done.returncode == 2
    assert f"there is no process with PID {process.pid}" in done.stderr


def serve_ras(answer):
    """Answer one line to each line, as RAS does; return the listening socket."""
    server = socket.create_server(("127.0.0.1", 0))

    def work():
        while True:
            try:
                talk, _ = server.accept()
            except OSError:
                return
            with talk:
                if answer is not None:
                    talk.recv(100)
                    talk.sendall(answer)
                else:
                    select.select([talk], [], [], LIMIT_S)

    threading.Thread(target=work, daemon=True).start()
    return server


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        (b"SERVER PROTOCOL 2\n", "partly", "answers on"),
        (b"HTTP/1.1 400 \x1b[2J\n", "closed", "is no RAS"),
    ],
)
def test_ras_is_asked_at_the_address_of_the_target_and_its_owner_is_told(
    launch, answer, state, words
):
    with serve_ras(answer) as server:
        port = server.getsockname()[1]
        launcher = launch(env=os.environ | {"NCCL_RAS_ADDR": f"localhost:{port}"})
        ras = sources_of(run(launcher.pid, "--format=json"))["nccl-ras"]
    assert ras["state"] == state
    assert words in ras["seen"]
    assert f"localhost:{port} (NCCL_RAS_ADDR)" in ras["seen"]
    assert f"PID {os.getpid()}, which is none of this launch" in ras["seen"]


def test_nobody_on_the_ras_port_is_not_here_and_a_port_that_is_none_is_said(launch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launcher = launch(env=os.environ | {"NCCL_RAS_ADDR": f"localhost:{port}"})
    assert sources_of(run(launcher.pid, "--format=json"))["nccl-ras"]["state"] == "not here"


def test_a_wrong_ras_address_is_said(launch):
    launcher = launch(env=os.environ | {"NCCL_RAS_ADDR": f"nowhere{HOSTILE}"})
    ras = sources_of(run(launcher.pid, "--format=json"))["nccl-ras"]
    assert (ras["state"], "no host:port" in ras["seen"]) == ("closed", True)


def test_cards_are_a_main_source_where_there_are_any(launch, tmp_path):
    given = os.environ | nvml.build(tmp_path)
    launcher = launch()
    rank = launcher.said["children"][0]
    cards = tmp_path / "cards"
    cards.write_text(card((rank, 100), busy=10) + card(error=15))
    done = run(launcher.pid, "--format=json", env=given)
    found = sources_of(done)
    assert (done.returncode, found["gpus"]["main"], found["gpus"]["state"]) == (1, True, "partly")
    assert "1 of 2 cards; GPU 1: " in found["gpus"]["seen"]
    assert found["gpu-processes"]["state"] == "open"
    assert "TP0" in found["gpu-processes"]["seen"]
    cards.write_text(card((4_000_000, 100), busy=10))
    found = sources_of(run(launcher.pid, "--format=json", env=given))
    assert found["gpus"]["state"] == "open"


def test_text_keeps_to_80_columns_but_for_lines_to_copy(launch):
    launcher = launch()
    done = run(launcher.pid)
    assert done.stdout.startswith(("OPEN", "CLOSED"))
    assert [
        line for line in done.stdout.splitlines() if len(line) > 80 and line[:4] != "    "
    ] == []


# What is judged, from answers made by hand


def answers(**given):
    known = Rights(
        user=1000, capabilities=0, own=Place(namespaces={"pid": "pid:[4026531836]"}),
        files={name: {7: None} for name in rights.FILES}, target_user=1000,
    )  # fmt: skip
    parts = {
        "dumps": Dumps(tool="/bin/py-spy", version="0.4.1", by_pid={7: 12}),
        "gpus": Missing(reason="not-installed", detail="no library", hint="x"),
        "installation": None,
    } | {key: given.pop(key) for key in ("dumps", "gpus", "installation") if key in given}
    return Answers(rights=replace(known, **given), **parts)


def judged(target=None, **given):
    target = target or Target(pid=7, names={7: "TP0"}, launch="a launch", log="/l")
    report = judge(answers(**given), target, SGLANG)
    return {one.id: one for one in report.sources}, report


@pytest.mark.parametrize(
    ("signs", "cgroup", "kind"),
    [
        ((), "0::/user.slice\n", "none"),
        (("/.dockerenv",), "0::/\n", "docker"),
        ((), "4:memory:/docker/b7e8\n", "docker"),
        (("/run/.containerenv", "container"), "0::/\n", "podman"),
        (("/.dockerenv", "KUBERNETES_SERVICE_HOST"), "0::/\n", "kubernetes"),
        (("/var/run/secrets/kubernetes.io",), "0::/\n", "kubernetes"),
        ((), "0::/kubepods.slice/kubepods-burstable.slice/cri-containerd-1.scope\n", "kubernetes"),
        (("/.singularity.d", "APPTAINER_CONTAINER"), "0::/user.slice\n", "apptainer"),
        (("container",), "0::/\n", "other"),
        ((), "0::/lxc/web\n", "other"),
    ],
)
def test_the_kind_of_container_is_told_by_what_it_leaves_behind(signs, cgroup, kind):
    assert container(Place(signs=signs, cgroup=cgroup)) == kind


def test_a_machine_made_of_a_containers_image_is_none_and_own_pids_are_a_container():
    first = {"pid": "pid:[4026531836]", "mnt": "mnt:[4026531841]"}
    assert container(Place(namespaces=first, signs=("/.dockerenv",))) == "none"
    assert container(Place(namespaces=first | {"mnt": "mnt:[4026532501]"})) == "none"
    assert container(Place(namespaces=first | {"pid": "pid:[4026532501]"})) == "other"


REFUSED = Missing(reason="permission", detail="EPERM")


@pytest.mark.parametrize(
    ("given", "ways"),
    [
        ({}, 'sudo env "PATH=$PATH" hangdoctor preflight 7'),
        ({"yama": 1}, "sudo sysctl kernel.yama.ptrace_scope=0"),
        ({"yama": 3}, "only a reboot"),
        ({"target_user": 1001}, "sudo -u '#1001' env \"PATH=$PATH\" hangdoctor preflight 7"),
        ({"own": Place(signs=("/.dockerenv",))}, "docker run --cap-add SYS_PTRACE"),
        ({"own": Place(signs=("/run/.containerenv",))}, "podman run --cap-add SYS_PTRACE"),
        (
            {"own": Place(signs=("KUBERNETES_SERVICE_HOST",)), "hostname": "kimi-0"},
            "kubectl debug -it kimi-0 --image=IMAGE --target=CONTAINER --profile=sysadmin",
        ),
        (
            {"own": Place(signs=("KUBERNETES_SERVICE_HOST",)), "user": 0},
            'securityContext: {capabilities: {add: ["SYS_PTRACE"]}}',
        ),
        ({"own": Place(signs=("/.singularity.d",))}, "apptainer exec --add-caps CAP_SYS_PTRACE"),
        ({"user": 0}, "docker run --cap-add SYS_PTRACE"),
        ({"user": 0, "capabilities": FULL}, "seccomp"),
        ({"user": 0, "capabilities": FULL, "own": Place(signs=("/.dockerenv",))}, "on the node"),
    ],
)
def test_the_way_to_the_stacks_fits_the_place(given, ways):
    dumps = Dumps(tool="/bin/py-spy", version="0.4.1", by_pid={7: REFUSED})
    found, report = judged(dumps=dumps, **given)
    assert found["stacks"].state == "closed"
    assert report.closed[0].id == "stacks"
    assert ways in "\n".join(found["stacks"].ways)


@pytest.mark.parametrize(
    ("place", "hostname", "name"),
    [
        (("/.dockerenv",), "0123456789ab", "0123456789ab"),
        (("/.dockerenv",), "gpu-box", "NAME"),
        (("KUBERNETES_SERVICE_HOST",), "kimi-0", "kimi-0"),
        (("KUBERNETES_SERVICE_HOST",), "kimi;reboot", "POD"),
    ],
)
def test_a_container_is_named_where_its_host_name_is_its_name(place, hostname, name):
    dumps = Dumps(tool="/bin/py-spy", version="0.4.1", by_pid={7: REFUSED})
    found, _ = judged(dumps=dumps, own=Place(signs=place), hostname=hostname)
    text = "\n".join(found["stacks"].ways)
    assert f" {name}" in text
    assert "reboot" not in text


def test_root_inside_is_the_first_way_for_another_user_of_the_container():
    dumps = Dumps(tool="/bin/py-spy", version="0.4.1", by_pid={7: REFUSED})
    found, _ = judged(dumps=dumps, own=Place(signs=("/.dockerenv",)))
    assert found["stacks"].ways[1] == "docker exec -it -u 0 NAME hangdoctor preflight 7"


@pytest.mark.parametrize(
    ("given", "state"),
    [
        ({"proc_options": "rw"}, "open"),
        ({"proc_options": "rw,hidepid=2,gid=27"}, "closed"),
        ({"proc_options": "rw,hidepid=invisible"}, "closed"),
        ({"proc_options": "rw,hidepid=2,gid=27", "groups": (1000, 27)}, "open"),
        ({"proc_options": "rw,hidepid=2", "capabilities": FULL}, "open"),
    ],
)
def test_hidepid_closes_what_it_hides_from_us(given, state):
    assert judged(**given)[0]["hidepid"].state == state


def test_cards_that_the_target_uses_without_nvml_are_a_closed_main_source():
    found, report = judged(gpu_users=(7,), own=Place(signs=("/.dockerenv",)))
    assert (found["gpus"].state, found["gpus"].main) == ("closed", True)
    assert found["gpus"].ways == ("docker run --gpus all ...",)
    assert report.closed
    assert "weights, kv-cache, graph-capture" in found["gpus"].cost
    found, report = judged()
    assert (found["gpus"].state, found["gpus"].main, report.closed) == ("not here", False, ())


HOST_S = GpuProcess(pid=4_000_000, used_bytes=1 << 30)


@pytest.mark.parametrize(
    ("opened", "processes", "state", "words"),
    [
        # The ranks' own cards and their peers', as CUDA opens them; the PIDs are the host's.
        (({7: 20, 8: 4}, {7: 4, 8: 20}), (HOST_S,), "partly",
         "host's; the device files that they have open tell TP0 on GPU 0, TP1 on GPU 1"),
        (({7: 20, 8: 4}, {7: 4, 8: 20}), None, "partly", "the driver names no process; the device"),
        (({7: 20, 8: 4}, {7: 4, 8: 4}), (HOST_S,), "partly", "tell TP0 on GPU 0"),
        (({7: 4, 8: 4}, {7: 4, 8: 4}), (HOST_S,), "closed", "TP0 has a card open, and the driver"),
        ((None, None), (HOST_S,), "closed", "PIDs of another namespace"),
        ((None, None), None, "closed", "the driver names no processes"),
        ((None, None), (replace(HOST_S, pid=7),), "open", "the driver names TP0 by PIDs that hold"),
    ],
)  # fmt: skip
def test_the_cards_of_ranks_are_told_by_pids_or_by_their_device_files(
    opened, processes, state, words
):
    cards = {
        index: Gpu(index=index, name="H200", processes=processes, opened_by=opened[index])
        for index in (0, 1)
    }
    target = Target(pid=7, names={7: "TP0", 8: "TP1"})
    gpus = Gpus(cards=cards, driver="580")
    found, report = judged(target, gpus=gpus, gpu_users=(7,), own=Place(signs=("/.dockerenv",)))
    source = found["gpu-processes"]
    assert (source.state, words in source.seen) == (state, True), source.seen
    assert (source.undecided != ()) == (state == "closed")
    assert to_text(report)


def test_a_collector_that_gave_no_answer_closes_what_it_was_to_tell():
    target = Target(pid=7, names={7: "TP0"})
    lost = Missing(reason="timeout", detail="no answer from the collector of rights in 8 s")
    report = judge(replace(answers(), rights=lost), target, SGLANG)
    assert [one.state for one in report.closed] == ["closed"]
    assert "no answer" in to_text(report)


def test_a_hostile_name_is_shown_harmless():
    target = Target(pid=7, names={7: f"TP0{HOSTILE}"}, launch=HOSTILE, log=f"/{HOSTILE}")
    report = judge(answers(hostname=HOSTILE), target, SGLANG)
    assert not set(to_text(report)) & set("\x1b\u202e\x07")


# That what is said of the findings is so


def test_the_rules_that_are_said_to_say_hung_are_those_that_do():
    judges = re.compile(r"\b_?judged?\(")
    judging = {rule_id(rule) for rule in RULES if judges.search(inspect.getsource(rule))}
    assert set(JUDGED) == judging


def ablations():
    refused = Missing(reason="permission", detail="no")

    def of_processes(change):
        def one(snapshot):
            if not isinstance(snapshot.processes, Processes):
                return snapshot
            changed = tuple(change(process) for process in snapshot.processes.processes)
            return replace(snapshot, processes=replace(snapshot.processes, processes=changed))

        return lambda recording: replace(recording, snapshots=tuple(map(one, recording.snapshots)))

    def unnamed(snapshot):
        if not isinstance(snapshot.gpus, Gpus):
            return snapshot
        cards = {
            index: replace(card, processes=None) for index, card in snapshot.gpus.cards.items()
        }
        return replace(snapshot, gpus=replace(snapshot.gpus, cards=cards))

    return {
        "stacks": lambda recording: transform.drop_section(recording, "stacks"),
        "gpus": lambda recording: transform.drop_section(recording, "gpus"),
        "log": lambda recording: transform.drop_section(recording, "log"),
        "io": of_processes(
            lambda process: replace(process, io=None, unreadable={"io": refused})
        ),
        "fd": of_processes(lambda process: replace(process, files=None)),
        "syscall": of_processes(
            lambda process: replace(
                process, threads=tuple(replace(one, syscall=None) for one in process.threads)
            )
        ),
        "gpu-processes": lambda recording: replace(
            recording, snapshots=tuple(map(unnamed, recording.snapshots))
        ),
    }  # fmt: skip


def findings_of(recording):
    return {each.rule: each for each in diagnose(derive(recording, SGLANG), SGLANG).findings}


@cache
def whole(name):
    recording = load(RECORDINGS / name)
    return recording, findings_of(recording)


def lost_and_weaker(name, change):
    recording, before = whole(name)
    after = findings_of(change(recording))
    weaker = {
        rule
        for rule, finding in before.items()
        if rule in after and finding.state == "hung" and after[rule].state != "hung"
    }
    return set(before) - set(after), weaker


@pytest.mark.parametrize("source", ablations())
@pytest.mark.parametrize("name", ["h200-tp2-load-eventfd-live", "h200-tp2-forward-sleep-live"])
def test_no_recording_loses_more_without_a_source_than_preflight_says(source, name):
    dumps = Missing(reason="failed", detail="x")
    said = judged(dumps=dumps, gpu_users=(7,))[0][source]
    lost, weaker = lost_and_weaker(name, ablations()[source])
    # The log's own line that it is ready, or the stacks, may be all that tells it.
    assert lost <= {*said.loses, "idle-and-ready"}
    assert weaker <= set(said.undecided)


@pytest.mark.parametrize("rank", ["TP0", "TP1"])
def test_no_recording_loses_more_without_one_ranks_stack_than_preflight_says(rank):
    def without(recording):
        pid = derive(recording, SGLANG).rank(rank).pid
        snapshots = [
            replace(each, stacks=Stacks(by_pid=each.stacks.by_pid | {pid: REFUSED}))
            if isinstance(each.stacks, Stacks)
            else each
            for each in recording.snapshots
        ]
        return replace(recording, snapshots=tuple(snapshots))

    lost, weaker = lost_and_weaker("h200-tp2-load-eventfd-live", without)
    dumps = Dumps(tool="/bin/py-spy", version="0.4.1", by_pid={7: 12, 8: REFUSED})
    said = judged(dumps=dumps)[0]["stacks"]
    assert said.state == "partly"
    assert lost <= set(said.loses)
    assert weaker <= set(said.undecided)
