"""The bridge to vLLM's application: loops, cancellation, and what a request may not set."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hook_runtime import BridgedHookLLM, ProbeError, compat, openai_api


class Hooked:
    """What the bridge needs of an AsyncHookLLM; generates what it was asked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.engine = SimpleNamespace(name="vllm's")
        self.model = SimpleNamespace(name="some/model")
        self.asked: list[Any] = []
        self.cancelled = threading.Event()

    def check_whole(self) -> None:
        """All layers are there."""

    def check_open(self) -> None:
        """Open."""

    async def generate(self, prompt: Any, params: Any, **how: Any) -> Any:
        assert asyncio.get_running_loop() is self.loop
        self.asked.append((prompt, params.extra_args, how))
        try:
            await asyncio.sleep(how["seconds"])
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        yield f"to {prompt['prompt_token_ids']}"


@pytest.fixture
def hooked() -> Iterator[Hooked]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield Hooked(loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def application(hooked: Hooked, monkeypatch: pytest.MonkeyPatch) -> openai_api.OpenAIApplication:
    async def made(client: Any, names: Any) -> Any:
        assert client.name == "vllm's"
        assert names == ["small"]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            body = (await receive())["body"]
            params = SimpleNamespace(extra_args={"own": 1, "hook_runtime": {"x": 2}})
            prompt = {"prompt_token_ids": list(body), "prompt": "text", **scope["state"]}
            seconds = 30.0 if body == b"slow" else 0.0

            async def inside() -> list[str]:  # vLLM generates in tasks of its own
                return [t async for t in client.generate(prompt, params, "r1", seconds=seconds)]

            (said,) = await asyncio.create_task(inside())
            await send({"type": "http.response.body", "body": said.encode()})

        return app

    monkeypatch.setattr(openai_api, "_application", made)
    return openai_api.OpenAIApplication(BridgedHookLLM(hooked), ["small"])


async def answered(application: Any, body: bytes, state: Any = None, **how: Any) -> list[Any]:
    sent: list[Any] = []
    here = asyncio.get_running_loop()

    async def receive() -> Any:
        assert asyncio.get_running_loop() is here
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        assert asyncio.get_running_loop() is here
        sent.append(message)

    await application({"type": "http", "state": state or {}}, receive, send, **how)
    return sent


def test_requests_of_one_loop_run_on_the_other(hooked: Hooked, application: Any) -> None:
    async def check() -> None:
        plain, named = await asyncio.gather(
            answered(application, b"a"), answered(application, b"b", program="loud")
        )
        assert plain[0]["body"] == b"to [97]"
        assert named[0]["body"] == b"to [98]"

    asyncio.run(check())
    asked = {tuple(prompt["prompt_token_ids"]): (prompt, *rest) for prompt, *rest in hooked.asked}
    prompt, extra, how = asked[(97,)]
    assert prompt["prompt"] == "text"
    assert extra == {"own": 1}  # what workers obey is not for callers to set
    assert how == {"program": None, "request_id": "r1", "seconds": 0.0}  # nor the default one
    prompt, _, how = asked[(98,)]
    assert prompt == {"prompt_token_ids": [98]}
    assert how["program"] == "loud"


def test_a_call_that_is_cancelled_is_cancelled_there(hooked: Hooked, application: Any) -> None:
    async def check() -> None:
        asking = asyncio.create_task(answered(application, b"slow"))
        while not hooked.asked:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(check())
    assert hooked.cancelled.wait(5)


def test_the_captures_cache_is_out_of_reach(application: Any) -> None:
    with pytest.raises(ProbeError, match="cache_salt may not begin with 'hook_runtime'"):
        asyncio.run(answered(application, b"a", {"cache_salt": "hook_runtime/0"}))
    told = asyncio.run(answered(application, b"a", {"cache_salt": "mine"}))
    assert told[0]["body"] == b"to [97]"


@pytest.mark.parametrize(
    "more",
    [
        {"type": "multimodal", "mm_kwargs": {}, "mm_hashes": {}, "mm_placeholders": {}},
        {"type": "embeds", "is_token_ids": [True]},
        {"type": "token", "mm_kwargs": {}},
        {"multi_modal_data": {}},
    ],
)
def test_a_program_changes_text_alone(hooked: Hooked, application: Any, more: Any) -> None:
    with pytest.raises(ProbeError, match="may hold text only"):
        asyncio.run(answered(application, b"a", more, program="loud"))
    assert not hooked.asked
    told = asyncio.run(answered(application, b"a", {"type": "token"}, program="loud"))
    assert told[0]["body"] == b"to [97]"
    assert asyncio.run(answered(application, b"a", more))[0]["body"] == b"to [97]"


def test_a_program_has_a_cache_of_its_own(application: Any) -> None:
    with pytest.raises(ProbeError, match="may not have a cache_salt"):
        asyncio.run(answered(application, b"a", {"cache_salt": "mine"}, program="loud"))


def test_callers_are_not_told_where_the_model_lies(
    hooked: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked.engine.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model="/secret/x"))
    filled: list[Any] = []

    async def fill(client: Any, state: Any, args: Any, tasks: Any) -> None:
        filled.append(args)

    class Parser:
        def parse_args(self, _: Any) -> Any:
            return SimpleNamespace()

    made = {
        "make_arg_parser": lambda parser: parser,
        "build_app": lambda args, tasks, config: SimpleNamespace(state=SimpleNamespace()),
        "init_app_state": fill,
    }
    monkeypatch.setattr(compat, "either", lambda _, name: made[name])
    monkeypatch.setattr(compat, "symbol", lambda *_: Parser)
    openai_api.OpenAIApplication(BridgedHookLLM(hooked), ["small"])  # type: ignore[arg-type]
    (args,) = filled
    assert (args.model, args.served_model_name) == ("some/model", ["small"])
    assert "/secret" not in str(vars(args))
