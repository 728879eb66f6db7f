"""Keep all sessions of a gateway: connected ones, and those whose client may come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from motet_gateway.http.problems import NotFound
from motet_gateway.kept.absent import Arrivals
from motet_gateway.tenancy.auth import Caller
from motet_gateway.tenancy.tenant import Tenant

_ARRIVAL = 10.0  # seconds in which a session that was taken over is known


class SessionNotFound(NotFound):
    code = "session_not_found"


class OpenSession(Protocol):
    """Describe what the registry and the gateway's shutdown need of a session."""

    id: str
    caller: Caller

    async def drain(self) -> None: ...

    async def expel(self, why: str) -> None: ...

    async def abandon(self) -> None: ...


Session = TypeVar("Session", bound=OpenSession)


class Sessions(Generic[Session]):
    """Keep the sessions of one process.

    A client that reconnects has to reach it. On one host a descriptor store takes its connection there.
    """

    def __init__(self, keep: float, most_kept: int):
        """Keep disconnected sessions for `keep` seconds (0: not at all), `most_kept` at a time."""
        self._seconds, self._most = keep, most_kept
        self._all: dict[str, Session] = {}
        self._kept: dict[
            str, asyncio.TimerHandle
        ] = {}  # timers that end them, the one kept longest first
        self._ending: set[asyncio.Task[None]] = set()
        self.arrivals = Arrivals()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def connected(self) -> int:
        return len(self._all) - len(self._kept)

    @property
    def keeping(self) -> bool:
        """Return True if sessions without a client are kept."""
        return self._seconds > 0 and self._most > 0

    async def add(self, session: Session, *, is_admitted: bool = False) -> None:
        """Add a new session; if its tenant has too many, its oldest disconnected one ends.

        is_admitted: another gateway has admitted it, and this one does not refuse it.

        Raises Overloaded if there is none to end.
        """
        tenant = session.caller.tenant
        if not is_admitted:
            await tenant.sockets.fetch(1)
        if tenant.sockets_full and (oldest := self._oldest(tenant)) is not None:
            self._begin_end(oldest)
        tenant.open_socket(is_admitted=is_admitted)
        self._all[session.id] = session

    def has(self, session_id: str) -> bool:
        """Return True if there is a session of this id, connected or kept."""
        return session_id in self._all

    async def arrived(self, session_id: str) -> None:
        """Wait, for a while, for a session that may have been that of a gateway that has ended."""
        if not self.has(session_id):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ARRIVAL):
                    await self.arrivals.wait()

    def find(self, session_id: str, caller: Caller) -> Session:
        """Return a session by its id.

        Raises SessionNotFound for one that does not exist, is over or belongs to another key.
        """
        if not self.keeping:
            raise SessionNotFound(
                "sessions are not kept here (--session-keep); open a new one", param="session_id"
            )
        session = self._all.get(session_id)
        if session is None or session.caller != caller:
            raise SessionNotFound(
                f"session {session_id[:60]!r} is not here: it ended, was kept for its time of {self._seconds:g} s, or"
                " lives in another host's gateway; open a new one",
                param="session_id",
            )
        return session

    def is_kept(self, session: Session) -> bool:
        return session.id in self._kept

    def keep(self, session: Session) -> None:
        """Keep a session whose client has gone; if too many are kept, the one kept longest ends."""
        while len(self._kept) >= self._most:
            self._begin_end(self._all[next(iter(self._kept))])
        loop = asyncio.get_running_loop()
        self._kept[session.id] = loop.call_later(self._seconds, self._begin_end, session)

    def reclaim(self, session: Session) -> None:
        """Stop the timer of a session whose client is back."""
        if (timer := self._kept.pop(session.id, None)) is not None:
            timer.cancel()

    async def end(self, session: Session) -> None:
        """End a session completely. A second call does nothing."""
        if self._strike(session):
            await session.abandon()

    async def close(self) -> None:
        """End the disconnected sessions, and wait for those that are ending."""
        for session_id in list(self._kept):
            self._begin_end(self._all[session_id])
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _oldest(self, tenant: Tenant) -> Session | None:
        kept = (self._all[session_id] for session_id in self._kept)
        return next((session for session in kept if session.caller.tenant is tenant), None)

    def _begin_end(self, session: Session) -> None:
        if self._strike(session):
            task = asyncio.create_task(session.abandon(), name="end of a session")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _strike(self, session: Session) -> bool:
        """Remove a session from the list; return True if it was there."""
        self.reclaim(session)
        if self._all.pop(session.id, None) is None:
            return False
        session.caller.tenant.sockets.close()
        return True
