"""Spins, or polls as healthy programs do, in the way that argv[2] names."""

import ctypes
import hashlib
import os
import select
import socket
import struct
import sys
import threading
import time

from announce import announce

ONE = struct.pack("=Q", 1)


def eventfd():
    if hasattr(os, "eventfd"):
        return os.eventfd(0)
    return ctypes.CDLL(None).eventfd(0, 0)  # Python 3.9 and older


def eventfd_own():
    fd = eventfd()
    while True:
        os.write(fd, ONE)
        os.read(fd, 8)


def pipe():
    reading, writing = os.pipe()
    while True:
        os.write(writing, b"x")
        os.read(reading, 1)


def send():
    ours, theirs = socket.socketpair()
    while True:
        ours.send(b"x")
        theirs.recv(1)


def epoll():
    """Asks an epoll set without end, as an event loop with a time-out of 0 does."""
    one = select.epoll()
    one.register(eventfd(), select.EPOLLIN)
    while True:
        one.poll(0)


def python_spin():
    while True:
        pass


def native_spin():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 50_000_000)  # gives the GIL away


def eventfd_answers():
    """Two threads wake each other, as ZMQ's do: each sleeps until the other has written."""
    there, back = eventfd(), eventfd()

    def answer():
        while True:
            os.read(there, 8)
            os.write(back, ONE)

    threading.Thread(target=answer, daemon=True).start()
    while True:
        os.write(there, ONE)
        os.read(back, 8)


def poll():
    """An event loop that has nothing to do, and asks a thousand times a second."""
    fd = eventfd()
    while True:
        select.select([fd], [], [], 0.001)
        os.write(fd, ONE)
        os.read(fd, 8)


def work():
    """A thread that works for some milliseconds and sleeps, as a server under load."""
    while True:
        until_s = time.thread_time() + 0.005
        while time.thread_time() < until_s:
            pass
        time.sleep(0.005)


announce()
globals()[sys.argv[2]]()
