"""Define the messages with which a machine joins a stack: lines of JSON, within TLS.

    first host      Hello                        to everybody who connects: it holds nothing secret
    joining host    JoinRequest
    first host      JoinReply or JoinRefusal

The joining host connects twice. Within the first connection it takes the authority's certificate
from the Hello and compares it with the token; the second trusts this authority alone, and only it
carries the token. Fields may be added; a field that is unknown is ignored.
"""

from __future__ import annotations

import msgspec

from motet_cli.stack_file.schema import StackFile

MAX_LINE = 1 << 20  # bytes
SECONDS = 20.0  # that one step may take


class Hello(msgspec.Struct, tag="hello"):
    """Introduce the first host.

    authority: certificate of the stack's authority, in PEM. wire: version of the wire protocol.
    version: release of Motet.
    """

    authority: str
    wire: int
    version: str


class JoinRequest(msgspec.Struct, tag="join"):
    """Ask to become a host of the stack.

    secret: of the token; "": the host has joined before, and shows its certificate.
    request: for a certificate of this host, in PEM. address: at which this host sees itself.
    """

    secret: str
    request: str
    address: str
    wire: int
    version: str


class ModelOffer(msgspec.Struct, frozen=True):
    """Describe a model of the stack.

    name: under which it is served. source: folder, local name or hub name on the first host.
    digest: of its files. declared: it is one of motet.toml.
    """

    name: str
    source: str
    digest: str
    declared: bool = False


class ServiceOffer(msgspec.Struct, frozen=True):
    """Describe a service that another host may run.

    model: key of its model in `StackOffer.models`; None: it has none of its own. memory: bytes that
    one process needs on a CPU.
    """

    role: str
    model: str | None = None
    memory: int = 0


class StackOffer(msgspec.Struct, frozen=True):
    """Describe what other hosts may run of a stack.

    models: all models of it, by kind and name. flags: of `motet up`, which hold for all hosts.
    file: tables of motet.toml that do.
    """

    services: tuple[ServiceOffer, ...] = ()
    models: dict[str, ModelOffer] = {}
    flags: tuple[str, ...] = ()
    file: StackFile = StackFile()

    def label(self, service: ServiceOffer) -> str:
        """Return the name of a service for people."""
        if service.model is None:
            return service.role
        return f"{service.role} ({self.models[service.model].name})"


class JoinReply(msgspec.Struct, tag="joined"):
    """Admit a host.

    certificate: of this host, for its address, in PEM. passwords: of NATS, by user. offer: services
    that the host may run.
    """

    nats_url: str
    certificate: str
    passwords: dict[str, str]
    offer: StackOffer


class JoinRefusal(msgspec.Struct, tag="refused"):
    """Refuse a host, with the code, message and param of the error."""

    code: str
    message: str
    param: str | None = None


hello_decoder = msgspec.json.Decoder(Hello)
request_decoder = msgspec.json.Decoder(JoinRequest)
answer_decoder: msgspec.json.Decoder[JoinReply | JoinRefusal] = msgspec.json.Decoder(
    JoinReply | JoinRefusal
)
encode = msgspec.json.encode
