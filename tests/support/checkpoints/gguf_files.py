"""Write GGUF files of tiny checkpoints as llama.cpp's converter does.

The converter is not a package; llama.cpp's `convert_hf_to_gguf.py` and the `gguf` package document
its output, and the package's writer and quantizers are used here. No code is shared with the
loader.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

TYPES: Any = gguf.GGMLQuantizationType
NORMAL, CONTROL = 1, 3  # types of tokens


def write_vocabulary(writer: gguf.GGUFWriter, folder: Path, pre: str = "qwen2") -> None:
    """Write the byte-level vocabulary of a checkpoint folder and its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.convert_tokens_to_ids)
    added = tokenizer.get_added_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in added else NORMAL for token in tokens])
    merges = json.loads((folder / "tokenizer.json").read_text())["model"].get("merges", [])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    )
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)


def write_sizes(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """Write the metadata that all decoders have."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    if (inner := getattr(config, "intermediate_size", None)) is not None:
        writer.add_feed_forward_length(inner)
    if (dim := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if (eps := getattr(config, "rms_norm_eps", None)) is not None:
        writer.add_layer_norm_rms_eps(eps)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_plain(writer: gguf.GGUFWriter, tensors: Sequence[tuple[str, np.ndarray]]) -> None:
    for name, values in tensors:
        writer.add_tensor(name, np.ascontiguousarray(values))


QWEN3_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def _theirs(name: str) -> str:
    module, _, end = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{QWEN3_NAMES[module]}.{end}"
    number, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{QWEN3_NAMES[part]}.{end}"


def write_qwen3(source: Path, path: Path, *, kind: str = "", **sampling: float) -> Path:
    """Write a Qwen3 checkpoint folder as one file.

    kind: type of the layers' matrices, if they are to be quantized; `source` then has the values
    that they stand for. sampling: what the file recommends.
    """
    writer = gguf.GGUFWriter(path, "qwen3")
    config = AutoConfig.from_pretrained(source)
    write_sizes(writer, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    write_vocabulary(writer, source)
    for key, value in sampling.items():
        writer.add_float32(f"general.sampling.{key}", value)
    tensors, values = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if kind and name.endswith("_proj.weight")]:
        form = TYPES[kind]
        codes = quants.quantize(tensors.pop(name).numpy(), form)
        writer.add_tensor(_theirs(name), codes, raw_dtype=form)
        values[name] = torch.from_numpy(quants.dequantize(codes, form))
    add_plain(writer, [(_theirs(name), tensor.numpy()) for name, tensor in tensors.items()])
    finish(writer)
    if kind:
        save_file(tensors | values, source / "model.safetensors", {"format": "pt"})
    return path
