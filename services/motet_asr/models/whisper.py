"""Run Whisper checkpoints of every size, distilled ones included: prompts, passes, segments.

Checked against `transformers`: the tokens of a window equal those of its `generate`, passes
included. M mel bins · F feature frames of 10 ms · S encoder frames of 20 ms · E model size · V
vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from motet_asr.config import TEMPERATURES, EngineConfig
from motet_asr.engine.engine import SAMPLE_RATE, Audio
from motet_asr.engine.request import Pass, TimedSegment, TranscriptionOptions, WindowResult
from motet_asr.engine.slot_engine import PassOutcome, RunningWindow, SlotFamily, stacked
from motet_kernels.runtime.device import dtype_name, upload_all
from motet_shared.errors import BadRequest, ConfigError

from .rules import RowState, WhisperRules, compression_of_tokens
from .whisper_decoder import WhisperDecoder
from .whisper_encoder import WhisperEncoder
from .whisper_features import WhisperFeatures
from .whisper_segments import WhisperSegments

_STRIDE = 2  # feature frames per encoder frame


class Whisper(SlotFamily):
    """Transcribe with a `WhisperForConditionalGeneration`, its extractor and its tokenizer."""

    # Of a multilingual checkpoint with alignment heads; others say what they lack.
    translates = True
    detects = True
    word_times = "attention"

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        generation = model.generation_config
        self.config = config
        self._extractor, self._tokenizer = extractor, tokenizer
        self.device, self.dtype = model.device, model.dtype
        self._frames: int = model.config.max_source_positions * _STRIDE
        self._hop: int = extractor.hop_length
        native_window = self._frames * self._hop / SAMPLE_RATE
        self.window = min(config.window or native_window, native_window)
        if extractor.nb_max_frames != self._frames:
            raise ConfigError(
                f"{config.model}: the features have {extractor.nb_max_frames} frames (chunk_length), "
                f"the encoder takes {self._frames} (2 × max_source_positions); one of the two files is of another model"
            )
        self.vocab = model.config.vocab_size
        self.rules = WhisperRules(generation, self.vocab, self.device)
        self.eos = self.rules.eos
        self.detector = generation.decoder_start_token_id
        self._generation = generation
        multilingual = getattr(generation, "is_multilingual", True)
        self._language_ids: dict[str, int] = {
            token.strip("<|>"): id
            for token, id in (getattr(generation, "lang_to_id", None) or {}).items()
            if multilingual
        }
        self._codes = [
            code for code, _ in sorted(self._language_ids.items(), key=lambda pair: pair[1])
        ]
        ids = np.array([self._language_ids[code] for code in self._codes], dtype=np.int64)
        (self._code_ids,) = upload_all([ids], self.device)
        self._tasks: dict[str, int] = getattr(generation, "task_to_id", None) or {}
        self.languages = frozenset(self._language_ids)
        self.detects = bool(self._language_ids)
        self.translates = bool(self._language_ids) and "translate" in self._tasks
        self._prompt_start = self._start_of_prompts()
        self.prompts = self._prompt_start is not None
        self._max_tokens: int = model.config.max_target_positions
        heads = [tuple(pair) for pair in getattr(generation, "alignment_heads", None) or ()]
        self._format = dtype_name(self.dtype) if config.weights == "auto" else config.weights
        self.word_times = "attention" if heads else ""
        self.decoder = WhisperDecoder(model, heads, self._format)
        self._features = WhisperFeatures(extractor, self.device)
        # Only one of the two is kept: the packed matrices replace the model's.
        self._encoder = None if self._format == "torch" else WhisperEncoder(model, self._format)
        self._torch_encoder = model.model.encoder if self._encoder is None else None
        self._padding = self._padding_frames()
        self._segments = WhisperSegments(
            tokenizer,
            self.rules,
            2 * self._hop / SAMPLE_RATE,
            getattr(model.config, "median_filter_width", 7),
        )
        self._prompt_ids = functools.lru_cache(256)(self._encode_prompt)

    def _padding_frames(self) -> int | None:
        """Return how many feature frames after the audio the encoder reads; None: whole windows."""
        seconds: float = getattr(self._extractor, "motet_padding", -1.0)
        if self.config.padding >= 0:
            seconds = self.config.padding
            if self._encoder is None:
                raise ConfigError(
                    f"padding={seconds:g}: weights='torch' encodes whole windows only; choose other weights, or -1"
                )
        return (
            None
            if seconds < 0 or self._encoder is None
            else round(seconds * SAMPLE_RATE / self._hop)
        )

    def describe(self) -> dict[str, str]:
        return {"weights": self._format, **super().describe()}

    # ---------------------------------------------------------------------------------------- audio
    def features(self, audio: Audio) -> Tensor:
        """Return log-mel features [M, F] of a whole window, including silence after the audio."""
        samples = -(-(len(audio) + 2 * self._extractor.n_fft) // self._hop) * self._hop
        features_MF = self._features(audio, min(samples, self._extractor.n_samples))
        # Its last frame is silence already, and so are all that follow.
        return F.pad(features_MF, (0, self._frames - features_MF.shape[1]), mode="replicate")

    def encode(self, runs: Sequence[RunningWindow]) -> list[Tensor]:
        windows = [self._pass_features(run) for run in runs]
        if self._encoder is not None:
            return self._encoder(windows)
        assert self._torch_encoder is not None
        return list(
            self._torch_encoder(torch.stack(windows).to(self.decoder.dtype)).last_hidden_state
        )

    def _pass_features(self, run: RunningWindow) -> Tensor:
        """Return a pass's features from its beginning, as long as a window or padding requires."""
        frames = self._frames
        if self._padding is not None:
            needed = self.content(run) - run.seek + self._padding
            frames = min(frames, -(-needed // _STRIDE) * _STRIDE)
        features_MF = run.waiting.features[:, run.seek : run.seek + frames]
        return F.pad(features_MF, (0, frames - features_MF.shape[1]))

    def content(self, run: RunningWindow) -> int:
        """Return the number of feature frames of a window that hold audio."""
        return min(self._frames, math.ceil(run.waiting.seconds * SAMPLE_RATE / self._hop - 1e-6))

    # -------------------------------------------------------------------------------------- prompts
    def check(self, options: TranscriptionOptions) -> None:
        super().check(options)
        self._prompt_ids(options.prompt)

    def code(self, language: str) -> str:
        language = super().code(language)
        code: str = TO_LANGUAGE_CODE.get(language, language)
        return code

    def language_name(self, code: str) -> str:
        name: str = LANGUAGES.get(code, code)
        return name

    def undetected(self, run: RunningWindow) -> bool:
        return bool(self._language_ids) and not run.language

    def detect(self, logits_BV: Tensor) -> list[str]:
        return [self._codes[best] for best in logits_BV[:, self._code_ids].argmax(dim=-1).tolist()]

    def prompt(self, run: RunningWindow) -> list[int]:
        return self._prompt_ids(run.waiting.options.prompt) + self._start_tokens(run)

    def _start_tokens(self, run: RunningWindow) -> list[int]:
        tokens = [self.detector]
        if self._language_ids:
            tokens.append(self._language_ids[run.language])
            tokens += (
                [self._tasks[run.waiting.options.task]]
                if run.waiting.options.task in self._tasks
                else []
            )
        else:
            forced = getattr(self._generation, "forced_decoder_ids", None) or ()
            tokens += [id for _, id in forced if id is not None and id != self.rules.no_timestamps]
        if not self._timed(run) and self.rules.no_timestamps is not None:
            tokens.append(self.rules.no_timestamps)
        return tokens

    def _timed(self, run: RunningWindow) -> bool:
        return run.waiting.options.timestamps and self.rules.has_timestamps

    def _start_of_prompts(self) -> int | None:
        """Return the token before a prompt; None if the model has none or cannot read prompts.

        A model that was not trained to read prompts has `motet_prompts: false` in
        generation_config.json.
        """
        if not getattr(self._generation, "motet_prompts", True):
            return None
        start: int | None = getattr(self._generation, "prev_sot_token_id", None)
        if start is None:
            start = self._tokenizer.convert_tokens_to_ids("<|startofprev|>")
        return None if start == self._tokenizer.unk_token_id else start

    def _encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a preceding text after its start token; only the end of a long text.

        Raises BadRequest for special tokens in the text.
        """
        if not text.strip():
            return []
        ids = self._tokenizer(" " + text.strip(), add_special_tokens=False).input_ids
        if special := set(ids) & set(self._tokenizer.all_special_ids):
            raise BadRequest(
                f"prompt: contains the special tokens {self._tokenizer.decode(sorted(special))!r}; leave them out",
                param="prompt",
            )
        return [
            *([] if self._prompt_start is None else [self._prompt_start]),
            *ids[-(self._max_tokens // 2 - 1) :],
        ]

    # ------------------------------------------------------------------------------------- decoding
    def limit(self, run: RunningWindow) -> int:
        configured: int | None = getattr(self._generation, "max_length", None)
        if configured is None:
            return self._max_tokens
        return min(configured + min(self._max_tokens // 2 - 1, len(run.prompt)), self._max_tokens)

    def observe(self, run: RunningWindow, states_TE: Tensor) -> None:
        if self.rules.no_timestamps is not None:
            start = len(run.prompt) - len(self._start_tokens(run))
            probs_V = self.decoder.logits(states_TE[start]).softmax(dim=-1)
            run.no_speech_prob = float(probs_V[self.rules.no_timestamps - 1])

    def pick(
        self, logits_BV: Tensor, runs: Sequence[RunningWindow]
    ) -> tuple[list[int], list[float]]:
        return self.rules.pick(logits_BV, [self._state(run) for run in runs])

    def _state(self, run: RunningWindow) -> RowState:
        temperature = self._temperatures(run)[run.attempt]
        noise = hash((run.waiting.options.seed, run.seek, run.attempt, len(run.generated))) & (
            2**63 - 1
        )
        return RowState(run.generated, self._timed(run), temperature, noise)

    def _temperatures(self, run: RunningWindow) -> tuple[float, ...]:
        configured = run.waiting.options.temperature
        return (configured,) if configured > 0 or not self.config.fallback else TEMPERATURES

    def conclude(self, run: RunningWindow) -> PassOutcome:
        with_eos = run.generated + [self.eos] * (run.last == self.eos)
        avg_logprob = run.logprob / max(len(with_eos), 1)
        skipped = self._is_silent(avg_logprob, run)
        last_attempt = run.attempt == len(self._temperatures(run)) - 1
        if (
            self.config.fallback
            and not skipped
            and not last_attempt
            and self._needs_fallback(with_eos, avg_logprob)
        ):
            run.attempt += 1
            return "retry"
        frames = self.content(run) - run.seek
        run.result.language = run.language
        run.result.passes.append(
            Pass(
                tokens=run.generated,
                seek=run.seek,
                frames=frames,
                avg_logprob=avg_logprob,
                no_speech_prob=run.no_speech_prob,
                temperature=self._temperatures(run)[run.attempt],
                skipped=skipped,
                attention_NTF=stacked(run.attention),
                logprobs=run.logprobs,
            )
        )
        run.attempt = 0
        run.seek += frames if skipped else self._settled_frames(run)
        return "continue" if run.seek < self.content(run) else "done"

    def _needs_fallback(self, tokens: list[int], avg_logprob: float) -> bool:
        repeats = compression_of_tokens(tokens, self.vocab) > self.config.compression_threshold
        return repeats or avg_logprob < self.config.logprob_threshold

    def _is_silent(self, avg_logprob: float, run: RunningWindow) -> bool:
        is_likely_silence = run.no_speech_prob > self.config.no_speech_threshold
        return (
            self.config.fallback
            and is_likely_silence
            and avg_logprob < self.config.logprob_threshold
        )

    def _settled_frames(self, run: RunningWindow) -> int:
        """Return the feature frames that a pass completed: up to its last timestamp pair, or all."""
        cut = self._segments.cut(run.generated)
        frames = 0 if cut is None else _STRIDE * (run.generated[cut - 1] - self.rules.first_time)
        return frames if frames > 0 else self._frames

    # ----------------------------------------------------------------------------------------- text
    def segments(self, result: WindowResult, seconds: float, words: bool) -> list[TimedSegment]:
        return self._segments.of(result, seconds, words)

    def text_of(self, tokens: list[int]) -> str:
        return self._segments.text(tokens)
