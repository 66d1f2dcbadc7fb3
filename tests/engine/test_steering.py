"""Steering vectors on the real engine: fitted, and steered with, as transformers would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import start_engine
from program_oracle import assert_ran, reference_greedy, reference_states
from program_runs import greedy, run_programs

from core_rerank import SteeringVector
from core_rerank.steering import instruction_pairs
from hook_runtime import HiddenStateProbe, HookLLM, Program

pytestmark = pytest.mark.engine

PROMPTS = ["What is a comet?", "How do snails move?", "Why is grass green?", "Describe a ferry."]
READ = HiddenStateProbe("all", positions="all")


@pytest.fixture(scope="module")
def llm(smollm2_dir: Path, in_this_process: None) -> Iterator[HookLLM]:
    with start_engine(smollm2_dir, enforce_eager=True, name="smollm2") as engine:
        yield engine


@pytest.fixture(scope="module")
def vector(llm: HookLLM) -> SteeringVector:
    return SteeringVector.fit(llm, *instruction_pairs(PROMPTS, "Answer in one sentence."))


def ids(llm: HookLLM, conversation: Any) -> list[int]:
    text = llm.tokenizer.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True
    )
    return llm.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_vector_is_the_difference_of_transformers_states(
    llm: HookLLM, vector: SteeringVector, smollm2_dir: Path
) -> None:
    assert vector.layers == tuple(range(29))
    program = Program((HiddenStateProbe(list(range(1, 30))),))
    means = []
    for side in instruction_pairs(PROMPTS, "Answer in one sentence."):
        prompts = [ids(llm, conversation) for conversation in side]
        states = [reference_states(smollm2_dir, p, len(p), program)[0][:, 0] for p in prompts]
        means.append(np.mean(states, axis=0))
    size = np.abs(means[0]).max(axis=-1, keepdims=True)
    assert (np.abs(vector.directions - (means[0] - means[1])) <= 2e-4 * size).all()
    unit = vector.direction / np.linalg.norm(vector.direction)
    target = float(means[0][vector.layer] @ unit)
    assert vector.targets[vector.layer] == pytest.approx(target, rel=1e-3)


def test_two_ways_to_steer_and_a_probe_in_one_batch(
    llm: HookLLM, vector: SteeringVector, smollm2_dir: Path
) -> None:
    """States of prompt and generation, and the text, are those of transformers with hooks."""
    at = vector.at(14)
    programs = [
        Program(READ, at.scaled(1.5).interventions),
        Program(READ, at.projected(positions="generated").interventions),
        Program(READ),
    ]
    prompt = ids(llm, [{"role": "user", "content": "What is a waterfall?"}])
    ran = run_programs(llm, [prompt] * 3, programs, greedy(20))
    said = []
    for one in ran:
        assert_ran(smollm2_dir, one, len(prompt))
        said.append(list(one.output.outputs[0].token_ids))
        assert said[-1] == reference_greedy(smollm2_dir, prompt, one.program, 20)
    assert said[0] != said[2]
    assert said[1] != said[2]


def test_steer_and_the_saved_program_say_the_same(
    llm: HookLLM, vector: SteeringVector, tmp_path: Path
) -> None:
    at = vector.at(14)
    messages = [{"role": "user", "content": "What is a waterfall?"}]
    prompts = [{"prompt_token_ids": ids(llm, messages)}] * 3
    plain, steered, both = llm.generate(
        prompts,
        greedy(12),
        steer=[None, at.scaled(1.5), Program(READ, at.scaled(1.5).interventions)],
    )
    assert plain.outputs[0].text != steered.outputs[0].text == both.outputs[0].text
    assert llm.reading(both.request_id).states[0].values.shape[0] == 31
    llm.load_program("sentence", at.save(tmp_path / "sentence", 1.5))
    (loaded,) = llm.chat(messages, greedy(12), program="sentence")
    llm.unload_program("sentence")
    assert loaded.outputs[0].text == steered.outputs[0].text
