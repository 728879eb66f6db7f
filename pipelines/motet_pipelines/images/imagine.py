"""Imagine: a chat in which the language model draws: think → draw → look → describe.

The model is given the tool `draw`. Where it calls the tool, the picture is drawn and added to the
chat, and the model continues with the picture as input, if it accepts images:

    brush = Draw(model="pocket-draw", prompt="")
    async with aclosing(imagine(bus, store, request, brush)) as events:
        async for event in events:
            if isinstance(event, Drawing):    # a finished picture
                Path("drawn.png").write_bytes(event.data)
            elif isinstance(event, DenoisingProgress):   # progress of a picture
                print(f"{event.step}/{event.steps}")
            else:                             # list[Text]: text before and after pictures
                print("".join(item.text for item in event), end="")

A picture that cannot be drawn now, or whose call has invalid arguments, becomes an error result for
the model, which explains it to the user; an error in the settings is raised to the caller. Each stage
fails over to another instance when its service dies, and leaving the generator early cancels what
is in progress: text, picture or description.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from motet_pipelines.chat.chat import Outcome
from motet_pipelines.chat.vision import InputMedia, see
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import MotetError
from motet_shared.messages import Chat, DenoisingProgress, Draw, Text
from motet_shared.wire.bus import Bus

from .chat_drawing import Conversation, Drawing, Turn, is_reported
from .draw import Drawn, draw

Event = list[Text] | DenoisingProgress | Drawing


async def imagine(
    bus: Bus,
    store: BlobStore,
    request: Chat,
    settings: Draw,
    pictures: Sequence[InputMedia] = (),
    outcome: Outcome | None = None,
    *,
    accepts_images: bool = False,
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[Event, None]:
    """Yield text, strokes and pictures as they come; `outcome` sums up all turns of the model.

    `settings` are those of the pictures: prompts come from the model, seeds follow that of
    `request`. `pictures` are those of the messages. `accepts_images`: show drawn pictures to the
    model. Calls of the caller's tools end the reply. `deadline`: seconds for everything; `patience`
    as in `chat`.
    """
    conversation = Conversation(
        request, pictures, outcome or Outcome(), accepts_images=accepts_images
    )
    left = _countdown(bus, deadline)
    while True:
        turn = Turn()
        words = see(
            bus,
            store,
            conversation.request,
            conversation.pictures,
            turn.outcome,
            deadline=left(),
            patience=patience,
        )
        async with aclosing(words):
            async for batch in words:
                yield turn.receive(batch)
        for call in turn.calls:
            drawn = Drawn()
            try:
                asked = msgspec.structs.replace(
                    settings, prompt=call.prompt(), seed=conversation.next_seed()
                )
                async with aclosing(
                    draw(bus, store, asked, drawn, deadline=left(), patience=patience)
                ) as strokes:
                    async for stroke in strokes:
                        yield stroke
                yield conversation.add_picture(call, drawn)
            except MotetError as error:
                if not is_reported(error):
                    raise
                conversation.add_error(call, error)
        if conversation.finish_turn(turn):
            return


def _countdown(bus: Bus, deadline: float | None) -> Callable[[], float | None]:
    """Return a function that returns the seconds left of `deadline`, which starts now."""
    now = bus.clock.now
    expires = None if deadline is None else now() + deadline
    return lambda: None if expires is None else expires - now()
