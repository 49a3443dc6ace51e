"""Synthetic recordings: what hangdoctor would have seen of launches that were told about in public.

`launch` builds a recording from what each rank does over time, a snapshot a second and a dump of
the stacks every five. The frames below each leaf are those of real launches of SGLang 0.5.15.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from hangdoctor.model import (
    Checkpoint,
    FileLock,
    Frame,
    Gpu,
    GpuProcess,
    Gpus,
    Header,
    HeldFile,
    Holder,
    Host,
    HotThread,
    Io,
    LogPosition,
    LogSource,
    Missing,
    Mount,
    Process,
    Processes,
    ProcessStacks,
    ProcessWaits,
    ShardFile,
    Snapshot,
    Stacks,
    Thread,
    ThreadStack,
    ThreadWait,
    WaitObject,
    Waits,
    Weights,
)
from hangdoctor.recording import Recording

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

WALL_S = 1795990000
"""2026-11-29 in the log's stamps; any other day would do."""
GIB = 1 << 30
IDLE_W = 118.0
SHARDS, SHARD_BYTES = 10, 1_000_000_000
LAUNCHER, DETOKENIZER, FIRST_RANK = 700, 799, 710


class Does(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank does for a while.

    Attributes:
        stack: its main thread's frames, innermost first, as "function path:line".
        stacks: several of them, of which each dump shows the next; instead of `stack`.
        cpu_pct, state, kernel: of its main thread.
        loads_per_s: bytes of the checkpoint, mapped.
        reads_per_s: bytes from disk; maps_per_s, grows_per_s: file-backed and other memory.
        writes: calls of write() a second, of bytes_per_write each; own_reads: and of read().
        sleeps: voluntary context switches a second.
        gpu: utilisation, memory utilisation and Watts above idle.
        gpu_grows_per_s: memory of its GPU.
        children: commands of the processes that it has started, with their CPU in percent.
        reads_from: the rank at the other end of the connection that its main thread reads.
        served: a thread of that rank has the other end in its epoll set.
        wakes: the read comes back now and then.
        until_s: the second of the launch, watched from its start, to which its main thread sleeps;
            for_s: or so long from the second from which this holds, and only its length is told;
            naps_s: or again and again for so long.
        unseen: why its stack cannot be seen.
        gone: its process has ended, with this status; zombie: and nobody has waited for it.
    """

    stack: tuple[str, ...] = ()
    stacks: tuple[tuple[str, ...], ...] = ()
    cpu_pct: float = 1.0
    state: str = "S"
    kernel: str = "futex_wait_queue"
    reads_per_s: float = 0
    loads_per_s: float = 0
    maps_per_s: float = 0
    grows_per_s: float = 0
    writes: float = 0
    bytes_per_write: int = 8
    own_reads: bool = True
    sleeps: float = 0
    gpu: tuple[int, int, float] = (0, 0, 0)
    gpu_grows_per_s: float = 0
    children: tuple[tuple[str, float], ...] = ()
    reads_from: str = ""
    served: bool = False
    wakes: bool = False
    until_s: float = 0
    for_s: float = 0
    naps_s: float = 0
    unseen: Missing | None = None
    gone: int | None = None
    zombie: bool = False
    threads: tuple[tuple[str, ...], ...] = ()


Doing = Does | tuple[tuple[float, Does], ...]
"""One activity, or several with the second from which each holds."""


def launch(
    into: Path,
    ranks: Mapping[str, Doing],
    *,
    log: Sequence[tuple[float, str]] | None,
    seconds: float,
    command: str = "python3 -m sglang.launch_server --model-path /models/m",
    launcher: tuple[str, ...] | None = None,
    launcher_threads: Sequence[tuple[str, ...]] = (),
    without: Iterable[str] = (),
    began_s: float = 0.0,
    dump_every_s: float = 5.0,
    gpus: bool = True,
    locks: tuple[FileLock, ...] = (),
    storage: str = "",
) -> Recording:
    """Return the recording of a launch.

    Args:
        into: directory for the log.
        ranks: what each rank does, by its name in the log.
        log: lines with their second; "TP0| text" gets a stamp and a rank, "| text" a stamp only.
        seconds: how long the launch is old at the end.
        began_s: when the watching began; the log before that was there already.
        without: sections that could not be looked at.
        locks: on files, as every look at the waits finds them.
        storage: type of the file system that the checkpoint lies on, SHARDS files of SHARD_BYTES;
            "" where nobody looked at it.
    """
    tp = f" --tp {_tp(ranks)}" if "--tp" not in command and _tp(ranks) > 1 else ""
    command += tp
    ends, data = _log_bytes(log or ())
    log_path = None
    if log is not None:
        into.mkdir(parents=True, exist_ok=True)
        log_path = into / "server.log"
        log_path.write_bytes(data)
    denied = Missing(reason="permission", detail="Operation not permitted")
    world = _World(ranks, command, launcher or WAITS_FOR_RANKS, tuple(launcher_threads))
    snapshots = []
    for second in range(int(seconds) + 1):
        at_s = float(second)
        world.pass_second(at_s)
        if at_s < began_s:
            continue
        read = max((end for when, end in ends if when <= at_s), default=0)
        written_s = max((when for when, _ in ends if when <= at_s), default=0.0)
        dump = (at_s - began_s) % dump_every_s == 0
        snapshot = Snapshot(
            at_s=at_s - began_s,
            wall_s=WALL_S + at_s,
            processes=world.processes(at_s),
            stacks=world.stacks(at_s) if dump else None,
            waits=world.waits(at_s, locks) if dump else None,
            weights=world.weights(storage, first=not snapshots)
            if storage and second % 2 == 0
            else None,
            gpus=world.gpus(at_s) if gpus else Missing(reason="not-installed"),
            host=Host(cpu_count=64, load_1m=4.0),
            log=LogPosition(read_bytes=read, silent_s=at_s - written_s)
            if log is not None
            else None,
        )
        for section in without:
            if getattr(snapshot, section) is not None:
                snapshot = msgspec.structs.replace(snapshot, **{section: denied})
        snapshots.append(snapshot)
    header = Header(
        source="launch",
        engine="sglang",
        command=tuple(command.split()),
        log=LogSource(origin="server.log") if log is not None else None,
    )
    return Recording(header=header, snapshots=tuple(snapshots), log_path=log_path)


def good_log(names: Sequence[str], upto: str, *, start_s: float = 0.0) -> list[tuple[float, str]]:
    """Return a good start's lines of all ranks up to a milestone, in the words of 0.5.15.

    `upto` is the first word of STEPS that is left out; "" for none.
    """
    lines: list[tuple[float, str]] = []
    at_s = start_s
    sizes = f"tp_size={_tp(names)}"
    for step, texts in STEPS:
        if step == upto:
            break
        for scope, after_s, text in texts:
            at_s += after_s
            who = {"each": names, "first": names[:1], "launch": ("",)}[scope]
            lines += [(at_s, f"{name}| {text.replace('SIZES', sizes)}") for name in who]
    return lines


# fmt: off
STEPS = (
    ("args", (("launch", 0, "server_args=ServerArgs(model_path='/m', SIZES, device='cuda')"),)),
    ("dist", (("each", 18, "Init torch distributed begin."),)),
    ("nccl", (("first", 1, "sglang is using nccl==2.28.9"),)),
    ("dist-end", (("each", 6, "Init torch distributed ends. elapsed=7.00 s, mem usage=1.01 GB"),)),
    ("load", (("each", 1, "Load weight begin. avail mem=138.28 GB"),)),
    ("load-end", (("each", 4, "Load weight end. elapsed=4.00 s, type=M, avail mem=9.1 GB."),)),
    ("kv", (("each", 1, "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1071"),)),
    ("pool-end", (("each", 0, "Memory pool end. avail mem=69.03 GB"),)),
    ("capture", (("each", 1, "Capture target decode CUDA graph begin. backend=full"),)),
    ("capture-end", (("each", 9, "Capture target decode CUDA graph end. elapsed=9.0 s"),)),
    ("built", (
        ("first", 0, "max_total_num_tokens=1071, chunked_prefill_size=8192"),
        ("each", 0, "Tree cache initialized: source=default impl=RadixCache"),
    )),
    ("http", (
        ("launch", 1, "INFO:     Started server process [700]"),
        ("launch", 0, "INFO:     Uvicorn running on http://127.0.0.1:30000"),
    )),
    ("info", (("launch", 1, 'INFO:     127.0.0.1:46472 - "GET /model_info HTTP/1.1" 200 OK'),)),
    ("prefill", (("first", 1, "Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0"),)),
    ("ready", (("launch", 1, "The server is fired up and ready to roll!"),)),
)
# fmt: on

# --- Frames ---------------------------------------------------------------------------------------

PROCESS = (
    "BaseProcess.run multiprocessing/process.py:108",
    "BaseProcess._bootstrap multiprocessing/process.py:314",
    "_main multiprocessing/spawn.py:135",
    "spawn_main multiprocessing/spawn.py:122",
    "<module> <string>:1",
)
SCHEDULER = (
    "Scheduler.init_model_worker scheduler.py:866",
    "Scheduler.__init__ scheduler.py:423",
    "run_scheduler_process scheduler.py:4313",
    *PROCESS,
)
WORKER = (
    "ModelRunner.__init__ model_runner.py:581",
    "TpModelWorker._init_model_runner tp_worker.py:385",
    "TpModelWorker.__init__ tp_worker.py:273",
    "Scheduler.init_tp_model_worker scheduler.py:787",
    *SCHEDULER,
)
IMPORTS = (
    "Loader.get_data <frozen importlib._bootstrap_external>:1187",
    "_find_and_load <frozen importlib._bootstrap>:1360",
    "<module> transformers/modeling_utils.py:60",
    "_run_module_code <frozen runpy>:98",
    "_fixup_main_from_name multiprocessing/spawn.py:228",
    "prepare multiprocessing/spawn.py:164",
    "_main multiprocessing/spawn.py:132",
    "spawn_main multiprocessing/spawn.py:122",
    "<module> <string>:1",
)
DIST = ("ModelRunner.init_torch_distributed model_runner.py:1302", *WORKER)
DIST_GROUP = (
    "init_distributed_environment distributed/parallel_state.py:1948",
    *DIST,
)
TCP_STORE = (
    "_create_c10d_store torch/distributed/rendezvous.py:199",
    "_tcp_rendezvous_handler torch/distributed/rendezvous.py:232",
    "init_process_group torch/distributed/distributed_c10d.py:1831",
    *DIST_GROUP,
)
NEW_GROUP = (
    "_new_process_group_helper torch/distributed/distributed_c10d.py:2100",
    "new_group torch/distributed/distributed_c10d.py:5400",
    "GroupCoordinator.__init__ distributed/parallel_state.py:260",
    "initialize_model_parallel distributed/parallel_state.py:2050",
    *DIST,
)
NCCL_INIT = (
    "NCCLLibrary.ncclCommInitRank distributed/device_communicators/pynccl_wrapper.py:400",
    "PyNcclCommunicator.__init__ distributed/device_communicators/pynccl.py:110",
    "GroupCoordinator.__init__ distributed/parallel_state.py:300",
    "initialize_model_parallel distributed/parallel_state.py:2050",
    *DIST,
)
LOADING = (
    "ModelRunner.load_model model_runner.py:1500",
    "ModelRunner.initialize model_runner.py:702",
    *WORKER,
)
LOAD_WEIGHTS = (
    "DeepseekV2ForCausalLM.load_weights deepseek_v2.py:3100",
    "DefaultModelLoader.load_weights_and_postprocess model_loader/loader.py:680",
    "DefaultModelLoader.load_model model_loader/loader.py:660",
    *LOADING,
)
COPY = ("default_weight_loader model_loader/weight_utils.py:1100", *LOAD_WEIGHTS)
MMAP = ("safetensors_weights_iterator model_loader/weight_utils.py:740", *LOAD_WEIGHTS)
FUTURES = (
    "Condition.wait threading.py:355",
    "_multi_thread_safetensors_weights_iterator model_loader/weight_utils.py:1371",
    *LOAD_WEIGHTS,
)
REPACK = (
    "process_weights_after_loading layers/quantization/fp8.py:900",
    "DefaultModelLoader.load_weights_and_postprocess model_loader/loader.py:690",
    "DefaultModelLoader.load_model model_loader/loader.py:660",
    *LOADING,
)
HUB = (
    "http_get huggingface_hub/file_download.py:480",
    "_download_to_tmp_and_move huggingface_hub/file_download.py:1700",
    "hf_hub_download huggingface_hub/file_download.py:1000",
    "snapshot_download huggingface_hub/_snapshot_download.py:300",
    "download_weights_from_hf model_loader/weight_utils.py:400",
    "DefaultModelLoader.load_model model_loader/loader.py:600",
    *LOADING,
)
HUB_LOCK = (
    "BaseFileLock.acquire filelock/_api.py:344",
    "download_weights_from_hf model_loader/weight_utils.py:390",
    "DefaultModelLoader.load_model model_loader/loader.py:600",
    *LOADING,
)
BARRIER = ("monitored_barrier torch/distributed/distributed_c10d.py:5116", *LOADING)
HOST_KV = (
    "MHATokenToKVPoolHost.init_kv_buffer mem_cache/memory_pool_host.py:300",
    "HostKVCache.__init__ mem_cache/memory_pool_host.py:120",
    "HiRadixCache.__init__ mem_cache/hiradix_cache.py:60",
    "build_kv_cache mem_cache/kv_cache_builder.py:90",
    "Scheduler.init_cache_with_memory_pool scheduler.py:900",
    "Scheduler.__init__ scheduler.py:430",
    "run_scheduler_process scheduler.py:4313",
    *PROCESS,
)
GRAPHS = (
    "ModelRunner.init_cuda_graphs model_runner.py:938",
    "TpModelWorker.init_cuda_graphs tp_worker.py:357",
    "Scheduler.init_all_cuda_graphs scheduler.py:860",
    *SCHEDULER,
)
WARMUP_RUNNER = (
    "BaseRunner.warmup runner/base_runner.py:215",
    "EagerRunner.__init__ runner/eager_runner.py:139",
    *GRAPHS,
)
SYMM_MEM = (
    "rendezvous torch/distributed/_symmetric_memory/__init__.py:1991",
    "_alloc_symm_buffer_bytes flashinfer/comm/torch_symmetric_memory.py:71",
    "MNNVLWorkspace.__init__ flashinfer/comm/trtllm_mnnvl_ar.py:150",
    "create_allreduce_fusion_workspace flashinfer/comm/allreduce.py:442",
    "initialize flashinfer_comm_fusion.py:495",
    "pre_initialize_workspaces flashinfer_comm_fusion.py:831",
    *WARMUP_RUNNER,
)
FORWARD = (
    "DeepseekV2DecoderLayer.forward deepseek_v2.py:2219",
    "DeepseekV2Model.forward deepseek_v2.py:2585",
    "DeepseekV2ForCausalLM.forward deepseek_v2.py:2853",
)
CAPTURE = (
    *FORWARD,
    "DecodeCudaGraphRunner.capture_one_batch_size runner/decode_cuda_graph_runner.py:1400",
    "DecodeCudaGraphRunner.capture runner/decode_cuda_graph_runner.py:1342",
    "ModelRunner.init_decode_cuda_graph model_runner.py:960",
    *GRAPHS,
)
CAPTURE_ALL_REDUCE = (
    "GroupCoordinator._all_reduce_out_place distributed/parallel_state.py:600",
    "GroupCoordinator.all_reduce distributed/parallel_state.py:560",
    *CAPTURE,
)
CAPTURE_ALL_GATHER = (
    "GroupCoordinator.all_gather distributed/parallel_state.py:700",
    "LogitsProcessor._get_logits layers/logits_processor.py:500",
    *CAPTURE,
)
REGISTER = (
    "broadcast_object_list torch/distributed/distributed_c10d.py:3700",
    "CustomAllreduce.register_graph_buffers device_communicators/custom_all_reduce.py:330",
    "CustomAllreduce.capture device_communicators/custom_all_reduce.py:300",
    "DecodeCudaGraphRunner.capture runner/decode_cuda_graph_runner.py:1330",
    *GRAPHS,
)
REPLAY = (
    "CUDAGraph.replay torch/cuda/graphs.py:115",
    "DecodeCudaGraphRunner.replay runner/decode_cuda_graph_runner.py:1500",
    "ModelRunner._forward_raw model_runner.py:3200",
)
TRITON_COMPILE = (
    "make_llir triton/backends/nvidia/compiler.py:400",
    "compile triton/compiler/compiler.py:300",
    "JITFunction.run triton/runtime/jit.py:700",
    "fused_moe_kernel layers/moe/fused_moe_triton/fused_moe.py:300",
    *CAPTURE,
)
DEEPGEMM = (
    "_compile_one_shape deep_gemm_wrapper/compile_utils.py:150",
    "_maybe_compile_deep_gemm_one_type_all deep_gemm_wrapper/compile_utils.py:134",
    "gemm_nt_f8f8bf16 deep_gemm_wrapper/entrypoint.py:80",
    *CAPTURE,
)
NINJA = (
    "_PollLikeSelector.select selectors.py:415",
    "Popen._communicate subprocess.py:2115",
    "Popen.communicate subprocess.py:1209",
    "run subprocess.py:550",
    "run_ninja flashinfer/jit/cpp_ext.py:280",
    "JitSpec.build flashinfer/jit/core.py:200",
    *CAPTURE,
)
JIT_LOCK = (
    "BaseFileLock.acquire filelock/_api.py:344",
    "JitSpec.build_and_load flashinfer/jit/core.py:240",
    *CAPTURE,
)
BATON = (
    "FileBaton.wait torch/utils/file_baton.py:49",
    "_jit_compile torch/utils/cpp_extension.py:1900",
    *CAPTURE,
)
AUTOTUNE = (
    "AutoTuner._profile_single_kernel flashinfer/autotuner.py:500",
    "AutoTuner.choose_one flashinfer/autotuner.py:420",
    "run_flashinfer_autotune_forward runner/flashinfer_autotune.py:340",
    "ModelRunner.kernel_warmup model_runner.py:990",
    *GRAPHS,
)
LOOP = (
    "Scheduler.event_loop_overlap scheduler.py:1579",
    "dispatch_event_loop scheduler.py:4194",
    "Scheduler.run_event_loop scheduler.py:1514",
    "run_scheduler_process scheduler.py:4329",
    *PROCESS,
)
RECEIVE = (
    "SchedulerRequestReceiver.recv_requests scheduler_components/request_receiver.py:90",
    *LOOP,
)
IDLE_BROADCAST = (
    "broadcast torch/distributed/distributed_c10d.py:2974",
    "broadcast_pyobj utils/common.py:2167",
    "_broadcast_reqs_across_ranks scheduler_components/request_receiver.py:195",
    *RECEIVE,
)
IDLE_GATHER = (
    "all_gather_into_tensor torch/distributed/distributed_c10d.py:4000",
    "MLPSyncBatchInfo.all_gather scheduler_dp_attn_mixin.py:60",
    "prepare_mlp_sync_batch_raw scheduler_dp_attn_mixin.py:150",
    "Scheduler.prepare_mlp_sync_batch scheduler_dp_attn_mixin.py:220",
    "Scheduler.get_next_batch_to_run scheduler.py:2100",
    *LOOP,
)
ON_IDLE = ("Scheduler.on_idle scheduler.py:3568", *LOOP)
RUN_BATCH = (
    "TpModelWorker.forward_batch_generation tp_worker.py:514",
    "Scheduler.run_batch scheduler.py:3250",
    *LOOP,
)
BATCH_FORWARD = (*FORWARD, "ModelRunner._forward_raw model_runner.py:3230", *RUN_BATCH)
BATCH_ALL_REDUCE = (
    "GroupCoordinator.all_reduce distributed/parallel_state.py:560",
    *BATCH_FORWARD,
)
BATCH_ALL_GATHER = (
    "GroupCoordinator.all_gather distributed/parallel_state.py:700",
    "LogitsProcessor._get_logits layers/logits_processor.py:500",
    *BATCH_FORWARD,
)
PP_RECV = (
    "recv torch/distributed/distributed_c10d.py:2500",
    "GroupCoordinator.recv_tensor_dict distributed/parallel_state.py:1100",
    "Scheduler._pp_recv_proxy_tensors scheduler_pp_mixin.py:300",
    "Scheduler.event_loop_pp scheduler_pp_mixin.py:90",
    "dispatch_event_loop scheduler.py:4194",
    "run_scheduler_process scheduler.py:4329",
    *PROCESS,
)
SYNC = ("synchronize torch/cuda/streams.py:231", *RUN_BATCH)
WAITS_FOR_RANKS = (
    "_PollLikeSelector.select selectors.py:415",
    "wait multiprocessing/connection.py:1136",
    "_wait_for_scheduler_ready engine.py:1380",
    "Engine._launch_subprocesses engine.py:884",
    "launch_server http_server.py:2509",
    "run_server sglang/launch_server.py:51",
    "<module> sglang/launch_server.py:70",
)
SERVES = (
    "Runner.run asyncio/runners.py:118",
    "Server.run uvicorn/server.py:86",
    "run uvicorn/main.py:632",
    "_setup_and_run_http_server http_server.py:2410",
    "launch_server http_server.py:2516",
    "<module> sglang/launch_server.py:70",
)
WARMUP_THREAD = (
    "SocketIO.readinto socket.py:708",
    "HTTPResponse._read_status http/client.py:286",
    "HTTPResponse.begin http/client.py:325",
    "HTTPConnection.getresponse http/client.py:1395",
    "HTTPConnection.getresponse urllib3/connection.py:571",
    "HTTPConnectionPool._make_request urllib3/connectionpool.py:534",
    "HTTPConnectionPool.urlopen urllib3/connectionpool.py:787",
    "HTTPAdapter.send requests/adapters.py:644",
    "Session.send requests/sessions.py:703",
    "Session.request requests/sessions.py:589",
    "request requests/api.py:59",
    "post requests/api.py:115",
    "_execute_server_warmup http_server.py:2384",
    "_wait_and_warmup http_server.py:2533",
    "Thread.run threading.py:1012",
)


class _World:
    """The machine as it stands in a second; counters go on from one second to the next."""

    def __init__(
        self,
        ranks: Mapping[str, Doing],
        command: str,
        launcher: tuple[str, ...],
        launcher_threads: tuple[tuple[str, ...], ...],
    ) -> None:
        self.ranks = {
            name: doing if isinstance(doing, tuple) else ((0.0, doing),)
            for name, doing in ranks.items()
        }
        self.command = command
        self.launcher = launcher
        self.launcher_threads = launcher_threads
        self.sums: dict[tuple[int, str], float] = {}
        self.dumps = 0

    def does(self, name: str, at_s: float) -> Does:
        return [does for from_s, does in self.ranks[name] if from_s <= at_s][-1]

    def pid(self, name: str) -> int:
        return FIRST_RANK + list(self.ranks).index(name)

    def pass_second(self, at_s: float) -> None:
        for name in self.ranks:
            pid, does = self.pid(name), self.does(name, at_s)
            self._add(pid, "cpu", does.cpu_pct / 100)
            self._add(pid, "read", does.reads_per_s)
            self._add(pid, "file", does.maps_per_s)
            self._add(pid, "load", does.loads_per_s)
            self._add(pid, "anon", does.grows_per_s)
            self._add(pid, "writes", does.writes)
            self._add(pid, "sleeps", does.sleeps)
            self._add(pid, "gpu", does.gpu_grows_per_s)
            for number, (_, cpu_pct) in enumerate(does.children):
                self._add(pid * 100 + number, "cpu", cpu_pct / 100)

    def processes(self, at_s: float) -> Processes:
        found = [
            _process(LAUNCHER, 1, self.command, "S", 12.0),
            _process(DETOKENIZER, LAUNCHER, "sglang::detokenizer", "S", 9.0),
        ]
        ended: dict[int, int | None] = {}
        for name in self.ranks:
            does, pid = self.does(name, at_s), self.pid(name)
            if does.gone is not None and not does.zombie:
                ended[pid] = does.gone
                continue
            found.append(self._rank(name, does, pid))
            for number, (title, _) in enumerate(does.children):
                child = pid * 100 + number
                found.append(_process(child, pid, title, "R", self.sums[child, "cpu"]))
        return Processes(processes=tuple(found), roots=(LAUNCHER,), ended=ended)

    def stacks(self, at_s: float) -> Stacks:
        self.dumps += 1
        by_pid: dict[int, ProcessStacks | Missing] = {
            LAUNCHER: _stacks(self.launcher, self.launcher_threads)
        }
        for name in self.ranks:
            does = self.does(name, at_s)
            if does.gone is not None:
                continue
            stack = does.stacks[self.dumps % len(does.stacks)] if does.stacks else does.stack
            active = does.state == "R"
            by_pid[self.pid(name)] = does.unseen or _stacks(stack, does.threads, active=active)
        return Stacks(by_pid=by_pid)

    def waits(self, at_s: float, locks: tuple[FileLock, ...]) -> Waits | None:
        sleeps = any(
            does.until_s or does.for_s or does.naps_s
            for doing in self.ranks.values()
            for _, does in doing
        )
        reads = any(self.does(name, at_s).reads_from for name in self.ranks)
        if not (locks or sleeps or reads):
            return None
        by_pid: dict[int, ProcessWaits | Missing] = {}
        for name in self.ranks:
            does, pid = self.does(name, at_s), self.pid(name)
            wait = ThreadWait(tid=pid, call="futex", line="202 0x7f", futex="other")
            if does.reads_from:
                other = self.pid(does.reads_from)
                mutual = self.does(does.reads_from, at_s).reads_from == name
                end = WaitObject(
                    kind="unix",
                    fd=6,
                    state="established",
                    others=(Holder(other, "sglang::schedul"),),
                    served=does.served or mutual,
                    mutual=(other,) if mutual else (),
                )
                wait = ThreadWait(
                    tid=pid,
                    call="recvfrom",
                    line="45 0x6",
                    objects=(end,),
                    count=1,
                    switches=self.dumps if does.wakes else 7,
                )
            if does.until_s or does.for_s or does.naps_s:
                naps = int(at_s // does.naps_s) + 1 if does.naps_s else 0
                wait = ThreadWait(
                    tid=pid,
                    call="clock_nanosleep",
                    line="230 0x1",
                    timed=True,
                    switches=naps,
                    ends_at_s=None if does.for_s else does.until_s or naps * does.naps_s,
                    lasts_s=does.for_s or None,
                )
            by_pid[pid] = ProcessWaits(threads=(wait,))
        return Waits(by_pid=by_pid, locks=locks, locks_searched=True)

    def weights(self, storage: str, *, first: bool) -> Weights:
        names = [f"/models/m/model-{number:05}.safetensors" for number in range(SHARDS)]
        held: dict[int, tuple[HeldFile, ...] | Missing] = {}
        for name in self.ranks:
            pid = self.pid(name)
            number, part = divmod(int(self.sums[pid, "load"]), SHARD_BYTES)
            held[pid] = ()
            if self.sums[pid, "load"] and number < SHARDS:
                held[pid] = (HeldFile(names[number], SHARD_BYTES, 0, part),)
        checkpoint = Checkpoint(
            directory="/models/m",
            files=tuple(ShardFile(name, SHARD_BYTES) for name in names),
            mount=Mount(point="/models", type=storage),
        )
        return Weights(checkpoint=checkpoint if first else None, held=held)

    def gpus(self, at_s: float) -> Gpus:
        cards: dict[int, Gpu | Missing] = {}
        for index, name in enumerate(self.ranks):
            does, pid = self.does(name, at_s), self.pid(name)
            used = int(2 * GIB + self.sums[pid, "gpu"])
            util_pct, memory_util_pct, watts = does.gpu
            here = does.gone is None
            cards[index] = Gpu(
                index=index,
                name="NVIDIA H200",
                util_pct=util_pct,
                memory_util_pct=memory_util_pct,
                memory_used_bytes=used if here else 0,
                power_w=IDLE_W + watts,
                processes=(GpuProcess(pid, used),) if here else (),
            )
        return Gpus(cards=cards)

    def _rank(self, name: str, does: Does, pid: int) -> Process:
        title = "sglang::scheduler" + (f"_{name.replace(' ', '_')}" if len(self.ranks) > 1 else "")
        if does.stack == IMPORTS:
            title = "python3 -c from multiprocessing.spawn import spawn_main; spawn_main()"
        file_bytes = int(GIB // 2 + self.sums[pid, "file"])
        writes = int(self.sums[pid, "writes"])
        reads, size = writes * does.own_reads, does.bytes_per_write
        io = Io(
            200_000_000 + int(self.sums[pid, "read"]) + size * reads,
            100_000 + size * writes,
            20_000 + reads,
            300 + writes,
            1_000_000 + int(self.sums[pid, "read"]),
            0,
        )
        return _process(
            pid,
            LAUNCHER,
            title,
            "Z" if does.zombie else does.state,
            10.0 + self.sums[pid, "cpu"],
            rss_bytes=GIB + file_bytes + int(self.sums[pid, "anon"]),
            rss_file_bytes=file_bytes,
            io=io,
            hot=HotThread(system_s=0.0, sleeps=int(self.sums[pid, "sleeps"]), preempted=0, io=io)
            if does.cpu_pct > 2
            else None,
            kernel=does.kernel if does.state in "SD" else "0",
        )

    def _add(self, pid: int, key: str, amount: float) -> None:
        self.sums[pid, key] = self.sums.get((pid, key), 0.0) + amount


def _process(
    pid: int,
    ppid: int,
    title: str,
    state: str,
    cpu_s: float,
    *,
    rss_bytes: int = GIB,
    rss_file_bytes: int | None = None,
    io: Io | None = None,
    hot: HotThread | None = None,
    kernel: str = "ep_poll",
) -> Process:
    return Process(
        pid=pid,
        ppid=ppid,
        start_ticks=1000 + pid,
        title=title,
        comm=title.split(maxsplit=1)[0].rpartition("/")[2][:15],
        state=state,
        cpu_s=cpu_s,
        children_cpu_s=0.0,
        rss_bytes=rss_bytes,
        rss_file_bytes=rss_file_bytes,
        tracer_pid=0,
        io=io or Io(1000, 1000, 10, 10, 0, 0),
        threads=(Thread(pid, "main", state, cpu_s, kernel, hot=hot),),
    )


def _stacks(
    frames: Sequence[str], others: Iterable[Sequence[str]] = (), *, active: bool = False
) -> ProcessStacks:
    threads = [ThreadStack(name="MainThread", frames=_frames(frames), active=active)]
    threads += [
        ThreadStack(name=f"Thread-{number} (work)", frames=_frames(other), active=False)
        for number, other in enumerate(others, start=1)
    ]
    return ProcessStacks(threads=tuple(threads))


def _frames(texts: Sequence[str]) -> tuple[Frame, ...]:
    frames = []
    for text in texts:
        place, _, line = text.rpartition(":")
        function, _, path = place.partition(" ")
        frames.append(Frame(function, path, int(line)))
    return tuple(frames)


def _log_bytes(log: Sequence[tuple[float, str]]) -> tuple[list[tuple[float, int]], bytes]:
    data, ends = b"", []
    for at_s, told in sorted(log, key=lambda entry: entry[0]):
        line = told
        rank, bar, text = line.partition("|")
        if bar and (not rank or (rank[-1].isdigit() and len(rank) < 20)):
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(WALL_S + at_s))
            only = rank == "TP0" and not any("TP1|" in each for _, each in log)
            line = f"[{stamp}{' ' + rank if rank and not only else ''}]{text}"
        data += line.encode() + b"\n"
        ends.append((at_s, len(data)))
    return ends, data


def _tp(names: Iterable[str]) -> int:
    numbers = {part for name in names for part in name.split() if part.startswith("TP")}
    return max(1, len(numbers))
