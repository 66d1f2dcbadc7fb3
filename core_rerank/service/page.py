"""``/ui``: a page to try the service with, from files of this package alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Response

_FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/style.css": ("style.css", "text/css; charset=utf-8"),
    "/ui/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/ui/parts.js": ("parts.js", "text/javascript; charset=utf-8"),
}
PATHS = frozenset(_FILES)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_router() -> APIRouter:
    """Endpoints for the page's files, which hold no data and need no key."""
    router = APIRouter(include_in_schema=False)
    folder = files("core_rerank.service") / "static"
    for path, (name, media_type) in _FILES.items():
        content = (folder / name).read_bytes()
        router.add_api_route(path, _sender(content, media_type), methods=["GET"])
    return router


def _sender(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return send
