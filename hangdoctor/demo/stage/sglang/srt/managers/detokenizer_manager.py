"""The detokenizer: makes text of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...third_party.gloo.transport import put, take
from ..utils.common import kill_itself_when_parent_died, setproctitle

if TYPE_CHECKING:
    import socket


def run_detokenizer_process(tokens: socket.socket, texts: socket.socket) -> None:
    """Be the detokenizer."""
    kill_itself_when_parent_died()
    setproctitle("sglang::detokenizer")
    DetokenizerManager(tokens, texts).event_loop()


class DetokenizerManager:
    """Between the first rank and the launcher."""

    def __init__(self, tokens: socket.socket, texts: socket.socket) -> None:
        self._tokens = tokens
        self._texts = texts

    def event_loop(self) -> None:
        """Pass on for ever."""
        while True:
            take(self._tokens)
            put(self._texts, {"text": " Paris."})
