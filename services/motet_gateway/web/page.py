"""Serve the web page: one public route for each of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from motet_gateway.http.route import Access, Route, Serving

_FOLDER = Path(__file__).parent / "static"
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "media-src": "blob:",
    "connect-src": "'self'",
    "worker-src": "'self'",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    # Text becomes markup in DOMPurify only.
    "require-trusted-types-for": "'script'",
    "trusted-types": "dompurify",
}
_HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class _Files(StaticFiles):
    """Serve static files with headers that forbid every request to other hosts."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def page_routes() -> list[Route]:
    """Return the routes of the page's files. They are public: the page asks its user for a key."""
    files = _Files(directory=_FOLDER, html=True)
    names = [
        str(path.relative_to(_FOLDER)) for path in sorted(_FOLDER.rglob("*")) if path.is_file()
    ]
    return [Route("GET", f"/{name}", Access.PUBLIC, files, Serving.FILE) for name in ("", *names)]
