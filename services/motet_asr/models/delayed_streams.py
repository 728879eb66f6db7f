"""Run models that read a frame of audio and write a text token at a time: Kyutai STT and Voxtral-realtime.

The text is some frames behind the audio, as the model was trained; where nothing is said, the
token is padding. A recording is a stream that is there at once.

M mel bins · T feature frames · N audio frames · E model size.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from motet_asr.config import EngineConfig
from motet_asr.engine.audio_stream import AudioStream, StreamChunk
from motet_asr.engine.causal_engine import CausalState, RunningSequence
from motet_asr.engine.engine import SAMPLE_RATE, Audio, WaitingWindow
from motet_asr.engine.request import Pass, TimedSegment, WindowResult
from motet_kernels.spans import upload
from motet_media.audio import Resampler
from motet_shared.errors import ConfigError

from .causal import CausalRecognizer
from .nemotron import DELAY
from .timed_tokens import TimedToken, WordBuilder, spell, timed_segments

_CHUNK = 12  # frames of a chunk at most, so that partials of what came at once are not late
_LEFT_FRAMES = 32  # of silence before the audio, unless tekken.json says otherwise
_RIGHT_FRAMES = 11  # of silence after the delay, in which Voxtral-realtime ends its last word
_LAST_SECOND = 1.0  # second of silence after the delay that Kyutai's extractor adds
_UNFINISHED = "\ufffd"  # of a character whose bytes are in several tokens
_CHARACTER = 4  # bytes of one at most


@dataclass(slots=True, eq=False)
class _Carried:
    """Hold what the model remembers of a stream: of its text, and of its encoder."""

    decoding: CausalState
    keys_values: Any = None
    convolutions: Any = None


class DelayedStreams(CausalRecognizer):
    """Write a token for each frame of audio.

    frame: seconds of audio of a token.
    frame_samples: those of a frame, at `stream_rate`.
    first: frames that a stream's first chunk has at least.
    back, ahead: samples before and after a frame that it is computed from.
    lead: seconds that a sound is before its token's place in the text.
    """

    streams = True
    frame: float
    frame_samples: int
    first = 1
    back = 0
    ahead = 0
    lead = 0.0

    @abstractmethod
    def encode(self, window: WaitingWindow) -> RunningSequence:
        """Return the prompt and the frames of a recording."""

    @abstractmethod
    def encode_chunk(self, window: WaitingWindow, chunk: StreamChunk) -> RunningSequence:
        """Return the frames of a chunk of a stream; of the first one, the prompt too."""

    @abstractmethod
    def chunk_features(self, samples: Audio, begins: bool) -> Tensor:
        """Return the features of samples: whole frames, with what they need around them."""

    @abstractmethod
    def silence(self) -> tuple[int, int]:
        """Return the samples of silence before and after a live stream."""

    def begin(self, windows: Sequence[WaitingWindow]) -> list[RunningSequence]:
        """Encode windows one by one: they have different lengths, and streams their own state."""
        return [
            self.encode_chunk(window, window.features)
            if isinstance(window.features, StreamChunk)
            else self.encode(window)
            for window in windows
        ]

    def open_stream(self) -> AudioStream:
        return DelayedStream(self)

    def carried(self) -> _Carried:
        """Return the state of a stream that begins."""
        return _Carried(self.state())

    @abstractmethod
    def speller(self) -> Callable[[int], str]:
        """Return what spells the tokens of one text in their order; of padding, nothing."""

    @abstractmethod
    def is_padding(self, token: int) -> bool:
        """Return True for tokens without letters."""

    def times(self, window_pass: Pass, first: int, longest: float) -> list[TimedToken]:
        """Return when the tokens of a pass were said.

        first: the number of the pass's first token in its text. longest: the latest time.
        """
        timed = []
        scored = zip(window_pass.tokens, window_pass.logprobs, strict=True)
        for index, (token, logprob) in enumerate(scored, first):
            start = min(max(index * self.frame - self.lead, 0.0), longest)
            timed.append(TimedToken(token, start, min(start + self.frame, longest), logprob))
        return timed

    def segments(self, result: WindowResult, seconds: float, words: bool) -> list[TimedSegment]:
        """Split the text at pauses in speech."""
        [window_pass] = result.passes
        timed = self.times(window_pass, 0, seconds)
        said = [one for one in timed if not self.is_padding(one.token)]
        spelling = self.speller() if words else None
        return timed_segments(said, window_pass.avg_logprob, self.text_of, spelling)


class DelayedStream(AudioStream):
    """Cut a live stream into whole frames, as soon as they are there."""

    def __init__(self, family: DelayedStreams):
        self._family = family
        self._builder = WordBuilder(family.speller())
        self.words = self._builder.words
        self._state = family.carried()
        before, self._after = family.silence()
        self._audio: Audio = np.zeros(before, np.float32)  # from what the next frame needs on
        self._sent = 0  # frames
        self._heard = 0  # tokens

    def feed(self, samples: Any) -> list[StreamChunk]:
        self._audio = np.concatenate([self._audio, samples])
        return self._cut()

    def finish(self) -> list[StreamChunk]:
        family = self._family
        partial = -len(self._audio) % family.frame_samples
        silence = partial + self._after + family.back + family.ahead
        return self.feed(np.zeros(silence, np.float32))

    def _cut(self) -> list[StreamChunk]:
        family, chunks = self._family, []
        while (count := self._complete()) >= (1 if self._sent else family.first):
            count = min(count, max(_CHUNK, 1 if self._sent else family.first))
            begins = not self._sent
            size = count * family.frame_samples
            extra = family.ahead + (0 if begins else family.back)
            features = family.chunk_features(self._audio[: size + extra], begins)
            self._audio = self._audio[size - (family.back if begins else 0) :]
            self._sent += count
            chunks.append(StreamChunk(features, size / family.stream_rate, self._state))
        return chunks

    def _complete(self) -> int:
        """Return the frames that are there with all that they need."""
        extra = self._family.ahead + (self._family.back if self._sent else 0)
        return max(len(self._audio) - extra, 0) // self._family.frame_samples

    def hear(self, result: WindowResult) -> None:
        [heard] = result.passes
        for timed in self._family.times(heard, self._heard, float("inf")):
            self._builder.add(timed)
        self._heard += len(heard.tokens)


class Kyutai(DelayedStreams):
    """Transcribe with a `KyutaiSpeechToTextForConditionalGeneration`, its extractor and its tokenizer.

    Its codec, Mimi, turns a frame into codes of as many codebooks, whose embeddings are added.
    """

    word_times = "frames"
    stream_rate = 24_000

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        super().__init__(config, model, extractor, tokenizer, model.model)
        codec = model.config.codec_config
        if (rate := codec.sampling_rate) != self.stream_rate:
            raise ConfigError(
                f"model={config.model!r}: its codec reads {rate} Hz; give a model for {self.stream_rate} Hz"
            )
        self.frame_samples = model.config.frame_size
        self.frame = self.frame_samples / self.stream_rate
        self.lead = extractor.audio_delay_seconds + extractor.audio_silence_prefix_seconds
        self._table = model.model.embed_tokens.embed_tokens
        self._offsets_C = model.model.embed_tokens.audio_tokens_offsets[1:]
        self._silent = {*tokenizer.all_special_ids, model.config.pad_token_id}

    def features(self, audio: Audio) -> Tensor:
        """Return samples [N * frame] at 24 kHz, with the silence that the model expects."""
        resampler = Resampler(SAMPLE_RATE, self.stream_rate)
        pcm = np.clip(np.rint(audio * 32768), -32768, 32767).astype("<i2").tobytes()
        resampled = np.frombuffer(resampler.feed(pcm) + resampler.flush(), "<i2")
        batch = self._extractor(
            resampled.astype(np.float32) / 32768,
            sampling_rate=self.stream_rate,
            return_tensors="pt",
        )
        samples: Tensor = batch.input_values[0, 0]
        return samples[: len(samples) // self.frame_samples * self.frame_samples]

    def silence(self) -> tuple[int, int]:
        after = self._extractor.audio_delay_seconds + _LAST_SECOND
        before = self._extractor.audio_silence_prefix_seconds
        return round(before * self.stream_rate), round(after * self.stream_rate)

    def chunk_features(self, samples: Audio, begins: bool) -> Tensor:
        return torch.from_numpy(samples.copy())

    def encode(self, window: WaitingWindow) -> RunningSequence:
        carried = self.carried()
        frames_NE = self._frames(window.features, carried)[:-1]  # after the last one is nothing
        return RunningSequence(
            window, carried.decoding, self._prompt(), frames_NE, 1 + len(frames_NE)
        )

    def encode_chunk(self, window: WaitingWindow, chunk: StreamChunk) -> RunningSequence:
        carried: _Carried = chunk.state
        begins = not carried.decoding.sequence.length
        frames_NE = self._frames(chunk.features, carried)
        prompt_PE = self._prompt() if begins else frames_NE[:0]
        limit = len(prompt_PE) + len(frames_NE)
        return RunningSequence(window, carried.decoding, prompt_PE, frames_NE, limit)

    def _prompt(self) -> Tensor:
        """Return the first position [1, E]: the token before the text, and the code before audio."""
        config = self._model.config
        text_E = self.embed_ids([config.bos_token_id])[0]
        audio_E: Tensor = self._table(self._offsets_C + config.audio_bos_token_id).sum(0)
        return (text_E + audio_E)[None]

    def _frames(self, samples: Tensor, carried: _Carried) -> Tensor:
        """Return the sums [N, E] of the embeddings of each frame's codes."""
        output = self._model.codec_model.encode(
            upload(samples, self.device)[None, None],
            encoder_past_key_values=carried.keys_values,
            padding_cache=carried.convolutions,
            use_streaming=True,
        )
        carried.keys_values = output.encoder_past_key_values
        carried.convolutions = output.padding_cache
        codes_NC = output.audio_codes[0].T
        frames_NE: Tensor = self._table(codes_NC + self._offsets_C).sum(1)
        return frames_NE

    def embed(self, tokens_B: Tensor) -> Tensor:
        embedded: Tensor = self._table(tokens_B)
        return embedded

    def speller(self) -> Callable[[int], str]:
        return lambda token: "" if self.is_padding(token) else spell(self._tokenizer, token)

    def is_padding(self, token: int) -> bool:
        return token in self._silent


class VoxtralRealtime(DelayedStreams):
    """Transcribe with a `VoxtralRealtimeForConditionalGeneration`, its extractor and its tokenizer.

    The model gets the delay of its text as an input: recordings have the one of tekken.json, live streams
    the longest whose text waits for at most `DELAY` of audio.
    """

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        super().__init__(config, model, extractor, tokenizer, model.model.language_model)
        self.hop: int = extractor.hop_length
        self.frame_samples = model.config.audio_length_per_tok * self.hop
        self.frame = self.frame_samples / SAMPLE_RATE
        self.back = extractor.win_length // 2
        self.ahead = max(self.back - self.hop, 0)
        settings = _audio_settings(Path(config.model))
        self.left: int = settings.get("streaming_n_left_pad_tokens", _LEFT_FRAMES)
        delay = settings.get("transcription_delay_ms")
        self.delay: int = (
            model.config.default_num_delay_tokens
            if delay is None
            else round(delay / 1000 / self.frame)
        )
        quick = [count for count in range(1, self.delay + 1) if self.delay_of(count) <= DELAY]
        self.live_delay = max(quick, default=1)
        self.first = self._prompt_length(self.live_delay)
        self._start, self._padding = self.token_id("<s>"), self.token_id("[STREAMING_PAD]")
        self._silent = frozenset(tokenizer.all_special_ids)
        with (
            torch.inference_mode()
        ):  # what is compiled and imported once is not for the first caller
            silent = torch.zeros(extractor.feature_size, self.frame_samples // self.hop)
            self._encoded(silent, self.carried())

    def delay_of(self, count: int) -> float:
        """Return how long after a sound its token is decoded at most, with a delay in frames."""
        return (count + 1) * self.frame + self.ahead / SAMPLE_RATE

    def _prompt_length(self, delay: int) -> int:
        return 1 + self.left + delay

    def features(self, audio: Audio) -> Tensor:
        """Return features [M, T] of whole frames, with the silence that the model expects."""
        before = self.left * self.frame_samples
        after = -len(audio) % self.frame_samples + self._after(self.delay)
        return self._mel(np.pad(audio, (before, after)), center=True)

    def _after(self, delay: int) -> int:
        return (delay + _RIGHT_FRAMES) * self.frame_samples

    def silence(self) -> tuple[int, int]:
        return self.left * self.frame_samples, self._after(self.live_delay)

    def chunk_features(self, samples: Audio, begins: bool) -> Tensor:
        if begins:
            return self._mel(samples, center=True)
        unread = np.zeros(self.hop, np.float32)  # the extractor leaves the last feature frame out
        return self._mel(np.concatenate([samples, unread]), center=False)

    def _mel(self, samples: Audio, center: bool) -> Tensor:
        batch = self._extractor(
            samples, sampling_rate=SAMPLE_RATE, center=center, return_tensors="pt"
        )
        features: Tensor = batch.input_features[0]
        return features

    def encode(self, window: WaitingWindow) -> RunningSequence:
        frames_NE = self._encoded(window.features).pooler_output[0]
        return self._begin(window, self.state(), frames_NE[:-1], self.delay)

    def encode_chunk(self, window: WaitingWindow, chunk: StreamChunk) -> RunningSequence:
        carried: _Carried = chunk.state
        output = self._encoded(chunk.features, carried)
        carried.keys_values, carried.convolutions = output.past_key_values, output.padding_cache
        frames_NE, state = output.pooler_output[0], carried.decoding
        if not state.sequence.length:
            return self._begin(window, state, frames_NE, self.live_delay)
        return RunningSequence(window, state, frames_NE[:0], frames_NE, len(frames_NE))

    def _begin(
        self, window: WaitingWindow, state: CausalState, frames_NE: Tensor, delay: int
    ) -> RunningSequence:
        """Return a sequence whose prompt is padding, beside the first frames."""
        count = self._prompt_length(delay)
        ids = [self._start] + [self._padding] * (count - 1)
        state.condition = self._condition(delay)
        prompt_PE = self.embed_ids(ids) + frames_NE[:count]
        limit = 1 + len(frames_NE) - count
        return RunningSequence(window, state, prompt_PE, frames_NE[count:], limit)

    def _condition(self, delay: int) -> Tensor:
        """Return the embedding [E] of a delay."""
        time = torch.full((1,), delay, device=self.device, dtype=self.dtype)
        condition: Tensor = self._model.model.time_embedding(time)
        return condition

    def _conditions(self, states: Sequence[CausalState]) -> dict[str, Any]:
        conditions = [state.condition for state in states if state.condition is not None]
        return {"t_cond": torch.stack(conditions)[:, None]}

    def _encoded(self, features_MT: Tensor, carried: _Carried | None = None) -> Any:
        """Encode whole frames; `carried` has the state before them, if they are of a stream."""
        state = {}
        if carried is not None:
            state = {
                "past_key_values": carried.keys_values,
                "padding_cache": carried.convolutions,
            }
        return self._model.get_audio_features(
            input_features=upload(features_MT[None].to(self.dtype), self.device),
            use_cache=carried is not None,
            **state,
        )

    def speller(self) -> Callable[[int], str]:
        return _Speller(self)

    def is_padding(self, token: int) -> bool:
        return token in self._silent


class _Speller:
    """Spell tokens that are bytes: those of a character that is not complete are kept."""

    def __init__(self, family: VoxtralRealtime):
        self._family = family
        self._tokens: list[int] = []

    def __call__(self, token: int) -> str:
        if self._family.is_padding(token):
            return ""
        self._tokens.append(token)
        text = self._family.text_of(self._tokens)
        if text.endswith(_UNFINISHED) and len(self._tokens) < _CHARACTER:
            return ""
        self._tokens = []
        return text


def _audio_settings(folder: Path) -> dict[str, Any]:
    """Return what tekken.json says of audio: the silence before it, and the delay of the text."""
    path = folder / "tekken.json"
    if not path.is_file():
        return {}
    try:
        found = dict(json.loads(path.read_bytes()).get("audio") or {})
        numbers = [found.get(name, 1) for name in ("streaming_n_left_pad_tokens",)]
        numbers.append(found.get("transcription_delay_ms", 1))
        if not all(isinstance(one, int | float) and 0 <= one < 60_000 for one in numbers):
            raise ValueError("silence and delay are numbers from 0 on")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"model={str(folder)!r}: {path.name} cannot be read: {error}") from error
    return found
