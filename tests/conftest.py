"""Programs that really hang, and hand-made /proc trees, for the tests of what looks at a system."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hangdoctor.collect import procfs

collect_ignore = ["programs", "benchmarks"]  # scripts, not modules of tests

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE_S = 60  # until a program must have spoken: ends a test that hangs, and times nothing


def pytest_configure():
    """Take Ctrl-C back where a shell's `&` or nohup left it ignored: the programs inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Program:
    """A running program of tests/programs, and what it has said."""

    def __init__(self, process, fifo):
        self.process = process
        self.pid = process.pid
        self._fifo = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        # Held open by us as well, so that the end of one word is not the end of the file.
        self._keep = os.open(fifo, os.O_WRONLY)
        self.said = self.hear()

    def hear(self):
        """Wait for the next word."""
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._fifo], [], [], PATIENCE_S)
            assert ready, f"{self.process.args} said nothing"
            line += os.read(self._fifo, 4096)
        return json.loads(line)

    def tell(self, word):
        """Send a line to its stdin, and wait for the answer."""
        self.process.stdin.write(word.encode() + b"\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self):
        """Kill all of its session, whatever state it is in: ninja makes groups of its own."""
        while left := [each.pid for each in procfs.scan("/proc").values() if self._owns(each)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        os.close(self._fifo)
        os.close(self._keep)

    def _owns(self, stat):
        return stat.session == self.pid and stat.state != "Z"


@pytest.fixture
def program(tmp_path):
    """Start programs by name, each when it has said its word; end them for certain."""
    running = []

    def start(name, *arguments, before=(), **options):
        fifo = tmp_path / f"fifo-{len(running)}"
        os.mkfifo(fifo)
        process = subprocess.Popen(
            [
                *before,
                sys.executable,
                str(PROGRAMS / f"{name}.py"),
                str(fifo),
                *map(str, arguments),
            ],
            start_new_session=True,
            stdin=subprocess.PIPE,
            **options,
        )
        running.append(process)
        started = Program(process, fifo)
        running[-1] = started
        return started

    yield start
    for one in running:
        if isinstance(one, Program):
            one.end()
        else:  # it never spoke
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()


class ProcTree:
    """A hand-made /proc in a directory."""

    def __init__(self, root):
        self.root = root

    def add(self, pid, title, *, ppid=1, start=1000, state="S", group=None, session=None, **files):
        """Write a process; `files` are further ones, or other contents for the usual ones."""
        at = self.root / str(pid)
        task = at / "task" / str(pid)
        task.mkdir(parents=True)
        comm = files.pop("comm", Path(title.split(" ")[0]).name[:15])
        stat = (
            f"{pid} ({comm}) {state} {ppid} {group or pid} {session or pid} 0 -1 0 0 0 0 0 150 50 0"
            f" 0 20 0 1 0 {start} 8765440 1106 {'0 ' * 27}0\n"
        )
        contents = {
            "stat": stat,
            "cmdline": title.replace(" ", "\0") + "\0",
            "status": f"Name:\t{comm}\nState:\t{state}\nTgid:\t{pid}\nTracerPid:\t0\n"
            f"Uid:\t0\t0\t0\t0\nVmRSS:\t    1508 kB\nRssFile:\t     500 kB\nNSpid:\t{pid}\n",
            "io": "rchar: 9\nwchar: 8\nsyscr: 7\nsyscw: 6\nread_bytes: 5\nwrite_bytes: 4\n",
        } | files
        for name, text in contents.items():
            (at / name).write_text(text)
        for name, text in {
            "stat": stat,
            "wchan": "futex_wait",
            "syscall": "202 0x7f 0x189",
        }.items():
            (task / name).write_text(text)
        (at / "fd").mkdir()
        (at / "exe").symlink_to(
            "/usr/bin/" + ("python3.11" if "python" in title.split(" ")[0] else comm)
        )
        return at


@pytest.fixture
def proc_tree(tmp_path):
    """Return an empty hand-made /proc."""
    root = tmp_path / "world" / "proc"
    root.mkdir(parents=True)
    return ProcTree(root)
