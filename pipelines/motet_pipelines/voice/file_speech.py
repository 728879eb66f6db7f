"""Survey: a sound file in, its spans of speech out, with failover between VAD services."""

from __future__ import annotations

import msgspec

from motet_pipelines.failover import Failover, StreamMoves
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import Unavailable
from motet_shared.messages import Spoken, Survey
from motet_shared.wire.bus import Bus

from .sound_files import Bytes, lent
from .speech_detection import MODEL, ROLE


async def survey(
    bus: Bus,
    store: BlobStore,
    data: Bytes,
    request: Survey,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
) -> Spoken:
    """Return the spans of speech in the file `data`. If the service dies, another one starts over.

    `deadline`: seconds for everything. `patience`: seconds without a ready instance before
    Unavailable is raised.
    """
    moves = Failover(
        bus,
        ROLE,
        request.model or MODEL,
        StreamMoves(),
        lambda: 0,
        patience=patience,
        deadline=deadline,
        what="survey",
    )
    while True:
        async with moves as instance, lent(store, data, instance) as ref:
            asked = msgspec.structs.replace(request, audio=ref)
            async with bus.open(ROLE, asked, instance=instance, deadline=moves.left()) as stream:
                async for item in stream:
                    if isinstance(item, Spoken):
                        return item
            raise Unavailable(f"{instance} ended a survey without an answer; retry in a moment")
