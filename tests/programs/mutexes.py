"""Deadlocks over pthread mutexes: "ab-ba" of two threads, "gil" of one mutex and Python's lock."""

import ctypes
import sys
import threading

from announce import announce

libc, with_gil = ctypes.CDLL(None), ctypes.PyDLL(None)
first, second = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
both = threading.Barrier(2)


def take(one, other):
    libc.pthread_mutex_lock(one)
    both.wait()
    libc.pthread_mutex_lock(other)


def take_and_come_back(ready, go):
    libc.pthread_mutex_lock(first)
    ready.set()
    go.wait()  # wakes up without Python's lock, and never gets it


if sys.argv[2] == "ab-ba":
    threads = [
        threading.Thread(target=take, args=(first, second), name="A-then-B"),
        threading.Thread(target=take, args=(second, first), name="B-then-A"),
    ]
    for thread in threads:
        thread.start()
    announce(tids=[thread.native_id for thread in threads])
    threads[0].join()
else:
    ready, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=take_and_come_back, args=(ready, go), name="owner")
    thread.start()
    ready.wait()
    announce(tids=[thread.native_id])
    go.set()
    with_gil.pthread_mutex_lock(first)
