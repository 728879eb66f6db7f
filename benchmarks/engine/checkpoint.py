"""Generate checkpoints with random weights, once into a cache folder, always the same for a seed."""

from __future__ import annotations

import argparse
import itertools
import json
import string
from pathlib import Path
from typing import Any

from benchmarks.support.cache import cache_folder, made

CHECKPOINT = ("shape", "threads")  # fields of a plan that `add_checkpoint` sets
SEED = 0
CHARS = 5  # of a word in `write_tokenizer`'s vocabulary: a space and four letters
END = "<end>"
COMMON: dict[str, Any] = {
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": None,
    "pad_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    # Qwen3-0.6B's config.json
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    # A tenth of it, which drafts for it
    "qwen3-0.06b": {
        "vocab_size": 151936,
        "hidden_size": 320,
        "intermediate_size": 960,
        "num_hidden_layers": 12,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 40960,
    },
    # Qwen3-8B's, for GPUs
    "qwen3-8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    # A tenth of the first, for benchmarks with many requests.
    "middle": {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    },
    # 326 MB in bfloat16: small, but the time to read it counts
    "small": {
        "vocab_size": 32000,
        "hidden_size": 896,
        "intermediate_size": 2432,
        "num_hidden_layers": 16,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    },
    # A tenth of "middle", which drafts for it
    "middle draft": {
        "vocab_size": 32000,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    },
    "tiny draft": {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
    },
}


def add_checkpoint(parser: argparse.ArgumentParser, shape: str) -> None:
    """Add the options of the random checkpoint and its threads.

    shape: the default, for the help.
    """
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help=f"shape of the random checkpoint (default: {shape})"
    )
    parser.add_argument("--threads", type=int, help="threads that compute (default: all cores)")
    cache = "folder for checkpoints (bench in MOTET_CACHE)"
    parser.add_argument("--cache", type=Path, default=cache_folder(), help=cache)


def random_checkpoint(name: str, cache: Path) -> Path:
    """Return the folder of the checkpoint SHAPES[name] in bfloat16, generated on the first call."""
    return made(cache / f"{name}-end-seed{SEED}", lambda folder: _write_qwen(folder, SHAPES[name]))


def _write_qwen(folder: Path, shape: dict[str, Any]) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        **{**COMMON, **shape}, eos_token_id=shape["vocab_size"] - 1, dtype="bfloat16"
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100GB")
    write_tokenizer(folder, shape["vocab_size"])


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of `vocab` entries: bytes, then words of CHARS characters with their space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = itertools.product(string.ascii_lowercase, repeat=CHARS - 1)
    pieces = [
        *alphabet,
        *("Ġ" + "".join(word) for word in itertools.islice(letters, vocab - len(alphabet) - 1)),
        END,
    ]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
