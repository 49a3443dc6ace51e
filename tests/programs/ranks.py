"""A launch in name only, of two ranks with a connection between them: argv[2] says of which kind.

argv[3] and argv[4] are what TP0 and TP1 do; argv[5] is a path for those that need one. Each rank
is this file again, under a title like SGLang's, and says its word when it is about to block.
"""

import ctypes
import fcntl
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from announce import announce
from torch.utils.file_baton import FileBaton


def connection(kind):
    if kind == "unix":
        return socket.socketpair()
    if kind == "pipe":
        reading, writing = os.pipe()
        return reading, writing
    if kind == "eventfd":
        fd = os.eventfd(0) if hasattr(os, "eventfd") else ctypes.CDLL(None).eventfd(0, 0)
        return fd, os.dup(fd)
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    return (ours, listener) if kind == "backlog" else (ours, listener.accept()[0])


_kept = []


def recv(end, _):
    os.read(end, 8)


def notify(end, _):
    while True:
        os.write(end, b"\1" + bytes(7))


def poll(end, _):
    poller = select.poll()
    poller.register(end, select.POLLIN)
    while not poller.poll(60000):
        pass


def send(end, _):
    while True:
        os.write(end, bytes(1 << 16))


def serve(end, _):
    """Has a server thread for its end, as a TCPStore has, and waits for something else."""
    epoll = select.epoll()
    epoll.register(end, select.EPOLLIN)
    threading.Thread(target=epoll.poll, daemon=True).start()
    threading.Event().wait()


def sleep(_, __):
    threading.Event().wait()


def doze(_, __):
    """Sleeps, and for nothing else."""
    time.sleep(600)


def crowd(_, __):
    """Has many descriptors and threads, and waits for none of them."""
    _kept.extend(os.dup(0) for _ in range(60))
    for _ in range(5):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    threading.Event().wait()


def fifo(_, path):
    with Path(path).open("rb") as shard:
        shard.read()


def connect(_, __):
    """Connects to a listener whose queue is full: the kernel lets such a call go unanswered."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = listener.getsockname()
    _kept.extend((listener, socket.create_connection(address)))
    socket.create_connection(address)


def flock(_, path):
    with Path(path).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        threading.Event().wait()


def baton(_, path):
    """Takes the baton if it can, as the first rank to build an extension does; else waits."""
    one = FileBaton(path)
    if one.try_acquire():
        threading.Event().wait()
    one.wait()


def soft_lock(_, path):
    """Takes a lock as filelock's SoftFileLock does, or polls for it as that does."""
    while True:
        try:
            taken = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            time.sleep(0.05)
            continue
        os.write(taken, f"{os.getpid()}\n{socket.gethostname()}\n".encode())
        threading.Event().wait()


def deadlock(_, __):
    """Holds Python's lock and waits for a mutex, whose owner waits for Python's lock."""
    mutex, ready, go = ctypes.create_string_buffer(64), threading.Event(), threading.Event()

    def own():
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
        ready.set()
        go.wait()

    threading.Thread(target=own, name="owner").start()
    ready.wait()
    go.set()
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def turns(_, __):
    """Threads that take a mutex in turn, and each for a moment."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)

    def take():
        while True:
            libc.pthread_mutex_lock(mutex)
            time.sleep(0.02)
            libc.pthread_mutex_unlock(mutex)

    for _ in range(3):
        threading.Thread(target=take, daemon=True).start()
    take()


def abba(_, __):
    """Takes two locks of Python's in one order, and a thread of its in the other."""
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other_order():
        with second:
            both.wait()
            with first:
                pass

    threading.Thread(target=other_order, name="other-order", daemon=True).start()
    with first:
        both.wait()
        with second:
            pass


def lock_beside_pool(_, __):
    """Waits for a lock, beside a pool and a queue whose threads have nothing to do."""
    pool, jobs, lock = ThreadPoolExecutor(1), queue.Queue(), threading.Lock()
    pool.submit(int).result()
    threading.Thread(target=jobs.get, daemon=True).start()
    with lock:
        lock.acquire()


def child(_, __):
    os.waitpid(subprocess.Popen(["sleep", "600"]).pid, 0)


def native(end, _):
    """Has a thread that Python does not know, which reads its end; the main thread sleeps."""
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fdopen(end, b"r"))
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.fgetc, stream)
    threading.Event().wait()


def library(end, path):
    """Has a thread that a library (argv[5]) has started, as gloo and NCCL do; it reads its end."""
    ctypes.CDLL(path).watch(end)
    threading.Event().wait()


def main():
    if sys.argv[1] == "rank":
        end, does, path, says = int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
        os.write(says, b"x")
        globals()[does](end, path)
        return
    first, second = connection(sys.argv[2])
    path = sys.argv[5] if len(sys.argv) > 5 else ""
    heard, says = os.pipe()
    children = []
    for number, end in enumerate((first, second)):
        fd = end if isinstance(end, int) else end.fileno()
        command = [f"sglang::scheduler_TP{number}", "-S", __file__, "rank", str(fd)]
        command += [sys.argv[3 + number], path, str(says)]
        children.append(subprocess.Popen(command, executable=sys.executable, pass_fds=(fd, says)))
        os.read(heard, 1)
    for end in (first, second):
        os.close(end) if isinstance(end, int) else end.close()
    announce(ranks=[child.pid for child in children])
    children[0].wait()
    time.sleep(600)


main()
