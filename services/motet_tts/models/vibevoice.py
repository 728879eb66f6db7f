"""Run VibeVoice: a Qwen over text and audio latents, a diffusion head, and a causal decoder.

Each step of the Qwen that asks for audio has the head draw a latent, with guidance by a second
branch that never saw the text; the latent is decoded at once, because what is heard is encoded
again as an input of the next step. The next token is guided too, as the `guidance_scale` of a
checkpoint makes transformers do it: by a third branch that sees neither text nor audio, but the
tokens alone. Source: transformers' `VibeVoiceForConditionalGeneration`, whose `generate` is the
reference.

Shapes: B sentences, W branches (with the text, without, tokens alone), I inputs of a position (what
was heard, its token), P positions of a prompt, Q new positions, T positions, E hidden size, K kinds
of tokens, D latent size, M sentences that ask for audio, N samples of a frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, VibeVoiceForConditionalGeneration
from transformers import VibeVoiceAcousticTokenizerFeatureExtractor as _Extractor
from transformers.models.vibevoice_acoustic_tokenizer.modeling_vibevoice_acoustic_tokenizer import (
    VibeVoiceAcousticTokenizerConv1dCacheLayer as _Layer,
)
from transformers.models.vibevoice_acoustic_tokenizer.modeling_vibevoice_acoustic_tokenizer import (
    VibeVoiceAcousticTokenizerConv1dPaddingCache as _Cache,
)

from motet_kernels.spans import upload
from motet_shared.errors import ConfigError
from motet_tts.codecs.codec import Codec, processor_settings
from motet_tts.engine.utterance import Key, Utterance, VoiceSample

from . import voices
from .codec_lm import CodecLm, CodecSentence, DecoderBatch, Drawn, room_for
from .control_tokens import ControlTokens

_SPEAKERS = 4  # that the model was trained with
_SECONDS = (3.0, 0.25)  # limit of a sentence: a base and per character; far more than speech needs
_MOST_STEPS = 1000  # of the diffusion

_Contexts = dict[str, Tensor]  # last inputs `[1, C, reach]` of each convolution


@dataclass(slots=True)
class _Progress:
    """Hold the state of a sentence.

    decoder, encoder: of the acoustic decoder and of the semantic encoder.
    guided: for each position, whether the branch without the text has it: where its audio begins,
        and the frames since.
    seen: `[K]`, which of the tokens that may be next there have been, in the prompt or since.
    """

    decoder: _Contexts
    encoder: _Contexts
    guided: list[bool]
    seen: Tensor


class _Samples(Codec):
    """Pass samples on: frames are decoded when they are drawn."""

    def __init__(self, sample_rate: int, frame_samples: int):
        self.sample_rate, self.frame_samples = sample_rate, frame_samples

    def begin(self) -> None:
        return None

    def decode(self, states: list[None], frames_BN: Tensor) -> list[Tensor]:
        return list(frames_BN.flatten(1))


class VibeVoice(CodecLm):
    """Run a checkpoint folder of VibeVoice, whose voices are speaker numbers.

    Raises ConfigError if its tokenizer has no chat template, or diffusers is not installed or lacks
    its noise scheduler.
    """

    clones = True

    def __init__(
        self, folder: Path, *, device: torch.device, dtype: torch.dtype, greedy: bool = False
    ):
        self.device, self.dtype = device, dtype
        self._model: Any = (
            VibeVoiceForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval().to(device)
        )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"model={str(folder)!r}: its tokenizer has no chat template; add chat_template.jinja"
            )
        self._control = ControlTokens(self._tokenizer)
        self._config = config = self._model.config
        generation = self._model.generation_config
        self._scheduler, self._steps = _scheduler(folder, generation)
        self._guidance = float(getattr(generation, "guidance_scale", None) or 1.0)
        self._penalty = float(getattr(generation, "repetition_penalty", None) or 1.0)
        self._context = int(config.text_config.max_position_embeddings)
        audio = config.audio_config
        given = processor_settings(folder).get("feature_extractor") or {}
        hop = int(audio.hop_length)
        self._extractor = _Extractor(**{**given, "pad_to_multiple_of": hop})
        self.codec = _Samples(int(self._extractor.sampling_rate), hop)
        kinds = [
            config.audio_bos_token_id,
            config.audio_eos_token_id,
            config.audio_token_id,
            config.eos_token_id,
        ]
        self._kinds = torch.tensor(sorted(set(kinds)), device=device)
        self._kinds_KE = self._model.lm_head.weight.detach()[self._kinds]
        self._samples = voices.EncodedSamples(self._latents)
        self.voices = tuple(str(speaker) for speaker in range(_SPEAKERS))
        if self._ids(Utterance(words=("a",), voice=self.voices[0]), 0)[-1] != kinds[0]:
            raise ConfigError(
                f"model={str(folder)!r}: its chat template does not end where audio begins; give the checkpoint's own"
            )

    @torch.inference_mode()
    def begin(self, key: Key, utterance: Utterance) -> CodecSentence:
        heard_NE = None if utterance.sample is None else self._samples(utterance.sample)
        ids = self._ids(utterance, 0 if heard_NE is None else len(heard_NE))
        budget = math.ceil((_SECONDS[0] + _SECONDS[1] * len(utterance.text)) / self.frame_seconds)
        limit = min(utterance.max_frames or budget, room_for(len(ids), self._context))
        ids_P = upload(torch.tensor(ids), self.device)
        tokens_PE = prompt_PE = self._model.get_input_embeddings()(ids_P)
        if heard_NE is not None:
            is_heard_P = ids_P == self._config.audio_token_id
            prompt_PE = tokens_PE.masked_scatter(is_heard_P[:, None], heard_NE)
        guided = [False] * (len(ids) - 1) + [True]
        prompt_PIE = torch.stack([prompt_PE, tokens_PE], 1)
        sentence = CodecSentence(key, utterance, prompt_PIE, limit, len(ids), self.codec.begin())
        model = self._model.model
        sentence.family_state = _Progress(
            self._empty(model.audio_tower.decoder),
            self._empty(model.semantic_tokenizer_encoder),
            guided,
            torch.isin(self._kinds, ids_P),
        )
        return sentence

    def _empty(self, network: Any) -> _Contexts:
        """Return the contexts of a network's convolutions before the first frame."""
        return {
            module.cache_key: torch.zeros(
                1, module.in_channels, module.left_pad, dtype=self.dtype, device=self.device
            )
            for module in network.modules()
            if hasattr(module, "cache_key")
        }

    def _latents(self, sample: VoiceSample) -> Tensor:
        """Return the embeddings `[N, E]` of a recording, without the noise of training."""
        rate = self.codec.sample_rate
        found = self._extractor(voices.resampled(sample, rate).numpy(), sampling_rate=rate)
        values = found["input_values"].to(self.device, self.dtype)
        features = self._model.model.get_audio_features(values, found["padding_mask"], sample=False)
        embedded: Tensor = features.pooler_output
        return embedded

    def _ids(self, utterance: Utterance, audio: int) -> list[int]:
        """Return the ids of a chat that ends where audio begins, with `audio` places of a recording."""
        tokenizer = self._tokenizer
        content: list[dict[str, Any]] = [
            {"type": "text", "text": self._control.plain(utterance.text)}
        ]
        if audio:
            content.append({"type": "audio"})
        turns = [{"role": utterance.voice, "content": content}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        place = tokenizer.convert_ids_to_tokens(self._config.audio_token_id)
        text = text.replace(place, place * audio)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def forward(self, inputs_BQIE: Tensor, batch: DecoderBatch) -> Tensor:
        """Return the hidden states `[B, W, E]` of the branches."""
        heard_BQE, tokens_BQE = inputs_BQIE.unbind(2)
        mask, positions = self._branches(batch)
        hidden_BQE: Tensor = self._model.model.language_model(
            inputs_embeds=torch.stack([heard_BQE, heard_BQE, tokens_BQE], 1).flatten(0, 1),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=batch.cache,
        ).last_hidden_state
        last_BWE: Tensor = hidden_BQE[:, -1].unflatten(0, (-1, 3))
        return last_BWE

    def _branches(self, batch: DecoderBatch) -> tuple[Tensor, Tensor]:
        """Return masks `[B * W, 1, Q, T]` and positions `[B * W, Q]` of the branches.

        Each attends to its own positions alone, and counts only those: the branch without the text
        to those that `_Progress` names, that of the tokens to the last of the prompt and all since.
        """
        total = batch.mask.shape[-1]
        own_BWT = torch.ones(len(batch.sentences), 3, total, dtype=torch.bool)
        for row, sentence in enumerate(batch.sentences):
            guided = sentence.family_state.guided
            own_BWT[row, 1, : len(guided)] = torch.tensor(guided)
            own_BWT[row, 2, : sentence.tokens - 1] = False
        own_BWT = upload(own_BWT, self.device)
        positions_BWQ = batch.positions[:, None].expand(-1, 3, -1)
        own_BWQ = (own_BWT.cumsum(-1) - 1).clamp(min=0).gather(2, positions_BWQ)
        itself_BQT = torch.arange(total, device=self.device) == batch.positions[..., None]
        mask_BWQT = (batch.mask & own_BWT[:, :, None]) | itself_BQT[:, None]
        return mask_BWQT.flatten(0, 1)[:, None], own_BWQ.flatten(0, 1)

    def draw(self, hidden_BWE: Tensor, sentences: list[CodecSentence]) -> Drawn:
        config = self._config
        kinds_B = self._kinds[self._scores(hidden_BWE, sentences).argmax(-1)]
        kinds = kinds_B.tolist()
        tokens_BE = heard_BE = self._model.get_input_embeddings()(kinds_B)
        audio = [row for row, kind in enumerate(kinds) if kind == config.audio_token_id]
        heard: list[Tensor | None] = [None] * len(sentences)
        if audio:
            speaking = [sentences[row] for row in audio]
            latents_MD = self._latent(hidden_BWE[audio], speaking)
            samples_MN, decoders = self._decode(latents_MD, speaking)
            heard_BE = tokens_BE.clone()
            heard_BE[audio], encoders = self._feedback(latents_MD, samples_MN, speaking)
            for one, decoder, encoder in zip(speaking, decoders, encoders, strict=True):
                one.family_state.decoder, one.family_state.encoder = decoder, encoder
            for row, samples_N in zip(audio, samples_MN, strict=True):
                heard[row] = samples_N.float()
        for kind, sentence in zip(kinds, sentences, strict=True):
            self._follow(kind, sentence.family_state)
        inputs_BIE = torch.stack([heard_BE, tokens_BE], 1)
        return Drawn(inputs_BIE, heard, [kind == config.eos_token_id for kind in kinds])

    def _scores(self, hidden_BWE: Tensor, sentences: list[CodecSentence]) -> Tensor:
        """Return scores `[B, K]` of the tokens that may be next, as transformers' processors have them.

        What there has been is scored lower by a `repetition_penalty`, whose effect depends on the
        sign: with guidance scores are logarithms of probabilities, of all tokens.
        """
        if self._penalty == 1:
            told_BK, _, untold_BK = F.linear(hidden_BWE, self._kinds_KE).float().unbind(1)
            return self._guided(told_BK, untold_BK)
        told_BV, _, untold_BV = self._model.lm_head(hidden_BWE).float().unbind(1)
        if self._guidance != 1:
            told_BV, untold_BV = told_BV.log_softmax(-1), untold_BV.log_softmax(-1)
        scores_BK = self._guided(told_BV[:, self._kinds], untold_BV[:, self._kinds])
        seen_BK = torch.stack([sentence.family_state.seen for sentence in sentences])
        penalty_BK = torch.where(scores_BK < 0, self._penalty, 1 / self._penalty)
        return torch.where(seen_BK, scores_BK * penalty_BK, scores_BK)

    def _guided(self, told: Tensor, untold: Tensor) -> Tensor:
        """Return what a branch with the text says, strengthened against one without it."""
        return untold + self._guidance * (told - untold)

    def _follow(self, kind: int, progress: _Progress) -> None:
        """Note which positions the branch without the text keeps, and the next one."""
        if kind == self._config.audio_bos_token_id:
            progress.guided = [False] * len(progress.guided)
        elif kind != self._config.audio_token_id:
            progress.guided[-1] = False
        progress.guided.append(True)
        progress.seen = progress.seen | (self._kinds == kind)

    def _latent(self, hidden_MWE: Tensor, sentences: list[CodecSentence]) -> Tensor:
        """Return the latents `[M, D]` that the head draws, in as many steps as the checkpoint says."""
        size = int(self._config.audio_config.hidden_size)
        noise = torch.stack([sentence.noise.normal(size) for sentence in sentences])
        latents_MD = upload(noise, self.device).to(hidden_MWE.dtype)
        condition = torch.cat([hidden_MWE[:, 0], hidden_MWE[:, 1]])
        self._scheduler.set_timesteps(num_inference_steps=self._steps)
        for step in self._scheduler.timesteps:
            both = torch.cat([latents_MD, latents_MD])
            told, untold = self._model.model.diffusion_head(
                both, step.repeat(len(both)).to(both), condition=condition
            ).chunk(2)
            guided_MD = self._guided(told, untold)
            latents_MD = self._scheduler.step(guided_MD, step, latents_MD).prev_sample
        return latents_MD

    def _decode(
        self, latents_MD: Tensor, sentences: list[CodecSentence]
    ) -> tuple[Tensor, list[_Contexts]]:
        """Return the samples `[M, N]` of the next frame, and the decoder's contexts after it."""
        model = self._model.model
        scaled_MD = latents_MD / model.latent_scaling_factor - model.latent_bias_factor
        cache = _joined([sentence.family_state.decoder for sentence in sentences])
        audio_M1N: Tensor = model.audio_tower.decode(
            scaled_MD[:, None], padding_cache=cache, use_cache=True
        ).audio
        return audio_M1N[:, 0], _split(cache, len(sentences))

    def _feedback(
        self, latents_MD: Tensor, samples_MN: Tensor, sentences: list[CodecSentence]
    ) -> tuple[Tensor, list[_Contexts]]:
        """Return the next inputs `[M, E]`, and the semantic encoder's contexts after the frame.

        They are the latents, and what the encoder hears.
        """
        model = self._model.model
        cache = _joined([sentence.family_state.encoder for sentence in sentences])
        heard_M1D = model.semantic_tokenizer_encoder(
            samples_MN[:, None], padding_cache=cache, use_cache=True
        ).latents
        acoustic_M1E = model.multi_modal_projector(latents_MD[:, None])
        inputs_M1E: Tensor = acoustic_M1E + model.semantic_connector(heard_M1D)
        return inputs_M1E[:, 0], _split(cache, len(sentences))

    def embed(self, frames_B: Tensor, sentences: list[CodecSentence]) -> Tensor:
        return frames_B[:, None]


def _joined(contexts: list[_Contexts]) -> Any:
    """Return the cache of a batch of sentences."""
    cache = _Cache()
    for key in contexts[0]:
        layer = cache.layers[key] = _Layer()
        layer.cache = torch.cat([one[key] for one in contexts])
        layer.in_channels, layer.left_pad = layer.cache.shape[1:]
        layer.is_initialized = True
    return cache


def _split(cache: Any, count: int) -> list[_Contexts]:
    """Return each sentence's part of a cache."""
    return [
        {key: layer.cache[row : row + 1] for key, layer in cache.layers.items()}
        for row in range(count)
    ]


def _scheduler(folder: Path, generation: Any) -> tuple[Any, int]:
    """Return diffusers' noise scheduler that a checkpoint names, and its number of steps."""
    if find_spec("diffusers") is None:
        raise ConfigError(
            f"model={str(folder)!r}: its diffusion head needs the package diffusers; install it"
        )
    import diffusers  # an extra

    name = str(getattr(generation, "noise_scheduler_class", None) or "DPMSolverMultistepScheduler")
    settings = getattr(generation, "noise_scheduler_config", None) or {
        "beta_schedule": "squaredcos_cap_v2",
        "prediction_type": "v_prediction",
    }
    kind = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if kind is None or not issubclass(kind, diffusers.SchedulerMixin):
        raise ConfigError(
            f"model={str(folder)!r}: noise_scheduler_class={name!r} is no scheduler of diffusers"
        )
    steps = int(getattr(generation, "num_diffusion_steps", None) or 10)
    if not 1 <= steps <= _MOST_STEPS:
        raise ConfigError(
            f"model={str(folder)!r}: num_diffusion_steps={steps}; give 1 to {_MOST_STEPS}"
        )
    return kind(**settings), steps
