"""Captions: the words of a turn while it is spoken, from whichever recognizer is alive.

    captions = Captions(bus, Listen(model="pocket-asr", sample_rate=24000), sound, start)
    captions.reach(ms)                          # so far it may be heard
    captions.stable, captions.tail              # what was understood: the first only grows
    captions.pause()                            # nobody speaks just now: understand all of it
    text = await captions.settled()
    captions.go_on()                            # the speaker has more to say
    captions.finish()                           # the turn is over

If the recognizer dies, another one hears the turn again from its beginning, and so does one when the speaker goes on
after a pause: what sounded like an end was none. What was stable stays, whatever the other hearing makes of it: only
what it says beyond that is added.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from motet_shared.bus import Bus
from motet_shared.errors import MotetError, as_motet_error
from motet_shared.messages import Listen, Partial, Segment

from .continuation import continued
from .excerpt import Excerpt
from .moves import Moved, Moves
from .sound import Sound

ROLE = "asr"
LONG_MS = 20_000  # of a turn: what was understood of so much at a pause is not heard again


class Captions:
    """Of the turn that begins at `start`, in ms of `sound`, which has to keep it until `finish` or `close`.

    Hears in a task of its own, which ends with the turn, or with an error that `settled` raises.
    """

    def __init__(self, bus: Bus, request: Listen, sound: Sound, start: float, *, patience: float = 5.0):
        self.stable = ""
        self.tail = ""  # what may follow, if the next hearing agrees
        self.hearings = 0
        self._bus, self._request, self._patience = bus, request, patience
        self._excerpt = Excerpt(sound, start)
        self._outcome = Moved()
        self._watchers: list[Callable[[], object]] = []
        self._before = ""  # what was said before the excerpt
        self._settled: asyncio.Future[None] = _future()
        self._task = asyncio.create_task(self._run(), name="captions")

    # ------------------------------------------------------------------------------------------------- what there is
    @property
    def text(self) -> str:
        """All that was understood so far."""
        return (self.stable + self.tail).strip()

    @property
    def is_settled(self) -> bool:
        """Whether all that may be heard so far was understood: the tail is as certain as what is stable."""
        return self._settled.done() and not self.failed

    @property
    def failed(self) -> bool:
        """Whether nothing more will be understood."""
        return self._settled.done() and (self._settled.cancelled() or self._settled.exception() is not None)

    def watch(self, changed: Callable[[], object]) -> None:
        """Have it called whenever more is known, the end and an error included."""
        self._watchers.append(changed)

    async def settled(self) -> str:
        """The words up to the last pause, or of the whole turn, once all of that was heard. Raises what went wrong."""
        await asyncio.shield(self._settled)
        return self.text

    # ---------------------------------------------------------------------------------------------- what may be heard
    def reach(self, until: float) -> None:
        """The turn goes as far as `until`, in ms, at least."""
        self._excerpt.reach(until)

    def pause(self) -> None:
        """Nobody speaks behind what was reached: it may be understood as if the turn ended there."""
        self._excerpt.pause()

    def go_on(self) -> None:
        """The turn did not end at the pause."""
        if self.is_settled:
            self._settled = _future()
            if self._excerpt.ms > LONG_MS:
                self._before = self.stable = self.stable + self.tail
                self.tail = ""
                self._excerpt.cut()
        self._excerpt.go_on()

    def finish(self) -> None:
        """The turn ends where it has reached; the sound may forget it."""
        self._excerpt.finish()

    async def close(self) -> None:
        """Nobody wants to know any more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # -------------------------------------------------------------------------------------------------------- hearing
    async def _run(self) -> None:
        try:
            more = True
            while more:
                stretch = self._excerpt.stretch
                await self._hear(stretch)
                if stretch == self._excerpt.stretch:
                    self._settle()
                more = await self._excerpt.more(stretch)
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
        self._tell()

    def _tell(self) -> None:
        for changed in self._watchers:
            changed()

    async def _hear(self, stretch: int) -> None:
        """Hear all that there is, and what comes until the next pause."""
        self._outcome.instance = None  # any may be asked, the last one too
        moves = Moves(
            self._bus, ROLE, self._request.model, self._outcome, lambda: self.hearings, patience=self._patience
        )
        while True:
            async with moves as instance, self._bus.open(ROLE, self._request, instance=instance) as stream:
                sending = asyncio.create_task(self._excerpt.send_to(stream), name="captions")
                try:
                    async for body in stream:
                        if isinstance(body, Partial | Segment):
                            self._take(body, self._excerpt.lasts(stretch))
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
                return

    def _take(self, body: Partial | Segment, lasts: bool) -> None:
        """At a pause the end of a stretch is certain only if the speaker does not go on."""
        self.hearings += 1
        if isinstance(body, Partial) and lasts:
            self.stable += continued(self.stable, self._before + body.stable)
        whole = body.stable + body.tail if isinstance(body, Partial) else body.text
        self.tail = continued(self.stable, self._before + whole)
        self._tell()


def _future() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody has to ask for an error
    return future
