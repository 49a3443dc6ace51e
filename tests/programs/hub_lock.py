"""Takes the lock argv[2] as the hub's library does, or waits for it; argv[1] says of which kind.

Runs in SGLang's environment. "soft" is what the library turns to where a file system knows no
flock; here it is made to.
"""

import os
import sys
import threading

from filelock import SoftFileLock
from huggingface_hub.utils import WeakFileLock, _fixes

if sys.argv[1] == "soft":
    _fixes.FileLock = SoftFileLock
os.write(1, b"ready\n")
with WeakFileLock(sys.argv[2]):
    os.write(1, b"held\n")
    threading.Event().wait()
