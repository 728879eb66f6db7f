"""Speak HTTP to an engine's server: JSON requests, and replies as server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec

from motet_shared.errors import MotetError, Unavailable

from .failures import of_response
from .sse import EventSplitter

MAX_BODY = 64 << 20  # bytes of an answer that is not streamed
MAX_ERROR = 1 << 20
_CONNECT = 5.0  # seconds
_PROBE = 5.0  # seconds
_DONE = b"[DONE]"
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per probe says nothing


class Connection:
    """Hold the connections to one server. Errors are the wire's (`failures`).

    timeout: seconds without a byte after which the server counts as hanging.
    """

    def __init__(self, url: str, key: str | None, timeout: float):
        self.url = url.rstrip("/")
        self._headers = {"accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._timeout = httpx.Timeout(timeout, connect=_CONNECT, pool=None)
        self._http = self._client()

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers=self._headers,
            timeout=self._timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def get(self, path: str) -> bytes:
        """Return the body of a GET, of which the server has five seconds to begin it."""
        return await self._whole("GET", path, None, _PROBE)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the decoded JSON that answers a request. Raises MotetError."""
        data = await self._whole("POST", path, body, None)
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise Unavailable(f"{self.url}{path} answers no JSON: {error}") from None

    async def _whole(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None
    ) -> bytes:
        limits = self._timeout if timeout is None else httpx.Timeout(timeout, pool=None)
        try:
            async with self._http.stream(
                method, self._address(path), content=_encoded(body), timeout=limits
            ) as response:
                limit = MAX_BODY if response.status_code == 200 else MAX_ERROR
                data = await _limited(response, limit)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise of_response(response.status_code, data)
        return data

    async def events(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the data of the events that answer a request of JSON, until [DONE] or the end.

        Closing the generator closes the connection, by which servers know of a cancel.
        """
        try:
            async with self._http.stream("POST", self._address(path), content=body) as response:
                if response.status_code != 200:
                    data = await _limited(response, MAX_ERROR)
                    raise of_response(response.status_code, data)
                splitter = EventSplitter()
                async for chunk in response.aiter_raw():
                    for data in splitter.feed(chunk):
                        if data == _DONE:
                            return
                        yield data
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise self._unreachable(error) from None

    def _address(self, path: str) -> str:
        """Return the URL of a path; one that begins with `//` is outside of /v1."""
        if path.startswith("//"):
            return self.url.removesuffix("/v1") + path[1:]
        return self.url + path

    def _unreachable(self, error: Exception) -> MotetError:
        reason = str(error) or type(error).__name__
        return Unavailable(f"the engine's server at {self.url} does not answer: {reason}")

    async def reset(self) -> None:
        """Break all requests, for a server that hangs; later ones connect anew."""
        old, self._http = self._http, self._client()
        await old.aclose()

    async def close(self) -> None:
        await self._http.aclose()


def _encoded(body: dict[str, Any] | None) -> bytes | None:
    return None if body is None else msgspec.json.encode(body)


async def _limited(response: httpx.Response, limit: int) -> bytes:
    parts, size = [], 0
    async for chunk in response.aiter_raw():
        parts.append(chunk)
        size += len(chunk)
        if size > limit:
            raise Unavailable(f"an answer of the engine's server has more than {limit} bytes")
    return b"".join(parts)
