"""Run Dia: an encoder over bytes, a decoder of delayed DAC codes with guidance, and DAC.

The decoder computes each step with the text and without it; a code is chosen from those that
guidance prefers. Source: transformers' `DiaForConditionalGeneration.generate` and
`DiaProcessor.decode`, which are the reference.

Shapes: B sentences, Q positions, K codebooks, V codes, E hidden size, W rows of a sentence: 2 with
guidance, else 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, DiaForConditionalGeneration

from motet_kernels.spans import upload
from motet_tts.codecs.codec import codec_folder
from motet_tts.codecs.dac import dac
from motet_tts.engine.utterance import Key, Utterance

from . import voices
from .codec_lm import CodecLm, CodecSentence, DecoderBatch, Drawn, room_for
from .delayed_codes import DelayedCodes
from .sampling import CodeSampling, choose

_SPEAKERS = ("S1", "S2")  # the tags of its two speakers
_SECONDS = (3.0, 0.25)  # limit of a sentence: a base and per character; far more than speech needs


@dataclass(slots=True)
class _Progress:
    """Hold the steps of a sentence.

    limit: the step in which the first code ends at the latest.
    ended: the step whose first code was the last one; None before.
    """

    codes: DelayedCodes
    limit: int
    ended: int | None = None


class Dia(CodecLm):
    """Run a checkpoint folder of Dia, whose DAC is in it or named by it."""

    clones = True

    def __init__(
        self, folder: Path, *, device: torch.device, dtype: torch.dtype, greedy: bool = False
    ):
        self.device, self.dtype = device, dtype
        self._model: Any = (
            DiaForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval().to(device)
        )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        config = self._model.config
        self._decoder, self._delays = config.decoder_config, list(config.delay_pattern)
        self._longest_text = config.encoder_config.max_position_embeddings
        generation = self._model.generation_config
        self._sampling = CodeSampling.of(generation, greedy)
        scale = getattr(generation, "guidance_scale", None)
        self._guidance = 1.0 if scale is None else float(scale)
        top_k = getattr(generation, "top_k", None)
        self._guided_codes = 50 if top_k is None else int(top_k)
        self.codec, encode = dac(codec_folder(folder), device)
        self._samples = voices.EncodedSamples(
            lambda sample: encode(voices.resampled(sample, self.codec.sample_rate))
        )
        self.voices = _SPEAKERS

    @property
    def _rows(self) -> int:
        return 1 if self._guidance == 1 else 2

    @torch.inference_mode()
    def begin(self, key: Key, utterance: Utterance) -> CodecSentence:
        text, prefix_NK = self._prompt(utterance)
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        room_for(len(ids), self._longest_text)
        codes = DelayedCodes(self._delays, self._decoder.bos_token_id, prefix_NK)
        after_last = max(self._delays) + 1  # steps for the code that ends and those delayed
        given = 1 + len(prefix_NK)
        room = room_for(after_last + given, self._decoder.max_position_embeddings)
        budget = math.ceil((_SECONDS[0] + _SECONDS[1] * len(utterance.text)) / self.frame_seconds)
        limit = min(utterance.max_frames or budget, room)
        ids_WL = upload(torch.tensor([ids, [0] * len(ids)][: self._rows]), self.device)
        encoded_WLE = self._model.model.encoder(ids_WL).last_hidden_state
        begin_1K = torch.full((1, len(self._delays)), self._decoder.bos_token_id)
        given_PK = upload(torch.cat([begin_1K, codes.fed_NK]), self.device)
        prompt = self._model.model.decoder.embeddings(given_PK[None])[0]
        sentence = CodecSentence(
            key, utterance, prompt, limit + after_last, len(ids), self.codec.begin()
        )
        progress = _Progress(codes, len(prefix_NK) + limit)
        sentence.family_state, sentence.text = progress, encoded_WLE
        return sentence

    def _prompt(self, utterance: Utterance) -> tuple[str, Tensor]:
        """Return the text with its speaker, and the codes `[N, K]` of a recording before it."""
        text = f"[{utterance.voice}] {utterance.text}"
        sample = utterance.sample
        if sample is None:
            return text, torch.zeros(0, len(self._delays), dtype=torch.long)
        return f"[{utterance.voice}] {sample.words} {text}", self._samples(sample)

    def forward(self, inputs_BQE: Tensor, batch: DecoderBatch) -> Tensor:
        assert batch.texts is not None
        decoder, rows = self._model.model.decoder, self._rows
        hidden_BQE = inputs_BQE.repeat_interleave(rows, 0)
        positions = batch.positions.repeat_interleave(rows, 0)
        mask = batch.mask.repeat_interleave(rows, 0)
        text_mask = batch.texts.stored.repeat_interleave(rows, 0)
        rotary, cache = decoder.rotary_emb(hidden_BQE, position_ids=positions), batch.cache
        text = hidden_BQE if batch.new_text is None else batch.new_text
        for layer in decoder.layers:
            hidden_BQE = layer(
                hidden_BQE,
                rotary,
                mask,
                text,
                encoder_attention_mask=text_mask,
                past_key_values=cache,
                position_ids=positions,
            )
        last_BWE: Tensor = decoder.norm(hidden_BQE)[:, -1].unflatten(0, (-1, rows))
        return last_BWE

    def draw(self, hidden_BWE: Tensor, sentences: list[CodecSentence]) -> Drawn:
        books = len(self._delays)
        logits_BWKV = self._model.logits_dense(hidden_BWE).float().unflatten(-1, (books, -1))
        scores_BKV = self._end_or_not(self._guided(logits_BWKV))
        noise_BKV = None
        if self._sampling.random:
            drawn = [one.noise.gumbel(*scores_BKV.shape[1:]) for one in sentences]
            noise_BKV = upload(torch.stack(drawn), self.device)
        drawn_BK = choose(
            scores_BKV.flatten(0, 1),
            self._sampling,
            None if noise_BKV is None else noise_BKV.flatten(0, 1),
        ).unflatten(0, (-1, books))
        ends = (drawn_BK[:, 0] == self._decoder.eos_token_id).tolist()
        frames, heard, last = [], [], []
        for codes_K, end, sentence in zip(drawn_BK, ends, sentences, strict=True):
            progress: _Progress = sentence.family_state
            step = progress.codes.step
            if progress.ended is None and (end or step >= progress.limit):
                progress.ended = step
            codes_K = self._ended(progress.codes.complete(codes_K), step, progress.ended)
            frames.append(codes_K)
            frame = progress.codes.push(codes_K)
            is_last = progress.ended is not None and step >= progress.ended + max(self._delays)
            heard.append(None if is_last else frame)
            last.append(is_last)
        return Drawn(torch.stack(frames), heard, last)

    def _guided(self, logits_BWKV: Tensor) -> Tensor:
        """Return the logits with the text, of the codes that guidance prefers."""
        with_text_BKV = logits_BWKV[:, 0]
        if logits_BWKV.shape[1] == 1:
            return with_text_BKV
        guided_BKV = with_text_BKV + (with_text_BKV - logits_BWKV[:, 1]) * self._guidance
        best = guided_BKV.topk(min(self._guided_codes, guided_BKV.shape[-1])).indices
        kept = torch.zeros_like(guided_BKV, dtype=torch.bool).scatter(-1, best, True)
        return with_text_BKV.masked_fill(~kept, -torch.inf)

    def _end_or_not(self, scores_BKV: Tensor) -> Tensor:
        """Exclude special codes; the first codebook's end is certain if likeliest, else excluded."""
        end = self._decoder.eos_token_id
        scores_BKV = scores_BKV.clone()
        scores_BKV[:, 1:, end:] = -torch.inf
        scores_BKV[:, 0, end + 1 :] = -torch.inf
        ends_B1 = (scores_BKV[:, 0].argmax(-1) == end)[:, None]
        scores_BKV[:, 0, :end] = scores_BKV[:, 0, :end].masked_fill(ends_B1, -torch.inf)
        scores_BKV[:, 0, end : end + 1] = scores_BKV[:, 0, end : end + 1].masked_fill(
            ~ends_B1, -torch.inf
        )
        return scores_BKV

    def _ended(self, codes_K: Tensor, step: int, ended: int | None) -> Tensor:
        """Return the codes with the end in each codebook, after its delay, and padding behind it."""
        if ended is None:
            return codes_K
        since_K = torch.tensor([step - ended - delay for delay in self._delays])
        end = torch.where(since_K == 0, self._decoder.eos_token_id, self._decoder.pad_token_id)
        return torch.where(upload(since_K < 0, self.device), codes_K, upload(end, self.device))

    def embed(self, frames_B: Tensor, sentences: list[CodecSentence]) -> Tensor:
        embedded: Tensor = self._model.model.decoder.embeddings(frames_B[:, None])
        return embedded
