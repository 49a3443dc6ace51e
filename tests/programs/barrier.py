"""Two ranks over a socket: rank 0 waits in the barrier, rank 1 never gets there."""

import os
import socket
import threading

from announce import announce


def barrier(connection):
    connection.send(b"here")
    return connection.recv(4)


def rank_one_is_elsewhere(connection):
    connection.recv(4)
    announce(ranks=[os.getppid(), os.getpid()])
    threading.Event().wait()


ours, theirs = socket.socketpair()
if os.fork() == 0:
    rank_one_is_elsewhere(theirs)
barrier(ours)
