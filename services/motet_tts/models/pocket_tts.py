"""Run PocketTTS and Phonon: transformers over text and latents whose flow head samples each latent.

A Mimi-like decoder turns latents into samples. Source: transformers'
`PocketTTSForConditionalGeneration`, `GradiumPhononTTSForConditionalGeneration` and
`PocketTTSProcessor.decode`, which are the reference. Their `generate` returns all latents at its
end; here `CodecBatch` loops over the frames.

Shapes: B sentences, D latent dimensions, E hidden size.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GradiumPhononTTSForConditionalGeneration,
    PocketTTSAudioTokenizerModel,
    PocketTTSFeatureExtractor,
    PocketTTSForConditionalGeneration,
)

from motet_kernels.spans import upload
from motet_models.checkpoints import check_checkpoint
from motet_tts.codecs.codec import codec_folder, processor_settings
from motet_tts.codecs.mimi import MimiDecoder
from motet_tts.engine.utterance import Key, Utterance

from . import voices
from .codec_lm import CodecLm, CodecSentence, DecoderBatch, Drawn, room_for

_DEFAULT_VOICE = "default"  # the model without a voice prompt


class PocketTts(CodecLm):
    """Run a checkpoint folder of PocketTTS, whose audio tokenizer is in it or named by it."""

    _architecture: Any = PocketTTSForConditionalGeneration

    def __init__(
        self, folder: Path, *, device: torch.device, dtype: torch.dtype, greedy: bool = False
    ):
        self.device, self.dtype = device, dtype
        self._model: Any = self._architecture.from_pretrained(folder, dtype=dtype).eval().to(device)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._config = self._model.config
        self._settings = processor_settings(folder)
        generation = self._model.generation_config
        self._flow_steps = int(_default(getattr(generation, "num_flow_steps", None), 1))
        self._threshold = float(_default(getattr(generation, "eos_threshold", None), -4.0))
        self._earliest = int(_default(getattr(generation, "min_frames_before_eos", None), 6))
        random = not greedy and bool(getattr(generation, "do_sample", False))
        self._noise_scale = (
            math.sqrt(_default(getattr(generation, "temperature", None), 1.0)) if random else 0.0
        )
        codec = codec_folder(folder)
        check_checkpoint(Path(codec))
        tokenizer: Any = PocketTTSAudioTokenizerModel.from_pretrained(codec)
        tokenizer.eval().to(device)
        self.codec = MimiDecoder(
            tokenizer.decoder, lambda latents_BND: self._project(tokenizer, latents_BND)
        )
        self._fade = torch.linspace(
            0, 1, int(self._setting("fade_in_duration", 0.005) * self.codec.sample_rate)
        )
        self._encoder = self._voice_encoder(tokenizer)
        with torch.inference_mode():
            prompts = _voice_prompts(folder, self._voice_dim, self._encoder)
        self._prompts = {name: latents.to(device) for name, latents in prompts.items()}
        self.voices = tuple(self._prompts)
        self.clones = self._encoder is not None
        self._samples = voices.EncodedSamples(
            lambda sample: _encoded(voices.resampled(sample, self.codec.sample_rate), self._encoder)
        )

    @property
    def _voice_dim(self) -> int:
        return int(self._config.latent_dim)

    def _voice_encoder(self, tokenizer: Any) -> Any:
        """Return the audio tokenizer if it encodes recordings of voices, else None."""
        return None if tokenizer.encoder is None else tokenizer

    def _project(self, tokenizer: Any, latents_BND: Tensor) -> Tensor:
        latents: Tensor = self._model.denormalize_latents(latents_BND)
        projected: Tensor = tokenizer.latent_proj(latents.to(tokenizer.dtype).transpose(1, 2))
        return projected

    def _setting(self, name: str, otherwise: float) -> float:
        return float(_default(self._settings.get(name), otherwise))

    def begin(self, key: Key, utterance: Utterance) -> CodecSentence:
        voice = self._voice(utterance)
        text_ids, ids = self._ids(utterance.text, len(voice))
        budget = math.ceil((len(text_ids) / 3 + 2) * self._config.frame_rate)
        room = room_for(len(ids), self._config.max_position_embeddings)
        spoken_words = self._tokenizer.decode(text_ids, skip_special_tokens=True).split()
        is_short = len(spoken_words) <= self._setting("short_text_max_words", 4)
        tail = (
            self._setting("frames_after_eos_short_text", 4)
            if is_short
            else self._setting("frames_after_eos", 2)
        )
        limit = min(utterance.max_frames or budget, room)
        sentence = CodecSentence(
            key, utterance, self._embedded(ids, voice), limit, len(text_ids), self.codec.begin()
        )
        sentence.family_state = {"tail": int(tail), "left": -1}  # frames after the end of speech
        return sentence

    def _voice(self, utterance: Utterance) -> Tensor:
        """Return the voice's latents `[frames, D]`."""
        if (sample := utterance.sample) is None:
            return self._prompts[utterance.voice]
        return self._samples(sample)

    def _ids(self, text: str, frames: int) -> tuple[list[int], list[int]]:
        """Return the ids of the text alone, and of the prompt with `frames` voice placeholders."""
        config, tokenizer = self._config, self._tokenizer
        if tokenizer.chat_template:
            content = [{"type": "text", "text": text}]
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False
            )
        else:
            rendered = text
        begin = getattr(config, "audio_prompt_bos_token_id", None)
        places = {begin, config.audio_prompt_token_id, config.audio_bos_token_id}
        all_ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        text_ids = [token for token in all_ids if token not in places]
        voice_ids = [config.audio_prompt_token_id] * frames
        if frames and begin is not None:
            voice_ids = [begin, *voice_ids]
        return text_ids, [*voice_ids, *text_ids, config.audio_bos_token_id]

    @torch.inference_mode()
    def _embedded(self, ids: list[int], voice: Tensor) -> Tensor:
        """Return `[P, E]`: tokens, the voice's latents, and the learnt first latent at the end."""
        model = self._model.model
        embedded: Tensor = model.embed_tokens(upload(torch.tensor(ids), self.device))
        if len(voice):
            first = ids.index(self._config.audio_prompt_token_id)
            embedded[first : first + len(voice)] = model.audio_prompt_proj(
                voice.to(model.audio_prompt_proj.weight.dtype)
            )
        embedded[-1] = model.embed_audio_latents(model.bos_latent)
        return embedded

    def forward(self, inputs_BQE: Tensor, batch: DecoderBatch) -> Tensor:
        hidden_BQE: Tensor = _backbone(self._model.model, inputs_BQE, batch)
        return hidden_BQE[:, -1]

    def draw(self, hidden_BE: Tensor, sentences: list[CodecSentence]) -> Drawn:
        if self._noise_scale:
            drawn = [sentence.noise.normal(self._config.latent_dim) for sentence in sentences]
            noise_BD = (
                upload(torch.stack(drawn), self.device).to(hidden_BE.dtype) * self._noise_scale
            )
        else:
            noise_BD = hidden_BE.new_zeros(len(sentences), self._config.latent_dim)
        latents_BD = self._model.sample_latent(hidden_BE, noise_BD, self._flow_steps)
        ends = self._model.eos_head(hidden_BE)[:, 0].float().tolist()
        last = [
            self._is_last(sentence, logit) for sentence, logit in zip(sentences, ends, strict=True)
        ]
        return Drawn(latents_BD, list(latents_BD), last)

    def _is_last(self, sentence: CodecSentence, logit: float) -> bool:
        """Return True for the last frame.

        Some frames follow the one predicted to end the speech: the codec needs them to close it.
        """
        family_state = sentence.family_state
        if (
            family_state["left"] < 0
            and logit > self._threshold
            and sentence.frames >= self._earliest
        ):
            family_state["left"] = family_state["tail"]
        elif family_state["left"] > 0:
            family_state["left"] -= 1
        value: bool = family_state["left"] == 0
        return value

    def embed(self, frames_B: Tensor, sentences: list[CodecSentence]) -> Tensor:
        embedded: Tensor = self._model.model.embed_audio_latents(frames_B[:, None])
        return embedded

    def shape(self, sentence: CodecSentence, samples: Tensor) -> Tensor:
        """Fade in the first samples: a fresh decoder begins with a step, heard as a click."""
        fade = self._fade[sentence.decoded * self.codec.frame_samples :][: len(samples)]
        return torch.cat([samples[: len(fade)] * fade, samples[len(fade) :]])


class Phonon(PocketTts):
    """Run a checkpoint folder of Gradium's Phonon.

    Its voices are latents of a codec that no checkpoint has, `voices/NAME.safetensors`.
    """

    _architecture = GradiumPhononTTSForConditionalGeneration

    @property
    def _voice_dim(self) -> int:
        return int(self._config.audio_prompt_dim)

    def _voice_encoder(self, tokenizer: Any) -> Any:
        return None


def _backbone(model: Any, hidden_BQE: Tensor, batch: DecoderBatch) -> Tensor:
    """Apply the layers of `PocketTTSModel`; its `forward` would search inputs for placeholders."""
    positions = model.rotary_emb(hidden_BQE, position_ids=batch.positions)
    mask = batch.mask
    for layer in model.layers[: model.config.num_hidden_layers]:
        hidden_BQE = layer(
            hidden_BQE,
            attention_mask=mask,
            position_embeddings=positions,
            position_ids=batch.positions,
            past_key_values=batch.cache,
            use_cache=True,
        )
    output: Tensor = model.norm(hidden_BQE)
    return output


def _voice_prompts(folder: Path, dim: int, tokenizer: Any) -> dict[str, Tensor]:
    """Return voice latents `[frames, dim]` by name; without any, an empty prompt as the default.

    They are those of `default-voice.safetensors`, and of the files in `voices`.

    tokenizer: encodes recordings; None if there is none for them.
    """
    prompts: dict[str, Tensor] = {}
    files = sorted((folder / "voices").glob("*"))
    for path in (*sorted(folder.glob("default-voice.safetensors")), *files):
        found = None
        if path.suffix == ".safetensors":
            found = voices.latents(path, dim)
        elif path.suffix == ".wav" and tokenizer is not None:
            samples = voices.waveform(path, tokenizer.config.sampling_rate)
            found = None if samples is None else _encoded(samples, tokenizer)
        if found is not None:
            prompts.setdefault(_DEFAULT_VOICE if path.parent == folder else path.stem, found)
    return prompts or {_DEFAULT_VOICE: torch.zeros(0, dim)}


def _encoded(samples: Tensor, tokenizer: Any) -> Tensor:
    """Return the latents of a recording, ended on a short pause as in the model's training."""
    rate = tokenizer.config.sampling_rate
    size = tokenizer.config.frame_size
    extractor = PocketTTSFeatureExtractor(
        sampling_rate=rate, frame_size=size, pad_to_multiple_of=size
    )
    inputs = extractor(samples.numpy(), sampling_rate=rate)
    inputs_on_device = [
        inputs[name].to(tokenizer.device) for name in ("input_values", "padding_mask")
    ]
    encoded: Tensor = tokenizer.encode(*inputs_on_device).latents[0]
    return encoded


def _default(value: Any, otherwise: float) -> float:
    return otherwise if value is None else value
