"""Bound the length of prompts in characters before they are tokenized.

This is a cheap check before an expensive step. A token has at most `ModelCard.longest_token`
characters, so a prompt of more than context times that cannot fit. A refused prompt has been read
and decoded; the tenant is charged for it, at most as for the longest prompt that fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.json_size import MAX_IDS, check_json
from motet_gateway.tenancy.tenant import Tenant
from motet_shared.errors import BadRequest, ContextTooLong
from motet_shared.messages import Chat, Complete, ModelCard
from motet_shared.text.characters import characters
from motet_shared.wire.discovery import Directory

MAX_TOOLS = 512
MAX_TOOL_CHARACTERS = 1 << 20  # of all declarations of a request
_LONGEST = 128  # characters of a token, if its tokenizer does not state it
_LARGE = 1 << 20  # bytes above which a body is checked before it is decoded
_ESCAPED = 12  # most bytes of a character in JSON (a surrogate pair of escapes)
_PICTURES = (
    b'"image_url"',
    b'"video_url"',
    b'"images"',
    b'"file_data"',
    b'"media_type"',
    b'"image"',
)


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Bound the prompts of one model and tenant.

    `tokens` is the most that a prompt may have; 0 if it is unknown, and nothing is refused.
    `longest` is the most characters of a token.
    """

    tokens: int
    longest: int
    tenant: Tenant

    @classmethod
    def of(cls, directory: Directory, role: str, model: str, tenant: Tenant) -> PromptSize:
        """Return the bound of a model's context and the tenant's own `max_context`."""
        base = directory.base_of(model)
        cards = [
            c
            for beat in directory.ready(role)
            for c in beat.models
            if c.name == base and c.context > 0
        ]
        tokens = max((card.context for card in cards), default=0)
        most = tenant.rights.max_context if role == "tokenizer" else 0
        longest = max((card.longest_token or _LONGEST for card in cards), default=_LONGEST)
        return cls(min(tokens, most) if most else tokens, longest, tenant)

    def check_chat(self, request: Chat) -> None:
        """Raise ContextTooLong for messages that cannot fit together with the tools."""
        most = self.tokens * self.longest
        self.check_text(request.messages, "messages", characters(request.tools, most))

    def check_completions(self, requests: Iterable[Complete]) -> None:
        for request in requests:
            self.check_text(request.prompt, "prompt", len(request.suffix))

    def check_tools(self, tools: list[Any]) -> None:
        """Raise BadRequest for too many or too long tools, ContextTooLong if they cannot fit."""
        if len(tools) > MAX_TOOLS:
            self._charge(len(tools))
            raise BadRequest(
                f"`tools` has {len(tools)} entries; at most {MAX_TOOLS} are taken", param="tools"
            )
        if tools and (found := characters(tools, MAX_TOOL_CHARACTERS)) > MAX_TOOL_CHARACTERS:
            self._charge(found)
            message = f"`tools` have more than {MAX_TOOL_CHARACTERS} characters; shorten them"
            raise BadRequest(message, param="tools")
        if tools:
            self.check_text(tools, "tools")

    def check_count(self, count: int, param: str) -> None:
        """Raise ContextTooLong for more entries than tokens: each takes at least one."""
        if self.tokens and count > self.tokens:
            self._refuse(count, f"{count} entries", param)

    def check_text(self, value: Any, param: str, more: int = 0) -> None:
        """Raise ContextTooLong if `value` cannot fit.

        A list of token ids is measured in tokens; otherwise all strings of `value` are, with `more`
        characters added.
        """
        if not self.tokens:
            return
        if isinstance(value, list) and value and isinstance(value[0], int):
            self.check_count(len(value), param)
            return
        most = self.tokens * self.longest
        found = more + characters(value, most)
        if found > most:
            self._refuse(found, f"{found} characters or more", param)

    def _refuse(self, size: int, shown: str, param: str) -> None:
        self._charge(size)
        raise ContextTooLong(
            f"`{param}`: {shown} exceed the context of {self.tokens} tokens for a prompt and its reply; "
            "shorten it",
            param=param,
        )

    def _charge(self, size: int) -> None:
        """Charge about one token per 4 characters, at most as for a prompt that fits."""
        self.tenant.charge_refusal(min(-(-size // 4), self.tokens or size))


async def read_prompt(
    service: GatewayContext,
    http: Exchange,
    param: str,
    *,
    role: str = "tokenizer",
    entries: int = MAX_IDS,
    ids: int = 0,
) -> bytes:
    """Return the undecoded body of a text request.

    Decoding 32 MiB of values takes seconds, so a large body is checked first. Raises RateLimited
    for a large one if the tenant has no tokens left, ContextTooLong if it has more text than the
    longest prompt of any model (images do not count), TooManyValues as `check_json`, which takes
    `entries`. `ids` is the most bytes that lists of token ids may have.
    """
    body = await http.body(service.config.max_body)
    if len(body) > _LARGE:
        http.tenant.check_solvent()
        _check_large(service, http.tenant, role, param, body, ids)
    check_json(body, http.tenant, param, entries)
    return body


def _check_large(
    service: GatewayContext, tenant: Tenant, role: str, param: str, body: bytes, ids: int
) -> None:
    cards: list[ModelCard] = [
        c for beat in service.bus.directory.ready(role) for c in beat.models if c.context > 0
    ]
    if not cards:
        return
    most = max(card.context * (card.longest_token or _LONGEST) for card in cards)
    room = _LARGE + max(_ESCAPED * most, ids)
    has_pictures = any(mark in body for mark in _PICTURES)
    # Base64 has no commas: more of them than the longest prompt could have are not from an image.
    if (body.count(b",") if has_pictures else len(body)) > room:
        tenant.charge_refusal(min(len(body) // 4, max(card.context for card in cards)))
        raise ContextTooLong(
            f"the body has {len(body)} bytes, more text than the longest prompt of any model here; shorten it",
            param=param,
        )
