"""Many streams at once through the gateway, and what became of each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


@dataclass
class Outcome:
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None  # in OpenAI's shape
    broken: str = ""  # the connection ended without a word
    longest_pause: float = 0.0
    done: bool = False

    def same_as(self, other: Outcome) -> bool:
        return (self.text, self.finish, self.error, self.broken) == (
            other.text,
            other.finish,
            other.error,
            other.broken,
        )


def request(number: int, model: str, tokens: int) -> dict[str, Any]:
    """Even ones are chats, odd ones plain completions; a half of each is greedy, the other half sampled by seed."""
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0 if number % 4 < 2 else 1,
        "seed": number,
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    text = f"stream {number} says {'abcdefgh'[number % 8]}"
    return body | (
        {"prompt": text} if number % 2 else {"messages": [{"role": "user", "content": text}]}
    )


@dataclass
class Streams:
    """`async with Streams(url, requests) as streams:` has them running; leaving closes what still runs."""

    url: str
    requests: list[dict[str, Any]]
    key: str = "none"  # of the client
    outcomes: list[Outcome] = field(default_factory=list)

    async def __aenter__(self) -> Streams:
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=120,
            limits=LIMITS,
            trust_env=False,
            headers={"authorization": f"Bearer {self.key}"},
        )
        self.outcomes = [Outcome() for _ in self.requests]
        self._progress = asyncio.Event()
        self.tasks = [
            asyncio.create_task(self._run(body, outcome))
            for body, outcome in zip(self.requests, self.outcomes, strict=True)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self._http.aclose()

    async def reached(self, characters: int, timeout: float = 60.0) -> None:
        """Waits until every stream has brought this many characters, and says so if one is over by then."""
        async with asyncio.timeout(timeout):
            while any(len(outcome.text) < characters for outcome in self.outcomes):
                if over := [
                    outcome
                    for outcome in self.outcomes
                    if outcome.done and len(outcome.text) < characters
                ]:
                    raise RuntimeError(f"a stream ended before its time: {over[0]}")
                self._progress.clear()
                await self._progress.wait()

    async def finish(self, timeout: float = 90.0) -> list[Outcome]:
        async with asyncio.timeout(timeout):
            await asyncio.gather(*self.tasks)
        return self.outcomes

    async def _run(self, body: dict[str, Any], outcome: Outcome) -> None:
        await ask(self._http, body, outcome, self._progress.set)
        self._progress.set()


async def ask(
    http: httpx.AsyncClient,
    body: dict[str, Any],
    outcome: Outcome,
    told: Callable[[], None] = lambda: None,
) -> None:
    """Send one request and note in `outcome` what comes; `told` is called with every piece of it."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    try:
        async with http.stream("POST", path, json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                outcome.error = reply.json()["error"]
            else:
                await _read(reply, outcome, told)
    except httpx.HTTPError as error:
        outcome.broken = f"{type(error).__name__}: {error}"
    outcome.done = True


async def _read(reply: httpx.Response, outcome: Outcome, told: Callable[[], None]) -> None:
    last = time.monotonic()
    async for line in reply.aiter_lines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        outcome.error = chunk.get("error") or outcome.error
        outcome.usage = chunk.get("usage") or outcome.usage
        for choice in chunk.get("choices", ()):
            outcome.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            outcome.finish = choice.get("finish_reason") or outcome.finish
        now = time.monotonic()
        outcome.longest_pause, last = max(outcome.longest_pause, now - last), now
        told()
