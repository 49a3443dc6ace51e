"""A libnvidia-ml.so.1 whose cards say what a file says, loaded through the real binding."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "collect" / "nvml_stub.c"


def build(folder, *options):
    """Compile the library into a folder; return the environment that makes a process load it."""
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [
            "cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", *options, "-o", library,
            SOURCE,
        ],
        check=True,
    )  # fmt: skip
    return {"LD_LIBRARY_PATH": str(folder), "NVML_STUB": str(folder / "cards")}


def on_cards(folder, before, held, after):
    """Build it; return the environment in which programs/cards.py changes what the cards say."""
    driver = build(folder)
    Path(driver["NVML_STUB"]).write_text("".join(before))
    return driver | {"CARDS_HELD": "".join(held), "CARDS_AFTER": "".join(after)}


def card(*pids, **said):
    """Return a card's line: `card((4711, 500), busy=10)`, with PIDs and their MiB."""
    words = [f"{key}={value}" for key, value in said.items()]
    return " ".join([*words, *(f"pid={pid}:{mib}" for pid, mib in pids)]) + "\n"
