"""All rules, in the order in which their findings are shown when they weigh the same.

A rule is a function of the facts that returns its findings, and names the bad thing. Its docstring
has three headings, which `hangdoctor explain` prints: what it sees, why it matters, what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.rules import (
    builds,
    collectives,
    counts,
    deaths,
    device,
    known_issues,
    limits,
    locks,
    logs,
    loops,
    machine,
    startup,
    waits,
    weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hangdoctor.findings import Finding
    from hangdoctor.rules.case import Case

    Rule = Callable[[Case], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    known_issues.known_issue,
    deaths.rank_died,
    deaths.launcher_died,
    deaths.engine_process_died,
    startup.launch_ended,
    startup.exception_in_rank,
    deaths.rank_stopped,
    waits.waiting_for_rank_elsewhere,
    waits.rank_not_built,
    waits.waits_in_a_circle,
    waits.rank_never_appeared,
    waits.rank_still_starting,
    waits.ranks_diverged,
    waits.waiting_for_other_node,
    waits.all_ranks_in_same_wait,
    waits.all_ranks_wait_for_their_gpus,
    waits.all_ranks_stand_still,
    weights.shard_stalled,
    waits.waiting_for_rank_behind_in_log,
    collectives.nccl_ranks_behind,
    collectives.nccl_ranks_diverged,
    collectives.nccl_reports_trouble,
    collectives.collective_outside_nccl,
    collectives.flight_recorder_ranks_behind,
    collectives.flight_recorder_ranks_diverged,
    collectives.flight_recorder_undecided,
    waits.threads_wait_in_a_circle,
    waits.threads_wait_for_locks,
    locks.stale_lock_file,
    locks.lock_held,
    locks.lock_owner_unknown,
    locks.may_wait_for_lock_file,
    waits.connection_unanswered,
    loops.eventfd_runaway,
    loops.pipe_chatter,
    loops.busy_without_progress,
    device.gpu_lost,
    device.driver_does_not_answer,
    device.gpu_spinning,
    device.gpu_fault,
    device.gpu_shared,
    device.gpu_memory_full,
    device.gpu_slowed,
    machine.machine_short,
    limits.ends_by_itself,
    weights.weights_loading,
    counts.work_counted,
    counts.host_memory_allocated,
    builds.compile_running,
    builds.build_stands_still,
    builds.descendant_busy,
    startup.launcher_waits_for_ranks,
    startup.warmup_request_unanswered,
    startup.idle_and_ready,
    startup.still_progressing,
    startup.files_changed,
    logs.log_stops,
    logs.wait_given_up,
)


PER_REPLICA: frozenset[Rule] = frozenset(
    {
        waits.waiting_for_rank_elsewhere,
        waits.rank_not_built,
        waits.waits_in_a_circle,
        waits.rank_never_appeared,
        waits.rank_still_starting,
        waits.ranks_diverged,
        waits.waiting_for_other_node,
        waits.all_ranks_in_same_wait,
        waits.all_ranks_wait_for_their_gpus,
        waits.all_ranks_stand_still,
        collectives.collective_outside_nccl,
    }
)
"""Rules over ranks that wait for each other: replicas do not."""


def rule_id(rule: Rule) -> str:
    """Return the id under which a rule reports: its name with dashes."""
    return rule.__name__.replace("_", "-")
