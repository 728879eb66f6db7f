"""Synthesize speech from text, and play it as it arrives or write it to a file: `motet say`."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from motet_cli.commands.devices import Command, player
from motet_cli.commands.server import Server, read_key
from motet_cli.talk.text_stream import speak_stream
from motet_shared.errors import ConfigError, MotetError, Unavailable

FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
_OTHER_ENDINGS = {"ogg": "opus", "m4a": "aac", "raw": "pcm"}


def run(args: Namespace) -> int:
    """Synthesize the text and play or write it; return 0."""
    audio_format = _format(args.output)
    text = _text(args)
    speakers = player() if args.output is None else None
    key = read_key(args.api_key_file)
    with Server(args.url, key) as server:
        names = [args.model] if args.model else server.models("speech")
        if not names:
            raise Unavailable(
                f"{server.url} serves no speech model yet; start one with: motet up --tts PATH"
            )
        if args.follow:
            settings = {"model": names[0], "speed": args.speed, "response_format": audio_format}
            settings |= {"voice": args.voice} if args.voice else {}
            chunks = speak_stream(args.url, key, settings, sys.stdin.fileno())
        else:
            chunks = server.speech(names[0], text, args.voice, args.speed, audio_format)
        if speakers is not None:
            return _play(speakers, chunks)
        _write(args.output, chunks)
    return 0


def _text(args: Namespace) -> str:
    """Return the whole text; "" with --follow, which reads it while it is spoken."""
    if args.follow:
        if args.text:
            raise ConfigError(
                "--follow: speaks standard input; leave out TEXT, or --follow", param="--follow"
            )
        return ""
    text = " ".join(args.text) or ("" if sys.stdin.isatty() else sys.stdin.read())
    if not text.strip():
        raise MotetError("TEXT: is empty; give a text, such as: motet say 'hello there'")
    return text


def _format(output: str | None) -> str:
    """Return the audio format by the file's suffix; PCM for speakers and standard output."""
    if output is None or output == "-":
        return "pcm"
    ending = Path(output).suffix.lstrip(".").lower()
    audio_format = _OTHER_ENDINGS.get(ending, ending)
    if audio_format not in FORMATS:
        raise ConfigError(
            f"--output: {output!r} names no format; end it with .{', .'.join(FORMATS)}",
            param="--output",
        )
    return audio_format


def _play(command: Command, chunks: Iterator[bytes]) -> int:
    cut = False
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE) as program:
            assert program.stdin is not None
            try:
                _copy(chunks, program.stdin)
            except KeyboardInterrupt:
                program.terminate()
                raise
    except BrokenPipeError:  # raised by a write, or by closing the pipe
        cut = True
    if cut or program.returncode:
        raise MotetError(
            f"{command[0]} failed to play (exit code {program.returncode}); give --output FILE"
        )
    return 0


def _write(output: str, chunks: Iterator[bytes]) -> None:
    """Write the audio to a file, which is created only once the first audio has arrived."""
    first = next(chunks, b"")
    with sys.stdout.buffer if output == "-" else _open(output) as file:
        file.write(first)
        _copy(chunks, file)


def _open(output: str) -> IO[bytes]:
    try:
        return open(output, "wb")
    except OSError as error:
        raise ConfigError(
            f"--output: cannot write {output!r}: {error.strerror}; give a file in a folder",
            param="--output",
        ) from None


def _copy(chunks: Iterator[bytes], file: IO[bytes]) -> None:
    for chunk in chunks:
        file.write(chunk)
        file.flush()
