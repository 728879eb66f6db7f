"""Give a model that hears what the user said as sound, instead of a transcript of it.

A spoken part of an item keeps its recordings, WAV files, under `SOUND`. In chat messages each is a
part {"type": "audio", "audio": file}, until the file is lent to the services that read it.
"""

from __future__ import annotations

from typing import Any

from motet_media.audio import SAMPLE_BYTES, duration_ms, pcm_bytes, samples, wav_header
from motet_pipelines.chat.models import hears
from motet_pipelines.chat.vision import InputMedia
from motet_shared.wire.discovery import Directory
from motet_shared.wire.instances import served

from .frames import FRAMES, media_of_frames
from .settings import ReplySettings

SOUND = "audio"  # key of a part's recordings
SHORTEST_MS = 100  # of a recording; a spectrum needs some frames
LONGEST_MS = 29_900  # of a recording: a little less than the 30 s that Whisper's towers take
_SEARCH_MS, _PAUSE_MS = 5000, 20  # where a longer one is cut: at the quietest of these pauses


def is_heard(directory: Directory, reply: ReplySettings | None) -> bool:
    """Return True if the model of these replies gets the user's sound itself.

    It gets a transcript while no encoder is ready to encode the sound and a recognizer is.
    """
    if reply is None or not reply.hears:
        return False
    return hears(directory, reply.model) or not served(directory, "asr")


def recordings(pcm: bytes, rate: int) -> list[bytes]:
    """Return PCM as WAV files of at most `LONGEST_MS`; none for less than `SHORTEST_MS`."""
    pcm = pcm[: len(pcm) - len(pcm) % SAMPLE_BYTES]
    if duration_ms(len(pcm), rate) < SHORTEST_MS:
        return []
    files = []
    most = pcm_bytes(LONGEST_MS, rate)
    while len(pcm) > most:
        cut = _quietest(pcm[:most], rate)
        files.append(pcm[:cut])
        pcm = pcm[cut:]
    return [wav_header(rate, len(piece)) + piece for piece in [*files, pcm]]


def _quietest(pcm: bytes, rate: int) -> int:
    """Return the end of the quietest pause in the last `_SEARCH_MS` of `pcm`, in bytes."""
    step = pcm_bytes(_PAUSE_MS, rate)
    first = len(pcm) - pcm_bytes(_SEARCH_MS, rate)
    starts = range(first, len(pcm) - step + 1, step)
    loudness = {start: sum(map(abs, samples(pcm[start : start + step]))) for start in starts}
    return min(loudness, key=lambda start: (loudness[start], -start)) + step


def chat_parts(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a chat message for a spoken part with recordings."""
    return [{"type": "audio", "audio": file} for file in part[SOUND]]


def recorded_ms(part: dict[str, Any]) -> float:
    """Return the length of the recording of a chat message's part."""
    file: bytes = part["audio"]
    header = len(wav_header(1))
    return duration_ms(len(file) - header, int.from_bytes(file[24:28], "little"))


def without_media(
    messages: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[InputMedia]]:
    """Return chat messages with placeholders for recordings and frames, and these in their order."""
    media: list[InputMedia] = []
    plain = []
    for message in messages:
        if isinstance(content := message["content"], list):
            media += [media_of(part) for part in content if _is_medium(part)]
            content = [{"type": p["type"]} if _is_medium(p) else p for p in content]
        plain.append({**message, "content": content})
    return plain, media


def _is_medium(part: dict[str, Any]) -> bool:
    return part["type"] == "audio" or FRAMES in part


def media_of(part: dict[str, Any]) -> InputMedia:
    """Return the recording or the frames of a chat message's part, for the encoder service."""
    if FRAMES in part:
        return media_of_frames(part)
    return InputMedia(part["audio"], param="conversation", is_audio=True)
