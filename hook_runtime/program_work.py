"""One request that is to run a program: its prompt read, its plan fitted to it, its size known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .analyzers import Analyzer
from .conductor import Conductor
from .desk import Plan
from .errors import ProbeError
from .programs import FLOAT32, Program
from .session import token_ids
from .specs import AttentionProbe, ModelInfo


@dataclass(frozen=True, slots=True)
class Work:
    """A request before it is sent.

    Attributes:
        tokens: the prompt's; empty where nothing but vLLM needs to know them.
        program: with its layers named.
        size: bytes that its probes may bring back.
    """

    prompt: Any
    tokens: tuple[int, ...]
    program: Program | None
    probe: AttentionProbe | None
    analyzer: Analyzer | None
    params: Any
    adapter: Any
    size: int

    @classmethod
    def of(
        cls,
        prompt: Any,
        plan: Plan,
        probe: AttentionProbe | None,
        params: Any,
        adapter: Any,
        tokenizer: Any,
        conductor: Conductor,
    ) -> Work:
        """``probe`` goes before the plan's own attention; errors are ``Conductor.resolve``'s."""
        if plan.empty and probe is None:
            return cls(prompt, (), None, None, plan.analyzer, params, adapter, 0)
        tokens = token_ids(prompt, tokenizer)
        if probe is None and plan.attention is not None:
            probe = plan.attention.probe(len(tokens))
        program, size = None, attention_bytes(probe, conductor.shape.model)
        if plan.program is not None:
            program = conductor.resolve(plan.program)
            most = params.max_tokens or conductor.shape.model.max_model_len - len(tokens)
            size += program.capture_bytes(len(tokens), most, conductor.shape)
        return cls(prompt, tokens, program, probe, plan.analyzer, params, adapter, size)


def attention_bytes(probe: AttentionProbe | None, model: ModelInfo) -> int:
    """What an attention probe brings back: float32 [heads, columns]."""
    if probe is None:
        return 0
    every = model.layers_kept * model.num_heads
    heads = every if probe.heads == "all" else len(probe.heads)
    return (1 if probe.sum_heads else heads) * probe.num_columns * FLOAT32


def as_list(prompts: Any) -> list[Any]:
    """vLLM's prompts: one, or several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and all(isinstance(t, int) for t in prompts):
        return [prompts]
    return list(prompts)


def chat_prompt(messages: Any, tokenizer: Any, template: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation as token ids; ProbeError where the tokenizer has no chat template."""
    options = {"add_generation_prompt": True, **template, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(messages, **options)
    except ValueError as error:
        raise ProbeError(f"the conversation cannot be written as a prompt: {error}") from error
    return {"prompt_token_ids": list(tokenizer(text, add_special_tokens=False)["input_ids"])}
