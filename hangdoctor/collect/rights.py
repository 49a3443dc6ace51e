"""Asks the system what may be seen here: raw answers, each really tried, and judged elsewhere.

Whatever can block runs in a worker: files of a process in threads that can be left behind, py-spy
and the cards in workers of their own. Nothing is signalled, and no process is dumped that is
stopped, traced or in uninterruptible sleep.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor.collect import COLLECTORS, gpus, host, installation, procfs, stacks
from hangdoctor.collect.bounded import Bounded
from hangdoctor.collect.look import Job, Look
from hangdoctor.collect.nccl_ras import DEFAULT_ADDRESS, parse_ras_address
from hangdoctor.collect.permissions import refused, yama_scope
from hangdoctor.collect.worker import Worker, ask_all
from hangdoctor.model import Gpus, Installation, Missing, ProcessStacks, Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILES = ("io", "fd", "syscall", "wchan", "maps", "stack")
"""What is tried of each process, below /proc/PID."""

NAMESPACES = ("pid", "mnt", "net", "user")

_WITHIN_S = 2.5
_RAS_WITHIN_S = 1.0
_SYSLOG_ACTION_SIZE_BUFFER = 10
_CONTAINER_FILES = (
    "/.singularity.d",
    "/var/run/secrets/kubernetes.io",
    "/run/secrets/kubernetes.io",
    "/run/.containerenv",
    "/.dockerenv",
    "/run/systemd/container",
)
_CONTAINER_VARIABLES = (
    "APPTAINER_CONTAINER",
    "SINGULARITY_CONTAINER",
    "KUBERNETES_SERVICE_HOST",
    "container",
)


class RightsLook(msgspec.Struct, frozen=True, kw_only=True):
    """The request.

    Attributes:
        pids: the processes to try; the first one stands for the target.
        package: the engine's package.
        is_target: they are the target's, and not a sample of our own.
    """

    pids: tuple[int, ...]
    package: str
    is_target: bool
    proc: str = "/proc"


class Place(Struct, frozen=True):
    """Where a process lives, as far as it can be told from here.

    Attributes:
        namespaces: identity by kind, such as "pid:[4026531836]"; one that is not told lacks.
        pid_depth: PID namespaces below the observer's that it is in, from NSpid; at least 1.
        cgroup: the text of its cgroup file.
        signs: files and variables that containers leave behind.
    """

    namespaces: dict[str, str] = {}
    pid_depth: int | None = None
    cgroup: str = ""
    signs: tuple[str, ...] = ()


class Ras(Struct, frozen=True, tag="ras"):
    """NCCL's RAS port.

    Attributes:
        address: host:port.
        from_target: the target's environment names it.
        disabled: the target's environment has NCCL_RAS_ENABLE=0.
        listens: somebody listens on that port in the target's network namespace; None: not known.
        owner_pid: who, where it can be told.
        answer: the first line of its answer to the handshake, or why there is none.
    """

    address: str
    from_target: bool = False
    disabled: bool = False
    listens: bool | None = None
    owner_pid: int | None = None
    answer: str | Missing | None = None


class Cgroup(Struct, frozen=True):
    """The cgroup of the target, else ours.

    Attributes:
        version: 1 or 2; None where there is none.
        events: memory.events (version 1: memory.oom_control) can be read.
        memory_limit_bytes, memory_used_bytes: None where not readable, or no limit.
        cpus: quota, None for none.
    """

    version: int | None = None
    events: bool = False
    limit_readable: bool = False
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None
    cpus: float | None = None


class Rights(Struct, frozen=True, tag="rights"):
    """What the system says of us and lets us see.

    Attributes:
        user, groups: ours; target_user: of the first process looked at.
        capabilities: CapEff.
        seccomp: mode of ours: 0 none, 1 strict, 2 filter.
        yama: kernel.yama.ptrace_scope, None without Yama.
        proc_options: options that /proc is mounted with.
        files: by name and pid, None where it could be read.
        kernel_log: None where it may be read; dmesg_restrict as the kernel has it.
        pci_gpus: NVIDIA cards on the bus; gpu_devices: device files of theirs that are here.
        gpu_users: processes that were tried and have such a device open.
        installed: versions of the engine by directory, found without a process that runs it.
    """

    user: int
    hostname: str = ""
    groups: tuple[int, ...] = ()
    capabilities: int = 0
    seccomp: int | None = None
    yama: int | None = None
    proc_options: str = ""
    target_user: int | None = None
    own: Place = Place()
    target: Place | None = None
    files: dict[str, dict[int, Missing | None]] = {}
    kernel_log: Missing | None = None
    dmesg_restrict: int | None = None
    pci_gpus: int = 0
    gpu_devices: tuple[str, ...] = ()
    gpu_users: tuple[int, ...] = ()
    ras: Ras | Missing | None = None
    cgroup: Cgroup = Cgroup()
    installed: dict[str, str] = {}


class Dumps(Struct, frozen=True, tag="dumps"):
    """py-spy, and what it answered for each process: how many threads, or why not."""

    tool: str
    version: str
    by_pid: dict[int, int | Missing]


class Answers(Struct, frozen=True):
    """All raw answers, each from a worker of its own."""

    rights: Rights | Missing
    dumps: Dumps | Missing
    gpus: Gpus | Missing
    installation: Installation | Missing | None


def ask(look: RightsLook) -> Answers:
    """Ask everything at once, each with its own deadline."""
    requests = {
        "rights": (JOBS["rights"], look),
        "dumps": (JOBS["dumps"], look),
        "gpus": (COLLECTORS["gpus"], Look(proc=look.proc, known=dict.fromkeys(look.pids, 0))),
    }
    if look.is_target:
        request = installation.InstallationLook(package=look.package, pids=look.pids)
        requests["installation"] = (installation.JOB, request)
    workers = {Worker(name, job): request for name, (job, request) in requests.items()}
    try:
        found: dict[str, Any] = {
            worker.name: answer for worker, (answer, _) in ask_all(workers).items()
        }
    finally:
        for worker in workers:
            worker.close()
    return Answers(**({"installation": None} | found))


@contextlib.contextmanager
def sample() -> Iterator[int]:
    """Run a Python process of our own that does nothing, to try what can be seen of one.

    It is a sibling of the workers that look at it: Yama lets a parent look at its child.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import os; os.write(1, b'.'); os.read(0, 1)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        start_new_session=True,
    )
    assert process.stdin  # noqa: S101  # PIPE was asked for
    assert process.stdout  # noqa: S101
    try:
        process.stdout.read(1)
        yield process.pid
    finally:
        process.stdin.close()  # it ends by itself
        process.stdout.close()
        process.wait()


def read(look: RightsLook) -> Rights:
    """Answer everything but the stacks. Runs in a worker."""
    proc = look.proc
    status = procfs.parse_status(procfs.read(f"{proc}/self/status"))
    first = look.pids[0]
    jobs: dict[tuple[str, int], Callable[[], Any]] = {
        (name, pid): partial(_try, proc, pid, name) for pid in look.pids for name in FILES
    }
    jobs["kernel log", 0] = _kernel_log
    jobs["own", 0] = partial(_place, proc, None)
    jobs["target", first] = partial(_place, proc, first)
    jobs["cgroup", first] = partial(_cgroup, proc, first)
    jobs["ras", first] = partial(_ras, look)
    jobs["installed", 0] = partial(_installed, look.package)
    jobs["gpu devices", 0] = partial(_gpu_devices, proc)
    jobs["gpu users", 0] = partial(_gpu_users, look)
    answers: Bounded[tuple[str, int], Any] = Bounded()
    found = answers.run(jobs, within_s=_WITHIN_S)
    files = {name: {pid: found.get((name, pid), _BLOCKED) for pid in look.pids} for name in FILES}
    # The kernel answers "0" for the wchan of a process whose io it refuses to show.
    files["wchan"] = {
        pid: files["io"][pid] if _is_refused(files["io"][pid]) else answer
        for pid, answer in files["wchan"].items()
    }
    pci, devices = found.get(("gpu devices", 0), (0, ()))
    return Rights(
        user=os.geteuid(),
        hostname=os.uname().nodename,
        groups=(os.getegid(), *os.getgroups()),
        capabilities=int(status.get("CapEff", "0"), 16),
        seccomp=int(status["Seccomp"]) if "Seccomp" in status else None,
        yama=yama_scope(),
        proc_options=_proc_options(proc),
        target_user=_user(proc, first),
        own=found.get(("own", 0), Place()),
        target=found.get(("target", first), Place()) if look.is_target else None,
        files=files,
        kernel_log=found.get(("kernel log", 0), _BLOCKED),
        dmesg_restrict=_number(f"{proc}/sys/kernel/dmesg_restrict"),
        pci_gpus=pci,
        gpu_devices=devices,
        gpu_users=found.get(("gpu users", 0), ()),
        ras=found.get(("ras", first), _BLOCKED),
        cgroup=found.get(("cgroup", first), Cgroup()),
        installed=found.get(("installed", 0), {}),
    )


def read_dumps(look: RightsLook) -> Dumps | Missing:
    """Try py-spy on each process that may safely be looked at. Runs in a worker."""
    tool = stacks.find_py_spy()
    if tool is None:
        return stacks.no_py_spy()

    def one(pid: int) -> int | Missing:
        if not stacks.stoppable(look.proc, pid):
            stat = procfs.read_stat(look.proc, pid)
            if stat is None or stat.state == "Z":
                return Missing(reason="gone", detail="the process has ended")
            return Missing(
                reason="not-tried",
                detail=f"a thread is stopped, traced or in state D (main thread: {stat.state})",
            )
        answer = stacks.dump(tool, look.proc, pid)
        return len(answer.threads) if isinstance(answer, ProcessStacks) else answer

    with ThreadPoolExecutor(len(look.pids)) as pool:
        by_pid = dict(zip(look.pids, pool.map(one, look.pids), strict=True))
    return Dumps(tool=tool, version=_version_of(tool), by_pid=by_pid)


def parse_proc_options(mounts: str, at: str = "/proc") -> str:
    r"""Return the options of the proc file system that is mounted last at a place.

    >>> parse_proc_options("22 1 0:21 / /proc rw,nosuid - proc proc rw,hidepid=2,gid=27\n")
    'rw,hidepid=2,gid=27'
    """
    options = ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        words = right.split()
        if len(words) >= 3 and words[0] == "proc" and left.split()[4] == at:
            options = words[2]
    return options


def _try(proc: str, pid: int, name: str) -> Missing | None:
    path = f"{proc}/{pid}/{name}"
    try:
        if name == "fd":
            numbers = os.listdir(path)
            with contextlib.suppress(FileNotFoundError):  # closed in between
                os.readlink(f"{path}/{numbers[0]}" if numbers else path + "/0")
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.read(fd, 1)
        finally:
            os.close(fd)
    except PermissionError as error:
        return refused(f"{error.strerror} ({path})", _user(proc, pid))
    except FileNotFoundError:
        if procfs.read_stat(proc, pid) is None:
            return Missing(reason="gone", detail="the process has ended")
        return Missing(reason="unsupported", detail="this kernel does not show it")
    except ProcessLookupError:
        return Missing(reason="gone", detail="the process has ended")
    except OSError as error:
        return Missing(reason="failed", detail=f"{error.strerror} ({path})")
    return None


def _place(proc: str, pid: int | None) -> Place:
    """Collect the signs of where a process lives; None is ourselves."""
    at = f"{proc}/{pid or 'self'}"
    namespaces: dict[str, str] = {}
    with contextlib.suppress(OSError):  # of another user's process they are not told
        for kind in NAMESPACES:
            namespaces[kind] = os.readlink(f"{at}/ns/{kind}")
    root = "" if pid is None else f"{at}/root"
    # Nothing is there where we may not look: then the cgroup alone tells.
    signs = [path for path in _CONTAINER_FILES if os.path.lexists(root + path)]
    variables = os.environ if pid is None else procfs.read_environ(proc, pid)
    signs += [name for name in _CONTAINER_VARIABLES if name in variables]
    try:
        cgroup = procfs.read(f"{at}/cgroup").decode(errors="replace")
        inner = procfs.parse_status(procfs.read(f"{at}/status")).get("NSpid", "").split()
    except OSError:
        cgroup, inner = "", []
    return Place(
        namespaces=namespaces,
        pid_depth=len(inner) or None,
        cgroup=cgroup,
        signs=tuple(signs),
    )


def _kernel_log() -> Missing | None:
    """Ask for the size of the kernel's log, which needs the same right as to read it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.klogctl(_SYSLOG_ACTION_SIZE_BUFFER, None, 0) >= 0:
        return None
    error = os.strerror(ctypes.get_errno())
    return Missing(reason="permission", detail=error)


def _cgroup(proc: str, pid: int) -> Cgroup:
    groups = host.parse_cgroups(_read(f"{proc}/{pid}/cgroup"))
    world = str(Path(proc).parent)
    version = 1 if "memory" in groups else (2 if "" in groups else None)

    def file(controller: str, v1: str, v2: str) -> bytes:
        return host.cgroup_file(proc, world, pid, controller, v1=v1, v2=v2)

    limit = file("memory", "memory.limit_in_bytes", "memory.max")
    used = file("memory", "memory.usage_in_bytes", "memory.current")
    quota = file("cpu", "cpu.cfs_quota_us", "cpu.max")
    return Cgroup(
        version=version,
        events=bool(file("memory", "memory.oom_control", "memory.events")),
        limit_readable=bool(limit),
        memory_limit_bytes=_bytes(limit),
        memory_used_bytes=_bytes(used),
        cpus=host.parse_cpu_max(quota) if quota else None,
    )


def _bytes(raw: bytes) -> int | None:
    """Return a number of bytes; None for "max", and for what version 1 has in its place."""
    text = raw.decode(errors="replace").strip()
    return int(text) if text.isdecimal() and int(text) < 1 << 60 else None


def _ras(look: RightsLook) -> Ras:
    proc, pid = look.proc, look.pids[0]
    variables: dict[str, str] = {}
    if look.is_target:
        for each in look.pids:  # a rank's may be gone: setproctitle writes over it
            variables = procfs.read_environ(proc, each) | variables
    given = variables.get("NCCL_RAS_ADDR")
    ras = Ras(
        address=given or DEFAULT_ADDRESS,
        from_target=given is not None,
        disabled=variables.get("NCCL_RAS_ENABLE", "").strip() == "0",
    )
    place = parse_ras_address(ras.address)
    if place is None:
        wrong = Missing(reason="failed", detail="NCCL_RAS_ADDR is no host:port")
        return msgspec.structs.replace(ras, answer=wrong)
    try:
        inodes = procfs.read_listeners(proc, pid, place[1])
    except OSError as error:
        unseen = refused(f"{error.strerror} ({error.filename})", _user(proc, pid))
        return msgspec.structs.replace(ras, answer=unseen)
    if not inodes:
        return msgspec.structs.replace(ras, listens=False)
    owner = procfs.find_holder(proc, look.pids, inodes)
    ras = msgspec.structs.replace(ras, listens=True, owner_pid=owner)
    try:
        here = os.readlink(f"{proc}/self/ns/net") == os.readlink(f"{proc}/{pid}/ns/net")
    except OSError:
        here = False
    if not here:
        other = Missing(
            reason="unsupported",
            detail="it listens in another network namespace",
            hint=f"sudo nsenter -t {pid} -n hangdoctor preflight {pid}",
        )
        return msgspec.structs.replace(ras, answer=other)
    return msgspec.structs.replace(ras, answer=_greet(place))


def _greet(place: tuple[str, int]) -> str | Missing:
    """Shake hands as NCCL's own client does (ncclras), and ask for nothing.

    The client says "CLIENT PROTOCOL 2", RAS answers with a line such as "SERVER PROTOCOL 2".
    """
    try:
        with socket.create_connection(place, timeout=_RAS_WITHIN_S) as talk:
            talk.sendall(b"CLIENT PROTOCOL 2\n")
            answer = talk.recv(200).decode(errors="replace").strip()
    except TimeoutError:
        return Missing(reason="timeout", detail=f"no answer in {_RAS_WITHIN_S:g} s")
    except OSError as error:
        return Missing(reason="failed", detail=str(error))
    return answer or Missing(reason="failed", detail="it hung up")


def _gpu_devices(proc: str) -> tuple[int, tuple[str, ...]]:
    """Return how many NVIDIA cards the bus has, and the device files of cards that are here."""
    world = Path(proc).parent
    count = 0
    for device in sorted((world / "sys/bus/pci/devices").glob("*")):
        vendor, kind = _read(f"{device}/vendor").strip(), _read(f"{device}/class").strip()
        count += vendor == b"0x10de" and kind.startswith(b"0x03")  # display and 3D controllers
    names = sorted(path.name for path in (world / "dev").glob("nvidia[0-9]*"))
    return count, tuple(f"/dev/{name}" for name in names)


def _gpu_users(look: RightsLook) -> tuple[int, ...]:
    opened = gpus.open_device_files(look.proc, look.pids)
    users = {pid for counts in opened.values() for pid in counts}
    return tuple(pid for pid in look.pids if pid in users)


def _installed(package: str) -> dict[str, str]:
    """Find the engine beside our own Python and beside the python3 of PATH."""
    places = [entry for entry in sys.path if entry]
    if python := shutil.which("python3"):
        prefix = Path(python).parent.parent
        places += map(str, sorted(prefix.glob("lib/python3*/*-packages")))
    found = {}
    for place in dict.fromkeys(places):
        for info in sorted(Path(place).glob(f"{package}-*.dist-info")):
            found[f"{place}/{package}"] = info.name[len(package) + 1 : -len(".dist-info")]
    return found


def _version_of(tool: str) -> str:
    """Ask py-spy for its version; this worker's deadline holds for it as well."""
    try:
        done = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip().rpartition(" ")[2][:20]


def _proc_options(proc: str) -> str:
    try:
        mounts = procfs.read_table(f"{proc}/self/mountinfo").decode(errors="replace")
    except OSError:
        mounts = ""
    return parse_proc_options(mounts, os.path.realpath(proc))


def _user(proc: str, pid: int) -> int | None:
    words = procfs.parse_status(_read(f"{proc}/{pid}/status")).get("Uid", "").split()
    return int(words[1]) if len(words) > 1 else None


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: str) -> bytes:
    try:
        return procfs.read(path)
    except OSError:
        return b""


def _is_refused(answer: Missing | None) -> bool:
    return answer is not None and answer.reason == "permission"


_BLOCKED = Missing(
    reason="timeout",
    detail="reading it blocks",
    hint="a lock of the process is held, or storage is stalled: look at its state and wchan",
)

JOBS: dict[str, Job] = {
    "rights": Job(
        read=read, request=RightsLook, reply=Rights | Missing, deadline_s=8.0, fills="rights"
    ),
    "dumps": Job(
        read=read_dumps,
        request=RightsLook,
        reply=Dumps | Missing,
        deadline_s=2 * stacks.DUMP_DEADLINE_S + 4.0,
        fills="stacks",
    ),
}
"""What `python -m hangdoctor.collect` serves besides the collectors of a look."""
