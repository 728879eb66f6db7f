"""Run speech recognition processes behind a real gateway, for tests over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from motet_shared.testing import NatsServer
from support.running.service_process import Process, service_process
from support.stages.served_gateway import KEY, Served, served_gateway

MODEL = "ears"


@dataclass
class Service(Served):
    recognizers: list[Process]

    async def post(
        self,
        path: str = "transcriptions",
        *,
        file: bytes | None,
        name: str = "sound.wav",
        kind: str = "application/octet-stream",
        timeout: float = 30,
        **fields: Any,
    ) -> httpx.Response:
        async with httpx.AsyncClient(
            trust_env=False, headers={"Authorization": f"Bearer {KEY}"}
        ) as http:
            files: Any = {"x": (None, "")} if file is None else {"file": (name, file, kind)}
            data = (
                {"model": MODEL} | ({"language": "en"} if path == "transcriptions" else {}) | fields
            )
            return await http.post(
                f"{self.url}/v1/audio/{path}", data=data, files=files, timeout=timeout
            )


@asynccontextmanager
async def serving(
    folder: Path, count: int = 1, *, max_upload: int = 1 << 20
) -> AsyncIterator[Service]:
    """Run `count` recognizers of the checkpoint in `folder`."""
    argv = ("--model", str(folder), "--name", MODEL, "--no-fallback", "--parallel", "2")
    async with NatsServer() as nats, AsyncExitStack() as stack:
        recognizers = [
            await stack.enter_async_context(service_process(nats, "motet_asr", *argv))
            for _ in range(count)
        ]
        async with served_gateway(nats, max_upload=max_upload) as gateway:
            await gateway.bus.directory.wait_for(lambda d: len(d.ready("asr")) == count, 300)
            yield Service(gateway, recognizers)
