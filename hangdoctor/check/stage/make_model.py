"""Write a tiny random DeepseekV2 in three safetensors shards; runs in the SGLang environment.

python make_model.py DIRECTORY [large]

The large one has 300 MB in shards of 48 MB: above 32 MB an allocation is the kernel's own, as with
real shards, so that a shard that is read whole can be seen to come.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")
VOCAB_SIZE = 320


def main(directory: Path, *, large: bool) -> None:
    config, ids = describe(directory, large=large)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(directory), torch_dtype=torch.float32
    )
    model.save_pretrained(directory, max_shard_size="48MB" if large else "500KB")
    # save_pretrained rewrites the config its own way; SGLang gets the one above.
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", ids)


def describe(directory: Path, *, large: bool = False) -> tuple[dict, dict]:
    """Write config and tokenizer, without weights; return the config and the special tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(directory)
    ids = {"bos_token_id": vocabulary["<|bos|>"], "eos_token_id": vocabulary["<|eos|>"]}
    config = ids | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "torch_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 16 if large else 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 5632 if large else 32,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
    }
    _write(directory / "config.json", config)
    return config, ids


def _write_tokenizer(directory: Path) -> dict[str, int]:
    """Write a byte-level tokenizer without merges: 256 bytes and the special tokens."""
    tokens = (*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
            "pad_token": "<|pad|>",
            "model_max_length": 2048,
        },
    )
    return vocabulary


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), large="large" in sys.argv[2:])
