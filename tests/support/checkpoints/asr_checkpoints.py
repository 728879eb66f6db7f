"""Write tiny speech recognition checkpoints with random weights, and make sounds for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    ParakeetCTCConfig,
    ParakeetEncoderConfig,
    ParakeetFeatureExtractor,
    ParakeetForCTC,
    ParakeetTokenizer,
    PreTrainedTokenizerFast,
    Wav2Vec2FeatureExtractor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

RATE = 16_000
WINDOW = 2  # seconds that the tiny Whisper hears at a time
LANGUAGES = ("en", "de", "fr", "zh")
END, START = "<|endoftext|>", "<|startoftranscript|>"
TASKS = (
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
TIMES = tuple(f"<|{index * 0.02:.2f}|>" for index in range(WINDOW * 50 + 1))


def noise(seconds: float, seed: int = 0) -> Any:
    """Return noise of changing loudness, float32, a function of the seed."""
    generator = np.random.default_rng(seed)
    count = round(seconds * RATE)
    swell = np.abs(np.sin(np.arange(count) * 0.7 / 800))
    return (0.2 * generator.standard_normal(count) * swell).astype(np.float32)


def tiny_whisper(
    path: Path, *, seed: int = 0, languages: tuple[str, ...] = LANGUAGES, **generation: Any
) -> Path:
    """Write a Whisper checkpoint with windows of 2 s, 48 target positions and byte tokens.

    languages: none makes an English-only model.
    """
    codes = [f"<|{code}|>" for code in languages]
    tokenizer = _whisper_tokenizer([START, *codes, *TASKS])
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (END, START, *codes, *TASKS)}
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=80,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=WINDOW * 50,
        max_target_positions=48,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ids[END]),
        decoder_start_token_id=ids[START],
    )
    model = WhisperForConditionalGeneration(config)
    multilingual = {
        "lang_to_id": {code: ids[code] for code in codes},
        "task_to_id": {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
    }
    defaults = {
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ids[END]),
        "decoder_start_token_id": ids[START],
        "is_multilingual": bool(languages),
        **(multilingual if languages else {}),
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "alignment_heads": [[0, 1], [1, 0], [1, 3]],
        "max_initial_timestamp_index": 20,
        "suppress_tokens": [1, 2, *sorted(ids.values())[1:-1]],
        "begin_suppress_tokens": [32, ids[END]],
        "max_length": 48,
    }
    model.generation_config = GenerationConfig(**defaults | generation)
    _spread(model, seed)
    model.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=80, chunk_length=WINDOW).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _whisper_tokenizer(specials: list[str]) -> WhisperTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = WhisperTokenizer(
        vocab={letter: index for index, letter in enumerate(letters)},
        merges=[],
        **dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), END),
        extra_special_tokens=specials,
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TIMES])
    return tokenizer


def tiny_moonshine(path: Path, *, seed: int = 0) -> Path:
    config = MoonshineConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = _spread(MoonshineForConditionalGeneration(config), seed)
    model.save_pretrained(path)
    Wav2Vec2FeatureExtractor(
        feature_size=1, sampling_rate=RATE, do_normalize=False
    ).save_pretrained(path)
    _letters(path, PreTrainedTokenizerFast, ["<unk>", "<s>", "</s>"])
    return path


def tiny_parakeet(path: Path, *, seed: int = 0) -> Path:
    encoder = ParakeetEncoderConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        subsampling_conv_channels=8,
        num_mel_bins=80,
        max_position_embeddings=512,
    )
    config = ParakeetCTCConfig(vocab_size=64, pad_token_id=63, encoder_config=encoder)
    _spread(ParakeetForCTC(config), seed).save_pretrained(path)
    ParakeetFeatureExtractor().save_pretrained(path)
    _letters(path, ParakeetTokenizer, ["<unk>"], blank="<pad>")
    return path


def _letters(path: Path, kind: Any, specials: list[str], blank: str | None = None) -> None:
    """Return a tokenizer of 64 entries: special tokens, the space and one-letter segments."""
    segments = [
        *specials,
        "▁",
        *(chr(code) for code in range(0x61, 0x7B)),
        *(f"▁{chr(code)}" for code in range(0x61, 0x7B)),
    ]
    segments += [f"<{index}>" for index in range(64 - len(segments) - (blank is not None))] + (
        [blank] if blank else []
    )
    tokenizer = Tokenizer(
        models.BPE(
            vocab={segment: index for index, segment in enumerate(segments)},
            merges=[],
            unk_token="<unk>",
        )
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    names = {"unk_token": "<unk>"} | (
        {"pad_token": blank} if blank else {"bos_token": "<s>", "eos_token": "</s>"}
    )
    kind(tokenizer_object=tokenizer, **names).save_pretrained(path)


def _spread(model: Any, seed: int) -> Any:
    """Spread weights so that answers vary.

    Embeddings stay small, since a tied head would repeat large ones.
    """
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "encoder.embed_positions" not in name:
                parameter.normal_(std=0.1 if "embed_tokens" in name else 0.4)
        if hasattr(model, "proj_out"):
            model.proj_out.weight[model.generation_config.eos_token_id] *= (
                2  # so that some answers end
            )
    return model.eval()


def write_wav(path: Path, sound: Any, rate: int = RATE) -> Path:
    path.write_bytes(wav(sound, rate))
    return path


def wav(sound: Any, rate: int = RATE) -> bytes:
    """Encode a float32 sound as 16-bit PCM."""
    from motet_media.audio import wav_header

    pcm = (np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes()
    return wav_header(rate, len(pcm)) + pcm


def settings(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found
