"""Reads whether the caches of kernel compilers grow, by the time stamps of their directories.

A compiler that works inside a rank shows nothing else: each kernel that it has made is a new
directory or file in its cache. No file is opened. A cache on dead storage blocks its own thread
alone.
"""

from __future__ import annotations

import os
import pwd
import re
from functools import partial
from typing import TYPE_CHECKING

from hangdoctor.collect import procfs
from hangdoctor.collect.bounded import Bounded
from hangdoctor.collect.weights import real_path
from hangdoctor.model import CacheDirectory, Caches, Missing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hangdoctor.collect.look import Look

MOST_DIRECTORIES = 3000
"""So many are looked at; the newest of each level are looked into."""
LOOKED_INTO = 40
DEPTH = 4
"""flashinfer/VERSION/ARCHITECTURE/cached_ops/OPERATION has the most levels."""

_WITHIN_S = 1.5
_VARIABLE = re.compile(r"\$(\w+)")
_walks: Bounded[str, CacheDirectory | None] = Bounded()


def read(look: Look) -> Caches | Missing:
    """Read the caches that the launch's environment names, those that are there."""
    pid = next((pid for pid in look.roots if procfs.read_stat(look.proc, pid)), None)
    if pid is None:
        return Missing(reason="gone", detail="the launcher has ended")
    environ = procfs.read_environ(look.proc, pid)
    if not environ:
        return Missing(reason="permission", detail="the launcher's environment cannot be read")
    environ = {"USER": _user(look.proc, pid)} | environ
    root = f"{look.proc}/{pid}/root"
    paths = {name: path for name, places in look.caches.items() if (path := _path(places, environ))}
    found = _walks.run(
        {name: partial(_newest, root, path) for name, path in paths.items()}, within_s=_WITHIN_S
    )
    return Caches(by_id={name: cache for name, cache in found.items() if cache is not None})


def _path(places: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the first place whose variables are all set.

    >>> _path(["$TRITON_CACHE_DIR", "$HOME/.triton/cache"], {"HOME": "/root"})
    '/root/.triton/cache'
    """
    for place in places:
        if all(environ.get(name) for name in _VARIABLE.findall(place)):
            return _VARIABLE.sub(lambda name: environ[name[1]], place)
    return None


def _newest(root: str, path: str) -> CacheDirectory | None:
    """Return the newest time stamp of a cache's directories; None where it is not there."""
    try:
        top = root + real_path(root, path)
        newest_s = os.stat(top).st_mtime
    except OSError:
        return None
    level, count = [top], 1
    for _ in range(DEPTH):
        below: list[tuple[float, str]] = []
        for directory in level:
            try:
                with os.scandir(directory) as entries:
                    below += [
                        (entry.stat(follow_symlinks=False).st_mtime, entry.path)
                        for entry in entries
                        if entry.is_dir(follow_symlinks=False)
                    ]
            except OSError:  # it was renamed or removed meanwhile, as builds do
                continue
            if count + len(below) > MOST_DIRECTORIES:
                break
        if not below:
            break
        below.sort(reverse=True)
        count += len(below)
        newest_s = max(newest_s, below[0][0])
        level = [directory for _, directory in below[:LOOKED_INTO]]
    return CacheDirectory(path=path, newest_wall_s=newest_s, directories=count)


def _user(proc: str, pid: int) -> str:
    try:
        return pwd.getpwuid(os.stat(f"{proc}/{pid}").st_uid).pw_name
    except (OSError, KeyError):
        return ""
