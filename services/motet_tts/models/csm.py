"""Run CSM: a Llama over text and audio, a depth decoder, and Mimi.

The Llama predicts the first code of a frame, the depth decoder the others, and Mimi decodes them.
Source: transformers' `CsmForConditionalGeneration`, whose `generate` and codec are the reference.

Shapes: B sentences, K codebooks, V codes, E hidden size.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, CsmForConditionalGeneration

from motet_kernels.spans import upload
from motet_tts.codecs.mimi import MimiDecoder
from motet_tts.engine.utterance import Key, Utterance, VoiceSample

from . import voices
from .codec_lm import CodecLm, CodecSentence, DecoderBatch, Drawn, room_for
from .control_tokens import ControlTokens
from .sampling import CodeSampling, choose

_SPEAKERS = 4  # speaker numbers are unlimited in CSM; these are listed as voices
_SECONDS = (3.0, 0.25)  # limit of a sentence: a base and per character; far more than speech needs


class Csm(CodecLm):
    """Run a checkpoint folder of CSM, whose voices are speaker numbers."""

    clones = True

    def __init__(
        self, folder: Path, *, device: torch.device, dtype: torch.dtype, greedy: bool = False
    ):
        self.device, self.dtype = device, dtype
        self._model: Any = (
            CsmForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval().to(device)
        )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        config = self._model.config
        self._config = config
        self._eos = config.codebook_eos_token_id
        generation = self._model.generation_config
        self._first = CodeSampling.of(generation, greedy)
        self._others = CodeSampling.of(self._model.depth_decoder.generation_config, greedy)
        mimi = self._model.codec_model
        self.codec = MimiDecoder(
            mimi.decoder, lambda frames_BNK: mimi.quantizer.decode(frames_BNK.transpose(1, 2))
        )
        self._control = ControlTokens(self._tokenizer)
        self._samples = voices.EncodedSamples(self._codes)
        self.voices = tuple(str(speaker) for speaker in range(_SPEAKERS))

    @torch.inference_mode()
    def begin(self, key: Key, utterance: Utterance) -> CodecSentence:
        codes_NK = None if utterance.sample is None else self._samples(utterance.sample)
        ids = self._ids(utterance, 0 if codes_NK is None else len(codes_NK))
        budget = math.ceil((_SECONDS[0] + _SECONDS[1] * len(utterance.text)) / self.frame_seconds)
        limit = min(
            utterance.max_frames or budget, room_for(len(ids), self._config.max_position_embeddings)
        )
        ids_P = upload(torch.tensor(ids), self.device)
        prompt = self._model.embed_text_tokens(ids_P)
        if codes_NK is not None:
            prompt = self._with_audio(prompt, ids_P, codes_NK)
        return CodecSentence(key, utterance, prompt, limit, len(ids), self.codec.begin())

    def _codes(self, sample: VoiceSample) -> Tensor:
        """Return the codes `[N, K]` of a recording."""
        samples_S = voices.resampled(sample, self.codec.sample_rate).to(self.device, self.dtype)
        codes_NK: Tensor = self._model.codec_model.encode(samples_S[None, None]).audio_codes[0].mT
        return codes_NK

    def _with_audio(self, prompt_PE: Tensor, ids_P: Tensor, codes_NK: Tensor) -> Tensor:
        """Put the frames of a recording, and the one that ends it, in their places."""
        config, embed = self._config, self._model.backbone_model.embed_tokens
        end_1K = torch.full_like(codes_NK[:1], self._eos)
        for token, frames in (
            (config.audio_token_id, codes_NK),
            (config.audio_eos_token_id, end_1K),
        ):
            prompt_PE = prompt_PE.masked_scatter((ids_P == token)[:, None], embed(frames[None])[0])
        return prompt_PE

    def _ids(self, utterance: Utterance, audio: int) -> list[int]:
        """Return the ids of the text, with `audio` places of a recording and its words before it."""
        tokenizer, config, voice = self._tokenizer, self._config, utterance.voice
        texts = [self._control.plain(utterance.text)]
        if utterance.sample is not None:
            texts.insert(0, self._control.plain(utterance.sample.words))
        if not tokenizer.chat_template:
            parts = [list(tokenizer(f"[{voice}]{text}")["input_ids"]) for text in texts]
            heard = [config.audio_token_id] * audio + [config.audio_eos_token_id]
            return parts[0] if len(parts) == 1 else [*parts[0], *heard, *parts[1]]
        turns: list[Any] = [
            {"role": voice, "content": [{"type": "text", "text": text}]} for text in texts
        ]
        if utterance.sample is not None:
            turns[0]["content"].append({"type": "audio"})
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
        place = tokenizer.convert_ids_to_tokens(config.audio_token_id)
        rendered = rendered.replace(place, place * audio)
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def forward(self, inputs_BQE: Tensor, batch: DecoderBatch) -> Tensor:
        hidden_BQE: Tensor = self._model.backbone_model(
            inputs_embeds=inputs_BQE,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            past_key_values=batch.cache,
        ).last_hidden_state
        return hidden_BQE[:, -1]

    def draw(self, hidden_BE: Tensor, sentences: list[CodecSentence]) -> Drawn:
        codebooks, codes = self._config.num_codebooks, self._config.vocab_size
        noise_BKV: Tensor | None = None
        if self._first.random or self._others.random:
            drawn = [sentence.noise.gumbel(codebooks, codes) for sentence in sentences]
            noise_BKV = upload(torch.stack(drawn), self.device)
        first_B = choose(
            self._model.lm_head(hidden_BE),
            self._first,
            None if noise_BKV is None else noise_BKV[:, 0],
        )
        frames_BK = self._depth(hidden_BE, first_B, noise_BKV)
        is_end_BK = frames_BK == self._eos
        silent, last = torch.stack([is_end_BK.all(-1), is_end_BK[:, :-1].all(-1)]).tolist()
        heard = [
            None if is_silent else frame for frame, is_silent in zip(frames_BK, silent, strict=True)
        ]
        return Drawn(frames_BK, heard, last)

    def _depth(self, hidden_BE: Tensor, first_B: Tensor, noise_BKV: Tensor | None) -> Tensor:
        """Return all codes `[B, K]` given the first, one codebook at a time for all sentences."""
        decoder = self._model.depth_decoder
        embedding = (
            decoder.model.embed_tokens
        )  # given codes instead of embeddings, `decoder` would synchronize with the device
        chosen = [first_B]
        inputs_BQE = torch.stack([hidden_BE, embedding(first_B)], dim=1)
        cache: Any = None
        for codebook in range(1, self._config.num_codebooks):
            output = decoder(
                inputs_embeds=inputs_BQE, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            cache = output.past_key_values
            noise = None if noise_BKV is None else noise_BKV[:, codebook]
            chosen.append(choose(output.logits[:, -1], self._others, noise))
            inputs_BQE = embedding(chosen[-1] + codebook * decoder.model.vocab_size)[:, None]
        return torch.stack(chosen, dim=1)

    def embed(self, frames_B: Tensor, sentences: list[CodecSentence]) -> Tensor:
        embedded: Tensor = self._model.backbone_model.embed_tokens(frames_B[:, None])
        return embedded
