"""Reading a stack: which frames are Python's, which place they are, whether two are the same.

A frame is matched by `path:function`. The path matches at a component boundary from the right, and
the function with or without its class, since Python 3.10 and older do not know the class:

>>> from hangdoctor.model import Frame
>>> load = Frame("ModelRunner.load_model", "/opt/venv/sglang/srt/model_executor/model_runner.py", 1)
>>> matches(load, "model_runner.py:load_model"), matches(load, "runner.py:load_model")
(True, False)
>>> matches(load, "model_runner.py:ModelRunner.load_model"), matches(load, "model_runner.py:load")
(True, False)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hangdoctor.engines import Wait
    from hangdoctor.model import Frame, ProcessStacks, ThreadStack

DEPTH = 12
"""A wait is looked for this deep: wrappers and checks may stand on it, but not a whole program."""


def matches(frame: Frame, pattern: str) -> bool:
    """Tell whether a frame is at the place `path:function`."""
    path, _, function = pattern.rpartition(":")
    if frame.function != function and not frame.function.endswith("." + function):
        return False
    if frame.path == path or frame.path.endswith("/" + path):
        return True
    # py-spy's short file names keep fewer directories than the pattern has.
    return not frame.path.startswith("/") and path.endswith("/" + frame.path)


def is_at_any(frame: Frame, patterns: tuple[str, ...]) -> bool:
    """Tell whether a frame is at one of the places."""
    near = _by_last_name(patterns).get(_last_name(frame))
    return near is not None and any(matches(frame, pattern) for pattern in near)


def is_python(frame: Frame) -> bool:
    """Tell a Python frame from a native one.

    >>> from hangdoctor.model import Frame
    >>> is_python(Frame("<module>", "<string>", 1)), is_python(Frame("poll", "libc.so.6", 0))
    (True, False)
    """
    return frame.path.endswith(".py") or frame.path.startswith("<")


def python_frames(stack: ThreadStack) -> tuple[Frame, ...]:
    """Return the Python frames of a stack, innermost first."""
    return tuple(frame for frame in stack.frames if is_python(frame))


def main_thread(stacks: ProcessStacks) -> ThreadStack | None:
    """Return the main thread's stack; None where nothing was seen of it."""
    named = next((thread for thread in stacks.threads if thread.name == "MainThread"), None)
    first = named or (stacks.threads[0] if stacks.threads else None)
    return first if first is not None and first.frames else None


def shape(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Return what is equal for two stacks through the same functions, innermost first.

    Lines are left out: a loop that goes round in one function is not getting anywhere. Only the
    file's own name is taken, so that a path that was shortened or redacted changes nothing.
    """
    return tuple(f"{frame.path.rpartition('/')[2]}:{frame.function}" for frame in frames)


def call_path(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Return the shape of a stack, with lines in the model's own code.

    Two ranks in the same collective but at different lines of one `forward` are out of step. In
    other code lines differ without that: a broadcast's sender takes another branch.
    """
    names = shape(frames)
    return tuple(
        f"{name}:{frame.line}"
        if frame.function.rpartition(".")[2].startswith("forward") and "torch/" not in frame.path
        else name
        for name, frame in zip(names, frames, strict=True)
    )


def same_shape(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Tell whether two shapes agree as far as both go: a dump may end before the outermost frame.

    >>> same_shape(("a", "b"), ("a", "b", "c")), same_shape(("a", "x"), ("a", "b", "c"))
    (True, False)
    """
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def find_wait(frames: Sequence[Frame], waits: Sequence[Wait]) -> tuple[Wait, int] | None:
    """Return the wait that a stack stands in and the index of its frame.

    The innermost match decides, since a wait inside another is what really holds the thread (a
    compiler that is run from within an all-reduce); at the same frame the first in the list.
    """
    names = {_last_name(frame) for frame in frames[:DEPTH]}
    near = [wait for wait in waits if not names.isdisjoint(_by_last_name(wait.frames))]
    for index, frame in enumerate(frames[:DEPTH] if near else ()):
        for wait in near:
            if is_at_any(frame, wait.frames) and (
                not wait.under or first_place(frames[index:], wait.under) is not None
            ):
                return wait, index
    return None


def first_place(frames: Sequence[Frame], patterns: tuple[str, ...]) -> int | None:
    """Return the index of the innermost frame at one of the places."""
    for index, frame in enumerate(frames):
        if is_at_any(frame, patterns):
            return index
    return None


def place(frame: Frame) -> str:
    """Return a frame as people write it: `function (path:line)`, the path's last two parts."""
    path = "/".join(frame.path.split("/")[-2:])
    return f"{frame.function} ({path}:{frame.line})"


def _last_name(frame: Frame) -> str:
    return frame.function.rpartition(".")[2]


@functools.lru_cache(maxsize=1024)  # the tables of an engine have some hundred tuples of places
def _by_last_name(patterns: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the places by their function's last name: of a frame, most of a table is far away."""
    found: dict[str, tuple[str, ...]] = {}
    for pattern in patterns:
        name = pattern.rpartition(":")[2].rpartition(".")[2]
        found[name] = (*found.get(name, ()), pattern)
    return found
