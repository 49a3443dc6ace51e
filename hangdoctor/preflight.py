"""Judges what may be seen here: of each source whether it is open, what it costs, what opens it.

Pure: from the raw answers of `collect.rights` to a report.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Literal

from hangdoctor.gpus import Card, cards_of
from hangdoctor.model import Gpu, Gpus, Installation, Missing, Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hangdoctor.collect.rights import Answers, Dumps, Place, Ras, Rights
    from hangdoctor.engines import Engine

State = Literal["open", "partly", "closed", "not here"]
Kind = Literal["none", "docker", "podman", "kubernetes", "apptainer", "other"]

JUDGED = (
    "exception-in-rank",
    "rank-stopped",
    "waiting-for-rank-elsewhere",
    "rank-not-built",
    "waits-in-a-circle",
    "threads-wait-in-a-circle",
    "rank-never-appeared",
    "ranks-diverged",
    "waiting-for-other-node",
    "all-ranks-in-same-wait",
    "all-ranks-wait-for-their-gpus",
    "all-ranks-stand-still",
    "shard-stalled",
    "nccl-ranks-behind",
    "flight-recorder-ranks-behind",
    "flight-recorder-ranks-diverged",
    "warmup-request-unanswered",
)
"""The rules that say `hung`, and stay undecided where something that could move was not seen."""

ON_STACKS = (
    "waiting-for-rank-elsewhere",
    "ranks-diverged",
    "all-ranks-in-same-wait",
    "all-ranks-wait-for-their-gpus",
    "all-ranks-stand-still",
    "waiting-for-other-node",
    "rank-never-appeared",
    "rank-not-built",
    "rank-still-starting",
    "launcher-waits-for-ranks",
    "warmup-request-unanswered",
    "ends-by-itself",
    "compile-running",  # of a rank that compiles itself
)
"""The rules that rest on a stack."""

ON_GPUS = (
    "gpu-spinning",
    "gpu-lost",
    "gpu-shared",
    "gpu-memory-full",
    "gpu-slowed",
    "driver-does-not-answer",
)
"""The rules that rest on NVML."""

CAPABILITIES = {2: "DAC_READ_SEARCH", 19: "SYS_PTRACE", 21: "SYS_ADMIN", 34: "SYSLOG"}
"""Those that decide what can be seen, by their number (linux/capability.h)."""

_INITIAL_PID_NAMESPACE = 4026531836  # PROC_PID_INIT_INO, the same on every kernel
_LAST_INITIAL_MOUNT_NAMESPACE = 4026531841
"""The first mount namespace has one of the first numbers: fixed since 6.18, before the first or
second that is given out (0xF0000000). A container's come hundreds later."""
_GIB = 1 << 30


class Target(Struct, frozen=True):
    """What was looked at.

    Attributes:
        pid: the process that was named or found; None for a process of our own as a sample.
        names: what to call each process, by pid.
        launch: the launch that it belongs to, in words; "" where it belongs to none.
        note: what else there is to say about the choice.
        log: path of the log, or why there is none; None where no launch was looked at.
    """

    pid: int | None
    names: dict[int, str]
    launch: str = ""
    note: str = ""
    log: str | Missing | None = None


class Source(Struct, frozen=True):
    """One thing to look at, or one thing that decides what can be looked at.

    Attributes:
        id: for programs; title: for people.
        main: the exit code depends on it.
        seen: what was found, without a full stop.
        loses: rules whose findings are not found without it.
        undecided: rules that can no longer say `hung` without it.
        cost: what else is lost without it.
        ways: what opens it: lines to be copied, cheapest first; a line that begins with "#" says
            where the next ones belong.
    """

    id: str
    title: str
    state: State
    seen: str
    main: bool = False
    loses: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    cost: str = ""
    ways: tuple[str, ...] = ()


class Report(Struct, frozen=True):
    """The sources, the main ones first, and where this was asked."""

    target: Target
    sources: tuple[Source, ...]
    kind: Kind
    user: int | None

    @property
    def closed(self) -> tuple[Source, ...]:
        """Return the main sources that are not wholly open."""
        return tuple(one for one in self.sources if one.main and one.state in ("partly", "closed"))


class _Here(Struct, frozen=True):
    """What the ways depend on."""

    kind: Kind
    target_kind: Kind
    root: bool
    user: int | None
    target_user: int | None
    can_ptrace: bool
    yama: int
    name: str
    arguments: str


def judge(answers: Answers, target: Target, engine: Engine) -> Report:
    """Return what is open, what is closed, and what that means for the findings."""
    rights = answers.rights
    if isinstance(rights, Missing):
        unknown = Source(id="rights", title="rights", state="closed", main=True, seen=_why(rights))
        return Report(target=target, sources=(unknown,), kind="other", user=None)
    here = _here(rights, target)
    gpu_phases = tuple(table.id for table in engine.phases if "gpus" in table.progress)
    sources = (
        _stacks(answers.dumps, rights, target, here),
        _io(rights, target, here),
        *((_log(target.log, here),) if target.log is not None else ()),
        _gpus(answers.gpus, rights, target, here, gpu_phases),
        _gpu_processes(answers.gpus, rights, target, here),
        _file("fd", rights, target, here),
        _file("wchan", rights, target, here),
        _file("syscall", rights, target, here),
        _file("maps", rights, target, here),
        _file("stack", rights, target, here),
        _installation(answers, rights, target, here, engine.name),
        _cgroup(rights, here),
        _kernel_log(rights, here),
        _ras(rights.ras, target),
        _others(rights, here),
        _yama(rights, here),
        _hidepid(rights, here),
        _seccomp(rights, here),
        _namespaces(rights, here),
    )
    return Report(target=target, sources=sources, kind=here.kind, user=rights.user)


def container(place: Place) -> Kind:
    """Tell which kind of container a process lives in.

    The innermost comes first: Apptainer runs inside a pod as well, and a pod inside Docker.
    """
    signs, cgroup = set(place.signs), place.cgroup
    pids, mounts = (_namespace(place, kind) for kind in ("pid", "mnt"))
    if pids == _INITIAL_PID_NAMESPACE and 0 < mounts <= _LAST_INITIAL_MOUNT_NAMESPACE:
        return "none"  # a machine that was made of a container's image still has its files
    if signs & {"/.singularity.d", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"}:
        return "apptainer"
    kubernetes = {"KUBERNETES_SERVICE_HOST"} | {
        sign for sign in signs if sign.endswith("/kubernetes.io")
    }
    if signs & kubernetes or "kubepods" in cgroup:
        return "kubernetes"
    if "/run/.containerenv" in signs or "libpod" in cgroup:
        return "podman"
    if "/.dockerenv" in signs or re.search(r"/docker[/-]", cgroup):
        return "docker"
    away = pids not in (0, _INITIAL_PID_NAMESPACE)
    return "other" if signs or away or "/lxc" in cgroup else "none"


def _namespace(place: Place, kind: str) -> int:
    """Return the number of a namespace, 0 where it is not known."""
    match = re.search(r"\[(\d+)\]", place.namespaces.get(kind, ""))
    return int(match[1]) if match else 0


def _here(rights: Rights, target: Target) -> _Here:
    kind = container(rights.own)
    # A pod's host name is its own name, a Docker container's its id; one that was given is neither.
    usual = r"[0-9a-f]{12}" if kind in ("docker", "podman") else r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}"
    known = kind != "none" and re.fullmatch(usual, rights.hostname)
    return _Here(
        kind=kind,
        target_kind=container(rights.target) if rights.target else kind,
        root=rights.user == 0,
        user=rights.user,
        target_user=rights.target_user,
        can_ptrace=_has(rights, 19),
        yama=rights.yama or 0,
        name=rights.hostname if known else ("POD" if kind == "kubernetes" else "NAME"),
        arguments="preflight" + (f" {target.pid}" if target.pid else ""),
    )


def _stacks(dumps: Dumps | Missing, rights: Rights, target: Target, here: _Here) -> Source:
    cost = (
        "the suspects then come from the log alone (waiting-for-rank-behind-in-log), never more "
        "than undecided; ready only by the log's own line"
    )
    if isinstance(dumps, Missing):
        ways = (dumps.hint,) if dumps.reason == "not-installed" else ()
        return Source(
            id="stacks", title="stacks", state="closed", main=True, seen=_why(dumps),
            loses=ON_STACKS, undecided=("exception-in-rank", "rank-stopped"), cost=cost, ways=ways,
        )  # fmt: skip
    # What was not tried, or is no Python, is told by a file that needs the same right.
    answers: dict[int, Missing | None] = {}
    remarks = []
    for pid, answer in dumps.by_pid.items():
        answers[pid] = answer if isinstance(answer, Missing) else None
        if isinstance(answer, Missing) and answer.reason in ("not-tried", "unsupported"):
            answers[pid] = rights.files.get("syscall", {}).get(pid)
            allowed = "may be read" if answers[pid] is None else "is refused as well"
            remarks.append(
                f"{_name(target, pid)}: {answer.detail}, not dumped; its syscall file, which "
                f"needs the same right, {allowed}"
            )
    state, seen = _counted(answers, target, "process dumped", "processes dumped")
    tool = f"py-spy {dumps.version}".strip()
    undecided: tuple[str, ...] = ()
    if state == "partly":
        undecided = ("waiting-for-rank-elsewhere",)
        cost = (
            "all that only where it needs a stack that is missing; a rank without one is suspected "
            "by elimination alone, and never called hung"
        )
    return Source(
        id="stacks",
        title="stacks",
        state=state,
        main=True,
        seen="; ".join((f"{tool}: {seen}", *remarks)),
        loses=ON_STACKS,
        undecided=undecided,
        cost=cost,
        ways=_ways_to_ptrace(here) if state != "open" else (),
    )


def _io(rights: Rights, target: Target, here: _Here) -> Source:
    state, seen = _counted(rights.files["io"], target, "process", "processes")
    return Source(
        id="io",
        title="I/O counters",
        state=state,
        main=True,
        seen=f"/proc/PID/io of {seen}",
        loses=("eventfd-runaway",),
        undecided=JUDGED,
        cost="nothing is called hung; still-progressing no longer sees bytes from and to disk",
        ways=_ways_to_read(here) if state != "open" else (),
    )


def _log(log: str | Missing, here: _Here) -> Source:
    cost = (
        "nothing is called hung; ready only by the stacks; phases between the stacks and bars are "
        "not told"
    )
    loses = (
        "waiting-for-rank-behind-in-log",
        "log-stops",
        "wait-given-up",
        "exception-in-rank",
        "weights-loading",  # where only the log tells the model's path
    )
    undecided = tuple(rule for rule in JUDGED if rule not in loses)
    if isinstance(log, str):
        return Source(
            id="log", title="log", state="open", main=True, seen=log, loses=loses,
            undecided=undecided, cost=cost,
        )  # fmt: skip
    ways: tuple[str, ...]
    if log.reason == "permission":
        ways = _ways_to_read(here)
    elif "pipe" in log.detail:
        ways = _LOG_WAYS.get(here.kind) or _LOG_WAYS.get(here.target_kind) or _LOG_WAYS["none"]
        ways = tuple(way.replace("NAME", here.name) for way in ways)
    else:
        ways = (log.hint,) if log.hint else ()
    return Source(
        id="log", title="log", state="closed", main=True, seen=_why(log), loses=loses,
        undecided=undecided, cost=cost, ways=ways,
    )  # fmt: skip


def _gpus(
    gpus: Gpus | Missing, rights: Rights, target: Target, here: _Here, phases: tuple[str, ...]
) -> Source:
    used = [_name(target, pid) for pid in rights.gpu_users]
    there = bool(rights.pci_gpus or rights.gpu_devices or used)
    cost = f"nothing is called hung in {', '.join(phases)}, unless the launch is on the CPU"
    state: State
    ways: tuple[str, ...] = ()
    if isinstance(gpus, Gpus) and gpus.cards:
        lost = {index: card for index, card in gpus.cards.items() if isinstance(card, Missing)}
        there = True
        state = "open" if not lost else ("closed" if len(lost) == len(gpus.cards) else "partly")
        seen = f"NVML, driver {gpus.driver}: {len(gpus.cards) - len(lost)} of {len(gpus.cards)} "
        seen += "cards" + "".join(f"; GPU {index}: {_why(card)}" for index, card in lost.items())
        ways = tuple(dict.fromkeys(card.hint for card in lost.values() if card.hint))
    elif not there:
        state, seen = "not here", "no NVIDIA card on the bus, no device file of one"
    else:
        state = "closed"
        found = f"{rights.pci_gpus or len(rights.gpu_devices)} cards are here"
        if used:
            found = f"{', '.join(used[:4])} use GPUs" if len(used) > 1 else f"{used[0]} uses a GPU"
        seen = f"{_why(gpus) if isinstance(gpus, Missing) else 'NVML shows no card'}; {found}"
        if isinstance(gpus, Missing) and "pynvml" in gpus.detail:
            ways = (gpus.hint,)
        else:
            ways = tuple(way.replace("NAME", here.name) for way in _GPU_WAYS[here.kind])
    return Source(
        id="gpus", title="GPUs", state=state, main=there, seen=seen, loses=ON_GPUS,
        undecided=JUDGED, cost=cost, ways=ways,
    )  # fmt: skip


def _gpu_processes(gpus: Gpus | Missing, rights: Rights, target: Target, here: _Here) -> Source:
    memory = "whose memory grows on a card is not told, nor who else holds some"

    def source(
        state: State,
        seen: str,
        *,
        undecided: tuple[str, ...] = (),
        cost: str = memory,
        ways: tuple[str, ...] = (),
    ) -> Source:
        return Source(
            id="gpu-processes", title="GPU processes", state=state, seen=seen,
            loses=("gpu-shared",), undecided=undecided, cost=cost, ways=ways,
        )  # fmt: skip

    closed = partial(
        source, "closed", undecided=("all-ranks-wait-for-their-gpus",), ways=_NODE,
        cost="no card is told to be a rank's: gpu-spinning names no rank and none that never "
        "launched its part; waiting-for-rank-elsewhere no longer knows a rank by its spinning "
        f"card; {memory}",
    )  # fmt: skip
    if isinstance(gpus, Missing) or not gpus.cards:
        return source("not here", "no card can be asked")
    cards = {index: card for index, card in gpus.cards.items() if isinstance(card, Gpu)}
    pids = {process.pid for card in cards.values() for process in card.processes or ()}
    named = [target.names[pid] for pid in target.names if pid in pids]
    if named:
        return source("open", f"the driver names {', '.join(named[:6])} by PIDs that hold here")
    told = any(card.processes is not None for card in cards.values())
    what = "PIDs of another namespace, the host's" if pids else "no process"
    if opened := _opened(cards, target):
        more = f" and {len(opened) - 8} more" if len(opened) > 8 else ""
        return source(
            "partly",
            f"the driver names {what}; the device files that they have open tell "
            f"{', '.join(opened[:8])}{more}",
            ways=_NODE,
        )
    if not told:
        return closed("the driver names no processes")
    if rights.gpu_users:
        users = ", ".join(_name(target, pid) for pid in rights.gpu_users[:4])
        return closed(f"{users} has a card open, and the driver names {what}")
    inside = here.kind != "none"
    if inside:
        return source("partly", "no process is on a card: whether its PIDs hold here shows then")
    return source("open", f"{len(pids)} processes on the cards, by PIDs that hold here")


def _opened(cards: dict[int, Gpu], target: Target) -> list[str]:
    """Say which card is whose by the device files that the processes have open."""
    seen = {index: Card(gpu=gpu, last=gpu) for index, gpu in cards.items()}
    return [
        f"{name} on GPU {', '.join(map(str, own))}"
        for pid, name in target.names.items()
        if (own := cards_of(seen, (pid,)))
    ]


def _file(name: str, rights: Rights, target: Target, here: _Here) -> Source:
    title, cost = _FILES[name]
    state, seen = _counted(rights.files[name], target, "process", "processes")
    ways: tuple[str, ...] = ()
    if state != "open":
        ways = _ways_to_ptrace(here) if name == "syscall" else _ways_to_read(here)
        if name == "stack":
            ways = () if here.root and here.can_ptrace else _ways_to_read(here)
            if here.root:
                ways = _with_capability(here, "SYS_ADMIN")
    return Source(
        id=name, title=title, state=state, seen=f"/proc/PID/{name} of {seen}", cost=cost, ways=ways
    )


def _installation(
    answers: Answers, rights: Rights, target: Target, here: _Here, engine: str
) -> Source:
    found = answers.installation
    state: State = "closed"
    ways: tuple[str, ...] = ()
    if isinstance(found, Installation):
        state, seen = "open", f"{found.name} {found.version or '?'} in {found.path}"
    elif isinstance(found, Missing) and target.launch:
        seen = _why(found)
        ways = _ways_to_read(here) if found.reason == "permission" else ()
    elif rights.installed:
        place, version = next(iter(rights.installed.items()))
        state, seen = "open", f"{engine} {version} in {place}"
    else:
        state, seen = "not here", f"no {engine} beside this Python or the python3 of PATH"
    return Source(
        id="installation", title="installation", state=state, seen=seen, loses=("files-changed",),
        cost="the version comes from the log alone", ways=ways,
    )  # fmt: skip


def _cgroup(rights: Rights, here: _Here) -> Source:
    group = rights.cgroup
    state: State
    if group.version is None:
        state, seen = "not here", "no memory controller"
    else:
        state = "open" if group.events and group.limit_readable else "closed"
        if state == "closed" and (group.events or group.limit_readable):
            state = "partly"
        events = "memory.events" if group.version == 2 else "memory.oom_control"
        limit = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
        parts = [f"version {group.version}"]
        parts.append(f"{events} {'readable' if group.events else 'not readable'}")
        if not group.limit_readable:
            parts.append(f"{limit} not readable")
        elif group.memory_limit_bytes is None:
            parts.append("no memory limit")
        else:
            used = group.memory_used_bytes
            known = "" if used is None else f"{used / _GIB:.1f} of "
            parts.append(f"memory {known}{group.memory_limit_bytes / _GIB:.1f} GiB")
        parts.append("no CPU quota" if group.cpus is None else f"{group.cpus:g} CPUs")
        seen = ", ".join(parts)
    ways: tuple[str, ...] = ()
    if state in ("partly", "closed"):
        ways = (
            _NODE
            if here.kind != "none"
            else ("# the cgroup file system has to be mounted:", "mount | grep cgroup")
        )
    return Source(
        id="cgroup", title="cgroup", state=state, seen=seen,
        cost="rank-died and launch-ended no longer say that memory ran out (oom_kill)", ways=ways,
    )  # fmt: skip


def _kernel_log(rights: Rights, here: _Here) -> Source:
    missing = rights.kernel_log
    restrict = "" if rights.dmesg_restrict is None else f"dmesg_restrict={rights.dmesg_restrict}"
    ways: tuple[str, ...] = ()
    if missing is not None:
        if here.kind == "none":
            ways = ("sudo dmesg -T | grep -iE 'xid|killed process'",)
            if not here.root and rights.dmesg_restrict:
                ways += ("sudo sysctl kernel.dmesg_restrict=0",)
        else:
            ways = ("# on the node itself:", "sudo dmesg -T | grep -iE 'xid|killed process'")
    seen = "dmesg" if missing is None else _why(missing)
    return Source(
        id="kernel-log",
        title="kernel log",
        state="open" if missing is None else "closed",
        seen=", ".join(part for part in (seen, restrict) if part),
        cost="no finding reads it; rank-died and rank-never-appeared send you there (dmesg)",
        ways=ways,
    )


def _ras(ras: Ras | Missing | None, target: Target) -> Source:
    def source(state: State, seen: str, ways: tuple[str, ...] = ()) -> Source:
        return Source(
            id="nccl-ras", title="NCCL RAS", state=state, seen=seen,
            cost="no finding reads it; gpu-spinning sends you there for the counts of collectives",
            ways=ways,
        )  # fmt: skip

    if ras is None or isinstance(ras, Missing):
        return source("closed", _why(ras) if ras else "not asked")
    where = ras.address + (" (NCCL_RAS_ADDR)" if ras.from_target else "")
    if ras.listens is None:
        hint = ras.answer.hint if isinstance(ras.answer, Missing) else ""
        why = _why(ras.answer) if isinstance(ras.answer, Missing) else "not asked"
        return source("closed", f"{where}: {why}", (hint,) if hint else ())
    if not ras.listens:
        off = "NCCL_RAS_ENABLE=0 in its environment; " if ras.disabled else ""
        begun = "" if off else "; NCCL opens it with its first communicator, from 2.24 on"
        ways = ("NCCL_RAS_ENABLE=1",) if ras.disabled else ()
        return source(
            "closed" if off else "not here", f"{off}nobody listens on {where}{begun}", ways
        )
    owner = ""
    if ras.owner_pid is not None:
        whose = target.names.get(ras.owner_pid)
        whose = (
            f" ({whose})" if whose else ", which is none of this launch" if target.launch else ""
        )
        owner = f", PID {ras.owner_pid}{whose}"
    if isinstance(ras.answer, str):
        if ras.answer.upper().startswith("SERVER PROTOCOL"):
            foreign = (
                target.launch and ras.owner_pid is not None and (ras.owner_pid not in target.names)
            )
            return source("partly" if foreign else "open", f"answers on {where}{owner}")
        return source("closed", f"{where} is no RAS: it answers {ras.answer[:40]!r}{owner}")
    why = _why(ras.answer) if isinstance(ras.answer, Missing) else "not asked"
    hint = ras.answer.hint if isinstance(ras.answer, Missing) else ""
    return source("closed", f"{where}{owner}: {why}", (hint,) if hint else ())


def _others(rights: Rights, here: _Here) -> Source:
    held = [name for bit, name in CAPABILITIES.items() if _has(rights, bit)]
    seen = f"CapEff {rights.capabilities:x}: {', '.join(held) or 'none of those that matter'}"
    return Source(
        id="other-users",
        title="other users",
        state="open" if here.can_ptrace else "closed",
        seen=("their processes may be looked at too; " if here.can_ptrace else
              "only our own processes may be looked at; ") + seen,
        cost="a launch of another user shows neither stacks nor I/O counters: see these",
        ways=() if here.can_ptrace else _ways_to_read(here),
    )  # fmt: skip


def _yama(rights: Rights, here: _Here) -> Source:
    scope = rights.yama
    meaning = {
        None: "no Yama in this kernel",
        0: "0: processes of the same user may be traced",
        1: "1: only children of the tracer",
        2: "2: only with SYS_PTRACE",
        3: "3: nobody, until a reboot",
    }.get(scope, str(scope))
    state: State = "open" if not scope or (here.can_ptrace and scope < 3) else "closed"
    ways: tuple[str, ...] = ()
    if state == "closed":
        ways = _ways_to_ptrace(here) if scope != 3 else ("# only a reboot changes scope 3",)
    return Source(
        id="yama",
        title="ptrace scope",
        state=state,
        seen=meaning + ("; SYS_PTRACE lifts it" if scope and state == "open" else ""),
        cost="stacks and system calls of processes that we have not started",
        ways=ways,
    )


def _hidepid(rights: Rights, here: _Here) -> Source:
    options = dict(part.partition("=")[::2] for part in rights.proc_options.split(","))
    hides = options.get("hidepid", "0") not in ("0", "off")
    group = options.get("gid", "")
    exempt = group.isdecimal() and int(group) in rights.groups and group != "0"
    state: State = "closed" if hides and not here.can_ptrace and not exempt else "open"
    seen = f"/proc is mounted with hidepid={options.get('hidepid', '0')}"
    if hides and state == "open":
        seen += ", which does not concern us"
    ways: tuple[str, ...] = ()
    if state == "closed":
        ways = (f'sudo env "PATH=$PATH" hangdoctor {here.arguments}',)
        if group.isdecimal() and group != "0":
            ways += (f"sudo usermod -aG '#{group}' $USER  # and log in again",)
        ways += ("sudo mount -o remount,hidepid=0 /proc",)
    return Source(
        id="hidepid", title="hidepid", state=state, seen=seen,
        cost="launches of other users are not found at all", ways=ways,
    )  # fmt: skip


def _seccomp(rights: Rights, here: _Here) -> Source:
    names = {0: "no filter", 1: "strict", 2: "a filter is in force; what it refuses shows above"}
    state: State = "open" if not rights.seccomp else "partly"
    ways = _NODE if state != "open" and here.kind != "none" else ()
    return Source(
        id="seccomp",
        title="seccomp",
        state=state,
        seen="not told" if rights.seccomp is None else names.get(rights.seccomp, "?"),
        cost="what it refuses: ptrace and process_vm_readv are the stacks",
        ways=ways,
    )


def _namespaces(rights: Rights, here: _Here) -> Source:
    own = "no container" if here.kind == "none" else f"we are in {_KINDS[here.kind]}"
    if rights.target is None:
        return Source(id="container", title="container", state="open", seen=own, cost="")
    theirs = rights.target
    parts = [own]
    if here.target_kind != here.kind:
        in_it = "no container" if here.target_kind == "none" else _KINDS[here.target_kind]
        parts.append(f"the target is in {in_it}")
    differ, unknown = [], []
    for kind, ours in rights.own.namespaces.items():
        its = theirs.namespaces.get(kind)
        if its is None:
            unknown.append(kind)
        elif its != ours:
            differ.append(kind)
    if (rights.own.pid_depth or 1) < (theirs.pid_depth or 1) and "pid" in unknown:
        unknown.remove("pid")
        differ.append("pid")
    if differ:
        parts.append(f"the target has its own namespaces: {', '.join(differ)}")
    if unknown:
        parts.append(f"not told of the target: {', '.join(unknown)}")
    if not differ and not unknown:
        parts.append("the target shares our pid, mnt, net and user namespaces")
    return Source(
        id="container",
        title="container",
        state="partly" if unknown else "open",
        seen="; ".join(parts),
        cost="no finding depends on it; it decides which of the lines below fit",
        ways=_ways_to_read(here) if unknown else (),
    )


def _ways_to_ptrace(here: _Here) -> tuple[str, ...]:
    """Return how to get stacks and system calls."""
    if here.yama == 3:
        return ("# kernel.yama.ptrace_scope is 3: only a reboot changes it",)
    ways = _ways_to_read(here)
    same = here.target_user in (None, here.user)
    if here.kind == "none" and not here.root and same and here.yama:
        return ("sudo sysctl kernel.yama.ptrace_scope=0", *ways)
    return ways


def _ways_to_read(here: _Here) -> tuple[str, ...]:
    """Return how to read what the kernel keeps from other users and from fewer capabilities."""
    if here.can_ptrace and here.root:
        if here.kind == "none":
            return (
                "# a filter (seccomp), a security module or a debugger refuses it to root:",
                "grep -E 'Seccomp|TracerPid' /proc/self/status; cat /proc/self/attr/current",
            )
        return _NODE
    if here.kind == "none":
        if here.root:
            return _with_capability(here, "SYS_PTRACE")
        ways: tuple[str, ...] = (f'sudo env "PATH=$PATH" hangdoctor {here.arguments}',)
        if here.target_user not in (None, here.user, 0):
            owner = f"sudo -u '#{here.target_user}' env \"PATH=$PATH\" hangdoctor {here.arguments}"
            ways = (owner, *ways)
        return ways
    return _with_capability(here, "SYS_PTRACE")


def _with_capability(here: _Here, capability: str) -> tuple[str, ...]:
    ways = _CAPABILITY_WAYS[here.kind]
    if not here.root and here.kind in ("docker", "podman"):
        inside = f"{here.kind} exec -it -u 0 NAME hangdoctor ARGUMENTS"
        ways = ("# now, inside, as root:", inside, *ways)
    return tuple(
        way.replace("CAPABILITY", capability)
        .replace("NAME", here.name)
        .replace("ARGUMENTS", here.arguments)
        for way in ways
    )


def _counted(
    answers: Mapping[int, Missing | None], target: Target, one: str, many: str
) -> tuple[State, str]:
    """Say how many of the processes answered, and why the others did not."""
    gone = {pid for pid, answer in answers.items() if answer and answer.reason == "gone"}
    live = {pid: answer for pid, answer in answers.items() if pid not in gone}
    refused = {pid: answer for pid, answer in live.items() if answer is not None}
    count = len(live) - len(refused)
    if target.pid is None:
        seen = "a process of our own"
    elif len(live) == 1:
        seen = _name(target, next(iter(live)))
    else:
        seen = f"{count} of {len(live)} {many}"
    if "dumped" in one and len(live) == 1 and not refused:
        seen += " dumped"
    whys: dict[str, list[str]] = {}
    for pid, missing in refused.items():
        whys.setdefault(_why(missing), []).append(_name(target, pid))
    for reason, who in whys.items():
        seen += f"; {_some(who)}: {reason}" if len(live) > 1 else f": {reason}"
    if not live:
        return "closed", "the processes have ended"
    if not refused:
        return "open", seen
    return ("closed" if not count else "partly"), seen


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _name(target: Target, pid: int) -> str:
    return target.names.get(pid, f"PID {pid}")


def _why(missing: Missing) -> str:
    # Paths of one process differ from those of the next; the reason is the same.
    detail = re.sub(r"\s*\(/proc/\d+/\w+\)", "", missing.detail)
    detail = re.sub(r": Try running again with elevated permissions.*", "", detail)  # py-spy's
    return detail.split("\n")[0][:160] or missing.reason


def _has(rights: Rights, bit: int) -> bool:
    return bool(rights.capabilities >> bit & 1)


_KINDS: dict[Kind, str] = {
    "none": "no container",
    "docker": "a Docker container",
    "podman": "a Podman container",
    "kubernetes": "a Kubernetes pod",
    "apptainer": "an Apptainer container",
    "other": "a container or PID namespace of unknown kind",
}

_FILES = {
    "fd": (
        "open files",
        (
            "still-progressing no longer sees reads from the page cache and from network file "
            "systems by the offsets of open files; all-ranks-stand-still names no file"
        ),
    ),
    "wchan": (
        "kernel waits",
        (
            "a wait for storage (NFS) is told from others only in state D, the open() of a FIFO "
            "that nobody serves not at all; all-ranks-stand-still takes 120 s for a pipe, not 40 s"
        ),
    ),
    "syscall": (
        "system calls",
        (
            "all-ranks-stand-still no longer names the file or pipe that a read() waits for; "
            "nothing else reads it"
        ),
    ),
    "maps": (
        "memory maps",
        "the installation is found by the stacks' paths or by the environment alone",
    ),
    "stack": ("kernel stacks", "no finding reads them; they help by hand where a thread is in D"),
}

_NODE = (
    "# on the node itself, where the server's process has another PID:",
    "sudo hangdoctor diagnose",
)

_LOG_WAYS: dict[Kind, tuple[str, ...]] = {
    "none": (
        "# at the next start: COMMAND > server.log 2>&1; for this one, if its reader keeps it:",
        "hangdoctor diagnose PID --for 45 --log FILE",
    ),
    "docker": (
        "# where docker runs, at the container's host:",
        "docker logs -f NAME 2>&1 | hangdoctor diagnose PID --for 45 --log -",
    ),
    "podman": (
        "# where podman runs, at the container's host:",
        "podman logs -f NAME 2>&1 | hangdoctor diagnose PID --for 45 --log -",
    ),
    "kubernetes": (
        "# where kubectl works; PID is what this container calls it:",
        "kubectl logs -f NAME | kubectl exec -i NAME -- hangdoctor diagnose PID --for 45 --log -",
    ),
    "apptainer": (
        "# an instance keeps it in a file:",
        "ls ~/.apptainer/instances/logs/*/*/; hangdoctor diagnose PID --log FILE",
    ),
}

_GPU_WAYS: dict[Kind, tuple[str, ...]] = {
    "none": ("nvidia-smi  # it must answer: install or load the driver", "lsmod | grep nvidia"),
    "docker": ("docker run --gpus all ...",),
    "podman": ("podman run --device nvidia.com/gpu=all ...",),
    "kubernetes": (
        "# pod spec; a debug container needs the class of the pod too:",
        "runtimeClassName: nvidia",
        'resources: {limits: {nvidia.com/gpu: "1"}}',
    ),
    "apptainer": ("apptainer exec --nv ...",),
    "other": ("docker run --gpus all ...", "# pod spec:", "runtimeClassName: nvidia"),
}

_POD_SPEC = (
    "# pod spec, for the next start:",
    'securityContext: {capabilities: {add: ["CAPABILITY"]}}',
)

_CAPABILITY_WAYS: dict[Kind, tuple[str, ...]] = {
    "none": (
        "# this root lacks CAP_CAPABILITY: use a login on the machine itself, or where it is a",
        "# container that leaves no sign of itself:",
        "docker run --cap-add CAPABILITY ...",
        *_POD_SPEC,
    ),
    "docker": (
        "# now, on the host, with the server's PID there:",
        "sudo hangdoctor diagnose $(docker inspect -f '{{.State.Pid}}' NAME)",
        "# now, as a second container beside it:",
        "docker run --rm -it --pid container:NAME --cap-add CAPABILITY IMAGE \\",
        "  hangdoctor ARGUMENTS",
        "# at its next start:",
        "docker run --cap-add CAPABILITY ...",
    ),
    "podman": (
        "# now, on the host, with the server's PID there:",
        "sudo hangdoctor diagnose $(podman inspect -f '{{.State.Pid}}' NAME)",
        "# at its next start:",
        "podman run --cap-add CAPABILITY ...",
    ),
    "kubernetes": (
        "# now, as a debug container in the running pod:",
        "kubectl debug -it NAME --image=IMAGE --target=CONTAINER --profile=sysadmin \\",
        "  -- hangdoctor ARGUMENTS",
        *_POD_SPEC,
    ),
    "apptainer": (
        "# now, outside the container, as the user who started it (it is on the host's PIDs):",
        "hangdoctor ARGUMENTS",
        "# as root:",
        "sudo apptainer exec --add-caps CAP_CAPABILITY ...",
    ),
    "other": ("docker run --cap-add CAPABILITY ...", *_POD_SPEC),
}
