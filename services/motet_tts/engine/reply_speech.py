"""Speak one reply of an omni model, from its states: talker at decode, codes here, samples out."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial

from msgspec.structs import replace

from motet_media.audio import SAMPLE_BYTES
from motet_shared.messages import Audio, SpeakStates, Usage
from motet_shared.wire.call import Call
from motet_tts.reply_states import ReplyStates
from motet_tts.shaper import Shaper

from .speech import SpeechSessions, as_samples, note_failure
from .utterance import Key, StepOutput, Utterance


class ReplySpeech:
    """Speak one reply to one caller, while its states come."""

    def __init__(
        self,
        sessions: SpeechSessions,
        call: Call,
        request: SpeakStates,
        voice: str,
        states: ReplyStates,
    ):
        self._sessions, self._call, self._request, self._voice = sessions, call, request, voice
        self._states = states
        self._shaper = Shaper(sessions.sample_rate)
        self._skip = request.skip
        self.usage = Usage()

    async def run(self) -> None:
        """Send the speech, until the talker ends. Raises the errors of all that takes part."""
        key = (self._call.id, 0)
        queue = self._sessions.queues[key] = asyncio.Queue[StepOutput]()
        utterance = Utterance(
            words=(),
            voice=self._voice,
            seed=self._request.seed,
            priority=self._request.priority,
        )
        self._sessions.thread.submit(key, utterance)
        tasks = [
            asyncio.create_task(self._states.receive(self._call.received())),
            asyncio.create_task(self._generate(key)),
        ]
        for task in tasks:
            task.add_done_callback(partial(note_failure, key, queue))
        done = False
        try:
            while not done:
                output = await queue.get()
                if output.error is not None:
                    raise output.error
                done = output.done
                await self._send(output)
        finally:
            del self._sessions.queues[key]
            if not done:  # the engine has the reply still if a task failed
                self._sessions.thread.cancel(key)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # last: a cancel may end this wait

    async def _generate(self, key: Key) -> None:
        """Have decode generate the codes, and pass them on to the engine."""
        sessions, states = self._sessions, self._states
        if await states.begun():
            request = replace(
                states.request(self._request.seed),
                request_id=self._request.request_id,
                priority=self._request.priority,
                tenant=self._request.tenant,
            )
            batches = sessions.decode.tokens(self._call, request, states, states.groups)
            async with aclosing(batches):
                async for ids in batches:
                    sessions.thread.feed(key, ids, last=False)
        sessions.thread.feed(key, (), last=True)

    async def _send(self, output: StepOutput) -> None:
        data = self._shaper.push(as_samples(output.samples))
        if output.done:
            data += self._shaper.finish()
            self.usage.completion_tokens = output.frames
        cut_off = min(self._skip, len(data) // SAMPLE_BYTES)
        self._skip -= cut_off
        if data := data[cut_off * SAMPLE_BYTES :]:
            await self._call.send(Audio(data))
