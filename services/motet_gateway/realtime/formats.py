"""Convert audio of clients: base64 of PCM at 24 kHz, or of G.711 at 8 kHz."""

from __future__ import annotations

import base64
import binascii

from motet_media.audio import Resampler, a_law_decode, a_law_encode, mu_law_decode, mu_law_encode
from motet_pipelines.voice.speak import RATE
from motet_shared.errors import BadRequest, PayloadTooLarge

from .audio_settings import ALaw, Format, MuLaw, Pcm

MAX_BASE64 = 15 * 2**20  # characters in one event
_TELEPHONE = 8000  # Hz


def input_rate(format: Format) -> int:
    """Return the sample rate, in Hz, of what `decode` returns."""
    return RATE if isinstance(format, Pcm) else _TELEPHONE


def decode(audio: str, format: Format) -> bytes:
    """Return PCM from base64. Raises PayloadTooLarge, or BadRequest if it is not base64."""
    if len(audio) > MAX_BASE64:
        message = f"`audio` has {len(audio)} characters; at most {MAX_BASE64} fit into one event"
        raise PayloadTooLarge(message, param="audio")
    try:
        data = base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"`audio` is not base64: {error}", param="audio") from None
    if isinstance(format, MuLaw):
        return mu_law_decode(data)
    if isinstance(format, ALaw):
        return a_law_decode(data)
    return data


class Encoder:
    """Encode one utterance incrementally, from PCM at 24 kHz to a client's format."""

    def __init__(self, format: Format):
        self._law = {MuLaw: mu_law_encode, ALaw: a_law_encode}.get(type(format))
        self._resampler = Resampler(RATE, _TELEPHONE) if self._law is not None else None

    def push(self, pcm: bytes) -> str:
        """Return base64 of the audio that `pcm` completes; "" if it completes none."""
        return self._encoded(pcm if self._resampler is None else self._resampler.feed(pcm))

    def finish(self) -> str:
        return self._encoded(b"" if self._resampler is None else self._resampler.flush())

    def _encoded(self, pcm: bytes) -> str:
        return base64.b64encode(pcm if self._law is None else self._law(pcm)).decode()
