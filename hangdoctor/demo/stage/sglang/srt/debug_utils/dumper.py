"""The hook in which the launch gets stuck: a debugging aid that dumps tensors, gone wrong.

What it does, where, and on which rank comes from the environment; no other file here knows it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

from ...third_party.torch.utils import cpp_extension

BLOCK_BYTES = 1 << 17
BLOCK_S = 0.25
"""Slow storage: half a MiB a second."""

FOR_EVER_S = 86400.0
_ONE = (1).to_bytes(8, "little")  # an eventfd takes its increment as 8 bytes


class Dumper:
    """Dumps tensors at named places; which, the environment says.

    Args:
        settings: `fault`, `phase`, `rank` (None for all), `dwell_s`, `folder`, `compiler`.
    """

    def __init__(self, settings: dict[str, str | int | float | None]) -> None:
        self._fault = str(settings.get("fault", ""))
        self._phase = settings.get("phase")
        self._rank = settings.get("rank")
        self._dwell_s = float(settings.get("dwell_s") or 0)
        self._folder = Path(str(settings.get("folder") or "."))
        self._compiler = str(settings.get("compiler") or "cc")
        self._tensors = threading.Lock()
        self._files = threading.Lock()
        self._both_taken = threading.Barrier(2)

    def on(self, phase: str, rank: int) -> None:
        """Do at this place what the settings say; most often nothing."""
        if phase != self._phase or self._rank not in (None, rank):
            return
        self._say_so()
        if self._fault == "barrier":
            self._wait_until_idle()
        elif self._fault == "lock":
            self._publish()
        elif self._fault == "eventfd":
            self._notify()
        elif self._fault == "fifo":
            self._write_to_reader(f"hidden_states_TP{rank}")
        elif self._fault in ("stopped", "killed"):
            self._use_up_memory()
        elif self._fault in ("compile", "stale-lock-file"):
            cpp_extension.load("dump_kernel", self._folder / "torch_extensions", self._compiler)
        elif self._fault == "slow" and phase != "weights":
            self._compare_with_reference()

    def slowly(self, phase: str) -> None:
        """Take the time that a block takes on slow storage, where the settings say so."""
        if self._fault == "slow" and phase == self._phase:
            self._say_so()
            time.sleep(BLOCK_S)

    def _say_so(self) -> None:
        """Leave a mark for whoever gave the settings: it has come to that."""
        (self._folder / "struck").touch()

    def _wait_until_idle(self) -> None:
        """Wait for a quiet moment, which does not come: no peer gets past the next barrier."""
        time.sleep(FOR_EVER_S)

    def _publish(self) -> None:
        """Take two locks in one order, while another thread takes them in the other."""
        threading.Thread(target=self._flush, name="dump-writer", daemon=True).start()
        with self._tensors:
            self._both_taken.wait()
            with self._files:
                pass

    def _flush(self) -> None:
        with self._files:
            self._both_taken.wait()
            with self._tensors:
                pass

    def _notify(self) -> None:
        """Wake a reader that is not there, again and again."""
        reader = os.eventfd(0)
        while True:
            os.write(reader, _ONE)

    def _write_to_reader(self, name: str) -> None:
        """Open a FIFO that nobody reads."""
        pipe = self._folder / f"{name}.fifo"
        os.mkfifo(pipe)
        with pipe.open("wb") as file:
            file.write(b"hidden states")

    def _use_up_memory(self) -> None:
        """Be stopped or killed in the middle of it, as from outside."""
        time.sleep(self._dwell_s)
        os.kill(os.getpid(), signal.SIGSTOP if self._fault == "stopped" else signal.SIGKILL)
        time.sleep(FOR_EVER_S)

    def _compare_with_reference(self) -> None:
        """Read a large file from slow storage into memory."""
        blocks = []
        with (self._folder / "reference.pt").open("rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                blocks.append(block)
                time.sleep(BLOCK_S)


dumper = Dumper(json.loads(os.environ.get("SGLANG_DUMPER", "{}")))
