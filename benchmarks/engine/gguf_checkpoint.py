"""Convert a random checkpoint of Qwen3's architecture to a GGUF file.

It needs only numpy and gguf, because it also runs in llama.cpp's environment.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert(folder: Path, target: Path, kind: str) -> None:
    """Write every matrix in `kind` ("BF16", "Q8_0", "Q4_0"), vectors in float32, and no vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "qwen3", use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, bits in bfloat16_tensors(folder / "model.safetensors"):
        add_tensor(writer, tensor_name(name), bits, gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_name(name: str) -> str:
    """Return the GGUF name of a tensor of transformers' Qwen3."""
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in names:
        return names[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{PARTS[part.removesuffix('.weight')]}.weight"


def bfloat16_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a safetensors file as the bits of their bfloat16 numbers."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    data = np.memmap(path, mode="r", offset=8 + length)
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, data[start:end].view(np.uint16).reshape(entry["shape"])


def add_tensor(
    writer: gguf.GGUFWriter, name: str, bits: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    if bits.ndim > 1 and kind is gguf.GGMLQuantizationType.BF16:
        writer.add_tensor(name, np.ascontiguousarray(bits).view(np.uint8), raw_dtype=kind)
        return
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    if bits.ndim > 1:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)
