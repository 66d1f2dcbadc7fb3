"""The parity table's own arithmetic: what makes a row fail, and what is refused or not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

from parity_table import cli, drive, judge
from parity_table.mixed import near_tie, ordinary_outputs_differ
from parity_table.models import Models
from parity_table.scenarios import SCENARIOS, Scenario
from parity_table.session import Observed, Part
from parity_table.table import planned, print_table, read_rows, write_json
from parity_table.worker_process import Started, Tried

from hook_runtime.specs import AttentionProbe, Capture, CaptureRequest, Head

REQUEST = CaptureRequest(tuple(range(9)), AttentionProbe((Head(0, 1),), (6, 8), ((0, 2), (3, 5))))
EXACT = np.array([[0.4, 0.1, 0.2, 0.1]], np.float32)
SWAPPED = EXACT[:, [2, 3, 0, 1]]


def _part(values: np.ndarray) -> Part:
    return Part(Path("model"), REQUEST, Capture(REQUEST.probe.heads, values))


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> judge.Oracle:
    """Answers ``EXACT`` in float32, and in another dtype a tenth of its largest value more."""

    def answer(model: Path, requests: Any, dtype: Any = None, device: str = "cpu") -> Any:
        return [EXACT if dtype is None else EXACT + np.float32(0.04) for _ in requests]

    monkeypatch.setattr(judge, "reference_attention", answer)
    return judge.Oracle("cpu")


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (EXACT, ""),
        (EXACT + np.float32(2e-5), ""),
        (EXACT + np.float32(1e-4), "error 2.50e-04, 1.00e-04 allowed"),
        (SWAPPED, "error 5.00e-01"),
        (np.where(EXACT > 0.3, np.nan, EXACT).astype(np.float32), "error inf"),
    ],
)
def test_float32(values: np.ndarray, fault: str, oracle: judge.Oracle) -> None:
    found = oracle.figures([_part(EXACT), _part(values)], "float32", None).fault()
    assert found.startswith(fault)
    assert bool(found) == bool(fault)


def test_captures_that_do_not_fit_the_probe(oracle: judge.Oracle) -> None:
    assert oracle.misfit([_part(EXACT)]) == ""
    assert "(1, 3), not float32 (1, 4)" in oracle.misfit([_part(EXACT), _part(EXACT[:, :3])])
    assert "float64" in oracle.misfit([_part(EXACT.astype(np.float64))])
    other = Part(Path("model"), REQUEST, Capture((Head(1, 1),), EXACT))
    assert "a capture holds heads" in oracle.misfit([other])


def test_a_small_head_is_not_excused_by_a_large_one(oracle: judge.Oracle) -> None:
    figures = judge.Figures(5e-5, 1e-4, 5e-3, None, 1, None, 1)
    assert figures.fault() == "a head is off by 5.00e-03, 1e-03 allowed"


def test_bf16_is_measured_against_plain_bf16(oracle: judge.Oracle) -> None:
    parts = [_part(EXACT)]
    plain = oracle.plain_error(parts, "bfloat16")
    assert plain == pytest.approx(0.1)
    one = np.array([[1, 0, 0, 0]], np.float32)
    for off, fault in (
        (np.float32(0.045), ""),
        (np.float32(0.055), "root mean square 1.3"),
        (0.075 * one, ""),
        (0.085 * one, "error 2.1"),
    ):
        figures = oracle.figures([_part(EXACT + off)], "bfloat16", plain)
        assert figures.fault().startswith(fault)
        assert bool(figures.fault()) == bool(fault)


@pytest.mark.parametrize(
    ("message", "refusal", "verdict"),
    [
        (Started(runner="r"), "never", "not run: not reached"),
        (Started(runner="r"), "must", "failed: it started, though it must be refused"),
        (Started(refused="E: why"), "must", "refused: E: why"),
        (Started(refused="E: why"), "may", "refused: E: why"),
        (Started(refused="E: why"), "never", "failed: refused: E: why"),
        (Started(failed="E: why"), "must", "failed: E: why"),
        (Started(failed="E: why"), "may", "failed: E: why"),
        (Started(failed="ValueError: no"), "may", "refused: by vLLM: ValueError: no"),
        (Started(failed="ValueError: no"), "never", "failed: ValueError: no"),
    ],
)
def test_starts_and_refusals(message: Started, refusal: Any, verdict: str) -> None:
    scenario = Scenario("s", conditions=("cold",), refusal=refusal)
    (row,) = planned(scenario, "cpu")
    drive._record_start(message, scenario, {"cold": row})
    assert row.verdict == verdict


@pytest.mark.parametrize(
    ("tried", "verdict"),
    [
        (Tried("cold", Observed([_part(EXACT)])), drive.UNJUDGED),
        (Tried("cold", Observed()), "failed: nothing was captured"),
        (Tried("cold", Observed([_part(EXACT)], ["a", "b"])), "failed: a; b"),
        (Tried("cold", not_met="why"), "not run: the condition did not arise: why"),
        (Tried("cold", failed="E: why"), "failed: E: why"),
    ],
)
def test_conditions(tried: Tried, verdict: str) -> None:
    (row,) = planned(Scenario("s", conditions=("cold",)), "cpu")
    drive._record(tried, row)
    assert row.verdict == verdict


def test_what_cannot_run_here_says_why(tmp_path: Path) -> None:
    models = Models(tmp_path, tmp_path, None)
    stamp = {"date": "", "commit": ""}
    scenarios = {
        "budget": Scenario("a", gpu_s=50),
        "needs 2 GPUs, 1 here": Scenario("b", gpu_s=1, gpus=2),
        "SmolLM2's weights are not here: give --smollm2 DIR": Scenario("c", "smollm2", gpu_s=1),
        "because": Scenario("d", gpu_s=None, absent="because"),
    }
    jobs = [(s, planned(s, "gpu")) for s in scenarios.values()]
    with drive.Driver(models, "gpu", 1, 60, tmp_path, stamp) as driver:
        driver.run(jobs)
    for reason, (_, rows) in zip(scenarios, jobs, strict=True):
        assert {row.verdict for row in rows} == {f"not run: {reason}"}


def test_a_dead_process_fails_its_rows_and_the_next_engine_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``print`` in place of the child's loop: it writes its arguments and is gone."""
    monkeypatch.setattr(drive, "serve", print)
    models = Models(tmp_path, tmp_path, None)
    jobs = [(s, planned(s, "cpu")) for s in (Scenario("a"), Scenario("b"))]
    written = []
    stamp = {"date": "today", "commit": "c"}
    with drive.Driver(models, "cpu", 0, float("inf"), tmp_path, stamp) as driver:
        driver.run(jobs, lambda: written.append(jobs[0][1][0].verdict))
    for _, rows in jobs:
        assert {row.verdict for row in rows} == {"failed: the engine's process died: "}
        assert {row.date for row in rows} == {"today"}
    assert written[0] == "failed: the engine's process died: "
    assert len(list(tmp_path.glob("engines-*.log"))) == 2


def test_judging_settles_the_verdict(oracle: judge.Oracle, tmp_path: Path) -> None:
    models = Models(tmp_path, tmp_path, None)
    driver = drive.Driver(models, "cpu", 0, 1.0, tmp_path, {"date": "", "commit": ""})
    scenario = Scenario("s", conditions=("cold", "warm", "pair", "mixed"))
    rows = planned(scenario, "cpu")
    for row in rows:
        row.verdict = drive.UNJUDGED
    rows[3].verdict = "failed: other tokens"
    found = {"cold": [_part(EXACT)], "warm": [_part(SWAPPED)], "pair": [_part(EXACT[:, :3])]}
    driver._judge(scenario, rows, {**found, "mixed": [_part(EXACT)]}, lambda: None)
    verdicts = [row.verdict for row in rows]
    assert verdicts[0] == "ok"
    assert verdicts[1].startswith("failed: error")
    assert verdicts[2].startswith("failed: a capture is")
    assert verdicts[3] == "failed: other tokens"
    assert rows[3].figures is not None


def _output(tokens: list[int], gap: float = 0.0) -> Any:
    logprobs = [
        {t: SimpleNamespace(logprob=-1.0), t + 100: SimpleNamespace(logprob=-1.0 - gap)}
        for t in tokens
    ]
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])


@pytest.mark.parametrize(
    ("allowed", "gap", "problem"), [(None, 0.0, True), (0.2, 0.1, False), (0.2, 0.5, True)]
)
def test_other_tokens_are_a_problem_unless_rounding_explains_them(
    allowed: float | None, gap: float, problem: bool
) -> None:
    seen = Observed()
    plain = [_output([1, 2, 3]), _output([4, 5, 6], gap)]
    probed = [_output([1, 2, 3]), _output([4, 105, 6])]
    ordinary_outputs_differ(seen, plain, probed, None if allowed is None else lambda *_: allowed)
    assert bool(seen.problems) == problem
    assert seen.notes[-1].startswith("1 of 2 outputs identical")


def test_what_rounding_explains_is_what_it_does_to_plain_transformers(
    tiny_model: Callable[[str], Path],
) -> None:
    output = SimpleNamespace(
        prompt_token_ids=list(range(20, 60)), outputs=[SimpleNamespace(token_ids=[7, 8, 9])]
    )
    model = tiny_model("llama")
    lead = near_tie(model, "bfloat16")
    assert lead is not None
    first, whole = (lead(output, at) for at in (0, 2))
    assert 0 < first <= whole < 0.1
    assert near_tie(model, "float32") is None


def test_rows_survive_the_file_and_a_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = SCENARIOS[:2]
    rows = planned(first, "cpu")
    rows[0].verdict, rows[0].figures = "ok", judge.Figures(1e-6, 1e-4, 1e-5, None, 1, None, 1)
    path = tmp_path / "parity.json"
    write_json(rows, path, {"command": "make parity"})
    assert [p.name for p in tmp_path.iterdir()] == ["parity.json"]
    again = planned(second, "cpu")
    merged = cli._all_rows([(second, again)], read_rows(path), "cpu")
    assert merged[0] == rows[0]
    assert again[0] in merged
    assert len(merged) == sum(len(s.conditions) for s in SCENARIOS)
    print_table(rows, "parity")
    assert "1 ok, 0 failed, 0 refused" in capsys.readouterr().out


def test_every_scenario_names_known_conditions_once() -> None:
    from parity_table.conditions import CONDITIONS

    names = [s.name for s in SCENARIOS]
    assert len(set(names)) == len(names)
    for scenario in SCENARIOS:
        assert set(scenario.conditions) <= {*CONDITIONS, "refusal"}
        assert scenario.absent or None not in (scenario.cpu_s, scenario.gpu_s)
