"""Build every NATS subject; no other module composes subject strings.

An instance id is `<role>-<hex>`, or `<role>-<name>` with a name chosen by the operator: it contains
the role, and both forms are valid NATS tokens.
"""

from __future__ import annotations

import re
import secrets

ROOT = "motet.v2"
HEARTBEATS = f"{ROOT}.ev.*.*.heartbeat"
CACHE_UPDATES = f"{ROOT}.ev.*.*.cache"

_INSTANCE = re.compile(r"[a-z]+(-[a-z0-9]{1,32}){1,4}")
_ROLES = "gateway|tokenizer|decode|prefill|encoder|asr|tts|vad|diffusion|embedding|ranking|speakers|planner"
_INTERNAL = re.compile(
    rf"\bmotet\.v\d+(?:\.[\w>*-]+)+|\$SRV(?:\.[\w-]+)+|\b(?P<role>{_ROLES})-(?=[a-z0-9]*\d)[a-z0-9]{{6,32}}\b"
)


def new_instance(role: str) -> str:
    """Return a fresh instance id.

    A restarted process takes a new one, since it does not own its predecessor's streams and leases.
    """
    return f"{role}-{secrets.token_hex(4)}"


def role_of(instance: str) -> str:
    """Return the role of an instance id.

    Raises ValueError if it is malformed, since it may come from the wire.
    """
    if not _INSTANCE.fullmatch(instance):
        raise ValueError(f"instance id must look like '<role>-<name>', got {instance!r}")
    return instance.partition("-")[0]


def without_names(message: str) -> str:
    """Replace internal subjects and instance ids in a message that leaves the stack.

    For example, an instance id becomes "a decode worker".
    """
    return _INTERNAL.sub(
        lambda found: f"a {found['role']} worker" if found["role"] else "a service", message
    )


def operation(role: str, op: str) -> str:
    """Return the subject that reaches any instance of the role (its queue group)."""
    return f"{ROOT}.{role}.{op}"


def open_at(instance: str) -> str:
    """Return the subject of opens to one instance."""
    return f"{ROOT}.{role_of(instance)}.i.{instance}.open"


def control_at(instance: str) -> str:
    """Return the subject of controls to one instance."""
    return f"{ROOT}.{role_of(instance)}.i.{instance}.ctl"


def feeds_to(instance: str) -> str:
    """Return the subject of feeds to one instance."""
    return f"{ROOT}.{role_of(instance)}.i.{instance}.feed"


def inbox(instance: str) -> str:
    """Return the prefix of everything sent to one process.

    It is followed by `.frames`, `.open.<stream>` (errors of an open) or `.r.<n>` (replies).
    """
    return f"{ROOT}.inbox.{role_of(instance)}.{instance}"


def frames_to(instance: str) -> str:
    """Return the subject of frames to one process."""
    return f"{inbox(instance)}.frames"


def open_reply(instance: str, stream: int) -> str:
    """Return the reply subject of the open of a stream."""
    return f"{inbox(instance)}.open.{stream}"


def open_replies(instance: str) -> str:
    """Return the wildcard over `open_reply` of all streams."""
    return f"{inbox(instance)}.open.*"


def heartbeat(instance: str) -> str:
    """Return the subject of an instance's heartbeats."""
    return f"{ROOT}.ev.{role_of(instance)}.{instance}.heartbeat"


def cache_updates(instance: str) -> str:
    """Return the subject of an instance's prefix cache updates."""
    return f"{ROOT}.ev.{role_of(instance)}.{instance}.cache"


def jobs(kind: str) -> str:
    """Return the subject of a JetStream work queue."""
    return f"{ROOT}.jobs.{kind}"


def service(verb: str, name: str = "", instance: str = "") -> str:
    """Return a subject of the NATS service API (ADR-32).

    `verb` is PING, INFO or STATS; the subject addresses all services, a name, or an instance.
    """
    return ".".join(part for part in ("$SRV", verb, name, instance) if part)
