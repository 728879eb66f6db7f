"""Serve POST /v1/images/generations and POST /v1/images/edits."""

from __future__ import annotations

import asyncio
import base64
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.json_size import check_json
from motet_gateway.http.multipart import read_form
from motet_gateway.http.problems import Problem
from motet_gateway.kept import draws
from motet_gateway.openai.aliases import model_of
from motet_gateway.openai.render import error_event
from motet_gateway.tenancy.tenant import Ticket
from motet_gateway.tenancy.usage import ImageMeter
from motet_pipelines.images.draw import ROLE, Drawn, draw
from motet_shared.errors import MotetError
from motet_shared.messages import DenoisingProgress, Draw

from .conditions import image_files
from .jobs_endpoints import image_url_of
from .schema import FILES, GenerationBody, ImageBody, check, edit_body, requests

_generation = Decoder(GenerationBody)
Action = Literal["image_generation", "image_edit"]


async def generations(service: GatewayContext, http: Exchange) -> None:
    """Generate images from a prompt."""
    data = await http.body(service.config.max_body)
    check_json(data, http.tenant, "prompt")
    body = _generation.decode(data, http.hints("images"))
    await _answer(_ImageCall(service, http, body, "image_generation"))


async def edits(service: GatewayContext, http: Exchange) -> None:
    """Generate images from an image, a prompt and an optional mask of the editable area."""
    form = await read_form(http, service.config.max_upload, FILES, "images")
    body, image, mask = edit_body(form)
    await _answer(_ImageCall(service, http, body, "image_edit", image, mask))


async def _answer(pictures: _ImageCall) -> None:
    count = len(pictures.requests)
    with await pictures.http.tenant.take(count, images=count) as ticket:
        await (pictures.stream(ticket) if pictures.body.stream else pictures.collect(ticket))


class _ImageCall:
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
        check(body, kept=service.store is not None)
        service.check_open()
        self.service, self.http, self.body = service, http, body
        self._action = action
        most = service.config.max_image
        self._files: dict[str, Any] = {
            "image": image,
            "mask": mask,
            "controls": image_files("controlnets", body.controlnets, most),
            "prompts": image_files("ip_adapters", body.ip_adapters, most),
        }
        model = model_of(service.bus.directory, ROLE, body.model)
        self.requests = requests(body, model, http.request_id)
        self._created = draws.now()
        self._previews = 0

    async def collect(self, ticket: Ticket) -> None:
        """Send all images in one JSON body."""
        if self.body.response_format == "url" and (store := self.service.store) is not None:
            await store.stored.check(
                self.http.tenant.owner, 1, "response_format"
            )  # before any image is generated
        async with self.http.while_connected():
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._generate(request, ticket))
                        for request in self.requests
                    ]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            drawn = [task.result() for task in tasks]
            data = [await self._entry(one) for one in drawn]
            answer = {"created": self._created, "data": data, **self._as_dict(drawn[0])}
            await self.http.reply(200, msgspec.json.encode(answer))

    async def _entry(self, drawn: Drawn) -> dict[str, str]:
        """Return an image's entry of the answer: its data, or a URL that expires."""
        store = self.service.store
        if self.body.response_format == "url" and store is not None:
            name = await store.put_image(
                drawn.data, self.requests[0].format, self.http.tenant.owner
            )
            return {"url": image_url_of(self.http.scope, name)}
        return {"b64_json": _base64(drawn.data)}

    async def stream(self, ticket: Ticket) -> None:
        """Send server-sent events: previews and progress, then the image."""
        try:
            async with self.http.while_connected():
                drawn = await self._generate(self.requests[0], ticket, progress=True)
                picture = {
                    "b64_json": _base64(drawn.data),
                    "created_at": self._created,
                    **self._as_dict(drawn),
                }
                await self.http.finish(self._event("completed", picture))
        except MotetError as error:
            if not self.http.started:
                raise
            await self.http.finish(error_event(Problem.of(error)))

    async def _generate(self, request: Draw, ticket: Ticket, *, progress: bool = False) -> Drawn:
        drawn, config = Drawn(), self.service.config
        steps = draw(
            self.service.bus,
            await self.service.uploads(),
            request,
            drawn,
            **self._files,
            deadline=config.request_timeout,
            patience=config.patience,
        )
        with ImageMeter(ticket.images) as meter:
            async with aclosing(steps):
                async for step in steps:
                    meter.begin()
                    if progress:
                        await self._send_progress(step)
        return drawn

    async def _send_progress(self, step: DenoisingProgress) -> None:
        if step.preview:
            partial = {
                "b64_json": _base64(step.preview),
                "created_at": self._created,
                "partial_image_index": self._previews,
                **self._as_dict(),
            }
            self._previews += 1
            await self.http.write(self._event("partial_image", partial))
        if self.body.progress:
            await self.http.write(self._event("progress", {"step": step.step, "steps": step.steps}))

    def _as_dict(self, drawn: Drawn | None = None) -> dict[str, Any]:
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
