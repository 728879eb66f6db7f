"""The LLM engine on a GPU, or in the interpreter: every kernel that a step takes, one after the other.

It says what the engine on the CPU says, with the same checkpoint in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.models.experts import GroupedExperts
from motet_shared.messages import Sampling
from support.checkpoints import experts_checkpoints
from support.families import language_families as families
from support.running.triton_modes import without_triton

PROMPTS = {"long": [(7 * i + 3) % 50 for i in range(13)], "short": [5, 6, 7]}


def engine_of(folder: Path, device: str, **settings: Any) -> Engine:
    sizes = {
        "num_blocks": 24,
        "block_size": 8,
        "max_running": 4,
        "token_budget": 12,
        "decode_slowdown": 0.0,
    }
    defaults = {"threads": 1, "dtype": "float32", "prefix_cache": False, **sizes}
    return Engine(EngineConfig(model=str(folder), device=device, **{**defaults, **settings}))


def answers(engine: Engine, tokens: int = 2) -> tuple[dict[str, list[int]], torch.Tensor]:
    """Tokens of two prompts at once, one in chunks, one drawn with filters, and log-probabilities of the first.

    The first has so many `tokens`, the second one more.
    """
    greedy = Sampling(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=0)
    drawn = Sampling(
        max_tokens=tokens + 1, temperature=0.8, top_k=20, top_p=0.9, seed=4, ignore_eos=True
    )
    for key, sampling in (("long", greedy), ("short", drawn)):
        engine.add(key, PROMPTS[key], sampling)
    ids: dict[str, list[int]] = {key: [] for key in PROMPTS}
    logprobs = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            ids[str(output.key)] += output.ids
            logprobs += [entry.logprob for entry in output.logprobs or []]
    engine.check_integrity()
    engine.close()
    return ids, torch.tensor(logprobs)


def on_cpu(folder: Path, **settings: Any) -> tuple[dict[str, list[int]], torch.Tensor]:
    with without_triton():
        return answers(engine_of(folder, "cpu", **settings))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen3ForCausalLM", {"weights": "int8"}),  # rounded in the same way on both
        ("Gemma2ForCausalLM", {}),  # a window, soft-capping
        ("DeepseekV3ForCausalLM", {}),  # multi-head latent attention, experts
        ("Qwen3NextForCausalLM", {}),  # recurrent layers
        ("Gemma2ForCausalLM", {"kv_dtype": "int8"}),
        ("DeepseekV3ForCausalLM", {"kv_dtype": "float8"}),
    ],
)
@pytest.mark.timeout(600)
def test_the_engine_says_what_it_says_on_the_cpu(
    device: torch.device, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    folder = families.write_checkpoint(name, tmp_path)
    due, due_logprobs = on_cpu(folder, **settings)
    engine = engine_of(folder, str(device), **settings)
    assert engine.runner.on_gpu
    assert engine.runner.describe()["kernels"] == "triton"
    said, logprobs = answers(engine)
    assert said == due
    torch.testing.assert_close(
        logprobs, due_logprobs, rtol=2e-2 if settings else 1e-3, atol=2e-2 if settings else 1e-3
    )


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        ("bfloat16", "int4"),
        pytest.param("bfloat16", "auto", marks=pytest.mark.extended("gpu")),
        pytest.param("bfloat16", "int8", marks=pytest.mark.extended("gpu")),
    ],
)
@pytest.mark.timeout(600)
def test_sixteen_bits_give_nearly_what_the_twins_give(
    device: torch.device, tmp_path: Path, dtype: str, weights: str
) -> None:
    folder = families.write_checkpoint("LlamaForCausalLM", tmp_path)
    settings = {"dtype": dtype, "weights": weights, "overlap": False}
    engine = engine_of(folder, str(device), **settings)
    assert engine.runner.fused["layers"] > 0
    assert engine.runner.kv.dtype == getattr(torch, dtype)
    _, logprobs = answers(engine, tokens=1)
    twins = engine_of(folder, str(device), **settings)
    with without_triton():
        _, due = answers(twins, tokens=1)
    torch.testing.assert_close(logprobs, due, rtol=0.05, atol=0.1)


@pytest.mark.timeout(600)
def test_adapters_say_what_they_say_on_the_cpu(device: torch.device, tmp_path: Path) -> None:
    lora_folders = pytest.importorskip("support.checkpoints.lora_folders", reason="peft is absent")
    folder = families.write_checkpoint("LlamaForCausalLM", tmp_path / "model")
    model = families.class_of("LlamaForCausalLM").from_pretrained(folder, dtype=torch.float32)
    given = (
        f"one={lora_folders.make_adapter(model, tmp_path / 'one', target_modules=['k_proj', 'o_proj', 'up_proj'])}",
    )

    def said(where: str) -> dict[str, list[int]]:
        engine = engine_of(folder, where, adapters=given)
        bank = engine.runner.adapters
        assert bank is not None
        for key, adapter in (("one", bank.load("one", 0)), ("free", None)):
            engine.add(
                key,
                PROMPTS["short"],
                Sampling(max_tokens=2, temperature=0, ignore_eos=True),
                adapter=adapter,
            )
        ids: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                ids.setdefault(str(output.key), []).extend(output.ids)
        engine.close()
        return ids

    with without_triton():
        due = said("cpu")
    assert said(str(device)) == due
    assert due["one"] != due["free"]


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
@pytest.mark.timeout(600)
def test_experts_in_codes_say_nearly_what_they_say_on_the_cpu(
    device: torch.device, tmp_path: Path, kind: str
) -> None:
    """Of a checkpoint of floats and of ones in codes: all experts of a layer in one launch."""
    settings = {"weights": kind} if kind == "int4" else {"code_inputs": "int16"}
    if kind == "mxfp4":
        folder, _ = experts_checkpoints.mxfp4_experts(tmp_path)
    else:
        folder = experts_checkpoints.plain(tmp_path / "plain", experts_checkpoints.QWEN3_MOE)
    _, due = on_cpu(folder, **settings)
    engine = engine_of(folder, str(device), **settings)
    grouped = [m for m in engine.runner.model.modules() if isinstance(m, GroupedExperts)]
    assert len(grouped) == 2
    _, logprobs = answers(engine)
    tolerance = 0.2 if kind == "int4" else 5e-3  # which rounds inputs on a CPU alone
    torch.testing.assert_close(logprobs, due, rtol=0, atol=tolerance)
