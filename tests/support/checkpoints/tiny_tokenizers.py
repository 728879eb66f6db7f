"""Build small tokenizers of each family, as a checkpoint folder without weights has them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from motet_tokenizer.encoding.vocabulary import Vocabulary

CORPUS = [
    "The red circle is left of the blue square, and 3 small stars are above it.",
    'draw {"name": "draw", "arguments": {"shape": "circle", "colour": "red"}}\n',
    "Grüße aus Zürich, 日本語のテキスト, 👩‍🚀 and 🏳️‍🌈, naïve café.",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2  # <|im_end|>
CONTEXT = 512

CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'forbidden' %}{{ raise_exception('no such role here') }}{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@functools.cache
def byte_level() -> Tokenizer:
    """Return byte-level BPE as in GPT-2, Llama 3 and Qwen, with the tool tags as tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tags = [
        "<tool_call>",
        "</tool_call>",
        "日 x",
    ]  # the last one holds characters that spell no byte
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return tokenizer


@functools.cache
def sentencepiece(strip: bool = True) -> Tokenizer:
    """Return SentencePiece BPE with byte fallback, as in Llama 2 (`strip`) and Gemma."""
    vocab = {token: i for i, token in enumerate(SPECIALS)}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    words = [
        "▁",
        "▁▁",
        "▁the",
        "▁red",
        "▁circle",
        "ir",
        "cle",
        "▁日",
        "é",
        "▁left",
        "s",
        ".",
        "\n",
        "▁of▁",
    ]
    for token in [*words, *"abcdefghijklmnopqrstuvwxyz"]:
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """Return a tokenizer whose decoder treats the first token differently, so that no table can."""
    vocab = {
        token: i
        for i, token in enumerate(
            [*SPECIALS, "<unk>", *"▁abcdefghijklmnopqrstuvwxyz", "▁the", "▁red"]
        )
    }
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that exists."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return int(found)


def wrapped(tokenizer: Tokenizer, template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer as transformers does."""
    copy = Tokenizer.from_str(tokenizer.to_str())  # wrapping changes settings
    fast = PreTrainedTokenizerFast(
        tokenizer_object=copy, eos_token=SPECIALS[EOS], pad_token=SPECIALS[0]
    )
    fast.chat_template = template
    return fast


def vocabulary(
    tokenizer: Tokenizer | None = None, name: str = "tiny", template: str | None = CHATML
) -> Vocabulary:
    """Return a loaded vocabulary without a folder."""
    config = {"max_position_embeddings": CONTEXT, "eos_token_id": EOS}
    return Vocabulary(name, wrapped(tokenizer or byte_level(), template), config, {})


def write_folder(path: Path, **config: Any) -> Path:
    """Write a checkpoint folder without weights."""
    wrapped(byte_level()).save_pretrained(path)
    settings = {"max_position_embeddings": CONTEXT, "eos_token_id": EOS, **config}
    (path / "config.json").write_text(json.dumps(settings))
    return path
