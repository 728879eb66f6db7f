"""Define which NATS servers a deployment has: one, a cluster of three, a hub of leaf nodes, or a leaf.

Other than for the single server of compose.yaml, `nats-deployed.conf` is written, which includes configurations of
`services/`. Within a deployment NATS speaks without TLS, as in compose.yaml: the network between nodes is to encrypt.
Leaf nodes come from elsewhere, over TLS with certificates of the stack's authority.
"""

from __future__ import annotations

from dataclasses import dataclass

from motet_cli.joining.server_links import LEAF_PORT, ROUTE_PORT
from motet_cli.supervision import nats
from motet_shared.errors import ConfigError
from motet_shared.wire.sites import is_name

CONFIG, FOLDER, PEER = "nats-deployed.conf", "/etc/nats", "/etc/nats-peer"
STORE = "/store"
_SINGLE = "nats-store.conf"
# Certificates of the server, in folder PEER, by the variable that names each.
PEER_FILES = {
    "MOTET_PEER_CA": "ca.crt",
    "MOTET_PEER_CERT": "tls.crt",
    "MOTET_PEER_KEY": "tls.key",
}
_ROUTES = f"""\
server_name: $MOTET_NATS_NAME

cluster {{
  name: motet
  listen: "0.0.0.0:{ROUTE_PORT}"
  include "server/cluster.conf"
}}
"""


@dataclass(frozen=True, kw_only=True)
class NatsTopology:
    """Hold the NATS servers of a deployment.

    servers: 1 or 3. leafnodes: whether they accept leaf nodes. leaf: name of the one server, which is a leaf
    of a hub elsewhere; "": it is none. Raises ConfigError for a combination that cannot be.
    """

    servers: int = 1
    leafnodes: bool = False
    leaf: str = ""

    def __post_init__(self) -> None:
        if self.leaf and not is_name(self.leaf):
            raise ConfigError(
                f"--leaf: {self.leaf!r} is no name; give a-z, 0-9 and hyphens, at most 32",
                param="--leaf",
            )
        if self.leaf and (self.servers > 1 or self.leafnodes):
            raise ConfigError(
                "--leaf: a leaf is one server without leaf nodes of its own; leave out"
                " --nats-servers and --leafnodes",
                param="--leaf",
            )

    @property
    def is_single(self) -> bool:
        """Return True for the server of compose.yaml."""
        return self == NatsTopology()

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of nats-server, whose configurations lie in `FOLDER`."""
        config = _SINGLE if self.is_single else CONFIG
        stored = [] if self.leaf else ["--store_dir", STORE]
        return ["--config", f"{FOLDER}/{config}", *stored, "--addr", "0.0.0.0"]

    @property
    def needs_certificate(self) -> bool:
        """Return True if servers speak TLS with leaf nodes or a hub."""
        return self.leafnodes or bool(self.leaf)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return the names of the files of folder `server` that the servers read."""
        found = ["passwords.conf"]
        found += ["cluster.conf"] if self.servers > 1 else []
        found += ["leafnodes.conf"] if self.leafnodes else []
        return (*found, "hub.conf") if self.leaf else tuple(found)

    @property
    def ports(self) -> dict[str, int]:
        """Return the ports by name, besides that of clients."""
        found = {"cluster": ROUTE_PORT} if self.servers > 1 else {}
        return found | ({"leafnodes": LEAF_PORT} if self.leafnodes else {})

    def environment(self) -> dict[str, str]:
        """Return the variables of a server, besides `MOTET_NATS_NAME` of a member of a cluster."""
        files = {name: f"{PEER}/{file}" for name, file in PEER_FILES.items()}
        found = files if self.needs_certificate else {}
        if self.leafnodes:
            found |= {"MOTET_NATS_LEAFNODES": f"0.0.0.0:{LEAF_PORT}"}
        return found | ({"MOTET_NATS_NAME": self.leaf} if self.leaf else {})

    def configs(self) -> dict[str, str]:
        """Return the text of each configuration by name."""
        known = {path.name: path.read_text() for path in nats.find_configs()}
        if self.is_single:
            return {name: known[name] for name in ("nats.conf", _SINGLE)}
        base = "nats.conf" if self.leafnodes else _SINGLE
        used = ["nats-leaf.conf"] if self.leaf else [base]
        used += ["nats-leafnodes.conf"] if self.leafnodes else []
        text = "# Made by `motet deploy`.\n" + "".join(f'include "{name}"\n' for name in used)
        text += _ROUTES if self.servers > 1 else ""
        return {name: known[name] for name in dict.fromkeys(("nats.conf", *used))} | {CONFIG: text}
