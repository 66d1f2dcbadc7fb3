"""Turns whatever a request fails with into an answer: never a page, never a stack trace."""

from __future__ import annotations

import logging
import re
import traceback
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from .errors import BadRequest, Invalid, NotJSON, ServiceError
from .responses import OpenAIProblem, Problem

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

log = logging.getLogger("core_rerank.service")

OPENAI_PATHS = {"/v1/chat/completions", "/v1/completions", "/v1/models"}
"""Their clients read errors in a form of their own."""


class Refused(HTTPException):
    """A refusal while the body is read: FastAPI lets no other exception through there."""

    def __init__(self, error: ServiceError) -> None:
        super().__init__(error.status, error.message)
        self.error = error


def answer(error: ServiceError, request_id: str, path: str) -> JSONResponse:
    """The answer to a request of ``path`` that failed with ``error``."""
    message = error.message
    if path in OPENAI_PATHS:
        told = OpenAIProblem.Told(
            message=message, type=error.error_type, param=error.field, code=error.status
        )
        body = OpenAIProblem(id=request_id, error=told)
    else:
        body = Problem(
            id=request_id,
            message=message,
            detail=message,
            error=message,
            error_type=error.error_type,
            field=error.field,
        )
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body.model_dump(exclude_none=True), error.status, headers)


def install(app: FastAPI) -> None:
    """Handle the errors of ``app``'s routes that are foreseen; `Gate` has the others."""

    def service_error(request: Request, error: Any) -> JSONResponse:
        return answer(error, request.state.request_id, request.url.path)

    def invalid(request: Request, error: Any) -> JSONResponse:
        told = _validation(error) if _says_json(request) else _not_json(request)
        return answer(told, request.state.request_id, request.url.path)

    def http_error(request: Request, error: Any) -> JSONResponse:
        if isinstance(error, Refused):
            return answer(error.error, request.state.request_id, request.url.path)
        told = ServiceError(str(error.detail))
        told.status = error.status_code
        told.error_type = "Validation"
        response = answer(told, request.state.request_id, request.url.path)
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(ServiceError, service_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)


def log_failure(request_id: str, error: BaseException) -> None:
    """Where it failed and with what, without the message: that may quote a document."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("request %s failed with %s\n%s", request_id, type(error).__name__, frames)


def _says_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return re.fullmatch(r"application/(.+\+)?json", kind) is not None


def _not_json(request: Request) -> ServiceError:
    given = request.headers.get("content-type")
    told = "no Content-Type" if given is None else f"Content-Type {given[:100]!r}"
    return NotJSON(
        f"the request has {told}: send Content-Type: application/json.", field="Content-Type"
    )


def _validation(error: RequestValidationError) -> ServiceError:
    """The first thing that is wrong, with the field's name as JSON has it.

    Of a field that may be a string or a list, the error deepest inside is the one to tell.
    """
    first = max(error.errors(), key=lambda found: len(found["loc"]))
    if first["type"] == "json_invalid":
        return BadRequest("the body is not JSON.", field="body")
    place = _place(first["loc"])
    if first["type"] == "missing":
        return Invalid(f"{place} is missing.", field=place)
    told = str(first["msg"])
    ours = told.removeprefix("Value error, ")  # those go on where the field's name ends
    return Invalid(f"{place}: {told}." if told == ours else f"{place} {ours}.", field=place)


def _place(parts: tuple[Any, ...]) -> str:
    """``("body", "documents", 3)`` as ``documents[3]``.

    Pydantic names the branches of a union too: before the field where the body is one, else after.
    """
    inside = list(parts[1:])
    if len(inside) > 1 and inside[0] in ("texts", "documents") and isinstance(inside[1], str):
        del inside[0]
    name = str(inside[0]) if inside else "body"
    return name + "".join(f"[{part}]" for part in inside[1:] if isinstance(part, int))
