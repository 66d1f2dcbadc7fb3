"""vLLM's own OpenAI-compatible application on a hooked engine, for any event loop.

Requests that name a program run it; what keeps captures apart in the engine cannot be set from
outside. Of vLLM's many routes only `ROUTES` are let through.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any

from . import compat
from .bridged import BridgedHookLLM
from .errors import ProbeError

ROUTES = {"/v1/models": "GET", "/v1/chat/completions": "POST", "/v1/completions": "POST"}
_RESERVED = "hook_runtime"
_OLD = "vllm.entrypoints.openai"  # up to 0.31 or so
_NEW = "vllm.entrypoints.launchers"
_program: contextvars.ContextVar[str | None] = contextvars.ContextVar("program", default=None)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class OpenAIApplication:
    """An ASGI application for the paths of `ROUTES`; vLLM does all the work, on the engine's loop.

    Cancelling a call aborts its request in the engine.
    """

    def __init__(self, backend: BridgedHookLLM, names: Sequence[str]) -> None:
        """Make vLLM's application; ``names`` are what requests may call the model.

        Call it from another thread than the engine's event loop.

        Raises:
            UnsupportedModelError: the engine has layers cut off and cannot generate.
            UnsupportedVLLMError: this vLLM has its application elsewhere.
        """
        self._hooked = backend.hooked
        self._hooked.check_whole()
        self._app = backend.wait(_application(_Client(self._hooked), names))

    async def __call__(
        self, scope: Message, receive: Receive, send: Send, *, program: str | None = None
    ) -> None:
        """Answer one request, under a loaded program or none: also not the engine's default one,
        which would refuse what cannot have a program."""
        here, there = asyncio.get_running_loop(), self._hooked.loop

        async def receive_here() -> Message:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_now(receive), here))

        async def send_here(message: Message) -> None:
            sent = asyncio.run_coroutine_threadsafe(_now(send, message), here)
            await asyncio.wrap_future(sent)

        async def answer() -> None:
            _program.set(program)
            inner = {**scope, "state": dict(scope.get("state", {}))}
            await self._app(inner, receive_here, send_here)

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer(), there))


async def _now(call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    return await call(*arguments)


class _Client:
    """The engine as vLLM's application knows it; what generates goes through ours."""

    def __init__(self, hooked: Any) -> None:
        self._hooked = hooked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooked.engine, name)

    @property
    def model_name(self) -> str:
        """The model by its name."""
        return self._hooked.model.name

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **how: Any
    ) -> AsyncIterator[Any]:
        """``AsyncHookLLM.generate``, with the program that the request named."""
        params = copy.copy(sampling_params)
        extra = getattr(params, "extra_args", None) or {}
        params.extra_args = {k: v for k, v in extra.items() if not k.startswith(_RESERVED)}
        if str(prompt.get("cache_salt") or "").startswith(_RESERVED):
            raise ProbeError(f"cache_salt may not begin with {_RESERVED!r}: captures use that.")
        program = _program.get()
        if program is not None:
            if not _is_text(prompt):
                raise ProbeError("a request with a program may hold text only.")
            if prompt.get("cache_salt"):
                raise ProbeError("a request with a program may not have a cache_salt.")
            prompt = {"prompt_token_ids": list(prompt["prompt_token_ids"])}
        async for output in self._hooked.generate(
            prompt, params, program=program, request_id=request_id, **how
        ):
            yield output


def _is_text(prompt: Mapping[str, Any]) -> bool:
    """Whether it is tokens alone; images and embeddings come with another type and more keys."""
    other = any(key.startswith(("mm_", "multi_modal")) for key in prompt)
    return prompt.get("type", "token") == "token" and "prompt_token_ids" in prompt and not other


async def _application(client: _Client, names: Sequence[str]) -> Any:
    """vLLM's application with its state, as its own server makes it."""
    parser = compat.either((f"{_NEW}.cli_args", f"{_OLD}.cli_args"), "make_arg_parser")
    arguments = compat.symbol("vllm.utils.argparse_utils", "FlexibleArgumentParser")
    build = compat.either((f"{_NEW}.app", f"{_OLD}.api_server"), "build_app")
    fill = compat.either((f"{_NEW}.api_server.app_state", f"{_OLD}.api_server"), "init_app_state")
    args = parser(arguments()).parse_args([])
    config = client.vllm_config.model_config
    args.model = client.model_name  # callers are told it: not the folder that it lies in
    args.served_model_name = list(names)
    args.api_key = [""]  # no key here, nor that of VLLM_API_KEY: who may call is the caller's
    args.allowed_origins = []
    args.enable_log_requests = False  # prompts stay out of the log
    args.enable_prompt_tokens_details = True
    tasks = ("generate",)
    app = build(args, tasks, config)
    app.state.server = SimpleNamespace(should_exit=False)  # told to stop when the engine is dead
    await fill(client, app.state, args, tasks)
    return app
