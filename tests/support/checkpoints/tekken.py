"""Write vocabularies in Mistral's format that know sound, as Voxtral's do."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

_NAMED = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    3: "[INST]",
    4: "[/INST]",
    5: "[AVAILABLE_TOOLS]",
    6: "[/AVAILABLE_TOOLS]",
    7: "[TOOL_RESULTS]",
    8: "[/TOOL_RESULTS]",
    9: "[TOOL_CALLS]",
    10: "[IMG]",
    11: "<pad>",
    12: "[IMG_BREAK]",
    13: "[IMG_END]",
    14: "[PREFIX]",
    15: "[MIDDLE]",
    16: "[SUFFIX]",
    17: "[SYSTEM_PROMPT]",
    18: "[/SYSTEM_PROMPT]",
    19: "[TOOL_CONTENT]",
    20: "[ARGS]",
    21: "[CALL_ID]",
    24: "[AUDIO]",
    25: "[BEGIN_AUDIO]",
    32: "[STREAMING_PAD]",
    33: "[STREAMING_WORD]",
    34: "[TRANSCRIBE]",
}
_SPECIALS = 40
_WORDS = (b" t", b" th", b" the", b"la", b"lan", b"lang", b"lang:")
AUDIO = 24
VOCABULARY = _SPECIALS + 256 + len(_WORDS)
MEL = {"num_mel_bins": 16, "hop_length": 160, "window_size": 400}
INSTRUCT = {"sampling_rate": 16000, "frame_rate": 12.5, "chunk_length_s": 30.0}
STREAMING = {
    "sampling_rate": 16000,
    "frame_rate": 12.5,
    "transcription_format": "streaming",
    "transcription_delay_ms": 480,
    "streaming_look_ahead_ms": 2.5,
    "streaming_look_back_ms": 52.5,
    "streaming_n_left_pad_tokens": 32,
}


def write_tekken_with_sound(folder: Path, audio: dict[str, Any], version: str) -> None:
    """Write a `tekken.json` of bytes and a few words, whose special tokens are at Mistral's places.

    audio: what it says of recordings.
    """
    tokens = [*(bytes([byte]) for byte in range(256)), *_WORDS]
    document = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+:?|\p{N}|[^\s\p{L}\p{N}]+|\s+",
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": VOCABULARY,
            "default_num_special_tokens": _SPECIALS,
            "version": version,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": _NAMED.get(rank, f"<SPECIAL_{rank}>"), "is_control": True}
            for rank in range(_SPECIALS)
        ],
        "audio": {**audio, "audio_encoding_config": MEL},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(document))
