"""Run a worker that repeats a text a given number of times, in process or as a process.

The process is `python -m support.services.echo_worker`.
"""

from __future__ import annotations

import asyncio

from motet_shared.messages import Echo, Text, Usage
from motet_shared.process.actor import Actor, operation, run
from motet_shared.process.config import ProcessConfig
from motet_shared.wire.call import Call


class EchoWorker(Actor):
    role = "tokenizer"

    @operation(Echo)
    async def echo(self, call: Call, request: Echo) -> None:
        for number in range(request.count):
            if request.delay_ms:
                await asyncio.sleep(request.delay_ms / 1000)
            await call.send(Text(request.text, [number]))
        call.finish("stop", Usage(completion_tokens=request.count))


if __name__ == "__main__":
    run(EchoWorker, ProcessConfig)
