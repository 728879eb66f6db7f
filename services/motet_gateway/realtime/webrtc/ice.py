"""Bound what ICE does for a call: its sockets, the addresses it talks to, and what it receives.

aioice gathers on any port of every address, and checks every address of the offer. Here a
call listens where it is configured to. It answers authenticated checks, and checks the addresses
they came from in turn; what an offer names is checked only behind a STUN or TURN server (`offer`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from aioice import stun
from aioice.candidate import Candidate, candidate_foundation, candidate_priority
from aioice.ice import Connection, StunProtocol, server_reflexive_candidate

from motet_shared.errors import Overloaded, Unavailable

from .network import Network

log = logging.getLogger(__name__)

MOST_CANDIDATES = 16  # of the client, signalled or learned from its checks
_MOST_STREAMS = 8  # SSRCs
_DATAGRAMS = 1000.0  # per second; a call has a hundred
_BURST = 4000.0
_MOST_QUEUED = 2000  # datagrams that are not yet handled
_RTP, _RTCP = range(128, 192), range(192, 224)  # first byte; packet types of RTCP (RFC 5761)


class BoundedProtocol(StunProtocol):
    """Drop datagrams that come too fast, or from addresses that have sent no valid check."""

    receiver: Connection

    def __init__(self, receiver: Connection):
        super().__init__(receiver)
        self._allowed, self._since = _BURST, time.monotonic()
        self._streams: set[bytes] = set()

    def datagram_received(self, data: bytes | str, addr: tuple[Any, ...]) -> None:
        if not isinstance(data, bytes) or not data or not self._accept():
            return
        try:
            if data[0] < 4:
                stun.parse_message(data)  # raises: aioice takes what is no check for data
            elif not self._is_expected(data, (addr[0], addr[1])):
                return
            super().datagram_received(data, addr)
        except Exception as error:  # of malformed checks
            log.debug("a datagram is dropped: %r", error)

    def _accept(self) -> bool:
        now = time.monotonic()
        self._allowed = min(_BURST, self._allowed + (now - self._since) * _DATAGRAMS)
        self._since = now
        if self._allowed < 1 or self.receiver._queue.qsize() >= _MOST_QUEUED:
            return False
        self._allowed -= 1
        return True

    def _is_expected(self, data: bytes, addr: tuple[str, int]) -> bool:
        """Return True for a datagram of the client and, if it is sound, one of few streams."""
        if all((one._network_host, one.port) != addr for one in self.receiver._remote_candidates):
            return False
        if data[0] not in _RTP or len(data) < 12:
            return True
        source = data[4:8] if data[1] in _RTCP else data[8:12]
        if source not in self._streams and len(self._streams) >= _MOST_STREAMS:
            return False
        self._streams.add(source)
        return True


def bind(connection: Connection, network: Network) -> None:
    """Have a connection, which has not begun yet, gather and check as this module describes."""

    async def gather(component: int, addresses: list[str], timeout: int = 5) -> list[Candidate]:
        made = [await _listen(connection, address, network) for address in network.addresses]
        protocols = [protocol for protocol in made if protocol is not None]
        if not protocols:
            raise Unavailable(f"none of {', '.join(network.addresses)} can be bound for a call")
        connection._protocols += protocols
        candidates = [protocol.local_candidate for protocol in protocols]
        candidates += await _reflexive(connection, protocols, timeout)
        # Without addresses it only asks the TURN server, if there is one.
        return candidates + await relayed(component=component, addresses=[], timeout=timeout)

    def check(message: stun.Message, addr: tuple[str, int], protocol: StunProtocol) -> None:
        known = connection._remote_candidates
        if len(known) < MOST_CANDIDATES or any(
            (one._network_host, one.port) == addr for one in known
        ):
            checked(message, addr, protocol)

    relayed, checked = connection.get_component_candidates, connection.check_incoming
    connection.get_component_candidates = gather  # type: ignore[method-assign]
    connection.check_incoming = check  # type: ignore[method-assign]


async def _listen(connection: Connection, address: str, network: Network) -> BoundedProtocol | None:
    """Return an open socket; None if the address is not this machine's.

    Raises Overloaded if no port is free.
    """
    loop = asyncio.get_running_loop()
    for port in network.order_of_ports():
        try:
            _, protocol = await loop.create_datagram_endpoint(
                lambda: BoundedProtocol(connection), local_addr=(address, port)
            )
        except OSError as error:
            if not _is_taken(error):
                log.warning("calls cannot listen on %s: %s", address, error.strerror)
                return None
            continue
        protocol.local_candidate = _host_candidate(protocol)
        return protocol
    low, high = network.ports
    raise Overloaded(f"all UDP ports for calls, {low}-{high}, are in use; try again later")


def _is_taken(error: OSError) -> bool:
    import errno

    return error.errno == errno.EADDRINUSE


def _host_candidate(protocol: BoundedProtocol) -> Candidate:
    host, port = protocol.transport.get_extra_info("sockname")[:2]
    return Candidate(
        foundation=candidate_foundation("host", "udp", host),
        component=1,
        transport="udp",
        priority=candidate_priority(1, "host"),
        host=host,
        port=port,
        type="host",
    )


async def _reflexive(
    connection: Connection, protocols: list[BoundedProtocol], seconds: int
) -> list[Candidate]:
    """Return what the STUN server says of IPv4 sockets, if one is configured."""
    server = connection.stun_server
    if server is None:
        return []

    async def ask(protocol: BoundedProtocol) -> Candidate:
        async with asyncio.timeout(seconds):
            candidate, _ = await server_reflexive_candidate(protocol, server)
        return candidate

    asked = [ask(protocol) for protocol in protocols if ":" not in protocol.local_candidate.host]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return [answer for answer in answers if not isinstance(answer, BaseException)]
