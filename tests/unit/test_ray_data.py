"""Reranking as a stage of a Ray Dataset, on a local Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from core_rerank import Reranker
from core_rerank.errors import DataError
from core_rerank.integrations.ray_data import RerankBatches
from hook_runtime.transformers_backend import TransformersBackend

SETTINGS: dict[str, Any] = {"backend": "transformers", "heads": ["1-0", "0-1"], "window": 1}
ROWS = [
    {"id": i, "question": f"which is tide {i}?", "texts": [f"tide {j}" for j in range(i % 4)]}
    for i in range(10)
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_a_dataset_is_ranked_by_two_engines(ray: Any, tiny_model: Callable[[str], Path]) -> None:
    import ray.data

    folder = tiny_model("llama")
    ranked = ray.data.from_items(ROWS).map_batches(
        RerankBatches,
        fn_constructor_kwargs={
            "model": str(folder), "query": "question", "documents": "texts", "top_n": 2, **SETTINGS
        },
        batch_format="pyarrow",
        batch_size=3,
        concurrency=2,
    )  # fmt: skip
    found = sorted(ranked.take_all(), key=lambda row: row["id"])
    with Reranker(str(folder), **SETTINGS) as reranker:
        for row, given in zip(found, ROWS, strict=True):
            expected = reranker.rerank(given["question"], given["texts"], top_n=2)
            assert {name: row[name] for name in given} == given
            assert row["ranking"] == [item.index for item in expected]
            assert row["scores"] == pytest.approx([item.score for item in expected], abs=1e-5)


def test_what_cannot_be_ranked_is_named(tiny_model: Callable[[str], Path]) -> None:
    stage = RerankBatches(str(tiny_model("llama")), **SETTINGS)
    with pytest.raises(DataError, match=r"no column 'documents'; there are \['query'\]"):
        stage(pyarrow.table({"query": ["a"]}))
    with pytest.raises(DataError, match="batch_format='pyarrow'"):
        stage({"query": ["a"], "documents": [["b"]]})
    for query, said in ((None, "query must be a string"), (" ", "query is blank")):
        rows = pyarrow.table({"query": ["a", query], "documents": [["b"], ["c"]]})
        with pytest.raises(DataError, match=rf"in task 1 of the batch\): .*{said}"):
            stage(rows)
    rows = pyarrow.table({"query": ["a"], "documents": [None]}, pyarrow.schema(
        [("query", pyarrow.string()), ("documents", pyarrow.list_(pyarrow.string()))]
    ))  # fmt: skip
    with pytest.raises(DataError, match="in task 0 of the batch"):
        stage(rows)
    for name in ("ranking", "scores"):
        rows = pyarrow.table({"query": ["a"], "documents": [["b"]], name: [1]})
        with pytest.raises(DataError, match=f"a column '{name}' already"):
            stage(rows)
    ranked = stage(pyarrow.table({"query": ["a"], "documents": [["b", "c"]]}))
    assert ranked.column_names == ["query", "documents", "ranking", "scores"]


@pytest.mark.parametrize("error", [TypeError("an engine's fault"), ValueError("another")])
def test_the_engines_errors_are_no_rows_fault(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stage = RerankBatches(str(tiny_model("llama")), **SETTINGS)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(TransformersBackend, "capture", fail)
    with pytest.raises(type(error)) as caught:
        stage(pyarrow.table({"query": ["a"], "documents": [["b"]]}))
    assert caught.value is error
