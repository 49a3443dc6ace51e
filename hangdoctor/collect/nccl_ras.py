"""Asks NCCL's RAS what each rank has launched: a thread of NCCL's own that listens on TCP.

On by default since NCCL 2.24, on localhost:28028 or where NCCL_RAS_ADDR says. The protocol is lines
of text (NVIDIA/nccl, src/ras/client.cc and client_support.cc): both sides name their version, then
"TIMEOUT seconds", since 2.28.7 "SET FORMAT json", and "VERBOSE STATUS", whose answer ends with the
connection. Only commands that read are sent.

The answer is asked of a process of the launch and of nobody else: the socket that listens must be
one of ours, or else the processes that the answer names. All processes of a job, and all jobs of
one user, may listen on one port (SO_REUSEPORT); the kernel picks one for each connection.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor.collect import procfs
from hangdoctor.collect.look import Job, Look
from hangdoctor.model import Missing, NcclCommunicator, NcclRank, NcclRas

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DEFAULT_ADDRESS = "localhost:28028"
HELLO_S = 1.0
"""To connect, and for each line before the answer: a thread that does nothing else sends them."""
RANKS_S = 2
"""So long RAS waits for the other ranks' threads; a process that is stopped does not answer."""
ANSWER_S = 5.0
MOST_BYTES = 16 << 20
TRIES = 4
"""Connections until a process of the launch answers, where others listen on the same port."""
DEADLINE_S = 12.0

_OFF = Missing(
    reason="inapplicable",
    detail="NCCL's RAS is off: NCCL_RAS_ENABLE=0 in the launch's environment",
    hint="leave NCCL_RAS_ENABLE out, and NCCL counts its collectives rank by rank",
)


def read(look: Look) -> NcclRas | Missing:
    """Ask the launch's RAS; a Missing says why there is no answer, or none of this launch."""
    proc = look.proc
    pids = [pid for pid in (*look.roots, *look.known) if _alive(proc, pid)]
    environs = [procfs.read_environ(proc, pid) for pid in pids]
    if any(environ.get("NCCL_RAS_ENABLE") == "0" for environ in environs):
        return _OFF
    told = (environ.get("NCCL_RAS_ADDR", "") for environ in environs)
    address = next(filter(None, told), DEFAULT_ADDRESS)
    place = parse_ras_address(address.strip())
    if place is None:
        return Missing(reason="failed", detail=f"NCCL_RAS_ADDR={address} names no port")
    host, port = place
    if not pids:
        return Missing(reason="gone", detail="no process of the launch is there")
    listening = _listeners(proc, pids[-1], port)
    if listening is not None and not listening:
        return silent(address)
    ours = _sockets(proc, pids) if listening else None
    if listening and ours is not None and not listening & ours:
        return Missing(
            reason="inapplicable",
            detail=f"what listens on {address} is no process of this launch",
            hint="give each job a port of its own: NCCL_RAS_ADDR=localhost:28029",
        )
    sure = listening is not None and ours is not None and listening <= ours
    try:
        with _Network(proc, pids[-1]):
            return _ask(host, port, address, _inner_pids(proc, pids), sure=sure)
    except OSError as error:
        return _refused(address, error)


def parse_answer(answer: str, address: str, pids: Mapping[int, int]) -> NcclRas:
    """Return what RAS answered, in either form.

    Args:
        answer: without the lines of the handshake.
        address: where it came from.
        pids: the launch's processes, from the pid that each has for itself to the observer's.

    Raises:
        ValueError: it is no such answer.
    """
    return (_parse_json if answer.lstrip()[:1] == "{" else parse_text)(answer, address, pids)


def silent(address: str) -> Missing:
    """Say that nothing listens."""
    return Missing(
        reason="unsupported",
        detail=f"nothing listens on {address}: NCCL is not set up yet, is older than 2.24, or its "
        "RAS is off",
        hint="NCCL_DEBUG=INFO tells the version and where RAS listens",
    )


class _Network:
    """The network namespace of a process, for as long as the block lasts.

    Raises:
        OSError: it is another one than ours, and may not be entered.
    """

    def __init__(self, proc: str, pid: int) -> None:
        self._theirs = f"{proc}/{pid}/ns/net"
        self._own: int | None = None

    def __enter__(self) -> None:
        try:
            if os.readlink(self._theirs) == os.readlink("/proc/self/ns/net"):
                return
        except OSError:  # not to be told: as a rule it is ours
            return
        own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(self._theirs)
        except OSError:
            os.close(own)
            raise
        self._own = own

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            _set_namespace(self._own)
            os.close(self._own)


def _enter(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(fd)
    finally:
        os.close(fd)


def _set_namespace(fd: int) -> None:
    import ctypes  # where the launch is in a namespace of its own

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, 0x40000000) != 0:  # CLONE_NEWNET
        code = ctypes.get_errno()
        raise OSError(
            code,
            "the launch is in another network namespace, which only root may enter "
            f"({os.strerror(code)})",
        )


def _ask(
    host: str, port: int, address: str, pids: Mapping[int, int], *, sure: bool
) -> NcclRas | Missing:
    other: Missing | None = None
    for _ in range(TRIES):
        found = _converse(host, port, address, pids)
        if isinstance(found, Missing):
            return found
        named = [rank for one in found.communicators for rank in one.ranks if rank.pid is not None]
        if named or (sure and not found.communicators):
            own = tuple(one for one in found.communicators if _is_ours(one))
            return msgspec.structs.replace(found, communicators=own)
        others = sorted({rank.host for one in found.communicators for rank in one.ranks})
        other = Missing(
            reason="inapplicable",
            detail=f"the NCCL job that answers on {address} is not this launch"
            + (
                f": its ranks are on {', '.join(others[:4])}, in processes of others"
                if others
                else ""
            )
            if found.communicators
            else f"the answer on {address} names no process, and may be another job's",
            hint="give each job a port of its own: NCCL_RAS_ADDR=localhost:28029",
        )
        if sure:
            break
    return other or silent(address)


def _is_ours(communicator: NcclCommunicator) -> bool:
    return any(rank.pid is not None for rank in communicator.ranks)


def _converse(host: str, port: int, address: str, pids: Mapping[int, int]) -> NcclRas | Missing:
    """Ask for JSON; where NCCL does not know that or writes it wrong, for text."""
    answer = _request(host, port, address, form="json")
    if isinstance(answer, Missing):
        return answer
    try:
        return parse_answer(answer, address, pids)
    except ValueError:
        if answer.lstrip()[:1] != "{":
            return _stranger(address)
    answer = _request(host, port, address, form="text")
    if isinstance(answer, Missing):
        return answer
    try:
        return parse_text(answer, address, pids)
    except ValueError:
        return _stranger(address)


def _request(host: str, port: int, address: str, form: str) -> str | Missing:
    """Return the answer to a status request, in JSON if that is wanted and known."""
    try:
        with socket.create_connection((host, port), timeout=HELLO_S) as connection:
            lines = _Lines(connection)
            lines.send("CLIENT PROTOCOL 2")
            if not lines.line().upper().startswith("SERVER PROTOCOL "):
                return _stranger(address)
            lines.send(f"TIMEOUT {RANKS_S}")
            if lines.line() != "OK":
                return _stranger(address)
            if form == "json":
                lines.send("SET FORMAT json")
                lines.line()  # "OK", or an error where only text is known
            lines.send("VERBOSE STATUS")
            return lines.rest(ANSWER_S)
    except TimeoutError:
        return Missing(
            reason="timeout",
            detail=f"{address} takes connections and does not answer",
            hint="NCCL's RAS thread may be stuck with its process: look at the stacks",
        )
    except ValueError as error:
        return Missing(reason="failed", detail=f"{address}: {error}")


class _Lines:
    """Both directions of a connection, with limits in time and size."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = b""

    def send(self, line: str) -> None:
        self._connection.sendall(line.encode() + b"\n")

    def line(self) -> str:
        until = time.monotonic() + HELLO_S
        while b"\n" not in self._left:
            if len(self._left) > 4096:
                raise ValueError("a line without an end")
            self._more(until)
        line, _, self._left = self._left.partition(b"\n")
        return line.decode(errors="replace").strip()

    def rest(self, within_s: float) -> str:
        until = time.monotonic() + within_s
        data, self._left = [self._left], b""
        size = 0
        while block := self._receive(until):
            data.append(block)
            size += len(block)
            if size > MOST_BYTES:
                raise ValueError(f"an answer of more than {MOST_BYTES >> 20} MB")
        return b"".join(data).decode(errors="replace")

    def _more(self, until: float) -> None:
        block = self._receive(until)
        if not block:
            raise ValueError("it closed the connection")
        self._left += block

    def _receive(self, until: float) -> bytes:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._connection.recv(1 << 16)


# JSON.


class _JsonState(msgspec.Struct):
    init_state: int = 0
    async_error: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False
    unresponsive: bool = False
    considered_dead: bool = False


class _JsonRank(msgspec.Struct):
    rank: int
    host: str = ""
    pid: int = -1
    status: _JsonState = msgspec.field(default_factory=_JsonState)
    collective_counts: dict[str, int] = {}


class _JsonCommunicator(msgspec.Struct):
    hash: str
    size: int
    ranks: list[_JsonRank] = []
    missing_ranks: list[_JsonRank] = []
    secondary_hash: str = ""


class _JsonRas(msgspec.Struct):
    timeouts_count: int = 0


class _JsonAnswer(msgspec.Struct):
    nccl_version: str
    communicators: list[_JsonCommunicator]
    ras: _JsonRas = msgspec.field(default_factory=_JsonRas)


_NO_COMMA = re.compile(r"(?<=[\d\"}\]el])(?=\s*\n\s*[\"{])")
_SUCCESS, _IN_PROGRESS = 0, 7


def _parse_json(answer: str, address: str, pids: Mapping[int, int]) -> NcclRas:
    form: Any = "json"
    try:
        told = msgspec.json.decode(answer, type=_JsonAnswer)
    except msgspec.DecodeError:
        # 2.28.9 leaves out commas between the members of a missing rank.
        form = "repaired json"
        told = msgspec.json.decode(_NO_COMMA.sub(",", answer), type=_JsonAnswer)
    hosts = [
        (rank.host, rank.pid)
        for one in told.communicators
        for rank in one.ranks + one.missing_ranks
    ]
    here = _own_host(hosts, pids)
    return NcclRas(
        address=address,
        version=told.nccl_version,
        form=form,
        communicators=tuple(
            NcclCommunicator(
                id=":".join(filter(None, (one.hash, one.secondary_hash))),
                size=one.size,
                ranks=tuple(
                    NcclRank(
                        number=rank.rank,
                        pid=pids.get(rank.pid) if rank.host == here else None,
                        host=rank.host,
                        counts=rank.collective_counts,
                        state=_state(rank.status, missing=rank in one.missing_ranks),
                        error=_error(rank.status),
                    )
                    for rank in one.ranks + one.missing_ranks
                ),
            )
            for one in told.communicators
        ),
        timeouts=told.ras.timeouts_count,
    )


def _state(status: _JsonState, *, missing: bool) -> str:
    if missing:
        if status.considered_dead:
            return "dead"
        return "unresponsive" if status.unresponsive else "no-member"
    if status.abort_flag:
        return "abort"
    if status.finalize_called or status.destroy_flag:
        return "finalize"
    return "init" if status.init_state == _IN_PROGRESS else "running"


def _error(status: _JsonState) -> str:
    """Return a rank's error by NCCL's number (`ncclResult_t`); "" for none."""
    for code in (status.async_error, status.init_state):
        if code not in (_SUCCESS, _IN_PROGRESS):
            return _ERRORS.get(code, f"error {code}")
    return ""


_ERRORS = {
    1: "Unhandled CUDA error",
    2: "System error",
    3: "Internal error",
    4: "Invalid argument",
    5: "Invalid usage",
    6: "Remote process error",
}

# Text. The table of groups, then, by communicator, what is not alike.

_VERSION = re.compile(r"NCCL version (\S+)")
_GROUP = re.compile(r"\s*(\d+)\s+(\d+)\s+\d+\s+[\d-]+\s+(\d+)\s+\d+\s+(\w+)\s+([A-Z,]+)\s*")
_COMMUNICATOR = re.compile(r"#(\d+)-\d+ \(([0-9a-f]+)\) (\w+)")
_DIFFERENT = re.compile(r"\s+Communicator ranks have different (?:(\w+) operation|(\w+))")
_MANY = re.compile(
    r"\s+(\d+) ranks (?:have launched up to operation (\d+)|have (not launched any operations)"
    r"|have status (\w+)|reported (.+))"
)
_ONE = re.compile(
    r"\s+Rank (\d+)(?: has launched up to operation (\d+)| has (not launched any operations)"
    r"| has status (\w+)| reported (.+?))?"
    r"(?: -- (?:GPU [^\n]*? managed by process (\d+) on node (\S+)|\[process information.*))?"
)
_MISSING = re.compile(r"\s+The (?:missing|unknown) ranks?: ([\d, ]+)")
_DEAD = re.compile(r"\s+Process (\d+) on node (\S+) managing")
_TIMEOUTS = re.compile(r"\s+Encountered (\d+) communication timeout")


def parse_text(answer: str, address: str, pids: Mapping[int, int]) -> NcclRas:
    """Return what RAS answered in text, as NCCL 2.24 to 2.29 write it.

    Raises:
        ValueError: it is no such answer.
    """
    version = _VERSION.search(answer)
    if "Communicators..." not in answer:
        raise ValueError("no answer of RAS")
    sizes: dict[str, int] = {}
    alike = timeouts = 0
    found: dict[str, _Told] = {}
    told: _Told | None = None
    dead: set[tuple[str, int]] = set()
    section = ""
    for line in answer.splitlines():
        if match := _COMMUNICATOR.match(line):
            told = found.setdefault(match[2], _Told(match[2], sizes.get(match[1], 0)))
            told.begin(match[3])
        elif line and not line.startswith((" ", "#")):
            section, told = line.strip(), None
        if told is not None:
            told.take(line)
        elif match := _GROUP.fullmatch(line):
            sizes[match[1]] = int(match[3])
            alike += int(match[2]) if match[5] == "OK" else 0
        elif section == "DEAD" and (match := _DEAD.match(line)):
            dead.add((match[2], int(match[1])))
        elif match := _TIMEOUTS.match(line):
            timeouts = int(match[1])
    named = [(host, pid) for one in found.values() for host, pid in one.processes.values()]
    here = _own_host(named, pids)
    return NcclRas(
        address=address,
        version=version[1] if version else "",
        form="text",
        communicators=tuple(one.communicator(here, pids, dead) for one in found.values()),
        alike=alike,
        timeouts=timeouts,
    )


class _Told:
    """What the text says of one communicator, line by line."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.processes: dict[int, tuple[str, int]] = {}
        self.counts: dict[int, dict[str, int]] = {}
        self.states: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.parts: dict[str, list[tuple[int, int, set[int]]]] = {}
        self._what = ""
        self._op = ""
        self._of_many: tuple[str, str] = ("", "")

    def begin(self, what: str) -> None:
        """Begin a part: INCOMPLETE, ERROR or MISMATCH."""
        self._what, self._of_many = what, ("", "")

    def take(self, line: str) -> None:
        """Take in a line of the part."""
        if match := _DIFFERENT.match(line):
            # Until 2.25 one count for all: "different collective operation counts".
            self._op = "" if match[1] in (None, "collective") else match[1]
            self._of_many = ("", "")
        elif match := _MANY.match(line):
            self._of_many = _said(match, 2)
            kind, value = self._of_many
            if kind == "count":
                self.parts.setdefault(self._op, []).append((int(value), int(match[1]), set()))
        elif match := _MISSING.match(line):
            state = "unresponsive" if self._what == "INCOMPLETE" else "no-member"
            self.states.update(dict.fromkeys(map(int, re.findall(r"\d+", match[1])), state))
        elif match := _ONE.fullmatch(line.rstrip()):
            number = int(match[1])
            if match[6]:
                self.processes[number] = (match[7], int(match[6]))
            kind, value = _said(match, 2)
            if kind == "count":
                self.parts.setdefault(self._op, []).append((int(value), 1, set()))
            self._note(number, *((kind, value) if kind else self._of_many))

    def _note(self, number: int, kind: str, value: str) -> None:
        if kind == "count":
            self.counts.setdefault(number, {})[self._op] = int(value)
            self.parts[self._op][-1][2].add(number)
        elif kind == "state":
            self.states[number] = {"NOCOMM": "no-member", "UNKNOWN": "no-member"}.get(
                value, value.lower()
            )
        elif kind == "error":
            self.errors[number] = value
        elif self._what == "INCOMPLETE":
            self.states[number] = "unresponsive"

    def communicator(
        self, here: str | None, pids: Mapping[int, int], dead: set[tuple[str, int]]
    ) -> NcclCommunicator:
        """Return what was told, as a value."""
        numbers = sorted({*self.processes, *self.counts, *self.states, *self.errors})
        # Of the ranks of one count either all are named, or they are so many that none is.
        unnamed = {
            op: [count for count, size, named in parts if len(named) < size]
            for op, parts in self.parts.items()
        }
        others = {op: counts[0] for op, counts in unnamed.items() if len(counts) == 1}
        whole = len(others) == len(self.parts)
        ranks = []
        for number in numbers:
            host, pid = self.processes.get(number, ("", -1))
            state = self.states.get(number, "running")
            own = self.counts.get(number, {})
            ranks.append(
                NcclRank(
                    number=number,
                    pid=pids.get(pid) if host == here else None,
                    host=host,
                    counts=others | own if own else {},
                    state="dead" if (host, pid) in dead else state,
                    error=self.errors.get(number, ""),
                )
            )
        return NcclCommunicator(
            id=f"0x{self.name}",
            size=self.size,
            ranks=tuple(ranks),
            others=others if whole and len(numbers) < self.size else {},
        )


def _said(match: re.Match[str], first: int) -> tuple[str, str]:
    """Return what a line says of its ranks: a count, a state or an error; empty for nothing."""
    launched, nothing, state, error = (match[first + index] for index in range(4))
    if launched or nothing:
        return "count", launched or "0"
    if state:
        return "state", state
    return ("error", error) if error else ("", "")


# Whose answer, and from where.


def _own_host(named: list[tuple[str, int]], pids: Mapping[int, int]) -> str | None:
    """Return this machine's address in RAS's network; None where it cannot be told.

    Containers on other machines may have the same pids, so an address of ours comes first.
    """
    hosts = Counter(host for host, pid in set(named) if pid in pids)
    own = [host for host in hosts if _is_local(host)]
    if own:
        return own[0]
    best = hosts.most_common(2)
    return best[0][0] if best and (len(best) == 1 or best[0][1] > best[1][1]) else None


def _is_local(address: str) -> bool:
    """Tell whether an address is one of this machine's: only to such a socket can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.inet_pton(family, address)  # a name would be looked up
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError):  # of another machine; or no address at all
        return False
    return True


def _inner_pids(proc: str, pids: list[int]) -> dict[int, int]:
    """Return the pids that processes have for themselves, each with the observer's."""
    found = {}
    for pid in pids:
        try:
            status = procfs.parse_status(procfs.read(f"{proc}/{pid}/status"))
        except OSError:
            continue
        found[int((status.get("NSpid") or str(pid)).split()[-1])] = pid
    return found


def _listeners(proc: str, pid: int, port: int) -> frozenset[int] | None:
    """Return the inodes of the sockets that listen where a process lives; None if not shown."""
    try:
        return procfs.read_listeners(proc, pid, port)
    except OSError:
        return None


def _sockets(proc: str, pids: list[int]) -> frozenset[int] | None:
    """Return the inodes of all sockets of processes; None where those of one are not shown."""
    found: set[int] = set()
    for pid in pids:
        try:
            found.update(_sockets_of(f"{proc}/{pid}/fd"))
        except FileNotFoundError:  # noqa: PERF203  # one that has ended must not hide the others
            continue
        except OSError:
            return None
    return frozenset(found)


def _sockets_of(directory: str) -> Iterator[int]:
    for fd in os.listdir(directory):
        try:
            target = os.readlink(f"{directory}/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _alive(proc: str, pid: int) -> bool:
    try:
        stat = procfs.read_stat(proc, pid)
    except OSError:
        return False
    return stat is not None and stat.state not in "ZX"


def parse_ras_address(text: str) -> tuple[str, int] | None:
    """Parse NCCL_RAS_ADDR, host:port with brackets around an IPv6 address.

    >>> parse_ras_address("localhost:28028"), parse_ras_address("[::1]:9"), parse_ras_address("x")
    (('localhost', 28028), ('::1', 9), None)
    """
    name, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        return None
    return name.strip("[]") or "localhost", int(port)


def _stranger(address: str) -> Missing:
    return Missing(
        reason="inapplicable",
        detail=f"what answers on {address} is not NCCL's RAS",
        hint="give RAS a port of its own: NCCL_RAS_ADDR=localhost:28029",
    )


def _refused(address: str, error: OSError) -> Missing:
    if error.errno == errno.ECONNREFUSED:
        return silent(address)
    refused = error.errno in (errno.EPERM, errno.EACCES)
    return Missing(
        reason="permission" if refused else "failed",
        detail=error.strerror or str(error),
        hint="run hangdoctor as root (sudo), or inside the container" if refused else "",
    )


JOB = Job(
    read=read,
    request=Look,
    reply=NcclRas | Missing,
    deadline_s=DEADLINE_S,
    fills="NCCL's RAS",
)
