"""Build the tokenizer that a GGUF file describes, with its special tokens and chat template.

The vocabulary becomes a tokenizer by transformers' own rules (`transformers.integrations.gguf`).
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

from motet_shared.errors import ConfigError

from .header import Header

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_CONTROL = 3  # token_type
# Tokens that end a reply, besides the file's own end of text and of turn; llama.cpp goes by these
# spellings too.
_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|return|>",
        "<|call|>",
        "<EOT>",
        "_<EOT>",
        "<|end_of_text|>",
        "<end_of_utterance>",
    }
)


def build_tokenizer(header: Header) -> PreTrainedTokenizerFast:
    """Return the tokenizer. Raises ConfigError if the file has none, or one of an unknown kind."""
    stated = {
        name: header.fields[f"tokenizer.{key}"]
        for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in header.fields
    }
    if not isinstance(stated.get("tokens"), list):
        raise ConfigError(
            f"{header.path.name}: it has no vocabulary; put tokenizer.json beside it in a folder"
        )
    if stated.get("tokenizer_type") == "gpt2":
        stated.setdefault("merges", [])  # files leave empty lists out
    try:
        backend, _ = convert_gguf_tokenizer(header.architecture, stated)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{header.path.name}: no tokenizer can be made of its vocabulary: {error}; "
            "put the original model's tokenizer.json beside it in a folder"
        ) from error
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=header.need("context_length"),
        **_special(header, stated["tokens"]),
        **_added(header, stated),
    )
    tokenizer.chat_template = _templates(header)
    return tokenizer


def _special(header: Header, tokens: list[str]) -> dict[str, str]:
    """Return the file's special tokens by the names that transformers gives them."""
    found = {}
    for name, key in _SPECIAL.items():
        number = header.fields.get(f"tokenizer.ggml.{key}")
        if number is None:
            continue
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            raise ConfigError(
                f"{header.path.name}: tokenizer.ggml.{key}={number!r} is no token; convert it again"
            )
        found[name] = tokens[number]
    return found


def _added(header: Header, stated: dict[str, Any]) -> dict[str, bool]:
    """Return which tokens are put around a prompt that is no chat.

    llama.cpp puts one before the text of SentencePiece's vocabularies unless the file says no.
    """
    by_default = stated.get("tokenizer_type") == "llama"
    added = {"add_bos_token": header.fields.get("tokenizer.ggml.add_bos_token", by_default)}
    added["add_eos_token"] = header.fields.get("tokenizer.ggml.add_eos_token", False)
    if stated.get("tokenizer_type") == "gemma4":
        added["add_bos_token"] = False  # the chat template writes it
    return added


def _templates(header: Header) -> str | dict[str, str] | None:
    """Return the chat template; several are returned by name, the main one as "default"."""
    main = header.fields.get("tokenizer.chat_template")
    names = header.fields.get("tokenizer.chat_templates") or []
    named = {name: header.fields.get(f"tokenizer.chat_template.{name}") for name in names}
    found = {name: text for name, text in named.items() if isinstance(text, str)}
    if found and isinstance(main, str):
        return {"default": main, **found}
    return main if isinstance(main, str) else None


def end_ids(header: Header) -> list[int]:
    """Return the tokens that end a reply, ascending."""
    tokens = header.fields.get("tokenizer.ggml.tokens") or []
    kinds = header.fields.get("tokenizer.ggml.token_type") or []
    found = {
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _ENDS
    }
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    stated = (header.fields.get(f"tokenizer.ggml.{key}") for key in keys)
    return sorted(found | {number for number in stated if isinstance(number, int)})
