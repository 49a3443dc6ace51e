"""Reads what the hidden-state patches wrote, and says what is off.

The files are safetensors: eight bytes of length, little-endian, that much JSON, then the tensors'
bytes (https://github.com/huggingface/safetensors, "Format"). Read without PyTorch, in blocks.
"""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hangdoctor.errors import InputError
from hangdoctor.model import Struct
from hangdoctor.patches.hangdoctor_hs_dump import FORMAT

if TYPE_CHECKING:
    from pathlib import Path

MOST_HEADER_BYTES = 16 << 20
BLOCK_BYTES = 16 << 20
MOST_FILES = 100_000

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8,
          "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip
# Where all bits of the exponent are set it is NaN or infinite: bytes from the end that tell it, the
# first by a class of values, the second, which is looked at only then, by a mask.
_NOT_FINITE: dict[str, tuple[re.Pattern[bytes], int]] = {
    "F64": (re.compile(rb"[\x7f\xff]"), 0xF0),
    "F32": (re.compile(rb"[\x7f\xff]"), 0x80),
    "BF16": (re.compile(rb"[\x7f\xff]"), 0x80),
    "F16": (re.compile(rb"[\x7c-\x7f\xfc-\xff]"), 0x00),
}


class Dump(Struct, frozen=True):
    """One file.

    Attributes:
        metadata: what the dump module wrote into it.
        tokens, requests: rows, and how many requests they belong to.
        layers: ids of the layers whose input is in it.
        hidden: width of the states.
        dtype: of the states, in safetensors' names.
        wrong: what is off; doubts: what a reader must know.
    """

    name: str
    bytes: int
    metadata: dict[str, str] = {}
    tokens: int = 0
    requests: int = 0
    layers: tuple[int, ...] = ()
    hidden: int = 0
    dtype: str = ""
    wrong: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def writer(self) -> str:
        """Whose file it is: one rank of one server's life."""
        return self.metadata.get("writer", "")


class Dumps(Struct, frozen=True):
    """A folder of them.

    Attributes:
        wrong: what is off between the files; doubts: what a reader must know of all.
    """

    directory: str
    files: tuple[Dump, ...]
    wrong: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def all_right(self) -> bool:
        """Nothing is off."""
        return not self.wrong and not any(file.wrong for file in self.files)


def read_dumps(directory: Path) -> Dumps:
    """Read a folder's dumps; what is off is said, not raised.

    Raises:
        InputError: there is no such folder.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if not entry.is_dir())
    except OSError as error:
        raise InputError(
            f"{directory}: {error.strerror}", hint="the folder that SGLANG_HS_DUMP_DIR named"
        ) from error
    mine = [name for name in names if name.endswith(".safetensors")]
    files = tuple(_read(directory / name) for name in mine[:MOST_FILES])
    wrong, doubts = _together(files)
    unfinished = [name for name in names if name.endswith(".safetensors.tmp")]
    if unfinished:
        wrong.append(
            f"{_count(len(unfinished), 'file')} unfinished ({unfinished[0]}): the server ended, or "
            "the disk filled up, in the middle of one"
        )
    if not mine:
        wrong.append("no dumps: did a request reach the patched server, with the variable set?")
    if len(mine) > MOST_FILES:
        doubts.append(f"only the first {MOST_FILES} of {len(mine)} files were read")
    if strange := len(names) - len(mine) - len(unfinished):
        doubts.append(f"{_count(strange, 'other file')} in the folder")
    return Dumps(str(directory), files, tuple(wrong), tuple(doubts))


def _together(files: tuple[Dump, ...]) -> tuple[list[str], list[str]]:
    """Say what is off, or worth knowing, between files."""
    wrong: list[str] = []
    doubts: list[str] = []
    writers: dict[str, list[Dump]] = {}
    for file in files:
        if file.writer:
            writers.setdefault(file.writer, []).append(file)
    spans: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for writer, own in writers.items():
        numbers = sorted(_number(file.metadata.get("number")) for file in own)
        gaps = sum(after - before - 1 for before, after in pairwise([0, *numbers]))
        if gaps > 0:
            wrong.append(f"{writer}: {_count(gaps, 'batch', 'batches')} missing (see its log)")
        times = [_time(file.metadata.get("written_at_s")) for file in own]
        group = own[0].metadata.get("dp_rank", ""), own[0].metadata.get("pp_rank", "")
        spans.setdefault(group, []).append((min(times), max(times), writer))
    for (dp_rank, pp_rank), known in spans.items():
        known.sort()
        for (_, until, one), (since, _, other) in pairwise(known):
            if since <= until:
                wrong.append(f"two ranks write for DP {dp_rank}, PP {pp_rank}: {one} and {other}")
            else:
                doubts.append(f"of two starts of a server: {one} and {other}")
    for what in ("hidden", "dtype"):
        values = {getattr(file, what) for file in files if getattr(file, what)}
        if len(values) > 1:
            wrong.append(f"files differ in {what}: {', '.join(map(str, sorted(values)))}")
    return wrong, list(dict.fromkeys(doubts))


def _read(path: Path) -> Dump:
    wrong: list[str] = []
    size = 0
    try:
        # Neither a FIFO nor a link of another's is opened.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            header, begin = _header(file, size)
            return _judge(path.name, size, header, begin, file)
    except OSError as error:
        wrong.append(f"cannot be read: {error.strerror}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        wrong.append(f"no dump: {error}" if isinstance(error, ValueError) else "no dump: its "
                     "header is not as the format has it")  # fmt: skip
    return Dump(name=path.name, bytes=size, wrong=tuple(wrong))


def _header(file: Any, size: int) -> tuple[dict[str, Any], int]:
    """Return the header and where the tensors begin.

    Raises:
        ValueError: it is cut off, or no header.
    """
    if size < 8:
        raise ValueError("cut off in its first 8 bytes")
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= MOST_HEADER_BYTES:
        raise ValueError("not in the safetensors format")
    if 8 + length > size:
        raise ValueError("cut off in its header")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise TypeError
    return header, 8 + length


def _judge(name: str, size: int, header: dict[str, Any], begin: int, file: Any) -> Dump:
    metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
    if metadata.get("format") != FORMAT:
        raise ValueError(f"its format is {metadata.get('format', 'not told')}, not {FORMAT}")
    wrong: list[str] = []
    doubts: list[str] = []
    tensors: dict[str, tuple[str, list[int], int, int]] = {}
    for key, entry in header.items():
        first, last = map(int, entry["data_offsets"])
        shape = [int(length) for length in entry["shape"]]
        kind = entry["dtype"]
        count = 1
        for length in shape:
            count *= length
        if min(shape, default=0) < 0 or last - first != count * _SIZES.get(kind, 0):
            wrong.append(f"{key}: {last - first} bytes for {kind} of shape {shape}")
        elif first < 0 or begin + last > size:
            wrong.append(f"{key} is cut off: the file has {size} of {begin + last} bytes")
        else:
            tensors[key] = kind, shape, begin + first, begin + last
    states = {key: tensor for key, tensor in tensors.items()
              if key == "final" or key.startswith("layer.")}  # fmt: skip
    layers = tuple(sorted(int(key[6:]) for key in header if key.startswith("layer.")))
    lengths = _integers(file, tensors.get("seq_lens"))
    prefixes = _integers(file, tensors.get("prefix_lens"))
    tokens = sum(lengths)
    if not lengths:
        wrong.append("seq_lens is missing: its rows belong to no request")
    if len(lengths) != len(prefixes):
        wrong.append(f"{len(lengths)} seq_lens and {len(prefixes)} prefix_lens")
    hidden = _number(metadata.get("hidden_size"))
    for key, (_, shape, _, _) in states.items():
        if len(shape) != 2 or shape[0] != tokens or (hidden and shape[1] != hidden):
            wrong.append(f"{key} has shape {shape}, not [{tokens}, {hidden or 'hidden'}]")
    for key in ("input_ids", "positions"):
        if key in tensors and (tensors[key][1] or [0])[-1] != tokens:
            wrong.append(f"{key} has shape {tensors[key][1]} for {tokens} tokens")
        elif key not in tensors:
            (wrong if key == "positions" else doubts).append(f"{key} is missing")
    kinds = {kind for kind, _, _, _ in states.values()}
    if len(kinds) > 1:
        wrong.append(f"its states have several types: {', '.join(sorted(kinds))}")
    expected = json.loads(metadata.get("expected_layer_ids", "[]"))
    reasons = json.loads(metadata.get("missing_layers", "{}"))
    wrong += [
        f"layer {layer} is missing: {reasons.get(str(layer), 'no reason told')}"
        for layer in expected
        if layer not in layers
    ]
    if metadata.get("is_last_stage") == "1" and "final" not in header:
        wrong.append("the final states are missing")
    if metadata.get("attn_tp_rank", "0") != "0":
        wrong.append(f"written by rank {metadata['attn_tp_rank']} of its group, not by its first")
    wrong += _odd_positions(file, tensors.get("positions"), lengths, prefixes)
    for key, tensor in states.items():
        wrong += [f"{key} {odd}" for odd in _odd_numbers(file, tensor)]
    if left := sum(prefixes):
        doubts.append(f"{left} tokens before these are not in it (radix cache or earlier chunk)")
    return Dump(
        name=name,
        bytes=size,
        metadata=metadata,
        tokens=tokens,
        requests=len(lengths),
        layers=layers,
        hidden=next((shape[1] for _, shape, _, _ in states.values() if len(shape) == 2), 0),
        dtype=next(iter(kinds), ""),
        wrong=tuple(wrong),
        doubts=tuple(doubts),
    )


def _integers(file: Any, tensor: tuple[str, list[int], int, int] | None) -> list[int]:
    if tensor is None or tensor[0] not in ("I64", "I32"):
        return []
    kind, _, first, last = tensor
    file.seek(first)
    data = file.read(last - first)
    return memoryview(data).cast("q" if kind == "I64" else "i").tolist()


def _odd_positions(
    file: Any,
    tensor: tuple[str, list[int], int, int] | None,
    lengths: list[int],
    prefixes: list[int],
) -> list[str]:
    """Compare positions with lengths: each request's run on from what came before it."""
    if tensor is None or len(tensor[1]) != 1 or len(lengths) != len(prefixes):
        return []  # several rows are for images, which run otherwise
    positions, at = _integers(file, tensor), 0
    for index, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
        if positions[at : at + length] != list(range(prefix, prefix + length)):
            return [f"positions of request {index} do not run from {prefix} on"]
        at += length
    return []


def _odd_numbers(file: Any, tensor: tuple[str, list[int], int, int]) -> list[str]:
    """Say whether a tensor holds NaN or infinite numbers, or nothing but zeros."""
    kind, _, first, last = tensor
    if kind not in _NOT_FINITE or first == last:
        return []
    pattern, mask = _NOT_FINITE[kind]
    width = _SIZES[kind]
    bad, only_zeros = 0, True
    file.seek(first)
    for at in range(first, last, BLOCK_BYTES):
        block = file.read(min(BLOCK_BYTES, last - at))
        only_zeros = only_zeros and block.count(0) == len(block)
        seconds = block[width - 2 :: width]
        for match in pattern.finditer(block[width - 1 :: width]):
            bad += seconds[match.start()] & mask == mask
    found = [f"has {_count(bad, 'number')} that are NaN or infinite"] if bad else []
    return found + (["is all zeros"] if only_zeros else [])


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _time(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
