"""A rank that sleeps, and when it wakes by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.model import Struct
from hangdoctor.units import ends_in

if TYPE_CHECKING:
    from hangdoctor.model import ThreadWait

_SAME_S = 0.5
"""Two looks at one sleep tell its end to a tenth of a second."""
_GROWS = 1.5
_GROWN_S = 5.0
"""A shorter one is a nap of a loop that polls, of which each look sees another part."""


class Sleep(Struct, frozen=True):
    """The first sleep that a rank was seen in since it last moved, or a longer one after it.

    That it wakes and sleeps again is no progress: only the first one explains why it stands still.
    One that is half as long again does, too: who retries waits longer each time, up to a limit.

    Attributes:
        noted_at_s: recording time of the look that first saw it.
        ends_at_s: when it ends by itself, at the latest.
        over_at_s: the same, or when the rank was seen to have left it before.
    """

    noted_at_s: float
    ends_at_s: float
    over_at_s: float


def wakes_at_s(
    wait: ThreadWait, since_s: float, began_s: float | None
) -> tuple[float, float] | None:
    """Return the recording times between which a wait ends by itself; None where not known.

    Args:
        wait: of a thread.
        since_s: when it was first seen in it.
        began_s: when its process began, before which no sleep of it can have; None if not known.
    """
    if wait.ends_at_s is not None:
        return wait.ends_at_s, wait.ends_at_s
    if wait.lasts_s is None:
        return None
    least_s = began_s + wait.lasts_s if began_s is not None else since_s
    return max(since_s, least_s), since_s + wait.lasts_s


def left_s(wakes: tuple[float, float] | None, at_s: float) -> tuple[float, float] | None:
    """Return in how many seconds a sleep ends by itself, at the least and at the most.

    None where that is not known, or is over.

    >>> left_s((60.0, 109.0), 70.0), left_s((60.0, 109.0), 110.0)
    ((0.0, 39.0), None)
    """
    if wakes is None or wakes[1] <= at_s:
        return None
    return max(0.0, wakes[0] - at_s), wakes[1] - at_s


def wakes_in(left: tuple[float, float]) -> str:
    """Say in how long a sleep ends by itself.

    >>> wakes_in((49.0, 49.0)), wakes_in((0.0, 49.0))
    ('in 49 s', 'in 49 s at the latest')
    """
    return ends_in(left[0] or None, left[1])


def see_sleep(
    known: Sleep | None, ends_at_s: float | None, moved_at_s: float, at_s: float
) -> Sleep | None:
    """Take in a look at a rank.

    Args:
        known: what was known before.
        ends_at_s: when the sleep that it is in now ends, at the latest; None for none.
        moved_at_s: when the rank last moved.
        at_s: now.
    """
    asleep = ends_at_s is not None and ends_at_s > at_s
    if known is None or moved_at_s > known.noted_at_s or _grows(known, ends_at_s, at_s):
        if ends_at_s is None or not asleep:
            return None
        return Sleep(noted_at_s=at_s, ends_at_s=ends_at_s, over_at_s=ends_at_s)
    # A signal that is handled breaks a sleep, and Python sleeps on to the same moment.
    same = ends_at_s is not None and abs(ends_at_s - known.ends_at_s) < _SAME_S
    over_at_s = known.ends_at_s if same else min(known.over_at_s, at_s)
    return Sleep(noted_at_s=known.noted_at_s, ends_at_s=known.ends_at_s, over_at_s=over_at_s)


def _grows(known: Sleep, ends_at_s: float | None, at_s: float) -> bool:
    """Tell whether a sleep is another one, and longer than those before it."""
    if ends_at_s is None or ends_at_s - known.ends_at_s < _SAME_S:
        return False
    least_s = max(_GROWN_S, _GROWS * (known.ends_at_s - known.noted_at_s))
    return ends_at_s - at_s >= least_s
