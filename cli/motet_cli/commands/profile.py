"""Record a torch trace of a decode worker, for Perfetto or chrome://tracing: `motet profile`."""

from __future__ import annotations

import asyncio
import gzip
import re
from argparse import Namespace
from pathlib import Path

from motet_cli.supervision import connection
from motet_cli.supervision.connection import NatsAccess
from motet_cli.supervision.stack_bus import stack_bus
from motet_shared.errors import ConfigError, InternalError, Unavailable
from motet_shared.messages import Chunk, Heartbeat, Profile
from motet_shared.wire.discovery import Directory

_WINDOW = 4  # chunks in flight, together smaller than any server's max_payload
_DISCOVERY_TIMEOUT = 3.0  # seconds in which every worker has sent several heartbeats
_STEP = re.compile(rb'"name": "engine step \d+"')


def run(args: Namespace) -> int:
    output = check_output(args.output)
    access = connection.find(args.url, args.nats)
    request = Profile(
        model=args.model or "",
        steps=args.steps,
        seconds=args.seconds,
        shapes=args.shapes,
        stacks=args.stacks,
        memory=args.memory,
    )
    instance, trace = asyncio.run(record(access, request, args.instance))
    steps = save(output, trace)
    print(
        f"{output}: {steps} steps of {instance}, {output.stat().st_size:,} bytes; open it in https://ui.perfetto.dev"
    )
    return 0


def check_output(path: str) -> Path:
    """Return the output path. Raises ConfigError if the trace could not be written there."""
    output = Path(path).expanduser()
    if not output.parent.is_dir() or output.is_dir():
        raise ConfigError(
            f"--output: {path!r} is not a file in an existing folder; give one such as trace.json.gz",
            param="--output",
        )
    return output


async def record(access: NatsAccess, request: Profile, instance: str | None) -> tuple[str, bytes]:
    """Record a trace; return the id of the worker and the trace, gzipped.

    Sets an empty `request.model` to the model of the worker.
    """
    async with stack_bus(access) as bus:
        worker = await _pick_worker(bus.directory, request.model, instance)
        request.model = request.model or worker.models[0].name
        trace = b""
        async with bus.open("decode", request, instance=worker.instance, window=_WINDOW) as stream:
            async for body in stream:
                if not isinstance(body, Chunk):
                    raise InternalError(f"{worker.instance} sent {type(body).__name__}, not Chunk")
                trace += body.data
        return worker.instance, trace


async def _pick_worker(directory: Directory, model: str, instance: str | None) -> Heartbeat:
    """Return the heartbeat of the worker to record: `instance`, else the model's busiest worker.

    Raises Unavailable if no such worker is ready, ConfigError if `model` is empty and several are
    served.
    """

    def matching() -> list[Heartbeat]:
        ready = directory.ready("decode", model=model or None)
        return [beat for beat in ready if beat.models and instance in (None, beat.instance)]

    try:
        await directory.wait_for(lambda _: matching(), _DISCOVERY_TIMEOUT)
        await asyncio.sleep(0.7)  # wait for the other workers' heartbeats, sent every half second
    except TimeoutError:
        known = ", ".join(
            f"{b.instance} ({b.models[0].name})" for b in directory.ready("decode") if b.models
        )
        wanted = (
            f"--instance: {instance!r}"
            if instance
            else f"--model: {model!r}"
            if model
            else "--model: ''"
        )
        raise Unavailable(
            f"{wanted} no such decode worker is ready; choose one of: {known or 'none is ready'}"
        ) from None
    names = sorted({card.name for beat in matching() for card in beat.models})
    if len(names) > 1:
        raise ConfigError(
            f"--model: several models are served; choose one of {', '.join(names)}", param="--model"
        )
    return max(matching(), key=lambda beat: beat.load.get("running", 0.0))


def save(output: Path, trace: bytes) -> int:
    """Write the trace atomically, unpacked unless named .gz; return the number of steps in it."""
    plain = gzip.decompress(trace)
    part = output.with_name(output.name + ".part")
    part.write_bytes(trace if output.suffix == ".gz" else plain)
    part.replace(output)
    return len(_STEP.findall(plain))
