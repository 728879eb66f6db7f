"""Checkpoints in every published format, by their names on a hub: one stack loads each when it is asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from e2e import markov
from e2e.stack import WAIT_SECONDS, MotetStack
from motet_models.checkpoints import derived
from support.checkpoints import experts_checkpoints as experts
from support.checkpoints import gguf_files
from support.checkpoints import more_quantized_checkpoints as more
from support.checkpoints import quantized_checkpoints as made
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.families.chat_templates import family
from support.peers.model_hub import Repository, model_hub

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

TOKENS, PROMPTS = 4, 32
GGUF = "model-Q8_0.gguf"
# By name: the checkpoint as it is published, and a folder with its float32 values.
MADE = {
    "plain": lambda at: plain(at),
    "fp8": more.float8_blocks,
    "mxfp4": experts.mxfp4_experts,
    "nf4": lambda at: more.bnb_four_bits(at, "nf4", nested=True),
    "gptq": lambda at: made.gptq(at, symmetric=False, act=True),
    "gguf": lambda at: gguf_file(at),
}
SOURCES = {name: f"motet/{name}" for name in [*MADE, "dialect"]} | {"gguf": f"motet/gguf:{GGUF}"}
CONFIG = """
[settings]
asr = "none"
tts = "none"
vad = 0

[on_demand]
max_loaded = 2
keep_alive = "forever"

[roles.decode]
settings = { num_blocks = 64, code_inputs = "int16" }
"""
MODEL = """
[models.{name}]
source = "{source}"
load = "on demand"
"""
CALL = '\n{"name": "draw", "arguments": {"shape": "star"}}\n'
TOOL = {
    "type": "function",
    "function": {
        "name": "draw",
        "parameters": {"type": "object", "properties": {"shape": {"type": "string"}}},
    },
}


def plain(folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint in bfloat16, and one with the same values in float32."""
    wide, narrow = (tiny_checkpoint("qwen3", folder / kind, **made.SIZES) for kind in ("32", "16"))
    tensors = made.calmed(load_file(wide / "model.safetensors"))
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, narrow / "model.safetensors", {"format": "pt"})
    made.set_config(narrow, dtype="bfloat16")
    values = {name: tensor.float() for name, tensor in halves.items()}
    save_file(values, wide / "model.safetensors", {"format": "pt"})
    return narrow, wide


def gguf_file(folder: Path) -> tuple[Path, Path]:
    """Write a folder with one GGUF file, and a checkpoint with the values that it stands for."""
    dense = tiny_checkpoint("qwen3", folder / "dense", **made.SIZES)
    tensors = made.calmed(load_file(dense / "model.safetensors"))
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    (folder / "coded").mkdir()
    gguf_files.write_qwen3(dense, folder / "coded" / GGUF, kind="Q8_0")
    return folder / "coded", dense


@torch.inference_mode()
def clear_answer(folder: Path) -> tuple[list[int], list[int]]:
    """Return a prompt and its greedy tokens by transformers in float32.

    Of many prompts it is the one whose tokens lead most clearly, since rounded inputs may decide
    between equals.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[(7 * i + 13 * n) % 250 for i in range(20)] for n in range(PROMPTS)])
    length, lead = ids.shape[1], torch.full((PROMPTS,), torch.inf)
    for _ in range(TOKENS):
        best = model(ids).logits[:, -1].topk(2)
        lead = torch.minimum(lead, best.values[:, 0] - best.values[:, 1])
        ids = torch.cat((ids, best.indices[:, :1]), 1)
    chosen = ids[int(lead.argmax())].tolist()
    return chosen[:length], chosen[length:]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: make(folder / name) for name, make in MADE.items()}


@pytest.fixture(scope="module")
def stack(
    checkpoints: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MotetStack]:
    folder = tmp_path_factory.mktemp("formats")
    pieces = ("<think>", "Which shape?", "</think>", "<tool_call>", CALL, "</tool_call>")
    published = {name: coded for name, (coded, _) in checkpoints.items()}
    published["dialect"] = markov.save_script(folder / "dialect", family("qwen3"), pieces)
    repositories = {
        f"motet__{name}": Repository({path.name: path.read_bytes() for path in place.iterdir()})
        for name, place in published.items()
    }
    config = folder / "motet.toml"
    config.write_text(CONFIG + "".join(MODEL.format(name=n, source=s) for n, s in SOURCES.items()))
    with model_hub(**repositories) as hub:
        env = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder / "hub"),
            "HF_HUB_OFFLINE": "0",
        }
        with MotetStack(folder, "--config", str(config), env=env) as stack:
            yield stack
    for path in (folder / "hub").rglob(f"snapshots/*/{GGUF}"):
        shutil.rmtree(derived.GGUF.target(path), ignore_errors=True)


def post(stack: MotetStack, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{stack.url}{path}", json=body, timeout=2 * WAIT_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("name", MADE)
def test_a_format_gives_the_tokens_of_its_values(
    name: str, stack: MotetStack, checkpoints: dict[str, tuple[Path, Path]]
) -> None:
    prompt, due = clear_answer(checkpoints[name][1])
    found = post(
        stack,
        "/v1/completions",
        model=name,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    assert found["choices"][0]["token_ids"] == due
    assert found["usage"]["completion_tokens"] == TOKENS


def test_a_dialect_has_reasoning_and_calls(stack: MotetStack) -> None:
    messages = [{"role": "user", "content": "Draw a star."}]
    found = post(
        stack, "/v1/chat/completions", model="dialect", messages=messages, tools=[TOOL],
        temperature=0, max_tokens=20,
    )  # fmt: skip
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["reasoning_content"].strip() == "Which shape?"
    assert not message["content"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "draw"
    assert json.loads(call["function"]["arguments"]) == {"shape": "star"}
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


def test_the_models_are_listed_with_what_they_can(stack: MotetStack) -> None:
    listed = {
        model["id"]: model
        for model in httpx.get(f"{stack.url}/v1/models", timeout=WAIT_SECONDS).json()["data"]
    }
    assert listed.keys() >= SOURCES.keys()
    assert "tools" in listed["dialect"]["capabilities"]
    assert "tools" not in listed["gptq"]["capabilities"]
