"""Serve image jobs and stored images.

POST /v1/images/jobs, GET and DELETE /v1/images/jobs/{id}, and GET /images/{name}.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from msgspec import Meta

from motet_gateway.context import CallingTenant, GatewayContext, Service
from motet_gateway.http.asgi import Scope
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.hosts import checked_host
from motet_gateway.http.json_size import check_json
from motet_gateway.http.problems import NotFound
from motet_gateway.tenancy.tenant import Tenant
from motet_shared.errors import Unavailable

from .jobs import ImageJobs, JobRecord, public_id
from .schema import GenerationBody

_ID = "[A-Za-z0-9_-]{1,64}"
_MOST_BODY = 256 << 10  # bytes: it is a part of the record
_NO_STORE = (
    "images and jobs are not stored here; the server needs JetStream (motet up --store FOLDER)"
)


class JobBody(GenerationBody, kw_only=True):
    """An image generation with an optional `id`.

    A job is run once, however often it is submitted with the same id.
    """

    id: Annotated[str, Meta(pattern=f"^{_ID}$")] | None = None


_decoder = Decoder(JobBody)


def image_url_of(scope: Scope, name: str) -> str:
    """Return the URL of a stored image, with the host that the client used."""
    return f"{scope.get('scheme', 'http')}://{checked_host(scope)}/images/{name}"


def jobs_of(service: GatewayContext) -> ImageJobs:
    """Return the gateway's jobs; raises Unavailable without a store."""
    if service.jobs is None:
        raise Unavailable(_NO_STORE)
    return service.jobs


async def submit(service: GatewayContext, http: Exchange) -> None:
    """Accept a job; answers 202 with its state."""
    jobs = jobs_of(service)
    service.check_open()
    data = await http.body(min(_MOST_BODY, service.config.max_body))
    check_json(data, http.tenant, "prompt")
    given = _decoder.decode(data, http.hints("images"))
    fields = msgspec.structs.asdict(given)
    job = _owned(fields.pop("id") or "job-" + secrets.token_hex(12), http.tenant)
    count = given.n or 1
    with await http.tenant.take(
        images=0 if await jobs.has(job) else count
    ) as ticket:  # a job is charged once
        record, is_new = await jobs.submit(job, GenerationBody(**fields))
        ticket.images.use(count if is_new else 0)
    await http.reply(202, msgspec.json.encode(_as_dict(record, None, http.scope)))


async def job_status(
    service: Service, tenant: CallingTenant, job: str, request: Request
) -> dict[str, Any]:
    record, position = await jobs_of(service).status(_owned(job, tenant))
    return _as_dict(record, position, request.scope)


async def cancel_job(
    service: Service, tenant: CallingTenant, job: str, request: Request
) -> dict[str, Any]:
    return _as_dict(await jobs_of(service).cancel(_owned(job, tenant)), None, request.scope)


async def stored_image(service: Service, name: str) -> Response:
    """Return an image without authentication: its name is unguessable."""
    if service.store is None:
        raise Unavailable(_NO_STORE)
    kind = name.rpartition(".")[2]
    data = await service.store.image(name)
    headers = {"cache-control": "private, immutable", "x-content-type-options": "nosniff"}
    return Response(data, media_type=f"image/{kind}", headers=headers)


def _owned(job: str, tenant: Tenant) -> str:
    """Return the id under which a tenant's job is stored, which is distinct for each tenant.

    Raises NotFound for a malformed id.
    """
    if not re.fullmatch(_ID, job):
        raise NotFound(f"job {job[:60]!r} does not exist; an id has letters, digits, _ and -")
    return f"of.{tenant.owner}.{job}" if tenant.owner else job


def _as_dict(record: JobRecord, position: int | None, scope: Scope) -> dict[str, Any]:
    return {
        "id": public_id(record.id),
        "object": "image.job",
        "created_at": record.created,
        "status": record.status,
        "position": position,
        "step": record.step,
        "steps": record.steps,
        "data": [{"url": image_url_of(scope, name)} for name in record.pictures]
        if record.status == "done"
        else [],
        "error": record.error,
    }
