"""Two threads that take two locks in opposite order, and a main thread that waits for them."""

import threading

from announce import announce

first, second = threading.Lock(), threading.Lock()
both = threading.Barrier(3)


def take(one, other):
    with one:
        both.wait()
        with other:
            pass


threads = [
    threading.Thread(target=take, args=(first, second), name="A-then-B"),
    threading.Thread(target=take, args=(second, first), name="B-then-A"),
]
for thread in threads:
    thread.start()
both.wait()
announce()
for thread in threads:
    thread.join()
