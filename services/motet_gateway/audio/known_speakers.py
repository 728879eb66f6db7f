"""Parse `known_speaker_names` and `known_speaker_references`: speakers with reference audio."""

from __future__ import annotations

import base64
import binascii

from motet_gateway.http.multipart import Form
from motet_media.sound_file import RATE, read_audio
from motet_shared.errors import BadRequest

NAMES, SOUNDS = "known_speaker_names", "known_speaker_references"
MOST = 4
SECONDS = (2.0, 10.0)  # shortest and longest reference


def parse_known(form: Form) -> tuple[tuple[str, bytes], ...]:
    """Return (name, audio file) of each known speaker; the audio is not decoded yet.

    Raises BadRequest that names what is wrong.
    """
    names, sounds = form.fields.get(NAMES, []), form.fields.get(SOUNDS, [])
    if len(names) != len(sounds):
        raise BadRequest(
            f"`{NAMES}` has {len(names)} entries and `{SOUNDS}` {len(sounds)}; give one reference per name",
            param=NAMES,
        )
    if len(names) > MOST:
        raise BadRequest(
            f"`{NAMES}` has {len(names)} entries; at most {MOST} are allowed", param=NAMES
        )
    if "" in names or len(set(names)) < len(names):
        raise BadRequest(f"`{NAMES}` must be distinct and not empty", param=NAMES)
    return tuple(
        (name, _decoded(number, url))
        for number, (name, url) in enumerate(zip(names, sounds, strict=True))
    )


def _decoded(number: int, url: str) -> bytes:
    head, comma, data = url.partition(",")
    try:
        if not (comma and head.startswith("data:") and head.endswith(";base64")):
            raise ValueError
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error):
        message = f"`{SOUNDS}[{number}]` {url[:30]!r} is not a data URL; send data:audio/wav;base64,… of a sound file"
        raise BadRequest(message, param=SOUNDS) from None


def check_sounds(known: tuple[tuple[str, bytes], ...]) -> None:
    """Raise BadRequest for a reference that is no audio, too short or too long.

    Blocks: call it on a thread.
    """
    for number, (_, sound) in enumerate(known):
        try:
            seconds = len(read_audio(sound, 10 * SECONDS[1])) / RATE
        except BadRequest as error:
            raise BadRequest(f"`{SOUNDS}[{number}]`: {error.message}", param=SOUNDS) from None
        if not SECONDS[0] <= seconds <= SECONDS[1]:
            message = f"`{SOUNDS}[{number}]` lasts {seconds:.1f} s; give {SECONDS[0]:g} to {SECONDS[1]:g} s"
            raise BadRequest(message, param=SOUNDS)
