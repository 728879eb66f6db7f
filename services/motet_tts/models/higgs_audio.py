"""Run Higgs Audio v2: a Llama with feed-forward layers of its own for audio, and delayed codes.

The prompt is a chat that ends where audio begins; each step draws one code of each codebook.
Source: transformers' `HiggsAudioV2ForConditionalGeneration.generate` and
`HiggsAudioV2Processor.decode`, which are the reference.

Shapes: B sentences, Q positions, K codebooks, V codes, E hidden size, N frames.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    HiggsAudioV2ForConditionalGeneration,
    HiggsAudioV2TokenizerModel,
)
from transformers.utils import is_torchaudio_available

from motet_kernels.spans import upload
from motet_models.checkpoints import check_checkpoint
from motet_shared.errors import ConfigError
from motet_tts.codecs.codec import codec_folder
from motet_tts.codecs.windows import WindowCodec, reach_of
from motet_tts.engine.utterance import Key, Utterance, VoiceSample

from . import voices
from .codec_lm import CodecLm, CodecSentence, DecoderBatch, Drawn, room_for
from .control_tokens import ControlTokens
from .delayed_codes import DelayedCodes
from .sampling import CodeSampling, choose

_DEFAULT_VOICE = "default"  # the model chooses one
_TASK = "Generate audio following instruction."
_SECONDS = (3.0, 0.25)  # limit of a sentence: a base and per character; far more than speech needs


@dataclass(slots=True)
class _Progress:
    """Hold the steps of a sentence.

    recent: codes of the last steps, for the repetition check.
    is_audio: `[P]`, the positions of the prompt that are codes.
    ended: the step in which a codebook ended first; None before.
    """

    codes: DelayedCodes
    recent: deque[Tensor]
    is_audio: Tensor
    ended: int | None = None


class HiggsAudio(CodecLm):
    """Run a checkpoint folder of Higgs Audio v2, whose audio tokenizer is in it or named by it.

    Raises ConfigError if its tokenizer has no chat template, or torchaudio is not installed.
    """

    clones = True
    instructs = True

    def __init__(
        self, folder: Path, *, device: torch.device, dtype: torch.dtype, greedy: bool = False
    ):
        if not is_torchaudio_available():
            raise ConfigError(
                f"model={str(folder)!r}: its audio tokenizer needs the package torchaudio;"
                " pip install torchaudio"
            )
        self.device, self.dtype = device, dtype
        self._model: Any = (
            HiggsAudioV2ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
            .eval()
            .to(device)
        )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"model={str(folder)!r}: its tokenizer has no chat template; add chat_template.jinja"
            )
        self._control = ControlTokens(self._tokenizer)
        self._config = self._model.config
        self._delays = [book + 1 for book in range(self._config.num_codebooks)]
        generation = self._model.generation_config
        self._sampling = CodeSampling.of(generation, greedy)
        window = getattr(generation, "ras_win_len", None)
        repeats = getattr(generation, "ras_win_max_num_repeat", None)
        self._window, self._repeats = 0, 0
        if self._sampling.random and window is not None and repeats is not None:
            self._window, self._repeats = int(window), int(repeats)
        self.codec, self._tokenizer_model = _codec(
            codec_folder(folder), device, self._config.audio_stream_bos_id
        )
        self._samples = voices.EncodedSamples(self._codes)
        self.voices = (_DEFAULT_VOICE,)

    @torch.inference_mode()
    def begin(self, key: Key, utterance: Utterance) -> CodecSentence:
        codes_TK = None if utterance.sample is None else self._samples(utterance.sample)
        ids = self._ids(utterance, 0 if codes_TK is None else len(codes_TK))
        books, begin = self._config.num_codebooks, self._config.audio_stream_bos_id
        codes = DelayedCodes(self._delays, begin, torch.zeros(0, books, dtype=torch.long))
        room = room_for(len(ids) + books + 1, self._config.max_position_embeddings)
        budget = math.ceil((_SECONDS[0] + _SECONDS[1] * len(utterance.text)) / self.frame_seconds)
        limit = min(utterance.max_frames or budget, room)
        ids_P = upload(torch.tensor(ids), self.device)
        prompt = self._model.model.embed_tokens(ids_P)
        is_audio_P = (ids_P == self._config.audio_token_id) | (
            ids_P == self._config.audio_delay_token_id
        )
        if codes_TK is not None:
            embedded = self._model.model.embed_audio_tokens(upload(codes_TK, self.device)[None])[0]
            prompt = prompt.masked_scatter(is_audio_P[:, None], embedded)
        # The step after the last code of the last codebook ends it.
        sentence = CodecSentence(
            key, utterance, prompt, limit + books, len(ids), self.codec.begin()
        )
        recent: deque[Tensor] = deque(maxlen=self._window)
        if codes_TK is not None:
            recent.extend(upload(codes_TK, self.device))
        sentence.family_state = _Progress(codes, recent, is_audio_P)
        return sentence

    def _codes(self, sample: VoiceSample) -> Tensor:
        """Return the delayed codes `[T, K]` of a recording, with its beginning and end."""
        model, config = self._tokenizer_model, self._config
        samples_S = voices.resampled(sample, self.codec.sample_rate).to(self.device)
        padded = functional.pad(samples_S, (0, -len(samples_S) % self.codec.frame_samples))
        codes_NK = model.encode(padded[None, None]).audio_codes[0].mT.cpu()
        books = config.num_codebooks
        begin, end = config.audio_stream_bos_id, config.audio_stream_eos_id
        codes_TK = torch.full((len(codes_NK) + books + 1, books), end)
        for book in range(books):
            first = 1 + book
            codes_TK[:first, book] = begin
            codes_TK[first : first + len(codes_NK), book] = codes_NK[:, book]
        return codes_TK

    def _ids(self, utterance: Utterance, audio: int) -> list[int]:
        """Return the ids of a chat that ends where audio begins, with `audio` places of a sample.

        The sample is the answer to its words.
        """
        config, tokenizer = self._config, self._tokenizer
        begin, delayed = config.audio_bos_token_id, config.num_codebooks - 1
        place, delay = tokenizer.convert_ids_to_tokens(
            [config.audio_token_id, config.audio_delay_token_id]
        )
        turns = [_turn("system", _TASK)]
        if utterance.instructions:
            turns.append(_turn("scene", self._control.plain(utterance.instructions)))
        if utterance.sample is not None:
            turns.append(_turn("user", self._control.plain(utterance.sample.words)))
            turns.append({"role": "assistant", "content": [{"type": "audio"}]})
        turns.append(_turn("user", self._control.plain(utterance.text)))
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        text = text.replace(place, place * (audio - delayed) + delay * delayed)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if ids[-1] == begin else [*ids, begin]

    def forward(self, inputs_BQE: Tensor, batch: DecoderBatch) -> Tensor:
        model = self._model.model
        rotary, cache = model.rotary_emb(inputs_BQE, batch.positions), batch.cache
        is_audio_BQ = None  # all positions after a prompt are audio
        if batch.joining is not None:
            is_audio_BQ = batch.joining.family_state.is_audio[None]
        hidden_BQE = inputs_BQE
        for layer in model.layers[: model.config.num_hidden_layers]:
            hidden_BQE = layer(
                hidden_BQE,
                attention_mask=batch.mask,
                audio_token_mask=is_audio_BQ,
                position_ids=batch.positions,
                past_key_values=cache,
                position_embeddings=rotary,
            )
        normed: Tensor = model.norm(hidden_BQE[:, -1:])
        return normed[:, 0]

    def draw(self, hidden_BE: Tensor, sentences: list[CodecSentence]) -> Drawn:
        books, size = self._config.num_codebooks, self._config.codebook_size
        logits_BKV = self._model.audio_lm_head(hidden_BE).float().unflatten(-1, (books, size))
        noise_BKV: Tensor | None = None
        again_BKV: Tensor | None = None
        if self._sampling.random:
            drawn = torch.stack([one.noise.gumbel(2, books, size) for one in sentences])
            noise_BKV, again_BKV = upload(drawn, self.device).unbind(1)
        codes_BK = choose(
            logits_BKV.flatten(0, 1),
            self._sampling,
            None if noise_BKV is None else noise_BKV.flatten(0, 1),
        ).unflatten(0, (-1, books))
        frames = []
        for row, sentence in enumerate(sentences):
            codes_K = self._given(sentence.family_state, codes_BK[row])
            if again_BKV is not None and self._window:
                other_K = (logits_BKV[row] + again_BKV[row]).argmax(-1)
                codes_K = self._without_repeats(sentence.family_state.recent, codes_K, other_K)
            frames.append(codes_K)
        frames_BK = torch.stack(frames)
        is_end_BK = frames_BK == self._config.audio_stream_eos_id
        begun, last = torch.stack([is_end_BK.any(-1), is_end_BK.all(-1)]).tolist()
        heard = []
        for codes_K, has_end, is_last, sentence in zip(
            frames_BK, begun, last, sentences, strict=True
        ):
            progress: _Progress = sentence.family_state
            if has_end and progress.ended is None:
                progress.ended = progress.codes.step
            progress.recent.append(codes_K)
            frame = progress.codes.push(codes_K)
            heard.append(None if is_last else frame)
        return Drawn(frames_BK, heard, last)

    def _given(self, progress: _Progress, codes_K: Tensor) -> Tensor:
        """Return the codes with those that the pattern gives: beginnings and ends."""
        codes_K = progress.codes.complete(codes_K)
        if progress.ended is None:
            return codes_K
        has_ended_K = torch.tensor(
            [progress.codes.step >= progress.ended + d for d in self._delays]
        )
        end = self._config.audio_stream_eos_id
        return codes_K.masked_fill(upload(has_ended_K, self.device), end)

    def _without_repeats(self, recent: deque[Tensor], codes_K: Tensor, other_K: Tensor) -> Tensor:
        """Replace codes that occurred too often lately (repetition-aware sampling, VALL-E 2)."""
        if not recent:
            return codes_K
        window_NK = torch.stack(list(recent))
        special_NK = (window_NK == self._config.audio_stream_bos_id) | (
            window_NK == self._config.audio_stream_eos_id
        )
        count_K = ((window_NK == codes_K) & ~special_NK).sum(0)
        return torch.where(count_K >= self._repeats, other_K, codes_K)

    def embed(self, frames_B: Tensor, sentences: list[CodecSentence]) -> Tensor:
        embedded: Tensor = self._model.model.embed_audio_tokens(frames_B[:, None])
        return embedded


def _turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def _codec(folder: str, device: torch.device, codes: int) -> tuple[WindowCodec, Any]:
    """Return the decoder of an audio tokenizer, and the tokenizer.

    Codes from `codes` on are read as the last one.
    """
    check_checkpoint(Path(folder))
    model: Any = HiggsAudioV2TokenizerModel.from_pretrained(folder).eval().to(device)

    def decode(codes_BNK: Tensor) -> Tensor:
        samples: Tensor = model.decode(codes_BNK.mT.clamp(0, codes - 1)).audio_values
        return samples[:, 0]

    codec = WindowCodec(
        decode,
        sample_rate=int(model.config.sample_rate),
        frame_samples=int(model.config.hop_length),
        reach=reach_of(model.acoustic_decoder.modules()),
    )
    return codec, model
