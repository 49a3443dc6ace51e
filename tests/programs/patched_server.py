"""A server in name only, whose answers depend on the model file that it imports; --port N."""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from cards import take_cards
from sglang.srt.models import deepseek_v2 as model


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if model.SILENT:
            threading.Event().wait()
        states = {"hidden_states": [[0.0] * model.WIDTH]}
        body = json.dumps({"output_ids": model.TOKENS, "meta_info": states}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if model.DIES:
    raise RuntimeError("the patch ends it")
take_cards()
server = HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
if where := os.environ.get("SERVER_ANNOUNCES"):
    Path(where).write_text(str(os.getpid()))
sys.stdout.write("[2026-11-30 04:51:46] The server is fired up and ready to roll!\n")
sys.stdout.flush()
server.serve_forever()
