"""Play the spoken replies of a conversation, and know how much of them was heard."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import BinaryIO, Protocol

from motet_cli.commands.devices import RATE, Command
from motet_media.audio import duration_ms, pcm_bytes, wav_header
from motet_shared.errors import ConfigError, MotetError


class Sink(Protocol):
    """Play PCM at `RATE`."""

    def begin(self) -> None:
        """Start the clock of the sink, before the first `write`.

        Raises ConfigError if the sink cannot be used.
        """

    async def write(self, pcm: bytes) -> None:
        """Play `pcm` behind what has been written."""

    async def end(self) -> None:
        """Play to the end what has been written; a later write begins another reply."""

    async def stop(self) -> None:
        """Drop what has not been played."""

    async def close(self) -> None:
        """Stop, and release the device or file."""


class Playback:
    """Play replies through a sink, in real time.

    The position is that of a player without delay: playing begins with the first sample written.
    """

    def __init__(self, sink: Sink):
        self._sink = sink
        self._item_id = ""
        self._ms = 0.0  # of the item, played or not
        self._until = 0.0  # monotonic time at which everything written has been played

    @property
    def remaining(self) -> float:
        """Return for how many more seconds it plays what was written."""
        return max(0.0, self._until - time.monotonic())

    @property
    def playing(self) -> bool:
        return self.remaining > 0

    def begin(self) -> None:
        """Start the clock of the sink; call this once. Raises ConfigError if it cannot be used."""
        self._sink.begin()

    async def play(self, item_id: str, pcm: bytes) -> None:
        """Play audio of an item, behind what it has had before."""
        if item_id != self._item_id:
            self._item_id, self._ms = item_id, 0.0
        ms = duration_ms(len(pcm), RATE)
        self._ms += ms
        self._until = max(self._until, time.monotonic()) + ms / 1000
        await self._sink.write(pcm)

    async def end(self) -> None:
        """Mark the end of a reply; what was written is played to its end."""
        await self._sink.end()

    async def stop(self) -> tuple[str, int] | None:
        """Stop playing; return the item and the ms of it that were heard.

        None if nothing is being played.
        """
        if not self.playing:
            return None
        heard = self._ms - self.remaining * 1000
        self._until = 0.0
        await self._sink.stop()
        return self._item_id, max(0, int(heard))


class Speakers:
    """Play through a program of this machine, one process per reply."""

    def __init__(self, command: Command):
        self._command = command
        self._program: asyncio.subprocess.Process | None = None
        self._ended = False

    def begin(self) -> None: ...

    async def write(self, pcm: bytes) -> None:
        """Play PCM. Raises MotetError if the program ends by itself."""
        if self._ended:
            await self.stop()
        if self._program is None:
            # A session of its own: Ctrl-C at the terminal is for this command alone.
            self._program = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True
            )
        if self._program.returncode is not None:
            raise MotetError(
                f"{self._command[0]} could not play it (exit code {self._program.returncode});"
                " give --output FILE"
            )
        assert self._program.stdin is not None
        self._program.stdin.write(pcm)  # without a wait: a full pipe must not delay a barge-in

    async def end(self) -> None:
        if self._program is not None and self._program.stdin is not None:
            self._program.stdin.close()
            self._ended = True

    async def stop(self) -> None:
        program, self._program, self._ended = self._program, None, False
        if program is None:
            return
        if program.returncode is None:
            program.kill()
        await program.wait()

    async def close(self) -> None:
        await self.stop()


class WavOutput:
    """Write what speakers would play into a WAV file, with the silence before and between.

    A conversation without a spoken reply leaves no file.
    """

    def __init__(self, path: str):
        """Check the path. Raises ConfigError if it can be no file."""
        self._path = Path(path).expanduser()
        if not self._path.parent.is_dir() or self._path.is_dir():
            raise ConfigError(
                f"--output: {path!r} is no file in a folder that exists; give one", param="--output"
            )
        self._file: BinaryIO | None = None
        self._began = 0.0
        self._size = 0  # bytes of PCM
        self._spoken = False

    def begin(self) -> None:
        """Open the file: its time begins. Raises ConfigError if it cannot be written."""
        try:
            self._file = self._path.open("wb")
        except OSError as error:
            raise ConfigError(
                f"--output: cannot write {str(self._path)!r}: {error.strerror}; give another",
                param="--output",
            ) from None
        self._file.write(wav_header(RATE, 0))
        self._began = time.monotonic()

    async def write(self, pcm: bytes) -> None:
        self._spoken = True
        if (missing := self._now() - self._size) > 0:
            self._append(bytes(missing))
        self._append(pcm)

    async def end(self) -> None: ...

    async def stop(self) -> None:
        self._size = min(self._size, self._now())
        assert self._file is not None
        self._file.seek(len(wav_header(RATE, 0)) + self._size)
        self._file.truncate()

    async def close(self) -> None:
        if self._file is None:
            return
        await self.stop()
        self._file.seek(0)
        self._file.write(wav_header(RATE, self._size))
        self._file.close()
        if not self._spoken:
            self._path.unlink(missing_ok=True)

    def _now(self) -> int:
        """Return the position of the present in the file, in bytes of whole samples."""
        return pcm_bytes((time.monotonic() - self._began) * 1000, RATE)

    def _append(self, pcm: bytes) -> None:
        assert self._file is not None
        self._file.write(pcm)
        self._size += len(pcm)
