"""Transcribe a file with a chat model that hears, which is asked for its words.

The reply is greedy unless the request has a temperature. Such a model names neither times nor the
language, and takes no recording in parts: how long one may be is up to it, and what is too long is
refused by the encoder service or by its context.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from motet_pipelines.chat.chat import Outcome
from motet_pipelines.chat.vision import InputMedia, see
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import UnsupportedParameter
from motet_shared.messages import Chat, Sampling, Segment, Transcribe
from motet_shared.wire.bus import Bus

from .sound_files import Bytes
from .transcribe import TranscriptionOutcome

_TASKS = {
    "transcribe": "Write down word for word what is said in the recording",
    "translate": "Translate what is said in the recording into English",
}


def check_heard(request: Transcribe) -> None:
    """Raise UnsupportedParameter for what a chat model does not do with a recording."""
    if request.words:
        raise UnsupportedParameter(
            "timestamp_granularities: a chat model does not say when words are spoken; leave `word` "
            "out, or choose a model with word times (docs/recognizers.md)",
            param="timestamp_granularities",
        )
    if request.prompt.strip():
        raise UnsupportedParameter(
            "`prompt`: a chat model does not continue a given text; leave it out", param="prompt"
        )


def question_of(request: Transcribe) -> str:
    """Return what the model is asked about the recording."""
    spoken = f", which is in the language {request.language!r}" if request.language else ""
    return f"{_TASKS[request.task]}{spoken}. Write nothing else."


async def transcribe_by_chat(
    bus: Bus,
    store: BlobStore,
    data: Bytes,
    request: Transcribe,
    chat: Chat,
    outcome: TranscriptionOutcome,
    *,
    seconds: float,
    in_pieces: bool,
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[Segment, None]:
    """Yield the text, as one segment or as it comes, each as long as the recording.

    chat: a request without messages, which says for whom and how urgently it is generated.
    in_pieces: yield what has arrived, instead of everything at the end.
    seconds: the length of the recording, as far as the caller knows it.
    """
    check_heard(request)
    content = [{"type": "audio"}, {"type": "text", "text": question_of(request)}]
    chat.messages = [{"role": "user", "content": content}]
    chat.sampling = Sampling(temperature=request.temperature, seed=request.seed)
    media, reply = [InputMedia(data, param="file", is_audio=True)], Outcome()
    text, count = "", 0
    ids: list[int] = []
    async with aclosing(
        see(bus, store, chat, media, reply, deadline=deadline, patience=patience)
    ) as batches:
        async for batch in batches:
            outcome.duration = seconds
            text += "".join(item.text for item in batch)
            ids += [token for item in batch for token in item.ids]
            if in_pieces and text:
                yield Segment(count, 0, 0.0, seconds, text, ids)
                count, text, ids = count + 1, "", []
    outcome.duration, outcome.end = seconds, reply.end
    if text:
        yield Segment(count, 0, 0.0, seconds, text, ids)
