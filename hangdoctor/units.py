"""Amounts, rates and times as people write them."""

from __future__ import annotations


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

    >>> duration(86.4), duration(1500), duration(12_000)
    ('86 s', '25 min', '3 h 20')
    """
    if seconds < 1000:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f}"
