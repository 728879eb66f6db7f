"""Make the models of the features, each exact in any batch, and the processes that serve them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
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
from support.families.chat_templates import family

ROOT = Path(__file__).resolve().parents[3]
_HEADS = 3  # that guess
_WORDS = 120  # of reasoning and of arguments
Argv = tuple[str, ...]


class Models:
    """Write the models into a folder, each when it is first asked for."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._text = markov.save(folder / TEXT, sentences=True)
        self._script = markov.save_script(folder / SCRIPT, family("qwen3"), _script())
        self._eyes = ROOT / "models" / "pocket-chat"

    def tokenizer(self) -> Argv:
        """Return the command line of the tokenizer of all language models."""
        paths = {TEXT: self._text, SCRIPT: self._script, EYES: self._eyes}
        paths |= dict.fromkeys((LONG, SPLIT, *SPECULATIVE), self._text)
        models = [part for name, path in paths.items() for part in ("--model", f"{name}={path}")]
        return ("motet_tokenizer", *models)

    def processes(self, model: str) -> list[tuple[str, Argv]]:
        """Return (role, command line) of the processes that serve a model."""
        makers: dict[str, Callable[[], list[tuple[str, Argv]]]] = {
            TEXT: self._of_text,
            SCRIPT: lambda: [("decode", _decode(SCRIPT, self._script))],
            EYES: self._of_eyes,
            LONG: self._of_long,
            SPLIT: self._of_split,
            EARS: self._of_ears,
            STREAM_EARS: self._of_stream_ears,
            VOICE: self._of_voice,
            BRUSH: self._of_brush,
            **{kind: partial(self._of_drafts, kind) for kind in SPECULATIVE},
        }
        return makers[model]()

    def _of_text(self) -> list[tuple[str, Argv]]:
        adapter = ("--adapters", f"{ADAPTER}={_adapter(self._text, self._folder / ADAPTER)}")
        return [("decode", (*_decode(TEXT, self._text), *adapter))]

    def _of_eyes(self) -> list[tuple[str, Argv]]:
        flags = ("--model", str(self._eyes), "--name", EYES, "--threads", "1")
        decode = (*_decode(EYES, self._eyes), "--deterministic")
        return [("decode", decode), ("encoder", ("motet_encoder", *flags))]

    def _of_long(self) -> list[tuple[str, Argv]]:
        pool = ("--context", "4096", "--num-blocks", "80", "--host-cache", str(64 << 20))
        return [("decode", (*_decode(LONG, self._text), "--long-context", *pool))]

    def _of_split(self) -> list[tuple[str, Argv]]:
        """Without a prefix cache: with one, a prompt that was asked before is computed nowhere."""
        argv = (*_decode(SPLIT, self._text), "--no-prefix-cache")
        prefill = (*argv, "--role", "prefill", "--token-budget", "64")
        return [("decode", (*argv, "--remote-prefill", "always")), ("prefill", prefill)]

    def _of_drafts(self, kind: str) -> list[tuple[str, Argv]]:
        source = kind
        if kind == "draft":
            source = str(self._text)
        elif kind != "ngram":
            write = _medusa if kind == "medusa" else _eagle
            source = str(write(self._text, self._folder / kind))
        return [("decode", (*_decode(kind, self._text), "--speculate", source))]

    # Makers of these models need torch, transformers and diffusers, which take seconds to import.
    def _of_ears(self) -> list[tuple[str, Argv]]:
        from support.checkpoints.asr_checkpoints import tiny_whisper

        argv = (*_asr(EARS, tiny_whisper(self._folder / EARS)), "--no-live")
        return [("vad", ("motet_vad",)), ("asr", argv)]

    def _of_stream_ears(self) -> list[tuple[str, Argv]]:
        from support.checkpoints.recognizers import tiny_nemotron

        return [("asr", _asr(STREAM_EARS, tiny_nemotron(self._folder / STREAM_EARS)))]

    def _of_voice(self) -> list[tuple[str, Argv]]:
        """One sentence at a time: what is computed together is rounded together."""
        from support.checkpoints.tts_checkpoints import pocket_tts

        path = pocket_tts(self._folder / VOICE, threshold=1.0)
        exact = ("--greedy", "--max-running", "1", "--threads", "1")
        small = ("--first-chunk", "0.002", "--chunk", "0.01")
        return [("tts", ("motet_tts", "--model", str(path), "--name", VOICE, *exact, *small))]

    def _of_brush(self) -> list[tuple[str, Argv]]:
        from support.checkpoints.diffusion_checkpoints import stable_diffusion

        path = stable_diffusion(self._folder / BRUSH)
        flags = ("--name", BRUSH, "--threads", "1", "--max-steps", "2000")
        return [("diffusion", ("motet_diffusion", "--model", str(path), *flags))]


def _decode(name: str, path: Path) -> Argv:
    return ("motet_llm", "--model", str(path), "--name", name, "--threads", "1")


def _asr(name: str, path: Path) -> Argv:
    return ("motet_asr", "--model", str(path), "--name", name, "--no-fallback", "--threads", "1")


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
    """Write an adapter of the down projections, which changes what tokens follow each other."""
    path.mkdir()
    sizes, random, rank = _sizes(text), np.random.default_rng(6), 4
    tensors = {}
    for layer in range(sizes["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        inner, width = sizes["intermediate_size"], sizes["hidden_size"]
        tensors[f"{name}.lora_A.weight"] = random.normal(0, 1.0, (rank, inner))
        tensors[f"{name}.lora_B.weight"] = random.normal(0, 1.0, (width, rank))
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
