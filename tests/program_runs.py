"""Run programs on an engine by the parts that `HookLLM` is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hook_runtime.conductor import Conductor, states_of, with_program, with_salt
from hook_runtime.engine import HookLLM
from hook_runtime.probes import States
from hook_runtime.programs import ModelShape, Program


class Ran(NamedTuple):
    """One request: its prompt, what was computed of what it generated, output and states."""

    tokens: list[int]
    output: Any
    states: tuple[States, ...]
    program: Program


def conductor_of(engine: HookLLM) -> Conductor:
    config = engine.llm.llm_engine.vllm_config.model_config.hf_text_config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = ModelShape(engine.model, config.hidden_size, width)
    return Conductor(shape, engine._rpc("hook_runtime_open"), 1 << 30)


def run_programs(
    engine: HookLLM,
    prompts: Sequence[Sequence[int]],
    programs: Sequence[Program | None],
    params: Any,
) -> list[Ran]:
    conductor = conductor_of(engine)
    resolved = [None if p is None else conductor.resolve(p) for p in programs]
    load = conductor.load(p for p in resolved if p is not None)
    engine._rpc("hook_runtime_hold", *load)
    conductor.loaded(load)
    runs, sent, sampling = [], [], []
    for tokens, program in zip(prompts, resolved, strict=True):
        prompt: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        run = None if program is None else conductor.begin(program, len(tokens))
        runs.append(run)
        sent.append(prompt if run is None else with_salt(prompt, run))
        sampling.append(params if run is None else with_program(params, run))
    outputs = engine.llm.generate(sent, sampling, use_tqdm=False)
    asked = [
        [run.run_id, run.end(len(out.outputs[0].token_ids))]
        for run, out in zip(runs, outputs, strict=True)
        if run is not None
    ]
    answers = iter(zip(*engine._rpc("hook_runtime_states", asked, []), strict=True))
    found = []
    for tokens, run, output in zip(prompts, runs, outputs, strict=True):
        generated = list(output.outputs[0].token_ids)
        states = () if run is None else states_of(next(answers), run, len(generated))
        program = Program() if run is None else run.program
        found.append(Ran([*tokens, *generated[:-1]], output, states, program))
    return found
