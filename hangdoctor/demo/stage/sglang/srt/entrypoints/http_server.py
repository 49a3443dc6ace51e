"""The launcher's main program: the processes, the HTTP server, and its request to itself."""

from __future__ import annotations

import http.client
import os
import threading
from typing import TYPE_CHECKING, Any

from ...third_party.gloo.transport import put, take
from ...third_party.uvicorn import server as uvicorn
from ..utils.common import kill_itself_when_parent_died, log
from .engine import launch_subprocesses

if TYPE_CHECKING:
    from ..server_args import ServerArgs


def launch_server(server_args: ServerArgs) -> None:
    """Start everything, and serve for ever."""
    kill_itself_when_parent_died()
    log(f"server_args={server_args}")
    log("No chat template found, defaulting to 'string' content format")
    ports = launch_subprocesses(server_args)

    def answer(method: str, path: str) -> Any:
        if method == "GET":
            return {"model_path": server_args.model_path}
        put(ports.requests, {"path": path, "text": "The capital city of France is"})
        return take(ports.texts)

    server = uvicorn.make(answer, log)
    port = server.server_address[1]
    log(f"INFO:     Started server process [{os.getpid()}]")
    log("INFO:     Waiting for application startup.")
    log("INFO:     Application startup complete.")
    log(f"INFO:     Uvicorn running on http://127.0.0.1:{port} (Press CTRL+C to quit)")
    threading.Thread(target=_wait_and_warmup, args=(port,), daemon=True).start()
    uvicorn.run(server)


def _wait_and_warmup(port: int) -> None:
    _execute_server_warmup(port)
    log("The server is fired up and ready to roll!")


def _execute_server_warmup(port: int) -> None:
    for method, path in (("GET", "/model_info"), ("POST", "/generate")):
        connection = http.client.HTTPConnection("127.0.0.1", port)  # no proxy comes between
        connection.request(method, path)
        connection.getresponse().read()
        connection.close()
