"""Runs a command with fewer rights, or from another place, than the one that asks for it.

    python restricted.py '{"user": 65534}' COMMAND ...

Root is needed for everything but `deny_tracing`. What is mounted is mounted in a namespace of its
own and ends with the command.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOBODY = 65534
IS_ROOT = os.geteuid() == 0

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_TRACING = {"x86_64": (101, 310), "aarch64": (117, 270)}  # ptrace, process_vm_readv
_EPERM = 0x0005_0000 | 1  # SECCOMP_RET_ERRNO
_ALLOW = 0x7FFF_0000


def hangdoctor(place, *arguments, **restrictions):
    """Return the command that runs hangdoctor, restricted.

    Args:
        place: an empty directory that everybody can enter; Python, its packages and hangdoctor
            are to be seen in it, since the usual ones may lie in somebody's home.
        arguments: of hangdoctor.
        restrictions:
            user: numeric id to be, without any capability.
            py_spy: False: it is not installed.
            deny_tracing: ptrace and process_vm_readv are refused, as Yama does.
            hide: pids whose `mem` and `syscall` cannot be opened, as where Yama refuses.
            pid_of: pid whose PID namespace to enter, with a /proc of its own.
            other_root: see only the system's programs and `place`, nothing of the target's files.
    """
    if not IS_ROOT:
        only = {key: value for key, value in restrictions.items() if key == "deny_tracing"}
        return [
            sys.executable, __file__, json.dumps(only), sys.executable, "-m", "hangdoctor",
            *map(str, arguments),
        ]  # fmt: skip
    enter = ["unshare", "--mount", "--propagation", "private"]
    if pid_of := restrictions.get("pid_of"):
        enter = ["nsenter", f"--pid=/proc/{pid_of}/ns/pid", *enter]
    options = json.dumps(restrictions | {"place": str(place)})
    return [*enter, sys.executable, __file__, options, "hangdoctor", *map(str, arguments)]


def main():
    options = json.loads(sys.argv[1])
    command = sys.argv[2:]
    environment = dict(os.environ)
    if "place" in options:
        command, environment = _see(options, command)
    for pid in options.get("hide", ()):
        _hide(Path(options["place"]), pid)
    if options.get("other_root"):
        _change_root(Path(options["place"]))
    if options.get("pid_of") and not options.get("other_root"):
        _run("mount", "-t", "proc", "proc", "/proc")
    if user := options.get("user"):
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if options.get("deny_tracing"):
        _deny_tracing()
    os.execvpe(command[0], command, environment)  # noqa: S606


def _see(options, command):
    """Mount into the place what hangdoctor needs, and return how to start it there."""
    place = Path(options["place"])
    sites = [Path(sysconfig.get_path("purelib"))]
    python = Path(sys.base_prefix)
    seen = {"python": python, "site": sites[0], "source": ROOT}
    for name, path in seen.items():
        (place / name).mkdir(exist_ok=True)
        _run("mount", "--bind", path, place / name)
    (place / "bin").mkdir(exist_ok=True)
    if options.get("py_spy", True):
        beside = Path(sys.executable).parent / "py-spy"
        (place / "bin" / "py-spy").touch()
        found = beside if beside.exists() else Path(shutil.which("py-spy"))
        _run("mount", "--bind", found, place / "bin" / "py-spy")
    program = place / "python" / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    environment = {
        "PATH": f"{place / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": f"{place / 'source'}:{place / 'site'}",
        "LD_LIBRARY_PATH": str(place / "python" / "lib"),
        "TMPDIR": tempfile.gettempdir(),
    }
    os.chdir("/")
    return [str(program), "-m", *command], environment


def _hide(place, pid):
    """Make `mem` and `syscall` of a process and its threads impossible to open, for root too."""
    closed = place / "closed"
    if not closed.exists():
        closed.mkdir()
        _run("mount", "-t", "tmpfs", "-o", "nodev", "none", closed)
        os.mknod(closed / "device", 0o20666, os.makedev(1, 3))
    for task in Path(f"/proc/{pid}/task").iterdir():
        for at in (task / "mem", task / "syscall"):
            _run("mount", "--bind", closed / "device", at)
    for at in (f"/proc/{pid}/mem", f"/proc/{pid}/syscall"):
        _run("mount", "--bind", closed / "device", at)


def _change_root(place):
    """Leave the target's files behind, as a debugging container of its own image has it."""
    root = place / "root"
    root.mkdir()
    _run("mount", "-t", "tmpfs", "none", root)
    for name in ("usr", "bin", "lib", "lib64", "etc", "dev"):
        source = Path("/", name)
        if source.is_symlink():
            (root / name).symlink_to(source.readlink())
        elif source.exists():
            (root / name).mkdir()
            _run("mount", "--rbind", source, root / name)
    for name in ("tmp", "proc"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    inside = Path(f"{root}{place}")
    for name in ("python", "site", "source", "bin"):
        (inside / name).mkdir(parents=True)
        _run("mount", "--rbind", place / name, inside / name)
    _run("mount", "-t", "proc", "proc", root / "proc")
    os.chroot(root)
    os.chdir("/")


def _deny_tracing():
    class Instruction(ctypes.Structure):
        _fields_ = (
            ("code", ctypes.c_uint16),
            ("if_true", ctypes.c_uint8),
            ("if_false", ctypes.c_uint8),
            ("value", ctypes.c_uint32),
        )

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction)))

    load, equal, leave = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    numbers = _TRACING[platform.machine()]
    rules = (
        Instruction(load, 0, 0, 0),  # the system call's number comes first
        Instruction(equal, 1, 0, numbers[0]),
        Instruction(equal, 0, 1, numbers[1]),
        Instruction(leave, 0, 0, _EPERM),
        Instruction(leave, 0, 0, _ALLOW),
    )
    program = Program(len(rules), (Instruction * len(rules))(*rules))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), "prctl")


def _run(*command):
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
