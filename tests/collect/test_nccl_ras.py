"""NCCL's RAS: pretended servers on real sockets, with the answers that NCCL 2.24 to 2.29 give."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess

import msgspec
import pytest

from hangdoctor.collect import nccl_ras, procfs
from hangdoctor.collect.look import Look
from hangdoctor.collect.worker import ask_once
from hangdoctor.model import Missing, NcclRas

HEAD = """NCCL version {version} compiled with CUDA 12.8
CUDA runtime version 12080, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          8            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
EQUAL = (
    HEAD
    + """    0         2         1         8         8         8   RUNNING      OK

Errors
======

Warnings
========

"""
)
# 2.24 and 2.25 count all collectives together.
BEHIND_2_24 = (
    HEAD.replace("{version}", "2.24.3")
    + """    0         1         1         8         8         8   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  6 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 2 -- GPU 2 managed by process 900002 on node 172.16.64.210
  Rank 3 -- GPU 3 managed by process PID on node 172.16.64.210

"""
)
# From 2.26 on each collective has its count.
BEHIND_2_26 = (
    HEAD.replace("{version}", "2.26.2")
    + """    0         1         1         8         8         8   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 (NVML 7) managed by process PID on node 10.0.0.1

  Communicator ranks have different AllGather operation counts
  7 ranks have launched up to operation 2
  Rank 7 has not launched any operations -- GPU 3 (NVML 7) managed by process PID on node 10.0.0.1

"""
)
DEAD = (
    HEAD.replace("{version}", "2.27.3")
    + """    0         1         1         8         8         8   RUNNING  INCOMPLETE

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 900005 on node 10.0.0.1 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 5 managed by process 900005 on node 10.0.0.1

#0-0 (cf264af53edbe986) ERROR
  Asynchronous error on 1 rank
  Rank 1 reported Unhandled CUDA error -- GPU 1 managed by process PID on node 10.0.0.1

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

"""
)


def json_rank(number, pid, counts, host="10.0.0.1", **status):
    return {
        "rank": number,
        "host": host,
        "pid": pid,
        "cuda_dev": number,
        "nvml_dev": number,
        "status": {
            "init_state": 0,
            "async_error": 0,
            "finalize_called": False,
            "destroy_flag": False,
            "abort_flag": False,
        }
        | status,
        "collective_counts": counts,
    }


def json_answer(ranks, missing=()):
    told = {
        "nccl_version": "2.28.9",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-11-29 21:04:54",
        "communicators_count": 1,
        "communicators": [
            {
                "hash": "0xab67",
                "secondary_hash": "0xaf:0x1c",
                "size": len(ranks) + len(missing),
                "ranks_count": len(ranks),
                "missing_ranks_count": len(missing),
                "ranks": ranks,
                "missing_ranks": list(missing),
            }
        ],
        "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
    }
    return json.dumps(told, indent=2).replace('"PID"', "PID")


MISSING_RANK = {
    "rank": 1,
    "host": "10.0.0.1",
    "pid": 900001,
    "cuda_dev": 1,
    "nvml_dev": 1,
    "status": {"unresponsive": True, "considered_dead": False},
}
GOOD = json_answer([json_rank(0, "PID", {"AllReduce": 5}), json_rank(1, 900001, {"AllReduce": 4})])


@pytest.fixture
def server(program, tmp_path):
    """Start a server of RAS as a process of a launch; return what asks the launch's RAS."""

    def start(address="localhost", environment=None, **told):
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        path = tmp_path / f"{port}.json"
        path.write_text(json.dumps(told))
        environment = environment or {"NCCL_RAS_ADDR": f"{address}:{port}"}
        started = program(
            "ras_server",
            listener.fileno(),
            path,
            pass_fds=[listener.fileno()],
            env=os.environ | environment,
        )
        listener.close()
        started.port = port
        started.heard = lambda: (path.parent / (path.name + ".said")).read_text().splitlines()
        started.look = look_at(started.pid)
        return started

    return start


def look_at(pid):
    stat = procfs.read_stat("/proc", pid)
    return Look(roots={pid: stat.start_ticks})


def test_json_tells_each_rank_and_which_of_them_is_ours(server):
    one = server(json=GOOD)
    found = nccl_ras.read(one.look)
    (communicator,) = found.communicators
    assert (found.form, found.version, communicator.size) == ("json", "2.28.9", 2)
    assert [(rank.number, rank.pid, rank.counts) for rank in communicator.ranks] == [
        (0, one.pid, {"AllReduce": 5}),
        (1, None, {"AllReduce": 4}),
    ]


def test_a_listening_socket_is_found_however_many_there_are():
    with contextlib.ExitStack() as exits:
        listeners = [
            exits.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(100)
        ]
        for one in listeners:
            found = procfs.read_listeners("/proc", os.getpid(), one.getsockname()[1])
            assert found == {os.fstat(one.fileno()).st_ino}


def test_only_commands_that_read_are_sent(server):
    one = server(json=GOOD)
    nccl_ras.read(one.look)
    assert one.heard() == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "VERBOSE STATUS"]


def test_json_without_its_commas_is_repaired_and_said_to_be(server):
    answer = json_answer([json_rank(0, "PID", {"AllReduce": 5})], [MISSING_RANK])
    broken = answer.replace('"nvml_dev": 1,', '"nvml_dev": 1')
    assert broken != answer
    found = nccl_ras.read(server(json=broken).look)
    assert found.form == "repaired json"
    assert [rank.state for rank in found.communicators[0].ranks] == ["running", "unresponsive"]


def test_json_beyond_repair_is_asked_for_as_text(server):
    found = nccl_ras.read(server(json='{"nccl_version": [', text=BEHIND_2_26).look)
    assert (found.form, found.version) == ("text", "2.26.2")


@pytest.mark.parametrize(
    ("text", "ranks", "others"),
    [
        (BEHIND_2_24, [(2, False, {"": 6649}), (3, True, {"": 6649})], {"": 6650}),
        (
            BEHIND_2_26,
            [(7, True, {"AllReduce": 60, "AllGather": 0})],
            {"AllReduce": 64, "AllGather": 2},
        ),
    ],
    ids=["2.24", "2.26"],
)
def test_text_tells_the_ranks_that_stand_out(text, ranks, others, server):
    one = server(text=text)
    found = nccl_ras.read(one.look)
    (communicator,) = found.communicators
    assert (found.form, communicator.size, communicator.others) == ("text", 8, others)
    told = [(rank.number, rank.pid == one.pid, rank.counts) for rank in communicator.ranks]
    assert told == ranks


def test_text_tells_the_dead_and_the_errors(server):
    (communicator,) = nccl_ras.read(server(text=DEAD).look).communicators
    assert [(rank.number, rank.state, rank.error) for rank in communicator.ranks] == [
        (1, "running", "Unhandled CUDA error"),
        (5, "dead", ""),
    ]


def test_text_without_names_is_ours_where_the_listening_socket_is(server):
    found = nccl_ras.read(server(text=EQUAL.replace("{version}", "2.25.1")).look)
    assert (found.alike, found.communicators, found.version) == (2, (), "2.25.1")


def test_an_address_of_another_kind_is_understood(server):
    assert isinstance(nccl_ras.read(server("127.0.0.1", json=GOOD).look), NcclRas)


def test_a_job_of_others_on_the_port_is_said_so_and_not_asked(server, program):
    other = server(json=GOOD)
    own = program("sleep", env=os.environ | {"NCCL_RAS_ADDR": f"localhost:{other.port}"})
    found = nccl_ras.read(look_at(own.pid))
    assert (found.reason, "no process of this launch" in found.detail) == ("inapplicable", True)
    with contextlib.suppress(FileNotFoundError):
        assert not other.heard()


def test_an_answer_of_another_job_is_not_used(server):
    theirs = json_answer([json_rank(0, 900000, {"AllReduce": 5}, host="10.0.0.9")])
    found = nccl_ras.read(server(json=theirs).look)
    assert found.reason == "inapplicable"
    assert "10.0.0.9" in found.detail


def test_the_same_pid_on_another_host_is_not_ours(server):
    ranks = [
        json_rank(0, "PID", {"AllReduce": 5}, host="127.0.0.1"),
        json_rank(1, 900001, {"AllReduce": 5}, host="127.0.0.1"),
        json_rank(2, "PID", {"AllReduce": 5}, host="10.0.0.2"),
    ]
    one = server(json=json_answer(ranks))
    pids = [rank.pid for rank in nccl_ras.read(one.look).communicators[0].ranks]
    assert pids == [one.pid, None, None]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("silent", "timeout"),
        ("flood", "failed"),
        ("stranger", "inapplicable"),
        ("leaves", "failed"),
        ("endless", "failed"),
    ],
)
def test_a_port_that_does_not_answer_as_ras_does_is_said_so(behaviour, reason, server):
    found = nccl_ras.read(server(behaviour=behaviour, text=BEHIND_2_26).look)
    assert isinstance(found, Missing)
    assert found.reason == reason


def test_an_answer_that_never_ends_is_given_up(server, monkeypatch):
    monkeypatch.setattr(nccl_ras, "ANSWER_S", 0.5)
    found = nccl_ras.read(server(behaviour="never ends", text=BEHIND_2_26).look)
    assert found.reason == "timeout"


def test_nothing_listening_is_said_with_what_it_may_mean(program):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    own = program("sleep", env=os.environ | {"NCCL_RAS_ADDR": f"localhost:{port}"})
    found = nccl_ras.read(look_at(own.pid))
    assert (found.reason, "older than 2.24" in found.detail) == ("unsupported", True)


def test_ras_that_is_switched_off_is_not_asked(server):
    off = server(json=GOOD, environment={"NCCL_RAS_ENABLE": "0"})
    found = nccl_ras.read(off.look)
    assert (found.reason, "NCCL_RAS_ENABLE=0" in found.detail) == ("inapplicable", True)


def test_an_address_without_a_port_is_said_so(program):
    own = program("sleep", env=os.environ | {"NCCL_RAS_ADDR": "node7"})
    assert "names no port" in nccl_ras.read(look_at(own.pid)).detail


def test_a_launch_in_another_network_namespace_is_asked_there(server, program):
    outer = server(json=GOOD)
    apart = ["unshare", "--net", "--"]
    if subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no network namespace may be made here")
    environment = os.environ | {"NCCL_RAS_ADDR": f"localhost:{outer.port}"}
    inner = program("sleep", before=apart, env=environment)
    found = ask_once("nccl_ras", nccl_ras.JOB, look_at(inner.pid))
    assert found.reason == "unsupported"  # what listens on our own port is not the launch's
    assert isinstance(nccl_ras.read(outer.look), NcclRas)


def test_answers_survive_the_way_through_a_worker_and_a_recording(server):
    found = ask_once("nccl_ras", nccl_ras.JOB, server(json=GOOD).look)
    assert isinstance(found, NcclRas)
    assert msgspec.json.decode(msgspec.json.encode(found), type=NcclRas) == found


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "{}",
        "{" * 20000,
        "Communicators",
        '{"nccl_version": 1, "communicators": 2}',
        "\0\x1b[31m",
    ],
)
def test_what_is_no_answer_is_refused(answer):
    with pytest.raises((ValueError, RecursionError)):
        nccl_ras.parse_answer(answer, "localhost:28028", {})
