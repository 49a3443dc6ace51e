"""Amounts, rates and times as people write them."""

from __future__ import annotations

SAME_S = 3.0
"""Stamps of a log are of whole seconds: a moment that is known to so much is known."""


def amount(count_bytes: float) -> str:
    """Write an amount of data for people.

    >>> amount(704e9), amount(5_200_000), amount(300)
    ('704.0 GB', '5.2 MB', '300 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count_bytes >= size:
            return f"{count_bytes / size:.1f} {unit}"
    return f"{count_bytes:.0f} B"


def rate(bytes_per_s: float) -> str:
    """Write a rate for people.

    >>> rate(5_200_000), rate(1_300), rate(704e9)
    ('5.2 MB/s', '1.3 kB/s', '704.0 GB/s')
    """
    return f"{amount(bytes_per_s)}/s"


def duration(seconds: float) -> str:
    """Write a time for people.

    >>> duration(86.4), duration(1500), duration(12_000), duration(1e6)
    ('86 s', '25 min', '3 h 20', '12 days')
    """
    if seconds < 1000:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f}"
    return f"{seconds / 86400:.0f} days"


def ends_in(least_s: float | None, most_s: float) -> str:
    """Say in how long something ends, as exactly as that is known.

    >>> ends_in(178, 179), ends_in(None, 50), ends_in(600, 900)
    ('in 179 s', 'in 50 s at the latest', 'in 600 s to 900 s')
    """
    most = duration(most_s)
    if least_s is None:
        return f"in {most} at the latest"
    least = duration(least_s)
    if most_s - least_s <= SAME_S or least == most:
        return f"in {most}"
    return f"in {least} to {most}"
