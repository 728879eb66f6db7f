"""Voice: listen → think → speak.

A turn of a spoken conversation is three pipelines in a row:

    async for event in turns(bus, audio, policy, caption, replying):    # until the turn ends
        if isinstance(event, Ended):
            text = await event.turn.captions.settled()      # live; without captions: `transcribe_turn`
    messages.append({"role": "user", "content": text})
    async for batch in reply(bus, chat, speak):             # sentences are spoken while written
        ...

Each pipeline fails over when its service dies, and leaving any of them early is a remote cancel: a
caller that interrupts a reply closes the generator, which ends the writing, the speaking and the
requests in progress.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from motet_media.audio import wav_header
from motet_pipelines.chat.chat import Outcome
from motet_pipelines.graphs.graph import Call, run
from motet_pipelines.graphs.spoken import SENTENCES, SPEAK, THINK
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import Audio, Chat, Speak, Text, Transcribe
from motet_shared.wire.bus import Bus
from motet_shared.wire.epochs import NO_EPOCH, Epoch

from . import speak
from .transcribe import TranscriptionOutcome, transcribe

TokenScores = list[tuple[str, float]]  # (text, log-probability) of tokens


async def transcribe_turn(
    bus: Bus,
    store: BlobStore,
    pcm: bytes,
    rate: int,
    request: Transcribe,
    outcome: TranscriptionOutcome | None = None,
    *,
    on_text: Callable[[str, TokenScores], object] = lambda text, scores: None,
    deadline: float | None = None,
    patience: float = 5.0,
) -> str:
    """Return the transcript of a turn. `on_text` gets each piece of it as soon as it is final.

    Its second argument has the tokens of the piece, if `request.logprobs` is set.
    """
    text = ""
    wav = wav_header(rate, len(pcm)) + pcm
    segments = transcribe(bus, store, wav, request, outcome, deadline=deadline, patience=patience)
    async with aclosing(segments):
        async for segment in segments:
            piece = segment.text if text else segment.text.lstrip()
            text += piece
            if piece:
                on_text(piece, segment.logprobs)
    return text.strip()


def reply(
    bus: Bus,
    chat_request: Chat,
    speak_request: Speak,
    chat_outcome: Outcome | None = None,
    speech_outcome: speak.Outcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
    epoch: Epoch = NO_EPOCH,
    cloned: speak.ClonedVoice | None = None,
) -> AsyncGenerator[list[Text] | list[Audio], None]:
    """Yield text and audio, each as soon as it is there. `say.text` is not used.

    `cloned`: a recording whose voice is used instead of that of `speak_request`. `deadline`: seconds
    for the whole text, and for each sentence that is spoken.
    """
    call = Call(
        bus=bus,
        requests={THINK: chat_request, SPEAK: speak_request},
        outcomes={THINK: chat_outcome, SPEAK: (speech_outcome, cloned)},
        deadline=deadline,
        patience=patience,
        epoch=epoch,
    )
    return run(SENTENCES, call)
