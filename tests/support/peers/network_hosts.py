"""Hosts of a network of their own: network namespaces of Linux, connected by virtual cables.

    with two_hosts() as (first, second, cable):
        subprocess.run([*first.enter, "ip", "address"])
        cable.slow(rate="1mbit")
        with cable.delayed(0.05):
            ...
        with cable.cut():
            ...

A host has addresses, routes and shared memory of its own; files and processes are those of this machine. The first is
also reached from this machine, at `first.outside`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from support.peers.ip_command import ip
from support.peers.long_line import TUN, long_line

_OWN_SHM = 'mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec "$0" "$@"'


@dataclass(frozen=True)
class Host:
    """Hold a namespace: `address` is that on the cable, `outside` that for this machine."""

    namespace: str
    address: str
    outside: str = ""

    @property
    def enter(self) -> tuple[str, ...]:
        """Return the words before a command that runs on this host."""
        return ("ip", "netns", "exec", self.namespace, "sh", "-c", _OWN_SHM)


@dataclass
class Cable:
    """The connection between two hosts, by the end of each."""

    ends: tuple[tuple[str, str], ...]  # namespace, device
    addresses: tuple[str, str]
    _slowed: bool = field(default=False)

    def slow(self, rate: str) -> None:
        """Let no more than `rate` through in either direction, such as 1mbit, queued for 400 ms at most."""
        self.free()
        for namespace, device in self.ends:
            shape = ("tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
            ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", *shape)
        self._slowed = True

    def free(self) -> None:
        """End what `slow` began."""
        if self._slowed:
            for namespace, device in self.ends:
                ip("netns", "exec", namespace, "tc", "qdisc", "del", "dev", device, "root")
        self._slowed = False

    @contextmanager
    def delayed(self, seconds: float) -> Iterator[None]:
        """Let every packet take so many seconds in the block, in either direction."""
        (one, _), (other, _) = self.ends
        with long_line((one, self.addresses[0]), (other, self.addresses[1]), seconds):
            yield

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Let nothing through in the block; no connection is told."""
        for namespace, device in self.ends:
            ip("-n", namespace, "link", "set", device, "down")
        try:
            yield
        finally:
            for namespace, device in self.ends:
                ip("-n", namespace, "link", "set", device, "up")


def missing() -> str:
    """Return why this machine can have no hosts of its own; "" if it can."""
    name = f"motet-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except OSError as error:
        return f"network namespaces are not permitted: {error}"
    return "" if os.access(TUN, os.R_OK | os.W_OK) else f"{TUN} cannot be opened"


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host, Cable]]:
    """Yield two connected hosts. Raises OSError where `missing` says why."""
    number = os.getpid() % 250
    net, outer = f"10.213.{number}", f"10.214.{number}"
    names = [f"motet-{os.getpid()}-{letter}" for letter in "ab"]
    first = Host(names[0], f"{net}.1", f"{outer}.1")
    second = Host(names[1], f"{net}.2")
    link = f"mt{os.getpid()}"
    with contextlib.ExitStack() as exits:
        for name in names:
            ip("netns", "add", name)
            exits.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(
            "link",
            "add",
            "peer",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "peer",
            "netns",
            names[1],
        )
        for host in (first, second):
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "peer")
            ip("-n", host.namespace, "link", "set", "peer", "up")
        ip("link", "add", link, "type", "veth", "peer", "name", "outside", "netns", names[0])
        ip("address", "add", f"{outer}.2/24", "dev", link)
        ip("link", "set", link, "up")
        ip("-n", names[0], "address", "add", f"{first.outside}/24", "dev", "outside")
        ip("-n", names[0], "link", "set", "outside", "up")
        ends = tuple((name, "peer") for name in names)
        yield first, second, Cable(ends, (first.address, second.address))
