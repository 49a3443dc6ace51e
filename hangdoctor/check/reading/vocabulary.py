"""What names mean in a model file: ranks, collectives, waits for the device, files, modes, graphs.

Names are dotted and resolved through the file's imports, `torch.distributed.all_gather`; a call on
an unknown object keeps its source text, `self.group.all_gather`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

Group = Literal["tp", "attn-tp", "attn-dp", "ep", "cp", "pp", "world", "unknown"]

_WORDS = re.compile(r"[a-z0-9]+")

# Unmistakable wherever they stand in a name.
_COLLECTIVE = re.compile(
    r"all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|(?<![a-z])barrier|"
    r"broadcast_(object|pyobj|tensor_dict|coalesced)|dp_gather|gather_(object|tensor_dict)|"
    r"scatter_object|new_(sub)?groups?(?![a-z])|init_process_group|initialize_model_parallel"
)
# Collectives on a group, something else on a tensor or a list.
_ON_A_GROUP = re.compile(r"^(broadcast|gather|scatter|reduce|coalescing_manager|monitored_\w+)$")
_NO_COLLECTIVE = re.compile(
    r"^(is|can|should|use|has|get|needs|supports|enable|disable|set|register|init|make|build|"
    r"maybe_use|can_use|prepare|create|compute)_|_(enabled|size|config|hook|mode|kwargs|args|"
    r"buffer|buffers|stream|len|lens|info|event|fn|func|op_name|ctx|context)$"
)
_POINT_TO_POINT = re.compile(
    r"^(batch_)?i?(send|recv)(_?(object|tensor|tensor_dict|object_list|any_source))*s?(_list)?$"
    r"|^batch_isend_irecv$|^p2pop$"
)
_GROUP_LIKE = re.compile(
    r"(^|[._])(dist|distributed|td|c10d|funcol|group|groups|coordinator|communicator|comm|"
    r"pynccl\w*|nccl\w*|process_group|pg|ca_comm)(\(\))?($|[._])|_group(\(\))?$|group\(\)$|_comm$"
)
_NO_GROUP = re.compile(r"(^|\.)layer_communicator($|\.)|socket|zmq|conn($|\.)|pipe($|\.)")

# A model's layers that talk to the other ranks inside.
_PARALLEL_LAYER = re.compile(
    r"RowParallel|VocabParallel|Communicator$|MoE|LogitsProcessor|DecoderLayer|"
    r"RadixAttention$|ForCausalLM|Dispatcher|EPMoE"
)
PARALLEL_ATTRIBUTES = frozenset(
    {"layers", "mlp", "self_attn", "model", "experts", "o_proj", "down_proj", "logits_processor"}
)
PARALLEL_FUNCTIONS = frozenset({"model_forward_maybe_tbo"})

_NO_RANK = re.compile(r"lora|low_rank|rerank|num_rank|ranks|rank_(size|ratio|dim|count)|max_rank")
_RANK = re.compile(
    r"(^|_)rank($|_(in|id|idx|index|no|num|int)|_?0$)|^rank|gpu_id|local_id|device_id"
)
_FIRST_RANK = re.compile(
    r"is_(the_)?(first|zero|main|master|leader|root|primary)_?(rank|process|worker)?$|"
    r"is_(tp_|local_|global_|attn_tp_)?rank_?(0|zero)$|is_rank_?(0|zero)$"
)
_LAST_RANK = re.compile(r"is_(the_)?last_rank$")

_SOMEBODYS_RANK = re.compile(
    r"_*(src|dst|root|target|owner|dump|main|writer|leader|peer|first|last|other|next|prev|source|"
    r"save|master)_rank"
)

_VARIES = re.compile(
    r"^(os\.(path\.(exists|isfile|isdir|getsize|getmtime|lexists)|access|listdir|scandir|stat|"
    r"statvfs|getpid|getppid|urandom|getloadavg|cpu_count|sched_getaffinity|uname)|"
    r"time\.\w+|datetime\.\w+(\.\w+)*|random\.\w+|numpy\.random\.\w+|secrets\.\w+|uuid\.\w+|"
    r"socket\.(gethostname|getfqdn)|platform\.node|shutil\.disk_usage|shutil\.which|psutil\.\w+|"
    r"torch\.cuda\.(mem_get_info|memory_allocated|memory_reserved|max_memory_allocated)|"
    r"threading\.(current_thread|get_ident)|multiprocessing\.current_process|glob\.i?glob|"
    r"tempfile\.\w+|gc\.\w+|hash|id)$"
)
_VARIES_METHOD = re.compile(
    r"^(exists|is_file|is_dir|stat|iterdir|glob|empty|full|qsize|locked|get_nowait|is_alive|poll)$"
)
_LOCAL_DEVICE = re.compile(r"(^|\.)(current_device|get_device|get_current_device\w*)$")

_CAPTURING = re.compile(
    r"is_(current_stream_)?capturing|capture_mode|is_in_\w*graph|is_compiling|in_piecewise|"
    r"is_(dynamo|torchdynamo)_compiling|graph_capture|is_\w*tracing|cuda_graph_capturing"
)

_COMPILING = re.compile(r"compiling|in_piecewise|is_\w*tracing|is_in_\w*graph")
_RANK_VARIABLE = re.compile(
    r"^((GLOBAL|LOCAL|WORLD|NODE|GROUP|ROLE|TP|DP|PP|EP|CP|MY)_)*RANK$|"
    r"^(OMPI_COMM_WORLD|MV2_COMM_WORLD|MPI|PMI|PMIX)_(LOCAL_)?RANK$|^SLURM_(PROCID|LOCALID)$"
)

_SYNC_METHODS = frozenset(
    {
        "cpu", "item", "tolist", "numpy", "is_nonzero", "nonzero", "unique", "argwhere",
        "masked_select", "unique_consecutive",
    }
)  # fmt: skip
_SYNC_FUNCTIONS = re.compile(
    r"^torch\.((cuda|accelerator|npu|xpu|hpu)\.synchronize|nonzero|equal|allclose|masked_select|"
    r"argwhere|bincount|unique|unique_consecutive|save)$|(^|\.)synchronize$|^numpy\.(asarray|array)$|"
    r"^pickle\.dumps?$|^safetensors\..*save\w*$|(^|\.)save_file$"
)
_IO = re.compile(
    r"^(open|io\.open|input|os\.(open|fdopen|mkdir|makedirs|mkfifo|rename|replace|remove|unlink|"
    r"rmdir|removedirs|link|symlink|stat|statvfs|listdir|scandir|access|truncate|chmod|fsync|"
    r"write|read|system|popen|path\.(exists|isfile|isdir|getsize|getmtime|lexists))|"
    r"torch\.(save|load)|numpy\.(save\w*|load\w*|memmap|fromfile)|pickle\.(dump|load)|"
    r"json\.(dump|load)|shutil\.\w+|tempfile\.\w+|requests\.\w+|urllib\..*|httpx\.\w+|"
    r"http\..*|socket\.\w+|subprocess\.\w+|mmap\.mmap|sqlite3\.\w+|redis\..*|h5py\.\w+|"
    r"safetensors\..*(save|load)\w*|.*\.save_file|zmq\..*|boto3\..*|gzip\.open|lzma\.open|"
    r"bz2\.open|zipfile\.\w+|tarfile\.\w+|dill\.dump|joblib\.dump|csv\.writer|"
    r"torch\.distributed\.checkpoint\.\w+|mooncake\..*|pyarrow\..*)$"
)
_IO_METHODS = frozenset(
    {
        "write_text", "write_bytes", "read_text", "read_bytes", "touch", "mkdir", "rmdir",
        "unlink", "rename", "sendall", "send_json", "send_pyobj", "recv_pyobj", "recv_json",
        "send_multipart", "recv_multipart", "urlopen", "tofile",
    }
)  # fmt: skip
_FILE_METHODS = frozenset({"write", "writelines", "flush", "read", "readline", "open", "save"})
_FILE_LIKE = re.compile(r"(^|[._])(f|fp|fh|file|out|path|sock|socket|log_?file|stream_file)$")
_BLOCKING = re.compile(
    r"^time\.sleep$|^(select|signal)\.\w+$|^fcntl\.(flock|lockf)$|^os\.(wait\w*|mkfifo)$|"
    r"(^|\.)(acquire|sleep|wait_for|result)$"
)
_WAITED_ON = re.compile(
    r"queue|(^|[._])q$|event|thread|future|cond|proc|lock|semaphore", re.IGNORECASE
)
_WAITING_METHODS = frozenset({"get", "put", "join", "wait"})

FORWARD_MODES: tuple[str, ...] = (
    "EXTEND", "DECODE", "MIXED", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND", "SPLIT_PREFILL",
    "DLLM_EXTEND",
)  # fmt: skip
CAPTURED_MODE = "DECODE"
"""What graphs are captured in without speculative decoding."""

_EXTEND = frozenset(
    {"EXTEND", "MIXED", "TARGET_VERIFY", "DRAFT_EXTEND", "SPLIT_PREFILL", "DLLM_EXTEND"}
)
MODE_TESTS: dict[str, frozenset[str]] = {
    # SGLang 0.5.9, model_executor/forward_batch_info.py
    "is_prefill": _EXTEND,
    "is_extend": _EXTEND,
    "is_context_parallel_extend": frozenset({"EXTEND", "MIXED"}),
    "is_decode": frozenset({"DECODE"}),
    "is_mixed": frozenset({"MIXED"}),
    "is_idle": frozenset({"IDLE"}),
    "is_decode_or_idle": frozenset({"DECODE", "IDLE"}),
    "is_target_verify": frozenset({"TARGET_VERIFY"}),
    "is_draft_extend": frozenset({"DRAFT_EXTEND"}),
    "is_extend_or_draft_extend_or_mixed": frozenset(
        {"EXTEND", "DRAFT_EXTEND", "MIXED", "SPLIT_PREFILL"}
    ),
    "is_cuda_graph": frozenset({"DECODE", "TARGET_VERIFY", "IDLE", "DLLM_EXTEND"}),
    "is_cpu_graph": frozenset({"DECODE"}),
    "is_split_prefill": frozenset({"SPLIT_PREFILL"}),
    "is_extend_without_speculative": _EXTEND - {"TARGET_VERIFY", "DRAFT_EXTEND"},
    "is_dllm_extend": frozenset({"DLLM_EXTEND"}),
    "is_draft_extend_v2": frozenset(),
    "is_prebuilt": frozenset(),
}

TENSORS = frozenset(
    {
        "hidden_states", "residual", "input_ids", "positions", "input_embeds", "logits", "x",
        "hidden", "aux_hidden_states", "hs", "h", "output", "out_cache_loc", "seq_lens",
    }
)  # fmt: skip
TAKES_NO_TUPLE = frozenset({"logits_processor", "norm", "lm_head", "layer"})
"""They take a tensor where a patch may give the tuple that a layer returns."""
NO_TENSOR_RESULT = frozenset({"split", "chunk", "unbind", "topk", "sort", "aminmax", "tolist"})
"""Methods of tensors that return something else."""
NO_TENSOR = frozenset(
    {
        "shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "size", "dim",
        "numel", "stride", "is_contiguous", "element_size", "data_ptr", "get_device", "names",
        "is_floating_point", "nbytes", "itemsize", "type", "storage_offset", "is_cpu",
    }
)  # fmt: skip


def last(name: str) -> str:
    """Return the last part of a dotted name.

    >>> last("torch.distributed.all_gather")
    'all_gather'
    """
    return name.rsplit(".", 1)[-1].removesuffix("()")


@lru_cache(maxsize=20_000)
def collective(name: str) -> str:
    """Return which collective a call is, spelled one way; empty for none.

    >>> collective("sglang.srt.distributed.tensor_model_parallel_all_gather")
    'all_gather'
    >>> collective("torch.gather"), collective("self.tp_group.broadcast")
    ('', 'broadcast')
    """
    tail = last(name).lower().lstrip("_")
    if name.startswith("torch.distributed.checkpoint.") and tail in ("save", "load"):
        return f"checkpoint.{tail}"
    if tail == "barrier" and name.startswith(("threading.", "multiprocessing.")):
        return ""
    if (match := _COLLECTIVE.search(tail)) and not _NO_COLLECTIVE.search(tail):
        found = match[0].replace("allgather", "all_gather").replace("allreduce", "all_reduce")
        return found.replace("reducescatter", "reduce_scatter")
    if _ON_A_GROUP.match(tail) and _is_on_a_group(name):
        return tail
    return ""


@lru_cache(maxsize=20_000)
def point_to_point(name: str) -> str:
    """Return "send", "recv" or "both" for one half of a transfer between ranks; empty for none.

    >>> point_to_point("torch.distributed.isend"), point_to_point("self.socket.send")
    ('send', '')
    """
    tail = last(name).lower()
    if not _POINT_TO_POINT.match(tail) or not _is_on_a_group(name):
        return ""
    if tail in ("batch_isend_irecv", "p2pop"):
        return ""  # its two sides are in its argument
    return "recv" if "recv" in tail else "send"


@lru_cache(maxsize=20_000)
def group_of(name: str, arguments: str = "") -> Group:
    """Return which ranks a collective is among, by its name and its group argument.

    >>> group_of("tensor_model_parallel_all_reduce"), group_of("get_pp_group().barrier")
    ('tp', 'pp')
    >>> group_of("torch.distributed.barrier"), group_of("torch.distributed.barrier", "group=g")
    ('world', 'unknown')
    """
    for text in (arguments, name):
        words = set(_WORDS.findall(text.lower().replace("attention", "attn")))
        flat = text.lower()
        if "pp" in words or "pipeline" in words:
            return "pp"
        if ("attn" in words and "dp" in words) or "attn_dp" in flat:
            return "attn-dp"
        if {"attn", "tp"} <= words:
            return "attn-tp"
        if "cp" in words:
            return "cp"
        if "ep" in words or {"expert", "parallel"} <= words:
            return "ep"
        if "tp" in words or {"tensor", "parallel"} <= words or "dp_gather" in flat:
            return "tp"
        if "world" in words or "WORLD" in text:
            return "world"
        if text is arguments and ("group" in words or "pg" in words):
            return "unknown"
    if name.startswith("torch.distributed."):
        return "world"
    return "unknown"


@lru_cache(maxsize=20_000)
def rank_of(name: str) -> tuple[Group, str] | None:
    """Return which rank a name stands for, and "number", "first" or "last"; None for none.

    >>> rank_of("sglang.srt.distributed.get_tensor_model_parallel_rank")
    ('tp', 'number')
    >>> rank_of("get_pp_group().is_first_rank"), rank_of("config.q_lora_rank")
    (('pp', 'first'), None)
    """
    tail = last(name).lower().lstrip("_")
    if _NO_RANK.search(tail):
        return None
    if _LAST_RANK.search(tail):
        how = "last"
    elif _FIRST_RANK.search(tail):
        how = "first"
    elif _RANK.search(tail.removeprefix("get_")):
        how = "number"
    else:
        return None
    group = group_of(name)
    return (group, how)


def is_somebodys_rank(tail: str) -> bool:
    """Tell whether a name means some rank's number, not the own one.

    >>> is_somebodys_rank("src_rank"), is_somebodys_rank("tp_rank")
    (True, False)
    """
    return bool(_SOMEBODYS_RANK.match(tail))


@lru_cache(maxsize=20_000)
def varies(name: str) -> bool:
    """Tell whether the answer of a call may differ from rank to rank, other than by the rank."""
    return bool(_VARIES.match(name) or ("." in name and _VARIES_METHOD.match(last(name))))


@lru_cache(maxsize=20_000)
def local_device(name: str) -> bool:
    """Tell whether a call returns the number of the rank's own device."""
    return bool(_LOCAL_DEVICE.search(name))


@lru_cache(maxsize=20_000)
def capturing(name: str) -> bool:
    """Tell whether a call asks if a graph is captured or compiled now."""
    return bool(_CAPTURING.search(last(name)))


@lru_cache(maxsize=20_000)
def compiling(name: str) -> bool:
    """Tell whether a call asks for a compilation, which a graph's capture need not be part of.

    >>> compiling("torch.compiler.is_compiling"), compiling("get_is_capture_mode")
    (True, False)
    """
    return bool(_COMPILING.search(last(name)))


def reads_environment(name: str) -> bool:
    """Tell whether a call reads a variable of the environment.

    >>> reads_environment("os.getenv"), reads_environment("self.environment.get")
    (True, False)
    """
    return name.startswith(("os.environ", "os.getenv", "sglang.srt.environ")) or last(name) in (
        "get_bool_env_var",
        "get_int_env_var",
        "getenv",
    )


@lru_cache(maxsize=20_000)
def is_rank_variable(name: str) -> bool:
    """Tell whether a launcher may put the process's own rank into a variable of the environment.

    >>> is_rank_variable("LOCAL_RANK"), is_rank_variable("HS_DUMP_RANK")
    (True, False)
    """
    return bool(_RANK_VARIABLE.match(name.upper()))


@lru_cache(maxsize=20_000)
def is_parallel_layer(name: str) -> bool:
    """Tell whether a class of layers runs collectives inside."""
    return bool(_PARALLEL_LAYER.search(last(name)))


@lru_cache(maxsize=20_000)
def io(name: str) -> bool:
    """Tell whether a call goes to a file system, the network or another process."""
    tail = last(name)
    if _IO.match(name) or ("." in name and tail in _IO_METHODS):
        return True
    return tail in _FILE_METHODS and bool(_FILE_LIKE.search(name.rpartition(".")[0]))


@lru_cache(maxsize=20_000)
def blocking(name: str) -> bool:
    """Tell whether a call waits for something that need not come: a lock, a queue, a sleep."""
    if _BLOCKING.search(name):
        return True
    owner, _, tail = name.rpartition(".")
    return tail in _WAITING_METHODS and bool(_WAITED_ON.search(owner))


def sync_method(tail: str) -> bool:
    """Tell whether a tensor's method waits for the device."""
    return tail in _SYNC_METHODS


@lru_cache(maxsize=20_000)
def sync_function(name: str) -> bool:
    """Tell whether a function waits for the device, or needs a tensor's content on the host."""
    return bool(_SYNC_FUNCTIONS.search(name))


def _is_on_a_group(name: str) -> bool:
    owner = name.rpartition(".")[0]
    return bool(_GROUP_LIKE.search(owner.lower())) and not _NO_GROUP.search(owner.lower())
