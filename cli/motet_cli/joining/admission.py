"""Ask the first host of a stack for admission, under TLS whose authority the token names."""

from __future__ import annotations

import asyncio
import hmac
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from motet_cli.joining import certificates, messages
from motet_cli.joining.errors import AuthorityMismatch, refusal
from motet_cli.joining.first_host import mismatch
from motet_cli.joining.listen import host_port
from motet_cli.joining.messages import Hello, JoinRefusal, JoinReply, JoinRequest
from motet_cli.joining.token import Token
from motet_shared import __version__
from motet_shared.credentials import write_passwords
from motet_shared.errors import ConfigError, Unavailable
from motet_shared.messages import PROTOCOL

T = TypeVar("T")


@dataclass(frozen=True)
class Admitted:
    """Hold the first host's reply, and the address at which it sees this host."""

    reply: JoinReply
    address: str


async def ask(host: str, port: int, token: Token | None, folder: Path) -> Admitted:
    """Join the stack whose first host listens there; keep what it gives in `folder`.

    token: None if this host has joined before: then it shows the certificate in `folder`. The files
    of `folder` are those of `PeerNetwork`, and a folder of passwords per role. Raises
    AuthorityMismatch, ProtocolMismatch, Unavailable, or the error with which the host refuses.
    """
    if token is None:
        authority = _kept_authority(folder, host_port(host, port))
    else:
        authority = await _fetch_authority(host, port, token)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if token is None:
        context.load_cert_chain(folder / "host.crt", folder / "host.key")
    async with _connected(host, port, context) as (reader, writer, hello):
        if hello.wire != PROTOCOL:
            raise mismatch(PROTOCOL, __version__, hello.wire, hello.version)
        address = str(writer.get_extra_info("sockname")[0])
        new_key = folder / "host.key.new"
        request = await asyncio.to_thread(certificates.make_request, new_key)
        secret = "" if token is None else token.secret
        wanted = JoinRequest(secret, request, address, PROTOCOL, __version__)
        writer.write(messages.encode(wanted) + b"\n")
        answer = _decoded(messages.answer_decoder, await reader.readline(), host_port(host, port))
    if isinstance(answer, JoinRefusal):
        new_key.unlink()
        raise refusal(answer.code, answer.message, answer.param)
    new_key.replace(folder / "host.key")
    certificates.keep_certificate(folder, authority, answer.certificate)
    write_passwords(folder, answer.passwords)
    return Admitted(answer, address)


def _kept_authority(folder: Path, where: str) -> str:
    try:
        return (folder / certificates.AUTHORITY).read_text()
    except FileNotFoundError:
        raise ConfigError(
            f"--token: is not given, and this machine has not joined {where} before; get the command"
            " with `motet invite` on the first host",
            param="--token",
        ) from None


async def _fetch_authority(host: str, port: int, token: Token) -> str:
    """Return the authority's certificate if it is the one of the token.

    Nothing is sent, and nothing but the certificate is used of what comes.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    async with _connected(host, port, context) as (_, _, hello):
        try:
            found = certificates.fingerprint(hello.authority)
        except ValueError:
            found = b""
        if not hmac.compare_digest(found, token.fingerprint):
            raise AuthorityMismatch(
                f"--token: names another certificate authority than {host_port(host, port)} has: it"
                " is not the stack of the token, or its authority was replaced; get the command with"
                " `motet invite` on the first host",
                param="--token",
            )
        return hello.authority


@asynccontextmanager
async def _connected(
    host: str, port: int, context: ssl.SSLContext
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Hello]]:
    """Yield a connection and the host's introduction. Raises Unavailable, AuthorityMismatch."""
    where = host_port(host, port)
    try:
        async with asyncio.timeout(2 * messages.SECONDS):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=context, limit=messages.MAX_LINE
            )
            try:
                yield (
                    reader,
                    writer,
                    _decoded(messages.hello_decoder, await reader.readline(), where),
                )
            finally:
                writer.close()
    except ssl.SSLCertVerificationError as error:
        raise AuthorityMismatch(
            f"HOST:PORT: {where} shows a certificate that the stack's authority has not signed for"
            f" this name: {error.verify_message}; give the address that `motet invite` printed",
            param="HOST:PORT",
        ) from None
    except TimeoutError:
        raise Unavailable(
            f"HOST:PORT: {where} does not answer; is `motet up --listen` running there?",
            param="HOST:PORT",
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a line that is too long
        raise Unavailable(
            f"HOST:PORT: {where} cannot be reached: {error}; is `motet up --listen` running there,"
            " and do firewalls let it through?",
            param="HOST:PORT",
        ) from None


def _decoded(decoder: msgspec.json.Decoder[T], line: bytes, where: str) -> T:
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError:
        raise Unavailable(
            f"HOST:PORT: {where} does not speak the protocol of `motet join`; give the address that"
            " `motet invite` printed",
            param="HOST:PORT",
        ) from None
