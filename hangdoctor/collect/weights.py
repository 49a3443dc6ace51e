"""Reads how far the weights have come: the checkpoint's files, and what the ranks hold of them.

A file that is read with read() tells by the offset of its descriptor, once the call has come back;
one that is mapped by its resident pages. Neither moves while storage does not deliver, though a
rank is in state D in both cases. No file of the target's is opened but on a local file system:
FUSE forgets what it has cached of a file when it is opened once more.

All of it may block: smaps waits for the memory map lock, the files may lie on dead storage. Each
process and each file has its own thread that can be left behind, and the worker can be replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import stat as stat_bits
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hangdoctor.collect import procfs
from hangdoctor.collect.bounded import Bounded
from hangdoctor.collect.permissions import refused
from hangdoctor.collect.processes import position
from hangdoctor.model import Checkpoint, HeldFile, Missing, Mount, ShardFile, Weights

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hangdoctor.collect.look import Look

WEIGHTS = re.compile(
    r"\.(?:safetensors|bin|pt|pth|gguf|ckpt|tensors)(?:\.incomplete)?$|/blobs/[0-9a-f]{40,64}$"
)
"""Names of files with weights; the last is a file of the hub's cache."""
LOCAL = frozenset(
    {"ext4", "ext3", "ext2", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "overlay"}
)
"""File systems of this machine's own disks and memory."""
MOST_FILES = 2000
MOST_LINKS = 20
INDEX_LIMIT_BYTES = 64 << 20
"""The index of a checkpoint of 100,000 tensors has 10 MB."""

_WITHIN_S = {"held": 2.0, "sizes": 0.2, "cached": 0.8, "checkpoint": 1.6}
_held: Bounded[tuple[int, int], tuple[HeldFile, ...] | Missing | None] = Bounded()
_sizes: Bounded[str, int | None] = Bounded()
_known_sizes: dict[str, int] = {}  # by path below /proc: what is not known is asked again, no more
_cached: Bounded[str, int | None] = Bounded()
_checkpoint: Bounded[str, Checkpoint | Missing] = Bounded()
_late: dict[str, Checkpoint] = {}

_KINDS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_BLOCKED = Missing(
    reason="timeout",
    detail="reading it blocks: the lock of its memory map is held, or a file is on dead storage",
)
_SYS_CACHESTAT = 451  # x86-64 and arm64 alike, since Linux 6.5
_MAPPING = re.compile(
    rb"^[0-9a-f]+-[0-9a-f]+ \S{4} [0-9a-f]+ \S+ \d+ +(/.*)\n(?:.*\n)*?Rss: +(\d+) kB", re.MULTILINE
)


def read(look: Look) -> Weights:
    """Read what the loaders hold, and where it is due the checkpoint."""
    stats = {pid: procfs.read_stat(look.proc, pid) for pid in look.loaders}
    keys = {(pid, stat.start_ticks): pid for pid, stat in stats.items() if stat}
    mounts = {loader: _mounts(look.proc, loader) for loader in keys.values()}
    found = _held.run(
        {key: partial(_read_held, look.proc, pid) for key, pid in keys.items()},
        within_s=_WITHIN_S["held"],
    )
    held: dict[int, tuple[HeldFile, ...] | Missing] = {}
    for key, pid in keys.items():
        files = found.get(key, _BLOCKED)
        if files is not None:
            held[pid] = files
    first = next(iter(keys.values()), None)
    checkpoint = None
    if look.checkpoint and first is not None:
        checkpoint = _find_checkpoint(look, first, held)
    if isinstance(checkpoint, Checkpoint):
        # What storage has told once it need not tell again, while it may be busy with the load.
        for pid in held:
            for file in checkpoint.files:
                _known_sizes[f"{look.proc}/{pid}/root{file.path}"] = file.size_bytes
    held = _with_sizes(look.proc, held, mounts)
    return Weights(checkpoint=checkpoint, held=held)


def parse_mapped(raw: bytes) -> dict[str, int]:
    r"""Parse /proc/PID/smaps: resident bytes of each mapped file of weights.

    >>> parse_mapped(
    ...     b"7f00-7f10 r--s 00000000 00:2b 7   /m/model-1.safetensors\nSize:     64 kB\n"
    ...     b"KernelPageSize:        4 kB\nRss:                  16 kB\nPss:   16 kB\n"
    ...     b"7f10-7f20 r-xp 00000000 08:01 5   /usr/lib/libc.so.6\nRss:       8 kB\n")
    {'/m/model-1.safetensors': 16384}
    """
    found: dict[str, int] = {}
    for part in _MAPPING.finditer(raw):
        path = part[1].decode(errors="replace")
        if WEIGHTS.search(path):
            found[path] = found.get(path, 0) + 1024 * int(part[2])
    return found


def parse_mounts(raw: bytes, path: str) -> Mount | None:
    r"""Parse /proc/PID/mountinfo: the file system that an absolute path lies on.

    >>> parse_mounts(
    ...     b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
    ...     b"31 22 0:40 / /models\\040x rw - fuse.juicefs JuiceFS:m rw\n", "/models x/a/b")
    Mount(point='/models x', type='fuse.juicefs', source='JuiceFS:m')
    """
    best: Mount | None = None
    for line in raw.decode(errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        words, kind = left.split(), right.split()
        if len(words) < 5 or len(kind) < 2:
            continue
        point = _unescaped(words[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts on one place the later one is seen.
        if inside and (best is None or len(point) >= len(best.point)):
            best = Mount(point=point, type=kind[0], source=_unescaped(kind[1]))
    return best


def real_path(root: str, path: str) -> str:
    """Follow all links of a path as a process sees it whose root directory is `root`.

    Raises:
        OSError: it cannot be followed, or has too many links.
    """
    todo = [part for part in path.split("/") if part][::-1]
    done: list[str] = []
    links = 0
    while todo:
        part = todo.pop()
        if part in (".", ".."):
            del done[len(done) - (part == "..") :]
            continue
        here = "/".join(("", *done, part))
        try:
            link = os.readlink(root + here)
        except OSError as error:
            if error.errno != 22:  # EINVAL: it is no link
                raise
            done.append(part)
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(40, os.strerror(40), here)
        if link.startswith("/"):
            done = []
        todo += [part for part in link.split("/") if part][::-1]
    return "/" + "/".join(done)


def _read_held(proc: str, pid: int) -> tuple[HeldFile, ...] | Missing | None:
    """Read the files of weights that a process has open or mapped; None where it has ended.

    It asks no file system: while one stalls, this says how far it had come.
    """
    try:
        positions = _read_open(proc, pid)
        mapped = {}
        # maps costs a fraction of smaps, which walks all page tables.
        if _IN_MAPS.search(procfs.read_table(f"{proc}/{pid}/maps")):
            mapped = parse_mapped(procfs.read_table(f"{proc}/{pid}/smaps"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError as error:
        return refused(f"{error.strerror} ({error.filename})", None)
    except OSError as error:
        return Missing(reason="failed", detail=str(error))
    paths = list(dict.fromkeys((*positions, *mapped)))[:MOST_FILES]
    return tuple(
        HeldFile(path, position=positions.get(path), resident_bytes=mapped.get(path))
        for path in paths
    )


_IN_MAPS = re.compile(rb"\.safetensors|\.bin\b|\.pth?\b|\.gguf|\.ckpt|\.tensors|/blobs/")


def _read_open(proc: str, pid: int) -> dict[str, int]:
    """Return the offsets of the open files of weights; the furthest of several descriptors."""
    found: dict[str, int] = {}
    for fd in os.listdir(f"{proc}/{pid}/fd"):
        try:
            link = os.readlink(f"{proc}/{pid}/fd/{fd}".encode()).decode(errors="replace")
            if not WEIGHTS.search(link):
                continue
            offset = position(procfs.read(f"{proc}/{pid}/fdinfo/{fd}"))
        except (FileNotFoundError, ProcessLookupError):  # closed in between
            continue
        if offset is not None:
            found[link] = max(offset, found.get(link, 0))
    return found


def _with_sizes(
    proc: str, held: dict[int, tuple[HeldFile, ...] | Missing], mounts: dict[int, bytes]
) -> dict[int, tuple[HeldFile, ...] | Missing]:
    """Add the sizes of the files, and on local storage what the page cache holds of them.

    A size that was told once is remembered: a file system that stalls tells none.
    """
    where = {
        file.path: (f"{proc}/{pid}/root{file.path}", parse_mounts(mounts[pid], file.path))
        for pid, files in held.items()
        if isinstance(files, tuple)
        for file in files
    }
    if len(_known_sizes) > MOST_FILES * len(held):
        _known_sizes.clear()
    asked = {path: partial(_size, at) for path, (at, _) in where.items() if at not in _known_sizes}
    sizes = _sizes.run(asked, within_s=_WITHIN_S["sizes"])
    _known_sizes.update({where[path][0]: size for path, size in sizes.items() if size is not None})
    cached = _cached.run(
        {path: partial(_cached_bytes, at) for path, (at, on) in where.items() if _is_local(on)},
        within_s=_WITHIN_S["cached"],
    )
    return {
        pid: files
        if isinstance(files, Missing)
        else tuple(
            msgspec.structs.replace(
                file,
                size_bytes=_known_sizes.get(where[file.path][0]),
                cached_bytes=cached.get(file.path),
            )
            for file in files
        )
        for pid, files in held.items()
    }


def _find_checkpoint(
    look: Look, pid: int, held: dict[int, tuple[HeldFile, ...] | Missing]
) -> Checkpoint | Missing:
    """Find the model's files by what the launch was told, else by what the ranks hold."""
    paths = [file.path for files in held.values() if isinstance(files, tuple) for file in files]
    key = f"{pid} {look.model}"
    found = _checkpoint.run(
        {key: partial(_keep_late, key, look.proc, pid, look.model, paths)},
        within_s=_WITHIN_S["checkpoint"],
    )
    if key in found:
        return found[key]
    # What came too late for an earlier look is not lost: these files do not change.
    return _late.pop(
        key,
        Missing(
            reason="timeout",
            detail="listing the model's files blocks: its storage does not answer",
            hint=f"see whether it answers: timeout 10 ls {look.model or 'its directory'}",
        ),
    )


def _keep_late(key: str, proc: str, pid: int, model: str, paths: list[str]) -> Checkpoint | Missing:
    found = _read_checkpoint(proc, pid, model, paths)
    _late.clear()
    if isinstance(found, Checkpoint):
        _late[key] = found
    return found


def _read_checkpoint(proc: str, pid: int, model: str, paths: list[str]) -> Checkpoint | Missing:
    root = f"{proc}/{pid}/root"
    for directory in _directories(proc, pid, model, paths):
        try:
            names = sorted(os.listdir(root + directory))
        except OSError:
            continue
        index_bytes, listed = _read_index(root, directory, names)
        files = tuple(_files(root, directory, listed or _weights_of(names)))
        unfinished = tuple(_unfinished(root, directory))
        if files or unfinished:
            mount = parse_mounts(_mounts(proc, pid), (files or unfinished)[0].path)
            if _is_local(mount):
                files = tuple(
                    msgspec.structs.replace(file, cached_bytes=_cached_bytes(root + file.path))
                    for file in files
                )
            return Checkpoint(
                directory=directory,
                files=files,
                unfinished=unfinished,
                index_bytes=index_bytes,
                mount=mount,
            )
    return Missing(
        reason="inapplicable" if not paths else "failed",
        detail=f"no files of weights were found for {model or 'the model'}",
    )


def _directories(proc: str, pid: int, model: str, paths: Iterable[str]) -> list[str]:
    """Return where the model's files may be: what was named, the hub's cache, what is held."""
    found: list[str] = []
    if model.startswith("/"):
        found.append(model)
    elif model:
        with contextlib.suppress(OSError):
            found.append(os.path.normpath(os.readlink(f"{proc}/{pid}/cwd") + "/" + model))
        if model.count("/") <= 1:
            repository = "models--" + model.replace("/", "--")
            found += [
                snapshot
                for cache in _caches(procfs.read_environ(proc, pid))
                for snapshot in _snapshots(f"{proc}/{pid}/root", f"{cache}/{repository}")
            ]
    for path in paths:
        directory, _, _ = path.rpartition("/")
        if directory.endswith("/blobs"):
            found += _snapshots(f"{proc}/{pid}/root", directory.removesuffix("/blobs"))
        else:
            found.append(directory)
    return list(dict.fromkeys(found))


def _caches(environment: dict[str, str]) -> list[str]:
    """Return where huggingface_hub keeps models (its constants.py)."""
    named = [environment.get(name) for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")]
    home = environment.get("HOME", "/root")
    cache = environment.get("XDG_CACHE_HOME") or f"{home}/.cache"
    named.append((environment.get("HF_HOME") or f"{cache}/huggingface") + "/hub")
    return [path for path in named if path]


def _snapshots(root: str, repository: str) -> list[str]:
    """Return the snapshots of a model in the hub's cache, that of the main branch first."""
    try:
        names = sorted(os.listdir(f"{root}{repository}/snapshots"))
    except OSError:
        return []
    try:
        main = procfs.read(f"{root}{repository}/refs/main").decode().strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    return [f"{repository}/snapshots/{name}" for name in sorted(names, key=main.__ne__)]


def _read_index(root: str, directory: str, names: list[str]) -> tuple[int | None, list[str]]:
    """Return the size of all tensors and the files that hold them, by the index where it is."""
    for name in names:
        if not name.endswith(".index.json"):
            continue
        at = f"{root}{directory}/{name}"
        try:
            if os.stat(at).st_size > INDEX_LIMIT_BYTES:
                continue
            index: dict[str, Any] = msgspec.json.decode(procfs.read(at), type=dict[str, Any])
            listed = sorted(set(index["weight_map"].values()))
            size = index.get("metadata", {}).get("total_size")
        except (OSError, KeyError, TypeError, AttributeError, msgspec.DecodeError):
            continue
        if listed and all(isinstance(each, str) and "/" not in each for each in listed):
            return size if isinstance(size, int) else None, listed
    return None, []


def _weights_of(names: list[str]) -> list[str]:
    """Return the files of the first kind that is there, as the loaders choose."""
    for kind in _KINDS:
        if found := [name for name in names if name.endswith(kind[1:])]:
            return found
    return []


def _files(root: str, directory: str, names: Iterable[str]) -> Iterable[ShardFile]:
    for name in list(names)[:MOST_FILES]:
        try:
            path = real_path(root, f"{directory}/{name}")
            info = os.stat(root + path)
        except OSError:
            continue
        yield ShardFile(path, info.st_size if stat_bits.S_ISREG(info.st_mode) else 0)


def _unfinished(root: str, directory: str) -> Iterable[ShardFile]:
    """Return what huggingface_hub is still downloading into the model's blobs."""
    repository, found, _ = directory.partition("/snapshots/")
    if not found:
        return
    try:
        names = sorted(os.listdir(f"{root}{repository}/blobs"))
    except OSError:
        return
    for name in names:
        if name.endswith(".incomplete") and (size := _size(f"{root}{repository}/blobs/{name}")):
            yield ShardFile(f"{repository}/blobs/{name}", size)


def _mounts(proc: str, pid: int) -> bytes:
    try:
        return procfs.read_table(f"{proc}/{pid}/mountinfo")
    except OSError:
        return b""


def _is_local(mount: Mount | None) -> bool:
    return mount is not None and mount.type in LOCAL


def _size(path: str) -> int | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_size if stat_bits.S_ISREG(info.st_mode) else None


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def _cached_bytes(path: str) -> int | None:
    """Return what the page cache holds of a file, by cachestat(2); None where it cannot be asked.

    It reads nothing of the file, so that the answer is not changed by asking.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOATIME)
    except PermissionError:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
    except OSError:
        return None
    try:
        if not stat_bits.S_ISREG(os.fstat(fd).st_mode):
            return None
        whole, answer = _Range(0, 0), _CacheStat()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(_SYS_CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(answer), 0):
            return None
        return min(int(answer.cached) * procfs.PAGE_BYTES, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
