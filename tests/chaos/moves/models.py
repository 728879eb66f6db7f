"""Make the models of the features, each exact in any batch, and the processes that serve them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from chaos.moves.features import (
    ADAPTER,
    BRUSH,
    EARS,
    EYES,
    LONG,
    SCRIPT,
    SPECULATIVE,
    SPLIT,
    STREAM_EARS,
    TEXT,
    VOICE,
)
from e2e import markov
from support.checkpoints import tts_checkpoints
from support.checkpoints.asr_checkpoints import tiny_whisper
from support.checkpoints.diffusion_checkpoints import stable_diffusion
from support.checkpoints.recognizers import tiny_nemotron
from support.families.chat_templates import family

ROOT = Path(__file__).resolve().parents[3]
_HEADS = 3  # that guess
_WORDS = 120  # of reasoning and of arguments
Argv = tuple[str, ...]


def made(folder: Path) -> dict[str, list[tuple[str, Argv]]]:
    """Write the models into `folder`; return (role, command line) of their processes by model."""
    text = markov.save(folder / TEXT, sentences=True)
    script = markov.save_script(folder / SCRIPT, family("qwen3"), _script())
    eyes = ROOT / "models" / "pocket-chat"
    drafts = {
        "ngram": "ngram",
        "draft": str(text),
        "medusa": str(_medusa(text, folder / "heads")),
        "eagle": str(_eagle(text, folder / "layer")),
    }
    paths = {TEXT: text, SCRIPT: script, EYES: eyes, LONG: text, SPLIT: text}
    paths |= dict.fromkeys(SPECULATIVE, text)
    tokenizer = [part for name, path in paths.items() for part in ("--model", f"{name}={path}")]
    plain, deterministic = _decode(TEXT, text), ("--deterministic",)
    pool = (
        "--long-context",
        "--context",
        "4096",
        "--num-blocks",
        "80",
        "--host-cache",
        str(64 << 20),
    )
    elsewhere = ("--remote-prefill", "always")
    found: dict[str, list[tuple[str, Argv]]] = {
        "": [("tokenizer", ("motet_tokenizer", *tokenizer))],
        TEXT: [("decode", (*plain, "--adapters", f"{ADAPTER}={_adapter(text, folder / ADAPTER)}"))],
        SCRIPT: [("decode", _decode(SCRIPT, script))],
        EYES: [
            ("decode", (*_decode(EYES, eyes), *deterministic)),
            ("encoder", ("motet_encoder", "--model", str(eyes), "--name", EYES, "--threads", "1")),
        ],
        LONG: [("decode", (*_decode(LONG, text), *pool))],
        SPLIT: [
            ("decode", (*_decode(SPLIT, text), *elsewhere)),
            ("prefill", (*_decode(SPLIT, text), "--role", "prefill", "--token-budget", "64")),
        ],
        EARS: [("vad", ("motet_vad",)), ("asr", _asr(EARS, tiny_whisper(folder / EARS)))],
        STREAM_EARS: [("asr", _asr(STREAM_EARS, tiny_nemotron(folder / STREAM_EARS)))],
        VOICE: [("tts", _tts(tts_checkpoints.pocket_tts(folder / VOICE, threshold=1.0)))],
        BRUSH: [("diffusion", _brush(stable_diffusion(folder / BRUSH)))],
    }
    for kind, drafted in drafts.items():
        found[kind] = [("decode", (*_decode(kind, text), "--speculate", drafted))]
    return found


def _decode(name: str, path: Path) -> Argv:
    return ("motet_llm", "--model", str(path), "--name", name, "--threads", "1")


def _asr(name: str, path: Path) -> Argv:
    argv = ("motet_asr", "--model", str(path), "--name", name, "--no-fallback", "--threads", "1")
    return (*argv, "--no-live") if name == EARS else argv


def _tts(path: Path) -> Argv:
    """One sentence at a time: what is computed together is rounded together."""
    exact = ("--greedy", "--max-running", "1", "--threads", "1")
    small = ("--first-chunk", "0.002", "--chunk", "0.01")
    return ("motet_tts", "--model", str(path), "--name", VOICE, *exact, *small)


def _brush(path: Path) -> Argv:
    flags = ("--name", BRUSH, "--threads", "1", "--max-steps", "2000")
    return ("motet_diffusion", "--model", str(path), *flags)


def _script() -> list[str]:
    """A thought of many words, then a call whose argument has many words, each a token of its own."""
    thought = [f"because{number} " for number in range(_WORDS)]
    shape = [f"star{number} " for number in range(_WORDS)]
    call = ['{"name": "draw", "arguments": {"shape": "', *shape, '"}}']
    return ["<think>", *thought, "</think>", "<tool_call>", *call, "</tool_call>"]


def _sizes(text: Path) -> dict[str, Any]:
    return dict(json.loads((text / "config.json").read_text()))


def _medusa(text: Path, path: Path) -> Path:
    """Write heads of random weights: most of what they guess is wrong."""
    path.mkdir()
    sizes, random = _sizes(text), np.random.default_rng(4)
    width, vocab = sizes["hidden_size"], sizes["vocab_size"]
    tensors = {}
    for number in range(_HEADS):
        tensors[f"{number}.0.linear.weight"] = random.normal(0, 0.2, (width, width))
        tensors[f"{number}.0.linear.bias"] = random.normal(0, 0.1, width)
        tensors[f"{number}.1.weight"] = random.normal(0, 0.3, (vocab, width))
    _save(tensors, path / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": _HEADS, "medusa_num_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def _eagle(text: Path, path: Path) -> Path:
    """Write a layer of the model's own shape with random weights."""
    path.mkdir()
    sizes, random = _sizes(text), np.random.default_rng(5)
    own, width = load_file(text / "model.safetensors"), sizes["hidden_size"]
    tensors = {
        name.removeprefix("model."): random.normal(0, 0.1, value.shape)
        for name, value in own.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    tensors["layers.0.post_attention_layernorm.weight"] = np.ones(width)
    tensors["fc.weight"] = random.normal(0, 0.1, (width, 2 * width))
    tensors["fc.bias"] = np.zeros(width)
    tensors["embed_tokens.weight"] = np.zeros((sizes["vocab_size"], width))
    _save(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**sizes, "num_hidden_layers": 1}))
    return path


def _adapter(text: Path, path: Path) -> Path:
    """Write an adapter that changes which token follows which: of the last layer's down projection."""
    path.mkdir()
    sizes, random, rank = _sizes(text), np.random.default_rng(6), 4
    layer = sizes["num_hidden_layers"] - 1
    name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
    tensors = {
        f"{name}.lora_A.weight": random.normal(0, 1.0, (rank, sizes["intermediate_size"])),
        f"{name}.lora_B.weight": random.normal(0, 1.0, (sizes["hidden_size"], rank)),
    }
    _save(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["down_proj"],
        "base_model_name_or_path": None,
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def _save(tensors: dict[str, Any], path: Path) -> None:
    arrays = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
    save_file(arrays, path, metadata={"format": "pt"})
