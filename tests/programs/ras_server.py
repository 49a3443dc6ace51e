"""Answers as NCCL's RAS does, well or ill, on a socket that it inherits.

Arguments: the FIFO to announce on, the socket's descriptor, and a JSON file: `behaviour`, `json`
and `text`, in which PID stands for our own. What clients say goes into the file's name + .said.
"""

import json
import os
import socket
import sys
import threading
from pathlib import Path

from announce import announce

listener = socket.socket(fileno=int(sys.argv[2]))
told = json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))
behaviour = told.get("behaviour", "")


def own(text):
    return text.replace("PID", str(os.getpid())).encode()


def serve(connection):
    form = "text"
    with connection, connection.makefile("rb") as lines:
        if behaviour == "silent":
            threading.Event().wait()
        if behaviour == "flood":
            while True:
                connection.sendall(b"x" * 65536)
        for line in lines:
            with Path(sys.argv[3] + ".said").open("ab") as said:
                said.write(line)
            command = line.decode().strip().lower()
            if behaviour == "stranger":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
            if command.startswith("client protocol"):
                connection.sendall(b"SERVER PROTOCOL 2\n")
                if behaviour == "leaves":
                    return
            elif command.startswith("timeout"):
                connection.sendall(b"OK\n")
            elif command == "set format json" and "json" in told:
                form = "json"
                connection.sendall(b"OK\n")
            elif command == "verbose status":
                if behaviour == "endless":
                    while True:
                        connection.sendall(own(told["text"]) * 100)
                connection.sendall(own(told[form]))
                if behaviour == "never ends":
                    threading.Event().wait()
                return
            else:
                connection.sendall(f"ERROR: Unknown command {command}\n".encode())


def accept():
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


listener.listen(16)
threading.Thread(target=accept, daemon=True).start()
announce()
sys.stdin.read()
