"""Run VITS and MMS: a sentence's latents at once, its samples in chunks, for low latency.

The same computation as transformers' `VitsModel`, whose output is the reference; noise is drawn in
the same order from a generator seeded by (seed, sentence).

Shapes: L tokens, T frames, F latent dimensions, E speaker dimensions.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, VitsModel
from transformers.utils import is_phonemizer_available, is_uroman_available

from motet_kernels.spans import upload
from motet_shared.errors import ConfigError
from motet_shared.process.batch_isolation import computed
from motet_tts.codecs.codec import on_host
from motet_tts.codecs.vocoders import Latents, vocoder_of
from motet_tts.engine.failures import failure
from motet_tts.engine.utterance import Key, StepOutput, Utterance

from .noise import hash_numbers

_ONLY_VOICE = "default"
_GENERATOR = threading.Lock()  # held while noise is drawn from the process's own generator


@dataclass(slots=True)
class VitsSentence:
    """Hold the state of one running utterance.

    ids: token ids.
    first_tokens: index of the first token of each word.
    speaker: embedding `[1, E, 1]`.
    latents: once computed.
    starts: the first sample of each word.
    """

    key: Key
    utterance: Utterance
    ids: list[int]
    first_tokens: list[int]
    speaker: Tensor | None
    latents: Latents | None = None
    starts: tuple[int, ...] | None = None


class Vits:
    """Run a checkpoint folder of VITS and all its running sentences."""

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        first_chunk: float,
        chunk: float,
    ):
        self.device, self.dtype = device, dtype
        self._model: Any = VitsModel.from_pretrained(folder, dtype=dtype).eval().to(device)
        self._model.duration_predictor.float()  # in 16 bits its splines would not be monotonic
        self._vocoder = vocoder_of(self._model.decoder)
        del self._model.decoder  # the vocoder holds what it needs of it
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        _check(self._tokenizer, folder)
        config = self._model.config
        self.sample_rate = int(config.sampling_rate)
        many = config.num_speakers > 1
        self.voices = (
            tuple(str(number) for number in range(config.num_speakers)) if many else (_ONLY_VOICE,)
        )
        self.rates = (1.0, 1.0)
        self.clones = self.instructs = False
        self._many = many
        self._frame_samples = 1
        for rate in config.upsample_rates:
            self._frame_samples *= rate
        self._first, self._later = (
            max(1, round(seconds * self.sample_rate / self._frame_samples))
            for seconds in (first_chunk, chunk)
        )
        self._sentences: list[VitsSentence] = []

    def __len__(self) -> int:
        return len(self._sentences)

    @property
    def has_work(self) -> bool:
        """Return True while there are sentences."""
        return bool(self._sentences)

    def add(self, key: Key, utterance: Utterance) -> None:
        """Add a sentence to the next step."""
        speaker = None
        if self._many:
            with torch.inference_mode():
                speaker = self._model.embed_speaker(
                    upload(torch.tensor([int(utterance.voice)]), self.device)
                ).unsqueeze(-1)
        ids, first_tokens = self._tokens(utterance.words)
        self._sentences.append(VitsSentence(key, utterance, ids, first_tokens, speaker))

    def remove(self, key: Key) -> None:
        """Drop a sentence without further output. Unknown keys are ignored."""
        self._sentences = [sentence for sentence in self._sentences if sentence.key != key]

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Compute latents of new sentences and every sentence's next chunk.

        A sentence that fails ends alone.
        """
        outputs, groups = [], dict[tuple[int, ...], list[VitsSentence]]()
        for sentence in self._sentences:
            try:
                latents = self._planned(sentence)
            except Exception as error:
                outputs.append(StepOutput(sentence.key, error=failure(error, self.device)))
            else:
                group = self._vocoder.group(latents, self._end(latents))
                groups.setdefault(group, []).append(sentence)
        rows = [sentence for group in groups.values() for sentence in group]
        waveforms = on_host(
            [waveform for group in groups.values() for waveform in computed(self._decode, group)]
        )
        outputs += map(self._output, rows, waveforms)
        ended = {one.key for one in outputs if one.done or one.error is not None}
        self._sentences = [sentence for sentence in self._sentences if sentence.key not in ended]
        return outputs

    def _tokens(self, words: tuple[str, ...]) -> tuple[list[int], list[int]]:
        """Return token ids and the index of the first token of each word."""
        tokenizer = self._tokenizer
        parts = [tokenizer.prepare_for_tokenization(word)[0] for word in words]
        blank = " " if " " in tokenizer.get_vocab() else ""
        text, first_letters = "", []
        for part in parts:
            if part and text:
                text += blank
            first_letters.append(len(text))
            text += part
        if not text:
            return [], [0 for _ in words]
        step, offset = (2, 1) if tokenizer.add_blank else (1, 0)
        return list(tokenizer(text)["input_ids"]), [
            letter * step + offset for letter in first_letters
        ]

    def _planned(self, sentence: VitsSentence) -> Latents:
        """Return the latents, after computing those of a new sentence."""
        if sentence.latents is None:
            self._plan(sentence)
        assert sentence.latents is not None
        return sentence.latents

    def _end(self, latents: Latents) -> int:
        return self._vocoder.due(latents, self._first, self._later)

    def _plan(self, sentence: VitsSentence) -> None:
        """Compute the durations and latents of a sentence."""
        if not sentence.ids:
            nothing = torch.zeros(self._model.config.flow_size, 0, device=self.device)
            sentence.latents, sentence.starts = Latents(nothing, sentence.speaker), ()
            return
        with _GENERATOR, torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash_numbers(sentence.utterance.seed, sentence.utterance.index))
            durations_L, latents_FT = self._latents(torch.tensor([sentence.ids]), sentence.speaker)
        sentence.latents = Latents(latents_FT, sentence.speaker)
        begins_L = (durations_L.cumsum(0) - durations_L) * self._frame_samples
        sentence.starts = tuple(
            int(begins_L[min(token, len(begins_L) - 1)]) for token in sentence.first_tokens
        )

    def _latents(self, ids_1L: Tensor, speaker: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return frames per token `[L]`, on the CPU, and latents `[F, T]`.

        Noise is drawn in the order of `VitsModel`.
        """
        model = self._model
        mask_1L1 = torch.ones(1, ids_1L.shape[1], 1, dtype=model.dtype, device=self.device)
        ids_1L = upload(ids_1L, self.device)
        text = model.text_encoder(
            input_ids=ids_1L, padding_mask=mask_1L1, attention_mask=None, return_dict=True
        )
        hidden, mask_11L = text.last_hidden_state.transpose(1, 2), mask_1L1.transpose(1, 2)
        wide = hidden.float(), mask_11L.float(), None if speaker is None else speaker.float()
        if model.config.use_stochastic_duration_prediction:
            log_duration = model.duration_predictor(
                *wide, reverse=True, noise_scale=model.noise_scale_duration
            )
        else:
            log_duration = model.duration_predictor(*wide)
        durations_L = (log_duration.exp() / model.speaking_rate).ceil()[0, 0].long().cpu()
        means_1TF = _repeated(text.prior_means, durations_L)
        deviations_1TF = _repeated(text.prior_log_variances, durations_L).exp()
        # Transposed before the noise is drawn, which follows the memory order.
        means_1FT, deviations_1FT = means_1TF.transpose(1, 2), deviations_1TF.transpose(1, 2)
        noise_1FT = upload(torch.randn_like(means_1FT, device="cpu"), self.device)
        prior_1FT = means_1FT + noise_1FT * deviations_1FT * model.noise_scale
        mask_11T = torch.ones(1, 1, prior_1FT.shape[2], dtype=model.dtype, device=self.device)
        return durations_L, model.flow(prior_1FT, mask_11T, speaker, reverse=True)[0]

    def _decode(self, group: Sequence[VitsSentence]) -> list[Tensor]:
        """Return the samples that are due, per sentence."""
        latents = [self._planned(sentence) for sentence in group]
        return self._vocoder.decode(latents, [self._end(one) for one in latents])

    def _output(self, sentence: VitsSentence, samples: Tensor | Exception) -> StepOutput:
        if isinstance(samples, Exception):
            return StepOutput(sentence.key, error=failure(samples, self.device))
        latents = self._planned(sentence)
        starts, sentence.starts = sentence.starts, None
        return StepOutput(
            sentence.key,
            samples,
            starts,
            done=latents.at >= latents.total,
            tokens=len(sentence.ids),
            frames=latents.at,
        )

    def check_integrity(self) -> None:
        """Do nothing: there is no state besides the list of sentences."""


def _repeated(values_1LF: Tensor, durations_L: Tensor) -> Tensor:
    """Repeat each token by its duration; one frame of zeros if all durations are 0."""
    times_L, total = upload(durations_L, values_1LF.device), int(durations_L.sum())
    repeated = values_1LF.repeat_interleave(times_L, dim=1, output_size=total)
    return repeated if repeated.shape[1] else values_1LF.new_zeros(1, 1, values_1LF.shape[2])


def _check(tokenizer: Any, folder: Path) -> None:
    """Raise ConfigError for a checkpoint whose tokenizer needs a package that is not installed."""
    for needed, installed, package in (
        (tokenizer.phonemize, is_phonemizer_available, "phonemizer"),
        (tokenizer.is_uroman, is_uroman_available, "uroman"),
    ):
        if needed and not installed():
            raise ConfigError(
                f"model={str(folder)!r}: its tokenizer needs the package {package}; install it"
            )
