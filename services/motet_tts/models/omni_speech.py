"""Speak what an omni model answers: its talker's codes, served by decode, become samples here.

There is no text: a reply's states come from its thinker, and decode turns them into codes
(`engine/reply_speech.py`). This decodes the codes of all replies, chunk by chunk; what a frame is
differs by family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from motet_shared.errors import ConfigError
from motet_tts.codecs.chunks import ChunkDecoder
from motet_tts.codecs.code2wav import Code2Wav, load_code2wav
from motet_tts.codecs.codec import Codec, State
from motet_tts.codecs.token2wav import Token2Wav, load_token2wav
from motet_tts.engine.utterance import Key, StepOutput, Utterance
from motet_tts.qwen2_5_talker_prompt import Qwen25TalkerPrompt
from motet_tts.qwen3_talker_prompt import Qwen3TalkerPrompt
from motet_tts.talker_prompt import TalkerPrompt

from .noise import Noise


@dataclass(slots=True)
class Reply:
    """Hold the state of one reply. waiting, decoded, done: as in `Framed`.

    codes: of a frame that is not whole yet. frames: so far.
    """

    key: Key
    voice: int
    seed: int
    codec: State
    codes: list[int] = field(default_factory=list)
    frames: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    decoded: int = 0
    done: bool = False


class OmniSpeech(ABC):
    """Run code2wav of a whole checkpoint, on the CPU in float32.

    talker: makes the talker's requests.
    """

    rates = (1.0, 1.0)
    clones = False
    instructs = False
    dtype = torch.float32

    def __init__(
        self,
        codec: Codec,
        talker: TalkerPrompt,
        voices: Iterable[str],
        *,
        device: torch.device,
        first_chunk: float,
        chunk: float,
    ):
        if device.type != "cpu":
            raise ConfigError(
                f"device={str(device)!r}: code2wav computes on the CPU; give device=cpu",
                param="device",
            )
        self.device, self.voices, self.talker = device, tuple(voices), talker
        self.sample_rate = codec.sample_rate
        self._begin = codec.begin
        self._chunks = ChunkDecoder(codec, device, first_chunk=first_chunk, chunk=chunk)
        self._replies: dict[Key, Reply] = {}

    @abstractmethod
    def frame(self, reply: Reply, codes: list[int]) -> Tensor | None:
        """Return what the codec is given for a frame's codes; None to leave it out."""

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def has_work(self) -> bool:
        """Return True if a chunk is to be decoded; codes come from outside."""
        return any(map(self._chunks.is_due, self._replies.values()))

    def add(self, key: Key, utterance: Utterance) -> None:
        """Add a reply, whose codes are fed."""
        voice = self.voices.index(utterance.voice)
        self._replies[key] = Reply(key, voice, utterance.seed, self._begin())

    def feed(self, key: Key, ids: Iterable[int], last: bool) -> None:
        """Add codes of a reply; unknown keys are ignored. No further ones follow the last.

        A frame that code2wav has no codes for is left out.
        """
        reply = self._replies.get(key)
        if reply is None:
            return
        reply.codes += ids
        groups = self.talker.groups
        whole = len(reply.codes) // groups * groups
        for start in range(0, whole, groups):
            found = self.frame(reply, reply.codes[start : start + groups])
            if found is not None:
                reply.waiting.append(found)
                reply.frames += 1
        reply.codes = reply.codes[whole:]
        reply.done = reply.done or last

    def remove(self, key: Key) -> None:
        """Drop a reply without further output. Unknown keys are ignored."""
        self._replies.pop(key, None)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Decode the chunks that are due."""
        outputs = self._chunks.outputs(self._replies.values(), _output)
        for output in outputs:
            if output.done or output.error is not None:
                self.remove(output.key)
        return outputs

    def check_integrity(self) -> None:
        """Raise RuntimeError if a reply holds a whole frame that was not passed on."""
        if any(len(reply.codes) >= self.talker.groups for reply in self._replies.values()):
            raise RuntimeError("a reply holds codes of whole frames")


def _output(reply: Reply, samples: Tensor, is_last: bool) -> StepOutput:
    return StepOutput(reply.key, samples, done=is_last, frames=reply.decoded)


class Qwen25Omni(OmniSpeech):
    """Speak Qwen2.5-Omni's replies: a frame is a code, with noise and a voice."""

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
        model, speakers = load_token2wav(folder)
        self._codec = Token2Wav(model, list(speakers.values()))
        begins = {name: speaker.bos_token for name, speaker in speakers.items()}
        talker = Qwen25TalkerPrompt.load(folder, begins, served_as=served_as, greedy=greedy)
        super().__init__(
            self._codec, talker, speakers, device=device, first_chunk=first_chunk, chunk=chunk
        )

    def frame(self, reply: Reply, codes: list[int]) -> Tensor | None:
        if codes[0] >= self._codec.codes:
            return None
        noise = Noise(reply.seed, 0, reply.frames).normal(*self._codec.noise_shape)
        return self._codec.frame(codes[0], reply.voice, noise)


class Qwen3Omni(OmniSpeech):
    """Speak Qwen3-Omni's replies: a frame is a code of each group; the talker has the voice."""

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
        self._codec = Code2Wav(load_code2wav(folder))
        talker = Qwen3TalkerPrompt.load(folder, served_as=served_as, greedy=greedy)
        if talker.groups != self._codec.groups:
            raise ConfigError(
                f"model={str(folder)!r}: the talker's frames have {talker.groups} codes"
                f" (num_code_groups), code2wav's {self._codec.groups} (num_quantizers)"
            )
        super().__init__(
            self._codec, talker, talker.voices, device=device, first_chunk=first_chunk, chunk=chunk
        )

    def frame(self, reply: Reply, codes: list[int]) -> Tensor | None:
        if not all(0 <= code < self._codec.codes for code in codes):
            return None
        return torch.tensor(codes)
