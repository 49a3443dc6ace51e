"""The child's side of a worker: `python -m hangdoctor.collect NAME`. Not for people."""

from __future__ import annotations

import sys

from hangdoctor.collect import COLLECTORS, installation, rights
from hangdoctor.collect.worker import serve

if __name__ == "__main__":
    serve((COLLECTORS | {"installation": installation.JOB} | rights.JOBS)[sys.argv[1]])
