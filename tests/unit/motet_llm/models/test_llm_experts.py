"""Experts in codes and in 16 bits compute what transformers computes with the same weights."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from motet_llm.models.experts import PackedExperts, pack_experts
from motet_llm.weights.packer import Packer
from motet_shared.errors import ConfigError
from support.checkpoints import experts_checkpoints as made
from support.checkpoints.quantized_checkpoints import PROMPT, answer, engine_of, set_config


def check(coded: Path, dense: Path, bound: float, **settings: str) -> list[PackedExperts]:
    """Require the log-probabilities of transformers in float32; return the packed experts."""
    engine = engine_of(coded, **settings)
    ids, logprobs = answer(engine)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    due = logits.log_softmax(-1)
    chosen = due.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    assert float((due.amax(-1) - chosen).max()) <= bound
    torch.testing.assert_close(torch.tensor(logprobs), chosen, rtol=0, atol=bound)
    return [one for one in engine.runner.model.modules() if isinstance(one, PackedExperts)]


def formats(experts: list[PackedExperts]) -> set[str]:
    return {str(linear.format) for one in experts for linear in (*one.gate_up, *one.down)}


def test_float8_in_blocks(tmp_path: Path) -> None:
    experts = check(*made.float8_experts(tmp_path), 1e-3)
    assert len(experts) == 2
    assert formats(experts) == {"float8:128"}


STRUCTURES = [
    ("mixtral", made.MIXTRAL, "gptq", "int4:32"),
    ("mixtral", made.MIXTRAL, "int4", "int4:32"),
    ("qwen2_moe", made.QWEN2_MOE, "awq", "int4:32"),
    ("deepseek_v3", made.DEEPSEEK, "fp8", "float8:128"),
    ("granitemoe", made.GRANITE_MOE, "fp8", "float8:128"),
    ("granitemoe", made.GRANITE_MOE, "int8", "int8:128"),
    ("granitemoe", made.GRANITE_MOE, "gptq", "int4:32"),
    ("nemotron_h", made.NEMOTRON_H, "gptq", "int4:32"),
]


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("name", "config", "method", "form"), STRUCTURES, ids=[f"{s[0]}, {s[2]}" for s in STRUCTURES]
)
def test_published_structures(
    name: str, config: object, method: str, form: str, tmp_path: Path
) -> None:
    coded, dense = made.quantized(tmp_path, config, method)
    experts = check(coded, dense, 1e-3, code_inputs="int16")
    assert experts
    assert formats(experts) == {form}


def test_a_tensor_of_all_experts_as_transformers_saves_it(tmp_path: Path) -> None:
    coded, dense = made.quantized(tmp_path, made.GRANITE_MOE, "fp8")
    path = coded / "model.safetensors"
    stem = r"block_sparse_moe\.(input|output)_linear\.weight"
    names = {"input": "experts.gate_up_proj", "output": "experts.down_proj"}
    tensors = {
        re.sub(stem, lambda match: f"block_sparse_moe.{names[match[1]]}", name): tensor
        for name, tensor in load_file(path).items()
    }
    assert "model.layers.0.block_sparse_moe.experts.gate_up_proj_scale_inv" in tensors
    save_file(tensors, path, {"format": "pt"})
    assert formats(check(coded, dense, 1e-3)) == {"float8:128"}


def test_gate_and_up_in_turns_are_not_joined(tmp_path: Path) -> None:
    """gpt-oss by expert: its rows would have to alternate."""
    folder = made.plain(tmp_path, made.GPT_OSS)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts"
    both = tensors.pop(f"{name}.gate_up_proj")[0].T.contiguous().view(2, -1, 128)
    for part, half in zip(("gate_proj", "up_proj"), both, strict=True):
        codes, _ = made.METHODS["fp8"][0](half)
        tensors |= {f"{name}.0.{part}.{end}": code for end, code in codes.items()}
    save_file(tensors, path, {"format": "pt"})
    set_config(folder, quantization_config=made.METHODS["fp8"][1])
    with pytest.raises(ConfigError, match="in turns"):
        engine_of(folder)


@pytest.mark.parametrize(("inputs", "bound"), [("int8", 0.06), ("int16", 1e-3)])
def test_mxfp4(inputs: str, bound: float, tmp_path: Path) -> None:
    experts = check(*made.mxfp4_experts(tmp_path), bound, code_inputs=inputs)
    assert len(experts) == 2
    assert formats(experts) == {"fp4:32"}


@pytest.mark.parametrize(("form", "bound"), [("bfloat16", 0.05), ("int8", 0.1)])
@pytest.mark.parametrize("config", [made.QWEN3_MOE, made.GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
def test_formats_of_weights(config: object, form: str, bound: float, tmp_path: Path) -> None:
    folder = made.plain(tmp_path, config, torch.bfloat16)
    assert formats(check(folder, folder, bound, weights=form)) == {form}


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_packed_experts_compute_with_their_weights(form: str) -> None:
    torch.manual_seed(0)
    config = copy.deepcopy(made.QWEN3_MOE)
    config._experts_implementation = "eager"  # others leave rows without an expert undefined
    original = Qwen3MoeExperts(config).requires_grad_(False)
    for parameter in original.parameters():
        parameter.normal_(std=0.1)
    packed = pack_experts("experts", copy.deepcopy(original), Packer(form, torch.device("cpu")))
    assert isinstance(packed, PackedExperts)
    for name, linears in (("gate_up_proj", packed.gate_up), ("down_proj", packed.down)):
        stack = torch.stack([linear.weight() for linear in linears])  # type: ignore[operator]
        getattr(original, name).copy_(stack)
    hidden, index = torch.randn(3, 7, 128), torch.randint(0, 5, (21, 2))  # 4: no expert
    weights = torch.rand(21, 2)
    due = original(hidden.view(-1, 128), index, weights)
    found = packed(hidden, index, weights).view(-1, 128)
    assert (
        float((found - due).norm() / due.norm()) < 0.04
    )  # inputs of both products are rounded to 8 bits


def test_experts_of_16_bits_stay_so(tmp_path: Path) -> None:
    folder = made.plain(tmp_path, made.QWEN3_MOE, torch.bfloat16)
    engine = engine_of(folder)
    experts = [one for one in engine.runner.model.modules() if isinstance(one, PackedExperts)]
    assert formats(experts) == {"bfloat16"}


def test_tensors_of_experts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    coded, _ = made.mxfp4_experts(tmp_path)
    path, name = coded / "model.safetensors", "model.layers.1.mlp.experts.down_proj_scales"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name][:, :5].clone()}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=name):
        engine_of(coded)
