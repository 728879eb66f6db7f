"""Serve POST /v1/images/generations and POST /v1/images/edits."""

from __future__ import annotations

import asyncio
import base64
import time
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.json_size import check_json
from motet_gateway.http.multipart import read_form
from motet_gateway.http.problems import Problem
from motet_gateway.openai.aliases import model_of
from motet_gateway.openai.render import error_event
from motet_gateway.tenancy.tenant import Ticket
from motet_gateway.tenancy.usage import PictureMeter
from motet_pipelines.images.draw import ROLE, Drawn, draw
from motet_shared.errors import MotetError
from motet_shared.messages import DenoisingProgress, Draw

from .jobs_endpoints import picture_url
from .schema import FILES, GenerationBody, ImageBody, check, edit_body, requests

_generation = Decoder(GenerationBody)
Action = Literal["image_generation", "image_edit"]


async def generations(service: GatewayContext, http: Exchange) -> None:
    """Generate images from a prompt."""
    data = await http.body(service.config.max_body)
    check_json(data, http.tenant, "prompt")
    body = _generation.decode(data, http.hints("images"))
    await _answer(_Pictures(service, http, body, "image_generation"))


async def edits(service: GatewayContext, http: Exchange) -> None:
    """Generate images from an image, a prompt and an optional mask of the editable area."""
    form = await read_form(http, service.config.max_upload, FILES, "images")
    body, image, mask = edit_body(form)
    await _answer(_Pictures(service, http, body, "image_edit", image, mask))


async def _answer(pictures: _Pictures) -> None:
    count = len(pictures.requests)
    with pictures.http.tenant.take(count, images=count) as ticket:
        await (pictures.stream(ticket) if pictures.body.stream else pictures.collect(ticket))


class _Pictures:
    """Generate the images of one call, each as a stream of its own.

    Raises BadRequest or a subclass for an invalid request, Draining while stopping, and the errors
    of `model_of`.
    """

    def __init__(
        self,
        service: GatewayContext,
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
        """Send all images in one JSON body."""
        if self.body.response_format == "url" and (keep := self.service.keep) is not None:
            await keep.check_room(
                self.http.tenant.owner, 1, "response_format"
            )  # before any image is generated
        async with self.http.while_connected():
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._drawn(request, ticket)) for request in self.requests
                    ]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            drawn = [task.result() for task in tasks]
            data = [await self._told(one) for one in drawn]
            answer = {"created": self._created, "data": data, **self._shape(drawn[0])}
            await self.http.reply(200, msgspec.json.encode(answer))

    async def _told(self, drawn: Drawn) -> dict[str, str]:
        """Return an image's entry of the answer: its data, or a URL that expires."""
        keep = self.service.keep
        if self.body.response_format == "url" and keep is not None:
            name = await keep.put_picture(
                drawn.data, self.requests[0].format, self.http.tenant.owner
            )
            return {"url": picture_url(self.http.scope, name)}
        return {"b64_json": _base64(drawn.data)}

    async def stream(self, ticket: Ticket) -> None:
        """Send server-sent events: previews and progress, then the image."""
        try:
            async with self.http.while_connected():
                drawn = await self._drawn(self.requests[0], ticket, told=True)
                picture = {
                    "b64_json": _base64(drawn.data),
                    "created_at": self._created,
                    **self._shape(drawn),
                }
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

    async def _tell(self, stroke: DenoisingProgress) -> None:
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
            await self.http.write(
                self._event("progress", {"step": stroke.step, "steps": stroke.steps})
            )

    def _shape(self, drawn: Drawn | None = None) -> dict[str, Any]:
        """Return the image properties of OpenAI's answers."""
        size = self.body.size or "auto" if drawn is None else f"{drawn.width}x{drawn.height}"
        kind = self.requests[0].format
        return {
            "background": "opaque",
            "output_format": kind,
            "quality": self.body.quality or "auto",
            "size": size,
        }

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        kind = f"{self._action}.{name}"
        return b"event: %s\ndata: %s\n\n" % (
            kind.encode(),
            msgspec.json.encode({"type": kind, **fields}),
        )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
