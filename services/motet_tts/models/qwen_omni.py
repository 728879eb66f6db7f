"""Speak what Qwen2.5-Omni answers: its talker's codes, served by decode, become samples here.

There is no text: a reply's states come from its thinker, and decode turns them into codes
(`engine/reply_speech.py`). This model decodes the codes of all replies, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from motet_shared.errors import ConfigError
from motet_tts.codecs.chunks import ChunkDecoder
from motet_tts.codecs.codec import State
from motet_tts.codecs.token2wav import Token2Wav, load_token2wav
from motet_tts.engine.failures import failure
from motet_tts.engine.utterance import Key, StepOutput, Utterance
from motet_tts.qwen2_5_talker_prompt import Qwen25TalkerPrompt

from .noise import Noise


@dataclass(slots=True)
class _Reply:
    """Hold the state of one reply. waiting, decoded, done: as in `Framed`."""

    key: Key
    voice: int
    seed: int
    codec: State
    codes: int = 0  # so far
    waiting: list[Tensor] = field(default_factory=list)
    decoded: int = 0
    done: bool = False


class QwenOmni:
    """Run code2wav of a whole checkpoint, on the CPU in float32.

    talker: makes the talker's requests. served_as: what decode calls the talker.
    """

    rates = (1.0, 1.0)
    clones = False
    instructs = False
    dtype = torch.float32

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        served_as: str,
        greedy: bool,
        first_chunk: float,
        chunk: float,
    ):
        if device.type != "cpu":
            raise ConfigError(
                f"device={str(device)!r}: code2wav computes on the CPU; give device=cpu",
                param="device",
            )
        model, speakers = load_token2wav(folder)
        self.device, self.voices = device, tuple(speakers)
        self._codec = Token2Wav(model, list(speakers.values()))
        self.sample_rate = self._codec.sample_rate
        self._chunks = ChunkDecoder(self._codec, device, first_chunk=first_chunk, chunk=chunk)
        begins = {name: speaker.bos_token for name, speaker in speakers.items()}
        self.talker = Qwen25TalkerPrompt.load(folder, begins, served_as=served_as, greedy=greedy)
        self._replies: dict[Key, _Reply] = {}

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def has_work(self) -> bool:
        """Return True if a chunk is to be decoded; codes come from outside."""
        return any(map(self._chunks.is_due, self._replies.values()))

    def add(self, key: Key, utterance: Utterance) -> None:
        """Add a reply, whose codes are fed."""
        voice = self.voices.index(utterance.voice)
        self._replies[key] = _Reply(key, voice, utterance.seed, self._codec.begin())

    def feed(self, key: Key, ids: Iterable[int], last: bool) -> None:
        """Add codes of a reply; unknown keys are ignored. No further ones follow the last.

        A token that code2wav has no code for is left out.
        """
        reply = self._replies.get(key)
        if reply is None:
            return
        for code in ids:
            if code < self._codec.codes:
                noise = Noise(reply.seed, 0, reply.codes).normal(*self._codec.noise_shape)
                reply.waiting.append(self._codec.frame(code, reply.voice, noise))
                reply.codes += 1
        reply.done = reply.done or last

    def remove(self, key: Key) -> None:
        """Drop a reply without further output. Unknown keys are ignored."""
        self._replies.pop(key, None)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Decode the chunks that are due."""
        outputs = []
        for reply, chunk in self._chunks.decode(self._replies.values()):
            try:
                if isinstance(chunk, Exception):
                    raise chunk
                samples = self._chunks.finish(reply, chunk)
                output = StepOutput(reply.key, samples, done=reply.done, frames=reply.decoded)
            except Exception as error:
                output = StepOutput(reply.key, error=failure(error, self.device))
            outputs.append(output)
            if output.done or output.error is not None:
                self.remove(reply.key)
        return outputs

    def check_integrity(self) -> None:
        """Do nothing: the replies are all there is."""
