"""Batch parts for the same destination into one message per event-loop iteration.

An engine pushes the tokens of a whole step in one callback, and tasks that were woken by one
message run in one iteration: so there is one message per step and destination, without a timer that
would add latency.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from motet_shared.errors import InternalError, MotetError, PayloadTooLarge

from .transport import Transport

log = logging.getLogger(__name__)


class Outbox:
    """Queue parts per destination and publish them in batches.

    `envelope(parts)` returns the bytes of one message; without it each part is a whole message.
    """

    def __init__(
        self,
        transport: Transport,
        envelope: Callable[[list[Any]], bytes] | None = None,
        oversize: Callable[[Any, MotetError], Any] | None = None,
    ):
        self._transport = transport
        self._envelope = envelope
        self._oversize = oversize  # returns the replacement for a part that cannot be sent
        self._pending: dict[str, list[Any]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.messages = 0
        self.parts = 0
        self.failed = 0

    def start(self) -> None:
        """Start the sending task."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="outbox")

    def put(self, subject: str, part: Any) -> None:
        """Queue a part for a subject."""
        queue = self._pending.get(subject)
        if queue is None:
            self._pending[subject] = [part]
            self._wake.set()
        else:
            queue.append(part)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            # Yield once more to tasks that were woken together with this one: the last token of a
            # stream and its End then share a message.
            await asyncio.sleep(0)
            await self.flush()

    async def flush(self) -> None:
        """Publish everything that is queued."""
        pending, self._pending = self._pending, {}
        for subject, parts in pending.items():
            for message in [parts] if self._envelope is not None else [[part] for part in parts]:
                await self._send(subject, message)

    async def _send(self, subject: str, parts: list[Any]) -> None:
        data = self._encoded(subject, parts)
        if isinstance(data, MotetError):  # of one part, which alone may be lost by it
            await self._send_smaller(subject, parts, data)
            return
        try:
            await self._transport.publish(subject, data)
            self.messages += 1
            self.parts += len(parts)
        except PayloadTooLarge as error:
            await self._send_smaller(subject, parts, error)
        except MotetError as error:
            # The receiver detects the loss: by a gap in seq, missing keepalives, or a repeated grant.
            self.failed += len(parts)
            log.warning("%d parts for %s are lost: %s", len(parts), subject, error)
        except Exception:
            self.failed += len(parts)
            log.exception("%d parts for %s are lost", len(parts), subject)

    def _encoded(self, subject: str, parts: list[Any]) -> bytes | MotetError:
        try:
            return parts[0] if self._envelope is None else self._envelope(parts)
        except Exception as error:  # whatever a part holds
            if len(parts) == 1:
                log.exception("a part for %s cannot be encoded", subject)
            return InternalError(f"it cannot be encoded: {error}")

    async def _send_smaller(self, subject: str, parts: list[Any], error: MotetError) -> None:
        if len(parts) > 1:
            half = len(parts) // 2
            await self._send(subject, parts[:half])
            await self._send(subject, parts[half:])
        elif (
            self._oversize is not None and (instead := self._oversize(parts[0], error)) is not None
        ):
            await self._send(subject, [instead])
        else:
            self.failed += 1
            log.error("%s", error)

    async def close(self) -> None:
        """Stop the sending task and publish what is queued."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self.flush()
