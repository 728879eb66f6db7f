"""Run Canary and Cohere's transcriber: a FastConformer encoder, and a decoder with a multitask prompt.

M mel bins · T feature frames · S encoder frames · E model size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.canary.processing_canary import LANGUAGE_CODE_TO_NAME
from transformers.models.cohere_asr.processing_cohere_asr import LANGUAGES

from motet_asr.config import EngineConfig
from motet_asr.engine.engine import SAMPLE_RATE, Audio
from motet_asr.engine.slot_engine import RunningWindow
from motet_kernels.spans import upload
from motet_shared.errors import ConfigError

from .attention_decoder import CanaryDecoder
from .greedy import GreedyFamily

_MIN_SAMPLES = SAMPLE_RATE // 10  # samples; features are normalized over time and need some
_BEGIN = ("<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>")
_END = ("<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>")


class Canary(GreedyFamily):
    """Transcribe with a `CanaryForConditionalGeneration`, its extractor and its tokenizer.

    The prompt names the language that is spoken and the one that is written; neither is detected.
    """

    translates = True
    needs_language = True
    known_languages: frozenset[str] = frozenset(LANGUAGE_CODE_TO_NAME)
    begin: tuple[str, ...] = _BEGIN

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        super().__init__(config, model, extractor, tokenizer)
        self.decoder = CanaryDecoder(model)
        vocabulary = tokenizer.get_vocab()
        if missing := [token for token in (*self.begin, *_END) if token not in vocabulary]:
            raise ConfigError(
                f"model={config.model!r}: the tokenizer has no {missing[0]}, with which prompts are "
                "written; give the tokenizer that the model was trained with"
            )
        self._begin = [vocabulary[token] for token in self.begin]
        self._end = [vocabulary[token] for token in _END]
        self._codes = {
            code: vocabulary[f"<|{code}|>"]
            for code in self.known_languages
            if f"<|{code}|>" in vocabulary
        }
        self.languages = frozenset(self._codes)

    def code(self, language: str) -> str:
        names = {name.lower(): code for code, name in LANGUAGE_CODE_TO_NAME.items()}
        language = super().code(language)
        code: str = names.get(language, language)
        return code

    def language_name(self, code: str) -> str:
        name: str = LANGUAGE_CODE_TO_NAME.get(code, code).lower()
        return name

    def features(self, audio: Audio) -> Tensor:
        """Return features [T, M] without padding."""
        audio = np.pad(audio, (0, max(0, _MIN_SAMPLES - len(audio))))
        batch = self._extractor(audio, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        features: Tensor = batch.input_features[0][: int(batch.attention_mask[0].sum())]
        return features

    def encode(self, runs: Sequence[RunningWindow]) -> list[Tensor]:
        batch = [run.waiting.features for run in runs]
        lengths = torch.tensor([len(features) for features in batch])
        padded = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        output = self._model.model.encoder(
            input_features=upload(padded.to(self.dtype), self.device),
            attention_mask=upload(mask, self.device),
        )
        counts = output.attention_mask.sum(-1).tolist()
        return [
            states_SE[:count]
            for states_SE, count in zip(output.last_hidden_state, counts, strict=True)
        ]

    def prompt(self, run: RunningWindow) -> list[int]:
        spoken = run.language
        written = "en" if run.waiting.options.task == "translate" else spoken
        return [*self._begin, self._codes[spoken], self._codes[written], *self._end]

    def limit(self, run: RunningWindow) -> int:
        return self.decoder.length


class CohereTranscriber(Canary):
    """Transcribe with a `CohereAsrForConditionalGeneration`: as Canary, without translation."""

    translates = False
    known_languages = frozenset(LANGUAGES)
    begin = ("▁", *_BEGIN)

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        super().__init__(config, model, extractor, tokenizer)
        # A longer sound would be cut by the extractor itself.
        self.window = min(self.window, extractor.max_audio_clip_s - extractor.overlap_chunk_second)
