"""Define the gateway's settings."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from motet_shared.errors import ConfigError
from motet_shared.process.config import Bytes, Duration, ProcessConfig, setting
from motet_shared.wire.presence import Presence


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ProcessConfig):
    """HTTP gateway of Motet: OpenAI-compatible endpoints, health, metrics and the chat page."""

    host: str = setting("address to listen on", default="127.0.0.1")
    port: int = setting("port to listen on; 0: any free one", default=8000, min=0, max=65535)
    listen_fd: int | None = setting(
        "inherited file descriptor of a listening socket, instead of --port", default=None, min=3
    )
    descriptor_store: Path | None = setting(
        "Unix socket of a descriptor store, which accepts connections and keeps them if this process dies",
        default=None,
    )
    api_key: str | None = setting(
        "API keys that clients must send; in a file, one per line", default=None, secret=True
    )
    tenants_file: Path | None = setting(
        "file with tenants, their keys and limits; reloaded when it changes", default=None
    )
    adapter_folder: Path | None = setting(
        "folder that decode workers watch, in which POST /v1/load_lora_adapter links adapters",
        default=None,
    )
    allowed_origins: tuple[str, ...] = setting(
        "origins whose pages may use this server, such as https://x.example; *: all", default=()
    )
    allowed_hosts: tuple[str, ...] = setting(
        "host names of this server besides addresses, localhost and the machine's name, such as chat.example; *: any",
        default=(),
    )
    trusted_proxies: tuple[str, ...] = setting(
        "networks of proxies whose X-Forwarded-For is read, such as 10.0.0.0/8", default=()
    )
    strict: bool = setting(
        "refuse parameters that cannot change the answer, instead of ignoring them (motet-ignored)",
        default=False,
    )
    tls_cert: Path | None = setting("certificate chain in PEM: serve https and wss", default=None)
    tls_key: Path | None = setting("private key of the certificate, in PEM", default=None)
    insecure: bool = setting("allow a public --host without API keys", default=False)
    max_connections: int = setting(
        "most connections at a time; more are refused with 503", default=8192, min=1
    )
    max_connections_per_address: int = setting(
        "most connections per address (IPv6: per /64); behind trusted proxies, most requests",
        default=2048,
        min=1,
    )
    max_head: Bytes = setting(
        "largest request head: request line and header fields", default=2**16, min=1024
    )
    max_header_fields: int = setting(
        "most header fields of a request", default=100, min=10, max=1000
    )
    head_timeout: Duration = setting(
        "longest time for the head of a request", default=10.0, min=0.1
    )
    # Longer than the 60 s of common proxies, so that they close first.
    idle_timeout: Duration = setting(
        "longest time without a request on a connection", default=75.0, min=0.1
    )
    body_timeout: Duration = setting(
        "longest time for a body, extended by --body-rate", default=20.0, min=0.1
    )
    body_rate: Bytes = setting(
        "received bytes that extend --body-timeout by one second", default=4096, min=1
    )
    max_body: Bytes = setting("largest body of an HTTP request", default=32 * 2**20, min=1024)
    max_image: Bytes = setting("largest image file in a chat", default=20 * 2**20, min=1024)
    image_pixels: int = setting(
        "most pixels of an image at detail auto; 0: the model's limit", default=0, min=0
    )
    remote_images: bool = setting(
        "fetch images by http(s) URLs, except from private addresses", default=False
    )
    image_timeout: Duration = setting("longest time to fetch an image", default=10.0, min=0.1)
    max_upload: Bytes = setting("largest form with an audio file", default=25 * 2**20, min=1024)
    upload_memory: Bytes = setting(
        "memory for uploaded audio and images while services read them",
        default=64 * 2**20,
        min=1024,
    )
    max_message: Bytes = setting(
        "largest WebSocket message, and largest realtime conversation", default=16 * 2**20
    )
    max_streams: int = setting(
        "most replies generated at a time; more are refused with 429", default=1024, min=1
    )
    max_inputs: int = setting("most texts of one request for embeddings", default=2048, min=1)
    max_sockets: int = setting(
        "most WebSocket sessions at a time; more are closed with 1013", default=1024, min=1
    )
    session_keep: Duration = setting(
        "time that a session is kept for reconnection after its socket broke", default=30.0, min=0.0
    )
    max_kept_sessions: int = setting(
        "most disconnected sessions that are kept; the oldest is ended first", default=256, min=0
    )
    session_memory: Bytes = setting(
        "most event data per session that is kept for replay after a reconnection",
        default=8 * 2**20,
        min=2**16,
    )
    max_calls: int = setting(
        "most realtime calls over WebRTC at a time; 0: none are taken", default=64, min=0
    )
    call_time: Duration = setting("longest time of a call", default=3600.0, min=1.0)
    call_ports: str = setting(
        "UDP ports of calls, such as 40000-40999; any: those that the system gives", default="any"
    )
    call_addresses: tuple[str, ...] = setting(
        "addresses that calls listen on; by default that of --host, or all of this machine",
        default=(),
    )
    call_announced: tuple[str, ...] = setting(
        "addresses at which clients reach those of calls, behind NAT or in a container",
        default=(),
    )
    ice_servers: tuple[str, ...] = setting(
        "STUN or TURN server of calls, one of each, such as stun:stun.example:3478", default=()
    )
    ice_username: str | None = setting("user name for the TURN server", default=None)
    ice_credential: str | None = setting("password for the TURN server", default=None, secret=True)
    request_timeout: Duration = setting("longest time for one reply", default=600.0, min=0.1)
    patience: Duration = setting(
        "least time that a broken reply waits for its service to return; longer if its start took longer",
        default=5.0,
        min=0.0,
    )
    expect: tuple[str, ...] = setting(
        "models expected to be served, as ROLE=MODEL, such as decode=pocket-chat; not ready until all are",
        default=(),
    )
    picture_ttl: Duration = setting(
        "time that images with a URL are stored", default=3600.0, min=1.0
    )
    job_ttl: Duration = setting(
        "time that jobs are stored, finished or not", default=86_400.0, min=1.0
    )
    job_patience: Duration = setting(
        "time without progress after which a job is given to another gateway", default=15.0, min=1.0
    )
    jobs: int = setting("most image jobs that this gateway runs at a time", default=2, min=0)
    videos: int = setting("most videos that this gateway makes at a time", default=1, min=0)
    open_videos: int = setting(
        "most videos of a tenant that wait or are made at a time", default=16, min=1
    )
    video_ttl: Duration = setting(
        "time that videos are stored, finished or not", default=86_400.0, min=1.0
    )
    video_timeout: Duration = setting("longest time for one video", default=7200.0, min=1.0)
    response_ttl: Duration = setting(
        "time that responses of /v1/responses are stored", default=2_592_000.0, min=1.0
    )
    idempotency_ttl: Duration = setting(
        "time that replies are stored under their Idempotency-Key", default=86_400.0, min=1.0
    )
    background_responses: int = setting(
        "most responses that this gateway runs in the background at a time", default=4, min=0
    )
    max_file: Bytes = setting(
        "largest form with a file for /v1/files", default=200 * 2**20, min=1024
    )
    file_ttl: Duration = setting(
        "longest time that files and batches are stored", default=2_592_000.0, min=1.0
    )
    batches: int = setting("most batches that this gateway runs at a time", default=2, min=0)
    batch_lines: int = setting(
        "most requests of batches that this gateway runs at a time", default=8, min=1
    )
    drain_timeout: Duration = setting(
        "time for running replies to end after SIGTERM", default=30.0, min=0.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_loopback(self.host) and not self.needs_key and not self.insecure:
            message = (
                f"host: {self.host!r} can be reached from other machines; give --api-key-file (MOTET_API_KEY_FILE) or "
                "--tenants-file (MOTET_TENANTS_FILE), or --insecure to serve everyone"
            )
            raise ConfigError(message, param="host")
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = (
                ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            )
            raise ConfigError(
                f"{missing}: is not set, but {given} is; give both or neither", param=missing
            )
        if self.descriptor_store is not None and self.tls_cert is not None:
            message = (
                "descriptor_store: excludes tls_cert, whose keys die with the process; "
                "terminate TLS in a proxy, or give no store"
            )
            raise ConfigError(message, param="descriptor_store")
        Presence().expect(self.expect)
        _check_calls(self)
        if self.max_upload > self.upload_memory:
            message = f"max_upload: {self.max_upload} bytes do not fit into upload_memory={self.upload_memory}"
            raise ConfigError(f"{message}; raise that too", param="max_upload")

    @property
    def call_port_range(self) -> tuple[int, int]:
        """Return the lowest and the highest UDP port of calls; (0, 0) for any."""
        if self.call_ports == "any":
            return 0, 0
        low, _, high = self.call_ports.partition("-")
        if not (low.isdigit() and (high or low).isdigit()):
            raise ValueError(self.call_ports)
        return int(low), int(high or low)

    @property
    def needs_key(self) -> bool:
        """Return True if clients need an API key.

        A tenants file without any keys admits no client.
        """
        return bool(self.api_keys) or self.tenants_file is not None

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Return the API keys, one per line; blank lines are ignored."""
        return tuple(key for line in (self.api_key or "").splitlines() if (key := line.strip()))


def _check_calls(config: GatewayConfig) -> None:
    """Raise ConfigError for an invalid port range, IP address or ICE server of WebRTC calls."""
    try:
        low, high = config.call_port_range
        fits = config.call_ports == "any" or 1024 <= low <= high < 65536
    except ValueError:
        fits = False
    if not fits:
        message = f"call_ports: {config.call_ports!r} is no range; give one such as 40000-40999"
        raise ConfigError(message, param="call_ports")
    for name in ("call_addresses", "call_announced"):
        for address in getattr(config, name):
            try:
                ipaddress.ip_address(address)
            except ValueError:
                message = f"{name}: {address!r} is no IP address; give one such as 192.0.2.1"
                raise ConfigError(message, param=name) from None
    for server in config.ice_servers:
        if not re.fullmatch(r"(stun|turn|turns):[^?:\s]+(:\d+)?(\?transport=(udp|tcp))?", server):
            message = f"ice_servers: {server!r} is none; give stun:HOST:PORT or turn:HOST:PORT"
            raise ConfigError(message, param="ice_servers")


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`.

    A name other than localhost may resolve to any address, so it is not considered loopback.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
