"""Encode large prompts in child processes, which block neither heartbeats nor streams.

No process is started before the first large prompt; started ones are kept warm. A job whose client
leaves, or that takes too long, is ended by killing its process.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping

from msgspec import msgpack

from motet_shared.errors import DeadlineExceeded, InternalError, from_wire
from motet_shared.process.fair_slots import FairSlots
from motet_tokenizer.encoding.encoder_process import HEAD, EncodeAnswer, EncodeJob, framed


class EncoderPool:
    """Run at most `count` processes.

    models: folder by name. limit: seconds per prompt. templates: file of a chat template by model.
    tool_format, reasoning_format: as of the tokenizer.
    """

    def __init__(
        self,
        models: dict[str, str],
        count: int,
        limit: float,
        templates: Mapping[str, str] | None = None,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
    ):
        self._entries = [f"{name}={path}" for name, path in models.items()]
        for name, path in (templates or {}).items():
            self._entries += ["--chat-template", f"{name}={path}"]
        self._entries += ["--tool-format", tool_format, "--reasoning-format", reasoning_format]
        self._limit = limit
        self._slots = FairSlots(count)
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        self._ending: set[asyncio.Task[int]] = set()

    @property
    def pids(self) -> list[int]:
        """Return the ids of the running processes."""
        return sorted(process.pid for process in self._all)

    async def encode(self, tenant: str, job: EncodeJob) -> list[int]:
        """Return the token ids of a prompt.

        Raises BadRequest as the template does, DeadlineExceeded after `limit` seconds,
        InternalError if the process died.
        """
        async with self._slots.slot(tenant):
            process = self._running_idle() or await self._start()
            try:
                async with asyncio.timeout(self._limit):
                    answer = await _ask(process, job)
            except TimeoutError:
                self._kill(process)
                message = f"the prompt was not encoded within {self._limit:g} s; shorten it (--encode-limit)"
                raise DeadlineExceeded(message) from None
            except (EOFError, OSError) as error:
                self._kill(process)
                raise InternalError(
                    f"the process that encoded the prompt ended: {error!r}"
                ) from error
            except BaseException:
                self._kill(process)
                raise
            self._idle.append(process)
        if answer.code:
            raise from_wire(answer.code, answer.message, param=answer.param)
        ids = array("i")
        ids.frombytes(answer.ids)
        return ids.tolist()

    async def close(self) -> None:
        """Kill all processes and wait for their end."""
        for process in list(self._all):
            self._kill(process)
        await asyncio.gather(*self._ending)

    def _running_idle(self) -> Process | None:
        """Return an idle process, which is idle no longer; None without any.

        One that has ended meanwhile, as one that the kernel killed for its memory, is dropped.
        """
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            self._kill(process)
        return None

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "motet_tokenizer.encoding.encoder_process",
            *self._entries,
            stdin=PIPE,
            stdout=PIPE,
        )
        self._all.add(process)
        return process

    def _kill(self, process: Process) -> None:
        self._all.discard(process)
        if process in self._idle:
            self._idle.remove(process)
        # Kills the process and closes its pipes even where an answer was half read, for which
        # `Process` has no method.
        process._transport.close()  # type: ignore[attr-defined]
        ending = asyncio.get_running_loop().create_task(process.wait())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _ask(process: Process, job: EncodeJob) -> EncodeAnswer:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    process.stdin.write(framed(job))
    await process.stdin.drain()
    size = HEAD.unpack(await process.stdout.readexactly(HEAD.size))[0]
    return msgpack.decode(await process.stdout.readexactly(size), type=EncodeAnswer)
