"""Serve POST /api/pull: download a model from the hub, as `motet pull` does.

The download is a process of its own, `motet pull --json`, so that it takes nothing from requests
and ends when its client leaves; a later one resumes it. The stack serves the model once it is
started with it.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import NDJSON, Exchange
from motet_gateway.http.problems import NotFound
from motet_shared.errors import BadRequest, Overloaded

from .models import named
from .schema import parse_pull

COMMAND = (sys.executable, "-m", "motet_cli")
MAX_PULLS = 2  # downloads of a gateway at a time
_MOST_BODY = 2**16
_LONGEST_NAME = 300
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?(:[\w./+-]+\.gguf)?")
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL


class PullFailed(BadRequest):
    """Signal that a download failed; the message is that of `motet pull`."""

    code = "pull_failed"


async def pull_model(service: GatewayContext, http: Exchange) -> None:
    """Answer with lines of the progress, or once the model is there (`stream` false)."""
    body = parse_pull(await http.body(_MOST_BODY), http.hints("ollama"))
    name = _checked(named(body))
    if find_spec("motet_cli") is None:
        raise NotFound("this gateway has no `motet pull`; run it where models are stored")
    is_streamed = body.stream is not False
    if is_streamed:
        http.content = NDJSON
    async with http.while_connected(), _download(service, name) as process:
        last = b""
        assert process.stdout is not None
        async for line in process.stdout:
            last = _without_error(line)
            if is_streamed:
                await http.write(last)
        if await process.wait() != 0:
            raise PullFailed(f"`model`: the download of {name!r} broke off", param="model")
        if is_streamed:
            await http.finish(b"")
        else:
            await http.reply(200, last)


def _checked(name: str) -> str:
    """Return a name on the hub. Raises BadRequest for one of another form."""
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        message = f"`model` {name[:80]!r} is not a name on the hub; send org/name"
        raise BadRequest(message, param="model")
    return name


def _without_error(line: bytes) -> bytes:
    """Return a line of progress. Raises PullFailed for one with an error."""
    found = msgspec.json.decode(line)
    if isinstance(found, dict) and "error" in found:
        raise PullFailed(f"`model`: {found['error']}", param="model")
    return line


@asynccontextmanager
async def _download(service: GatewayContext, name: str) -> AsyncIterator[Process]:
    """Run a download; it is ended with the block. Raises Overloaded if too many run."""
    if service.downloads >= MAX_PULLS:
        message = f"{service.downloads} downloads are running; pull again when one has ended"
        raise Overloaded(message)
    service.downloads += 1
    try:
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, "pull", "--json", "--", name),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=DEVNULL,
            env=_environment(),
        )
        try:
            yield process
        finally:
            await _end(process)
    finally:
        service.downloads -= 1


def _environment() -> dict[str, str]:
    """Return the environment without the gateway's settings, some of which are secrets."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MOTET_")}


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_GRACE):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
