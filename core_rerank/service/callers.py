"""What a caller says of their request, and whether they are still there."""

from __future__ import annotations

import math

from starlette.requests import HTTPConnection
from starlette.types import Receive

from .errors import Invalid
from .settings import ServiceSettings


def timeout_s(request: HTTPConnection, settings: ServiceSettings) -> float:
    """The service's limit, or less where the header ``X-Request-Timeout`` says so."""
    given = request.headers.get("x-request-timeout")
    if given is None:
        return settings.timeout_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise Invalid(
            "X-Request-Timeout must be a number of seconds above 0.", field="X-Request-Timeout"
        )
    return min(seconds, settings.timeout_s)


async def gone(receive: Receive) -> None:
    """Done when the caller closes the connection; for after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
