"""Survey: a sound file in, where in it somebody speaks out, from whichever voice activity service is alive."""

from __future__ import annotations

import msgspec

from motet_shared.blobs import BlobStore
from motet_shared.bus import Bus
from motet_shared.errors import Unavailable
from motet_shared.messages import Spoken, Survey

from .files import Bytes, lent
from .listen import MODEL, ROLE
from .moves import Moved, Moves


async def survey(
    bus: Bus, store: BlobStore, data: Bytes, request: Survey, *, deadline: float | None = None, patience: float = 5.0
) -> Spoken:
    """The spans of speech in the file `data`. If the service dies, another one starts over.

    `deadline`: seconds for all of it. `patience`: seconds without a ready instance before Unavailable is raised.
    """
    moves = Moves(
        bus, ROLE, request.model or MODEL, Moved(), lambda: 0, patience=patience, deadline=deadline, what="survey"
    )
    while True:
        async with moves as instance, lent(store, data, instance) as ref:
            asked = msgspec.structs.replace(request, audio=ref)
            async with bus.open(ROLE, asked, instance=instance, deadline=moves.left()) as stream:
                async for item in stream:
                    if isinstance(item, Spoken):
                        return item
            raise Unavailable(f"{instance} ended a survey without an answer; retry in a moment")
