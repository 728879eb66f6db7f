"""The only place where a subject string is built.

An instance id is `<role>-<hex>`, or a name of the operator's own, `<role>-<name>`: its role can be read off it, and
both are valid NATS tokens.
"""

from __future__ import annotations

import re
import secrets

ROOT = "motet.v1"
HEARTBEATS = f"{ROOT}.ev.*.*.heartbeat"
CACHE_NEWS = f"{ROOT}.ev.*.*.cache"

_INSTANCE = re.compile(r"[a-z]+(-[a-z0-9]{1,32}){1,4}")


def new_instance(role: str) -> str:
    """A fresh instance id. A restarted process takes a new one: its streams and leases are not its predecessor's."""
    return f"{role}-{secrets.token_hex(4)}"


def role_of(instance: str) -> str:
    """The role of an instance id; ValueError if it is none (it may come from the wire)."""
    if not _INSTANCE.fullmatch(instance):
        raise ValueError(f"instance id must look like '<role>-<name>', got {instance!r}")
    return instance.partition("-")[0]


def operation(role: str, op: str) -> str:
    """Reaches any instance of the role (its queue group)."""
    return f"{ROOT}.{role}.{op}"


def open_at(instance: str) -> str:
    return f"{ROOT}.{role_of(instance)}.i.{instance}.open"


def control_at(instance: str) -> str:
    return f"{ROOT}.{role_of(instance)}.i.{instance}.ctl"


def feeds_to(instance: str) -> str:
    return f"{ROOT}.{role_of(instance)}.i.{instance}.feed"


def inbox(instance: str) -> str:
    """Prefix of everything sent to one process: `.frames`, `.open.<stream>` (errors of an open), `.r.<n>` (replies)."""
    return f"{ROOT}.inbox.{role_of(instance)}.{instance}"


def frames_to(instance: str) -> str:
    return f"{inbox(instance)}.frames"


def open_reply(instance: str, stream: int) -> str:
    return f"{inbox(instance)}.open.{stream}"


def open_replies(instance: str) -> str:
    """Wildcard over `open_reply` of all streams."""
    return f"{inbox(instance)}.open.*"


def heartbeat(instance: str) -> str:
    return f"{ROOT}.ev.{role_of(instance)}.{instance}.heartbeat"


def cache_news(instance: str) -> str:
    return f"{ROOT}.ev.{role_of(instance)}.{instance}.cache"


def jobs(kind: str) -> str:
    """A work queue in JetStream."""
    return f"{ROOT}.jobs.{kind}"


def service(verb: str, name: str = "", instance: str = "") -> str:
    """A subject of the NATS service API (ADR-32): $SRV.PING, .INFO or .STATS, of all, of a name, of an instance."""
    return ".".join(part for part in ("$SRV", verb, name, instance) if part)
