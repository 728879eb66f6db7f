"""POST /v1/images/jobs, GET and DELETE /v1/images/jobs/{id}, and GET /images/{name}, where pictures with a URL are."""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta

from motet_shared.errors import Unavailable
from motet_shared.tenants import DEFAULT

from .asgi import Exchange, Scope, header
from .decoding import Decoder
from .image_jobs import ImageJobs, JobNote, public_id
from .images_schema import GenerationBody
from .problems import NotFound
from .service import Service
from .tenants import Tenant

_ID = "[A-Za-z0-9_-]{1,64}"
_NO_STORE = "pictures and jobs are not kept here; the server needs JetStream (motet up --store FOLDER)"


class JobBody(GenerationBody, kw_only=True):
    """A generation; `id` names it, so that it is drawn once however often it is sent."""

    id: Annotated[str, Meta(pattern=f"^{_ID}$")] | None = None


_decoder = Decoder(JobBody)


def picture_url(scope: Scope, name: str) -> str:
    """Where a kept picture is, as the asking client sees this server."""
    host = header(scope, b"host").decode("latin-1") or "127.0.0.1"
    return f"{scope.get('scheme', 'http')}://{host}/images/{name}"


def jobs_of(service: Service) -> ImageJobs:
    """Unavailable where nothing is kept."""
    if service.jobs is None:
        raise Unavailable(_NO_STORE)
    return service.jobs


async def submit(service: Service, http: Exchange) -> None:
    """Take a job in: 202, and where it stands."""
    jobs = jobs_of(service)
    service.check_open()
    given = _decoder.decode(await http.body(service.config.max_body))
    fields = msgspec.structs.asdict(given)
    job = _owned(fields.pop("id") or "job-" + secrets.token_hex(12), http.tenant)
    count = given.n or 1
    with http.tenant.take(images=0 if await jobs.has(job) else count) as ticket:  # it is paid for once
        note, fresh = await jobs.submit(job, GenerationBody(**fields))
        ticket.images.use(count if fresh else 0)
    await http.reply(202, msgspec.json.encode(_shape(note, None, http.scope)))


def jobs_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/images/jobs/{job}")
    async def job_status(job: str, request: Request) -> dict[str, Any]:
        note, position = await jobs_of(service).status(_owned(job, request.state.tenant))
        return _shape(note, position, request.scope)

    @router.delete("/v1/images/jobs/{job}")
    async def cancel_job(job: str, request: Request) -> dict[str, Any]:
        return _shape(await jobs_of(service).cancel(_owned(job, request.state.tenant)), None, request.scope)

    @router.get("/images/{name}")
    async def kept_picture(name: str) -> Response:
        """Without a key: the name is one."""
        if service.keep is None:
            raise Unavailable(_NO_STORE)
        kind = name.rpartition(".")[2]
        data = await service.keep.picture(name)
        headers = {"cache-control": "private, immutable", "x-content-type-options": "nosniff"}
        return Response(data, media_type=f"image/{kind}", headers=headers)

    return router


def _owned(job: str, tenant: Tenant) -> str:
    """The id under which a job is kept: that of one tenant is none of another's. NotFound for what can be no id."""
    if not re.fullmatch(_ID, job):
        raise NotFound(f"job {job[:60]!r} is not here; an id has letters, digits, _ and -")
    return job if tenant.rights.name in ("", DEFAULT) else f"of.{tenant.rights.name}.{job}"


def _shape(note: JobNote, position: int | None, scope: Scope) -> dict[str, Any]:
    return {
        "id": public_id(note.id),
        "object": "image.job",
        "created_at": note.created,
        "status": note.status,
        "position": position,
        "step": note.step,
        "steps": note.steps,
        "data": [{"url": picture_url(scope, name)} for name in note.pictures] if note.status == "done" else [],
        "error": note.error,
    }
