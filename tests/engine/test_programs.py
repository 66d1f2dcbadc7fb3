"""Programs on the real engine: what probes read and interventions change equals transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import start_engine
from program_oracle import assert_ran
from program_runs import greedy, run_programs, tokens

from hook_runtime.engine import HookLLM
from hook_runtime.errors import ProbeError, ProgramError
from hook_runtime.interventions import Ablate, AddVector, ProjectTo, ScaleHeads
from hook_runtime.probes import HeadOutputProbe, HiddenStateProbe
from hook_runtime.programs import Program

pytestmark = pytest.mark.engine

CHUNK = 64
WIDTH = 576
DIRECTION = np.random.default_rng(7).standard_normal(WIDTH)
OTHER = np.random.default_rng(8).standard_normal((2, WIDTH))


@pytest.fixture(scope="module")
def chunked(smollm2_dir: Path, in_this_process: None) -> Iterator[HookLLM]:
    with start_engine(smollm2_dir, enforce_eager=True, max_num_batched_tokens=CHUNK) as engine:
        yield engine


EVERYTHING = Program(
    (
        HiddenStateProbe("all", positions="all"),
        HiddenStateProbe([0, 7, 30]),
        HiddenStateProbe([3, 30], positions="generated"),
        HiddenStateProbe([3], positions="generated", reduce="mean"),
        HiddenStateProbe([12, 5], positions=(60, 70)),
        HiddenStateProbe([12], positions="prompt", reduce="mean"),
        HeadOutputProbe(["3-5", "0-1", "29-8"], positions="all"),
        HeadOutputProbe(["3-5"], reduce="mean", positions="prompt"),
    )
)
STEERING = {
    "add": AddVector([4], DIRECTION, 1.5),
    "add to two layers": AddVector([9, 2], OTHER, -0.7, positions="prompt"),
    "project": ProjectTo([10, 11], DIRECTION, 4.0, positions="generated"),
    "ablate": Ablate("all", DIRECTION),
    "scale heads": ScaleHeads(["2-1", "2-3", "15-0"], 0.0),
    "amplify": ScaleHeads(["7-7"], 3.0, positions="last"),
    "a span": AddVector([5], DIRECTION, 2.0, positions=(10, 70)),
    "some steps": AddVector([5], DIRECTION, 2.0, start_step=2, stop_step=4),
    "the first steps": AddVector([29], DIRECTION, 2.0, stop_step=2),
}
READ = (HiddenStateProbe("all", positions="all"), HeadOutputProbe(["2-1"], positions="all"))


@pytest.mark.parametrize("length", [9, 2 * CHUNK + 1, 150])
def test_every_kind_of_probe(chunked: HookLLM, smollm2_dir: Path, length: int) -> None:
    """In one chunk and in several, the last of one token; again, with the prompt cached."""
    prompt = tokens(length)
    program = EVERYTHING if length > 70 else Program(EVERYTHING.probes[:4])
    for _ in range(2):
        (ran,) = run_programs(chunked, [prompt], [program], greedy())
        assert_ran(smollm2_dir, ran, length)


@pytest.mark.parametrize("name", STEERING)
def test_every_kind_of_intervention(chunked: HookLLM, smollm2_dir: Path, name: str) -> None:
    """The second time its prompt is found in the prefix cache, as the first time left it."""
    prompt = tokens(100, seed=1)
    for probes in (READ, (HiddenStateProbe("all"),)):
        (ran,) = run_programs(chunked, [prompt], [Program(probes, STEERING[name])], greedy())
        assert_ran(smollm2_dir, ran, 100)
    assert ran.output.num_cached_tokens >= 64


def test_a_cached_prefix_is_computed_again(chunked: HookLLM, smollm2_dir: Path) -> None:
    prompt = tokens(130, seed=2)
    assert chunked.llm.reset_prefix_cache()
    run_programs(chunked, [prompt], [None], greedy())
    whole, last = run_programs(
        chunked,
        [prompt] * 2,
        [Program(EVERYTHING.probes[:1]), Program(EVERYTHING.probes[1:3])],
        greedy(),
    )
    assert_ran(smollm2_dir, whole, 130)
    assert_ran(smollm2_dir, last, 130)
    assert whole.output.num_cached_tokens == 0
    assert last.output.num_cached_tokens >= 96


def test_programs_of_one_batch_and_requests_without(chunked: HookLLM, smollm2_dir: Path) -> None:
    """Each has its own; those without are what they are when nobody has one, to the last bit."""
    prompts = [tokens(length, seed=3) for length in (70, 40, 90, 12, 100, 33)]
    programs = [
        Program(READ, STEERING["add"]),
        None,
        Program(READ, [STEERING["project"], STEERING["scale heads"]]),
        None,
        Program(READ),
        Program(READ, STEERING["add"]),
    ]
    params = greedy(8, logprobs=5)
    assert chunked.llm.reset_prefix_cache()
    plain = run_programs(chunked, prompts, [None] * len(prompts), params)
    assert chunked.llm.reset_prefix_cache()
    ran = run_programs(chunked, prompts, programs, params)
    for before, after, program in zip(plain, ran, programs, strict=True):
        if program is None:
            assert _numbers(before.output) == _numbers(after.output)
        else:
            assert_ran(smollm2_dir, after, len(before.output.prompt_token_ids))
    assert _numbers(plain[0].output) != _numbers(ran[0].output)


def _numbers(output: Any) -> list[Any]:
    (done,) = output.outputs
    steps = [{t: p.logprob for t, p in step.items()} for step in done.logprobs]
    return [done.text, list(done.token_ids), steps]


def test_steered_keys_are_nobody_elses(chunked: HookLLM) -> None:
    prompt = tokens(100, seed=4)
    params = greedy(4, logprobs=3)
    assert chunked.llm.reset_prefix_cache()
    (before,) = run_programs(chunked, [prompt], [None], params)
    assert chunked.llm.reset_prefix_cache()
    steered = Program((), AddVector([3], DIRECTION, 3.0))
    stronger = Program((), AddVector([3], DIRECTION, 6.0))
    first, second = (run_programs(chunked, [prompt], [p], params)[0] for p in (steered, stronger))
    (after,) = run_programs(chunked, [prompt], [None], params)
    (again,) = run_programs(chunked, [prompt], [steered], params)
    assert [r.output.num_cached_tokens for r in (first, second, after)] == [0, 0, 0]
    assert again.output.num_cached_tokens >= 64
    assert before.output.outputs[0].text == after.output.outputs[0].text
    assert first.output.outputs[0].text == again.output.outputs[0].text
    assert len({r.output.outputs[0].text for r in (before, first, second)}) == 3


def test_a_prompt_that_goes_on_where_another_was_generated(
    chunked: HookLLM, smollm2_dir: Path
) -> None:
    """What was generated under "generated" is a prompt now: it must not come from the cache."""
    prompt = tokens(40, seed=5)
    program = Program(
        (HiddenStateProbe("all"),), AddVector([6], DIRECTION, 3.0, positions="prompt")
    )
    (first,) = run_programs(chunked, [prompt], [program], greedy(60))
    longer = [*first.tokens, 11]
    (second,) = run_programs(chunked, [longer], [program], greedy(2))
    assert_ran(smollm2_dir, second, len(longer))


def test_beside_attention_captures(chunked: HookLLM, smollm2_dir: Path) -> None:
    """A capture, a program and both at once in one batch of the engine, on the same layers."""
    from oracle import reference_attention
    from parity import assert_exact
    from prompts import HEADS, random_request

    request = random_request(120, (100, 110), ((0, 30), (30, 69)), HEADS, seed=6)
    other = random_request(90, (80, 85), ((0, 30), (30, 69)), HEADS, seed=16)
    program = Program(READ, STEERING["scale heads"])
    ran = run_programs(
        chunked,
        [request.prompt_token_ids, tokens(90, seed=6), other.prompt_token_ids],
        [None, program, Program(READ)],
        greedy(4),
        probes=[request.probe, None, other.probe],
    )
    assert_ran(smollm2_dir, ran[1], 90)
    assert_ran(smollm2_dir, ran[2], 90)
    captures = [chunked.reading(ran[i].output.request_id).attention for i in (0, 2)]
    requests = [request, other]
    assert_exact(captures, reference_attention(smollm2_dir, requests), requests)


def test_attention_under_a_program_that_finds_its_prefix_uncaptured(
    chunked: HookLLM, smollm2_dir: Path
) -> None:
    """The program's keys were computed without a capture: both are computed again."""
    from prompts import HEADS, random_request

    request = random_request(120, (100, 110), ((0, 90),), HEADS, seed=26)
    steered = Program((), AddVector([3], DIRECTION, 3.0))
    prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
    first, second, plain = (
        chunked.perform([prompt], program, greedy(2), probes=[request.probe])[0].reading.attention
        for program in (steered, steered, None)
    )
    assert first is not None
    assert second is not None
    assert plain is not None
    np.testing.assert_allclose(first.values, second.values, atol=1e-5)
    assert np.abs(first.values - plain.values).max() > 1e-3


@pytest.mark.parametrize("when", ["at once", "while it generates"])
def test_a_fault_fails_its_own_requests_only(
    chunked: HookLLM, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """And the same program on the same prompt is right afterwards: what the failed one left in
    the prefix cache was computed without it."""
    seed = 11 if when == "at once" else 31
    prompts = [tokens(100, seed=seed), tokens(60, seed=12)]
    plain = run_programs(chunked, prompts, [None, None], greedy())
    steered = Program(READ[:1], AddVector([4], DIRECTION, 1.5 + seed))
    change, calls = AddVector.change, iter([] if when == "at once" else [0] * 3)

    def broken(*given: Any) -> Any:
        if next(calls, None) is None:
            raise RuntimeError("no such direction")
        return change(*given)

    monkeypatch.setattr(AddVector, "change", broken)
    with pytest.raises(ProgramError, match="no such direction"):
        run_programs(chunked, prompts, [Program((), steered.interventions), None], greedy(40))
    monkeypatch.undo()
    last = Program((HiddenStateProbe("all"),), steered.interventions)
    for program in (last, steered):
        after = run_programs(chunked, prompts, [program, None], greedy())
        assert_ran(smollm2_dir, after[0], 100)
        assert after[1].output.outputs[0].text == plain[1].output.outputs[0].text
    (other,) = run_programs(chunked, prompts[:1], [None], greedy())
    assert other.output.outputs[0].text == plain[0].output.outputs[0].text


def test_nothing_is_left_behind(chunked: HookLLM) -> None:
    run_programs(chunked, [tokens(50)], [Program(READ, STEERING["scale heads"])], greedy())
    chunked.generate(["One more step, so that what is finished is let go of"], greedy(1))
    (stats,) = chunked.stats()
    assert stats["vectors"] > 0
    assert stats["programs"] == stats["program_results"] == stats["wrapped_layers"] == 0


# ---------------------------------------------------------------- programs by name, configs, files


def write_config(folder: Path, text: str) -> Path:
    from safetensors.numpy import save_file

    save_file({"direction": DIRECTION.astype(np.float32)}, folder / "direction.safetensors")
    path = folder / "program.yaml"
    path.write_text(text, encoding="utf-8")
    return path


CONFIG = """
model: HuggingFaceTB/SmolLM2-135M-Instruct
probes:
  - {type: hidden_state, layers: [0, 9, 30], positions: all}
  - {type: attention, heads: [10-4, 15-7], spans: [[0, 20], [20, -1]]}
interventions:
  - {type: add_vector, layers: [8], vector: direction.safetensors, coefficient: 2}
analyzer: {type: projection, vector: direction.safetensors}
"""


def test_programs_come_and_go_on_a_running_engine(
    chunked: HookLLM, smollm2_dir: Path, tmp_path: Path
) -> None:
    prompt = {"prompt_token_ids": tokens(60, seed=13)}
    config = write_config(tmp_path, CONFIG)
    plain = chunked.generate(prompt, greedy())
    assert chunked.list_programs() == []
    chunked.load_program("steer", config, default=True)
    (info,) = chunked.list_programs()
    assert (info.name, info.default) == ("steer", True)
    assert info.probes == ("attention", "hidden_state")
    found = chunked.generate([prompt, prompt], greedy(), program=["steer", None], analyze=True)
    steered, untouched = (o.outputs[0].text for o in found.outputs)
    assert untouched == plain[0].outputs[0].text != steered
    analysis, none = found.analyses
    assert none is None
    reading = chunked.reading(found.outputs[0].request_id)
    (states,) = reading.states
    along = states.values @ (DIRECTION / np.linalg.norm(DIRECTION))
    np.testing.assert_allclose(analysis["values"], along, rtol=1e-3, atol=1e-3)
    assert chunked.analyze(found.outputs[0].request_id) == [analysis]
    assert reading.attention is not None
    assert reading.attention.values.shape == (2, 59)
    by_default = chunked.generate(prompt, greedy())
    assert by_default[0].outputs[0].text == steered
    chunked.load_program("steer", Program((), AddVector([8], DIRECTION, -2)))
    replaced = chunked.generate(prompt, greedy(), program="steer")
    assert replaced[0].outputs[0].text != steered
    assert chunked.generate(prompt, greedy())[0].outputs[0].text == untouched  # no default now
    chunked.unload_program("steer")
    for call in (
        lambda: chunked.unload_program("steer"),
        lambda: chunked.generate(prompt, greedy(), program="steer"),
        lambda: chunked.analyze("no such request"),
    ):
        with pytest.raises(ProbeError, match=r"steer|no such request"):
            call()


def test_chat_runs_programs(chunked: HookLLM) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    (plain,) = chunked.chat(messages, greedy(), program=None)
    program = Program((HiddenStateProbe([5]),), AddVector([8], DIRECTION, 4))
    (steered,) = chunked.chat(messages, greedy(), program=program)
    assert plain.prompt_token_ids == steered.prompt_token_ids
    assert plain.outputs[0].text != steered.outputs[0].text
    assert chunked.reading(steered.request_id).states[0].values.shape == (1, 1, WIDTH)


def test_too_much_to_read_is_refused_or_saved(
    chunked: HookLLM, smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts of which two fit the limit: files take them in two batches."""
    program = Program((HiddenStateProbe("all", positions="all"),), STEERING["add"])
    one = program.capture_bytes(50, 4, chunked._conductor.shape)  # type: ignore[union-attr]
    assert one == 31 * 53 * WIDTH * 4
    monkeypatch.setattr(chunked._conductor, "max_capture_bytes", 2 * one)
    prompts = [tokens(50, seed=i) for i in (20, 21, 22)]
    with pytest.raises(ProbeError, match="save_to"):
        run_programs(chunked, prompts, [program] * 3, greedy(4))
    ran = run_programs(chunked, prompts, [program] * 3, greedy(4), save_to=tmp_path / "states")
    for one_ran in ran:
        assert isinstance(one_ran.states[0].values, np.memmap)
        assert_ran(smollm2_dir, one_ran, 50)
    names = [f"{i:06d}.safetensors" for i in range(3)]
    assert sorted(p.name for p in (tmp_path / "states").iterdir()) == names
    from safetensors.numpy import load_file

    stored = load_file(tmp_path / "states" / names[1])
    np.testing.assert_array_equal(stored["states.0"], ran[1].states[0].values)


def test_another_packages_program(
    chunked: HookLLM, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from plugin import install_plugin, plugin_installed

    config = write_config(
        tmp_path,
        """
model: HuggingFaceTB/SmolLM2-135M-Instruct
probes: [{type: stream_norm, layers: [0, 9, 10], positions: all}]
interventions: [{type: shrink, layers: [8], factor: 0.25, positions: prompt}]
analyzer: {type: largest}
""",
    )
    prompt = tokens(60, seed=14)
    (plain,) = run_programs(
        chunked, [prompt], [Program(HiddenStateProbe([0, 9], positions="all"))], greedy(3)
    )
    with plugin_installed(install_plugin(tmp_path_factory.mktemp("plugin"))):
        chunked.load_program("theirs", config)
        found = chunked.generate(
            {"prompt_token_ids": prompt}, greedy(3), program="theirs", analyze=True
        )
        chunked.unload_program("theirs")
    (states,) = chunked.reading(found.outputs[0].request_id).states
    assert found.analyses == [float(states.values.max())]
    norms = np.linalg.norm(plain.states[0].values, axis=-1)
    np.testing.assert_allclose(states.values[0, :60, 0], norms[0, :60], rtol=1e-4)
    np.testing.assert_allclose(states.values[1, :60, 0], 0.25 * norms[1, :60], rtol=1e-4)
