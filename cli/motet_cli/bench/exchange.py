"""Send one request and measure its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from motet_cli.bench.events import DONE, CompletionChunk, EventParser, decode_chunk, error_kind
from motet_cli.bench.http import BadResponse, Client, Reply
from motet_cli.bench.results.record import Record
from motet_cli.bench.speech import read_speech


async def exchange(
    client: Client,
    path: str,
    body: bytes,
    record: Record,
    now: Callable[[], float],
    timeout: float,
    *,
    spoken: bool = False,
) -> None:
    """Send a request and record its reply or its failure in `record`.

    spoken: the reply is audio. Raises only CancelledError, after recording it as "interrupted".
    """
    record.sent = now()
    try:
        async with asyncio.timeout(timeout):
            reply = await client.request("POST", path, body)
            try:
                if spoken and reply.status == 200:
                    await _listen(reply, record, now)
                else:
                    await _read(reply, record, now)
            finally:
                reply.close()
    except asyncio.CancelledError:
        record.error = "interrupted"
        raise
    except TimeoutError:
        _fail(record, "timeout", f"no complete reply within {timeout:g} s")
    except OSError as error:
        _fail(record, "connection", error.strerror or str(error))
    except BadResponse as error:
        _fail(record, "broken reply", str(error))
    except msgspec.DecodeError as error:
        _fail(record, "broken reply", f"an event's data is not a completion chunk: {error}")
    finally:
        record.ended = now()


def _fail(record: Record, kind: str, message: str) -> None:
    record.error, record.message = kind, message


async def _read(reply: Reply, record: Record, now: Callable[[], float]) -> None:
    if reply.status != 200:
        code, message = error_kind(await reply.read())
        _fail(record, f"{reply.status} {code}", message)
        return
    parser, done = EventParser(), False
    async for data in reply.body():
        with_tokens = 0
        for event in parser.feed(data):
            if event == DONE:
                done = True
            elif not done:
                with_tokens += _record_chunk(decode_chunk(event), record)
        if with_tokens:
            record.times.append(now())
            record.events.append(with_tokens)
    if not done and record.ok:
        _fail(record, "broken reply", "the stream ended without [DONE]")


async def _listen(reply: Reply, record: Record, now: Callable[[], float]) -> None:
    record.speech = await read_speech(reply, record.sent, now)
    if record.speech is None:
        _fail(record, "broken reply", "the reply has no audio")


def _record_chunk(chunk: CompletionChunk, record: Record) -> bool:
    """Record the contents of a chunk; return True if it carries tokens."""
    if bytes(chunk.error) not in (b"", b"null"):
        code, message = error_kind(bytes(chunk.error))
        _fail(record, f"in the stream: {code}", message)
    if chunk.usage is not None:
        record.prompt_tokens, record.tokens = (
            chunk.usage.prompt_tokens,
            chunk.usage.completion_tokens,
        )
        record.cached_tokens = chunk.usage.cached_tokens
    if chunk.timing:
        record.timing = chunk.timing
    return chunk.has_tokens
