"""Serve the speech engine as an actor: role `tts`, operation `speak`."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motet_kernels.runtime.device import readings
from motet_media.audio import SAMPLE_BYTES
from motet_models.model_config import read_config
from motet_models.omni import speaks
from motet_shared import messages
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, ConfigError, PayloadTooLarge, UnsupportedParameter
from motet_shared.messages import ModelCard, Speak, SpeakStates
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_tts.engine.engine import Engine
from motet_tts.engine.reply_speech import ReplySpeech
from motet_tts.engine.speech import Speech, SpeechSessions
from motet_tts.engine.thread import EngineThread
from motet_tts.engine.utterance import VoiceSample

from .checkpoint import Answering
from .config import TtsConfig
from .decode_client import DecodeClient
from .reply_states import ReplyStates
from .shaper import WIRE_RATE

log = logging.getLogger(__name__)

SPEEDS = (0.25, 4.0)
# Bytes of the recording of a voice: half a second to a minute.
SAMPLE_SIZES = (WIRE_RATE * SAMPLE_BYTES // 2, 60 * WIRE_RATE * SAMPLE_BYTES)
# Voice names of OpenAI's API, which clients send by default; each maps to a fixed voice of the
# model.
_KNOWN_NAMES = "alloy ash ballad cedar coral echo fable marin nova onyx sage shimmer verse".split()


class Tts(Actor):
    """Serve one speech model."""

    role = "tts"

    def __init__(self, config: TtsConfig, bus: Bus):
        super().__init__(config, bus)
        self.max_active = config.max_running + config.max_waiting
        self._store = BlobStore.of(config, bus, _states_memory(config))
        self._sessions: SpeechSessions | None = None
        self._card: ModelCard | None = None

    async def warm(self) -> None:
        engine = await asyncio.to_thread(Engine, self.config.engine())
        created = int((Path(self.config.model) / "config.json").stat().st_mtime)
        self._card = ModelCard(
            name=engine.config.model_name,
            context=self.config.longest_text,
            created=created,
            voices=list(engine.voices),
            clones=engine.model.clones,
            instructions=engine.model.instructs,
            answers=isinstance(engine.model, Answering),
        )
        await self._store.start()
        thread = EngineThread.on_loop(
            engine, lambda outputs: self.sessions.deliver(outputs), self.crash
        )
        decode = DecodeClient(self.bus, self.config.patience)
        self._sessions = SpeechSessions(thread, decode, engine.sample_rate, engine.model.rates)
        self.bus.monitor.duties.append(thread.watch(self.config.step_timeout))
        log.info("model loaded", extra={"model": self._card.name, "voices": len(engine.voices)})

    async def close(self) -> None:
        if self._sessions is not None:
            await asyncio.to_thread(self._sessions.thread.stop)
        await self._store.close()

    @property
    def sessions(self) -> SpeechSessions:
        """Return the sessions. Raises RuntimeError before `warm` has loaded the model."""
        if self._sessions is None:
            raise RuntimeError("the engine is not loaded yet")
        return self._sessions

    @operation(SpeakStates)
    async def speak_states(self, call: Call, request: SpeakStates) -> None:
        """Stream the speech of a reply while its states come."""
        self.check_served(request.model)
        model = self.sessions.thread.engine.model
        if not isinstance(model, Answering):
            raise UnsupportedParameter(
                f"model: {request.model!r} speaks texts, not states; send it a text", param="model"
            )
        voice = _voice(request.voice, list(model.voices))
        states = ReplyStates(self._store, model.talker, voice)
        speech = ReplySpeech(self.sessions, call, request, voice, states)
        await speech.run()
        call.finish("stop", speech.usage)

    @operation(Speak)
    async def speak(self, call: Call, request: Speak) -> None:
        """Stream the speech of one text while it is computed."""
        voice = self._check(request)
        sample = None if request.sample is None else await self._sample(request.sample)
        speech = Speech(self.sessions, call, request, voice, sample)
        await speech.run()
        call.finish("stop", speech.usage)

    def _check(self, request: Speak) -> str:
        """Return the voice to use. Raises BadRequest or PayloadTooLarge for invalid requests."""
        self.check_served(request.model)
        if not request.text.strip():
            raise BadRequest("input: is empty; give a text", param="input")
        if len(request.text) > self.config.longest_text:
            raise PayloadTooLarge(
                f"input: {len(request.text)} characters; at most {self.config.longest_text} are spoken (longest_text)",
                param="input",
            )
        if not (math.isfinite(request.speed) and SPEEDS[0] <= request.speed <= SPEEDS[1]):
            raise BadRequest(
                f"speed: {request.speed}; give {SPEEDS[0]} to {SPEEDS[1]}", param="speed"
            )
        engine = self.sessions.thread.engine
        if isinstance(engine.model, Answering):
            raise UnsupportedParameter(
                f"model: {request.model!r} speaks what it answers in chats with modalities text and"
                " audio, not a text that is given; choose another model",
                param="model",
            )
        if request.instructions and not engine.model.instructs:
            raise BadRequest(
                f"instructions: {engine.config.model_name!r} follows none; choose another voice instead",
                param="instructions",
            )
        if request.sample is not None:
            if not engine.model.clones:
                raise BadRequest(
                    f"voice: {engine.config.model_name!r} imitates no voices; choose one of {', '.join(engine.voices)}",
                    param="voice",
                )
            if not SAMPLE_SIZES[0] <= request.sample.audio.nbytes <= SAMPLE_SIZES[1]:
                raise BadRequest(
                    f"sample: {request.sample.audio.nbytes} bytes; give {SAMPLE_SIZES[0]} to {SAMPLE_SIZES[1]}",
                    param="voice",
                )
            return engine.voices[0]
        return _voice(request.voice, list(engine.voices))

    async def _sample(self, sample: messages.VoiceSample) -> VoiceSample:
        """Return the recording of a voice. Raises what the blob store raises."""
        data = await self._store.get(sample.audio)
        pcm = np.frombuffer(data, "<i2", count=len(data) // SAMPLE_BYTES)
        return VoiceSample(
            torch.from_numpy(pcm.astype(np.float32) / 32768), WIRE_RATE, sample.words
        )

    def load(self) -> dict[str, float]:
        if self._sessions is None:
            return {}
        stats = self._sessions.thread.engine.stats()
        numbers = {
            "running": stats["running"],
            "queued": stats["waiting"],
            "seconds": stats["speech_seconds"],
            "engine_busy": self._sessions.thread.busy_seconds,
        }
        return numbers | readings()

    def models(self) -> list[ModelCard]:
        return [self._card] if self._card else []

    def stats(self) -> dict[str, Any]:
        """Return numbers, which become metrics, and strings that describe the loaded model."""
        if self._sessions is None:
            return {}
        engine = self._sessions.thread.engine
        return engine.stats() | engine.describe()

    def check_integrity(self) -> None:
        """Raise RuntimeError if an idle actor still expects or holds sentences; check the engine."""
        super().check_integrity()
        held = self.sessions.thread.stats()
        if not (self.bus.calls.active or held["commands"]) and held["running"] + held["waiting"]:
            raise RuntimeError(
                f"no call is active, but the engine runs {held['running']:g} sentences, and {held['waiting']:g} wait"
            )
        if not self.bus.calls.active and self.sessions.queues:
            raise RuntimeError(
                f"no call is active, but {len(self.sessions.queues)} sentences have queues"
            )
        self.sessions.thread.engine.check_integrity()


def _states_memory(config: TtsConfig) -> int:
    """Return the memory for states that talkers have not read yet; 0 for models without one."""
    try:
        return config.states_memory if speaks(read_config(Path(config.model))) else 0
    except ConfigError:  # reported when the model is loaded
        return 0


def _voice(name: str, voices: list[str]) -> str:
    """Map a client's voice name to one of the model's. Raises BadRequest if it is unknown."""
    if not name:
        return voices[0]
    if name in voices:
        return name
    if name in _KNOWN_NAMES:
        return voices[_KNOWN_NAMES.index(name) % len(voices)]
    raise BadRequest(
        f"voice: {name!r} is unknown; choose one of {', '.join(voices)}", param="voice"
    )
