"""Call a Motet server from a terminal: its models, and one streamed reply at a time."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from motet_shared.errors import ConfigError, MotetError, Unavailable, from_wire

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Listed:
    """Represent a model of `/v1/models`.

    parent: the model that an adapter belongs to, else "".
    """

    name: str
    kind: str
    status: str
    parent: str


class Server:
    """Call a server; all errors are raised as MotetError with a remedy for the user."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # The environment's proxies are for the internet, not for a server named by --url.
        # Certificates are verified with this machine's trust store, or SSL_CERT_FILE.
        trust = ssl.create_default_context() if self.url.startswith("https:") else True
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(10, read=120),
            trust_env=False,
            verify=trust,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def models(self, kind: str = "chat") -> list[str]:
        """Return the names of a kind's models, served or starting; requests wait for starting ones."""
        return list(self.parents(kind))

    def parents(self, kind: str = "chat") -> dict[str, str]:
        """Return the parent of each model of a kind by name, "" for a model that is no adapter."""
        return {model.name: model.parent for model in self.listed() if model.kind == kind}

    def listed(self) -> list[Listed]:
        """Return the models of all kinds.

        Raises MotetError if the server cannot be reached or is no Motet server.
        """
        try:
            reply = self._http.get("/v1/models")
            _check(reply)
            return [
                Listed(
                    name=str(model["id"]),
                    kind=str(model.get("kind", "chat")),
                    status=str(model.get("status", "ready")),
                    parent=str(model.get("parent") or ""),
                )
                for model in reply.json()["data"]
            ]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise MotetError(f"{self.url} is not a Motet server; check --url") from None

    def hears(self, model: str) -> bool:
        """Return True if a chat model is given the sound of spoken conversations itself."""
        try:
            reply = self._http.get("/health/ready", params={"model": model})
            return bool(reply.json()["speech"]["hears"])
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        except (ValueError, KeyError, TypeError):
            return False  # an unknown model, or a server that does not tell

    def load_adapter(self, name: str, folder: Path) -> None:
        """Have the server serve the adapter in a folder of its machine, from now on."""
        body = {"lora_name": name, "lora_path": str(folder)}
        self._answer("POST", "/v1/load_lora_adapter", json=body)

    def unload_adapter(self, name: str) -> None:
        """Have the server serve an adapter no longer."""
        self._answer("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    def metrics(self, page: str, **query: Any) -> dict[str, Any]:
        """Return the JSON document `/metrics/<page>`."""
        return self._answer("GET", f"/metrics/{page}", params=query).json()  # type: ignore[no-any-return]

    def _answer(self, method: str, path: str, **sent: Any) -> httpx.Response:
        """Return the whole answer to a request. Raises MotetError for any status but 200."""
        try:
            reply = self._http.request(method, path, **sent)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        _check(reply)
        return reply

    @contextmanager
    def _streamed(self, path: str, **sent: Any) -> Iterator[httpx.Response]:
        """Yield a streamed reply of status 200. Raises MotetError for any other status."""
        try:
            with self._http.stream("POST", path, **sent) as reply:
                if reply.status_code != 200:
                    reply.read()
                _check(reply)
                yield reply
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def reply(self, model: str, messages: list[Message], temperature: float) -> Iterator[str]:
        """Yield pieces of the reply. Closing the iterator cancels the request on the server."""
        body = {"model": model, "messages": messages, "temperature": temperature, "stream": True}
        with self._streamed("/v1/chat/completions", json=body) as reply:
            yield from _pieces(reply.iter_lines())

    def speech(
        self, model: str, text: str, voice: str | None, speed: float, audio_format: str
    ) -> Iterator[bytes]:
        """Yield encoded speech as it arrives. Closing the iterator cancels the request."""
        body = {"model": model, "input": text, "speed": speed, "response_format": audio_format}
        if voice:
            body["voice"] = voice
        with self._streamed("/v1/audio/speech", json=body) as reply:
            yield from reply.iter_bytes()

    def transcription(self, model: str, path: Path, fields: dict[str, str]) -> Iterator[str]:
        """Yield pieces of a sound file's transcript. Closing the iterator cancels the request."""
        for event in self._transcription_events(model, path, fields):
            if event.get("type") == "transcript.text.delta":
                yield str(event["delta"])

    def conversation(
        self, model: str, path: Path, fields: dict[str, str]
    ) -> Iterator[tuple[str, str]]:
        """Yield (speaker, text) of a sound file. Closing the iterator cancels the request."""
        form = fields | {"response_format": "diarized_json", "chunking_strategy": "auto"}
        for event in self._transcription_events(model, path, form):
            if event.get("type") == "transcript.text.segment":
                yield str(event["speaker"]), str(event["text"])

    def _transcription_events(
        self, model: str, path: Path, fields: dict[str, str]
    ) -> Iterator[dict[str, Any]]:
        form = fields | {"model": model, "stream": "true"}
        with (
            path.open("rb") as sound,
            self._streamed("/v1/audio/transcriptions", data=form, files={"file": sound}) as reply,
        ):
            yield from _events(reply.iter_lines())

    def drawing(self, fields: dict[str, Any], files: dict[str, Path]) -> Iterator[dict[str, Any]]:
        """Yield events of an image generation, the image last. Closing cancels the request."""
        body = fields | {"stream": True, "progress": True}
        with ExitStack() as opened:
            if files:
                pictures = {
                    name: opened.enter_context(path.open("rb")) for name, path in files.items()
                }
                form = {
                    name: json.dumps(v) if isinstance(v, list) else str(v)
                    for name, v in body.items()
                }
                reply = opened.enter_context(
                    self._streamed("/v1/images/edits", data=form, files=pictures)
                )
            else:
                reply = opened.enter_context(self._streamed("/v1/images/generations", json=body))
            yield from _events(reply.iter_lines())

    def film(self, fields: dict[str, Any], image: Path | None) -> Message:
        """Queue a video, which begins with `image` if there is one, and return its state."""
        with ExitStack() as opened:
            sent: dict[str, Any] = {"json": fields}
            if image is not None:
                files = {"input_reference": opened.enter_context(image.open("rb"))}
                sent = {"data": {name: str(v) for name, v in fields.items()}, "files": files}
            return self._answer("POST", "/v1/videos", **sent).json()  # type: ignore[no-any-return]

    def film_status(self, video_id: str) -> Message:
        """Return where a video stands."""
        return self._answer("GET", f"/v1/videos/{video_id}").json()  # type: ignore[no-any-return]

    def film_content(self, video_id: str) -> bytes:
        """Return the file of a video that is made."""
        return self._answer("GET", f"/v1/videos/{video_id}/content").content

    def delete_film(self, video_id: str) -> None:
        """Have the server make or keep a video no longer."""
        self._answer("DELETE", f"/v1/videos/{video_id}")

    def translation(self, model: str, path: Path, fields: dict[str, str]) -> str:
        """Return the English translation of a sound file."""
        form = fields | {"model": model, "response_format": "json"}
        with path.open("rb") as sound:
            reply = self._answer(
                "POST", "/v1/audio/translations", data=form, files={"file": sound}, timeout=600
            )
        return str(reply.json()["text"])

    def _unreachable(self, error: httpx.HTTPError) -> Unavailable:
        if isinstance(error, httpx.ConnectError):
            return Unavailable(f"no server at {self.url}; start one with `motet up`, or give --url")
        if isinstance(error, httpx.TimeoutException):
            return Unavailable(f"{self.url} does not answer in time; try again later")
        return Unavailable(f"the connection to {self.url} broke: {error}")


def _check(reply: httpx.Response) -> None:
    if reply.status_code == 200:
        return
    try:
        error = reply.json()["error"]
        raise from_wire(str(error.get("code") or "internal"), str(error["message"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise MotetError(f"the server answered {reply.status_code}: {reply.text[:200]}") from None


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the data of server-sent events. Raises MotetError for an error event."""
    for line in lines:
        if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
            continue
        chunk = json.loads(data)
        if error := chunk.get("error"):
            raise from_wire(str(error.get("code") or "internal"), str(error.get("message")))
        yield chunk


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """Yield the text of a chat completion from server-sent events."""
    for chunk in _events(lines):
        for choice in chunk.get("choices", []):
            if text := choice.get("delta", {}).get("content"):
                yield text


def read_key(path: str | None) -> str | None:
    """Return the key from a file, `MOTET_API_KEY_FILE` or `MOTET_API_KEY`; None if there is none.

    Raises ConfigError if the file cannot be read.
    """
    path = path or os.environ.get("MOTET_API_KEY_FILE")
    if not path:
        return os.environ.get("MOTET_API_KEY") or None
    try:
        return Path(path).expanduser().read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"--api-key-file: cannot read {path!r}: {error.strerror}; give a readable file with the key",
            param="--api-key-file",
        ) from None
