"""Lone GGUF files of each architecture compute what transformers computes with their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_ARCHS

from motet_llm.engine.engine import Engine
from motet_llm.models.experts import PackedExperts
from motet_llm.weights.gguf.architectures import ARCHITECTURES, REFUSED
from motet_llm.weights.gguf.folder import make_folder
from motet_shared.errors import ConfigError
from support.checkpoints.gguf_architectures import KINDS, write
from support.checkpoints.gguf_files import finish
from support.checkpoints.quantized_checkpoints import PRECISE, PROMPT, answer, engine_of


def check(folder: Path, model: PreTrainedModel, bound: float = PRECISE) -> Engine:
    """Require transformers' greedy tokens in float32, with log-probabilities within `bound`."""
    engine = engine_of(folder, code_inputs="int16")
    ids, logprobs = answer(engine)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    due = logits.log_softmax(-1)
    assert ids == due.argmax(-1).tolist()
    chosen = due.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(logprobs), chosen, rtol=0, atol=bound)
    return engine


def formats(engine: Engine) -> set[str]:
    experts = [one for one in engine.runner.model.modules() if isinstance(one, PackedExperts)]
    return {str(linear.format) for one in experts for linear in (*one.gate_up, *one.down)}


def found_experts(name: str) -> set[str]:
    """Return the format that a file's experts are to be computed in."""
    if not any(part in name for part in ("moe", "experts", "gpt-oss", "minimax")):
        return set()
    return {"fp4:32"} if KINDS[name].experts == "MXFP4" else {"int4:32"}


NAMES = ["qwen3moe", *(name for name in KINDS if name != "qwen3moe")]


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", NAMES)
def test_it_computes_what_its_values_stand_for(name: str, tmp_path: Path) -> None:
    path, model = write(name, tmp_path / "file")
    # Five experts' rounded inputs per token add up, in three layers.
    bound = 2 * PRECISE if name == "qwen35moe" else PRECISE
    engine = check(make_folder(path, tmp_path / "made"), model, bound)
    assert formats(engine) == found_experts(name)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("name", ["gpt-oss", "gpt2", "qwen35moe", "stablelm"])
def test_it_computes_what_a_file_of_plain_numbers_has(name: str, tmp_path: Path) -> None:
    path, model = write(name, tmp_path / "file", plain=True)
    check(make_folder(path, tmp_path / "made"), model)


# ------------------------------------------------------------------------------------------ refused
def empty_file(folder: Path, architecture: str, **fields: Any) -> Path:
    """Write a file without tensors but a table of embeddings."""
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    sizes = {"block_count": 2, "embedding_length": 64, "context_length": 512}
    for key, value in (sizes | {"attention.head_count": 4} | fields).items():
        name = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((259, 64), np.float32))
    finish(writer)
    return folder / "model.gguf"


@pytest.mark.parametrize(
    ("architecture", "cause"),
    [
        ("t5", "encoder-decoder"),
        ("falcon", "attention function"),
        ("bloom", "attention function"),
        ("mamba", "no layer attends"),
        ("deci", "no class"),
        ("gemma4", "share keys"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_with_its_cause(
    architecture: str, cause: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.gguf.*{architecture}.*{cause}"):
        make_folder(empty_file(tmp_path / "file", architecture), tmp_path / "made")


def test_every_architecture_of_transformers_is_read_or_refused() -> None:
    """Under llama.cpp's names; umt5 is stored as t5, Mistral and Mixtral as llama."""
    theirs = {*GGUF_CONFIG_MAPPING, *GGUF_ARCHS} - {"general", "tokenizer"}
    ours = {name.replace("_", "").replace("-", "") for name in (*ARCHITECTURES, *REFUSED)}
    left = {name for name in theirs if name.replace("_", "").replace("-", "") not in ours}
    assert left == {"mistral", "umt5"}


@pytest.mark.parametrize("key", ["feed_forward_length", "attention.head_count"])
def test_sizes_that_differ_between_layers_are_named(key: str, tmp_path: Path) -> None:
    path = empty_file(tmp_path / "file", "qwen3", **{key: [4, 8]})
    with pytest.raises(ConfigError, match=rf"qwen3\.{key}"):
        make_folder(path, tmp_path / "made")


def test_halves_of_experts_of_two_types_are_named(tmp_path: Path) -> None:
    path, _ = write("qwen3moe", tmp_path / "file", up="Q8_0")
    folder = make_folder(path, tmp_path / "made")
    with pytest.raises(ConfigError, match=r"blk\.0\.ffn_gate_exps.*Q4_0.*ffn_up_exps.*Q8_0"):
        engine_of(folder)
