"""Write checkpoints with older vocabulary formats: SentencePiece, or Mistral's tekken."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import sentencepiece

VOCAB = 320
_TEXT = "a red circle, a blue square and a green star. two circles  and  three stars.\n"
_WORDS = (b"th", b"the", b" t", b" th", b" the", b"in", b"ing")
_SPECIALS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>")


def write_sentencepiece(folder: Path) -> None:
    """Replace a folder's tokenizer by a `tokenizer.model` of VOCAB tokens, as Llama 2 has it."""
    corpus = folder / "corpus.txt"
    corpus.write_text(_TEXT * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=VOCAB,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    for name in ("corpus.txt", "tokenizer.vocab", "tokenizer.json"):
        (folder / name).unlink()
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tekken(folder: Path) -> None:
    """Replace a folder's tokenizer by a `tekken.json`: bytes, and a few words."""
    tokens = [*(bytes([byte]) for byte in range(256)), *_WORDS]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    specials = [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(_SPECIALS)
    ]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + len(specials),
        "default_num_special_tokens": len(specials),
        "version": "v3",
    }
    document = {"config": config, "vocab": vocabulary, "special_tokens": specials}
    (folder / "tekken.json").write_text(json.dumps(document))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
