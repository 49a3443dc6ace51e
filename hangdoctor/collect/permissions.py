"""Says which right is missing when the system refuses, and the command or setting that gives it.

The kernel's checks: io, fd and wchan need the same user and no capability that we lack
(PTRACE_MODE_READ); syscall and the memory that stacks are read from also need the consent of Yama
and seccomp (PTRACE_MODE_ATTACH). Root in a container is not root: it lacks CAP_SYS_PTRACE.
"""

from __future__ import annotations

import os
from pathlib import Path

from hangdoctor.collect import procfs
from hangdoctor.model import Missing

_CAP_SYS_PTRACE = 19

POD_HINT = (
    "docker run --cap-add SYS_PTRACE; in a pod spec: securityContext: "
    '{capabilities: {add: ["SYS_PTRACE"]}}; or kubectl debug --profile=sysadmin --target'
)


def refused(detail: str, user: int | None) -> Missing:
    """Return the Missing for something that the system refused to show.

    Args:
        detail: the system's own words.
        user: numeric user id of the process looked at, None where not known.
    """
    return Missing(reason="permission", detail=detail, hint=_hint(user))


def has_ptrace_capability() -> bool:
    """Tell whether we hold CAP_SYS_PTRACE, which lifts the checks of user and Yama."""
    status = procfs.parse_status(Path("/proc/self/status").read_bytes())
    return bool(int(status.get("CapEff", "0"), 16) >> _CAP_SYS_PTRACE & 1)


def yama_scope() -> int | None:
    """Return kernel.yama.ptrace_scope; None on a kernel without Yama."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _hint(user: int | None) -> str:
    own = os.geteuid()
    if has_ptrace_capability():
        return "seccomp or a security module refuses it here: run hangdoctor outside, on the node"
    if own == 0:
        return POD_HINT
    if user is not None and user != own:
        return f"run it as root (sudo), or as the owner of the process: sudo -u '#{user}'"
    if yama_scope():
        return "sudo sysctl kernel.yama.ptrace_scope=0, or run hangdoctor as root (sudo)"
    return "run hangdoctor as root (sudo); in a container: " + POD_HINT
