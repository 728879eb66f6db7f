"""Autobahn|Testsuite, unmodified, against the gateway's WebSocket server with an echoing application.

Its cases need a server that sends back every message, which no endpoint does. So the server is the
gateway's own (its connection classes, its settings), and only the application behind it is not.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from conformance.environments import autobahn_of
from conformance.outcome import record
from conformance.suites import AUTOBAHN
from motet_gateway.config import GatewayConfig
from motet_gateway.http.chunks import State
from motet_gateway.http.connections.counts import ConnectionCounts
from motet_gateway.service import _bounds, _Server, _uvicorn_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended("conformance"),
    pytest.mark.timeout(1500),
]
SECONDS = 1200
MAX_MESSAGE = 16 * 1024 * 1024  # bytes, the largest of group 9
# Compression, which the server does not negotiate.
LEFT_OUT = ("12.*", "13.*")
# NON-STRICT: the suite accepts it; what came in one packet with an error is not echoed before the close.
PASSED = {"OK", "INFORMATIONAL", "NON-STRICT"}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Send every message of a WebSocket back."""
    assert scope["type"] == "websocket"
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        kind = "text" if message.get("text") is not None else "bytes"
        try:
            await send({"type": "websocket.send", kind: message[kind]})
        except OSError:  # the client has left
            return


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """Serve `echo` as the gateway serves its application; yield the port."""
    config = GatewayConfig(max_message=MAX_MESSAGE)
    app: Any = echo
    server = _Server(_uvicorn_config(config, app), State(_bounds(config), ConnectionCounts(10, 10)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


async def test_autobahn(tmp_path: Path) -> None:
    wstest, env = await asyncio.to_thread(autobahn_of)
    async with serving() as port:
        spec = {
            "outdir": str(tmp_path / "reports"),
            "servers": [{"agent": "motet", "url": f"ws://127.0.0.1:{port}"}],
            "cases": ["*"],
            "exclude-cases": list(LEFT_OUT),
            "exclude-agent-cases": {},
        }
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        running = await asyncio.create_subprocess_exec(
            *wstest,
            *("--mode", "fuzzingclient", "--spec", str(tmp_path / "spec.json")),
            cwd=tmp_path,
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(running.communicate(), SECONDS)
        finally:
            if running.returncode is None:
                running.kill()
                await running.wait()
    index = tmp_path / "reports" / "index.json"
    assert index.exists(), output.decode()[-4000:]
    cases = outcomes(json.loads(index.read_text())["motet"])
    assert len(cases) > 290, len(cases)
    version = AUTOBAHN[0].partition("==")[2]
    wrong = record("autobahn", "Autobahn Testsuite", version, cases, {})
    assert not wrong, wrong


def outcomes(report: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the error of each case, "" if it passed."""
    return {
        case: ""
        if {found["behavior"], found["behaviorClose"]} <= PASSED
        else f"{found['behavior']}, close {found['behaviorClose']}"
        for case, found in report.items()
    }
