"""Serve GET /openapi.json, which describes every endpoint with its requests and answers.

The schemas of requests are generated from the structs that validate them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from fastapi.responses import Response

from motet_gateway.audio.encoder import content_types
from motet_gateway.audio.speech import SpeechBody
from motet_gateway.http.routes import Access, Router
from motet_gateway.images.jobs_endpoints import JobBody
from motet_gateway.images.schema import GenerationBody
from motet_gateway.openai.embeddings import EmbeddingsBody
from motet_gateway.openai.schema import NO_EFFECT, ChatBody, CompletionBody
from motet_gateway.operations.heartbeat_history import LONGEST
from motet_gateway.operations.stack import MOST_REPLIES
from motet_shared import __version__

from . import answers as answers
from . import operations as watching
from .forms import Schema, edit_form, transcription_form

_REF = "#/components/schemas/{name}"
_JSON, _FORM, _EVENTS = "application/json", "multipart/form-data", "text/event-stream"
_PLAIN, _VTT = "text/plain", "text/vtt"
_TEXT: Schema = {"type": "string"}
_EVENT: Schema = {  # one event of a stream
    "type": "object",
    "properties": {"event": _TEXT, "data": {**_TEXT, "contentMediaType": _JSON}},
    "required": ["data"],
}
_BYTES: Schema = {"type": "string", "format": "binary"}
_ABOUT = """\
OpenAI's API, with extensions that are named as such. Each parameter is implemented, accepted where it asks for
nothing, or refused by name; the header `motet-ignored` names those that were ignored because they cannot change the
answer (`--strict` refuses them). Conversations have a WebSocket at `/v1/realtime`, which this document cannot
describe. A stream is server-sent events; one that breaks after its start ends with `data: {"error": …}`, without
`[DONE]`.\
"""

ERRORS = {
    400: "A parameter is wrong: `param` names it.",
    401: "No key, or one that is not accepted.",
    403: "The site or the tenant may not ask for this.",
    404: "There is no such model, or no such thing.",
    405: "The path takes another method.",
    408: "The head or the body of the request came too slowly.",
    413: "The body is too large.",
    421: "The `Host` is no name of this server (--allowed-hosts).",
    429: "Too many at a time, or a limit of the tenant is reached; `Retry-After` says when to come back.",
    431: "The head of the request is too large.",
    499: "It was cancelled.",
    503: "Nobody is there who could answer, or the server is stopping; the request may be repeated.",
    504: "It took longer than the server allows.",
}
_ANYWHERE = (408, 421, 431)
_DOOR, _WORK = (401, 403, 429), (400, 401, 403, 404, 405, 413, 429, 499, 503, 504)


@dataclass(frozen=True, kw_only=True)
class Route:
    """A documented route.

    `body` is a struct or the schema of a form; `answer` maps content types to structs (JSON) or
    schemas.
    """

    method: str
    path: str
    summary: str
    tag: str
    body: Any = None
    answer: dict[str, Any]
    status: int = 200
    errors: tuple[int, ...] = ()
    parameters: tuple[Schema, ...] = ()
    others: tuple[tuple[int, Any], ...] = ()  # answers of other statuses that are not errors
    public: bool = False


def routes() -> list[Route]:
    """Return the routes of the whole API, in the order of the document."""
    return [*_texts(), *_models(), *_sounds(), *_images(), *_watching()]


def _texts() -> list[Route]:
    chat: dict[str, Any] = {_JSON: answers.ChatCompletion, _EVENTS: _EVENT}
    plain: dict[str, Any] = {_JSON: answers.Completion, _EVENTS: _EVENT}
    vectors = {_JSON: answers.EmbeddingList}
    return [
        _post("/v1/chat/completions", "A reply to a conversation", "text", ChatBody, chat),
        _post("/v1/completions", "A text that goes on", "text", CompletionBody, plain),
        _post("/v1/embeddings", "Vectors of texts", "text", EmbeddingsBody, vectors),
    ]


def _models() -> list[Route]:
    named = {"name": "name", "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}
    return [
        _get("/v1/models", "What can answer now", "models", answers.ModelList),
        _get(
            "/v1/models/{name}",
            "One of them",
            "models",
            answers.Model,
            parameters=(named,),
            errors=(*_DOOR, 404),
        ),
    ]


def _sounds() -> list[Route]:
    speech: dict[str, Any] = {kind: _BYTES for kind in content_types()} | {_EVENTS: _EVENT}
    written = {_EVENTS: _EVENT, _PLAIN: _TEXT, _VTT: _TEXT}
    heard = (answers.Transcription, answers.VerboseTranscription)
    hear = transcription_form("transcribe")
    return [
        _post("/v1/audio/speech", "A text, spoken", "sound", SpeechBody, speech),
        _get("/v1/audio/voices", "Voices of the models that speak", "sound", answers.VoiceList),
        _post(
            "/v1/audio/transcriptions",
            "What is said, written down",
            "sound",
            hear,
            {_JSON: (*heard, answers.DiarizedTranscription), **written},
        ),
        _post(
            "/v1/audio/translations",
            "What is said, in English",
            "sound",
            transcription_form("translate"),
            {_JSON: heard, **written},
        ),
    ]


def _images() -> list[Route]:
    drawn: dict[str, Any] = {_JSON: answers.Images, _EVENTS: _EVENT}
    job = {_JSON: answers.ImageJob}
    pictures = {f"image/{kind}": _BYTES for kind in ("png", "jpeg", "webp")}
    named = {"name": "job", "in": "path", "required": True, "schema": _TEXT}
    kept = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    of_job = (*_DOOR, 404, 503)
    return [
        _post("/v1/images/generations", "Pictures of a prompt", "images", GenerationBody, drawn),
        _post("/v1/images/edits", "A picture, changed", "images", edit_form(), drawn),
        _post(
            "/v1/images/jobs",
            "Pictures, drawn when there is room",
            "images",
            JobBody,
            job,
            status=202,
        ),
        _get(
            "/v1/images/jobs/{job}",
            "Where a job stands",
            "images",
            job[_JSON],
            parameters=(named,),
            errors=of_job,
        ),
        Route(
            method="delete",
            path="/v1/images/jobs/{job}",
            summary="Draw it no more",
            tag="images",
            answer=job,
            parameters=(named,),
            errors=of_job,
        ),
        Route(
            method="get",
            path="/images/{name}",
            summary="A picture that has a URL",
            tag="images",
            answer=pictures,
            parameters=(kept,),
            errors=(404, 503),
            public=True,
        ),
    ]


def _watching() -> list[Route]:
    window = _query("window", 60.0, "Seconds back that count.")
    back = _query("window", 10.0, "Seconds back that are looked at.", most=LONGEST)
    good = (
        _query("first", 1.0, "Most seconds to the first token."),
        _query("between", 0.1, "Most between tokens."),
    )
    count = {"type": "integer", "minimum": 1, "maximum": MOST_REPLIES, "default": 20}
    last = (
        {"name": "count", "in": "query", "schema": count},
        {"name": "request", "in": "query", "schema": _TEXT},
    )
    looks, door = "operation", (400, 401, 403)
    return [
        _get("/health/live", "Whether it lives", looks, watching.Live, public=True, errors=()),
        *(
            _get(path, summary, looks, watching.Health, **_READY)
            for path, summary in (
                ("/health", "As /health/ready"),
                ("/health/ready", "Whether it can serve"),
            )
        ),
        _get("/version", "Motet's version", looks, watching.Version, public=True, errors=()),
        Route(
            method="get",
            path="/metrics",
            summary="For Prometheus",
            tag=looks,
            answer={_PLAIN: _TEXT},
            errors=door[1:],
        ),
        _get(
            "/metrics/stack",
            "Who is there",
            looks,
            watching.Stack,
            parameters=(window, *good),
            errors=door,
        ),
        _get(
            "/metrics/doctor",
            "What is short",
            looks,
            watching.Diagnosis,
            parameters=(back,),
            errors=door,
        ),
        _get(
            "/metrics/replies",
            "The last replies",
            looks,
            watching.Replies,
            parameters=last,
            errors=door,
        ),
        _get("/openapi.json", "This document", looks, {"type": "object"}, public=True, errors=()),
    ]


_UNREADY = ((503, watching.Health),)
_ONE_MODEL = {
    "name": "model",
    "in": "query",
    "schema": _TEXT,
    "description": "Ask for this model alone.",
}
_READY: Schema = {"parameters": (_ONE_MODEL,), "public": True, "errors": (404,), "others": _UNREADY}


def _get(path: str, summary: str, tag: str, answer: Any, **options: Any) -> Route:
    return Route(
        method="get",
        path=path,
        summary=summary,
        tag=tag,
        answer={_JSON: answer},
        **{"errors": _DOOR, **options},
    )


def _post(
    path: str, summary: str, tag: str, body: Any, answer: dict[str, Any], **options: Any
) -> Route:
    return Route(
        method="post",
        path=path,
        summary=summary,
        tag=tag,
        body=body,
        answer=answer,
        errors=_WORK,
        **options,
    )


def _query(name: str, default: float, description: str, most: float = 3600) -> Schema:
    kind = {"type": "number", "exclusiveMinimum": 0, "maximum": most, "default": default}
    return {"name": name, "in": "query", "description": description, "schema": kind}


# -------------------------------------------------------------------------------------------------------- the document
@cache
def document() -> Schema:
    """Return the OpenAPI 3.1 document."""
    made, structs = routes(), _Structs()
    paths: Schema = {}
    for route in made:
        paths.setdefault(route.path, {})[route.method] = structs.operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Motet", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": structs.components(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


class _Structs:
    """Collect the schemas of the structs that a document refers to."""

    def __init__(self) -> None:
        self._found: list[Any] = []

    def operation(self, route: Route) -> Schema:
        made: Schema = {"summary": route.summary, "tags": [route.tag], "operationId": _name(route)}
        if route.parameters:
            made["parameters"] = list(route.parameters)
        if route.body is not None:
            kind = _FORM if isinstance(route.body, dict) else _JSON
            made["requestBody"] = {
                "required": True,
                "content": {kind: {"schema": self._schema(route.body)}},
            }
        made["responses"] = self._responses(route)
        made["security"] = (
            [] if route.public else [{}, {"key": []}]
        )  # a server on loopback may require no key
        return made

    def _responses(self, route: Route) -> Schema:
        content = {kind: {"schema": self._schema(shape)} for kind, shape in route.answer.items()}
        found: Schema = {str(route.status): {"description": route.summary, "content": content}}
        for status, shape in route.others:
            found[str(status)] = self._json("Not now.", shape)
        for status in sorted({*route.errors, *_ANYWHERE}):
            found[str(status)] = self._json(ERRORS[status], answers.ErrorBody)
        return found

    def _json(self, description: str, shape: Any) -> Schema:
        return {"description": description, "content": {_JSON: {"schema": self._schema(shape)}}}

    def _schema(self, shape: Any) -> Schema:
        """Return a reference to a struct, `anyOf` for a tuple, or a given schema unchanged."""
        if isinstance(shape, dict):
            return shape
        if isinstance(shape, tuple):
            return {"anyOf": [self._schema(one) for one in shape]}
        self._found.append(shape)
        (schema,), _ = msgspec.json.schema_components([shape], ref_template=_REF)
        return schema

    def components(self) -> Schema:
        _, components = msgspec.json.schema_components(self._found, ref_template=_REF)
        for schema in components.values():
            _narrow(schema)
        return dict(components)


def _narrow(schema: Schema) -> None:
    """Restrict parameters of NO_EFFECT to the values at which they are accepted."""
    for name, field in schema.get("properties", {}).items():
        if field == {"default": None} and name in NO_EFFECT:
            field["enum"] = [None, *NO_EFFECT[name]]


def _name(route: Route) -> str:
    words = [
        word
        for word in route.path.replace("{", "").replace("}", "").split("/")
        if word not in ("", "v1")
    ]
    return "_".join([route.method, *(word.replace(".", "_") for word in words)])


def openapi_router() -> Router:
    router = Router()

    @router.get("/openapi.json", Access.PUBLIC)
    async def openapi() -> Response:
        return Response(msgspec.json.encode(document()), media_type=_JSON)

    return router
