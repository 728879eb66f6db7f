"""Keep packets between the containers of a network from the machine's firewall.

The kernel hands what passes between two ports of a bridge to iptables where `bridge-nf-call-iptables`
is 1, its default. Rules that drop forwarded packets, which another Docker engine leaves behind when it
ends (`iptables -P FORWARD DROP`), then part the containers of a network from each other.
"""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

SETTINGS = [
    Path(f"/proc/sys/net/bridge/bridge-nf-call-{table}")
    for table in ("iptables", "ip6tables", "arptables")
]
# `cat` waits for the end of its input, which comes however the process that started it ends.
RESTORE = 'cat > /dev/null; while [ $# -gt 0 ]; do echo "$2" > "$1"; shift 2; done'
RESTORE_SECONDS = 10


def filtered() -> dict[Path, str]:
    """Return the settings that are not 0, with their values; none exist before a first bridge does."""
    values = {path: path.read_text().strip() for path in SETTINGS if path.exists()}
    return {path: value for path, value in values.items() if value != "0"}


@contextmanager
def unfiltered(before: Mapping[Path, str]) -> Iterator[None]:
    """Turn the settings off, and give them the values `before` at the end.

    A process of its own session does the latter, so that it is also done when this process is killed.
    A setting that cannot be written stays; `probe` tells whether that matters.
    """
    words = [word for path, value in before.items() for word in (str(path), value)]
    restorer = subprocess.Popen(
        ["sh", "-c", RESTORE, "restore", *words], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        for path in filtered():
            with suppress(OSError):
                path.write_text("0\n")
        yield
    finally:
        restorer.communicate(timeout=RESTORE_SECONDS)
