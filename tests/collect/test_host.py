from __future__ import annotations

import os

from hangdoctor.collect import host, procfs
from hangdoctor.collect.look import Look


def look(pid, proc="/proc"):
    return Look(proc=str(proc), roots={pid: procfs.read_stat(str(proc), pid).start_ticks})


def test_this_machine_tells_its_load_memory_and_cpus():
    found = host.read(look(os.getpid()))
    assert found.load_1m >= 0
    assert found.memory_total_bytes > found.memory_available_bytes > 0
    assert 1 <= found.cpu_count <= os.cpu_count()
    assert found.shm_total_bytes >= found.shm_used_bytes >= 0


def hand_made(proc_tree, cgroup, files):
    proc_tree.add(10, "python -m server", cgroup=cgroup)
    world = proc_tree.root.parent
    for path, text in files.items():
        (world / path).parent.mkdir(parents=True, exist_ok=True)
        (world / path).write_text(text)
    return host.read(look(10, proc_tree.root))


def test_out_of_memory_kills_come_from_the_cgroup_of_the_launch_version_2(proc_tree):
    found = hand_made(
        proc_tree,
        "0::/pod/server\n",
        {
            "sys/fs/cgroup/pod/server/memory.events": "low 0\noom 4\noom_kill 3\n",
            "sys/fs/cgroup/memory.events": "oom_kill 99\n",
        },
    )
    assert found.oom_kills == 3


def test_out_of_memory_kills_come_from_the_cgroup_of_the_launch_version_1(proc_tree):
    found = hand_made(
        proc_tree,
        "4:memory:/docker/b7e8\n0::/\n",
        {"sys/fs/cgroup/memory/docker/b7e8/memory.oom_control": "under_oom 0\noom_kill 2\n"},
    )
    assert found.oom_kills == 2


def test_in_a_container_the_cgroup_is_the_one_that_is_mounted(proc_tree):
    found = hand_made(
        proc_tree,
        "0::/../../elsewhere\n",
        {"sys/fs/cgroup/memory.events": "oom_kill 1\n"},
    )
    assert found.oom_kills == 1


def test_the_cpus_are_those_of_the_affinity_under_the_quota(proc_tree):
    found = hand_made(
        proc_tree,
        "0::/pod\n",
        {
            "proc/10/status": "Name:\tpython\nCpus_allowed_list:\t0-15\n",
            "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
        },
    )
    assert found.cpu_count == 3


def test_pressure_and_swap_are_read_where_the_kernel_has_them(proc_tree):
    found = hand_made(
        proc_tree,
        "0::/\n",
        {
            "proc/pressure/io": "some avg10=41.50 avg60=9.0 avg300=1.0 total=5\n",
            "proc/meminfo": "MemTotal: 100 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\n",
        },
    )
    assert found.pressure_pct == {"io": 41.5}
    assert found.swap_used_bytes == 30 * 1024
    assert found.memory_available_bytes is None
