"""What a recording keeps, and what it does not give away."""

from __future__ import annotations

import msgspec
import pytest

from hangdoctor.model import (
    Frame,
    Host,
    Missing,
    OpenFile,
    Process,
    Processes,
    ProcessStacks,
    Snapshot,
    Stacks,
    ThreadStack,
    Waits,
)
from hangdoctor.recording import Thinned, thin
from hangdoctor.redaction import redact

REFUSED = Missing(reason="permission")
STACK = ThreadStack(name="MainThread", frames=(Frame(function="f", path="f.py"),))
STACKS = Stacks(by_pid={1: ProcessStacks(threads=(STACK,))})


def thinned(*sections):
    """Return which of the snapshots are kept, one a second with these sections each."""
    state, kept = Thinned(), []
    for at_s, given in enumerate(sections):
        given = {"processes": Processes(processes=())} | given  # noqa: PLW2901
        new = Snapshot(at_s=at_s, wall_s=at_s, **given)
        after, keep = thin(state, new)
        if keep:
            kept.append(int(state.pending.at_s))
        state = after
    return [*kept, int(state.pending.at_s)]


def test_where_nothing_changes_the_first_and_the_last_are_kept():
    assert thinned({}, {}, {}, {}, {}) == [0, 4]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"stacks": STACKS}, {"stacks": REFUSED}),
        ({"stacks": REFUSED}, {"stacks": STACKS}),
        ({"waits": Waits(by_pid={})}, {"waits": REFUSED}),
        ({"waits": REFUSED}, {"waits": Waits(by_pid={})}),
        ({"host": Host()}, {"host": REFUSED}),
        ({"host": REFUSED}, {"host": Host()}),
        ({"host": Host(oom_kills=0)}, {"host": Host(oom_kills=1)}),
    ],
)
def test_a_rare_look_that_tells_something_else_is_kept(first, then):
    assert thinned(first, {}, {}, then, {}, {}, {}) == [0, 3, 6]


def test_a_look_that_the_next_one_repeats_is_not_kept():
    then = {"stacks": REFUSED, "waits": REFUSED, "host": Host(oom_kills=1)}
    assert thinned({}, {}, then, then, {}, {}) == [0, 3, 5]


def with_files(*files):
    process = Process(pid=1, ppid=0, start_ticks=1, title="", comm="", state="R", cpu_s=0.0)
    process = msgspec.structs.replace(process, files=files or None)
    return {"processes": Processes(processes=(process,))}


def test_a_look_at_descriptors_that_finds_another_one_is_kept():
    pipe = OpenFile(fd=3, kind="pipe", target="pipe:[1]")
    eventfd = OpenFile(fd=4, kind="eventfd", target="anon_inode:[eventfd]", identity=7)
    unseen, before, after = with_files(), with_files(pipe), with_files(pipe, eventfd)
    assert thinned(before, unseen, before, unseen, after, unseen, unseen) == [0, 4, 6]
    assert thinned(before, unseen, before, unseen, before, unseen, unseen) == [0, 6]


def test_looks_at_a_machine_that_stays_the_same_are_not_kept():
    same = {"host": Host(oom_kills=2, load_1m=1.0)}
    assert thinned(same, {}, same, {}, {"host": Host(oom_kills=2, load_1m=3.0)}, {}) == [0, 5]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("--api-key sk-123456 --port 1", "sk-123456"),
        ('"--hf-token","abc","--port"', "abc"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG go", "wJalrXUtnFEMI/K7MDENG"),
        ("AWS_ACCESS_KEY_ID='AKIAIOSFODNN7EXAMPLE'", "AKIAIOSFODNN7EXAMPLE"),
        ("Authorization: Bearer eyJhbGciOi.J9-x_y go", "eyJhbGciOi.J9-x_y"),
        ('"authorization": "bearer eyJhbGciOi"', "eyJhbGciOi"),
        ("OPENAI_API_KEY: sk-1", "sk-1"),
    ],
)
def test_a_secret_becomes_as_many_asterisks(text, secret):
    assert redact(text.encode()).decode() == text.replace(secret, "*" * len(secret))


@pytest.mark.parametrize(
    "text",
    ["api_key=None", "#new-token: 8192, #cached-token: 0", "the bearer of it", "max_tokens=16"],
)
def test_what_is_no_secret_stays(text):
    assert redact(text.encode()).decode() == text


@pytest.mark.parametrize("piece", ["-", "--", "a", "a_", "--a-", "password ", "bearer ", "=", " "])
def test_a_line_of_a_megabyte_is_redacted_and_keeps_its_length(piece):
    text = (piece * 1_000_000)[:1_000_000].encode()
    assert len(redact(text)) == len(text)
