"""`motet say`: text into speech, played as it arrives or written to a file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from motet_cli.server import Server, read_key
from motet_shared.errors import ConfigError, MotetError, Unavailable

FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
_OTHER_ENDINGS = {"ogg": "opus", "m4a": "aac", "raw": "pcm"}
# What plays PCM from its standard input, in the order in which it is looked for.
_PLAYERS = (
    ("pw-play", "--rate=24000", "--channels=1", "--format=s16", "-"),
    ("paplay", "--raw", "--rate=24000", "--channels=1", "--format=s16le"),
    ("aplay", "-q", "-t", "raw", "-r", "24000", "-c", "1", "-f", "S16_LE", "-"),
    ("ffplay", "-loglevel", "error", "-nodisp", "-autoexit", "-f", "s16le", "-ar", "24000", "-"),
    ("play", "-q", "-t", "raw", "-r", "24000", "-c", "1", "-e", "signed", "-b", "16", "-"),
)


def run(args: Namespace) -> int:
    """0 once everything is spoken or written."""
    audio_format = _format(args.output)
    text = " ".join(args.text) or ("" if sys.stdin.isatty() else sys.stdin.read())
    if not text.strip():
        raise MotetError("there is nothing to say; as in: motet say 'hello there'")
    player = _player() if args.output is None else None
    with Server(args.url, read_key(args.api_key_file)) as server:
        names = [args.model] if args.model else server.models("speech")
        if not names:
            raise Unavailable(f"{server.url} has no speech model yet; start one with: motet up --tts PATH")
        chunks = server.speech(names[0], text, args.voice, args.speed, audio_format)
        if player is not None:
            return _play(player, chunks)
        _write(args.output, chunks)
    return 0


def _format(output: str | None) -> str:
    """By the ending of the file; PCM for the speakers and for standard output."""
    if output is None or output == "-":
        return "pcm"
    ending = Path(output).suffix.lstrip(".").lower()
    audio_format = _OTHER_ENDINGS.get(ending, ending)
    if audio_format not in FORMATS:
        raise ConfigError(f"--output: {output!r} names no format; end it with .{', .'.join(FORMATS)}")
    return audio_format


def _player() -> tuple[str, ...]:
    for command in _PLAYERS:
        if shutil.which(command[0]):
            return command
    names = ", ".join(command[0] for command in _PLAYERS)
    raise ConfigError(f"nothing here plays sound ({names}); give --output FILE")


def _play(command: tuple[str, ...], chunks: Iterator[bytes]) -> int:
    with subprocess.Popen(command, stdin=subprocess.PIPE) as player:
        assert player.stdin is not None
        try:
            _copy(chunks, player.stdin)
        except BrokenPipeError:
            raise MotetError(f"{command[0]} stopped playing; give --output FILE") from None
        except KeyboardInterrupt:
            player.terminate()
            raise
    return 0


def _write(output: str, chunks: Iterator[bytes]) -> None:
    """Nothing is written, and nothing overwritten, before the first sound is there."""
    first = next(chunks, b"")
    with sys.stdout.buffer if output == "-" else open(output, "wb") as file:
        file.write(first)
        _copy(chunks, file)


def _copy(chunks: Iterator[bytes], file: IO[bytes]) -> None:
    for chunk in chunks:
        file.write(chunk)
        file.flush()
