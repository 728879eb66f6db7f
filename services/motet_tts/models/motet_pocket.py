"""Adapt pocket-tts, the project's own model in `pocket`, to the engine.

The model advances a pointer along the phonemes, so it knows when each word begins.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from motet_kernels.runtime.device import dtype_name
from motet_kernels.spans import upload
from motet_shared.errors import BadRequest, ConfigError
from motet_tts.codecs.codec import Codec, State
from motet_tts.engine.utterance import Key, Utterance
from motet_tts.pocket.codec import SpeechCodec
from motet_tts.pocket.frame_generator import Pointer
from motet_tts.pocket.model import PocketSpeech

from .codec_lm import CodecLm, CodecSentence, DecoderBatch, Drawn
from .noise import hash_numbers

_FRAMES_PER_PHONEME = 12  # limit of a sentence: half a second for each


@dataclass(slots=True)
class PhonemeProgress:
    """Hold the position of a sentence in its phonemes.

    pointer: the phoneme that is being spoken.
    first_phonemes: the first phoneme of each word.
    began: the first frame of each word begun so far.
    """

    pointer: Pointer
    first_phonemes: list[int]
    began: list[int] = field(default_factory=list)


class PocketCodec(Codec):
    """Decode with `SpeechCodec`, from frames that have the pointer's columns after their codes."""

    def __init__(self, codec: SpeechCodec):
        self._codec = codec
        self.sample_rate, self.frame_samples = codec.config.sample_rate, codec.config.frame_samples

    def begin(self, seed: int = 0) -> State:
        return self._codec.begin(seed)

    def decode(self, states: list[State], frames_BN: Tensor) -> list[Tensor]:
        codes_BNK = frames_BN[..., : self._codec.config.codebooks]
        return list(self._codec.decode(states, codes_BNK).float())


class MotetPocket(CodecLm):
    """Run a checkpoint folder of pocket-tts."""

    codec: PocketCodec

    def __init__(
        self, folder: Path, *, device: torch.device, dtype: torch.dtype, greedy: bool = False
    ):
        if dtype != torch.float32:
            raise ConfigError(
                f"dtype={dtype_name(dtype)!r}: pocket-tts computes in float32; give float32 or auto"
            )
        self.device, self.dtype = device, dtype
        try:
            self._model = PocketSpeech.load(folder)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"model={str(folder)!r}: {error}") from None
        # The reader stays on the CPU: its output is used by the host, and a sentence is little
        # work.
        self._model.speaker.to(device)
        self._model.codec.speak_on(device)
        self.codec = PocketCodec(self._model.codec)
        self.voices = self._model.config.voices
        self.rates = self._model.config.rates
        self._temperature = 0.0 if greedy else _temperature(folder)

    def begin(self, key: Key, utterance: Utterance) -> CodecSentence:
        model, text = self._model, utterance.text
        try:
            with torch.inference_mode():
                reading = model.read(text, utterance.voice)
                prompt = model.speaker.prompt(
                    reading.phonemes, model.voice(utterance.voice), utterance.speed
                )
        except ValueError as error:
            raise BadRequest(f"text: {error}", param="input") from None
        room = model.config.max_positions - len(prompt)
        limit = min(utterance.max_frames or _FRAMES_PER_PHONEME * (len(reading.phonemes) + 4), room)
        # 40 bits, since the codec multiplies the seed
        seed = hash_numbers(utterance.seed, utterance.index) >> 24
        progress = PhonemeProgress(
            Pointer(reading.phonemes), _first_phonemes(utterance.words, reading.characters)
        )
        sentence = CodecSentence(
            key, utterance, prompt, limit, len(reading.phonemes), self.codec.begin(seed), progress
        )
        sentence.done = progress.pointer.done  # nothing in it can be pronounced
        return sentence

    def forward(self, inputs_BQE: Tensor, batch: DecoderBatch) -> Tensor:
        hidden_BQE: Tensor = self._model.speaker.backbone(
            inputs_embeds=inputs_BQE,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            past_key_values=batch.cache,
            use_cache=True,
        ).last_hidden_state
        return hidden_BQE[:, -1]

    def draw(self, hidden_BE: Tensor, sentences: list[CodecSentence]) -> Drawn:
        config, progresses = self._model.config, [sentence.family_state for sentence in sentences]
        gumbel_BKV = None
        if self._temperature > 0:
            frames_drawn = [
                sentence.noise.gumbel(config.codebooks, config.codes) for sentence in sentences
            ]
            gumbel_BKV = upload(torch.stack(frames_drawn), self.device)
        pointers = [progress.pointer for progress in progresses]
        before = [pointer.place for pointer in pointers]
        frames_BF = self._model.speaker.draw(
            hidden_BE, pointers, temperature=self._temperature, gumbel_BKV=gumbel_BKV
        )
        for sentence, progress, place in zip(sentences, progresses, before, strict=True):
            now = max(
                place + 1, progress.pointer.place
            )  # phonemes passed within a frame began with it
            while (
                len(progress.began) < len(progress.first_phonemes)
                and progress.first_phonemes[len(progress.began)] < now
            ):
                progress.began.append(sentence.frames)
        return Drawn(frames_BF, list(frames_BF), [pointer.done for pointer in pointers])

    def embed(self, frames_B: Tensor, sentences: list[CodecSentence]) -> Tensor:
        return self._model.speaker.embed(frames_B)[:, None]

    def starts(self, sentence: CodecSentence) -> tuple[int, ...] | None:
        """Return the first sample of each word begun so far.

        Words that the pointer has not reached when the sentence ends begin at its end.
        """
        progress: PhonemeProgress = sentence.family_state
        missing = len(progress.first_phonemes) - len(progress.began) if sentence.done else 0
        began = progress.began + [sentence.frames] * missing
        return tuple(frame * self.codec.frame_samples for frame in began)


def _first_phonemes(words: tuple[str, ...], characters: list[int]) -> list[int]:
    """Return for each word the index of the first phoneme that comes from it or from later text."""
    found, begin, phoneme = [], 0, 0
    for word in words:
        while phoneme < len(characters) and characters[phoneme] < begin:
            phoneme += 1
        found.append(phoneme)
        begin += len(word) + 1
    return found


def _temperature(folder: Path) -> float:
    """Return the temperature of `generation_config.json`; 0 (greedy) without one."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return 0.0
    settings = json.loads(path.read_text())
    return float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0
