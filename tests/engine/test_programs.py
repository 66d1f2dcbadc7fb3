"""Programs on the real engine: what probes read and interventions change equals transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import start_engine
from program_oracle import assert_states, reference_states
from program_runs import Ran, run_programs

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


@pytest.fixture(scope="module", autouse=True)
def _in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


@pytest.fixture(scope="module")
def chunked(smollm2_dir: Path, _in_this_process: None) -> Iterator[HookLLM]:
    with start_engine(smollm2_dir, enforce_eager=True, max_num_batched_tokens=CHUNK) as engine:
        yield engine


def tokens(length: int, seed: int = 0) -> list[int]:
    """Words from the vocabulary; the same seed gives prompts that share their beginning."""
    return np.random.default_rng(seed).integers(10, 40000, length).tolist()


def greedy(count: int = 6, **how: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **how)


def check(model: Path, ran: Ran, prompt_len: int, tolerance: float = 2e-4) -> None:
    references, _ = reference_states(model, ran.tokens, prompt_len, ran.program)
    assert_states(ran.states, references, ran.program.probes, tolerance)


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
        check(smollm2_dir, ran, length)


@pytest.mark.parametrize("name", STEERING)
def test_every_kind_of_intervention(chunked: HookLLM, smollm2_dir: Path, name: str) -> None:
    """The second time its prompt is found in the prefix cache, as the first time left it."""
    prompt = tokens(100, seed=1)
    for probes in (READ, (HiddenStateProbe("all"),)):
        (ran,) = run_programs(chunked, [prompt], [Program(probes, STEERING[name])], greedy())
        check(smollm2_dir, ran, 100)
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
    check(smollm2_dir, whole, 130)
    check(smollm2_dir, last, 130)
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
            check(smollm2_dir, after, len(before.output.prompt_token_ids))
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
    check(smollm2_dir, second, len(longer))


def test_beside_attention_captures(chunked: HookLLM, smollm2_dir: Path) -> None:
    """Both kinds in one batch of the engine, on the same layers."""
    from oracle import reference_attention
    from parity import assert_exact
    from program_runs import conductor_of
    from prompts import HEADS, random_request

    from hook_runtime.conductor import with_program, with_salt

    request = random_request(120, (100, 110), ((0, 30), (30, 69)), HEADS, seed=6)
    program = Program(READ, STEERING["scale heads"])
    run_programs(chunked, [tokens(5)], [program], greedy(1))
    submission = chunked._session
    chunked.capture([request])
    batch = submission.submission(request, greedy(4))
    conductor = conductor_of(chunked)
    run = conductor.begin(conductor.resolve(program), 90)
    prompt = with_salt({"prompt_token_ids": tokens(90, seed=6)}, run)
    chunked.llm.generate(
        [batch.prompt, prompt], [batch.params, with_program(greedy(4), run)], use_tqdm=False
    )
    (result,) = chunked._take([batch])
    capture = chunked._session.capture(request, result, _Hit(), False)
    assert_exact([capture], reference_attention(smollm2_dir, [request]), [request])


class _Hit:
    num_cached_tokens = 0


@pytest.fixture
def _in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that ends in this process takes the others here with it."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


@pytest.mark.usefixtures("_in_processes")
def test_preemption(smollm2_dir: Path) -> None:
    """Requests are thrown out while they generate, and are computed again."""
    settings: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": 256,
        "num_gpu_blocks_override": 13,
        "disable_log_stats": False,
    }
    with start_engine(smollm2_dir, **settings) as engine:
        prompts = [tokens(60, seed=i) for i in range(4)]
        program = Program(
            (*READ, HiddenStateProbe([9], positions="all", reduce="mean")),
            [STEERING["add"], STEERING["project"]],
        )
        programs = [program, Program(READ), program, Program(READ)]
        ran = run_programs(engine, prompts, programs, greedy(70))
        metrics = engine.llm.get_metrics()
        assert sum(m.value for m in metrics if m.name == "vllm:num_preemptions") > 0
    for one in ran:
        check(smollm2_dir, one, 60)


@pytest.mark.usefixtures("_in_processes")
def test_tensor_parallel(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of both ranks; the stream, which both have, once."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    folder = tiny_model("llama")
    direction = np.random.default_rng(1).standard_normal(192)
    program = Program(
        (
            HiddenStateProbe("all", positions="all"),
            HeadOutputProbe(["3-5", "0-0", "3-2", "1-3"], positions="all"),
        ),
        [ScaleHeads(["1-0", "2-4"], 2.0), Ablate([1], direction), AddVector([2], direction)],
    )
    with start_engine(folder, enforce_eager=True, tensor_parallel_size=2) as engine:
        (ran,) = run_programs(engine, [tokens(90, seed=1)], [program], greedy(4))
    check(folder, ran, 90)


@pytest.mark.usefixtures("_in_processes")
def test_early_exit(smollm2_dir: Path) -> None:
    """Of the last layer kept only queries and keys are computed: its input can be read."""
    prompt = tokens(80, seed=9)
    with start_engine(smollm2_dir, layers=6, enforce_eager=True) as engine:
        (ran,) = run_programs(
            engine,
            [prompt],
            [Program((HiddenStateProbe("all", positions="prompt"),), AddVector([4], DIRECTION))],
            greedy(1),
        )
        assert ran.program.probes[0].layers == (0, 1, 2, 3, 4, 5)  # type: ignore[attr-defined]
        check(smollm2_dir, ran, 80)
        for beyond in (HiddenStateProbe([6]), HeadOutputProbe(["5-0"])):
            with pytest.raises(ProbeError, match=r"out of range|last one kept"):
                run_programs(engine, [prompt], [Program((beyond,))], greedy(1))


def test_a_fault_fails_its_own_requests_only(
    chunked: HookLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [tokens(50, seed=11), tokens(60, seed=12)]
    plain = run_programs(chunked, prompts, [None, None], greedy())

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such direction")

    monkeypatch.setattr(AddVector, "change", broken)
    with pytest.raises(ProgramError, match="no such direction"):
        run_programs(chunked, prompts, [Program((), STEERING["add"]), None], greedy())
    monkeypatch.undo()
    after = run_programs(chunked, prompts, [None, Program((), STEERING["add"])], greedy())
    assert after[0].output.outputs[0].text == plain[0].output.outputs[0].text


def test_nothing_is_left_behind(chunked: HookLLM) -> None:
    run_programs(chunked, [tokens(50)], [Program(READ, STEERING["scale heads"])], greedy())
    chunked.generate(["One more step, so that what is finished is let go of"], greedy(1))
    (stats,) = chunked.stats()
    assert stats["programs"] == stats["program_results"] == stats["wrapped_layers"] == 0
