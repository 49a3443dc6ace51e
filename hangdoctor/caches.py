"""Whether the caches of kernel compilers grow, and whose code fills them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hangdoctor.model import Caches, Frame, Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hangdoctor.engines import Cache


class CacheSeen(Struct, frozen=True):
    """A cache of a kernel compiler.

    Attributes:
        path, newest_wall_s: as in CacheDirectory.
        grew_at_s: when it was last seen to grow; times: how often it was.
    """

    path: str
    newest_wall_s: float
    grew_at_s: float | None = None
    times: int = 0


def see_caches(
    before: Mapping[str, CacheSeen], section: Caches, caches: Iterable[Cache], at_s: float
) -> tuple[dict[str, CacheSeen], list[tuple[Cache, str]]]:
    """Return the caches as seen now, and those that grew since the last look, with their paths."""
    seen = dict(before)
    grown: list[tuple[Cache, str]] = []
    for cache in caches:
        now, last = section.by_id.get(cache.id), before.get(cache.id)
        if now is None:
            continue
        old = last or CacheSeen(path=now.path, newest_wall_s=now.newest_wall_s)
        grew = now.newest_wall_s > old.newest_wall_s
        seen[cache.id] = CacheSeen(
            path=now.path,
            newest_wall_s=max(now.newest_wall_s, old.newest_wall_s),
            grew_at_s=at_s if grew else old.grew_at_s,
            times=old.times + grew,
        )
        if grew:
            grown.append((cache, now.path))
    return seen, grown


def runs_code(stack: tuple[Frame, ...] | None, cache: Cache) -> bool:
    """Tell whether a stack goes through the code of the compiler that fills a cache."""
    return any(part in f"/{frame.path}" for frame in stack or () for part in cache.code)
