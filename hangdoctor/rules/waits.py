"""Rules over the waits between ranks."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.blocked import blocked_threads, lock_circle
from hangdoctor.facts.phases import earliest_phase
from hangdoctor.findings import Evidence, Finding, enumerate_names
from hangdoctor.frames import place, same_shape
from hangdoctor.logs.timeline import lacking
from hangdoctor.model import Missing
from hangdoctor.rules.case import (
    PIPE_WAITS,
    STORAGE_FACTOR,
    SYMMETRIC_FACTOR,
    besides,
    evidence,
    judge,
    last_line,
    line_of,
    linked,
    lock_is_dead,
    only_first_rank_heard,
    past_normal,
    phase_lacked,
    quiet,
    stands,
    stood_s,
    unseen_progress,
    waits_in,
)
from hangdoctor.rules.locks import delete_lock, see_holder
from hangdoctor.rules.loops import loop_words
from hangdoctor.rules.sleeps import sleeps_at, wakes_soon
from hangdoctor.waitgraph import launcher_waits_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hangdoctor.facts import RankFacts
    from hangdoctor.rules.case import Case


def waiting_for_rank_elsewhere(case: Case) -> Iterator[Finding]:
    """Ranks wait in a collective for one that is somewhere else.

    What it sees: some ranks stand in an operation that ends only when all join it (a barrier, a
    rendezvous, a collective), or their GPUs spin in one, and one rank's stack is in none, by our
    dumps or by those that a watchdog has printed into the log. Or ranks are blocked in reading a
    connection whose other end one rank alone has, and does not serve.
    Why it matters: the ranks that wait are healthy. The one that is elsewhere holds all of them.
    One that sleeps and wakes by itself within half an hour, before the others give up, is not
    called hung meanwhile.
    What to do: look at where that rank stands; its innermost frames say what it does instead.
    """
    graph = case.graph
    if not graph.suspects or graph.absent[:1] == graph.suspects[:1]:
        return
    suspects = graph.suspects
    waiters = (
        graph.waiting
        or tuple(rank for rank in graph.device if rank not in suspects)
        or graph.linked
    )
    if not waiters:
        return
    names = tuple(rank.name for rank in suspects)
    doing = waits_in(waiters[0].wait) if waiters[0].wait else "waits for its GPU"
    if waiters[0] in graph.linked and not waiters[0].wait and waiters[0].blocked:
        doing = f"waits in {waiters[0].blocked.call}"
    if len(graph.operations) > 1:
        doing = "waits in collectives"
    if len(waiters) > 1:
        doing = doing.replace("waits", "wait").replace("its GPU", "their GPUs")
    does = "is elsewhere" if len(suspects) == 1 else "are elsewhere"
    if graph.by_elimination:
        does = "has not joined it, by elimination"
    elif suspects[0].wait:
        does = waits_in(suspects[0].wait)
    elif suspects[0].runaway_s is not None and suspects[0].loop is not None:
        does = loop_words(suspects[0])
    elif suspects[0].place:
        does = _is_at(case, suspects[0])
    elif suspects[0].blocked:
        does = f"is blocked in {suspects[0].blocked.text}"
    phase = earliest_phase(suspects)
    moving = [rank.name for rank in suspects if rank.moving]
    sure = bool(graph.elsewhere) and bool(graph.waiting)
    untold = _links_unseen(case, suspects)
    finding = Finding(
        rule="waiting-for-rank-elsewhere",
        verdict="found",
        title=f"{enumerate_names([rank.name for rank in waiters])} {doing}"
        + (", and so" if "GPU" in doing else "")
        + f" for {enumerate_names(names)}, which {does}",
        ranks=tuple(rank.name for rank in (*suspects, *waiters)),
        # A rank that others have only just begun to wait for is not to blame for anything yet.
        culprits=names if _has_waited(case, *waiters) and not untold else (),
        phase=phase,
        confidence="low" if graph.by_elimination else ("high" if sure else "medium"),
        because=evidence(
            *(_arrived(case, rank) for rank in waiters),
            *(linked(case, rank) for rank in graph.linked[:2]),
            *(item for rank in suspects[:4] for item in (stands(case, rank), quiet(case, rank))),
            *(_children(case, rank) for rank in suspects[:2]),
            *(besides(case, rank) for rank in suspects[:2]),
            *(last_line(case, rank.name) for rank in suspects[:2]),
            *(_spinning(case, rank) for rank in waiters[:2]),
            stands(case, waiters[0]),
        ),
        needs=(
            *(tuple(f"a stack of {name}" for name in names) if graph.by_elimination else ()),
            *(untold or ()),
        ),
        advice=_advice_for(case, suspects),
    )
    if moving:
        yield _still_moving(finding, moving, suspects)
        return
    if graph.by_elimination:
        yield finding
        return
    yield judge(case, suspects, finding, needed_s=case.hung_after_s, waiters=waiters)


def rank_not_built(case: Case) -> Iterator[Finding]:
    """Ranks are built and idle, and the launcher waits for one that is not.

    What it sees: the launcher in its wait for the ranks' ready message, ranks in their loop, and
    the others somewhere else, in no collective.
    Why it matters: the ranks that idle are healthy, and wait in no operation that would tell whom
    for. The launcher waits for the one that still builds, and serves nothing before that.
    What to do: look at where that rank stands; its innermost frames say what it does instead.
    """
    graph = case.graph
    suspects = graph.elsewhere
    if not graph.idle or not suspects or graph.waiting or graph.device or graph.unseen:
        return
    if launcher_waits_for(case.facts, case.engine) not in ("launcher-ready", "controller-ready"):
        return
    names = tuple(rank.name for rank in suspects)
    built = [rank.name for rank in graph.idle]
    does = "is elsewhere" if len(suspects) == 1 else "are elsewhere"
    if suspects[0].wait:
        does = waits_in(suspects[0].wait)
    elif suspects[0].place:
        does = _is_at(case, suspects[0])
    finding = Finding(
        rule="rank-not-built",
        verdict="found",
        title=f"{enumerate_names(built)} {'is' if len(built) == 1 else 'are'} built, and the "
        f"launcher waits for {enumerate_names(names)}, which {does}",
        ranks=(*names, *built),
        culprits=names if _has_waited(case, *suspects) else (),
        phase=earliest_phase(suspects),
        confidence="high",
        because=evidence(
            *(item for rank in suspects[:4] for item in (stands(case, rank), quiet(case, rank))),
            *(_children(case, rank) for rank in suspects[:2]),
            *(last_line(case, rank.name) for rank in suspects[:2]),
            stands(case, graph.idle[0]),
        ),
        advice=_advice_for(case, suspects),
    )
    moving = [rank.name for rank in suspects if rank.moving]
    if moving:
        yield _still_moving(finding, moving, suspects)
        return
    yield judge(case, suspects, finding, needed_s=case.hung_after_s)


def waits_in_a_circle(case: Case) -> Iterator[Finding]:
    """Ranks wait for each other in a circle.

    What it sees: main threads that are each blocked in reading a connection whose other end the
    next one alone has, the last one's the first's.
    Why it matters: none of them can ever go on. Each expects that another one speaks first.
    What to do: compare the places; one of them should have sent before it began to read.
    """
    circle = case.graph.circle
    if not circle or any(rank.moving for rank in circle):
        return
    names = tuple(rank.name for rank in circle)
    finding = Finding(
        rule="waits-in-a-circle",
        verdict="found",
        title=f"{enumerate_names(names)} wait for each other: each reads what another should send",
        ranks=names,
        phase=earliest_phase(circle),
        confidence="medium",
        because=evidence(
            *(linked(case, rank) for rank in circle[:4]),
            *(item for rank in circle[:2] for item in (stands(case, rank), quiet(case, rank))),
        ),
        advice=("compare the two stacks: which of them should have sent first?",),
    )
    if min(stood_s(rank) for rank in circle) >= case.stall_after_s / 2:
        yield judge(case, circle, finding, needed_s=case.hung_after_s)


def threads_wait_in_a_circle(case: Case) -> Iterator[Finding]:
    """Threads of one process wait for each other's locks.

    What it sees: pthread mutexes, whose owner stands in their memory, and Python's global lock with
    the thread that the dump shows as its holder: a chain of blocked threads that comes back to its
    beginning. Locks that have no owner (threading.Lock, semaphores) cannot be followed.
    Why it matters: none of these threads ever goes on, nor who waits for them.
    What to do: the places where they stand show which lock each took first; take them in one order.
    """
    for rank in case.facts.ranks:
        track = case.facts.track(rank)
        if track is None or not rank.present:
            continue
        circle = lock_circle(
            blocked_threads(track, case.facts.at_s or 0.0, case.facts.name_of), track
        )
        if not circle or min(each.for_s for each in circle) < case.stall_after_s / 4:
            continue
        chain = ", ".join(f"{each.thread} ({each.tid}) in {each.text}" for each in circle)
        main = any(each.tid == rank.pid for each in circle)
        finding = Finding(
            rule="threads-wait-in-a-circle",
            verdict="found",
            title=f"threads of {rank.name} wait for each other's locks: a deadlock",
            ranks=(rank.name,),
            culprits=(rank.name,) if main else (),
            phase=rank.phase,
            confidence="high" if main else "medium",
            because=evidence(
                Evidence(text=chain, pid=rank.pid, rank=rank.name, at_s=case.facts.at_s),
                stands(case, rank),
            ),
            advice=(f"see where they stand: py-spy dump --native --pid {rank.pid} (it stops it)",),
        )
        # Who waits in such a circle cannot be at work in secret: stillness of half the time is
        # enough.
        if main:
            yield judge(case, (rank,), finding, needed_s=case.stall_after_s, proven=True)
        else:
            yield finding


def threads_wait_for_locks(case: Case) -> Iterator[Finding]:
    """A rank's main thread waits for a lock of Python's, and another of its threads for one too.

    What it sees: two or more threads of a process that sleep without end on a semaphore, of which
    Python makes its locks, where no module of Python's own waits for work. Python keeps no record
    of who holds a lock, so that the circle itself is not seen.
    Why it matters: threads that take two locks in opposite order stand like this for ever; so does
    one that waits for a lock whose holder has ended without giving it back.
    What to do: compare the two places: which locks does each of the threads hold there?
    """
    for rank in case.facts.ranks:
        waits = rank.lock_waits
        if not rank.present or rank.moving is not False or len(waits) < 2:
            continue
        if min(each.for_s for each in waits[:2]) < case.stall_after_s / 4:
            continue
        same = waits[0].address == waits[1].address
        yield Finding(
            rule="threads-wait-for-locks",
            verdict="undecided",
            title=f"{rank.name} {_waits_for_locks(rank)}"
            + (": the same lock" if same else ": perhaps each holds what the other waits for"),
            ranks=(rank.name,),
            phase=rank.phase,
            confidence="low",
            because=evidence(
                *(
                    Evidence(
                        text=f"thread {each.thread} ({each.tid}) sleeps on a lock at {each.place}, "
                        f"for {each.for_s:.0f} s",
                        pid=rank.pid,
                        rank=rank.name,
                        at_s=case.facts.at_s,
                    )
                    for each in waits[:4]
                ),
                quiet(case, rank),
            ),
            needs=("who holds these locks: Python keeps no record; the code at the places tells",),
            advice=(f"see all its threads: py-spy dump --nonblocking --pid {rank.pid}",),
        )


def connection_unanswered(case: Case) -> Iterator[Finding]:
    """A connection waits for a listener that does not accept it, or for any answer at all.

    What it sees: a thread of a rank blocked on a connection that stands in a listener's queue, in
    two looks at least; or one that is tried and not answered at all (SYN_SENT); or one on which
    TCP has sent the same four times and more without an answer.
    Why it matters: the process that listens has stopped to look at its socket, or nobody listens at
    that address, or the other machine is not reached any more. A connection in the queue looks
    established to who has made it.
    What to do: look at where the listener stands; for an address that does not answer, test from
    this machine that it is the right one and can be reached.
    """
    for rank in case.facts.ranks:
        threads = (*((rank.blocked,) if rank.blocked else ()), *rank.blocked_besides)
        for each in threads:
            if not each.unanswered or each.for_s < case.stall_after_s / 4:
                continue
            yield Finding(
                rule="connection-unanswered",
                verdict="found",
                title=f"{rank.name} is blocked in {each.text}",
                ranks=(rank.name,),
                phase=rank.phase,
                confidence="medium",
                because=evidence(
                    Evidence(
                        text=f"thread {each.thread} ({each.tid}) for {each.for_s:.0f} s"
                        + (f": {each.traffic}" if each.traffic else ""),
                        pid=rank.pid,
                        rank=rank.name,
                        at_s=case.facts.at_s,
                    )
                ),
                advice=(f"see all its connections: ss -tnp | grep 'pid={rank.pid},'",),
            )


def rank_never_appeared(case: Case) -> Iterator[Finding]:
    """There are fewer ranks than the launch asked for.

    What it sees: the tensor, pipeline and data parallel sizes against the rank processes, while
    the launch has been in its start for longer than imports take.
    Why it matters: ranks that are there wait for the one that never came.
    What to do: read the launcher's log for an error at spawn; see whether memory ran out.
    """
    facts = case.facts
    if not facts.tracks or facts.sections.get("processes", ...) is not None:
        return
    present = [rank for rank in facts.ranks if rank.present]
    never = [rank for rank in facts.ranks if rank.present is False and rank.pid is None]
    spawning = any(track.role == "spawn_main" and track.present for track in facts.tracks.values())
    count = facts.expected_count
    if spawning or not present or count is None or len(present) >= count or not case.graph.waiting:
        return
    if any(rank.present is False and rank.pid is not None for rank in facts.ranks):
        return  # it was there and ended: another rule says so
    names = tuple(rank.name for rank in never)
    finding = Finding(
        rule="rank-never-appeared",
        verdict="found",
        title=f"{len(present)} of {count} ranks are there; "
        + (f"{enumerate_names(names)} never appeared" if names else "the others never appeared"),
        ranks=names,
        culprits=names,
        phase=earliest_phase(case.graph.waiting),
        confidence="high" if names else "medium",
        because=evidence(
            Evidence(text=f"the launch asks for {count} ranks, {len(present)} processes are there"),
            stands(case, case.graph.waiting[0]),
            last_line(case, ""),
        ),
        advice=(
            "read the launcher's log for an error while it started the ranks",
            "see whether the kernel killed it: dmesg | grep -i 'killed process'",
        ),
    )
    yield judge(case, (), finding, needed_s=case.hung_after_s)


def rank_still_starting(case: Case) -> Iterator[Finding]:
    """Ranks wait for one whose process still starts.

    What it sees: fewer ranks than the launch asked for, ranks in the rendezvous, and a child of the
    launcher that has not got its title yet: it imports.
    Why it matters: imports from a network file system take minutes; one that hangs holds all.
    What to do: look at where that process stands, and which file system its packages lie on.
    """
    facts, waiting = case.facts, case.graph.waiting
    present = [rank for rank in facts.ranks if rank.present]
    starting = [
        track
        for track in facts.tracks.values()
        if track.role == "spawn_main" and track.present and track.process.state not in "ZX"
    ]
    count = facts.expected_count
    if not starting or not waiting or count is None or len(present) >= count:
        return
    never = [rank.name for rank in facts.ranks if rank.present is False and rank.pid is None]
    who = enumerate_names(never) if len(never) == count - len(present) else "another rank"
    where = [track for track in starting if track.stack]
    at = f", at {place(where[0].stack[0])}" if where and where[0].stack else ""
    pids = enumerate_names([str(track.process.pid) for track in starting[:4]])
    yield Finding(
        rule="rank-still-starting",
        verdict="undecided",
        title=f"{enumerate_names([rank.name for rank in waiting])} "
        f"{'waits' if len(waiting) == 1 else 'wait'} for {who}, whose process (pid {pids}) "
        f"still starts{at}",
        ranks=tuple(never),
        culprits=tuple(never)
        if len(never) == len(starting) and max(map(stood_s, waiting)) >= case.stall_after_s / 2
        else (),
        phase="start",
        confidence="low",
        because=evidence(
            *(
                Evidence(
                    text=f"pid {track.process.pid} is in state {track.process.state}"
                    + (f", at {place(track.stack[0])}" if track.stack else ""),
                    pid=track.process.pid,
                    at_s=facts.at_s,
                )
                for track in starting[:2]
            ),
            stands(case, waiting[0]),
        ),
        needs=("whether its imports still advance: look again in a minute",),
        advice=(
            f"see where it stands: py-spy dump --nonblocking --pid {starting[0].process.pid}",
            "see which file system Python's packages lie on: df with the path of that frame",
        ),
    )


def ranks_diverged(case: Case) -> Iterator[Finding]:
    """Ranks wait in different collectives: they are out of step.

    What it sees: at least two groups of ranks, each in an operation that needs all of them, and
    not the same one.
    Why it matters: none of the operations can ever end. A branch that only some ranks take (a
    condition on the rank, an empty batch, a patch with one more collective) is the usual cause.
    What to do: compare the two stacks from the outside in; where they part is the branch.
    """
    graph = case.graph
    groups: dict[str, list[RankFacts]] = {
        "|".join(operation): [r for r in graph.waiting if same_shape(r.operation, operation)]
        for operation in graph.operations
    }
    if graph.idle and graph.waiting and not graph.elsewhere and not graph.device:
        groups.setdefault("idle", []).extend(graph.idle)
    if len(groups) < 2 or graph.elsewhere or graph.device:
        return
    # Process groups are made one after the other: the ranks that came first wait in a later one
    # for those that come last. That is an order, and becomes a divergence only when it lasts.
    joining = any(rank.wait and rank.wait.kind == "rendezvous" for rank in graph.waiting)
    if joining and case.facts.sizes.get("nnodes", 1) > 1:
        return
    parts = [
        f"{enumerate_names([rank.name for rank in ranks])} in {_operation(ranks[0])}"
        for ranks in groups.values()
    ]
    everyone = tuple(rank.name for ranks in groups.values() for rank in ranks)
    settled = [rank for ranks in groups.values() for rank in ranks if rank.wait]
    where = "are in different collectives"
    if joining:
        where = "wait at different steps of the rendezvous"
    finding = Finding(
        rule="ranks-diverged",
        verdict="found",
        title=f"the ranks {where}: {', '.join(parts)}",
        ranks=everyone,
        phase=earliest_phase(tuple(rank for ranks in groups.values() for rank in ranks)),
        confidence="medium" if joining or "idle" in groups else "high",
        because=evidence(
            *(item for ranks in groups.values() for item in (stands(case, ranks[0]),)),
            *(quiet(case, rank) for rank in settled[:4]),
        ),
        needs=("which rank left the common path: compare what each decided before it",),
        advice=(
            (
                "compare the two stacks from the outside in: where they part is the branch that "
                "only some ranks take"
            ),
            "undo the last patch to that function, or guard it so that all ranks take it",
        ),
    )
    if any(rank.moving for rank in settled):
        return
    # In step, ranks pass each other in a collective for moments; never for as long as this.
    needed_s = SYMMETRIC_FACTOR * case.stall_after_s if joining else case.hung_after_s
    yield judge(case, tuple(settled), finding, needed_s=needed_s, proven=not joining)


def waiting_for_other_node(case: Case) -> Iterator[Finding]:
    """All ranks of this machine wait for another node.

    What it sees: a launch over several nodes, all ranks here in the rendezvous, or in the same
    operation that ranks of other nodes take part in.
    Why it matters: nothing here is wrong; the other node has not come, or cannot be reached.
    What to do: start it, or find out why it cannot reach the address that --dist-init-addr names.
    """
    waiting, nodes = case.graph.waiting, case.facts.sizes.get("nnodes", 1)
    if nodes < 2 or not waiting or len(waiting) != sum(bool(r.present) for r in case.facts.ranks):
        return
    meeting = all(rank.wait and rank.wait.kind == "rendezvous" for rank in waiting)
    if not meeting and (len(case.graph.operations) > 1 or any(rank.moving for rank in waiting)):
        return
    what = "to join the rendezvous" if meeting else f"to join in {_operation(waiting[0])}"
    phase = earliest_phase(waiting)
    finding = Finding(
        rule="waiting-for-other-node",
        verdict="found",
        title=f"all ranks of this machine wait for another of the {nodes} nodes {what}",
        ranks=tuple(rank.name for rank in waiting),
        phase=phase,
        confidence="medium",
        because=evidence(
            *(_arrived(case, rank) for rank in waiting),
            stands(case, waiting[0]),
            quiet(case, waiting[0]),
            last_line(case, waiting[0].name),
        ),
        advice=(
            *(
                (
                    "start the other nodes with the same --dist-init-addr and --nnodes",
                    "test from the other node that the address and port can be reached",
                )
                if meeting
                else ("look at the other nodes: hangdoctor diagnose there",)
            ),
        ),
    )
    # The other node may still come, minutes later where it must be scheduled and pull an image.
    if past_normal(case, phase):
        yield judge(case, waiting, finding, needed_s=STORAGE_FACTOR * case.stall_after_s)
    else:
        yield finding


def all_ranks_in_same_wait(case: Case) -> Iterator[Finding]:
    """All ranks wait in the same collective, and none is missing.

    What it sees: every rank there, every stack in the same operation, for long.
    Why it matters: no rank is to blame. The transport under the operation (NCCL, peer-to-peer,
    InfiniBand, a wrong interface, shared memory) does not deliver, or a kernel never ends.
    What to do: run with NCCL_DEBUG=INFO; try NCCL_P2P_DISABLE=1 together with
    --disable-custom-all-reduce; test a bare all_reduce over the same devices.
    """
    graph = case.graph
    everyone = case.everyone
    if len(everyone) < 2 or len(graph.waiting) != len(everyone) or graph.absent:
        return
    if len(graph.operations) != 1 or (case.facts.sizes.get("nnodes", 1)) > 1:
        return
    if any(rank.moving for rank in graph.waiting):
        return
    finding = Finding(
        rule="all-ranks-in-same-wait",
        verdict="found",
        title=f"all {len(everyone)} ranks wait in the same operation "
        f"({_operation(graph.waiting[0])}), and none stands out: its transport may not deliver",
        ranks=tuple(rank.name for rank in everyone),
        phase=earliest_phase(graph.waiting),
        confidence="medium",
        because=evidence(
            stands(case, everyone[0]),
            quiet(case, everyone[0]),
            *(_spinning(case, rank) for rank in everyone[:2]),
        ),
        needs=("what the transport does: the same launch with NCCL_DEBUG=INFO",),
        advice=(
            "look again in a minute: a first collective may be slow",
            "read the log of the first rank that printed something unusual before it",
            "relaunch with NCCL_DEBUG=INFO and count 'Init START' and 'Init COMPLETE' lines",
            "relaunch with NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce, both at once",
        ),
    )
    yield judge(case, graph.waiting, finding, needed_s=SYMMETRIC_FACTOR * case.stall_after_s)


def all_ranks_wait_for_their_gpus(case: Case) -> Iterator[Finding]:
    """All ranks wait for their own GPUs, and no rank is elsewhere.

    What it sees: every rank in a synchronisation with its GPU, or its cards spinning; for long.
    Why it matters: a kernel does not end. Either it waits in the GPU for a peer's kernel (custom
    all-reduce, symmetric memory), or it is itself at fault; Python's stacks do not tell which.
    What to do: relaunch with --disable-custom-all-reduce, then with --disable-cuda-graph; set
    CUDA_LAUNCH_BLOCKING=1 to see which call launches the kernel.
    """
    graph = case.graph
    everyone = case.everyone
    if not everyone or len(graph.device) != len(everyone) or graph.absent:
        return
    if any(rank.moving is not False for rank in everyone):
        return
    single = len(everyone) == 1
    names = tuple(rank.name for rank in everyone)
    idle = [rank.name for rank in everyone if rank.reading == "idle"]
    blurred = [rank.name for rank in everyone if rank.reading not in ("idle", "spinning")]
    finding = Finding(
        rule="all-ranks-wait-for-their-gpus",
        verdict="found",
        title=(
            f"{names[0]} waits for its GPU: a kernel does not end"
            if single
            else f"all {len(everyone)} ranks wait for their GPUs: a kernel does not end, "
            "which rank's is not seen"
        ),
        ranks=names,
        culprits=names if single and _has_waited(case, everyone[0]) else (),
        phase=earliest_phase(tuple(everyone)),
        confidence="medium",
        because=evidence(
            *(_spinning(case, rank) for rank in everyone[:8]),
            *(item for rank in everyone[:2] for item in (stands(case, rank), quiet(case, rank))),
        ),
        needs=(f"why the GPU of {enumerate_names(idle)} idles while its rank waits for it",)
        if idle
        else (),
        advice=(
            "relaunch with CUDA_LAUNCH_BLOCKING=1: the stack then shows the kernel's call",
            *(() if single else ("relaunch with --disable-custom-all-reduce",)),
            "relaunch with --disable-cuda-graph",
        ),
    )
    found = judge(case, tuple(everyone), finding, needed_s=SYMMETRIC_FACTOR * case.stall_after_s)
    if blurred and found.state == "hung" and case.facts.tracks:
        found = msgspec.structs.replace(
            finding,
            verdict="undecided",
            confidence="low",
            needs=(
                *finding.needs,
                f"the idle power of the GPUs of {enumerate_names(blurred)}: does the kernel spin?",
            ),
        )
    yield found


def all_ranks_stand_still(case: Case) -> Iterator[Finding]:
    """Nothing moves, and no rank waits for another.

    What it sees: every rank blocked outside any known operation of the group, without progress.
    Why it matters: they wait for something outside: a file that does not deliver, a pipe, a lock,
    a server. Or the only rank of the launch hangs. One that wakes by itself in time is not called
    hung meanwhile.
    What to do: see which file or socket it is; its innermost frames and system call say.
    """
    graph = case.graph
    everyone = case.everyone
    if not everyone or graph.waiting or graph.device or graph.linked or graph.unseen:
        return
    still = [rank for rank in graph.elsewhere if rank.moving is False]
    if not still or len(still) != len(everyone):
        return
    same = len({rank.place.rpartition(":")[0] for rank in still}) == 1
    first = still[0]
    where = waits_in(first.wait) if first.wait else f"stands still at {first.place}"
    if (
        not first.wait
        and len(everyone) == 1
        and (len(first.lock_waits) > 1 or sleeps_at(case.facts, case.engine, first))
    ):
        where = _is_at(case, first)
    single = len(everyone) == 1
    spinning = tuple(rank.name for rank in still if rank.runaway_s is not None)
    to_blame = spinning if len(spinning) == 1 else ()
    if single:
        to_blame = (first.name,) if _has_waited(case, first) else ()
    title = (
        f"{first.name} {where}"
        if single
        else f"all {len(still)} ranks "
        + (
            where.replace("waits", "wait").replace("stands", "stand")
            if same
            else "stand still, at different places"
        )
        + ", and none of them in a collective"
    )
    finding = Finding(
        rule="all-ranks-stand-still",
        verdict="found",
        title=title,
        ranks=tuple(rank.name for rank in still),
        culprits=to_blame,
        phase=earliest_phase(tuple(still)),
        confidence="medium",
        because=evidence(
            *(item for rank in still[:2] for item in (stands(case, rank), quiet(case, rank))),
            *(_waiting_file(case, rank) for rank in still[:2]),
            *(besides(case, rank) for rank in still[:2]),
            *(_children(case, rank) for rank in still[:2]),
            last_line(case, still[0].name),
        ),
        advice=_advice_for(case, tuple(still[:1])),
    )
    # A pipe without anybody at its other end does not come back, nor a lock without an owner, and
    # nothing outside ends a sleep; other silence may be storage's.
    needed_s = case.hung_after_s
    known = all(
        rank.kernel in PIPE_WAITS or lock_is_dead(rank) or _sleeps(rank, 0.75 * needed_s)
        for rank in still
    )
    if not (single or known):
        needed_s = SYMMETRIC_FACTOR * case.stall_after_s
    yield judge(case, tuple(still), finding, needed_s=needed_s)


def waiting_for_rank_behind_in_log(case: Case) -> Iterator[Finding]:
    """By the log, some ranks lack a line that their peers have.

    What it sees: milestones per rank, where no stack tells more.
    Why it matters: after loading, ranks wait in a barrier without a line; the ranks that lack
    "Load weight end" are the ones that are waited for.
    What to do: look at the stack of the rank that lacks the line.
    """
    if not case.observed or case.graph.suspects:
        return
    if not case.facts.log_is_whole:
        return
    missing = lacking(case.facts.timeline)
    behind = {name: milestones for name, milestones in missing.items() if milestones}
    if not behind or len(behind) == len(case.facts.ranks) or only_first_rank_heard(case):
        return
    # A look at the stacks may have succeeded and shown none: each of them was refused.
    if any(rank.stack is not None for rank in case.facts.ranks if rank.name in behind):
        return
    silent_s = case.log_still_s if case.observed else None
    if silent_s is not None and silent_s < case.stall_after_s / 2:
        return
    names = tuple(behind)
    first = next(iter(behind.values()))[0]
    ranks = tuple(rank for rank in case.facts.ranks if rank.name in behind)
    yield Finding(
        rule="waiting-for-rank-behind-in-log",
        verdict="undecided",
        title=f"{enumerate_names(names)} {'lacks' if len(names) == 1 else 'lack'} "
        f"the log line {line_of(case, first)} that the other ranks have",
        ranks=names,
        culprits=names,
        phase=phase_lacked(case, behind) or earliest_phase(ranks),
        confidence="low",
        because=evidence(*(last_line(case, name) for name in names[:4])),
        needs=(
            f"the stack of {names[0]}: hangdoctor diagnose PID, as root or the same user",
            *unseen_progress(case, earliest_phase(ranks)),
        ),
        advice=(f"look at where {names[0]} stands before you end the launch",),
    )


def _has_waited(case: Case, *ranks: RankFacts) -> bool:
    """Tell whether one of the ranks stands where it waits for so long that blame is in order."""
    return any(rank.counted_out or stood_s(rank) >= case.stall_after_s / 2 for rank in ranks)


def _sleeps(rank: RankFacts, needed_s: float) -> bool:
    """Tell whether a rank has been in one and the same sleep for so long."""
    return rank.blocked is not None and rank.blocked.asleep and rank.blocked.for_s >= needed_s


def _is_at(case: Case, rank: RankFacts) -> str:
    """Say where a rank is that is in no known wait."""
    native = f"in {rank.stack_native[0][:60]} " if rank.stack_native else ""
    if len(rank.lock_waits) > 1:
        return _waits_for_locks(rank)
    return sleeps_at(case.facts, case.engine, rank) or f"is {native}at {rank.place}"


def _waits_for_locks(rank: RankFacts) -> str:
    main, *others = rank.lock_waits
    beside = ", ".join(f"{each.thread or each.tid} at {each.place}" for each in others[:2])
    more = f" and {len(others) - 2} more" if len(others) > 2 else ""
    threads = "thread" if len(others) == 1 else "threads"
    does = "does" if len(others) == 1 else "do"
    return f"waits for a lock at {main.place}, as {does} its {threads} {beside}{more}"


def _links_unseen(case: Case, suspects: tuple[RankFacts, ...]) -> tuple[str, ...]:
    """Say what keeps it open which of several suspects waits for another of them."""
    if len(suspects) < 2:
        return ()
    section = case.facts.sections.get("waits")
    blind = [
        rank.name
        for rank in suspects
        if section is not None
        or ((track := case.facts.track(rank)) and track.waits_missing is not None)
    ]
    if not blind:
        return ()
    return (f"the system calls of {enumerate_names(blind)}: does one wait for the other?",)


def _operation(rank: RankFacts) -> str:
    if rank.wait is None:
        return "no operation"
    title = rank.wait.title
    function = rank.operation[0].rpartition(":")[2] if rank.operation else ""
    return title if function in title or not function else f"{title}: {function}"


def _spinning(case: Case, rank: RankFacts) -> Evidence | None:
    for index in rank.cards:
        card = case.facts.cards.get(index)
        if card is None or isinstance(card.gpu, Missing):
            continue
        power = f", {card.gpu.power_w:.0f} W" if card.gpu.power_w is not None else ""
        return Evidence(
            text=f"GPU {index} of {rank.name} reads {card.reading}: {card.gpu.util_pct} % busy, "
            f"memory {card.gpu.memory_util_pct} %{power}",
            rank=rank.name,
            at_s=case.facts.at_s,
        )
    return None


def _waiting_file(case: Case, rank: RankFacts) -> Evidence | None:
    """Say which open file a rank's main thread waits for, where its system call names one."""
    track = case.facts.track(rank)
    if track is None or not track.process.threads:
        return None
    words = (track.process.threads[0].syscall or "").split()
    reads = {"0", "17", "19", "63", "67"}  # read, pread64, readv on x86-64; read, pread64 on arm64
    if len(words) < 2 or words[0] not in reads:
        return None
    fd = int(words[1], 16)
    for file in track.process.files or ():
        if file.fd == fd:
            return Evidence(
                text=f"{rank.name} waits in read() of {file.kind} {file.target}",
                rank=rank.name,
                pid=rank.pid,
            )
    return None


def _arrived(case: Case, rank: RankFacts) -> Evidence | None:
    """Say who has connected to the store of a rendezvous that a rank holds."""
    track = case.facts.track(rank)
    if rank.wait is None or rank.wait.kind != "rendezvous" or track is None or track.waits is None:
        return None
    for thread in track.waits.threads:
        ports = {
            each.target.rpartition(":")[2] for each in thread.objects if each.state == "listen"
        }
        ends = [each.target.split(" -> ") for each in thread.objects if each.state == "established"]
        remote = [
            _host(other) if _host(own) != _host(other) else "this machine"
            for own, other in (end for end in ends if len(end) == 2)
            if own.rpartition(":")[2] in ports
        ]
        if not remote:
            continue
        sizes = case.facts.sizes
        world = sizes.get("tp", 1) * sizes.get("pp", 1)
        counted = ", ".join(f"{remote.count(host)} from {host}" for host in dict.fromkeys(remote))
        more = " at least" if thread.count > len(thread.objects) else ""
        return Evidence(
            text=f"to the store of {rank.name} on port {next(iter(ports))} have connected{more} "
            f"{len(remote)} of {world} ranks: {counted}",
            rank=rank.name,
            pid=rank.pid,
            at_s=case.facts.at_s,
        )
    return None


def _host(address: str) -> str:
    """Return the host of an address, that of a mapped IPv4 address without its prefix.

    >>> _host("[::ffff:10.0.0.7]:5000"), _host("127.0.0.1:48410")
    ('10.0.0.7', '127.0.0.1')
    """
    return address.rpartition(":")[0].strip("[]").removeprefix("::ffff:")


def _children(case: Case, rank: RankFacts) -> Evidence | None:
    """Say what a rank that waits for a process has started."""
    if rank.wait is None or rank.wait.kind != "child":
        return None
    started = [
        track
        for track in case.facts.tracks.values()
        if track.owner == rank.pid and track.present and rank.pid is not None
    ]
    shown = ", ".join(
        f"{track.process.comm} (pid {track.process.pid}, state {track.process.state})"
        for track in started[:4]
    )
    return Evidence(
        text=f"{rank.name} has started {shown or 'no process that is still there'}",
        rank=rank.name,
        pid=rank.pid,
    )


def _advice_for(case: Case, suspects: tuple[RankFacts, ...]) -> tuple[str, ...]:
    advice = []
    for rank in suspects[:2]:
        if rank.pid is None:
            continue
        if rank.blocked and rank.blocked.path and rank.kernel in ("wait_for_partner", "fifo_open"):
            advice.append(
                f"{rank.name} is blocked in open() of the FIFO {rank.blocked.path}, which nobody "
                f"else has open: see who should: fuser -v {shlex.quote(rank.blocked.path)}"
            )
        elif rank.kernel in ("wait_for_partner", "fifo_open"):
            advice.append(
                f"{rank.name} is blocked in open() of a FIFO that nobody reads or writes; its "
                f"path: py-spy dump --nonblocking --locals --pid {rank.pid}"
            )
        elif len(rank.locks) == 1 and rank.locks[0].owner == "dead":
            advice.append(delete_lock(rank.locks[0]))
        elif len(rank.locks) == 1 and rank.locks[0].holders:
            advice.append(see_holder(rank.locks[0]))
        elif rank.wait and rank.wait.kind in _ADVICE:
            advice.append(_ADVICE[rank.wait.kind].format(pid=rank.pid))
        elif wakes_soon(case.facts, case.engine, rank) and (
            does := sleeps_at(case.facts, case.engine, rank)
        ):
            advice.append(f"wait until {rank.name} wakes: it {does}")
        elif rank.place and rank.state != "T" and not rank.moving:
            advice.append(f"read the code at {rank.place}: {rank.name} does not come back from it")
        advice.append(f"look again: py-spy dump --nonblocking --pid {rank.pid}")
    if any(rank.pid is not None for rank in suspects):
        launcher = case.facts.launcher
        pid = launcher.process.pid if launcher else suspects[0].pid
        advice.append(f"save everything first: hangdoctor diagnose {pid} --record DIR")
    return tuple(advice)


_ADVICE = {
    "lock": "see which lock file it is and who holds it: ls -l /proc/{pid}/fd | grep -i lock, then "
    "fuser FILE; a file that nobody holds was left by a start that was killed: delete it",
    "network": "see whom it talks to: ss -tnp | grep 'pid={pid},'; set HF_HUB_OFFLINE=1 where the "
    "files are there already",
    "child": "see what it has started: ps --forest -o pid,stat,wchan:20,time,args -g {pid}",
    "device": "set CUDA_LAUNCH_BLOCKING=1 and relaunch: the stack then shows the kernel's call",
}


def _still_moving(finding: Finding, moving: list[str], suspects: tuple[RankFacts, ...]) -> Finding:
    what = "; ".join(f"{rank.name}: {rank.moved_by}" for rank in suspects if rank.moved_by)
    return msgspec.structs.replace(
        finding,
        confidence="low",
        title=f"{finding.title}, and still moves",
        because=(Evidence(text=f"{enumerate_names(moving)} moves: {what}"), *finding.because),
    )
