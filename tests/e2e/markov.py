"""A checkpoint whose output is exact, whatever the batch: a Markov chain in the shape of a Llama.

Token embeddings are one-hot and all that attention and MLP add is multiplied by zero, so the logits are a row of a
table, without any rounding that could depend on who else is in the batch. Sampled text is then a function of seed,
position and last token alone: a token that is lost, repeated or changed changes everything after it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from support.families.chat_templates import Family  # transformers takes seconds to import

CONTEXT = 32_768
_END = "<end>"
_LAYERS, _HEADS = 2, 4
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
_NEVER = -1e4


def save(folder: Path, *, sentences: bool = False) -> Path:
    """Writes the checkpoint into `folder`, which is also its result. `sentences`: of a few words, for voices."""
    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size = tokenizer.get_vocab_size()
    ids = tokenizer.get_vocab()
    width = -(-size // 16) * 16  # head_dim must be even
    (folder / "config.json").write_text(json.dumps(_config(size, width, ids[_END])))
    head = _sentences(size, width, ids) if sentences else _transitions(size, width, ids)
    save_file(_weights(size, width, head), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_script(folder: Path, model: Family, pieces: Sequence[str]) -> Path:
    """Write a checkpoint with the tokenizer of `model` that answers every chat with these pieces.

    Returns the folder. Each piece is a token of its own, and each is there once; the reply ends after the last one.
    """
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    tokenizer.save_pretrained(folder)
    size, end = len(tokenizer), tokenizer.eos_token_id
    width = -(-size // 16) * 16
    (folder / "config.json").write_text(json.dumps(_config(size, width, end)))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    last = tokenizer.encode(prompt, add_special_tokens=False)[-1]
    said = [tokenizer.convert_tokens_to_ids(piece) for piece in pieces]
    head = np.full((size, width), _NEVER, np.float32)
    for before, after in pairwise([last, *said, end]):
        head[after, before] = 0.0
    save_file(_weights(size, width, head), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tokenizer() -> Tokenizer:
    """One token per byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    return tokenizer


def _config(size: int, width: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": width,
        "intermediate_size": 32,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": end,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _weights(size: int, width: int, head: np.ndarray) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def noise(*shape: int) -> np.ndarray:
        return random.normal(0, 0.02, shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": np.eye(size, width, dtype=np.float32),
        "model.norm.weight": np.ones(width, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}."
        for part in "qkv":
            weights[f"{name}self_attn.{part}_proj.weight"] = noise(width, width)
        weights[f"{name}self_attn.o_proj.weight"] = np.zeros((width, width), np.float32)
        for part in ("gate", "up"):
            weights[f"{name}mlp.{part}_proj.weight"] = noise(32, width)
        weights[f"{name}mlp.down_proj.weight"] = np.zeros((width, 32), np.float32)
        for part in ("input", "post_attention"):
            weights[f"{name}{part}_layernorm.weight"] = np.ones(width, np.float32)
    return weights


def _transitions(size: int, width: int, ids: dict[str, int]) -> np.ndarray:
    """`[next, last]`: words of letters, and now and then a character of two bytes, so of two tokens."""
    table = np.full((size, width), _NEVER, np.float32)
    letters = [ids[letter] for letter in "abcdefghijklmnopqrstuvwxyzĠ"]  # Ġ: the space
    first, second = ids["Ã"], ids["©"]  # é in UTF-8
    table[[*letters, first]] = np.random.default_rng(1).normal(0, 0.1, (len(letters) + 1, width))
    table[:, first] = _NEVER
    table[second, first] = 0.0
    return table


def _sentences(size: int, width: int, ids: dict[str, int]) -> np.ndarray:
    """`[next, last]`: words of letters; a full stop ends a line, and the next one begins with a capital."""
    table = np.full((size, width), _NEVER, np.float32)
    small = [ids[letter] for letter in "abcdefghijklmnopqrstuvwxyz"]
    space, stop, line, capitals = (
        ids["Ġ"],
        ids["."],
        ids["Ċ"],
        [ids[letter] for letter in "BCDEFGHJ"],
    )
    random = np.random.default_rng(1)
    table[small] = random.normal(0, 0.1, (len(small), width))
    table[space, small] = 0.18  # a word has about five letters
    table[stop, small] = 0.09
    table[:, [stop, line]] = _NEVER
    table[line, stop] = 0.0
    table[capitals, line] = 0.0
    return table
