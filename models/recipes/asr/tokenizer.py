"""Build the pocket-asr tokenizer and feature extractor: Whisper's, with 12-second windows."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

WINDOW = 12  # seconds
STEP = 0.02  # seconds per timestamp token and per encoder position
END, START, ENGLISH = "<|endoftext|>", "<|startoftranscript|>", "<|en|>"
TRANSLATE, TRANSCRIBE = "<|translate|>", "<|transcribe|>"
NO_SPEECH, NO_TIMESTAMPS = "<|nospeech|>", "<|notimestamps|>"
SPECIALS = (
    *(END, START, ENGLISH, TRANSLATE, TRANSCRIBE, "<|startoflm|>", "<|startofprev|>"),
    *(NO_SPEECH, NO_TIMESTAMPS),
)
TIMESTAMPS = tuple(f"<|{index * STEP:.2f}|>" for index in range(round(WINDOW / STEP) + 1))


def train(texts: Iterable[str], *, vocabulary: int) -> WhisperTokenizer:
    """Train byte-level BPE of `vocabulary` tokens and add Whisper's special tokens and timestamps."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator((f" {text}" for text in texts), trainer)
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = WhisperTokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token=END,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        extra_special_tokens=list(SPECIALS[1:]),
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in TIMESTAMPS]
    )
    tokenizer.set_prefix_tokens(language="english", task="transcribe", predict_timestamps=False)
    tokenizer.model_max_length = 128
    return tokenizer


def feature_extractor() -> WhisperFeatureExtractor:
    """Return Whisper's extractor: 80 mel bands, 100 frames/s.

    `motet_padding`: seconds of silence that follow the longest clip of most training batches.
    """
    return WhisperFeatureExtractor(feature_size=80, chunk_length=WINDOW, motet_padding=0.3)


def processor(tokenizer: WhisperTokenizer) -> WhisperProcessor:
    """Combine the feature extractor and the tokenizer."""
    return WhisperProcessor(feature_extractor(), tokenizer)
