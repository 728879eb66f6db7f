"""Give the user's side of a conversation as PCM in real time: from a microphone or a file."""

from __future__ import annotations

import asyncio
import time
import wave
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from motet_cli.commands.devices import RATE, Command
from motet_media.audio import Resampler, pcm_bytes, samples
from motet_shared.errors import ConfigError, MotetError

PIECE_MS = 20
_PIECE = pcm_bytes(PIECE_MS, RATE)


async def microphone(command: Command) -> AsyncGenerator[bytes, None]:
    """Yield what a recorder hears. Raises MotetError if it fails."""
    program = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert program.stdout is not None
    try:
        while len(piece := await _read(program.stdout)) == _PIECE:
            yield piece
        if await program.wait():
            raise MotetError(
                f"{command[0]} could not record (exit code {program.returncode});"
                " is there a microphone? --input FILE needs none"
            )
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Return the next piece; a shorter one at the end of the stream."""
    try:
        return await stream.readexactly(_PIECE)
    except asyncio.IncompleteReadError as end:
        return end.partial


async def paced(pcm: bytes, over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """Yield a recording at the speed at which it was spoken, then silence until `over`."""
    began, sent = time.monotonic(), 0
    while sent < len(pcm) or not over():
        yield pcm[sent : sent + _PIECE].ljust(_PIECE, b"\0")
        sent += _PIECE
        due = began + sent / _PIECE * PIECE_MS / 1000
        await asyncio.sleep(max(0.0, due - time.monotonic()))


def read_wav(path: str) -> bytes:
    """Return the sound of a WAV file as PCM at `RATE`, its channels mixed.

    Raises ConfigError if it is none, or not of 16 bits.
    """
    try:
        with wave.open(str(Path(path).expanduser()), "rb") as file:
            width, rate, channels = file.getsampwidth(), file.getframerate(), file.getnchannels()
            pcm = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError(
            f"--input: cannot read {path!r}: {error}; give a WAV file of 16 bits", param="--input"
        ) from None
    if width != 2:
        raise ConfigError(
            f"--input: {path!r} has {8 * width} bits; give a WAV file of 16 bits", param="--input"
        )
    mono = _mixed(pcm, channels)
    if rate == RATE:
        return mono
    resampler = Resampler(rate, RATE)
    return resampler.feed(mono) + resampler.flush()


def _mixed(pcm: bytes, channels: int) -> bytes:
    """Return the mean of the channels of interleaved PCM."""
    if channels == 1:
        return pcm
    whole = samples(pcm[: len(pcm) - len(pcm) % (2 * channels)])
    mixed = whole[::channels]
    for index in range(len(mixed)):
        mixed[index] = sum(whole[index * channels : (index + 1) * channels]) // channels
    return mixed.tobytes()
