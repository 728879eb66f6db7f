"""A line between two network namespaces that delays packets, in user space: TUN devices and a process between them.

    with long_line(("a", "10.0.0.1"), ("b", "10.0.0.2"), delay=0.05): ...

Within the block packets between the two addresses take the line, those of connections that exist too; afterwards they
go as before. Each arrives `delay` seconds after it was sent, in order, so that handshakes, windows and losses are those
of a real line of that length. The kernel's own netem is not on every machine.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.peers.ip_command import ip

TUN = Path("/dev/net/tun")
DEVICE = "line"
_NEW_NETWORK, _SET_DEVICE, _PACKETS = 0x40000000, 0x400454CA, 0x1001  # IFF_TUN | IFF_NO_PI
_QUEUED = 2000  # packets of one direction on their way; more are lost, as on a full line
_LARGEST = 65536

End = tuple[str, str]  # namespace and address


@contextmanager
def long_line(one: End, other: End, delay: float) -> Iterator[None]:
    """Lead packets between two ends over a line in the block. Raises OSError without TUN devices."""
    words = ("-m", "support.peers.long_line", one[0], other[0], "--delay", str(delay))
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "open\n":
            raise OSError("the line cannot be opened; see its output")
        for (namespace, own), (_, far) in ((one, other), (other, one)):
            ip("-n", namespace, "link", "set", DEVICE, "up")
            ip("-n", namespace, "route", "add", f"{far}/32", "dev", DEVICE, "src", own)
        yield
    finally:  # the devices end with the process, and their routes with them
        process.terminate()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def _open(namespace: str) -> int:
    """Return a new TUN device of a namespace, which this process is in afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"namespace {namespace}")
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH22x", DEVICE.encode(), _PACKETS))
    return device


def _forward(devices: list[int], delay: float) -> None:
    """Pass packets on for ever."""
    far = dict(zip(devices, reversed(devices), strict=True))
    on_way: deque[tuple[float, int, bytes]] = deque()  # due, device to write to, packet
    with selectors.DefaultSelector() as selector:
        for device in devices:
            selector.register(device, selectors.EVENT_READ)
        while True:
            wait = max(0.0, on_way[0][0] - time.monotonic()) if on_way else None
            for key, _ in selector.select(wait):
                packet = os.read(key.fd, _LARGEST)
                if len(on_way) < 2 * _QUEUED:
                    on_way.append((time.monotonic() + delay, far[key.fd], packet))
            while on_way and on_way[0][0] <= time.monotonic():
                _, device, packet = on_way.popleft()
                try:
                    os.write(device, packet)
                except OSError:
                    continue  # it is lost: the device is not up, or full


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("--delay", type=float, help="seconds each way")
    args = parser.parse_args()
    devices = [_open(namespace) for namespace in args.namespaces]
    print("open", flush=True)
    _forward(devices, args.delay)


if __name__ == "__main__":
    main()
