"""Settings of the gateway."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from motet_shared.config import Bytes, Duration, ProcessConfig, setting
from motet_shared.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ProcessConfig):
    """The HTTP face of Motet: OpenAI-shaped endpoints, health, metrics and the chat page."""

    host: str = setting("address to listen on", default="127.0.0.1")
    port: int = setting("port to listen on; 0: any free one", default=8000, min=0, max=65535)
    api_key: str | None = setting("keys that clients must send; in a file: one per line", default=None, secret=True)
    insecure: bool = setting("allow a public --host without API keys", default=False)
    max_body: Bytes = setting("largest body of an HTTP request", default=4 * 2**20, min=1024)
    max_upload: Bytes = setting("largest form with a sound file", default=25 * 2**20, min=1024)
    upload_memory: Bytes = setting("memory for sound files on their way to a recognizer", default=64 * 2**20, min=1024)
    max_message: Bytes = setting("largest WebSocket message, and largest realtime conversation", default=16 * 2**20)
    max_streams: int = setting("replies generated at a time; more get 429", default=1024, min=1)
    max_sockets: int = setting("WebSocket sessions at a time; more are closed with 1013", default=1024, min=1)
    request_timeout: Duration = setting("longest time for one reply", default=600.0, min=0.1)
    patience: Duration = setting("time in which a broken reply waits for a service to return", default=5.0, min=0.0)
    drain_timeout: Duration = setting("time for running replies to end after SIGTERM", default=30.0, min=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_loopback(self.host) and not self.api_keys and not self.insecure:
            message = (
                f"host: {self.host!r} can be reached by others; "
                "give --api-key-file (MOTET_API_KEY_FILE), or --insecure to serve everyone"
            )
            raise ConfigError(message, param="host")
        if self.max_upload > self.upload_memory:
            message = f"max_upload: {self.max_upload} bytes do not fit into upload_memory={self.upload_memory}"
            raise ConfigError(f"{message}; raise that too", param="max_upload")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """One key per line; blank lines do not count."""
        return tuple(key for line in (self.api_key or "").splitlines() if (key := line.strip()))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost may resolve to anything: no."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
