"""Caption a turn while it is spoken: live transcription with failover between recognizers.

    captions = Captions(bus, Listen(model="pocket-asr", sample_rate=24000), audio, start)
    captions.reach(ms)                          # audio up to here belongs to the turn
    captions.stable, captions.tail              # the transcript; `stable` only grows
    captions.pause()                            # a pause: transcribe everything so far
    text = await captions.settled()
    captions.resume()                           # the speaker resumes
    captions.finish()                           # the turn is over

If the recognizer dies, another one transcribes the turn again from its beginning. The same happens
when the speaker resumes after a pause, as the recognizer took the pause for the end. Stable text
stays whatever the re-transcription says: only what goes beyond it is added.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from motet_pipelines.answers import Answers
from motet_shared.errors import MotetError, as_motet_error
from motet_shared.messages import Listen, Partial, Segment
from motet_shared.wire.bus import Bus
from motet_shared.wire.failover import Failover, StreamMoves

from .audio_buffer import AudioBuffer
from .retranscription import continued
from .turn_audio import TurnAudio

ROLE = "asr"
_results: msgspec.msgpack.Decoder[Partial | Segment] = msgspec.msgpack.Decoder(Partial | Segment)
_ends = msgspec.msgpack.Decoder(bool)
LONG_MS = 20_000  # ms; longer audio transcribed up to a pause is not transcribed again


class Captions:
    """Transcribe the turn that begins at `start`, in ms of `audio`.

    The buffer has to keep the turn until `finish` or `close`. Runs in a task of its own, which ends
    with the turn, or with an error that `settled` raises.
    """

    def __init__(
        self, bus: Bus, request: Listen, audio: AudioBuffer, start: float, *, patience: float = 5.0
    ):
        self.stable = ""
        self.tail = ""  # tentative text after `stable`, until a later result confirms it
        self.results = 0
        self._bus, self._request, self._patience = bus, request, patience
        self._audio = TurnAudio(audio, start)
        self._outcome = StreamMoves()
        self._watchers: list[Callable[[], object]] = []
        self._before = ""  # transcript of the audio before the excerpt
        self._settled: asyncio.Future[None] = _future()
        self._task = asyncio.create_task(self._run(), name="captions")

    # ----------------------------------------------------------------------------------- transcript
    @property
    def text(self) -> str:
        """Return the whole transcript so far."""
        return (self.stable + self.tail).strip()

    @property
    def is_settled(self) -> bool:
        """Return True if all audio so far is transcribed; `tail` is then as certain as `stable`."""
        return self._settled.done() and not self.failed

    @property
    def failed(self) -> bool:
        """Return True if no further text will come."""
        return self._settled.done() and (
            self._settled.cancelled() or self._settled.exception() is not None
        )

    def on_change(self, changed: Callable[[], object]) -> None:
        """Register a callback for every change, including the end and errors."""
        self._watchers.append(changed)

    async def settled(self) -> str:
        """Wait for the transcript up to the last pause, or of the whole turn, and return it.

        Raises the error that ended the transcription.
        """
        await asyncio.shield(self._settled)
        return self.text

    # --------------------------------------------------------------------------- extent of the turn
    def reach(self, until: float) -> None:
        """Extend the turn to at least `until`, in ms."""
        self._audio.reach(until)

    def pause(self) -> None:
        """Transcribe up to the reached position as if the turn ended there."""
        self._audio.pause()

    def resume(self) -> None:
        """Continue the turn after a pause."""
        if self.is_settled:
            self._settled = _future()
            if self._audio.ms > LONG_MS:
                self._before = self.stable = self.stable + self.tail
                self.tail = ""
                self._audio.cut()
        self._audio.resume()

    def finish(self) -> None:
        """End the turn at the reached position; the buffer may forget its audio."""
        self._audio.finish()

    async def close(self) -> None:
        """Cancel the transcription."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # -------------------------------------------------------------------------------- transcription
    async def _run(self) -> None:
        try:
            more = True
            while more:
                resumes = self._audio.resumes
                await self._transcribe(resumes)
                if resumes == self._audio.resumes:
                    self._settle()
                more = await self._audio.more(resumes)
        except Exception as error:
            self._settle(as_motet_error(error))
        finally:
            self._settled.cancel()

    def _settle(self, error: MotetError | None = None) -> None:
        if not self._settled.done():
            if error is None:
                self._settled.set_result(None)
            else:
                self._settled.set_exception(error)
        self._notify()

    def _notify(self) -> None:
        for changed in self._watchers:
            changed()

    async def _transcribe(self, resumes: int) -> None:
        """Transcribe all audio of the turn, and what follows until the next pause."""
        answers = Answers((self._request, self._audio.start, resumes), _results, _ends)
        while (body := await answers.recorded()) is not None:
            self._add(body, self._audio.is_current(resumes))
        if answers.end is not None:
            return
        async with answers.live():
            await self._transcribe_live(resumes, answers)

    async def _transcribe_live(
        self, resumes: int, answers: Answers[Partial | Segment, bool]
    ) -> None:
        self._outcome.instance = None  # any instance may be picked, the last one too
        moves = Failover(
            self._bus,
            ROLE,
            self._request.model,
            self._outcome,
            lambda: self.results,
            patience=self._patience,
        )
        while True:
            async with (
                moves as instance,
                self._bus.open(ROLE, self._request, instance=instance) as stream,
            ):
                sending = asyncio.create_task(self._audio.send_to(stream), name="captions")
                try:
                    async for body in stream:
                        if isinstance(body, Partial | Segment):
                            await answers.record(body)
                            self._add(body, self._audio.is_current(resumes))
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
                await answers.finish(True)
                return

    def _add(self, body: Partial | Segment, current: bool) -> None:
        """Add a result. Text before a pause is stable only if the speaker does not resume."""
        self.results += 1
        if isinstance(body, Partial) and current:
            self.stable += continued(self.stable, self._before + body.stable)
        whole = body.stable + body.tail if isinstance(body, Partial) else body.text
        self.tail = continued(self.stable, self._before + whole)
        self._notify()


def _future() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    # Retrieve the exception, so that asyncio logs no warning if it is never awaited.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
