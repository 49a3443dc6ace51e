"""Reads tensors of a dump as lists, without PyTorch."""

from __future__ import annotations

import json
from array import array

_CODES = {"F32": "f", "I64": "q"}


def read(path):
    """Return {name: (shape, values)} of a safetensors file, and its metadata."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    found = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        part = array(_CODES[entry["dtype"]])
        part.frombytes(data[8 + length + first : 8 + length + last])
        found[name] = (entry["shape"], part.tolist())
    return found, metadata


def values(path, name):
    return read(path)[0][name][1]
