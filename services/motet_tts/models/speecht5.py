"""Run SpeechT5: an encoder over letters, a decoder of spectrum frames, and a HiFi-GAN vocoder.

The decoder predicts a few frames of the mel spectrum at a time, a convolutional post-net corrects
them with their neighbours, and the vocoder makes samples of them; both look ahead. Dropout is
applied to the decoder's inputs when it speaks, too (Shen et al. 2017, section 2.2); its noise is
keyed as all noise is. Source: transformers' `SpeechT5ForTextToSpeech.generate` with
`SpeechT5HifiGan`, which are the reference.

Shapes: B sentences, Q positions, E hidden size, R frames of a step, M mel bins, S speaker
dimensions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, SpeechT5ForTextToSpeech, SpeechT5HifiGan

from motet_kernels import gpu
from motet_kernels.spans import upload
from motet_models.checkpoints import check_checkpoint
from motet_shared.errors import ConfigError
from motet_tts.codecs.hifigan import FusedVocoder
from motet_tts.codecs.windows import WindowCodec, hifigan_reach
from motet_tts.engine.utterance import Key, Utterance

from . import voices
from .codec_lm import CodecLm, CodecSentence, DecoderBatch, Drawn, room_for
from .noise import Noise

_DEFAULT_VOICE = "default"  # a speaker vector of zeros
# As in `generate`: the sum of a step's probabilities that speech ends, and the longest spectrum as
# a multiple of the text.
_THRESHOLD, _LONGEST = 0.5, 20.0


class SpeechT5(CodecLm):
    """Run a checkpoint folder of SpeechT5, with its vocoder in `vocoder/`.

    Its voices are speaker vectors, `voices/NAME.safetensors`.
    """

    def __init__(
        self, folder: Path, *, device: torch.device, dtype: torch.dtype, greedy: bool = False
    ):
        self.device, self.dtype = device, dtype
        self._greedy = greedy
        self._model: Any = (
            SpeechT5ForTextToSpeech.from_pretrained(folder, dtype=dtype).eval().to(device)
        )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._config = self._model.config
        self.codec = self._vocoder(folder)
        dim = self._config.speaker_embedding_dim
        speakers = {
            path.stem: found[0]
            for path in sorted((folder / "voices").glob("*.safetensors"))
            if (found := voices.latents(path, dim)) is not None and len(found) == 1
        } or {_DEFAULT_VOICE: torch.zeros(dim)}
        self._speakers = {
            name: functional.normalize(vector.to(device, dtype), dim=0)
            for name, vector in speakers.items()
        }
        self.voices = tuple(self._speakers)

    def _vocoder(self, folder: Path) -> WindowCodec:
        """Return the post-net and the vocoder as one. Raises ConfigError if there is no vocoder."""
        if not (folder / "vocoder" / "config.json").is_file():
            raise ConfigError(
                f"model={str(folder)!r}: no vocoder folder in it; put SpeechT5's HiFi-GAN there"
            )
        check_checkpoint(folder / "vocoder")
        vocoder: Any = SpeechT5HifiGan.from_pretrained(folder / "vocoder", dtype=self.dtype)
        vocoder.eval().to(self.device)
        postnet, config = self._model.speech_decoder_postnet, self._config
        fused = FusedVocoder(vocoder) if gpu.takes(vocoder.conv_pre.weight) else None

        def decode(frames_BNRM: Tensor) -> Tensor:
            spectrum_BTM = postnet.postnet(frames_BNRM.flatten(1, 2))
            if fused is None:
                samples: Tensor = vocoder(spectrum_BTM)
                return samples
            if vocoder.config.normalize_before:
                spectrum_BTM = (spectrum_BTM - vocoder.mean) / vocoder.scale
            return fused(spectrum_BTM.mT, None)[:, 0]

        reach = hifigan_reach(vocoder.config) + config.speech_decoder_postnet_layers * (
            config.speech_decoder_postnet_kernel // 2
        )
        size = config.reduction_factor
        for rate in vocoder.config.upsample_rates:
            size *= rate
        return WindowCodec(
            decode,
            sample_rate=int(vocoder.config.sampling_rate),
            frame_samples=size,
            reach=-(-reach // config.reduction_factor),
        )

    @torch.inference_mode()
    def begin(self, key: Key, utterance: Utterance) -> CodecSentence:
        ids = list(self._tokenizer(utterance.text)["input_ids"])
        config = self._config
        room_for(len(ids), config.max_text_positions)
        budget = int(len(ids) * _LONGEST / config.reduction_factor)
        limit = min(utterance.max_frames or budget, config.max_speech_positions - 1)
        ids_1L = upload(torch.tensor([ids]), self.device)
        text_1LE = self._model.speecht5.encoder(
            input_values=ids_1L, attention_mask=torch.ones_like(ids_1L)
        ).last_hidden_state
        silence_1M = text_1LE.new_zeros(1, config.num_mel_bins)
        speaker_1S = self._speakers[utterance.voice][None]
        noise = Noise(utterance.seed, utterance.index, 0)
        prompt = self._prenet(silence_1M, speaker_1S, [0], [noise])[0]
        return CodecSentence(
            key, utterance, prompt, limit, len(ids), self.codec.begin(), text=text_1LE
        )

    def _prenet(
        self, spectra_BM: Tensor, speakers_BS: Tensor, positions: list[int], noises: list[Noise]
    ) -> Tensor:
        """Return the decoder's inputs `[B, 1, E]` for the spectra at these positions."""
        prenet = self._model.speecht5.decoder.prenet
        keep = self._config.speech_decoder_prenet_dropout  # as in transformers, of which p is kept
        units = self._config.speech_decoder_prenet_units
        hidden_BE = spectra_BM
        uniform_BLU = None
        if not self._greedy:
            drawn = [noise.uniform(len(prenet.layers), units) for noise in noises]
            uniform_BLU = upload(torch.stack(drawn), self.device)
        for number, layer in enumerate(prenet.layers):
            hidden_BE = functional.relu(layer(hidden_BE))
            if uniform_BLU is None:
                hidden_BE = hidden_BE * keep / (1 - keep)  # what is expected of it
            else:
                hidden_BE = torch.where(uniform_BLU[:, number] < keep, hidden_BE, 0) / (1 - keep)
        encoding = prenet.encode_positions
        places_B = upload(torch.tensor(positions), self.device)
        hidden_BE = prenet.final_layer(hidden_BE) + encoding.alpha * encoding.pe[0, places_B]
        joined = torch.cat([hidden_BE, speakers_BS], dim=-1)
        embedded: Tensor = functional.relu(prenet.speaker_embeds_layer(joined))[:, None]
        return embedded

    def forward(self, inputs_BQE: Tensor, batch: DecoderBatch) -> Tensor:
        assert batch.texts is not None
        cache, dtype = batch.cache, inputs_BQE.dtype
        mask, text_mask = _additive(batch.mask, dtype), _additive(batch.texts.stored, dtype)
        hidden_BQE = inputs_BQE
        text = inputs_BQE if batch.new_text is None else batch.new_text
        for layer in self._model.speecht5.decoder.wrapped_decoder.layers:
            hidden_BQE = layer(
                hidden_BQE, mask, text, encoder_attention_mask=text_mask, past_key_values=cache
            )[0]
        return hidden_BQE[:, -1]

    def draw(self, hidden_BE: Tensor, sentences: list[CodecSentence]) -> Drawn:
        postnet = self._model.speech_decoder_postnet
        frames_BRM = postnet.feat_out(hidden_BE).unflatten(-1, (-1, self._config.num_mel_bins))
        ends_B = postnet.prob_out(hidden_BE).float().sigmoid().sum(-1) >= _THRESHOLD
        return Drawn(frames_BRM, list(frames_BRM), ends_B.tolist())

    def embed(self, frames_B: Tensor, sentences: list[CodecSentence]) -> Tensor:
        speakers_BS = torch.stack([self._speakers[one.utterance.voice] for one in sentences])
        positions = [sentence.frames for sentence in sentences]
        noises = [sentence.noise for sentence in sentences]
        return self._prenet(frames_B[:, -1], speakers_BS, positions, noises)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where the mask is True and the lowest number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(
        ~mask, torch.finfo(dtype).min
    )
