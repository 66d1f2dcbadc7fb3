"""What HookLLM and AsyncHookLLM have in common: what they know, and how the workers are asked."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

from .options import EngineOptions, model_info, raise_refusal
from .session import Session, shadow_arguments
from .specs import Head, ModelInfo


class Call(NamedTuple):
    """A remote procedure for every worker."""

    method: str
    arguments: tuple[Any, ...] = ()


Steps = Generator[Call, list[Any], None]
"""Calls to make one after another; each is answered with what the workers returned. The engine's
``_perform`` gives what the generator returns at its end."""


class Hooked:
    """Base of both engines, which make the calls of ``Steps`` each in its own way.

    Attributes:
        kv_bytes: size of the KV caches of all workers.
        runner: qualified name of vLLM's model runner.
    """

    kv_bytes: int
    runner: str
    _session: Session

    @property
    def model(self) -> ModelInfo:
        """The model that is loaded."""
        return self._session.model

    @property
    def shadow_bytes(self) -> int:
        """What the heads held take on all workers, beside the KV cache's ``kv_bytes``."""
        return self._session.shadow_bytes

    @property
    def cache_salt(self) -> str:
        """vLLM's ``cache_salt`` of the captures of named heads that are made now.

        Captures have a prefix cache of their own, in which every block has been captured; an
        ordinary request finds what they computed if it carries this salt. What it computes itself
        is not captured: a capture that meets it there computes its own prompt again. Changes when
        the heads held change.
        """
        return self._session.salt

    def _install(
        self,
        vllm_config: Any,
        name: str,
        options: EngineOptions,
        heads: Iterable[Head],
        engines: int = 1,
    ) -> Steps:
        """Have the workers follow the model and hold these heads."""
        installed = yield Call("hook_runtime_install")
        raise_refusal(installed)
        info = model_info(vllm_config, name, options, installed)
        self._session = Session(info, vllm_config, installed, engines)
        self.kv_bytes = sum(worker["kv_bytes"] for worker in installed)
        self.runner = str(installed[0]["runner"])
        chosen = frozenset(heads)
        info.check_heads(chosen)
        if chosen:
            yield from self._hold(chosen, first=True)

    def _hold(self, heads: frozenset[Head], first: bool = False) -> Steps:
        """Have the workers hold these heads, or ShadowMemoryError."""
        session = self._session
        try:
            workers = yield Call("hook_runtime_shadow", shadow_arguments(heads, first))
        except BaseException:
            session.let_go()
            raise
        refusal = session.refused(heads, workers)
        if refusal is None:
            session.now_holds(heads, workers)
            return
        if any("bytes" in worker for worker in workers):  # these let go of what they held
            old = session.held
            workers = yield Call("hook_runtime_shadow", shadow_arguments(old, True))
            session.now_holds(old, workers)
        raise refusal
