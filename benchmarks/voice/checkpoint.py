"""Generate speech checkpoints with random weights, once into a cache folder, by seed."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

from benchmarks.support.cache import made

SEED = 0
END, START = "<|endoftext|>", "<|startoftranscript|>"
TASKS = (
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
# Sizes of Whisper's config.json, and seconds of a window.
WHISPERS: dict[str, dict[str, int]] = {
    "whisper-tiny": {
        "d_model": 384, "layers": 4, "heads": 6, "ffn": 1536, "text": 50257, "languages": 99, "window": 30,
        "positions": 448,
    },
    "whisper-least": {
        "d_model": 64, "layers": 2, "heads": 2, "ffn": 128, "text": 300, "languages": 4, "window": 4, "positions": 64,
    },
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- Whisper
def whisper_checkpoint(name: str, tokens: int, cache: Path) -> Path:
    """Return WHISPERS[name] in float32; it generates exactly `tokens` text tokens for any sound."""
    folder = made(cache / f"{name}-seed{SEED}", lambda path: _write_whisper(path, WHISPERS[name]))

    def limited(path: Path) -> None:
        path.mkdir()
        for file in folder.iterdir():
            if file.name != "generation_config.json":
                (path / file.name).symlink_to(file.resolve())
        settings = json.loads((folder / "generation_config.json").read_text())
        (path / "generation_config.json").write_text(json.dumps(settings | {"max_length": tokens}))

    return made(cache / f"{name}-seed{SEED}-{tokens}", limited)


def _write_whisper(path: Path, size: dict[str, int]) -> None:
    import torch
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    languages = ["en", *(f"l{index:02}" for index in range(1, size["languages"]))]
    specials = [START, *(f"<|{code}|>" for code in languages), *TASKS]
    times = [f"<|{index * 0.02:.2f}|>" for index in range(size["window"] * 50 + 1)]
    ids = {token: size["text"] + 1 + index for index, token in enumerate(specials)}
    end = size["text"]
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    config = WhisperConfig(
        vocab_size=end + 1 + len(specials) + len(times),
        num_mel_bins=80,
        d_model=size["d_model"],
        **dict.fromkeys(("encoder_layers", "decoder_layers"), size["layers"]),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), size["heads"]),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), size["ffn"]),
        max_source_positions=size["window"] * 50,
        max_target_positions=size["positions"],
        decoder_start_token_id=ids[START],
        **ends,
    )
    torch.manual_seed(SEED)
    model = WhisperForConditionalGeneration(config)
    _spread(model)
    model.generation_config = GenerationConfig(
        **ends,
        decoder_start_token_id=ids[START],
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": ids[f"<|{code}|>"] for code in languages},
        task_to_id={task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        alignment_heads=[[size["layers"] - 1, head] for head in range(size["heads"])],
        max_initial_timestamp_index=50,
        suppress_tokens=list(range(end, config.vocab_size)),  # text only, without an end
        begin_suppress_tokens=[end],
        max_length=size["positions"],
    )
    model.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=80, chunk_length=size["window"]).save_pretrained(path)
    _write_whisper_tokenizer(path, size["text"], specials, times)


def _spread(model: Any) -> None:
    """Set weights under which outputs vary: small embeddings (the head is tied), strong layers."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "encoder.embed_positions" not in name:
                fan = parameter.shape[1:].numel()
                parameter.normal_(std=0.05 if "embed_tokens" in name else 1.5 * fan**-0.5)


def _write_whisper_tokenizer(path: Path, text: int, specials: list[str], times: list[str]) -> None:
    """Write a tokenizer: `text` pieces (bytes, then words), end, special tokens, times."""
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import WhisperTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("Ġ" + "".join(word) for word in itertools.product(string.ascii_lowercase, repeat=4))
    pieces = [*alphabet, *itertools.islice(words, text - len(alphabet))]
    tokenizer = WhisperTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[],
        **dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), END),
        extra_special_tokens=specials,
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in times])
    tokenizer.save_pretrained(path)


# -------------------------------------------------------------------------------------------------------------- speech
def pocket_checkpoint(cache: Path) -> Path:
    """Return pocket-tts with random weights, whose pointer never advances, so speech has no end."""

    def make(path: Path) -> None:
        import torch

        from motet_tts.pocket.config import PocketConfig
        from motet_tts.pocket.model import PocketSpeech

        torch.manual_seed(SEED)
        model = PocketSpeech(PocketConfig(phonemes=tuple(string.ascii_letters)))
        with torch.no_grad():
            model.reader.out.bias[-1] = -100.0  # the blank, so that readings have phonemes
            model.speaker.advance.bias[0] = 100.0
        model.save(path)

    return made(cache / f"pocket-tts-seed{SEED}", make)


# Settings of VitsConfig that differ from its own: MMS has 36 million parameters and speaks at 16 kHz.
VITS_SIZES: dict[str, dict[str, Any]] = {
    "MMS's size": {},
    "the least size": {
        "hidden_size": 16, "num_hidden_layers": 1, "ffn_dim": 24, "flow_size": 8, "spectrogram_bins": 9,
        "upsample_initial_channel": 16, "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
        "duration_predictor_filter_channels": 16, "prior_encoder_num_flows": 2,
        "prior_encoder_num_wavenet_layers": 1, "posterior_encoder_num_wavenet_layers": 1,
    },
}  # fmt: skip


def vits_checkpoint(cache: Path, size: str = "MMS's size") -> Path:
    """Return VITS over letters, in one of `VITS_SIZES`.

    Noise has no effect, so that all engines say a sentence in the same time.
    """

    def make(path: Path) -> None:
        import torch
        from transformers import VitsConfig, VitsModel

        torch.manual_seed(SEED)
        vocab = {letter: number for number, letter in enumerate("_ abcdefghijklmnopqrstuvwxyz'-")}
        quiet: dict[str, Any] = {"noise_scale": 0.0, "noise_scale_duration": 0.0}
        config = VitsConfig(vocab_size=len(vocab), **quiet, **VITS_SIZES[size])
        VitsModel(config).save_pretrained(path)
        (path / "vocab.json").write_text(json.dumps(vocab))
        settings: dict[str, Any] = {
            "tokenizer_class": "VitsTokenizer", "pad_token": "_", "unk_token": "_", "language": "eng",
            "add_blank": True, "normalize": True, "phonemize": False, "is_uroman": False,
        }  # fmt: skip
        (path / "tokenizer_config.json").write_text(json.dumps(settings))

    name = "" if not VITS_SIZES[size] else "-least"
    return made(cache / f"vits{name}-quiet-seed{SEED}", make)
