"""Programs as values: what is refused, what goes over the wire, what is kept apart in the cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hook_runtime.conductor import Conductor, states_of, with_program, with_salt
from hook_runtime.desk import Plan
from hook_runtime.errors import ProbeError, ProgramError, UnsupportedVLLMError
from hook_runtime.interventions import Ablate, AddVector, ProjectTo, ScaleHeads
from hook_runtime.positions import reach
from hook_runtime.probes import HeadOutputProbe, HiddenStateProbe
from hook_runtime.program_work import Work
from hook_runtime.programs import ModelShape, Program
from hook_runtime.specs import AttentionProbe, ModelInfo
from hook_runtime.templates import AttentionTemplate
from hook_runtime.vectors import Vector

ONES = np.ones(8, np.float32)
MODEL = ModelInfo("tiny", None, 4, 4, 6, 512, "float32", "cpu", "vllm")
SHAPE = ModelShape(MODEL, hidden_size=8, head_dim=2)
CUT = ModelShape(ModelInfo("tiny", None, 4, 2, 6, 512, "float32", "cpu", "vllm"), 8, 2)


def conductor(refusal: str | None = None, limit: int = 1 << 20) -> Conductor:
    return Conductor(SHAPE, [{"refusal": refusal}], limit)


# ---------------------------------------------------------------- vectors


def test_equal_vectors_are_one() -> None:
    one, other = Vector([1, 2.5]), Vector(np.array([1, 2.5]))
    assert one == other
    assert Vector.from_wire(one.to_wire()) == one
    assert one != Vector([[1, 2.5]])


@pytest.mark.parametrize(
    ("values", "says"),
    [([], "shape"), ([[[1.0]]], "shape"), ([float("nan")], "finite"), ("abc", "numbers")],
)
def test_what_is_no_vector(values: Any, says: str) -> None:
    with pytest.raises(ProbeError, match=says):
        Vector(values)


def test_a_vector_changed_on_its_way() -> None:
    wire = Vector(ONES).to_wire()
    with pytest.raises(ProbeError, match="changed on its way"):
        Vector.from_wire({**wire, "data": (2 * ONES).tobytes()})


def test_vectors_come_from_safetensors_only(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": ONES, "b": 2 * ONES}, tmp_path / "two.safetensors")
    assert Vector.load(tmp_path / "two.safetensors", "b") == Vector(2 * ONES)
    with pytest.raises(ProbeError, match="holds the tensors a, b, and no name was given"):
        Vector.load(tmp_path / "two.safetensors")
    (tmp_path / "pickle.safetensors").write_bytes(b"\x80\x04no")
    with pytest.raises(ProbeError, match="not a safetensors file"):
        Vector.load(tmp_path / "pickle.safetensors")
    with pytest.raises(ProbeError, match="there is no file"):
        Vector.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn"])
def test_vectors_of_any_float_type(tmp_path: Path, kind: str) -> None:
    import torch
    from safetensors.torch import save_file

    values = torch.tensor([1.0, -0.5, 4.0, 0.25]).to(getattr(torch, kind))
    save_file({"a": values}, tmp_path / "a.safetensors")
    assert Vector.load(tmp_path / "a.safetensors") == Vector([1.0, -0.5, 4.0, 0.25])


# ---------------------------------------------------------------- positions and checks


@pytest.mark.parametrize(
    ("positions", "steps", "expected"),
    [
        ("all", (0, None), (0, None)),
        ("prompt", (0, None), (0, 10)),
        ("last", (0, None), (9, 10)),
        ("generated", (0, None), (10, None)),
        ("generated", (2, 4), (11, 13)),
        ("all", (0, 3), (0, 12)),
        ("all", (1, None), (10, None)),
        ("prompt", (1, None), None),
        ("all", (0, 1), (0, 10)),
        ((4, 30), (0, 2), (4, 11)),
        ((4, 8), (1, None), None),
    ],
)
def test_reach(positions: Any, steps: tuple[int, int | None], expected: Any) -> None:
    """Step 0 computes the prompt of ten tokens, step k the k-th generated token."""
    assert reach(positions, 10, *steps) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: HiddenStateProbe([]),
        lambda: HiddenStateProbe([-1]),
        lambda: HiddenStateProbe([1, 1]),
        lambda: HiddenStateProbe([1], positions="first"),
        lambda: HiddenStateProbe([1], positions=(3, 3)),
        lambda: HiddenStateProbe([1], reduce="median"),
        lambda: HeadOutputProbe("3-5"),
        lambda: AddVector([1], ONES, float("inf")),
        lambda: AddVector([1, 2], np.ones((3, 8))),
        lambda: AddVector("all", np.ones((3, 8))),
        lambda: AddVector([1], ONES, stop_step=0),
        lambda: AddVector([1], ONES, start_step=2, stop_step=2),
        lambda: ProjectTo([1], np.zeros(8), 1.0),
        lambda: Ablate([1], np.zeros(8)),
        lambda: ScaleHeads(["1-1", "1-1"], 0),
        lambda: ScaleHeads(["1-1"], True),
        lambda: Program((AddVector([1], ONES),)),
        lambda: Program((), (HiddenStateProbe([1]),)),
    ],
)
def test_what_is_refused(make: Any) -> None:
    with pytest.raises(ProbeError):
        make()


@pytest.mark.parametrize(
    ("program", "shape", "says"),
    [
        (Program(HiddenStateProbe([5])), SHAPE, "5 hidden states, 0-4"),
        (Program((), AddVector([4], ONES)), SHAPE, "4 layers whose output can be changed"),
        (Program(HiddenStateProbe([2])), CUT, "2 hidden states, 0-1"),
        (Program((), AddVector([1], ONES)), CUT, "1 layers whose output"),
        (Program(HeadOutputProbe(["1-0"])), CUT, "last one kept"),
        (Program(HeadOutputProbe(["0-6"])), SHAPE, "head 0-6 does not exist"),
        (Program((), AddVector([1], np.ones(9))), SHAPE, "9 numbers.*hidden size of 8"),
    ],
)
def test_what_the_model_does_not_have(program: Program, shape: ModelShape, says: str) -> None:
    with pytest.raises(ProbeError, match=says):
        program.resolved(shape)


def test_all_layers_are_named() -> None:
    program = Program(HiddenStateProbe("all"), Ablate("all", ONES)).resolved(SHAPE)
    assert program.probes[0].layers == (0, 1, 2, 3, 4)  # type: ignore[attr-defined]
    assert program.interventions[0].layers == (0, 1, 2, 3)  # type: ignore[attr-defined]


# ---------------------------------------------------------------- the wire and the cache


EVERY_KIND = Program(
    (HiddenStateProbe([0, 3], positions=(2, 5)), HeadOutputProbe(["3-5"], reduce="mean")),
    (
        AddVector([1, 2], np.arange(16.0).reshape(2, 8), -2, positions="generated"),
        ProjectTo([3], ONES, 0.5, start_step=1, stop_step=4),
        Ablate([0], ONES),
        ScaleHeads(["0-0", "2-1"], 0),
    ),
)


def test_a_program_over_the_wire() -> None:
    assert Program.from_wire(EVERY_KIND.wire, EVERY_KIND.vectors) == EVERY_KIND
    assert len(EVERY_KIND.vectors) == 2
    with pytest.raises(ProbeError, match="does not hold the vector"):
        Program.from_wire(EVERY_KIND.wire, {})
    with pytest.raises(ProbeError, match="not a program of version"):
        Program.from_wire('{"version": 0}', {})
    with pytest.raises(ProbeError, match="there is no probe 'own'"):
        Program.from_wire(EVERY_KIND.wire.replace('"hidden_state"', '"own"'), EVERY_KIND.vectors)


def test_salts_keep_apart_what_is_computed_differently() -> None:
    add = AddVector([1], ONES)
    assert Program(HiddenStateProbe([1])).salt(10) is None
    assert Program((), add).salt(10) == Program(HiddenStateProbe([1]), add).salt(11)
    assert Program((), add).salt(10) != Program((), AddVector([1], ONES, 2)).salt(10)
    assert Program((), add).salt(10) != Program((), AddVector([1], 2 * ONES)).salt(10)
    ends = Program((), AddVector([1], ONES, positions="prompt"))
    assert ends.salt(10) != ends.salt(11)
    run = conductor().begin(Program((), add), 3)
    assert with_salt({"prompt_token_ids": [1], "cache_salt": "x"}, run)["cache_salt"] != "x"


def test_a_program_that_failed_leaves_its_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other program's; where too many are remembered, all leave theirs."""
    monkeypatch.setattr("hook_runtime.conductor.MAX_GENERATIONS", 2)
    reads, add, scale, ablate = (
        Program(HiddenStateProbe([1])),
        Program((), AddVector([1], ONES)),
        Program((), ScaleHeads(["0-0"], 0)),
        Program((), Ablate([1], ONES)),
    )
    held = conductor()
    seen: set[str] = set()

    def salts() -> list[str]:
        runs = [held.begin(p, 9) for p in (add, scale, ablate)]
        return [with_salt({"prompt_token_ids": [1]}, run)["cache_salt"] for run in runs]

    before = salts()
    assert salts() == before
    held.leave_cache(held.begin(reads, 9))
    assert salts() == before
    for program, changed in ((add, {0}), (add, {0}), (scale, {1}), (ablate, {0, 1, 2})):
        seen.update(before)
        held.leave_cache(held.begin(program, 9))
        now = salts()
        assert {i for i in range(3) if now[i] != before[i]} == changed
        assert not {now[i] for i in changed} & seen
        before = now


def test_sampling_parameters_carry_the_program() -> None:
    whole, last = (
        conductor().begin(Program(HiddenStateProbe([1], positions=p)), 9) for p in ("all", "last")
    )
    params = SimpleNamespace(n=1, extra_args={"other": 1}, skip_reading_prefix_cache=None)
    assert with_program(params, whole).skip_reading_prefix_cache is True
    carried = with_program(params, last)
    assert carried.skip_reading_prefix_cache is None
    assert carried.extra_args["other"] == 1
    assert params.extra_args == {"other": 1}
    with pytest.raises(ProbeError, match="n=2"):
        with_program(SimpleNamespace(n=2), last)


# ---------------------------------------------------------------- the conductor


def test_hidden_states_out_of_reach() -> None:
    closed = conductor("it has no doors.")
    assert closed.resolve(Program(HeadOutputProbe(["0-0"])))
    with pytest.raises(UnsupportedVLLMError, match="it has no doors"):
        closed.resolve(Program(HiddenStateProbe([1])))


def test_sizes_are_known_before_the_run() -> None:
    def size(*probes: Any) -> int:
        return Program(probes).capture_bytes(10, 5, SHAPE)

    assert size(HiddenStateProbe([1])) == 8 * 4
    assert size(HiddenStateProbe("all", positions="all")) == 5 * 14 * 8 * 4
    assert size(HiddenStateProbe([1], positions="generated", reduce="mean")) == 8 * 4
    assert size(HeadOutputProbe(["0-0", "1-1"], positions="prompt")) == 2 * 10 * 2 * 4
    assert size(HiddenStateProbe([1], positions=(12, 40))) == 2 * 8 * 4
    small = conductor(limit=100)
    assert small.parts([50, 50, 60, 40, 1]) == [range(2), range(2, 4), range(4, 5)]
    assert small.parts([0] * 8193) == [range(8192), range(8192, 8193)]
    small.check_sizes([50, 50])
    with pytest.raises(ProbeError, match="max_capture_bytes"):
        small.check_sizes([50, 51])


def test_vectors_are_sent_once_and_dropped_when_they_outgrow_their_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hook_runtime.conductor.MAX_VECTOR_BYTES", 2 * ONES.nbytes)
    programs = [Program((), AddVector([1], i * ONES)) for i in (1, 2, 3)]
    digests = [next(iter(p.vectors)) for p in programs]
    held = conductor()
    for program in programs[:2]:
        load = held.load([program])
        assert [v["digest"] for v in load.vectors] == list(program.vectors)
        held.loaded(load)
        assert held.load([program]).vectors == []
    run = held.begin(programs[0], 3)
    load = held.load([programs[2]])
    assert load.drop == digests[1:2]  # the first is older, but in use
    held.loaded(load)
    held.end_run(run)
    assert held.load([programs[1]]).drop == digests[:1]
    held.forget()
    assert len(held.load(programs).vectors) == 3


def test_after_a_lost_call_workers_keep_only_what_is_needed() -> None:
    """What is in use is sent again: it can be dropped later only if it is known to be held."""
    programs = [Program((), AddVector([1], i * ONES)) for i in (1, 2, 3)]
    digests = [next(iter(p.vectors)) for p in programs]
    held = conductor()
    held.loaded(held.load(programs[:2]))
    running = held.begin(programs[0], 3)
    assert held.load(programs).keep is None
    held.forget()
    load = held.load([programs[2]])
    assert load.keep is not None
    assert sorted(load.keep) == sorted([digests[0], digests[2]])
    assert sorted(v["digest"] for v in load.vectors) == sorted(load.keep)
    held.loaded(load)
    assert held.load([programs[0], programs[2]]) == ([], [], None)
    held.end_run(running)


def answer(read: list[dict[str, Any]], done: int = 12) -> dict[str, Any]:
    return {"done": done, "read": read}


def part(keys: list[Any], positions: list[int], probe: int = 0) -> dict[str, Any]:
    values = np.full((len(keys), positions[1] - positions[0], 2), keys[0], np.float32)
    return {
        "probe": probe,
        "keys": keys,
        "positions": positions,
        "shape": list(values.shape),
        "dtype": "float32",
        "data": values.tobytes(),
    }


def test_states_of_several_workers_are_put_in_the_probes_order() -> None:
    run = conductor().begin(Program(HiddenStateProbe([3, 0], positions="all")), 10)
    ranks = [answer([part([0], [0, 12])]), {}, answer([part([3], [0, 12])])]
    (states,) = states_of(ranks, run, 3)
    assert states.positions == (0, 12)
    assert states.values[:, 0, 0].tolist() == [3, 0]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([], "up to token 0 of 12"),
        ([answer([part([0, 3], [0, 12])], done=11)], "up to token 11 of 12"),
        ([answer([part([0], [0, 12])])], "no worker read hidden_state 3"),
        ([answer([part([0, 3], [0, 11])])], "read tokens"),
        ([{"error": "the door is shut"}], "the door is shut"),
    ],
)
def test_partial_numbers_never_come_back(ranks: list[dict[str, Any]], says: str) -> None:
    run = conductor().begin(Program(HiddenStateProbe([3, 0], positions="all")), 10)
    with pytest.raises(ProgramError, match=says):
        states_of(ranks, run, 3)


def test_nothing_was_generated_to_read() -> None:
    run = conductor().begin(Program(HiddenStateProbe([3], positions="generated")), 10)
    (states,) = states_of([answer([], done=10)], run, 1)
    assert states.values.shape[:2] == (1, 0)
    assert states.positions == (10, 10)


@pytest.mark.parametrize(
    ("probe", "size"),
    [
        (AttentionProbe(["0-0", "1-1"], (9, 10), ((0, 4), (5, 8))), 2 * 7 * 4),
        (AttentionProbe(["0-0", "1-1"], (9, 10), ((0, 4), (5, 8)), "documents"), 2 * 2 * 4),
        (AttentionProbe(["0-0", "1-1"], (9, 10), ((0, 4),), sum_heads=True), 4 * 4),
        (AttentionProbe("all", (9, 10), ((0, 4),)), 4 * 6 * 4 * 4),
    ],
)
def test_attention_counts_too(probe: AttentionProbe, size: int) -> None:
    """Whether it is the call's or the program's, beside what the program reads."""

    def work(plan: Plan, own: AttentionProbe | None) -> int:
        params = SimpleNamespace(max_tokens=5)
        return Work.of(list(range(10)), plan, own, params, None, None, conductor()).size

    template = AttentionTemplate(
        probe.heads, probe.query_span, probe.spans, probe.reduction, probe.sum_heads
    )
    assert work(Plan(), probe) == work(Plan(None, template), None) == size
    assert work(Plan(Program(HiddenStateProbe([1]))), probe) == size + 8 * 4
    assert work(Plan(), None) == 0


# ---------------------------------------------------------------- an engine's arguments


def test_an_engine_from_its_config(tmp_path: Path) -> None:
    from hook_runtime.desk import configured

    reads, heads = tmp_path / "reads.yaml", tmp_path / "heads.yaml"
    reads.write_text("model: org/m\nrevision: abc\nprobes: [{type: hidden_state, layers: [1]}]")
    heads.write_text("model: org/m\nprobes: [{type: head_output, heads: [1-1]}]")
    engine: dict[str, Any] = {}
    assert configured(None, reads, None, engine) == ("org/m", True)
    assert engine == {"revision": "abc"}
    other: dict[str, Any] = {}
    assert configured("/a/copy", reads, False, other) == ("/a/copy", False)
    assert other == {}  # the revision is the config's model's
    assert configured(None, heads, None, {}) == ("org/m", False)
    assert configured("m", None, None, {}) == ("m", False)
    with pytest.raises(ProbeError, match="no model was named"):
        configured(None, None, None, {})
