"""Logs of a start that hung once, rebuilt: they are not recordings.

Of the case is known: SGLang 0.5.9, TP 8, two good logs of 641 and 636 lines, a hung one of 217 that
ends in the loading of weights, all 64 of 64 shards read by the rank that shows the bar. The lines
are written here after the format strings in SGLang 0.5.9's source; which rank stayed behind (TP5),
times, sizes and the serving lines at the end of the good logs are made up.

    python tests/logs/rebuilt.py    writes them into sample_logs/
"""

from __future__ import annotations

import random
import re
from pathlib import Path

SAMPLES = Path(__file__).parents[2] / "sample_logs"
RANKS = 8
SHARDS = 64
BEHIND = 5
"""The rank that loads on while all others wait for it."""
FILES = {
    "sglang-0.5.9-tp8-good-rebuilt.log": (1, False, 641),
    "sglang-0.5.9-tp8-good-again-rebuilt.log": (2, False, 636),
    "sglang-0.5.9-tp8-weights-hung-rebuilt.log": (3, True, 217),
}
PACKAGES = "/usr/local/lib/python3.12/dist-packages"
MODEL = "/models/deepseek-64-shards"
NO_MODULE = (
    "bailing_moe_linear", "bailing_moe_nextn", "falcon_h1", "glm_ocr", "glm_ocr_nextn", "glmasr",
    "granitemoehybrid", "jet_nemotron", "jet_vlm", "kimi_linear", "midashenglm",
    "nano_nemotron_vl", "nemotron_h", "nemotron_h_mtp", "nemotron_nas", "qwen3_next",
    "qwen3_next_mtp", "mimo_v2_flash",
)  # fmt: skip
KERNELS = (
    ("GEMM_NT_F8F8BF16", 2112, 7168, 1), ("GEMM_NT_F8F8BF16", 3072, 1536, 1),
    ("GEMM_NT_F8F8BF16", 7168, 2048, 1), ("GEMM_NT_F8F8BF16", 4096, 512, 1),
    ("GROUPED_GEMM_NT_F8F8BF16_CONTIG", 512, 7168, 256),
    ("GROUPED_GEMM_NT_F8F8BF16_CONTIG", 7168, 256, 256),
)  # fmt: skip
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)


class Log:
    """A log while it is written: events of all ranks, which come out in the order of their time."""

    def __init__(self, seed):
        self.random = random.Random(seed)  # noqa: S311  # the same log each time
        self.now_s = 8 * 3600 + seed * 1234.0
        self.events = []

    def say(self, text, rank=None, *, stamp=True):
        self.events.append((self.now_s, len(self.events), rank, text, stamp))

    def each(self, text, ranks=range(RANKS), spread_s=0.6):
        """Let ranks say something at about the same time."""
        for rank in ranks:
            at_s = self.now_s + self.random.random() * spread_s
            said = text(rank) if callable(text) else text
            self.events.append((at_s, len(self.events), f"TP{rank}", said, True))

    def lines(self):
        for at_s, _, rank, text, stamp in sorted(self.events):
            clock = f"{int(at_s) // 3600:02}:{int(at_s) // 60 % 60:02}:{int(at_s) % 60:02}"
            label = f" {rank}" if rank else ""
            yield f"[2026-11-28 {clock}{label}] {text}" if stamp else text


def arguments(seed):
    """Return 0.5.9's arguments, of a sample, as this launch would have had them."""
    sample = (SAMPLES / "sglang-0.5.9-cpu-tp2-good.log").read_text(encoding="utf-8")
    text = next(line for line in sample.splitlines() if "server_args=" in line)
    text = text[text.index("server_args=") :].replace("/models/tiny-deepseek-v2", MODEL)
    for name, value in {
        "tp_size": RANKS, "device": "'cuda'", "dtype": "'auto'", "attention_backend": "'fa3'",
        "sampling_backend": "'flashinfer'", "grammar_backend": "'xgrammar'",
        "disable_cuda_graph": False, "disable_overlap_schedule": False, "context_length": None,
        "max_running_requests": None, "max_total_tokens": None, "chunked_prefill_size": 8192,
        "mem_fraction_static": 0.83, "cuda_graph_max_bs": 64, "cuda_graph_bs": list(SIZES),
        "random_seed": 10_000_000 * seed + 77, "port": 30000, "load_format": "'auto'",
    }.items():  # fmt: skip
        value_pattern = r"\[[^\]]*\]|'[^']*'|[^,)]*"
        text, changed = re.subn(rf"\b{name}=(?:{value_pattern})", f"{name}={value}", text, count=1)
        assert changed, name
    return text


def start(log, seed):
    """Write all up to the bar of the shards; return its last state, still unterminated."""
    log.say(
        f"{PACKAGES}/torchao/quantization/quant_api.py:1731: SyntaxWarning: invalid escape "
        "sequence '\\.'",
        stamp=False,
    )
    log.say("Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit")
    log.say("Attention backend not specified. Use fa3 backend by default.")
    log.say(arguments(seed))
    log.now_s += 2
    log.say("Using default HuggingFace chat template with detected content format: string")
    log.now_s += 17 + seed
    log.each("Mamba selective_state_update backend initialized: triton", spread_s=3)
    log.now_s += 3
    log.each("Init torch distributed begin.", spread_s=2)
    log.now_s += 2
    for rank in [*range(RANKS), *range(RANKS)]:  # of two groups
        log.say(
            f"[Gloo] Rank {rank} is connected to {RANKS - 1} peer ranks. Expected number of "
            f"connected peer ranks is : {RANKS - 1}",
            stamp=False,
        )
    log.say("sglang is using nccl==2.27.5", "TP0")
    log.now_s += 9 + seed
    log.each(
        lambda rank: (
            f"Init torch distributed ends. elapsed={11 + log.random.random():.2f} s, "
            f"mem usage={1.9 + rank % 3 / 100:.2f} GB"
        )
    )
    log.now_s += 2
    for name in NO_MODULE:
        log.each(
            f"Ignore import error when loading sglang.srt.models.{name}: No module named 'vllm'"
        )
    log.now_s += 2
    log.each(lambda rank: f"Load weight begin. avail mem={136.4 + rank % 3 / 10:.2f} GB")
    log.now_s += 1
    log.say("Detected fp8 checkpoint.", "TP0")
    log.say("Shared experts fusion optimization enabled.", "TP0")
    log.each(
        "Using MoE kernel config with down_moe=False. Performance might be sub-optimal! "
        f"Config file not found at {PACKAGES}/sglang/srt/layers/moe/moe_runner/triton_utils/"
        "configs/triton_3_5_1/E=257,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8_down.json"
    )


def shards(log, took_s):
    """Write the bar, which overwrites itself with carriage returns."""
    states = [
        f"Loading safetensors checkpoint shards: {100 * done // SHARDS:>3}% Completed | "
        f"{done}/{SHARDS} [{int(took_s * done / SHARDS) // 60:02}:"
        f"{int(took_s * done / SHARDS) % 60:02}<00:00,  {took_s / SHARDS:.2f}s/it]"
        for done in range(SHARDS + 1)
    ]
    log.now_s += took_s
    log.say("\r".join(states), stamp=False)
    log.say("", stamp=False)


def ended(log, ranks):
    log.each(
        lambda rank: (
            f"Load weight end. elapsed={161 + log.random.random() * 3:.2f} s, "
            "type=DeepseekV3ForCausalLM, dtype=torch.bfloat16, "
            f"avail mem={55.1 + rank % 3 / 10:.2f} GB, mem usage=81.30 GB."
        ),
        ranks,
        spread_s=6,
    )
    log.now_s += 7


def capture(log, seed):
    log.say("Using KV cache dtype: torch.bfloat16", "TP0")
    log.each("KV Cache is allocated. #tokens: 1126016, KV size: 36.24 GB")
    log.now_s += 1
    log.each(lambda rank: f"Memory pool end. avail mem={18.3 + rank % 3 / 10:.2f} GB")
    log.now_s += 2
    log.each(
        lambda rank: (
            "Capture cuda graph begin. This can take up to several minutes. "
            f"avail mem={17.7 + rank % 3 / 10:.2f} GB"
        )
    )
    log.now_s += 1
    log.say(f"Capture cuda graph bs {list(SIZES)}", "TP0")
    log.say(
        "Entering DeepGEMM JIT Pre-Compile session. It may take a long time (typically 10-20 mins) "
        "if you have not run `sglang.compile_deep_gemm`. It is recommended to run "
        "`sglang.compile_deep_gemm` with same args as `sglang.launch_server` for pre-compilation "
        "to reduce the overhead if you have not run it before. For example: `python3 -m "
        "sglang.compile_deep_gemm --model deepseek-ai/DeepSeek-V3 --tp 8 --trust-remote-code`",
        "TP0",
    )
    for kernel, n, k, groups in KERNELS:
        log.now_s += 3 + seed / 2
        log.each(
            f"Try DeepGEMM JIT Compiling for <{kernel}> N={n}, K={k}, num_groups={groups} with all "
            "Ms. It only takes a little time (typically 1 sec) if you have run `python3 -m "
            "sglang.compile_deep_gemm`. "
        )
    for done, size in enumerate(reversed(SIZES), start=1):
        log.now_s += 2
        share = 100 * done // len(SIZES)
        log.say(
            f"Capturing batches (bs={size} avail_mem=17.05 GB): {share:>3}%|{'█' * (share // 10)}"
            f"{' ' * (10 - share // 10)}| {done}/{len(SIZES)} [00:{done * 2:02}<00:00,  2.00s/it]",
            stamp=False,
        )
    log.now_s += 1
    log.each("Registering 1464 cuda graph addresses", ranks=(0,))
    log.now_s += 1
    log.each(
        lambda rank: (
            f"Capture cuda graph end. Time elapsed: {48 + log.random.random():.2f} s. "
            f"mem usage=0.{72 + rank % 2} GB. avail mem=17.02 GB."
        )
    )
    log.now_s += 2
    log.say(
        "max_total_num_tokens=1126016, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=2048, context_len=163840, available_gpu_mem=17.02 GB",
        "TP0",
    )


def serve(log):
    """Write the HTTP server's start and the warm-up."""
    log.now_s += 1
    for text in (
        "Started server process [4711]",
        "Waiting for application startup.",
        "Application startup complete.",
        "Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)",
    ):
        log.say(f"INFO:     {text}")
    log.now_s += 1
    log.say('INFO:     127.0.0.1:52396 - "GET /model_info HTTP/1.1" 200 OK')
    log.now_s += 2
    prefill(log, 6)
    log.now_s += 4
    log.say('INFO:     127.0.0.1:52400 - "POST /generate HTTP/1.1" 200 OK')
    log.say("The server is fired up and ready to roll!")


def prefill(log, tokens):
    log.say(
        f"Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: 0, token usage: 0.00, "
        "#running-req: 0, #queue-req: 0, input throughput (token/s): 1.25, cuda graph: False",
        "TP0",
    )


def answer_requests(log, lines):
    """Write so many lines of a server that answers."""
    for number in range(lines):
        log.now_s += 1
        if number % 5 == 0:
            prefill(log, log.random.randrange(10, 4000))
        elif number % 5 == 4:
            log.say(
                f'INFO:     10.0.3.7:{40000 + number} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
            )
        else:
            log.say(
                f"Decode batch, #running-req: 1, #token: {log.random.randrange(4000)}, token usage:"
                f" 0.00, cuda graph: True, gen throughput (token/s): {80 + number % 7}.13, "
                "#queue-req: 0, ",
                "TP0",
            )


def rebuild(seed, hung, length):
    """Return a log of so many lines."""
    log = Log(seed)
    start(log, seed)
    if hung:
        shards(log, 158)
        ended(log, [rank for rank in range(RANKS) if rank != BEHIND])
    else:
        shards(log, 150 + 4 * seed)
        ended(log, range(RANKS))
        capture(log, seed)
        serve(log)
        answer_requests(log, length - len(list(log.lines())))
    return list(log.lines())


def text(name):
    lines = rebuild(*FILES[name])
    assert len(lines) == FILES[name][2], (name, len(lines))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in FILES:
        (SAMPLES / name).write_text(text(name), encoding="utf-8")
