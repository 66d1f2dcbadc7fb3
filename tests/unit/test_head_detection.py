"""Head detection: measuring, planted heads, determinism, provenance, refusals."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import PLANTED, PlantedBackend, labelled

from core_rerank.errors import NotFiniteError
from core_rerank.head_attention import pool_attention
from core_rerank.head_detection import Selection, find_heads
from core_rerank.head_measuring import MeasureSettings, document_order, measure_attention
from core_rerank.heads import HeadSet
from core_rerank.labelled_queries import LabelledQuery
from core_rerank.prompt import PromptBuilder
from core_rerank.types import Document
from hook_runtime.backend import CaptureBackend
from hook_runtime.specs import Capture, CaptureRequest, Head


@pytest.fixture(scope="module")
def backend(smollm2_tokenizer: Any) -> PlantedBackend:
    made = PlantedBackend(smollm2_tokenizer)
    assert isinstance(made, CaptureBackend)
    return made


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"count": 0}, "number of heads must be at least 1, not 0"),
        ({"temperature": 0.0}, "temperature must be a number above 0, not 0.0"),
        ({"temperature": float("nan")}, "temperature must be a number above 0, not nan"),
        ({"max_layers": 0}, "max_layers must be at least 1, not 0"),
        ({"method": "best"}, "method must be one of core, qr, ndcg, weighted, signed, not 'best'"),
    ],
)
def test_a_selection_is_checked_when_it_is_made(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Selection(**setting)


@pytest.mark.parametrize("window", [1, 2, "all"])
def test_the_planted_head_is_found_in_every_window(backend: PlantedBackend, window: Any) -> None:
    attention = measure_attention(backend, labelled(24), MeasureSettings(window=window))
    detection = find_heads(attention, Selection(count=1, temperature=0.01, calibrated=False))
    assert find_heads(attention, Selection(count=1)).heads == (PLANTED,)
    assert detection.heads == (PLANTED,)
    assert detection.chosen.ndcg_at_10 == 1.0
    assert detection.random.ndcg_at_10 < 1.0
    assert detection.all_heads.ndcg_at_10 < 1.0


def test_raw_attention_is_what_the_backend_returned(backend: PlantedBackend) -> None:
    query = labelled(1)[0]
    attention = measure_attention(backend, [query])
    builder = PromptBuilder(backend.tokenizer, 512)
    for place, document in enumerate((*query.positives, *query.negatives)):
        prompt = builder.build(query.query, [document.full_text])
        (start, end) = prompt.document_spans[0]
        assert attention.tokens[0, place] == end - start
        expected = np.float32((end - start) / 512)
        assert attention.query[0, place, 0, 0] == expected
        assert attention.null is not None
        assert attention.null[0, place, 0, 0] == expected
    assert attention.positive.tolist() == [[True, False, False]]


def test_calibration_and_length_are_applied(backend: PlantedBackend) -> None:
    attention = measure_attention(backend, labelled(2))
    raw = attention.values(calibrated=False, per_token=False)
    assert np.allclose(attention.values(calibrated=False, per_token=True)[..., 0, 0], 1 / 512)
    calibrated = attention.values(calibrated=True, per_token=False)
    assert np.allclose(calibrated[..., 0, 0], 0)
    assert np.allclose(raw, attention.query)


def test_two_runs_are_equal_and_the_seed_moves_only_the_order(backend: PlantedBackend) -> None:
    queries = labelled(3)
    first, second = (
        measure_attention(backend, queries, MeasureSettings(window=2, seed=7)) for _ in range(2)
    )
    assert np.array_equal(first.query, second.query)
    assert first.measurement == second.measurement
    other = measure_attention(backend, queries, MeasureSettings(seed=8))
    assert np.array_equal(other.query, measure_attention(backend, queries).query)


def test_progress_counts_queries(backend: PlantedBackend) -> None:
    seen: list[tuple[int, int]] = []
    measure_attention(backend, labelled(4), on_progress=lambda *counts: seen.append(counts))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_uncalibrated_attention_cannot_be_calibrated(backend: PlantedBackend) -> None:
    attention = measure_attention(backend, labelled(1), MeasureSettings(with_null=False))
    assert attention.null is None
    with pytest.raises(ValueError, match="without the null query"):
        attention.values(calibrated=True, per_token=False)


def test_the_head_set_says_where_it_comes_from(backend: PlantedBackend, tmp_path: Path) -> None:
    attention = measure_attention(backend, labelled(20), MeasureSettings(seed=3), data="toy")
    detection = find_heads(attention, Selection(count=2, temperature=0.5))
    head_set = detection.head_set(["small"])
    head_set.to_yaml(tmp_path / "heads.yaml")
    assert HeadSet.from_yaml(tmp_path / "heads.yaml") == head_set
    assert (head_set.model, head_set.revision) == ("some/model", "abc")
    assert head_set.heads[0] == PLANTED
    assert (head_set.method, head_set.window, head_set.temperature) == ("core", 1, 0.5)
    assert head_set.data == "toy, 20 queries"
    assert head_set.scores is not None
    assert head_set.scores[0] == pytest.approx(detection.scores[PLANTED], abs=1e-6)
    assert head_set.found_with["seed"] == "3"
    assert head_set.calibrate
    assert {"prompt_hash", "data_hash", "transformers"} <= set(head_set.found_with)


def test_nan_from_the_engine_names_the_query(backend: PlantedBackend) -> None:
    broken = PlantedBackend(backend.tokenizer, broken=True)
    with pytest.raises(NotFiniteError, match="'q0'"):
        measure_attention(broken, labelled(1))


def test_few_queries_are_a_warning(
    backend: PlantedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        find_heads(measure_attention(backend, labelled(19)), Selection(count=1))
        assert "only 19 labelled queries" in caplog.text
        caplog.clear()
        find_heads(measure_attention(backend, labelled(20)), Selection(count=1))
        assert not caplog.text


def test_no_queries_are_refused(backend: PlantedBackend) -> None:
    with pytest.raises(ValueError, match="no labelled queries"):
        measure_attention(backend, [])


def test_real_attention_agrees_with_single_captures(smollm2_dir: Path) -> None:
    from hook_runtime.specs import AttentionProbe
    from hook_runtime.transformers_backend import TransformersBackend

    backend = TransformersBackend(str(smollm2_dir), dtype="float32")
    query = labelled(1)[0]
    attention = measure_attention(backend, [query])
    info = backend.model
    assert attention.query.shape == (1, 3, info.num_layers, info.num_heads)
    prompt = PromptBuilder(backend.tokenizer, info.max_model_len).build(
        query.query, [query.positives[0].full_text]
    )
    probe = AttentionProbe((Head(7, 3),), prompt.query_span, prompt.document_spans)
    (capture,) = backend.capture([CaptureRequest(prompt.token_ids, probe)])
    assert attention.query[0, 0, 7, 3] == pytest.approx(capture.values.sum(), rel=1e-5)
    mass = attention.query[0]
    assert (mass > 0).all()
    assert (mass < 1).all()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"window": 0}, "window must be 'all' or a whole number of documents from 1, not 0"),
        ({"rows": "all"}, "rows must be 'query' or 'instruction', not 'all'"),
        ({"window": "all", "orders": 6}, "orders must be 1 to 5, not 6"),
        ({"orders": 2}, "orders=2 measures the same prompts again with window 1"),
    ],
)
def test_how_to_measure_is_checked_first(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeasureSettings(**setting)


def test_a_query_that_is_there_twice_is_refused(backend: PlantedBackend) -> None:
    with pytest.raises(ValueError, match="query 'q0' is there twice"):
        measure_attention(backend, [*labelled(2), *labelled(1)])


# ---------------------------------------------------------------- the order of the documents


def many(positives: int, negatives: int, query_id: str = "q") -> LabelledQuery:
    documents = tuple(Document(f"text {i}", str(i)) for i in range(positives + negatives))
    return LabelledQuery(query_id, "what?", documents[:positives], documents[positives:])


@pytest.mark.parametrize("positives", [1, 2, 5])
def test_over_five_queries_every_position_has_the_positives_equally_often(positives: int) -> None:
    query, seen = many(positives, 15), []
    for number in range(5):
        order = document_order(query, number, seed=3)
        assert sorted(order) == list(range(15 + positives))
        seen += [order.index(place) for place in range(positives)]
    slots = sorted(set(seen))
    assert (len(slots), slots[0], slots[-1]) == (5, 0, 14 + positives)
    assert [seen.count(slot) for slot in slots] == [positives] * 5


def test_turns_of_one_query_move_its_positive_too() -> None:
    query = many(1, 8)
    orders = [document_order(query, 0, 0, turn) for turn in range(5)]
    assert [order.index(0) for order in orders] == [0, 2, 4, 6, 8]
    assert len({tuple(o) for o in orders}) == 5


def test_the_order_depends_on_the_seed_and_the_query_and_nothing_else() -> None:
    orders = [document_order(many(1, 9, name), 2, seed) for name in "qr" for seed in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == document_order(many(1, 9), 2, 0)


def test_fewer_documents_than_positions_are_all_placed() -> None:
    for positives, negatives in ((1, 1), (2, 1), (6, 1), (1, 2)):
        query = many(positives, negatives)
        orders = [document_order(query, number, 0) for number in range(5)]
        assert all(sorted(o) == list(range(positives + negatives)) for o in orders)


class ByPosition(PlantedBackend):
    """Every head looks at a document by its place in the prompt alone."""

    def _one(self, request: CaptureRequest) -> Capture:
        capture = super()._one(request)
        capture.values[:] = np.arange(1, capture.values.shape[1] + 1)
        return capture


def test_five_orders_take_a_liking_for_a_position_away(backend: PlantedBackend) -> None:
    biased = ByPosition(backend.tokenizer)
    queries = [many(1, 4)]
    settings = MeasureSettings(window="all", orders=5, with_null=False)
    assert measure_attention(biased, queries, settings).query[0, 0, 0, 0] == 3.0
    assert biased.calls == 1


def test_rows_from_the_instruction_look_for_qr(backend: PlantedBackend) -> None:
    seen: list[CaptureRequest] = []

    class Recording(PlantedBackend):
        def _one(self, request: CaptureRequest) -> Capture:
            seen.append(request)
            return super()._one(request)

    query = labelled(1)[0]
    settings = MeasureSettings(rows="instruction")
    measure_attention(Recording(backend.tokenizer), [query], settings)
    prompt = PromptBuilder(backend.tokenizer, 512).build(
        query.query, [query.positives[0].full_text]
    )
    spans = [r.probe.query_span for r in seen if r.prompt_token_ids == prompt.token_ids]
    assert spans == [(prompt.instruction_span[0], len(prompt.token_ids))]


# ---------------------------------------------------------------- several data sets


def renamed(count: int, start: int = 0) -> list[LabelledQuery]:
    return [dataclasses.replace(q, query_id=f"r{start + i}") for i, q in enumerate(labelled(count))]


def test_pooled_attention_is_that_of_all_queries(backend: PlantedBackend) -> None:
    one = measure_attention(backend, [many(2, 4)], data="one")
    other = measure_attention(backend, labelled(3), data="other")
    pooled = pool_attention([one, other])
    assert pooled.query.shape == (4, 6, 3, 2)
    assert np.array_equal(pooled.query[0], one.query[0])
    assert np.array_equal(pooled.query[1:, :3], other.query)
    assert np.isnan(pooled.query[1:, 3:]).all()
    assert pooled.positive.sum() == 5
    assert pooled.measurement.data == "one + other"
    assert pooled.measurement.query_ids == ("one q", "other q0", "other q1", "other q2")
    assert pool_attention([one]) is one


def test_pooled_stores_are_named_in_the_head_set(backend: PlantedBackend, tmp_path: Path) -> None:
    parts = [
        measure_attention(backend, labelled(9), store=tmp_path / "a", data="a"),
        measure_attention(backend, renamed(12), store=tmp_path / "b", data="b"),
    ]
    head_set = find_heads(pool_attention(parts), Selection(count=1)).head_set()
    assert head_set.heads == (PLANTED,)
    assert head_set.data == "a + b, 21 queries"
    assert head_set.found_with["store_hash"] == " ".join(part.digest for part in parts)


def test_only_what_was_measured_alike_is_pooled(backend: PlantedBackend) -> None:
    one = measure_attention(backend, labelled(2), data="one")
    listwise = measure_attention(backend, renamed(2), MeasureSettings(window="all"), data="two")
    with pytest.raises(ValueError, match="window differs \\('one': 1, 'two': all\\)"):
        pool_attention([one, listwise])
    model = dataclasses.replace(backend.model, name="some/other")
    other = measure_attention(backend, renamed(2), model=model)
    with pytest.raises(ValueError, match="model id differs"):
        pool_attention([one, other])
    with pytest.raises(ValueError, match="query 'one q0' is in two of the stores"):
        pool_attention([one, one])
