"""GGUF files compute what their blocks stand for, read by the gguf package's own decoders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from motet_kernels.linear.gguf_blocks import KINDS, read_blocks
from motet_llm.weights.coded_linear import checked
from motet_shared.errors import ConfigError
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.quantized_checkpoints import SIZES, answer, calmed, check, engine_of

TYPES: Any = gguf.GGMLQuantizationType
# Where a block's float16 are, and how large: codes and small scales may be anything, these not.
_HALVES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "MXFP4": (),
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
}
_SIZE = {
    "Q4_0": 0.013,
    "Q4_1": 0.006,
    "Q5_0": 0.006,
    "Q5_1": 0.003,
    "Q8_0": 0.0008,
    "IQ4_NL": 0.0008,
    "Q2_K": 0.004,
    "Q3_K": 0.0008,
    "Q4_K": 0.00018,
    "Q5_K": 0.00009,
    "Q6_K": 0.00013,
    "IQ4_XS": 0.00004,
}
_LAYER = {
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
}
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def blocks(kind: str, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Random rows of blocks, as bytes."""
    count, size = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, inputs // count, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        halves = (_SIZE[kind] * random.uniform(0.5, 1.5, (rows, inputs // count, 1))).astype(
            np.float16
        )
        data[:, :, at : at + 2] = halves.view(np.uint8)
    if kind == "MXFP4":  # exponents
        data[:, :, 0] = random.integers(118, 122, data.shape[:2])
    if kind == "Q6_K":
        data[:, :, 192:208] = random.integers(
            -40, 40, (rows, inputs // count, 16), dtype=np.int8
        ).view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_what_the_gguf_package_makes_of_them(kind: str) -> None:
    data = blocks(kind, 6, 512)
    read = read_blocks(kind, torch.from_numpy(data))
    found = checked("blocks", *read[:4], levels=read.levels).dense()
    torch.testing.assert_close(
        found, torch.from_numpy(dequantize(data, TYPES[kind])), rtol=1e-5, atol=1e-6
    )


def theirs(name: str) -> str:
    """A tensor's name in the file."""
    module, _, end = name.rpartition(".")
    if module.startswith("model.layers."):
        number, _, part = module.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{_LAYER[part]}.{end}"
    return f"{_OTHERS[module]}.{end}"


def rotated(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter lays the rows of Llama's queries and keys: halves of a head in turns."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(len(rows), -1)


def back(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, len(rows) // heads // 2, 2, -1).swapaxes(1, 2).reshape(len(rows), -1)


def make(folder: Path, family: str, kinds: dict[str, str], **sizes: Any) -> tuple[Path, Path]:
    """A folder with a GGUF file whose matrices have the type of the first ending in `kinds`, and what it stands for."""
    plain = tiny_checkpoint(family, folder / "plain", **{**SIZES, **sizes})
    tensors = calmed(load_file(plain / "model.safetensors"))
    coded = folder / "coded"
    shutil.copytree(plain, coded, ignore=shutil.ignore_patterns("*.safetensors"))
    writer = gguf.GGUFWriter(
        coded / "model.gguf", "llama" if family in ("llama", "mistral") else family
    )
    writer.add_block_count(2)
    writer.add_embedding_length(256)
    writer.add_head_count(4)
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        module = name.removesuffix(".weight")
        heads = (
            {"q_proj": 4, "k_proj": 2}.get(module.rpartition(".")[2])
            if family in ("llama", "mistral")
            else None
        )
        kind = next((kind for end, kind in kinds.items() if module.endswith(end)), None)
        if kind is None:
            data = tensor.numpy()
            writer.add_tensor(theirs(name), data if heads is None else rotated(data, heads))
            continue
        data = blocks(kind, len(tensor), tensor.shape[1], seed)
        writer.add_tensor(theirs(name), data, raw_dtype=TYPES[kind])
        dense = dequantize(data, TYPES[kind])
        tensors[name] = torch.from_numpy(
            np.ascontiguousarray(dense if heads is None else back(dense, heads))
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    return coded, plain


MIXED = {
    "v_proj": "Q6_K",
    "1.mlp.down_proj": "Q6_K",
    "embed_tokens": "Q6_K",
    "_proj": "Q4_K",
    "lm_head": "Q6_K",
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_one_type(kind: str, family: str, tmp_path: Path) -> None:
    check(*make(tmp_path, family, {"_proj": kind}), "int4:32" if kind == "Q4_0" else "int8:32")


def test_the_usual_mixture_with_its_tied_table(tmp_path: Path) -> None:
    """Values are of another type than queries and keys, and are computed beside them."""
    coded, plain = make(tmp_path, "llama", MIXED)
    check(coded, plain, "int4:32 (9)")


MIXTURES = {
    "int4:16": {"v_proj": "Q4_K", "down_proj": "Q3_K", "_proj": "Q2_K", "embed_tokens": "Q2_K"},
    "int8:32": {"v_proj": "Q6_K", "down_proj": "Q6_K", "_proj": "Q5_K", "lm_head": "Q6_K"},
    "iq4:32": {"v_proj": "Q5_K", "o_proj": "IQ4_NL", "_proj": "IQ4_XS"},
    "fp4:32": {"v_proj": "Q5_1", "o_proj": "Q4_1", "_proj": "MXFP4"},
}


@pytest.mark.parametrize("form", MIXTURES)
def test_mixtures(form: str, tmp_path: Path) -> None:
    check(*make(tmp_path, "qwen3", MIXTURES[form]), form)


def test_layers_of_one_type_are_computed_together(tmp_path: Path) -> None:
    coded, _ = make(tmp_path, "qwen3", {"embed_tokens": "Q8_0", "_proj": "Q4_K"})
    engine = engine_of(coded)
    assert engine.runner.fused["layers"] == 2
    assert len(answer(engine)[0]) == 6


# ---------------------------------------------------------------------------------------------------------- bad input
def test_a_torn_file_is_named(tmp_path: Path) -> None:
    coded, _ = make(tmp_path, "qwen3", {"_proj": "Q4_0"})
    path = coded / "model.gguf"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        engine_of(coded)


def test_a_file_of_another_model_is_named(tmp_path: Path) -> None:
    coded, _ = make(tmp_path, "qwen3", {"_proj": "Q4_0"})
    other = tiny_checkpoint("llama", tmp_path / "llama", **SIZES)
    (other / "model.safetensors").unlink()
    shutil.copy(coded / "model.gguf", other)
    with pytest.raises(ConfigError, match=r"general\.architecture .*'qwen3'.*'llama'"):
        engine_of(other)


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    coded, _ = make(tmp_path, "qwen3", {})
    writer = gguf.GGUFWriter(coded / "model.gguf", "qwen3")
    count, size = gguf.GGML_QUANT_SIZES[TYPES.IQ2_XS]
    data = np.zeros((256, 256 // count * size), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", data, raw_dtype=TYPES.IQ2_XS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.weight .*IQ2_XS"):
        engine_of(coded)


def test_two_files_are_one_too_many(tmp_path: Path) -> None:
    coded, _ = make(tmp_path, "qwen3", {"_proj": "Q4_0"})
    shutil.copy(coded / "model.gguf", coded / "other.gguf")
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        engine_of(coded)
