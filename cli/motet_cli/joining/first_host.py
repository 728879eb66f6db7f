"""Admit other hosts to a stack: the server of `motet up --listen`.

What it tells everybody is public; certificates and passwords are given to a token, or to a host that
joined before and shows its certificate. Connections, the size of messages and their time are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from motet_cli.joining import certificates, messages
from motet_cli.joining.errors import TokenUnknown
from motet_cli.joining.listen import Listen
from motet_cli.joining.messages import (
    Hello,
    JoinRefusal,
    JoinReply,
    JoinRequest,
    ServiceOffer,
    StackOffer,
)
from motet_cli.joining.token import Invitations
from motet_shared import __version__
from motet_shared.credentials import read_password, users_of, write_private
from motet_shared.errors import (
    BadRequest,
    ConfigError,
    MotetError,
    ProtocolMismatch,
    as_motet_error,
)
from motet_shared.messages import PROTOCOL

_CONNECTIONS = 16  # at a time
_HOSTS = "hosts.json"


def prepare_folder(folder: Path, host: str) -> None:
    """Make what a host needs to be the first one: an authority, if there is none, and a certificate.

    host: the name or address that others connect to. Raises ConfigError.
    """
    if not (folder / certificates.AUTHORITY_KEY).is_file():
        certificates.make_authority(folder)
    certificates.make_certificate(folder, [host], "host")


class KnownHosts:
    """Keep which hosts have joined, by the digests of their certificates, with their roles."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._hosts: dict[str, dict[str, object]] = json.loads(path.read_text())
            return
        self._hosts = {}

    def add(self, certificate: bytes, address: str, roles: tuple[str, ...]) -> None:
        """Note a host by its certificate in DER; an earlier one of its address is forgotten."""
        self._hosts = {k: v for k, v in self._hosts.items() if v.get("address") != address}
        self._hosts[hashlib.sha256(certificate).hexdigest()] = {
            "address": address,
            "roles": list(roles),
            "joined": int(time.time()),
        }
        write_private(self._path, json.dumps(self._hosts, indent=1))

    def roles(self, certificate: bytes | None) -> tuple[str, ...] | None:
        """Return the roles of a host; None for one that has not joined."""
        found = self._hosts.get(hashlib.sha256(certificate or b"").hexdigest())
        roles = None if found is None else found["roles"]
        return tuple(map(str, roles)) if isinstance(roles, list) else None


@dataclass(frozen=True)
class FirstHost:
    """Serve `motet join`.

    folder: credentials and certificates of the stack. offer: what other hosts may run. report: is
    called with a line for the log.
    """

    listen: Listen
    folder: Path
    offer: StackOffer
    report: Callable[[str], None]

    @property
    def roles(self) -> list[str]:
        """Return the roles that other hosts may run."""
        return list(dict.fromkeys(service.role for service in self.offer.services))

    def invitations(self) -> Invitations:
        """Return the tokens of this run: none yet."""
        authority = (self.folder / certificates.AUTHORITY).read_text()
        return Invitations(certificates.fingerprint(authority))

    def invite(
        self, invitations: Invitations, roles: Sequence[str], seconds: float, uses: int
    ) -> str:
        """Issue a token; return the command with which a host joins.

        roles: that it may run; none: all that the stack offers. Raises ConfigError for others.
        """
        if unknown := [role for role in roles if role not in self.roles]:
            raise ConfigError(
                f"--services: {unknown[0]!r} is not offered to other hosts; choose of"
                f" {', '.join(self.roles)}",
                param="--services",
            )
        token = invitations.issue(roles or self.roles, seconds, uses)
        return f"motet join {self.listen.text} --token {token.text}"

    @asynccontextmanager
    async def serving(self, invitations: Invitations) -> AsyncIterator[None]:
        """Admit hosts within the context. Raises ConfigError if the address cannot be had."""
        door = _Admission(self, invitations, KnownHosts(self.folder / _HOSTS))
        try:
            server = await asyncio.start_server(
                door.on_client,
                self.listen.host,
                self.listen.port,
                ssl=self._context(),
                ssl_handshake_timeout=messages.SECONDS,
                limit=messages.MAX_LINE,
            )
        except OSError as error:
            raise ConfigError(
                f"--listen: cannot listen on {self.listen.text}: {error}; give another address",
                param="--listen",
            ) from None
        try:
            yield
        finally:
            server.close()
            await door.close()

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.folder / "host.crt", self.folder / "host.key")
        context.load_verify_locations(self.folder / certificates.AUTHORITY)
        context.verify_mode = ssl.CERT_OPTIONAL  # a host that joins for the first time has none
        return context


class _Admission:
    """Answer the connections of one server."""

    def __init__(self, host: FirstHost, invitations: Invitations, known: KnownHosts) -> None:
        self._host, self._invitations, self._known = host, invitations, known
        self._authority = (host.folder / certificates.AUTHORITY).read_text()
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            if len(self._tasks) <= _CONNECTIONS:
                async with asyncio.timeout(2 * messages.SECONDS):
                    await self._serve(reader, writer)
        except (OSError, ValueError, TimeoutError):  # ValueError: a line that is too long
            pass
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = Hello(self._authority, PROTOCOL, __version__)
        writer.write(messages.encode(hello) + b"\n")
        await writer.drain()
        if not (line := await reader.readline()):
            return  # it wanted the authority's certificate
        address = str(writer.get_extra_info("peername")[0])
        tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        answer: JoinReply | JoinRefusal
        try:
            answer = await self._answer(line, address, tls.getpeercert(binary_form=True))
        except Exception as error:
            known = as_motet_error(error)
            self._host.report(f"{address} was refused ({known.code}): {known.message}")
            answer = JoinRefusal(known.code, known.message, known.param)
        writer.write(messages.encode(answer) + b"\n")
        await writer.drain()

    async def _answer(self, line: bytes, address: str, certificate: bytes | None) -> JoinReply:
        try:
            request: JoinRequest = messages.request_decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"request: is malformed: {error}", param="request") from None
        self._check(request, address)
        roles = self._roles(request, certificate)
        signed = await asyncio.to_thread(
            certificates.sign_request, self._host.folder, request.request, address
        )
        self._known.add(ssl.PEM_cert_to_DER_cert(signed), address, roles)
        again = "" if request.secret else " again"
        self._host.report(f"{address} has joined{again}; it may run {', '.join(roles)}")
        return JoinReply(
            self._host.listen.nats_url, signed, self._passwords(roles), self._offer(roles)
        )

    def _check(self, request: JoinRequest, address: str) -> None:
        if request.wire != PROTOCOL:
            raise mismatch(request.wire, request.version, PROTOCOL, __version__)
        if request.address != address:
            raise BadRequest(
                f"address: {request.address} is seen as {address} by the first host; hosts of a stack"
                " reach each other by their own addresses, so join without NAT between them",
                param="address",
            )

    def _roles(self, request: JoinRequest, certificate: bytes | None) -> tuple[str, ...]:
        if request.secret:
            return self._invitations.accept(request.secret)
        if (roles := self._known.roles(certificate)) is None:
            raise TokenUnknown(
                "token: is not given, and this host has not joined before; get one with"
                " `motet invite` on the first host",
                param="token",
            )
        return roles

    def _passwords(self, roles: tuple[str, ...]) -> dict[str, str]:
        """Return the passwords of roles, and of the operator: its commands work on every host."""
        users = {"operator", *(user for role in roles for user in users_of(role))}
        folder = self._host.folder
        return {user: read_password(folder / user, user) for user in sorted(users)}

    def _offer(self, roles: tuple[str, ...]) -> StackOffer:
        services: list[ServiceOffer] = [s for s in self._host.offer.services if s.role in roles]
        return msgspec.structs.replace(self._host.offer, services=tuple(services))


def mismatch(wire: int, version: str, expected: int, release: str) -> MotetError:
    """Return the error for a host whose processes the stack would not understand."""
    return ProtocolMismatch(
        f"wire: this machine's release {version} speaks version {wire} of the wire protocol, the"
        f" stack's {release} version {expected}; install release {release} on this machine",
        param="wire",
    )
