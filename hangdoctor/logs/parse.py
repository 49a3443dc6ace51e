"""Bytes of a log to its lines: incremental, pure, and unshaken by what stands around a line.

Read through: the prefixes of Kubernetes, docker, docker compose and journald; ANSI colours;
progress bars that overwrite themselves with carriage returns, or that the next line is glued to;
CRLF, NUL bytes, invalid UTF-8, characters and lines cut at a block's edge, lines of megabytes.

Frequent lines that mean nothing (`Engine.skip`) are dropped by literal search before any regular
expression sees them: a log of a serving engine consists of little else, and this makes the
difference between seconds and minutes for a gigabyte. They are counted all the same.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.engines import needle, normal_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hangdoctor.engines import Bar, Engine, Sign

TEXT_LIMIT = 1 << 16
"""Bytes of a line that are kept, half from each end; SGLang's server_args need some 20,000."""

_CHUNK_BYTES = 1 << 22
_HEAD_BYTES = 1 << 14


class LogLine(msgspec.Struct, frozen=True, gc=False):
    """One message of the log.

    Several can bear the same number: a bar and the line that is glued to it. A bar on a line that
    is still growing is given at once, and again when the line is complete.

    Attributes:
        number: of the line in the file, from 1, as editors count (a carriage return ends none).
        text: without prefixes, colours and control characters; never empty.
        rank: as the engine's prefix names it ("DP1 TP3"); the rank of the exception that the line
            belongs to where it has no prefix of its own; "" where none is named.
        time_s: the line's own stamp in seconds since 1970, read as if in UTC: only differences
            mean anything. None for a line without one.
        bar: id of the progress bar, done, total.
    """

    number: int
    text: str
    rank: str = ""
    time_s: float | None = None
    bar: tuple[str, int, int] | None = None


class ParserState(msgspec.Struct, frozen=True):
    """Where a parse stands between two blocks.

    Attributes:
        number: complete lines so far: the whole count, with those that were skipped.
        tail: the last line, as far as it is there and was not given yet.
        begun: a part of the last line was given already.
        skipped: the last complete line, where it was one of those that mean nothing.
        partial: text of a line that the container runtime cut into several.
        error_rank: rank of the exception whose traceback is being printed; None outside of one.
    """

    number: int = 0
    tail: bytes = b""
    begun: bool = False
    skipped: bytes | None = None
    partial: str = ""
    error_rank: str | None = None


def parse(state: ParserState, block: bytes, engine: Engine) -> tuple[list[LogLine], ParserState]:
    r"""Return the messages of a log's next block, and the state for the one after.

    However the log is cut into blocks, the messages are the same, but for bars given twice.

    >>> from hangdoctor.engines import load
    >>> text = b"[2026-11-29 21:04:27 TP1] Load weight begin. avail mem=138.28 GB\n[2026-"
    >>> lines, state = parse(ParserState(), text, load("sglang"))
    >>> lines[0].rank, lines[0].text, state.tail
    ('TP1', 'Load weight begin. avail mem=138.28 GB', b'[2026-')
    """
    lines: list[LogLine] = []
    for start in range(0, len(block), _CHUNK_BYTES):
        chunk = block[start : start + _CHUNK_BYTES] if len(block) > _CHUNK_BYTES else block
        state = _parse_chunk(state, chunk, engine, lines)
    return lines, state


def finish(state: ParserState, engine: Engine) -> list[LogLine]:
    """Return what is left at the end of a log: its last line, unterminated or skipped.

    It changes nothing, so that it also serves to peek at the last line of a log that still grows.
    """
    reader = _Reader(state, engine)
    if state.tail or state.partial:
        return list(reader.messages(state.tail, state.number + 1, last=True))
    if state.skipped is not None:
        return list(reader.messages(state.skipped, state.number, last=True))
    return []


def _parse_chunk(
    state: ParserState, chunk: bytes, engine: Engine, lines: list[LogLine]
) -> ParserState:
    if b"\0" in chunk:
        chunk = chunk.replace(b"\0", b"")
    reader = _Reader(state, engine)
    data = state.tail + chunk
    head = data[:_HEAD_BYTES]
    if 2 * head.count(b"\r\n") > head.count(b"\n"):
        data = data.replace(b"\r\n", b"\n")  # slow: else it is done to the lines that are kept
    raw_lines = data.split(b"\n")
    tail = raw_lines.pop()
    number = state.number + len(raw_lines)
    kept = _kept(raw_lines, data, reader.patterns.skip, keep_first=state.begun)
    for index in kept:
        if raw := raw_lines[index].removesuffix(b"\r"):
            line = reader.plain_message(raw, state.number + 1 + index)
            if line:
                lines.append(line)
            else:
                lines.extend(reader.messages(raw, state.number + 1 + index))
    skipped = state.skipped
    if raw_lines:
        skipped = raw_lines[-1] if not kept or kept[-1] != len(raw_lines) - 1 else None
    rest = _growing(reader, tail, number + 1, lines)
    return ParserState(
        number=number,
        tail=rest,
        begun=len(rest) < min(len(tail), TEXT_LIMIT) or (state.begun and not raw_lines),
        skipped=skipped.removesuffix(b"\r")[:TEXT_LIMIT] if skipped else None,
        partial=reader.partial,
        error_rank=reader.error_rank,
    )


def _kept(
    raw_lines: list[bytes], data: bytes, skip: tuple[bytes, ...], *, keep_first: bool
) -> Sequence[int]:
    """Return the indices of the lines that hold none of the literals.

    A line with a carriage return is kept: noise may be glued to a bar. So is the first one where
    a part of it was given already.
    """
    kept: Sequence[int] = range(len(raw_lines))
    for literal in skip:
        if 4 * len(kept) > len(raw_lines) and literal not in data:
            continue  # one search of the block is cheaper than many of its lines
        if len(kept) == len(raw_lines):
            kept = [i for i, raw in enumerate(raw_lines) if literal not in raw]
        else:
            kept = [i for i in kept if literal not in raw_lines[i]]
    if b"\r" in data and len(kept) < len(raw_lines):
        kept = sorted({*kept, *_overwritten(data)})
    if keep_first and raw_lines and (not kept or kept[0] != 0):
        kept = [0, *kept]
    return kept


def _overwritten(data: bytes) -> Iterator[int]:
    """Yield the indices of the complete lines in which text follows a carriage return."""
    index = begin = 0
    while (at := data.find(b"\r", begin)) >= 0:
        end = data.find(b"\n", at)
        if end < 0:
            return
        index += data.count(b"\n", begin, at)
        if data[at:end].strip(b"\r"):
            yield index
        index += 1
        begin = end + 1


def _growing(reader: _Reader, tail: bytes, number: int, lines: list[LogLine]) -> bytes:
    """Give what an unterminated line already says; return the part that must be kept.

    A bar overwrites itself for minutes before its line ends, if it ever does.
    """
    if b"\r" in tail[:-1]:
        # A carriage return at the very end may be the first half of CRLF.
        done, _, rest = tail[:-1].rpartition(b"\r")
        lines.extend(reader.messages(done, number))
        tail = rest + tail[-1:]
    tail = _cut(tail)
    if b"%" in tail:
        text = _ANSI.sub("", tail.decode("utf-8", "ignore"))
        for piece in _plain(_unwrap(text)[0]).split("\r"):
            found = reader.bar(piece, growing=True)
            if found:
                lines.append(LogLine(number, piece.strip(), bar=found))
    return tail


class _Patterns(msgspec.Struct, frozen=True):
    """An engine's expressions, compiled, each with literal text to look for first."""

    prefix: re.Pattern[str]
    skip: tuple[bytes, ...]
    bars: tuple[tuple[str, str, re.Pattern[str]], ...]
    exceptions: tuple[tuple[str, re.Pattern[str]], ...]


@lru_cache(maxsize=8)
def _patterns(
    prefix: str, skip: tuple[str, ...], bars: tuple[Bar, ...], signs: tuple[Sign, ...]
) -> _Patterns:
    return _Patterns(
        prefix=re.compile(prefix),
        skip=tuple(literal.encode() for literal in skip),
        bars=tuple((bar.id, needle(bar.pattern), re.compile(bar.pattern)) for bar in bars),
        exceptions=tuple(
            (needle(sign.pattern), re.compile(sign.pattern))
            for sign in signs
            if sign.kind == "exception"
        ),
    )


class _Reader:
    """The little that changes from line to line while a block is read."""

    def __init__(self, state: ParserState, engine: Engine) -> None:
        self.patterns = _patterns(engine.prefix, engine.skip, engine.bars, engine.signs)
        self.time_format = engine.time_format
        self.partial = state.partial
        self.error_rank = state.error_rank

    def plain_message(self, raw: bytes, number: int) -> LogLine | None:
        """Return what a line says where it is nothing but a prefix and a message: most are."""
        if self.partial or len(raw) > TEXT_LIMIT or not raw.isascii():
            return None
        text = raw.decode("ascii")
        match = self.patterns.prefix.match(text)
        if not match or not text.isprintable() or self.patterns.prefix.search(text, match.end()):
            return None
        message = text[match.end() :].rstrip()
        rank = _rank(match["rank"])
        self.error_rank = rank if self._is_exception(message) else None
        if not message:
            return None
        return LogLine(number, message, rank, _stamp(match["time"], self.time_format))

    def messages(self, raw: bytes, number: int, *, last: bool = False) -> Iterator[LogLine]:
        """Yield what one line says; of a bar's updates in a row the first and the newest."""
        newest: LogLine | None = None
        bar_id = ""
        for line in self._all_messages(raw, number, last=last):
            if line.bar and line.bar[0] == bar_id:
                newest = line
                continue
            if newest:
                yield newest
                newest = None
            bar_id = line.bar[0] if line.bar else ""
            yield line
        if newest:
            yield newest

    def bar(self, text: str, *, growing: bool = False) -> tuple[str, int, int] | None:
        """Return the bar in a text; of a text that still grows only where its numbers are whole."""
        if "%" not in text or "/" not in text:
            return None
        for bar_id, literal, pattern in self.patterns.bars:
            if literal in text and (match := pattern.search(text)):
                if growing and match.end() == len(text):
                    return None
                return bar_id, int(match["done"]), int(match["total"])
        return None

    def _all_messages(self, raw: bytes, number: int, *, last: bool) -> Iterator[LogLine]:
        for part in raw.split(b"\r") if b"\r" in raw else (raw,):
            text = _cut(part).decode("utf-8", "replace")
            if "\x1b" in text:
                text = _ANSI.sub("", text)
            text, whole = _unwrap(text)
            if self.partial:
                text, self.partial = self.partial + text, ""
            if not whole and not last:
                self.partial = text[-TEXT_LIMIT:]
                continue
            for piece in text.split("\r") if "\r" in text else (text,):
                yield from self._glued(_plain(piece).rstrip(), number)

    def _glued(self, text: str, number: int) -> Iterator[LogLine]:
        """Take apart what was written without a line end between: a bar and the next message."""
        match = self.patterns.prefix.search(text)
        before = text[: match.start()] if match else text
        if before.strip() and not _LABEL.fullmatch(before):
            rank = self.error_rank or ""
            bar = self.bar(before)
            yield LogLine(number, before.rstrip(), "" if bar else rank, None, bar)
        while match:
            following = self.patterns.prefix.search(text, match.end())
            message = text[match.end() : following.start() if following else None].rstrip()
            rank = _rank(match["rank"])
            self.error_rank = rank if self._is_exception(message) else None
            if message:
                yield LogLine(number, message, rank, _stamp(match["time"], self.time_format))
            match = following

    def _is_exception(self, text: str) -> bool:
        for literal, pattern in self.patterns.exceptions:
            if literal in text and pattern.search(text):
                return True
        return False


@lru_cache(maxsize=1024)
def _rank(text: str | None) -> str:
    return normal_rank(text) if text else ""


@lru_cache(maxsize=256)
def _stamp(text: str, time_format: str) -> float | None:
    """Return a stamp in seconds; lines come many to the second, so it is remembered.

    Old releases print the time of the day alone, which is the last part of the format.
    """
    seconds, _, fraction = text.replace(",", ".").partition(".")
    if " " not in seconds:
        time_format = time_format.rpartition(" ")[2]
    try:
        moment = datetime.strptime(seconds, time_format).replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _unwrap(text: str) -> tuple[str, bool]:
    r"""Take off what a log collector put in front of a line; tell whether the line is whole.

    >>> _unwrap("2026-11-29T20:41:51.123456789Z stdout F [2026-11-29 20:41:51 TP0] text")
    ('[2026-11-29 20:41:51 TP0] text', True)
    >>> _unwrap('{"log":"a \\u2588 bar","stream":"stderr","time":"2026-11-29T20:41:51Z"}')
    ('a █ bar', False)
    >>> _unwrap("sglang-1  | text"), _unwrap("Nov 29 20:41:51 node7 sglang[123]: text")
    (('text', True), ('text', True))
    >>> _unwrap("[sglang]     | text"), _unwrap("(WorkerDict pid=2782, ip=10.1.4.2) text")
    (('text', True), ('text', True))
    """
    whole = True
    first = text[:1]
    if first == "{" and text.startswith('{"log":'):  # docker's json-file
        try:
            logged = msgspec.json.decode(text, type=_DockerLine).log
        except msgspec.DecodeError:
            return text, True
        whole = logged.endswith("\n")  # a line over 16 KiB comes in several
        text, first = logged.rstrip("\n"), logged[:1]
    if first == "[" and text.startswith("[pod/"):  # kubectl logs --prefix
        text = text.partition("] ")[2] or text
        first = text[:1]
    if first.isdigit() and (
        match := _ISO.match(text)
    ):  # containerd, kubectl --timestamps, journald
        text, whole = text[match.end() :], whole and match["flag"] != "P"
    elif (first.isalnum() or first == "[") and (
        match := _SYSLOG.match(text) or _COMPOSE.match(text)
    ):
        text = text[match.end() :]
    if text.startswith("(") and (match := _RAY.match(text)):
        text = text[match.end() :]
    return text, whole


class _DockerLine(msgspec.Struct):
    log: str


_ISO = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d) "
    r"(?:(?:stdout|stderr) (?P<flag>[FP]) ?|\S+ [^\s:\[]+(?:\[\d+\])?: )?"
)
_SYSLOG = re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? \S+ [^\s:\[]+(?:\[\d+\])?: ")
_COMPOSE = re.compile(r"(?:[\w.-]+|\[[\w.-]+\]) +\| ")
"""`docker compose`, and `podman-compose` with its brackets."""
_RAY = re.compile(r"\([\w.]+ pid=\d+(?:, ip=[^\s)]+)?\) ?")
"""What Ray puts before each line of an actor or a task."""
_LABEL = re.compile(r"\s*(?:\d+:|\[\d+\]:?|\[[\w./-]+\])\s*")
"""Labels that launchers such as srun --label put before a line."""

_ANSI = re.compile(r"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROL = {code: None for code in (*range(9), *range(10, 32), *range(127, 160)) if code != 13}


def _plain(text: str) -> str:
    """Remove colours and control characters, all but tabs and carriage returns."""
    if text.isprintable():
        return text
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return text.translate(_CONTROL)


def _cut(data: bytes) -> bytes:
    """Keep both ends of a line that is too long: its message, and its newest bar."""
    if len(data) <= TEXT_LIMIT:
        return data
    return data[: TEXT_LIMIT // 2] + data[-TEXT_LIMIT // 2 :]
