"""An interrupt ends what is done in order, also where Python has swallowed its exception."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

DOES = """
import os, signal, sys
from hangdoctor.signals import ended_in_order, raise_unheard
signal.signal(signal.SIGINT, signal.default_int_handler)

class Swallows:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        sum(range(9))  # here the exception is raised, and only printed

with ended_in_order():
    try:
        Swallows()
        print("goes on")
        raise_unheard()
        print("was not heard")
    except KeyboardInterrupt:
        print("ends")
raise_unheard()
print("is over")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_that_comes_in_a_destructor_is_heard_at_the_next_look(number):
    done = subprocess.run(
        [sys.executable, "-u", "-c", DOES, str(int(number))],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.split("\n")
    assert said[:2] == ["goes on", "ends"]
    if number == signal.SIGINT:
        assert (said[2], done.returncode) == ("is over", 0)
    else:  # by which it ends
        assert done.returncode == -number
