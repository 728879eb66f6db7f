"""Imagine: think → draw → look → describe.

A conversation in which the language model may draw. It is given a tool, `draw`; where it calls it, the picture is made
and goes into the conversation, and the model goes on with the picture before its eyes, if it has any:

    async with aclosing(imagine(bus, store, request, Draw(model="pocket-draw", prompt=""))) as events:
        async for event in events:
            if isinstance(event, Drawing):    # there it is
                Path("drawn.png").write_bytes(event.data)
            elif isinstance(event, Stroke):   # it forms
                print(f"{event.step}/{event.steps}")
            else:                             # list[Text]: words, before and after it
                print("".join(item.text for item in event), end="")

A picture that is not to be had now, or of which the model said nothing sensible, is told to the model, which tells the
user; an error of `brush` is the caller's. Each stage survives the death of the service
that it talks to, and leaving early ends what is under way: the thought, the picture or the description.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from motet_shared.blobs import BlobStore
from motet_shared.bus import Bus
from motet_shared.errors import MotetError
from motet_shared.messages import Chat, Draw, Stroke, Text

from .chat import Outcome
from .draw import Drawn, draw
from .illustrated import Conversation, Drawing, Turn, is_told
from .see import Shown, see

Event = list[Text] | Stroke | Drawing


async def imagine(
    bus: Bus,
    store: BlobStore,
    request: Chat,
    brush: Draw,
    pictures: Sequence[Shown] = (),
    outcome: Outcome | None = None,
    *,
    sees: bool = False,
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[Event, None]:
    """Yield words, strokes and pictures as they come; `outcome` is that of all turns of the model together.

    `brush` says how it is drawn: the prompts are the model's, the seeds follow that of `request`. `pictures` are those
    of the messages; `sees`: whether the model looks at what was drawn. Its calls of the caller's tools end the reply.
    `deadline`: seconds for all of it; `patience` as of `chat`.
    """
    talk = Conversation(request, pictures, outcome or Outcome(), sees=sees)
    left = _countdown(bus, deadline)
    while True:
        turn = Turn()
        words = see(bus, store, talk.request, talk.pictures, turn.outcome, deadline=left(), patience=patience)
        async with aclosing(words):
            async for batch in words:
                yield turn.heard(batch)
        for call in turn.calls:
            painted = Drawn()
            try:
                asked = msgspec.structs.replace(brush, prompt=call.prompt(), seed=talk.next_seed())
                async with aclosing(draw(bus, store, asked, painted, deadline=left(), patience=patience)) as strokes:
                    async for stroke in strokes:
                        yield stroke
                yield talk.shows(call, painted)
            except MotetError as error:
                if not is_told(error):
                    raise
                talk.tells(call, error)
        if talk.is_over(turn):
            return


def _countdown(bus: Bus, deadline: float | None) -> Callable[[], float | None]:
    """Tells the seconds that are left of `deadline`, which begins now."""
    now = bus.clock.now
    expires = None if deadline is None else now() + deadline
    return lambda: None if expires is None else expires - now()
