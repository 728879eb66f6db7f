"""Run models whose prompt contains a recording: Qwen3-ASR, and Voxtral with its transcription prompt.

M mel bins · T feature frames · S encoder frames · E model size · P positions of a prompt.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3ASRProcessor
from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from motet_asr.config import EngineConfig
from motet_asr.engine.causal_engine import RunningSequence
from motet_asr.engine.engine import SAMPLE_RATE, Audio, WaitingWindow
from motet_asr.engine.request import TimedSegment, TranscriptionOptions, WindowResult
from motet_kernels.spans import upload
from motet_shared.errors import BadRequest, ConfigError

from .causal import CausalRecognizer
from .greedy import whole_window

_TOKENS = 512  # most tokens of a window of 30 s or less, as Qwen3-ASR's own code has it
_TOKENS_PER_SECOND = _TOKENS / 30
_MAX_CONTEXT = 8192  # characters of a given text
_STRETCH = 30.0  # seconds of audio that Voxtral's encoder reads at a time


class SpokenPrompt(CausalRecognizer):
    """Put the frames of a recording into a prompt, and decode what follows it.

    audio_token: the token in whose places the frames are.
    """

    detects = True
    audio_token: int

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        super().__init__(config, model, extractor, tokenizer, model.model.language_model)
        self.audio_token = model.config.audio_token_id

    @abstractmethod
    def encode(self, batch: list[Tensor]) -> Sequence[Tensor]:
        """Return the frames [S, E] of each window's features."""

    @abstractmethod
    def prompt(self, options: TranscriptionOptions, frames: int) -> list[int]:
        """Return the tokens before the answer, among them `frames` times the audio token."""

    def begin(self, windows: Sequence[WaitingWindow]) -> list[RunningSequence]:
        encoded = self.encode([window.features for window in windows])
        return [
            self._begin(window, frames_SE)
            for window, frames_SE in zip(windows, encoded, strict=True)
        ]

    def _begin(self, window: WaitingWindow, frames_SE: Tensor) -> RunningSequence:
        ids = self.prompt(window.options, len(frames_SE))
        prompt_PE = self.embed_ids(ids)
        places = [at for at, token in enumerate(ids) if token == self.audio_token]
        prompt_PE[places[0] : places[0] + len(places)] = frames_SE.to(prompt_PE.dtype)
        limit = max(_TOKENS, int(window.seconds * _TOKENS_PER_SECOND))
        language = window.options.language
        return RunningSequence(window, self.state(), prompt_PE, None, limit, language)

    def segments(self, result: WindowResult, seconds: float, words: bool) -> list[TimedSegment]:
        [window_pass] = result.passes
        text = self.text_of(window_pass.tokens)
        return whole_window(text, window_pass, result.language, seconds, words)


class Qwen3Asr(SpokenPrompt):
    """Transcribe with a `Qwen3ASRForConditionalGeneration`, its extractor and its tokenizer.

    The model names the language before the text, unless the prompt does. A given text is the
    prompt's context.
    """

    prompts = True
    languages = frozenset(LANGUAGE_CODE_TO_NAME)

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        super().__init__(config, model, extractor, tokenizer)
        try:
            self._processor = Qwen3ASRProcessor(
                extractor, tokenizer, chat_template=tokenizer.chat_template
            )
            self._mark: str = self._processor.audio_token
            self.prompt(TranscriptionOptions(), 1)
        except Exception as error:  # a chat template may raise anything
            raise ConfigError(
                f"model={config.model!r}: the tokenizer has no chat template of Qwen3-ASR or not its "
                f"marks of audio: {error}; give the tokenizer that the model was trained with"
            ) from error
        self._text_mark = self.token_id("<asr_text>")
        self._codes: dict[str, str] = {
            name.lower(): code for code, name in LANGUAGE_CODE_TO_NAME.items()
        }
        self._marks = frozenset(tokenizer.get_added_vocab())

    def check(self, options: TranscriptionOptions) -> None:
        super().check(options)
        if len(options.prompt) > _MAX_CONTEXT:
            raise BadRequest(
                f"prompt: {len(options.prompt)} characters; give at most {_MAX_CONTEXT}",
                param="prompt",
            )
        if found := next((mark for mark in self._marks if mark in options.prompt), None):
            raise BadRequest(
                f"prompt: contains {found}, a token of this model's prompts; leave it out",
                param="prompt",
            )

    def code(self, language: str) -> str:
        language = super().code(language)
        return self._codes.get(language, language)

    def language_name(self, code: str) -> str:
        name: str = LANGUAGE_CODE_TO_NAME.get(code, code).lower()
        return name

    def features(self, audio: Audio) -> Tensor:
        """Return features [M, T] without padding."""
        batch = self._extractor(
            audio, sampling_rate=SAMPLE_RATE, padding=True, return_attention_mask=True
        )
        features: Tensor = batch.input_features[0][:, : int(batch.attention_mask[0].sum())]
        return features

    def encode(self, batch: list[Tensor]) -> Sequence[Tensor]:
        tower = self._model.model.audio_tower
        chunk = 2 * tower.n_window
        lengths = torch.tensor([features.shape[1] for features in batch])
        longest = -(-int(lengths.max()) // chunk) * chunk
        padded = torch.stack([F.pad(one, (0, longest - one.shape[1])) for one in batch])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        output = self._model.model.get_audio_features(
            input_features=upload(padded.to(self.dtype), self.device),
            input_features_mask=upload(mask, self.device),
        )
        chunks = mask.view(len(batch), -1, chunk).sum(-1)
        counts: list[int] = tower._post_cnn_length(chunks).sum(-1).tolist()
        return list(output.pooler_output.split(counts))

    def prompt(self, options: TranscriptionOptions, frames: int) -> list[int]:
        [text] = self._processor.apply_transcription_request(
            np.zeros(1, np.float32),
            language=options.language or None,
            prompt=options.prompt.strip() or None,
            tokenize=False,
        )
        before, after = text.split(self._mark)
        ids: list[int] = self._tokenizer(before + self._mark * frames + after)["input_ids"]
        if ids.count(self.audio_token) != frames:
            raise ValueError(f"{self._mark} is not the one token {self.audio_token}")
        return ids

    def language_of(self, tokens: Sequence[int]) -> str:
        if self._text_mark not in tokens:
            return ""
        named = super().text_of(list(tokens[: tokens.index(self._text_mark)]))
        return self._codes.get(named.strip().lower().removeprefix("language").strip(), "")

    def text_of(self, tokens: list[int]) -> str:
        if self._text_mark in tokens:
            tokens = tokens[tokens.index(self._text_mark) + 1 :]
        return super().text_of(tokens).strip()


class VoxtralTranscriber(SpokenPrompt):
    """Transcribe with a `VoxtralForConditionalGeneration`, by the prompt that it learnt for that.

    The prompt names the language that is spoken, or none; the model does not say which it found.
    """

    languages = frozenset(code for code in LANGUAGES if len(code) == 2)

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        super().__init__(config, model, extractor, tokenizer)
        self._begin_ids = [self.token_id(token) for token in ("<s>", "[INST]", "[BEGIN_AUDIO]")]
        self._end_id = self.token_id("[/INST]")
        self._transcribe_id = self.token_id("[TRANSCRIBE]")
        if (named := self.token_id("[AUDIO]")) != self.audio_token:
            raise ConfigError(
                f"model={config.model!r}: audio_token_id={self.audio_token} is not the tokenizer's [AUDIO], "
                f"{named}; one of the two files is of another model"
            )
        self._codes: dict[str, str] = {
            name: code for code, name in LANGUAGES.items() if len(code) == 2
        }

    def code(self, language: str) -> str:
        language = super().code(language)
        return self._codes.get(language, language)

    def language_name(self, code: str) -> str:
        name: str = LANGUAGES.get(code, code)
        return name

    def features(self, audio: Audio) -> Tensor:
        """Return features [stretches, M, T], the last stretch filled with silence."""
        size = round(_STRETCH * SAMPLE_RATE)
        batch = self._extractor(
            audio,
            sampling_rate=SAMPLE_RATE,
            return_tensors="pt",
            padding=True,
            truncation=False,
            pad_to_multiple_of=size,
        )
        [features_MT] = batch.input_features
        frames = size // self._extractor.hop_length
        features_SMT: Tensor = features_MT.unflatten(1, (-1, frames)).transpose(0, 1)
        return features_SMT

    def encode(self, batch: list[Tensor]) -> Sequence[Tensor]:
        stretches = upload(torch.cat(batch).to(self.dtype), self.device)
        frames = self._model.model.get_audio_features(stretches).pooler_output
        each = len(frames) // len(stretches)
        return list(frames.split([each * len(features) for features in batch]))

    def prompt(self, options: TranscriptionOptions, frames: int) -> list[int]:
        ids = [*self._begin_ids, *[self.audio_token] * frames, self._end_id]
        if options.language:
            text = f"lang:{options.language}"
            ids += self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, self._transcribe_id]
