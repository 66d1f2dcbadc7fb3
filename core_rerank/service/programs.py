"""``/v1/programs``: interventions loaded on the running engine by who has the admin token."""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import hmac
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Body, Depends, Request, Response

from hook_runtime.errors import (
    ClosedError,
    EngineDeadError,
    ProbeError,
    UnsupportedVLLMError,
)

from .errors import BadRequest, Invalid, NoKey, TooLarge, Unavailable, UnknownProgram
from .settings import ServiceSettings

if TYPE_CHECKING:
    from hook_runtime.bridged import BridgedHookLLM

MAX_PROGRAMS = 64
HEADER = "X-Admin-Token"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
Config = Annotated[dict[str, Any], Body()]


def programs_router(backend: BridgedHookLLM, settings: ServiceSettings) -> APIRouter:
    """Routes that list, load, replace and unload programs; each asks for the admin token."""
    tokens = [token.encode() for token in settings.admin_tokens]

    async def admin(request: Request) -> None:
        given = request.headers.get(HEADER, "").encode("latin-1")
        # Every token is compared, so that the time taken tells nothing.
        fits = [hmac.compare_digest(given, token) for token in tokens]
        if not any(fits):
            raise NoKey(f"programs need the admin token: send {HEADER}: TOKEN.")

    changing = asyncio.Lock()  # what was checked holds until it is done
    router = APIRouter(prefix="/v1/programs", tags=["programs"], dependencies=[Depends(admin)])

    @router.get("")
    async def listed() -> dict[str, Any]:
        """The programs that are loaded."""
        return {"programs": [dataclasses.asdict(info) for info in backend.list_programs()]}

    @router.put("/{name}")
    async def load(name: str, config: Config) -> dict[str, Any]:
        """Load a program, or replace it; requests under way end as they began.

        The body is a program's config without probes and analyzer, its vectors named after the
        tensors of ``safetensors``, the content of such a file in base64.
        """
        if not _NAME.fullmatch(name):
            raise Invalid("a program's name has 1 to 64 of A-Z a-z 0-9 . _ -", field="name")
        async with changing:
            loaded = {info.name for info in backend.list_programs()}
            if name not in loaded and len(loaded) >= MAX_PROGRAMS:
                raise TooLarge(f"{MAX_PROGRAMS} programs are loaded, the limit: delete one.")
            with _failures_told():
                await asyncio.to_thread(_load, backend, name, config)
            (info,) = [info for info in backend.list_programs() if info.name == name]
        return dataclasses.asdict(info)

    @router.delete("/{name}", status_code=204)
    async def unload(name: str) -> Response:
        """Forget a program; requests under way end as they began."""
        async with changing:
            check_loaded(backend, name)
            with _failures_told():
                await asyncio.to_thread(backend.unload_program, name)
        return Response(status_code=204)

    return router


@contextmanager
def _failures_told() -> Iterator[None]:
    """What the engine raises inside as the service's errors."""
    try:
        yield
    except (ProbeError, UnsupportedVLLMError) as error:
        raise Invalid(str(error)) from error
    except (EngineDeadError, ClosedError) as error:
        raise Unavailable(str(error), retry_after_s=10) from error


def check_loaded(backend: BridgedHookLLM, name: str) -> None:
    """Raise UnknownProgram where no program has this name."""
    if name not in {info.name for info in backend.list_programs()}:
        raise UnknownProgram(f"no program {name[:100]!r} is loaded.", field="X-Program")


def _load(backend: BridgedHookLLM, name: str, config: dict[str, Any]) -> None:
    from hook_runtime.config import read_config
    from hook_runtime.vectors import Vector

    config = dict(config)
    unread = [key for key in ("probes", "analyzer") if config.get(key)]
    if unread:
        raise Invalid(
            f"a program over HTTP may not have {' or '.join(unread)}: what is read could not be "
            "fetched. Give interventions only.",
            field=unread[0],
        )
    content = _decoded(config.pop("safetensors", None))
    config.setdefault("model", backend.model.name)
    if config["model"] != backend.model.name:
        raise Invalid(f"this service runs {backend.model.name}: leave model out.", field="model")
    vectors = {} if content is None else Vector.load_all(content)
    backend.load_program(name, read_config(config, f"program {name}", vectors))


def _decoded(text: Any) -> bytes | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise Invalid("safetensors must be text in base64.", field="safetensors")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"safetensors is not base64: {error}.", field="safetensors") from error
