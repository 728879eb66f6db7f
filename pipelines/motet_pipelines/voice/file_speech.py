"""Find the spans of speech in a sound file, with failover between VAD services."""

from __future__ import annotations

import msgspec

from motet_pipelines.answers import Answers
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import Unavailable
from motet_shared.messages import FindSpeech, SpeechSpans
from motet_shared.wire.bus import Bus
from motet_shared.wire.failover import Failover, StreamMoves

from .sound_files import Bytes, lent
from .speech_detection import MODEL, ROLE

_spans = msgspec.msgpack.Decoder(SpeechSpans)


async def find_speech(
    bus: Bus,
    store: BlobStore,
    data: Bytes,
    request: FindSpeech,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
    only_if_ready: bool = False,
) -> SpeechSpans:
    """Return the spans of speech in the file `data`. If the service dies, another one starts over.

    `deadline`: seconds for everything. `patience`: seconds without a ready instance before
    Unavailable is raised. `only_if_ready`: raise it at once if no instance is ready now.
    """
    moves = Failover(
        bus,
        ROLE,
        request.model or MODEL,
        StreamMoves(),
        lambda: 0,
        patience=patience,
        deadline=deadline,
        what="speech detection",
    )
    answers = Answers(request, _spans, _spans)
    await answers.recorded()
    if answers.end is not None:
        return answers.end
    async with answers.live():
        if only_if_ready and not bus.directory.ready(ROLE, model=request.model or MODEL):
            raise Unavailable("no voice activity service is ready")
        while True:
            async with moves as instance, lent(store, data, instance) as ref:
                asked = msgspec.structs.replace(request, audio=ref)
                async with bus.open(
                    ROLE, asked, instance=instance, deadline=moves.left()
                ) as stream:
                    async for item in stream:
                        if isinstance(item, SpeechSpans):
                            await answers.finish(item)
                            return item
                raise Unavailable(
                    f"{instance} ended the search for speech without a reply; retry in a moment"
                )
