"""The child's side of a worker: `python -m hangdoctor.collect NAME`. Not for people."""

from __future__ import annotations

import sys

from hangdoctor.collect import COLLECTORS, flight_recorder, installation, rights
from hangdoctor.collect.worker import serve

if __name__ == "__main__":
    once = {"installation": installation.JOB, "dump_files": flight_recorder.PATHS_JOB} | rights.JOBS
    serve((COLLECTORS | once)[sys.argv[1]])
