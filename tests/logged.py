"""Dumps of py-spy's as a watchdog prints them into a log, and what it says after them."""

from __future__ import annotations

ARGS = "[2026-11-29 21:00:00] server_args=ServerArgs(model_path='/models/x', tp_size={tp})\n"
HEAD = "[2026-11-29 21:{minute:02}:00{rank}] Pyspy dump for PID {pid}:\n"
TITLE = "Process {pid}: {title}\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
OUTER = """\
    run_scheduler_process (scheduler.py:3171)
    run (multiprocessing/process.py:108)
    spawn_main (multiprocessing/spawn.py:122)
    <module> (<string>:1)
    0x7fd74c04524a (libc.so.6)
"""
IDLE = """\
Thread 7065 (idle): "Thread-1 (_watchdog_thread)"
    poll (libc.so.6)
    _communicate (subprocess.py:2108)
    _watchdog_once (utils/watchdog.py:150)

"""
REDUCES = "    all_reduce (torch/distributed/distributed_c10d.py:3252)\n"
OPENS = "    open64 (libc.so.6)\n    forward (deepseek_v2.py:2744)\n"
SAYS = (
    "[2026-11-29 21:{minute:02}:00{rank}] Scheduler watchdog timeout "
    "(self.watchdog_timeout=200, self.soft={soft})\n"
)

FAULT = """\
Fatal Python error: Segmentation fault

Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/sglang/srt/model_executor/model_runner.py", line 10 in load_model
  File "/usr/lib/sglang/srt/managers/scheduler.py", line 3171 in run_scheduler_process
  File "<string>", line 1 in <module>

Extension modules: numpy (total: 1)
"""


def main_thread(pid, inner):
    return f'Thread {pid} (idle): "MainThread"\n{inner}{OUTER}'


def dump(rank, pid, inner, *, minute=1, title=None, soft=True):
    title = f"sglang::scheduler{rank.replace(' ', '_')}" if title is None else title
    words = {"rank": rank, "pid": pid, "minute": minute, "title": title, "soft": soft}
    text = HEAD + TITLE + "{main}" + IDLE + SAYS
    return text.format(main=main_thread(pid, inner), **words)
