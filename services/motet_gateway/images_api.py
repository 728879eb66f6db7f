"""POST /v1/images/generations and POST /v1/images/edits: prompts, and pictures to be changed, into pictures."""

from __future__ import annotations

import asyncio
import base64
import time
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from motet_pipelines.draw import ROLE, Drawn, draw
from motet_shared.errors import MotetError
from motet_shared.messages import Draw, Stroke

from .aliases import model_of
from .asgi import Exchange
from .decoding import Decoder
from .images_schema import FILES, GenerationBody, ImageBody, check, edit_body, requests
from .jobs_api import picture_url
from .multipart import read_form
from .problems import Problem
from .render import error_event
from .service import Service
from .tenants import Ticket
from .usage import PictureMeter

_generation = Decoder(GenerationBody)
Action = Literal["image_generation", "image_edit"]


async def generations(service: Service, http: Exchange) -> None:
    """A prompt into pictures."""
    body = _generation.decode(await http.body(service.config.max_body))
    await _answer(_Pictures(service, http, body, "image_generation"))


async def edits(service: Service, http: Exchange) -> None:
    """A picture, and where it may be changed, into others."""
    body, image, mask = edit_body(await read_form(http, service.config.max_upload, FILES))
    await _answer(_Pictures(service, http, body, "image_edit", image, mask))


async def _answer(pictures: _Pictures) -> None:
    count = len(pictures.requests)
    with pictures.http.tenant.take(count, images=count) as ticket:
        await (pictures.stream(ticket) if pictures.body.stream else pictures.collect(ticket))


class _Pictures:
    """The pictures of one call, each a stream of its own. Raises for what cannot be drawn."""

    def __init__(
        self,
        service: Service,
        http: Exchange,
        body: ImageBody,
        action: Action,
        image: bytes | None = None,
        mask: bytes | None = None,
    ):
        check(body, kept=service.keep is not None)
        service.check_open()
        self.service, self.http, self.body = service, http, body
        self._action, self._files = action, {"image": image, "mask": mask}
        model = model_of(service.bus.directory, ROLE, body.model)
        self.requests = requests(body, model, http.request_id)
        self._created = int(time.time())
        self._previews = 0

    async def collect(self, ticket: Ticket) -> None:
        """One JSON body with all of them."""
        async with self.http.while_connected():
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._drawn(request, ticket)) for request in self.requests]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            drawn = [task.result() for task in tasks]
            data = [await self._told(one) for one in drawn]
            answer = {"created": self._created, "data": data, **self._shape(drawn[0])}
            await self.http.reply(200, msgspec.json.encode(answer))

    async def _told(self, drawn: Drawn) -> dict[str, str]:
        """A picture in the answer: itself, or where it is for a while."""
        keep = self.service.keep
        if self.body.response_format == "url" and keep is not None:
            return {"url": picture_url(self.http.scope, await keep.put_picture(drawn.data, self.requests[0].format))}
        return {"b64_json": _base64(drawn.data)}

    async def stream(self, ticket: Ticket) -> None:
        """Server-sent events: estimates while it forms, and the picture."""
        try:
            async with self.http.while_connected():
                drawn = await self._drawn(self.requests[0], ticket, told=True)
                picture = {"b64_json": _base64(drawn.data), "created_at": self._created, **self._shape(drawn)}
                await self.http.finish(self._event("completed", picture))
        except MotetError as error:
            if not self.http.started:
                raise
            await self.http.finish(error_event(Problem.of(error)))

    async def _drawn(self, request: Draw, ticket: Ticket, *, told: bool = False) -> Drawn:
        drawn, config = Drawn(), self.service.config
        strokes = draw(
            self.service.bus,
            await self.service.uploads(),
            request,
            drawn,
            **self._files,
            deadline=config.request_timeout,
            patience=config.patience,
        )
        with PictureMeter(ticket.images) as meter:
            async with aclosing(strokes):
                async for stroke in strokes:
                    meter.stroke()
                    if told:
                        await self._tell(stroke)
        return drawn

    async def _tell(self, stroke: Stroke) -> None:
        if stroke.preview:
            partial = {
                "b64_json": _base64(stroke.preview),
                "created_at": int(time.time()),
                "partial_image_index": self._previews,
                **self._shape(),
            }
            self._previews += 1
            await self.http.write(self._event("partial_image", partial))
        if self.body.progress:
            await self.http.write(self._event("progress", {"step": stroke.step, "steps": stroke.steps}))

    def _shape(self, drawn: Drawn | None = None) -> dict[str, Any]:
        """What a picture is like, as OpenAI's answers tell it."""
        size = self.body.size or "auto" if drawn is None else f"{drawn.width}x{drawn.height}"
        kind = self.requests[0].format
        return {"background": "opaque", "output_format": kind, "quality": self.body.quality or "auto", "size": size}

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        kind = f"{self._action}.{name}"
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
