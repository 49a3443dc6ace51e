"""Spins in native code that holds the GIL: no other Python thread gets a turn."""

import itertools

from announce import announce

announce()
all(itertools.repeat(True))
