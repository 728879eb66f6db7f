"""Write what NATS servers of one stack log in to each other with: members of a cluster, and leaf nodes.

FOLDER/server/cluster.conf     routes of a cluster and their password, for `services/nats-cluster.conf`
FOLDER/server/leafnodes.conf   password that the hub asks leaf nodes for, for `services/nats-hub.conf`
FOLDER/leaf/hub.conf           where the hub is, and this password, for `services/nats-leaf.conf`: it becomes
                               server/hub.conf on the leaf's host

Passwords are 256 random bits, see `motet_shared.credentials`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from motet_shared.credentials import new_password, write_private
from motet_shared.errors import ConfigError

CLUSTER, LEAFNODES, HUB = "server/cluster.conf", "server/leafnodes.conf", "leaf/hub.conf"
ROUTE_PORT, LEAF_PORT = 6222, 7422
SIZES = (1, 3)  # servers of a hub: JetStream needs a majority, and two are no safer than one
_ADDRESS = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?")
_PASSWORD = re.compile(r'password: "(\w{16,})"')


def write_links(
    folder: Path, routes: Sequence[str], leafnodes: Sequence[str] = (), *, rotate: bool = False
) -> tuple[Path, ...]:
    """Write the files of a hub and of its leaf nodes, and return their paths.

    routes: HOST or HOST:PORT of each server of the hub, for the others; leafnodes: those for leaf nodes, by
    default the same hosts. Passwords are kept unless `rotate`. Raises ConfigError for an address that
    is none, another number of servers than one or three, and what cannot be written.
    """
    if len(routes) not in SIZES:
        raise ConfigError(
            f"ADDRESS: {len(routes)} servers are given; give one, or three of which any may die",
            param="ADDRESS",
        )
    members = [_with_port(address, "ADDRESS", ROUTE_PORT) for address in routes]
    hosts = leafnodes or [_host(address) for address in members]
    hubs = [_with_port(address, "--leafnodes", LEAF_PORT) for address in hosts]
    try:
        files = {} if len(members) == 1 else {CLUSTER: _cluster(folder, members, rotate)}
        password = _password(folder / LEAFNODES, rotate)
        files[LEAFNODES] = _login("leaf", password)
        urls = ", ".join(f'"tls://leaf:{password}@{hub}"' for hub in hubs)
        files[HUB] = f"urls: [{urls}]\n"
        for name, text in files.items():
            write_private(folder / name, text)
    except OSError as error:
        raise ConfigError(f"{folder}: the passwords cannot be kept there: {error}") from None
    return tuple(folder / name for name in files)


def _cluster(folder: Path, members: Sequence[str], rotate: bool) -> str:
    """Return the routes to all members, the server itself included: it leaves that one out."""
    password = _password(folder / CLUSTER, rotate)
    routes = ", ".join(f'"nats://cluster:{password}@{member}"' for member in members)
    return _login("cluster", password) + f"routes: [{routes}]\n"


def _login(user: str, password: str) -> str:
    return f'authorization {{ user: {user}, password: "{password}", timeout: 5 }}\n'


def _password(path: Path, rotate: bool) -> str:
    """Return the password of a file that exists, or a new one."""
    found = _PASSWORD.search(path.read_text()) if path.is_file() and not rotate else None
    return found[1] if found else new_password()


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _with_port(address: str, param: str, port: int) -> str:
    match = _ADDRESS.fullmatch(address)
    if match is None or int((match[2] or ":1")[1:]) not in range(1, 65536):
        raise ConfigError(
            f"{param}: {address!r} is no address; give HOST or HOST:PORT, such as 192.0.2.1",
            param=param,
        )
    return address if match[2] else f"{address}:{port}"
