"""Real SGLang 0.5.9 on the CPU: an environment made once, and launches that end for certain.

By hand, until Ctrl-C:

    python tests/sglang/sglang_lab.py hang-io [further arguments of the server]
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from sglang_patches import PATCHES, RELATIVE_PATH

from hangdoctor.check import stage
from hangdoctor.endpoint import free_port
from hangdoctor.patches import COMPANION, companion_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).parent
STAGE = Path(stage.__file__).parent
STUBS = STAGE / "stand_ins"
SLOW_FILES = HERE.parent / "programs" / "slow_files.py"
ENVIRONMENT_VARIABLE = "HANGDOCTOR_SGLANG_ENV"
READY = r"The server is fired up and ready to roll!"

_INSTALL_LIMIT_S = 1800
_END_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: survives the exec
os.execv(sys.argv[1], sys.argv[1:])
"""
_RECIPE = ("requirements.txt", "requirements-without-dependencies.txt")


@dataclass(frozen=True)
class Variant:
    """How a launch differs from a good one.

    Attributes:
        patch: name in sglang_patches.PATCHES.
        arguments: further arguments of the server; "{free_port}" is filled in.
        environment: further environment variables; None takes one away.
        weights: read the three shards instead of making weights up.
        stalled_shard: "open" replaces the second shard by a FIFO without a writer, "read" by one
            with a writer that never writes.
        slow_storage: the model is a large one, and lies on a FUSE file system that delivers at the
            rate which `Launched.rate_path` holds; needs root and /dev/fuse.
    """

    patch: str | None = None
    arguments: tuple[str, ...] = ()
    environment: dict[str, str | None] = field(default_factory=dict)
    weights: bool = False
    stalled_shard: str | None = None
    slow_storage: bool = False


VARIANTS = {
    # Ready after 10 to 20 s.
    "good": Variant(),
    # The same with the progress bar of three real shards.
    "good-weights": Variant(weights=True),
    # What the tool ships, at three of the five layers.
    "hs-dump-v1": Variant(patch="hs-dump-v1", environment={"SGLANG_HS_DUMP_LAYERS": "1,2,4"}),
    "hs-dump-v2": Variant(patch="hs-dump-v2", environment={"SGLANG_HS_DUMP_LAYERS": "1,2,4"}),
    # Complete invasive patch: ready, but `return_hidden_states` is not what it was.
    "v1": Variant(patch="v1"),
    # Half of it: an exception in the first forward ends the launch.
    "v1-flag": Variant(patch="v1-flag"),
    # Warm-up: TP0 in an all_gather, TP1 in an all_reduce.
    "hang-collective": Variant(patch="hang-collective"),
    # Warm-up: TP0 in open(), TP1 in an all_reduce.
    "hang-io": Variant(patch="hang-io"),
    # Weights: all ranks in open() of a shard, as on a file system that is gone.
    "weights-stalled": Variant(weights=True, stalled_shard="open"),
    # Weights: all ranks in read() of a shard.
    "weights-stalled-read": Variant(
        weights=True, stalled_shard="read", arguments=("--weight-loader-disable-mmap",)
    ),
    # Distributed init: TP0 of the first of two nodes waits for the second.
    "missing-node": Variant(
        arguments=("--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "127.0.0.1:{free_port}")
    ),
    # After the memory pool: SGLang's own test hook sleeps.
    "scheduler-init-stuck": Variant(environment={"SGLANG_TEST_STUCK_SCHEDULER_INIT": "100000"}),
    # Weights from slow storage: mapped, and read.
    "slow-storage": Variant(weights=True, slow_storage=True),
    "slow-storage-read": Variant(
        weights=True, slow_storage=True, arguments=("--weight-loader-disable-mmap",)
    ),
    # TP1 sleeps, and goes on: before its load, before the rendezvous, before its imports.
    "late-load": Variant(environment={"SGLANG_LAB_PAUSE": "load:1:120"}),
    "late-rendezvous": Variant(environment={"SGLANG_LAB_PAUSE": "rendezvous:1:120"}),
    "late-start": Variant(environment={"SGLANG_LAB_PAUSE": "start:1:40"}),
    # A graph phase with a real compiler: slow and silent, then ready.
    "compile": Variant(
        arguments=("--enable-torch-compile", "--torch-compile-max-bs", "1"),
        environment={"TORCHDYNAMO_DISABLE": None},
    ),
}


@dataclass(frozen=True)
class Environment:
    """An installed SGLang.

    Attributes:
        root: of the virtual environment; read-only for tests.
        model: directory of the tiny model, three shards; read-only too.
        large_model: the same of 300 MB, made when it is first asked for.
    """

    root: Path
    model: Path

    @property
    def large_model(self) -> Path:
        with _locked_cache() as cache:
            return _made_model(cache, self.root, "large")

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Return its site-packages."""
        return next(self.root.glob("lib/python3*/site-packages"))


@dataclass(frozen=True)
class Launched:
    """A launch that runs, or ran.

    Attributes:
        process: the launcher, root of the launch and leader of its own session.
        log_path: its stdout and stderr, a regular file.
        port: of its HTTP server.
        dump_dir: what SGLANG_HS_DUMP_DIR names.
        package_dir: the directory that its `sglang` package is imported from.
        command: as it was started.
        environment: of the launcher, whole.
        rate_path: see tests/programs/slow_files.py; of a launch from slow storage.
    """

    process: subprocess.Popen[bytes]
    log_path: Path
    port: int
    dump_dir: Path
    package_dir: Path
    command: tuple[str, ...]
    environment: dict[str, str]
    rate_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, pattern: str, *, count: int = 1, limit_s: float = 240) -> str:
        """Return the log once a regular expression is found in it `count` times.

        Raises:
            AssertionError: the launch ended, or the limit passed; with the end of the log.
        """
        end_s = time.monotonic() + limit_s
        while True:
            ended = self.process.poll() is not None
            log = self.log()
            if len(re.findall(pattern, log)) >= count:
                return log
            if ended or time.monotonic() > end_s:
                how = f"ended with {self.process.returncode}" if ended else f"{limit_s} s passed"
                raise AssertionError(f"{how} before {pattern!r}; its log ends:\n{log[-3000:]}")
            time.sleep(0.2)  # between two looks at a file; nothing rests on its length

    def wait_for_end(self, limit_s: float = 240) -> int:
        """Return the exit status of a launch that ends by itself."""
        return self.process.wait(limit_s)


class Lab:
    """Launches servers, and ends them all."""

    def __init__(self, environment: Environment, directory: Path) -> None:
        self.environment = environment
        self._directory = directory
        self._launches: list[Launched] = []
        self._scratch: list[Path] = []
        self._open_descriptors: list[int] = []

    def prepare(
        self, variant: str = "good", *, extra_args: Sequence[str] = (), tp: int = 2
    ) -> tuple[tuple[str, ...], dict[str, str], int]:
        """Return command, environment and port of a launch that the test starts by itself.

        What it starts must run in a session of its own; see `end_session`.
        """
        recipe = VARIANTS[variant]
        # A short path of its own: the sockets of ZMQ live in it and are limited to 107 bytes.
        scratch = Path(tempfile.mkdtemp(prefix="hd-"))
        self._scratch.append(scratch)
        (scratch / "dumps").mkdir()
        packages = overlay(self.environment, scratch / "packages", recipe.patch)
        model = self._model(scratch, recipe)
        port = free_port()
        command = (
            str(self.environment.python), "-m", "sglang.launch_server",
            "--model-path", str(model),
            "--load-format", "auto" if recipe.weights else "dummy",
            "--tp", str(tp),
            "--host", "127.0.0.1",
            "--port", str(port),
            "--device", "cpu",
            "--dtype", "float32",
            "--attention-backend", "torch_native",
            "--sampling-backend", "pytorch",
            "--grammar-backend", "none",
            "--disable-overlap-schedule",
            "--context-length", "1024",
            "--max-total-tokens", "2048",
            "--max-running-requests", "4",
            "--mem-fraction-static", "0.5",
            *(text.format(free_port=free_port()) for text in recipe.arguments),
            *extra_args,
        )  # fmt: skip
        environment = os.environ | {
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "PYTHONPATH": f"{packages}:{STUBS}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            # PyTorch may come with NCCL, which SGLang would then use on the CPU too, and fail.
            "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_HS_DUMP_DIR": str(scratch / "dumps"),
            # The first prefill compiles for 20 s otherwise.
            "TORCHDYNAMO_DISABLE": "1",
        }
        if tp > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = _one_cpu_a_rank(tp)
        for name, value in recipe.environment.items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        return command, environment, port

    def launch(
        self,
        variant: str = "good",
        *,
        extra_args: Sequence[str] = (),
        tp: int = 2,
        before: Sequence[str] = (),
    ) -> Launched:
        """Start a server, see VARIANTS, and return at once.

        `before` comes in front of its command, such as what puts it into namespaces of its own; it
        must end the server when it is killed.
        """
        command, environment, port = self.prepare(variant, extra_args=extra_args, tp=tp)
        scratch = self._scratch[-1]
        rate_path = scratch / "rate"
        if VARIANTS[variant].slow_storage:
            rate_path.touch()
            source = self.environment.large_model
            mounted = (sys.executable, SLOW_FILES, source, scratch / "model", rate_path)
            before = (*before, *map(str, mounted))
        log_path = self._directory / f"{variant}-{port}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                # Should the test run be killed, the launcher ends too, and SGLang's children with
                # it. Not preexec_fn: unsafe with threads, which xdist has.
                [sys.executable, "-c", _END_WITH_PARENT, *before, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=scratch,
                env=environment,
                start_new_session=True,
            )
        launched = Launched(
            process=process,
            log_path=log_path,
            port=port,
            dump_dir=scratch / "dumps",
            package_dir=scratch / "packages" / "sglang",
            command=command,
            environment=environment,
            rate_path=rate_path,
        )
        self._launches.append(launched)
        return launched

    def close(self) -> None:
        """End every launch with SIGKILL, and remove what it left."""
        for launched in self._launches:
            end_session(launched.pid)
            launched.process.wait(30)
        for descriptor in self._open_descriptors:
            os.close(descriptor)
        for scratch in self._scratch:
            shutil.rmtree(scratch, ignore_errors=True)

    def _model(self, scratch: Path, recipe: Variant) -> Path:
        if recipe.slow_storage:
            (scratch / "model").mkdir()
            return scratch / "model"
        if recipe.stalled_shard is None:
            return self.environment.model
        model = scratch / "model"
        model.mkdir()
        for file in self.environment.model.iterdir():
            (model / file.name).symlink_to(file)
        shard = sorted(model.glob("*.safetensors"))[1]
        shard.unlink()
        os.mkfifo(shard)
        if recipe.stalled_shard == "read":
            # A writer that never writes: open() returns, read() does not.
            self._open_descriptors.append(os.open(shard, os.O_RDWR))
        return model


def end_session(leader_pid: int) -> None:
    """Kill a session and the descendants of its leader until none is left.

    Only SIGKILL ends a server that hangs in its warm-up.
    """
    while True:
        victims = [*_session(leader_pid)]
        with contextlib.suppress(psutil.NoSuchProcess):
            victims += psutil.Process(leader_pid).children(recursive=True)
        alive = {victim.pid: victim for victim in victims if _is_alive(victim)}
        if not alive:
            return
        for victim in alive.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
        psutil.wait_procs(alive.values(), timeout=5)


def overlay(environment: Environment, into: Path, patch: str | None) -> Path:
    """Make a package directory that is SGLang's, with a patched model file of its own.

    Only the directories on the way to that file are real, all else is a link, byte code too. So
    launches of different variants run side by side, and the environment stays as it is.
    """
    into.mkdir()
    for info in environment.packages.glob("sglang-*.dist-info"):
        (into / info.name).symlink_to(info)
    *parents, name = Path(RELATIVE_PATH).parts
    source, target = environment.packages, into
    for parent in parents:
        source, target = source / parent, target / parent
        target.mkdir()
        for entry in source.iterdir():
            if entry.name == "__pycache__":
                (target / entry.name).mkdir()
                for compiled in entry.iterdir():
                    (target / entry.name / compiled.name).symlink_to(compiled)
            elif entry.name not in parents:
                (target / entry.name).symlink_to(entry)
    if patch:
        stock = (source / name).read_text(encoding="utf-8")
        (target / name).unlink()
        (target / name).write_text(PATCHES[patch](stock), encoding="utf-8")
        (target / COMPANION).write_text(companion_text(), encoding="utf-8")
    return into


def environment() -> Environment:
    """Return SGLang's environment, which is made first where it is not there yet.

    Takes a minute or two and 1.3 GB, once a user: it is kept in ~/.cache/hangdoctor. The variable
    HANGDOCTOR_SGLANG_ENV names an existing virtual environment instead. Processes that need it at
    once wait for the first.

    Raises:
        RuntimeError: it cannot be installed; with the output of pip.
    """
    with _locked_cache() as cache:
        root = _existing() or _installed(cache)
        return Environment(root=root, model=_made_model(cache, root))


@contextlib.contextmanager
def _locked_cache() -> Iterator[Path]:
    """Give the directory of what is made once, while nobody else makes it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hangdoctor"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache


def _existing() -> Path | None:
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if not named:
        return None
    root = Path(named)
    if not (root / "bin" / "python").exists():
        raise RuntimeError(f"{ENVIRONMENT_VARIABLE} names {root}, which has no bin/python")
    return root


def _installed(cache: Path) -> Path:
    recipe = [sys.version.encode(), *((HERE / name).read_bytes() for name in _RECIPE)]
    root = cache / f"sglang-0.5.9-{_hash(recipe)}"
    done = root / "installed"
    if done.exists():
        return root
    shutil.rmtree(root, ignore_errors=True)  # what an interrupted install left
    pip = [str(root / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off"]
    _run([sys.executable, "-m", "venv", str(root)])
    _run([*pip, "-r", str(HERE / _RECIPE[0])])
    _run([*pip, "--no-deps", "-r", str(HERE / _RECIPE[1])])
    done.touch()
    return root


def _made_model(cache: Path, root: Path, size: str = "tiny") -> Path:
    model = cache / f"{size}-deepseek-v2-{_hash([(STAGE / 'make_model.py').read_bytes()])}"
    if not model.exists():
        unfinished = model.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        _run([str(root / "bin" / "python"), str(STAGE / "make_model.py"), str(unfinished), size])
        unfinished.rename(model)
    return model


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"SGLang's environment cannot be made: {' '.join(command)} ended with "
            f"{done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )


def _hash(parts: list[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:10]


def _one_cpu_a_rank(tp: int) -> str:
    """Return SGLang's binding of ranks to CPUs, which it demands for more than one rank."""
    cpus = sorted(os.sched_getaffinity(0))
    return "|".join(str(cpus[rank % len(cpus)]) for rank in range(tp))


def _session(leader_pid: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == leader_pid:
                yield process


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _main() -> None:
    variant, *extra_args = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the servers end with us then too
    lab = Lab(environment(), Path.cwd())
    try:
        launched = lab.launch(variant, extra_args=extra_args)
        print(f"pid {launched.pid}, log {launched.log_path}, port {launched.port}", flush=True)  # noqa: T201
        launched.process.wait()
    except KeyboardInterrupt:
        pass
    finally:
        lab.close()


if __name__ == "__main__":
    _main()
