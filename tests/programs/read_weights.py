"""Holds a file of weights (argv[2]), mapped or read in part, in the words of argv[3:].

"map N" touches its first N bytes, "read N" reads them; then it waits for lines of the same kind.
"""

import mmap
import sys
from pathlib import Path

from announce import announce

file = Path(sys.argv[2]).open("rb")  # noqa: SIM115  # held on purpose
if sys.argv[3] == "map":
    whole = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    file.close()


def take(count):
    if sys.argv[3] == "map":
        sum(whole[at] for at in range(0, count, mmap.PAGESIZE))
    else:
        file.read(count)


take(int(sys.argv[4]))
announce()
for line in sys.stdin:
    take(int(line))
    announce()
