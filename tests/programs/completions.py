"""A server in name only: says it is ready, and answers as argv[1] tells; argv[2:] as a server's."""

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from cards import take_cards

BODIES = {
    "good": b'{"choices": [{"text": " Paris"}]}',
    "empty": b'{"choices": [{"text": ""}]}',
    "html": b"<html>\x1b[31m",
    "error": b"broken",
}


def option(name, default):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self):
        if sys.argv[1] == "silent":
            if announces := os.environ.get("SERVER_ANNOUNCES"):
                Path(announces).write_text(str(os.getpid()))
            threading.Event().wait()
        key = option("--api-key", None)
        if key and self.headers["Authorization"] != f"Bearer {key}":
            self.reply(401, b"no key")
            return
        self.reply(500 if sys.argv[1] == "error" else 200, BODIES[sys.argv[1]])

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(HTTPServer):
    address_family = socket.AF_INET6 if ":" in option("--host", "") else socket.AF_INET


take_cards()
server = Server((option("--host", "127.0.0.1"), int(option("--port", "0"))), Handler)
subprocess.Popen(["setsid", "sleep", "600"])
sys.stdout.write("[2026-11-30 04:51:46] The server is fired up and ready to roll!\n")
sys.stdout.flush()
server.serve_forever()
