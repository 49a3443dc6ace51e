"""What is recorded: frozen values without behaviour, the raw answers of the machine.

Units are in the names. `None` in a field means "not known". A section or a card that could not be
looked at is a `Missing` with its reason, never an empty list or a zero.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = 1
"""Number of the recording format; a reader refuses a higher one."""

Reason = Literal[
    "permission",  # the system refused
    "gone",  # the process ended while we looked
    "timeout",  # no answer within the collector's deadline
    "unsupported",  # this machine, engine or Python version has no such thing
    "not-installed",  # a tool or library is absent
    "failed",  # it answered with an error
    "not-tried",  # not looked at, for example because looking could harm
    "inapplicable",  # cannot exist here: GPU readings of a launch on the CPU
]


class Struct(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of all recorded values: immutable, and short on disk."""


class Missing(Struct, frozen=True, tag="missing"):
    """Something that was not observed, and why.

    Attributes:
        reason: one word a program can act on.
        detail: the system's own words.
        hint: what would make it visible, best a command.
    """

    reason: Reason
    detail: str = ""
    hint: str = ""


class Io(msgspec.Struct, frozen=True, array_like=True):
    """/proc/PID/io: bytes and system calls since the process, or the thread, started.

    Counts read() and write() on everything (files, pipes, eventfds); blind to send, recv and mmap.
    """

    rchar: int
    wchar: int
    syscr: int
    syscw: int
    read_bytes: int
    write_bytes: int


class HotThread(msgspec.Struct, frozen=True, array_like=True):
    """What is read only of a thread that has just used CPU; counters since it started.

    Attributes:
        system_s: of its CPU time, what it spent in the kernel.
        queue_s: seconds in which it was ready to run and had no CPU (schedstat).
        sleeps, preempted: voluntary and other context switches (status).
        io: /proc/PID/task/TID/io.
    """

    system_s: float
    queue_s: float | None = None
    sleeps: int | None = None
    preempted: int | None = None
    io: Io | None = None


class Thread(msgspec.Struct, frozen=True, array_like=True):
    """One thread as /proc/PID/task/TID tells it; an array on disk, there are hundreds of them.

    Attributes:
        tid: thread id in the observer's PID namespace.
        name: comm, at most 15 bytes.
        state: R, S, D, T, t, Z, X or I.
        cpu_s: user plus system time since the thread started, in seconds (10 ms steps).
        wchan: kernel function it sleeps in, "0" when running; None where not read.
        syscall: the line of /proc/TID/syscall ("running", "202 0x7f.. 0x189 ..", "-1 SP PC");
            None where not read or not allowed.
        hot: more of it, where it has used CPU since the last look.
    """

    tid: int
    name: str
    state: str
    cpu_s: float
    wchan: str | None = None
    syscall: str | None = None
    hot: HotThread | None = None


class OpenFile(msgspec.Struct, frozen=True, array_like=True):
    """One open descriptor worth keeping: a regular file being read, a FIFO, an eventfd.

    Attributes:
        fd: number of the descriptor.
        kind: what it is.
        target: path, or the kernel's name for it such as "anon_inode:[eventfd]".
        position: offset of a regular file, counter of an eventfd; None where not read.
        size_bytes: of a regular file.
        identity: the kernel's number of an eventfd, the same in all processes that share it.
        stirs: the counter of an eventfd changed between reads in quick succession; None where it
            was read once only.
    """

    fd: int
    kind: Literal["file", "fifo", "pipe", "socket", "eventfd", "other"]
    target: str
    position: int | None = None
    size_bytes: int | None = None
    identity: int | None = None
    stirs: bool | None = None


class Process(Struct, frozen=True):
    """One process of the launch's tree.

    Attributes:
        pid, ppid: in the observer's PID namespace.
        inner_pid: the PID that the process itself sees (last NSpid); None where the same.
        start_ticks: field 22 of /proc/PID/stat; with the pid it names a process for ever.
        age_s: seconds since it started, at the time of the snapshot.
        title: its command line as it stands now (setproctitle rewrites it), joined by spaces.
        comm: the 15-byte name.
        state: state of the main thread; "Z" is a child that nobody has waited for.
        user: numeric user id.
        cpu_s: user and system time of all its threads, in seconds.
        children_cpu_s: the same of the children that it has waited for.
        exit_code: of a zombie, as wait() encodes it; None where the kernel hides it.
        sleeps: how often its main thread has gone to sleep so far (voluntary context switches).
        rss_bytes: resident memory; rss_file_bytes: its part backed by files (mmap progress).
        tracer_pid: of a debugger that is attached; 0 for none, None where not read.
        io: /proc/PID/io.
        threads: all threads, main thread first.
        files: descriptors worth keeping, on a slower beat; None where not looked at this time.
        unreadable: what of it could not be read: "syscall", "wchan", "io", "fd", "title" ...
    """

    pid: int
    ppid: int
    start_ticks: int
    title: str
    comm: str
    state: str
    cpu_s: float
    inner_pid: int | None = None
    age_s: float | None = None
    user: int | None = None
    children_cpu_s: float | None = None
    exit_code: int | None = None
    sleeps: int | None = None
    rss_bytes: int | None = None
    rss_file_bytes: int | None = None
    tracer_pid: int | None = None
    io: Io | None = None
    threads: tuple[Thread, ...] = ()
    files: tuple[OpenFile, ...] | None = None
    unreadable: dict[str, Missing] = {}


class Processes(Struct, frozen=True, tag="processes"):
    """The tree of the launch, the root first.

    Attributes:
        roots: the pids the observation started from.
        ended: processes of the tree that ended since the recording began: pid to wait status as
            os.waitstatus_to_exitcode gives it (negative for a signal), None where only their
            parent knows.
        parents: titles of the living parents of the topmost processes, by the parent's pid: what
            stands above the tree. An orphan's parent is init, a container's first process, or
            another that reaps.
    """

    processes: tuple[Process, ...]
    roots: tuple[int, ...] = ()
    ended: dict[int, int | None] = {}
    parents: dict[int, str] = {}


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One stack frame, Python or native, as py-spy names it.

    Attributes:
        function: name, qualified by its class on Python 3.11 and later.
        path: source file, or the shared library of a native frame.
        line: 0 for a native frame.
    """

    function: str
    path: str
    line: int = 0


class ThreadStack(Struct, frozen=True):
    """The stack of one thread, innermost frame first.

    Attributes:
        tid: in the namespace of the *target*; None on Python 3.10 and older.
        name: Python's name for it ("MainThread").
        active: py-spy's guess that it was running, not waiting.
        owns_gil: True for the thread that holds the GIL.
    """

    name: str
    frames: tuple[Frame, ...]
    tid: int | None = None
    active: bool | None = None
    owns_gil: bool | None = None


class ProcessStacks(Struct, frozen=True, tag="stack"):
    """All Python threads of one process, the main thread first."""

    threads: tuple[ThreadStack, ...]
    native: bool = False


class Stacks(Struct, frozen=True, tag="stacks"):
    """Stacks by pid; a process that could not be dumped is there with its reason."""

    by_pid: dict[int, ProcessStacks | Missing]


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A process that holds something: the other end of a connection, a lock."""

    pid: int
    comm: str = ""


class WaitObject(Struct, frozen=True):
    """What a descriptor that a thread waits for leads to.

    Attributes:
        fd: the descriptor, in the process that waits; None for what is named by a path.
        kind: what it is.
        target: path of a file or FIFO; "local -> remote" of a TCP connection, one address of a
            listener; name of a unix socket.
        identity: the kernel's number of an eventfd, the same in all processes that share it.
        state: of a socket, in small letters: "established", "syn-sent", "listen", "closed",
            "not accepted" for a connection that its listener has not taken yet ...
        others: processes that hold the other end, the launch's and others; None where that could
            not be seen. Empty: nobody does. Of an eventfd: the launch's that share it, of which
            each can read and write it.
        served: the other end is in an epoll set, or a thread of its holder is blocked in a wait for
            it; None where that could not be seen.
        mutual: ids of those threads that are blocked in reading this other end alone.
        received_bytes: that the owner has not read; connections not accepted yet, for a listener.
        unsent_bytes: that the other end has not taken.
        since_received_ms, since_sent_ms: TCP's own clock; None for others.
        retransmits: of the segment that is under way now.
    """

    kind: Literal["unix", "tcp", "socket", "pipe", "fifo", "eventfd", "file", "other"]
    fd: int | None = None
    target: str = ""
    identity: int | None = None
    state: str = ""
    others: tuple[Holder, ...] | None = None
    served: bool | None = None
    mutual: tuple[int, ...] = ()
    received_bytes: int = 0
    unsent_bytes: int = 0
    since_received_ms: int | None = None
    since_sent_ms: int | None = None
    retransmits: int = 0


class ThreadWait(Struct, frozen=True):
    """A blocked thread, its call and what it waits for.

    Attributes:
        tid: as in Thread.
        call: name of the system call; "page fault" for none.
        line: the first two words of /proc/TID/syscall: the same line later is the same call.
        objects: what its descriptors lead to, at most MOST_OBJECTS; count: how many there are.
        timed: it goes on after a while in any case.
        ends_at_s: of a process's main thread that waits for nothing but time: when its sleep ends,
            in recording time; None where that is not told.
        lasts_s: of such a sleep how long it is from its beginning, where only that is told.
        kernel: kernel function it sleeps in, where it is not an ordinary wait.
        switches: how often it has gone to sleep so far: unchanged means the very same wait.
        futex: what it waits for there. "gil": Python's global lock; "mutex": a pthread mutex, whose
            owner is known; "semaphore": one of POSIX, of which Python makes its own locks, or
            what looks like it; "other": a condition and all else. These two have no owner.
        address: of the futex: equal ones in a process are the same lock.
        owner_tid: of the mutex, in the observer's namespace.
        waits_for_pid: child that it waits for; None for any.
        libraries: that its stack leads through, innermost first, as far as they can be told.
    """

    tid: int
    call: str
    line: str = ""
    objects: tuple[WaitObject, ...] = ()
    count: int = 0
    timed: bool = False
    ends_at_s: float | None = None
    lasts_s: float | None = None
    kernel: str = ""
    switches: int | None = None
    futex: Literal["", "gil", "mutex", "semaphore", "other"] = ""
    address: int = 0
    owner_tid: int | None = None
    waits_for_pid: int | None = None
    libraries: tuple[str, ...] = ()


class EpollSet(Struct, frozen=True):
    """An epoll set of a process that runs.

    Attributes:
        fd: its descriptor.
        objects: what it watches, at most MOST_OBJECTS; count: how many there are.
    """

    fd: int
    objects: tuple[WaitObject, ...] = ()
    count: int = 0


class PeekedCall(Struct, frozen=True):
    """A system call in which a running thread was caught.

    Attributes:
        call: its name.
        times: how often.
        fd: its first argument, where that is a descriptor.
        objects: what that leads to; of an epoll set what it watches.
    """

    call: str
    times: int
    fd: int | None = None
    objects: tuple[WaitObject, ...] = ()


class Peek(Struct, frozen=True, tag="peek"):
    """What the registers of a running thread told in some stops of microseconds.

    Attributes:
        tid: of the thread.
        peeks: how often it was looked at.
        calls: in which it was caught, the most frequent first; at other times it was in none.
        stopped_us, most_us: how long it was stopped for, in microseconds: median and longest.
    """

    tid: int
    peeks: int
    calls: tuple[PeekedCall, ...] = ()
    stopped_us: float = 0.0
    most_us: float = 0.0


class ProcessWaits(Struct, frozen=True, tag="waits"):
    """All blocked threads of one process, the main thread first.

    Attributes:
        threads: those that are blocked.
        unreadable: what could not be read: "sockets", "memory", "fd", "registers".
        epolls: its epoll sets, where one of its threads runs.
        peek: of its busiest thread; None where none runs, or it was not asked for.
    """

    threads: tuple[ThreadWait, ...]
    unreadable: dict[str, Missing] = {}
    epolls: tuple[EpollSet, ...] = ()
    peek: Peek | None = None


class FileLock(Struct, frozen=True):
    """A lock on a file, or a file that is a lock by being there.

    Attributes:
        path: of the file, as its holder or the launch sees it.
        kind: "flock", "posix" (fcntl) and "ofd" are the kernel's; "file" locks by its existence,
            as does "soft", which has its owner in it.
        owner: whether a process holds it. A "file" lock is held by who has it open.
        holders: who holds it.
        waiters: pids that the kernel keeps waiting for it.
        age_s: since the file was last changed; None where it is not known.
        older_than_all: no process that could hold it had started when it was last changed.
        why: what keeps its owner from being known, for people.
        download_age_s: since the unfinished download that it guards was last written to; None where
            there is none.
    """

    path: str
    kind: Literal["flock", "posix", "ofd", "file", "soft"]
    owner: Literal["alive", "dead", "unknown"]
    holders: tuple[Holder, ...] = ()
    waiters: tuple[int, ...] = ()
    age_s: float | None = None
    older_than_all: bool | None = None
    why: str = ""
    download_age_s: float | None = None


class Waits(Struct, frozen=True, tag="all-waits"):
    """Who is blocked in what.

    Attributes:
        by_pid: processes of the launch; one that could not be looked at with its reason.
        locks: that a thread of the launch waits for or may wait for; None where not looked at.
        locks_searched: the caches of compilers and hubs were searched for lock files, too.
    """

    by_pid: dict[int, ProcessWaits | Missing]
    locks: tuple[FileLock, ...] | Missing | None = None
    locks_searched: bool = False


class ShardFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of the checkpoint.

    Attributes:
        path: as the launch sees it, links followed.
        size_bytes: of it.
        cached_bytes: what of it the page cache held; None where that could not be asked.
    """

    path: str
    size_bytes: int
    cached_bytes: int | None = None


class HeldFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of weights that a process has open or mapped.

    Attributes:
        path: as in ShardFile.
        size_bytes: of it; None where its file system does not tell, or it is no regular file.
        position: offset of its descriptor; None where it is only mapped.
        resident_bytes: pages of it in the process's address space; None where it is not mapped.
        cached_bytes: as in ShardFile.
    """

    path: str
    size_bytes: int | None = None
    position: int | None = None
    resident_bytes: int | None = None
    cached_bytes: int | None = None


class Mount(Struct, frozen=True):
    """A mounted file system, as /proc/PID/mountinfo tells it.

    Attributes:
        point: where it is mounted; type: "ext4", "nfs4", "fuse.juicefs"; source: device or server.
    """

    point: str
    type: str
    source: str = ""


class Checkpoint(Struct, frozen=True, tag="checkpoint"):
    """The model's files on disk.

    Attributes:
        directory: that holds them, or the links to them.
        files: the weights; unfinished: files that a download is still writing.
        index_bytes: size of all tensors as the index of the safetensors says; None without one.
        mount: what the first of the files lies on.
    """

    directory: str
    files: tuple[ShardFile, ...] = ()
    unfinished: tuple[ShardFile, ...] = ()
    index_bytes: int | None = None
    mount: Mount | None = None


class Weights(Struct, frozen=True, tag="weights"):
    """How far the weights have been read.

    Attributes:
        checkpoint: what there is to read; None where it was not looked for this time.
        held: by pid, the files of weights that it has open or mapped.
    """

    checkpoint: Checkpoint | Missing | None = None
    held: dict[int, tuple[HeldFile, ...] | Missing] = {}


class CacheDirectory(msgspec.Struct, frozen=True, array_like=True):
    """A cache of a kernel compiler.

    Attributes:
        path: as the launch sees it.
        newest_wall_s: the newest time stamp of its directories, as far as they were looked at.
        directories: how many that were; a cache can have more.
    """

    path: str
    newest_wall_s: float
    directories: int


class Caches(Struct, frozen=True, tag="caches"):
    """The caches of kernel compilers that are there, by their id in engines/*.toml."""

    by_id: dict[str, CacheDirectory] = {}


class GpuProcess(msgspec.Struct, frozen=True, array_like=True):
    """A process that holds memory of a card.

    Attributes:
        pid: as the driver tells it: in a container often the host's number.
        used_bytes: its memory on the card.
        name: of a process outside the launch, the kernel's short one; "" where there is no such
            process here, None where it was not looked up.
    """

    pid: int
    used_bytes: int | None = None
    name: str | None = None


class Gpu(Struct, frozen=True, tag="gpu"):
    """One card as NVML tells it at the moment of the snapshot.

    Attributes:
        slowed_by: why its clocks are below what was asked for; empty for nothing, None where the
            driver does not tell.
        pcie_received_bytes, pcie_sent_bytes: counters, modulo 2^32.
        pcie_received_per_s: bytes, where the driver has no counters and measures for 20 ms.
        nvlink_received_bytes, nvlink_sent_bytes: counters over all links.
        uncorrected_errors: of its memory, by ECC, since the driver was loaded.
        xids: faults that the driver has told since the watching began, the oldest first.
        processes: None where the driver does not tell them.
        opened_by: how many descriptors on its device file each process of the launch has; None
            where not looked at, as where `processes` names one of them.
    """

    index: int
    name: str = ""
    bus: str = ""
    util_pct: int | None = None
    memory_util_pct: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    slowed_by: tuple[str, ...] | None = None
    pcie_received_bytes: int | None = None
    pcie_sent_bytes: int | None = None
    pcie_received_per_s: float | None = None
    nvlink_received_bytes: int | None = None
    nvlink_sent_bytes: int | None = None
    uncorrected_errors: int | None = None
    xids: tuple[int, ...] | None = None
    processes: tuple[GpuProcess, ...] | None = None
    opened_by: dict[int, int] | None = None


class Gpus(Struct, frozen=True, tag="gpus"):
    """All cards, by index; a lost card is there with its reason."""

    cards: dict[int, Gpu | Missing]
    driver: str = ""


class KernelMessage(msgspec.Struct, frozen=True, array_like=True):
    """A line of the kernel's log that may tell of a death: an OOM kill, a fault of a card.

    Attributes:
        boot_s: seconds since boot, as the kernel stamps it.
        text: the line without its stamp.
    """

    boot_s: float
    text: str


class Host(Struct, frozen=True, tag="host"):
    """The machine, and the cgroup of the launch.

    Attributes:
        load_1m: load average; cpu_count: CPUs that the launch may use.
        pressure_pct: PSI "some avg10" for "cpu", "io" and "memory", where the kernel has it.
        oom_kills: counter `oom_kill` of the launch's cgroup; only its growth means anything.
        cgroup_used_bytes, cgroup_limit_bytes: memory of the tightest cgroup above the launch that
            has a limit; None where none has.
        cgroup_limit_hits: how often that limit was met, which makes the kernel reclaim first.
        shm_used_bytes, shm_total_bytes: of /dev/shm.
        kernel_log: its newest lines on OOM kills and Xid errors, oldest first.
    """

    load_1m: float | None = None
    cpu_count: int | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_used_bytes: int | None = None
    pressure_pct: dict[str, float] = {}
    oom_kills: int | None = None
    cgroup_used_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    cgroup_limit_hits: int | None = None
    shm_used_bytes: int | None = None
    shm_total_bytes: int | None = None
    kernel_log: tuple[KernelMessage, ...] | Missing | None = None


class CollectiveEntry(msgspec.Struct, frozen=True, array_like=True):
    """One operation in a Flight Recorder dump of PyTorch; an array on disk, there are many.

    Attributes:
        record_id: number of the entry in its rank's recorder, counted over all groups.
        group: name of its process group.
        seq: number of the collective in its group; of a send or receive the number among these.
        op: what it is, without the backend: "all_reduce", "send 0->3" (ranks of the group).
        state: as the recorder saw it last.
        is_p2p: a send or receive, which other ranks need not join.
        created_wall_s: when the rank's program enqueued it, seconds since 1970; None if untold.
        shape: sizes and types of its inputs, as far as all ranks must agree on them; else "".
        gave_up: the watchdog retired it though it had not completed: its time limit passed.
        frames: the program's frames, innermost first.
    """

    record_id: int
    group: str
    seq: int
    op: str
    state: Literal["scheduled", "started", "completed"]
    is_p2p: bool = False
    created_wall_s: float | None = None
    shape: str = ""
    gave_up: bool = False
    frames: tuple[Frame, ...] = ()


class CollectiveGroup(Struct, frozen=True):
    """A process group as one rank's Flight Recorder tells it.

    Attributes:
        name, description: PyTorch's name, and what the program calls it.
        ranks: global numbers of its members, in the group's order.
        enqueued, completed: number of the last operation that this rank enqueued, and that its
            watchdog saw completed; None where the dump does not tell. Of collectives, or of sends
            and receives, whichever came last.
    """

    name: str
    ranks: tuple[int, ...]
    description: str = ""
    enqueued: int | None = None
    completed: int | None = None


class FlightRecorderDump(Struct, frozen=True, tag="dump"):
    """What the Flight Recorder of one rank wrote.

    Attributes:
        rank: global number, by the file's name; its groups agree.
        file: the path.
        version: of the format.
        written_wall_s: the file's time stamp; a copy may have a later one.
        groups: those that the rank belongs to.
        entries: operations that had not completed, and the last completed ones of each group, by
            record id.
    """

    rank: int
    file: str
    version: str = ""
    written_wall_s: float | None = None
    groups: tuple[CollectiveGroup, ...] = ()
    entries: tuple[CollectiveEntry, ...] = ()


class FlightRecorder(Struct, frozen=True, tag="flight-recorder"):
    """Dumps by rank; a file that could not be used is in `unusable`, with its reason."""

    dumps: dict[int, FlightRecorderDump] = {}
    unusable: dict[str, Missing] = {}


class NcclRank(Struct, frozen=True):
    """One rank of a communicator, as NCCL's RAS tells it.

    Attributes:
        number: in the communicator.
        pid: in the observer's namespace; None for a process that is not the launch's here.
        host: the address it has in RAS's own network.
        counts: operations that it has launched, by collective ("" where all are counted as one);
            empty where nothing was told.
        state: "running", "init", "finalize", "abort"; or why it is missing: "unresponsive", "dead",
            "no-member".
        error: what it reports, in NCCL's words or its number; "" for none.
    """

    number: int
    pid: int | None = None
    host: str = ""
    counts: dict[str, int] = {}
    state: str = "running"
    error: str = ""


class NcclCommunicator(Struct, frozen=True):
    """One communicator.

    Attributes:
        id: its hash.
        size: number of its ranks.
        ranks: those that were named: in JSON all, in text those that stand out.
        others: what the ranks that were not named have launched; empty where that is not one
            number, or all are named.
    """

    id: str
    size: int
    ranks: tuple[NcclRank, ...] = ()
    others: dict[str, int] = {}


class NcclRas(Struct, frozen=True, tag="nccl-ras"):
    """What NCCL's RAS answered for this launch.

    Attributes:
        address: where it answered; version: of NCCL.
        form: "json", "repaired json" where NCCL wrote it wrong, or "text".
        communicators: in JSON all, in text those that are not all alike.
        alike: number of communicators that were told to be alike on all ranks, and are not listed.
        timeouts: ranks that did not answer RAS in time.
    """

    address: str
    version: str = ""
    form: Literal["json", "repaired json", "text"] = "json"
    communicators: tuple[NcclCommunicator, ...] = ()
    alike: int = 0
    timeouts: int = 0


class LogPosition(Struct, frozen=True, tag="log"):
    """How far the log had been read when the snapshot was taken.

    Attributes:
        read_bytes: bytes of the recording's log that were there by then.
        silent_s: seconds since the log was last written to, by the file's own time stamp; None
            where it comes from a pipe and nothing was read yet.
        ended: the writer closed a pipe.
    """

    read_bytes: int
    silent_s: float | None = None
    ended: bool = False


SECTIONS = (
    "processes",
    "stacks",
    "waits",
    "weights",
    "caches",
    "gpus",
    "host",
    "nccl_ras",
    "flight_recorder",
    "log",
)
"""What a snapshot is made of, by the names of its fields."""


class Snapshot(Struct, frozen=True):
    """All that was seen at one moment.

    Attributes:
        at_s: monotonic seconds since the recording began.
        wall_s: seconds since 1970.
        took_s: what each collector cost, in seconds.
        processes, ..., log: the sections, see SECTIONS.
            `None` means not due this time, which is not `Missing`: it says nothing.
    """

    at_s: float
    wall_s: float
    took_s: dict[str, float] = {}
    processes: Processes | Missing | None = None
    stacks: Stacks | Missing | None = None
    waits: Waits | Missing | None = None
    weights: Weights | Missing | None = None
    caches: Caches | Missing | None = None
    gpus: Gpus | Missing | None = None
    host: Host | Missing | None = None
    nccl_ras: NcclRas | Missing | None = None
    flight_recorder: FlightRecorder | Missing | None = None
    log: LogPosition | Missing | None = None


class SourceFile(Struct, frozen=True):
    """A file of the engine's installation that differs from what was released, or is too new.

    Attributes:
        path: inside the installation, such as "sglang/srt/models/deepseek_v2.py".
        modified_wall_s: its time stamp.
        sha256: of its bytes now.
        differs_from_release: True where the wheel's RECORD lists another hash; None if no RECORD.
        newer_than_launch: True where it changed so long after the launch's processes had started
            that they run what was there before.
    """

    path: str
    modified_wall_s: float
    sha256: str
    differs_from_release: bool | None = None
    newer_than_launch: bool = False


class Installation(Struct, frozen=True, tag="installation"):
    """The engine that the processes really run, found through them and not through our own path.

    Attributes:
        environment: of the launcher, the variables that set a time-out of the engine's; None where
            they could not be read.
    """

    name: str
    version: str
    path: str
    changed_files: tuple[SourceFile, ...] = ()
    environment: dict[str, str] | None = None


class LogSource(Struct, frozen=True):
    """Where the log came from.

    Attributes:
        origin: path as the user gave it or as it was found, "-" for a pipe.
        from_start: it was read from its first byte, so that an absent line means something.
    """

    origin: str
    from_start: bool = True


class Header(Struct, frozen=True, omit_defaults=False):
    """What holds for a whole recording.

    Attributes:
        schema: SCHEMA of the writer.
        stall_after_s: stillness after which a look in depth began: the verdict depends on it.
        normal_s: how long each phase took at the longest in the known-good logs that were given.
        still_running: the user vouches that a bare log is the whole log of a live launch.
    """

    schema: int = SCHEMA
    hangdoctor: str = ""
    created_wall_s: float = 0.0
    source: str = ""
    stall_after_s: float = 20.0
    engine: str = ""
    command: tuple[str, ...] = ()
    installation: Installation | Missing | None = None
    log: LogSource | None = None
    normal_s: dict[str, float] = {}
    still_running: bool = False
