"""Guard every route: authenticate the caller, check its access, run the handler, render errors.

This is the one path of authentication and of errors, whatever serves the route. Only requests that
have no route are refused elsewhere (`app.py`).
"""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter
from typing import Any

from fastapi.exceptions import RequestValidationError

from motet_gateway.context import GatewayContext
from motet_gateway.idempotency import run as idempotency
from motet_gateway.tenancy.auth import client_secret
from motet_gateway.tenancy.client_secrets import SECRET
from motet_gateway.tenancy.tenant import Tenant
from motet_shared.errors import BadRequest, WorkerLost
from motet_shared.process import telemetry
from motet_shared.wire import sites

from .asgi import App, ClientGone, Headers, Receive, Scope, Send, header
from .exchange import Exchange
from .problems import Problem, RateLimited, Unauthorized
from .route import Access, Route, Serving
from .socket import Socket

log = logging.getLogger(__name__)


class Guard:
    """Serve one route as an ASGI application.

    `app` answers in the handler's place: FastAPI's wrapping of an endpoint.
    """

    def __init__(self, service: GatewayContext, route: Route, app: App | None = None):
        self._service, self._route = service, route
        self._app: App | None = route.handler if route.serving is Serving.FILE else app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_socket = self._route.serving is Serving.SOCKET
        call = Socket(scope, receive, send) if is_socket else self._exchange(scope, receive, send)
        began = perf_counter()
        token = telemetry.request_id.set(call.request_id)
        try:
            await self._answer(call, receive)
        except ClientGone:
            if isinstance(call, Exchange):
                call.status = 499
        finally:
            if isinstance(call, Exchange) and self._route.serving is Serving.STREAM:
                self._report(call, perf_counter() - began)
            telemetry.request_id.reset(token)

    def _exchange(self, scope: Scope, receive: Receive, send: Send) -> Exchange:
        http = Exchange(scope, receive, send)
        http.strict = self._service.config.strict
        http.error_format = self._route.error_format_of(http.scope)
        http.headers = lambda: self._headers(http)
        return http

    def _headers(self, http: Exchange) -> Headers:
        """Return the headers of every response: remaining limits of the tenant, and CORS."""
        limits = http.caller.tenant.headers() if http.caller is not None else ()
        return [*limits, *self._service.authenticator.origins.headers(http.scope)]

    async def _answer(self, call: Exchange | Socket, receive: Receive) -> None:
        """Answer one request. Raises ClientGone if the client leaves first."""
        try:
            if isinstance(call, Socket):
                await call.open()
                self._adopt(call)
            await self._admit(call)
            if self._route.once and isinstance(call, Exchange) and call.is_repeated:
                raise WorkerLost(
                    "the gateway that had this request ended; whether it was carried out is not known"
                )
            with sites.only(call.caller.tenant.rights.sites if call.caller is not None else ()):
                await self._run(call, receive)
        except ClientGone:
            raise
        except Exception as error:
            if isinstance(call, Socket) and call.served:
                raise  # the connection breaks, and its client may come back to its session
            problem = Problem.of(_known(error))
            problem.note(self._route.path)
            if not (isinstance(call, Exchange) and call.started):
                await _delay(error, call.caller.tenant if call.caller is not None else None)
            await call.fail(problem)

    def _adopt(self, socket: Socket) -> None:
        """Know the client secret whose session an earlier gateway has served."""
        value = client_secret(socket.scope) if socket.is_adopted else None
        stored = socket.memo(SECRET) if value is not None else None
        if value is not None and stored is not None:
            self._service.client_secrets.adopt(value, stored)

    async def _admit(self, call: Exchange | Socket) -> None:
        """Set the caller of a request; raises MotetError if it may not call this route now."""
        if self._route.access is Access.PUBLIC:
            return
        door = self._service.authenticator
        if self._route.client_secrets:
            try:
                call.caller = await door.authenticate_any(call.scope, self._service.client_secrets)
            except Unauthorized:
                # The gateway with its session knows a secret for longer.
                if isinstance(call, Socket) and client_secret(call.scope) and _resumes(call.scope):
                    call.pass_on()
                raise
        else:
            call.caller = door.authenticate(call.scope)
        self._service.tenant_sites.check(call.caller.tenant)
        if self._route.access is Access.TENANT:
            await call.caller.tenant.prepare()
        if not (isinstance(call, Socket) and call.is_adopted):  # else it was counted before
            door.authorize(call.caller.tenant, self._route.access)

    async def _run(self, call: Exchange | Socket, receive: Receive) -> None:
        if self._app is not None and isinstance(call, Exchange):
            if call.caller is not None:
                call.scope.setdefault("state", {})["tenant"] = call.caller.tenant
            await self._app(call.scope, receive, call.send)
        elif isinstance(call, Socket):
            await self._route.handler(self._service, call)
        else:
            with telemetry.span("gateway" + self._route.path, parent=_trace(call.scope)):
                if self._route.repeatable:
                    await idempotency.run(self._service, call, self._route.handler)
                else:
                    await self._route.handler(self._service, call)

    def _report(self, http: Exchange, seconds: float) -> None:
        """Count and log one finished request."""
        path = self._route.path
        self._service.metrics.request(path, http.status)
        if names := http.ignored:
            log.info("%s ignores %s", path, names, extra={"ignored": names})
        extra = {"status": http.status, "seconds": round(seconds, 4)}
        log.info("%s %d", path, http.status, extra=extra)


def _resumes(scope: Scope) -> bool:
    """Return True if a connection asks for the session of an earlier one."""
    return b"session_id=" in scope["query_string"]


def _trace(scope: Scope) -> Any:
    """Return the client's trace context, or None if the request carries none."""
    parent = header(scope, b"traceparent")
    return telemetry.extract({"traceparent": parent.decode("latin-1")}) if parent else None


def _known(error: Exception) -> Exception:
    """Return the error of a parameter that FastAPI refuses as BadRequest, any other unchanged."""
    if not isinstance(error, RequestValidationError):
        return error
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    reason = f"{first['msg'][:1].lower()}{first['msg'][1:]}, not {first['input']!r}"
    return BadRequest(f"`{name}`: {reason}", param=name)


async def _delay(error: Exception, tenant: Tenant | None) -> None:
    """Delay the refusal of a rate-limited tenant that retries too often."""
    if tenant is not None and isinstance(error, RateLimited):
        await asyncio.sleep(tenant.refusal_delay())
