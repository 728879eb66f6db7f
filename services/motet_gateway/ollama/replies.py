"""Run a chat or a raw completion for `/api/chat` and `/api/generate`, streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import NDJSON, Exchange
from motet_gateway.openai.chat_reply import ChatReply
from motet_gateway.openai.param_names import ParamNames
from motet_gateway.openai.prepared_chat import PreparedChat
from motet_gateway.openai.prompt_size import PromptSize
from motet_gateway.operations.metrics import Track
from motet_gateway.tenancy.tenant import Ticket
from motet_gateway.tenancy.usage import ReplyMeter, expected_tokens, prompt_tokens
from motet_pipelines.chat.chat import Outcome, chat
from motet_shared.errors import InternalError
from motet_shared.messages import Complete, End

from .reply_lines import Kind, ReplyLines, durations_of


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A raw completion that can run, and how its parameters are named in errors."""

    request: Complete
    size: PromptSize
    names: ParamNames


class CompletionReply:
    """Run one raw completion. `end` and `track` are complete once `batches` has ended."""

    def __init__(self, service: GatewayContext, ticket: Ticket, asked: PreparedCompletion):
        self._service, self._asked = service, asked
        self._outcome = Outcome()
        meter = ReplyMeter(ticket, prompt_tokens(asked.request))
        self.track: Track | None = service.metrics.begin(asked.request.model, self._outcome, meter)

    @property
    def end(self) -> End:
        """Return the end of the reply. Raises InternalError before it."""
        if self._outcome.end is None:
            raise InternalError("a reply ended without its End frame")
        return self._outcome.end

    async def batches(self) -> AsyncGenerator[list[Any], None]:
        """Yield batches of Text. Raises MotetError with Ollama's parameters."""
        asked, config = self._asked, self._service.config
        assert self.track is not None
        with asked.names.applied():
            asked.size.check_completions([asked.request])
            batches = chat(
                self._service.bus,
                asked.request,
                self._outcome,
                deadline=config.request_timeout,
                patience=config.patience,
            )
            with self.track as track:
                async with aclosing(batches):
                    async for batch in batches:
                        track.got(batch)
                        yield batch


async def answer(
    service: GatewayContext,
    http: Exchange,
    asked: PreparedChat | PreparedCompletion,
    kind: Kind,
    *,
    stream: bool,
) -> None:
    """Answer with lines, or with one object. An error before the first text is raised."""
    request = asked.chat if isinstance(asked, PreparedChat) else asked.request
    lines = ReplyLines(kind, request.model)
    with await http.tenant.take(1, tokens=expected_tokens([request])) as ticket:
        reply: ChatReply | CompletionReply
        if isinstance(asked, PreparedChat):
            reply = ChatReply(service, ticket)
            batches = reply.batches(asked)
        else:
            reply = CompletionReply(service, ticket, asked)
            batches = reply.batches()
        if stream:
            http.content = NDJSON
        async with http.while_connected():
            async with aclosing(batches):
                async for batch in batches:
                    if not stream:
                        lines.collect(batch)
                    # Blocks while the client does not read: its reply then gets no more credit.
                    elif data := lines.add(batch):
                        await http.write(data)
            stages = reply.track.stopwatch.as_dict() if reply.track is not None else {}
            durations = durations_of(stages)
            if stream:
                await http.finish(lines.finish(reply.end, durations))
            else:
                await http.reply(200, lines.whole(reply.end, durations))
