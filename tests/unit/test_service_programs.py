"""Programs over HTTP: who may load them, and what a stranger's config may say."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from safetensors.numpy import save

from core_rerank.service import ServiceSettings
from core_rerank.service.gate import Gate
from core_rerank.service.metrics import Metrics
from core_rerank.service.problems import install
from core_rerank.service.programs import MAX_PROGRAMS, programs_router
from hook_runtime import ConfigError, EngineDeadError, ModelInfo, ProgramConfig
from hook_runtime.config import read_config
from hook_runtime.desk import Desk, Plan, plan_of
from hook_runtime.programs import ModelShape
from hook_runtime.vectors import Vector

TOKEN = "correct-horse-battery"
ADMIN = {"x-admin-token": TOKEN}
MODEL = ModelInfo("test/small", None, 4, 4, 3, 512, "float32", "cpu", "fake")
STEER = {"type": "add_vector", "layers": [1], "vector": "up", "coefficient": 2.0}
TENSORS = base64.b64encode(save({"up": np.ones(8, np.float32)})).decode()


class DeskOnly:
    """The engine's list of programs without the engine."""

    def __init__(self) -> None:
        self.model = MODEL
        self.desk = Desk(1 << 20)

    def load_program(self, name: str, program: ProgramConfig) -> None:
        self.desk.load(name, plan_of(program, ModelShape(MODEL, 8, 4)), False)

    def unload_program(self, name: str) -> None:
        self.desk.unload(name)

    def list_programs(self) -> Any:
        return self.desk.listed()


def asked(
    backend: Any, *requests: Any, headers: Any = ADMIN, at_once: bool = False
) -> list[httpx.Response]:
    settings = ServiceSettings(openai=True, admin_tokens=("another-long-token", TOKEN))
    app = FastAPI()
    install(app)
    app.include_router(programs_router(backend, settings))
    gated = Gate(app, settings, Metrics())

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(gated)
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            asking = [
                client.request(method, f"/v1/programs{path}", json=body, headers=headers)
                for method, path, body in requests
            ]
            if at_once:
                return await asyncio.gather(*asking)
            return [await one for one in asking]

    return asyncio.run(ask())


def test_one_is_loaded_listed_and_unloaded() -> None:
    backend = DeskOnly()
    body = {"interventions": [STEER], "safetensors": TENSORS}
    put, listed, again, deleted, empty, gone = asked(
        backend,
        ("PUT", "/up", body),
        ("GET", "", None),
        ("PUT", "/up", {**body, "model": "test/small"}),
        ("DELETE", "/up", None),
        ("GET", "", None),
        ("DELETE", "/up", None),
    )
    assert put.status_code == again.status_code == 200
    assert put.json() == again.json()
    assert put.json()["interventions"] == ["add_vector"]
    assert listed.json() == {"programs": [put.json()]}
    assert deleted.status_code == 204
    assert empty.json() == {"programs": []}
    assert gone.status_code == 404


@pytest.mark.parametrize("token", [None, TOKEN[:-1], "é" * 20])
def test_without_the_token_nothing_is_told(token: str | None) -> None:
    headers = {} if token is None else {"x-admin-token": token.encode("latin-1")}
    body = {"interventions": [STEER]}
    everything = [("GET", "", None), ("PUT", "/a", body), ("DELETE", "/a", None)]
    for answer in asked(DeskOnly(), *everything, headers=headers):
        assert answer.status_code == 401


@pytest.mark.parametrize(
    ("name", "body", "status", "told"),
    [
        ("a", {"interventions": [{**STEER, "vector": "/etc/x.safetensors"}]}, 422, "no tensor"),
        ("a", {"interventions": [{**STEER, "vector": {"file": "x"}}]}, 422, "no tensor 'x'"),
        ("a", {"interventions": [{**STEER, "type": "shrink"}]}, 422, "'shrink' is not one of"),
        ("a", {"interventions": [STEER], "safetensors": "***"}, 400, "not base64"),
        ("a", {"interventions": [STEER], "safetensors": "AAAA"}, 422, "not the content"),
        ("a", {"interventions": [STEER], "safetensors": 5}, 422, "text in base64"),
        ("a", {"interventions": [{**STEER, "layers": [9]}], "safetensors": TENSORS}, 422, "9"),
        ("a", {"interventions": [], "model": "other/model"}, 422, "runs test/small"),
        ("a", {"probes": [{"type": "hidden_state", "layers": [1]}]}, 422, "could not be fetched"),
        ("a", {"code": "import os"}, 422, "there is no such key"),
        ("a", [1], 422, "dict"),
        ("a%20b", {"interventions": []}, 422, "1 to 64"),
    ],
)
def test_what_is_refused(name: str, body: Any, status: int, told: str) -> None:
    backend = DeskOnly()
    (answer,) = asked(backend, ("PUT", f"/{name}", body))
    assert answer.status_code == status
    assert told in answer.json()["message"]
    assert not backend.list_programs()


def test_there_may_be_so_many() -> None:
    backend = DeskOnly()
    for i in range(MAX_PROGRAMS):
        backend.load_program(f"p{i}", read_config({"model": "m"}, "p", {}))
    put, replaced = asked(
        backend, ("PUT", "/one-more", {"interventions": []}), ("PUT", "/p3", {"interventions": []})
    )
    assert (put.status_code, replaced.status_code) == (413, 200)


def test_a_dead_engine_is_503() -> None:
    class Dead(DeskOnly):
        def load_program(self, name: str, program: ProgramConfig) -> None:
            raise EngineDeadError("vLLM's engine process died.")

        def unload_program(self, name: str) -> None:
            raise EngineDeadError("vLLM's engine process died.")

    backend = Dead()
    DeskOnly.load_program(backend, "up", read_config({"model": "m"}, "p", {}))
    for answer in asked(backend, ("DELETE", "/up", None), ("PUT", "/a", {"interventions": []})):
        assert answer.status_code == 503
        assert "engine process died" in answer.json()["message"]
        assert "retry-after" in answer.headers


def test_changes_at_the_same_time_take_turns() -> None:
    class Slow(DeskOnly):
        def load_program(self, name: str, program: ProgramConfig) -> None:
            time.sleep(0.05)
            super().load_program(name, program)

        def unload_program(self, name: str) -> None:
            time.sleep(0.05)
            super().unload_program(name)

    empty: Any = {"interventions": []}
    backend = Slow()
    put, first, second = asked(
        backend, ("PUT", "/a", empty), ("DELETE", "/a", None), ("DELETE", "/a", None), at_once=True
    )
    assert [put.status_code, first.status_code, second.status_code] == [200, 204, 404]

    for i in range(MAX_PROGRAMS - 1):
        backend.desk.load(f"p{i}", Plan(), False)
    two = asked(backend, ("PUT", "/b", empty), ("PUT", "/c", empty), at_once=True)
    assert [answer.status_code for answer in two] == [200, 413]
    assert len(backend.list_programs()) == MAX_PROGRAMS


def test_tokens_are_long_and_not_shown() -> None:
    with pytest.raises(ValueError, match="at least 16 characters"):
        ServiceSettings(openai=True, admin_tokens=("short",))
    with pytest.raises(ValueError, match="need openai"):
        ServiceSettings(admin_tokens=(TOKEN,))
    assert TOKEN not in repr(ServiceSettings(openai=True, admin_tokens=(TOKEN,)))


def test_vectors_come_by_name_alone() -> None:
    vector = Vector(np.ones(8))
    config = {"model": "m", "interventions": [{**STEER, "vector": "v"}]}
    found = read_config(config, "sent", {"v": vector})
    assert found.program.vectors == {vector.digest: vector}
    with pytest.raises(ConfigError, match=r"sent: interventions\[0\].vector: there is no tensor"):
        read_config(config, "sent", {"w": vector})
