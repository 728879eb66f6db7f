"""Speak a reply by the model that writes it, with estimates of when each word is spoken.

A talker does not report which words it speaks. Their times are those of equal letters: at a usual
pace while the reply is spoken, at its own once it is spoken to the end. All of it is one sentence.
A character of a script without spaces counts as a word, and so does a part of a very long one.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from motet_media.audio import SAMPLE_BYTES, duration_ms
from motet_pipelines.chat.chat import Outcome
from motet_pipelines.graphs.graph import Call, GraphOutcome, run
from motet_pipelines.graphs.spoken import OMNI, SPEAK, THINK
from motet_shared.messages import Audio, Chat, SpeakStates, Text
from motet_shared.wire.bus import Bus
from motet_shared.wire.epochs import NO_EPOCH, Epoch

from . import speak

_LETTER_MS = 70.0  # as voices without a measured pace have
_UNSPACED = "\u2e80-\u9fff\uac00-\ud7af\uff00-\uffef"  # Chinese, Japanese, Korean
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]{{1,16}}")


async def speak_itself(
    bus: Bus,
    chat_request: Chat,
    speak_request: SpeakStates,
    chat_outcome: Outcome | None = None,
    speech_outcome: speak.Outcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
    epoch: Epoch = NO_EPOCH,
) -> AsyncGenerator[list[Text] | list[Audio], None]:
    """Yield text and audio, each as soon as it is there; text alone where the audio is lost.

    chat_request: has `return_states`. The last audio is empty: it has the times of all words.
    """
    speech_outcome = speech_outcome or speak.Outcome()
    call = Call(
        bus=bus,
        requests={THINK: chat_request, SPEAK: speak_request},
        outcomes={THINK: chat_outcome},
        deadline=deadline,
        patience=patience,
        epoch=epoch,
    )
    ended, text = GraphOutcome(), ""
    async with aclosing(run(OMNI, call, ended)) as batches:
        async for batch in batches:
            if isinstance(batch[0], Audio):
                data = b"".join([item.data for item in batch])
                speech_outcome.samples += len(data) // SAMPLE_BYTES
                yield [Audio(data, word_times(text, _LETTER_MS))]
            else:
                text += "".join(item.text for item in batch if isinstance(item, Text))
                yield batch
    if speech_outcome.samples and SPEAK not in ended.lost:
        length = duration_ms(speech_outcome.samples * SAMPLE_BYTES, speak.RATE)
        yield [Audio(b"", word_times(text, length / max(1, len(text))), text=len(text))]


def word_times(text: str, letter_ms: float) -> list[tuple[str, int, int]]:
    """Return (word, start, end) in ms of the words of a text whose letters take equally long."""
    return [
        (found.group(), round(found.start() * letter_ms), round(found.end() * letter_ms))
        for found in _WORD.finditer(text)
    ]
