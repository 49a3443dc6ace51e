"""The longest common subsequence of two sequences: the alignment that keeps the most lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    Item = TypeVar("Item", bound=Hashable)


def common(first: Sequence[Item], second: Sequence[Item]) -> list[tuple[int, int]]:
    """Return the index pairs of a longest common subsequence, in order.

    A row of the table is one integer, a bit a column (Hyyrö, "Bit-parallel LCS-length computation
    revisited", 2004): 5000 by 5000 lines take some 20 ms and 3 MB.

    >>> common("abcbd", "acbbxd")
    [(0, 0), (2, 1), (3, 2), (4, 5)]
    """
    begin = 0
    least = min(len(first), len(second))
    while begin < least and first[begin] == second[begin]:
        begin += 1
    end = 0
    while end < least - begin and first[-1 - end] == second[-1 - end]:
        end += 1
    middle = [
        (begin + i, begin + j)
        for i, j in _middle(first[begin : len(first) - end], second[begin : len(second) - end])
    ]
    head = [(index, index) for index in range(begin)]
    tail = [(len(first) - end + index, len(second) - end + index) for index in range(end)]
    return head + middle + tail


def _middle(first: Sequence[Item], second: Sequence[Item]) -> list[tuple[int, int]]:
    if not first or not second:
        return []
    places: dict[Item, int] = {}
    for index, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << index
    full = (1 << len(first)) - 1
    row = full
    rows = [row]
    for item in second:
        matches = row & places.get(item, 0)
        row = (row + matches | row - matches) & full
        rows.append(row)
    pairs = []
    i, j = len(first) - 1, len(second)
    while i >= 0 and j > 0:
        if rows[j] >> i & 1:
            i -= 1
        elif not rows[j - 1] >> i & 1:
            j -= 1
        else:
            pairs.append((i, j - 1))
            i -= 1
            j -= 1
    return pairs[::-1]
