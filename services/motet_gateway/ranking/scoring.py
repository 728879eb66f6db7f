"""Score pairs of texts with a ranking model, within the limits of the server and of the tenant."""

from __future__ import annotations

from contextlib import aclosing

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.openai.aliases import model_of
from motet_gateway.openai.prompt_size import PromptSize
from motet_gateway.operations.loading import check_wait
from motet_gateway.tenancy.usage import settled, text_tokens
from motet_pipelines.rank import ROLE, Ranked, rank
from motet_shared.errors import BadRequest
from motet_shared.messages import Rank


async def score(service: GatewayContext, http: Exchange, request: Rank) -> tuple[list[float], int]:
    """Return a score of each document of a request, and the tokens that were read.

    The tenant is charged for these. `max_document` of a request cuts its documents. Errors name
    `query` and `documents`.
    """
    service.check_open()
    request.priority = http.tenant.rights.priority(None)
    check_wait(http, service.bus.directory, ROLE, request.model)
    _check_size(service, http, request)
    asked = [text_tokens(text) for text in request.queries]
    asked = asked if len(asked) > 1 else asked * len(request.documents)
    expected = sum(asked) + sum(map(text_tokens, request.documents))
    outcome, scores = Ranked(), list[float]()
    with await http.tenant.take(tokens=expected) as ticket:
        async with http.while_connected():
            parts = rank(
                service.bus,
                request,
                outcome,
                deadline=service.config.request_timeout,
                patience=service.config.patience,
            )
            with settled(ticket.tokens, expected, lambda: outcome.tokens):
                async with aclosing(parts):
                    async for part in parts:
                        scores += part.values
    return scores, outcome.tokens


def served_model(service: GatewayContext, name: str | None) -> str:
    """Return the ranking model that a name refers to; none: any. Raises UnknownModel."""
    return model_of(service.bus.directory, ROLE, name or "")


def _check_size(service: GatewayContext, http: Exchange, request: Rank) -> None:
    """Check every text before it is tokenized, and cut those that will be cut in any case."""
    size = PromptSize.of(service.bus.directory, ROLE, request.model, http.tenant)
    if len(request.documents) > service.config.max_inputs:
        message = f"`documents` has {len(request.documents)} texts; at most "
        message += f"{service.config.max_inputs} are taken at a time (--max-inputs)"
        raise BadRequest(message, param="documents")
    for param, texts in (("query", request.queries), ("documents", request.documents)):
        if any(not text for text in texts):
            raise BadRequest(f"`{param}` has an empty text; leave it out", param=param)
    if request.max_document:
        most = request.max_document * size.longest
        request.documents = [text[:most] for text in request.documents]
    for text in request.queries:
        size.check_text(text, "query")
    for text in request.documents:
        size.check_text(text, "documents")
