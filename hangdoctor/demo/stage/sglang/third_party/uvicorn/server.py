"""A real HTTP server on the loopback interface."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Answer = Callable[[str, str], Any]
    Log = Callable[[str], None]


def make(answer: Answer, log: Log) -> ThreadingHTTPServer:
    """Return a server on a free port; `answer` gets the method and the path."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.dumps(answer(self.command, self.path)).encode()
            client = f"{self.client_address[0]}:{self.client_address[1]}"
            log(f'INFO:     {client} - "{self.requestline}" 200 OK')
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = handle_any  # noqa: N815  # names of the base class

        def log_message(self, *_: object) -> None:
            """Uvicorn's own line is the one that is wanted."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def run(server: ThreadingHTTPServer) -> None:
    """Serve for ever."""
    server.serve_forever()
