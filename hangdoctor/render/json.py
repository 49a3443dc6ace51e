"""The diagnosis as one JSON document; its keys are a contract with scripts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor import __version__, engines
from hangdoctor.counts import counts
from hangdoctor.limits import countdowns
from hangdoctor.loads import report
from hangdoctor.model import Gpu, Installation, Missing
from hangdoctor.rules.sleeps import asleep_s
from hangdoctor.waitgraph import links

if TYPE_CHECKING:
    from hangdoctor.facts import Facts, RankFacts
    from hangdoctor.findings import Diagnosis, Finding, Normal, Step
    from hangdoctor.gpus import Card
    from hangdoctor.loads import Download, RankLoad

SCHEMA = 1

# C1 controls, and what turns or hides text; JSON itself escapes only what is below the space.
_OBEYED = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
    "|[\U000e0000-\U000e007f]"
)


def to_json(facts: Facts, diagnosis: Diagnosis) -> str:
    """Return the diagnosis as a JSON document."""
    return msgspec.json.format(encode(document(facts, diagnosis))).decode()


def encode(value: object) -> bytes:
    r"""Return a JSON document in one line, without what a terminal would obey.

    >>> encode({"title": "a\x1b[31mb\u202ec"})
    b'{"title":"a\\u001b[31mb\\u202ec"}'
    """
    return _OBEYED.sub(_escape, msgspec.json.encode(value).decode()).encode()


def document(facts: Facts, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as plain values, as `--format json` prints it."""
    still_s = diagnosis.still_s
    return {
        "schema": SCHEMA,
        "version": __version__,
        "source": facts.header.source,
        "engine": {"name": facts.engine, "version": engine_version(facts)},
        "state": diagnosis.state,
        "phase": diagnosis.phase,
        "culprits": list(diagnosis.culprits),
        "still_s": None if still_s is None else round(still_s, 1),
        "confidence": diagnosis.confidence,
        "title": diagnosis.title,
        "ranks": [_rank(rank, facts, diagnosis) for rank in facts.ranks],
        "gpus": [_gpu(index, card, facts) for index, card in sorted(facts.cards.items())],
        "findings": [_finding(finding) for finding in diagnosis.findings],
        "normal": _normal(diagnosis.normal),
        "experiments": [_experiment(step) for step in diagnosis.experiments],
        "load": _load(facts),
        "counts": _counts(facts),
        "limits": _limits(facts),
        "waits": [msgspec.to_builtins(link) for link in links(facts)],
        "missing": [
            {
                "what": unseen.what,
                "reason": unseen.missing.reason,
                "detail": unseen.missing.detail,
                "hint": unseen.missing.hint,
            }
            for unseen in diagnosis.unseen
        ],
        "installation": _installation(facts),
    }


def _escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def engine_version(facts: Facts) -> str | None:
    """Return the engine's version by its installation or its log; None where neither tells."""
    installation = facts.header.installation
    if isinstance(installation, Installation) and installation.version:
        return installation.version
    return facts.timeline.launch.version or None


def _rank(rank: RankFacts, facts: Facts, diagnosis: Diagnosis) -> dict[str, Any]:
    why = next((f.title for f in diagnosis.findings if rank.name in f.culprits), None)
    left = asleep_s(facts, rank)
    return {
        "rank": rank.name,
        "pid": rank.pid,
        "phase": rank.phase,
        "in_phase_s": None if rank.in_phase_s is None else round(rank.in_phase_s, 1),
        "moving": rank.moving,
        "waits_for": rank.wait.title if rank.wait else None,
        "why": why or rank.place or None,
        "present": rank.present,
        "state": rank.state,
        "still_s": None if rank.still_s is None else round(rank.still_s, 1),
        "moved_by": rank.moved_by or None,
        "cpu_pct": None if rank.cpu_pct is None else round(rank.cpu_pct, 1),
        "place": rank.place or None,
        "blocked_in": rank.blocked.text if rank.blocked else None,
        "wakes_least_s": _rounded(left[0] if left else None),
        "wakes_most_s": _rounded(left[1] if left else None),
        "caught_in": rank.caught_in or None,
    }


def _gpu(index: int, card: Card, facts: Facts) -> dict[str, Any]:
    ranks = [rank.name for rank in facts.ranks if index in rank.cards]
    seen: dict[str, Any] = {"index": index, "ranks": ranks, "reading": card.reading}
    if isinstance(card.gpu, Missing):
        return seen | {"missing": card.gpu.reason, "detail": card.gpu.detail}
    gpu: Gpu = card.gpu
    return seen | {
        "util_pct": gpu.util_pct,
        "memory_util_pct": gpu.memory_util_pct,
        "memory_used_bytes": gpu.memory_used_bytes,
        "power_w": gpu.power_w,
        "name": gpu.name,
        "memory_total_bytes": gpu.memory_total_bytes,
        "pcie_bytes_per_s": None if card.copies_per_s is None else round(card.copies_per_s),
        "nvlink_bytes_per_s": None if card.linked_per_s is None else round(card.linked_per_s),
        "sm_clock_mhz": gpu.sm_clock_mhz,
        "temperature_c": gpu.temperature_c,
        "slowed_by": gpu.slowed_by,
        "xids": gpu.xids,
    }


def _load(facts: Facts) -> dict[str, Any] | None:
    """Return how the load of the weights stands; None where no rank loads."""
    load = report(facts, engines.load(facts.engine)) if facts.engine in engines.names() else None
    if load is None:
        return None
    return {
        "directory": load.directory or None,
        "storage": load.storage or None,
        "total_bytes": load.total_bytes,
        "files": load.files,
        "cached_bytes": load.cached_bytes,
        "bar": list(load.bar) if load.bar else None,
        "slowest": load.slowest or None,
        "download": _download(load.download),
        "ranks": [_rank_load(rank) for rank in load.ranks],
    }


def _download(download: Download | None) -> dict[str, Any] | None:
    if download is None:
        return None
    now_s, least_s, most_s = download.left_s or (None, None, None)
    return {
        "done_bytes": download.done_bytes,
        "total_bytes": download.total_bytes,
        "bytes_per_s": None if download.pace is None else round(download.pace.per_s),
        "left_s": _rounded(now_s),
        "left_least_s": _rounded(least_s),
        "left_most_s": _rounded(most_s),
    }


def _counts(facts: Facts) -> list[dict[str, Any]]:
    """Return the work that a bar of the log counts."""
    if facts.engine not in engines.names():
        return []
    return [
        {
            "count": work.id,
            "title": work.title,
            "phase": work.phase,
            "done": work.done,
            "total": work.total,
            "item": work.item or None,
            "item_s": _rounded(work.item_s),
            "took_s": [[item, round(seconds, 1)] for item, seconds in work.took],
            "left": list(work.left),
            "left_s": _rounded(work.left_s[0] if work.left_s else None),
            "left_least_s": _rounded(work.left_s[1] if work.left_s else None),
            "left_most_s": _rounded(work.left_s[2] if work.left_s else None),
        }
        for work in counts(facts, engines.load(facts.engine))
    ]


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 1)


def _limits(facts: Facts) -> list[dict[str, Any]]:
    """Return the time-outs that will end a wait by themselves."""
    if facts.engine not in engines.names():
        return []
    return [
        {
            "limit": left.id,
            "ranks": list(left.ranks),
            "limit_s": left.limit_s,
            "left_least_s": _rounded(left.least_s),
            "left_most_s": _rounded(left.most_s),
            "ends": left.ends,
            "message": left.message,
            "unseen": left.unseen or None,
        }
        for left in countdowns(facts, engines.load(facts.engine))
    ]


def _rank_load(rank: RankLoad) -> dict[str, Any]:
    now_s, least_s, most_s = rank.left_s or (None, None, None)
    return {
        "rank": rank.name,
        "doing": rank.doing,
        "read_bytes": rank.read_bytes,
        "bytes_per_s": None if rank.pace is None else round(rank.pace.per_s),
        "window_s": None if rank.pace is None else round(rank.pace.window_s, 1),
        "left_s": None if now_s is None else round(now_s, 1),
        "left_least_s": None if least_s is None else round(least_s, 1),
        "left_most_s": None if most_s is None else round(most_s, 1),
        "at_most": rank.at_most,
        "nothing_for_s": None if rank.still_s is None else round(rank.still_s, 1),
        "file": rank.file or None,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "verdict": finding.verdict,
        "title": finding.title,
        "ranks": list(finding.ranks),
        "culprits": list(finding.culprits),
        "state": finding.state,
        "confidence": finding.confidence,
        "because": [msgspec.to_builtins(item) for item in finding.because],
        "needs": list(finding.needs),
        "advice": list(finding.advice),
    }


def _normal(normal: Normal | None) -> dict[str, Any] | None:
    if normal is None:
        return None
    return {
        "in_phase_s": round(normal.in_phase_s, 1),
        "longest_s": normal.longest_s,
        "by": normal.by,
        "overdue": normal.overdue,
        "note": normal.note,
    }


def _experiment(step: Step) -> dict[str, Any]:
    return {
        "id": step.id,
        "kind": step.kind,
        "command": step.command,
        "takes_s": step.takes_s,
        "consent": step.consent or None,
        "outcomes": [{"seen": seen, "means": means} for seen, means in step.outcomes],
    }


def _installation(facts: Facts) -> Any:
    installation = facts.header.installation
    return msgspec.to_builtins(installation) if isinstance(installation, Installation) else None
