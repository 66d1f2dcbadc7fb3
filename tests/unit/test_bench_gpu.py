"""The GPU benchmark without an engine: its prompts, arithmetic, rows by name, faults and budget."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core_rerank.eval import bench_gpu, gpu_rows, shapes, workloads
from core_rerank.eval.bench_report import Report
from core_rerank.eval.gpu_engines import Engines, computed_spans
from core_rerank.eval.gpu_rows import Load
from core_rerank.eval.worker_side import BenchWorker
from hook_runtime.specs import Head

HEADS = (Head(3, 1), Head(1, 0))
MISTRAL = SimpleNamespace(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
)


def test_the_records_prompts_are_laid_out_as_documents_and_a_query() -> None:
    made = workloads.pairs(range(100, 1000), HEADS, queries=2, documents=40, tokens=120)
    (query, null), other = made
    assert len(query.prompt_token_ids) == 5118
    start, stop = query.probe.query_span
    assert stop - start == workloads.QUERY
    assert null.probe.query_span == (start, start + workloads.NULL)
    assert query.prompt_token_ids[:start] == null.prompt_token_ids[:start]
    assert query.probe.spans == null.probe.spans
    assert [b - a for a, b in query.probe.spans] == [120] * 40
    assert query.probe.spans[-1][1] < start
    first = query.prompt_token_ids[slice(*query.probe.spans[0])]
    assert first != other[0].prompt_token_ids[slice(*other[0].probe.spans[0])]
    assert made == workloads.pairs(range(100, 1000), HEADS, 2, 40, 120)
    assert made != workloads.pairs(range(100, 1000), HEADS, 2, 40, 120, seed=1)


def test_a_query_computes_its_own_prompt_and_the_null_passs_end() -> None:
    pairs = workloads.pairs(range(100, 1000), HEADS, queries=1, documents=40, tokens=120)
    assert computed_spans(pairs, 16) == [(0, 5118), (5088, 5101)]


def test_arithmetic_of_mistral_7b() -> None:
    """Against the published floor: 785 TFLOP/s allow 10.9 and 18.3 queries/s by weights alone."""
    spans = [(0, 5118), (5088, 5101)]
    full, short = (shapes.work(MISTRAL, layers, spans) for layers in (32, 19))
    assert 785e12 / full.weights == pytest.approx(10.9, rel=0.01)
    assert 785e12 / short.weights == pytest.approx(18.3, rel=0.01)
    assert full.attention == 32 * 4 * 32 * 128 * sum(
        position + 1 for start, stop in spans for position in range(start, stop)
    )


def test_texts_have_the_tokens_asked_for(smollm2_tokenizer: Any) -> None:
    texts = [workloads.text(smollm2_tokenizer, 120, seed) for seed in range(8)]
    lengths = [
        len(smollm2_tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts
    ]
    assert all(118 <= length <= 121 for length in lengths)
    assert len(set(texts)) == 8


# ------------------------------------------------------------------ data parallel


def test_two_gpus_of_twice_the_speed_are_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    asked: dict[str, list[Any]] = {"two": [], "one": []}

    class Engine:
        def use_engines(self, count: int) -> None:
            self.name, self.speed = ("one", 2.0) if count == 1 else ("two", 4.0)

        async def capture(self, requests: list[Any]) -> list[Any]:
            asked[self.name].append(requests)
            now[0] += len(requests) / self.speed
            return requests

    loop = SimpleNamespace(time=lambda: now[0])
    monkeypatch.setattr(gpu_rows.asyncio, "get_running_loop", lambda: loop)
    ticks: list[int] = []
    numbers = itertools.count()
    row = asyncio.run(
        gpu_rows.data_parallel(
            Engine(),
            2,
            lambda: [(next(numbers), "query"), (next(numbers), "null")],  # type: ignore[arg-type]
            5,
            lambda: ticks.append(1),
        )
    )
    assert row.comparison.ratio == pytest.approx(1.0)
    assert row.verdict == "met"
    assert len(ticks) == 12
    prompts = [str(requests) for requests in asked["two"] + asked["one"]]
    assert len(set(prompts)) == len(prompts)  # no prompt is ever asked twice


# ------------------------------------------------------------------ the worker's side


class Runner:
    """Stands for vLLM's model runner: a class with a method in front of which a hook is put."""

    def execute_model(self) -> str:
        return "plain"


def test_the_hook_is_taken_out_and_put_back() -> None:
    runner, impl = Runner(), Runner()

    def wrapper() -> str:
        return "hooked"

    wrapper.__module__ = "hook_runtime.capture"

    def foreign() -> str:
        return "foreign"

    runner.execute_model = wrapper  # type: ignore[method-assign]
    runner.other = foreign  # type: ignore[attr-defined]
    worker = BenchWorker()
    layers = {"a": SimpleNamespace(impl=impl), "b": SimpleNamespace(impl=impl), "c": object()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    worker.model_runner, worker.vllm_config = runner, config  # type: ignore[attr-defined]
    assert worker.bench_hook(True) == 1
    for _ in range(2):
        assert worker.bench_hook(False) == 1
        assert runner.execute_model() == "plain"
    assert runner.other() == "foreign"  # type: ignore[attr-defined]
    for _ in range(2):
        assert worker.bench_hook(True) == 1
        assert runner.execute_model() == "hooked"


# ------------------------------------------------------------------ rows, faults, budget


class FakeEngines(Engines):
    """Engines that start at once, or not at all."""

    def __init__(self, fault: str | None = None) -> None:
        super().__init__(Path("model"), HEADS, {})
        object.__setattr__(self, "fault", fault)

    @contextmanager
    def hooked(self, *, early_exit: bool, **more: Any) -> Any:
        if self.fault == "start" and not early_exit:  # type: ignore[attr-defined]
            raise RuntimeError("no memory")
        model = SimpleNamespace(device="gpu", dtype="bfloat16", layers_kept=4)
        llm = SimpleNamespace(collective_rpc=lambda *_: [{"allocated": 3 << 30}])
        yield SimpleNamespace(
            model=model, runner="v2", llm=llm, shadow_bytes=1 << 20, kv_bytes=1 << 30
        )


def bench(tmp_path: Path, engines: Engines, budget: float, *rows: str, gpus: int = 1) -> Report:
    settings = bench_gpu.Settings(
        engines, Load(), rows, (1, 2), gpus, budget, 64, tmp_path, None, None
    )
    report = Report({}, tmp_path / "out.json")
    bench_gpu.GpuBench(settings, report, lambda: None).run()
    return report


def test_a_fault_costs_its_row_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mixed(*_: Any) -> list[Any]:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(gpu_rows, "mixed", mixed)
    report = bench(tmp_path, FakeEngines(), 1e9, "mixed", "full-memory")
    assert report.missing == {"mixed": "failed: ZeroDivisionError: broken"}
    assert report.figures[0].name == "shadow / KV cache, 4 layers"
    assert "ZeroDivisionError" in capsys.readouterr().err
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["runner"] == "v2"
    assert len(written["figures"]) == 2


def test_engines_that_do_not_start_cost_their_phase(tmp_path: Path) -> None:
    report = bench(tmp_path, FakeEngines("start"), 1e9, "mixed", "full-memory", "exit-memory")
    assert set(report.missing) == {"mixed", "full-memory"}
    assert len(report.figures) == 2


def test_no_engine_is_started_when_the_budget_is_spent(tmp_path: Path) -> None:
    report = bench(tmp_path, FakeEngines(), -1.0, "full-memory", "exit-memory", "sweep")
    assert not report.figures
    assert report.missing == dict.fromkeys(
        ["full-memory", "exit-memory", "sweep"], "not run: budget"
    )


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ([], bench_gpu.MAIN),
        (["--rows", "exit,warm"], ("exit", "warm")),
        (["--rows", "exit", "--sweep", "--gpus", "2"], ("exit", "sweep", "data-parallel")),
        (["--rivals"], (*bench_gpu.MAIN, "rivals")),
    ],
)
def test_rows_by_name(arguments: list[str], rows: tuple[str, ...]) -> None:
    parser = bench_gpu._parser()
    assert bench_gpu._rows(parser.parse_args(arguments), parser) == rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "exit,speed"], "not speed"),
        (["--rows", "profile"], "needs --profile FILE"),
        (["--rows", "data-parallel"], "needs --gpus 2"),
    ],
)
def test_rows_that_cannot_be(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_gpu.main(arguments)
    assert message in capsys.readouterr().err


def test_a_checkout_that_is_not_installed_is_enough() -> None:
    """``python -m eval.bench_gpu`` from the root: nothing of eval names itself core_rerank.eval."""
    folder = Path(sys.modules[bench_gpu.__name__].__file__ or "").parent
    for path in [*folder.glob("*.py"), *folder.glob("rivals/*.py")]:
        code = path.read_text(encoding="utf-8")
        assert "from core_rerank.eval" not in code
        assert "import core_rerank.eval" not in code


def test_data_parallel_starts_its_engine_and_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    closed: list[int] = []

    class Engine:
        model = SimpleNamespace(device="gpu", dtype="bfloat16")
        runner = "v2"

        @classmethod
        async def start(cls, model: str, **options: Any) -> Any:
            started.append(options)
            return cls()

        def use_engines(self, count: int) -> None:
            pass

        async def capture(self, requests: list[Any]) -> list[Any]:
            await asyncio.sleep(0.001)
            return requests

        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_: object) -> None:
            closed.append(1)

    import hook_runtime

    monkeypatch.setattr(hook_runtime, "AsyncHookLLM", Engine, raising=False)
    monkeypatch.setattr(bench_gpu, "_tokenizer", lambda _: range(1000))
    report = bench(tmp_path, FakeEngines(), 1e9, "data-parallel", gpus=2)
    assert not report.missing
    assert [options.get("data_parallel_size") for options in started] == [2]
    assert all(options["layers"] == "auto" for options in started)
    assert len(closed) == 1
    assert report.rows[0].claim == "data parallel: 16 queries on 2 GPUs / 2 x one GPU"
    monkeypatch.setattr(hook_runtime, "AsyncHookLLM", None)
    report = bench(tmp_path, FakeEngines(), 1e9, "data-parallel", gpus=2)
    assert report.missing == {"data-parallel": "not run: hook_runtime has no AsyncHookLLM"}
