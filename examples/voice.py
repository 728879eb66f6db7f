"""Hold a spoken conversation as a caller of the library: a recording in, the spoken replies out.

    eval "$(motet credentials environment)"
    python examples/voice.py question.wav reply.wav

The recording (WAV, 16 bits, mono) is given as fast as the services take it, not at the speed of
speech: with two questions in it, the second would interrupt the answer to the first.
"""

from __future__ import annotations

import argparse
import asyncio
import wave
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from motet_pipelines.connection import connected
from motet_pipelines.voice.conversation.converse import converse
from motet_pipelines.voice.conversation.events import (
    Failed,
    ReplyEnded,
    SpeechDelta,
    TranscriptCompleted,
)
from motet_pipelines.voice.conversation.inputs import AppendAudio
from motet_pipelines.voice.conversation.settings import (
    ConversationSettings,
    ReplySettings,
    TranscriptionSettings,
    TurnSettings,
)
from motet_pipelines.voice.services import model_of_conversation
from motet_pipelines.voice.speak import RATE
from motet_shared.blobs.store import BlobStore

PIECE = 9600  # bytes given to the conversation at once


async def talk(pcm: bytes, rate: int) -> bytes:
    """Print a conversation in which `pcm` is said; return the PCM of the replies, at `RATE`."""
    async with connected() as bus, BlobStore(bus.instance, 64 << 20) as store:
        settings = ConversationSettings(
            rate=rate,
            transcription=TranscriptionSettings(),
            turns=TurnSettings(),
            reply=ReplySettings(model=await model_of_conversation(bus.directory), temperature=0),
        )

        async def said() -> AsyncIterator[AppendAudio]:
            for start in range(0, len(pcm), PIECE):
                yield AppendAudio(pcm[start : start + PIECE])

        async def files() -> BlobStore:
            return store

        spoken = b""
        async with aclosing(converse(bus, files, said(), settings)) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, TranscriptCompleted):
                        print(f"you: {event.text}")
                    elif isinstance(event, SpeechDelta):
                        spoken += event.pcm
                    elif isinstance(event, ReplyEnded):
                        words = "".join(
                            part["transcript"] for item in event.items for part in item["content"]
                        )
                        print(f"model: {words} ({event.status})")
                    elif isinstance(event, Failed):
                        raise event.error
        return spoken


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer what is said in a recording.")
    parser.add_argument("question", metavar="QUESTION.wav")
    parser.add_argument("reply", metavar="REPLY.wav", type=Path)
    args = parser.parse_args()
    with wave.open(args.question, "rb") as question:
        pcm, rate = question.readframes(question.getnframes()), question.getframerate()
    spoken = asyncio.run(talk(pcm, rate))
    with wave.open(str(args.reply), "wb") as reply:
        reply.setnchannels(1)
        reply.setsampwidth(2)
        reply.setframerate(RATE)
        reply.writeframes(spoken)


if __name__ == "__main__":
    main()
