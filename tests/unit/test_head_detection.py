"""Head detection: hand-computed contrastive scores, planted heads, determinism, refusals."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_rerank.errors import DataError, NotFiniteError
from core_rerank.head_detection import Selection, find_heads, measure_attention
from core_rerank.head_scores import (
    HeadAttention,
    best_heads,
    contrastive_scores,
    random_quality,
    ranking_quality,
)
from core_rerank.heads import HeadSet
from core_rerank.labelled_queries import LabelledQuery, load_labelled_queries
from core_rerank.prompt import PromptBuilder
from core_rerank.types import Document
from hook_runtime.backend import CaptureBackend
from hook_runtime.specs import Capture, CaptureRequest, Head, ModelInfo

LAYERS, HEADS = 3, 2
PLANTED = Head(1, 1)


def stack(*documents: Sequence[Sequence[float]]) -> np.ndarray:
    """[documents, layers, heads] as one query's values."""
    return np.array([documents], dtype=float)


def test_contrastive_score_of_one_query_by_hand() -> None:
    values = stack([[0.3]], [[0.1]], [[0.2]])
    positive = np.array([[True, False, False]])
    expected = math.exp(3) / (math.exp(3) + math.exp(1) + math.exp(2))
    assert contrastive_scores(values, positive, 0.1)[0, 0] == pytest.approx(expected)


def test_positives_do_not_compete_and_are_averaged() -> None:
    values = stack([[1.0]], [[3.0]], [[2.0]])
    positive = np.array([[True, True, False]])
    one = math.exp(1) / (math.exp(1) + math.exp(2))
    two = math.exp(3) / (math.exp(3) + math.exp(2))
    assert contrastive_scores(values, positive, 1.0)[0, 0] == pytest.approx((one + two) / 2)


def test_queries_are_averaged_and_padding_does_not_count() -> None:
    nan = math.nan
    values = np.array([[[[1.0]], [[0.0]], [[nan]]], [[[0.0]], [[0.0]], [[0.0]]]])
    positive = np.array([[True, False, False], [True, False, False]])
    first = math.exp(1) / (math.exp(1) + 1)
    assert contrastive_scores(values, positive, 1.0)[0, 0] == pytest.approx((first + 1 / 3) / 2)


@pytest.mark.parametrize("temperature", [1e-12, 1e12])
def test_no_temperature_overflows(temperature: float) -> None:
    values = stack([[0.9, -0.9]], [[0.1, 0.1]])
    scores = contrastive_scores(values, np.array([[True, False]]), temperature)
    assert np.isfinite(scores).all()
    expected = [1.0, 0.0] if temperature < 1 else [0.5, 0.5]
    assert scores[0] == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_must_be_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        contrastive_scores(stack([[1.0]], [[0.0]]), np.array([[True, False]]), temperature)


def test_best_heads_break_ties_by_layer_and_head() -> None:
    scores = np.array([[0.1, 0.5], [0.5, 0.9], [0.9, 0.5]])
    assert best_heads(scores, 4) == [Head(1, 1), Head(2, 0), Head(0, 1), Head(1, 0)]
    assert best_heads(scores, 2, max_layers=1) == [Head(0, 1), Head(0, 0)]
    for count in (0, 7):
        with pytest.raises(ValueError, match=f"cannot choose {count} heads of 6"):
            best_heads(scores, count)


def test_ranking_quality_by_hand() -> None:
    values = stack([[0.5, 0.0]], [[0.7, 0.0]], [[0.1, 0.9]])
    positive = np.array([[True, False, False]])
    one = ranking_quality(values, positive, [Head(0, 0)])
    assert (one.ndcg_at_10, one.mrr) == (pytest.approx(1 / math.log2(3)), 0.5)
    both = ranking_quality(values, positive)
    assert (both.ndcg_at_10, both.mrr) == (pytest.approx(0.5), pytest.approx(1 / 3))


def test_ties_count_against_the_positive() -> None:
    values = stack([[1.0]], [[1.0]])
    assert ranking_quality(values, np.array([[True, False]])).mrr == 0.5


def test_random_heads_are_the_same_for_the_same_seed() -> None:
    values = np.random.default_rng(0).normal(size=(5, 4, LAYERS, HEADS))
    positive = np.zeros((5, 4), bool)
    positive[:, 0] = True
    first = random_quality(values, positive, 2, seed=1)
    assert first == random_quality(values, positive, 2, seed=1)
    assert first != random_quality(values, positive, 2, seed=2)


class PlantedBackend:
    """Head 1-1 looks at document tokens that the query repeats; every other head at length."""

    def __init__(self, tokenizer: Any, *, broken: bool = False) -> None:
        self.tokenizer = tokenizer
        self.broken = broken
        self.model = ModelInfo(
            name="some/model", revision="abc", num_layers=LAYERS, layers_kept=LAYERS,
            num_heads=HEADS, max_model_len=512, dtype="float32", device="cpu", backend="planted",
        )  # fmt: skip

    def capture(
        self, requests: Sequence[CaptureRequest], *, progress: bool = False
    ) -> list[Capture]:
        return [self._one(request) for request in requests]

    def _one(self, request: CaptureRequest) -> Capture:
        ids, probe = request.prompt_token_ids, request.probe
        assert probe.heads == "all"
        assert probe.reduction == "documents"
        asked = set(ids[slice(*probe.query_span)])
        values = np.zeros((LAYERS * HEADS, len(probe.spans)), np.float32)
        for column, (start, end) in enumerate(probe.spans):
            values[:, column] = (end - start) / 512
            hits = sum(token in asked for token in ids[start:end])
            values[PLANTED.layer * HEADS + PLANTED.head, column] = hits / 512
        if self.broken:
            values[0, 0] = np.nan
        heads = tuple(Head(i, h) for i in range(LAYERS) for h in range(HEADS))
        return Capture(heads, values)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def backend(smollm2_dir: Path) -> PlantedBackend:
    from transformers import AutoTokenizer

    made = PlantedBackend(AutoTokenizer.from_pretrained(smollm2_dir))
    assert isinstance(made, CaptureBackend)
    return made


def labelled(count: int) -> list[LabelledQuery]:
    """Positives repeat the query's word and are short; negatives are longer and do not."""
    words = ("river", "mountain", "violin", "engine", "garden", "planet", "bridge", "castle")
    queries = []
    for number in range(count):
        word = words[number % len(words)]
        other = words[(number + 3) % len(words)]
        long = Document(f"A much longer text that tells of a {other}, a {other} and a {other}.")
        short = Document(f"the {word} is the {word}")
        noise = Document(f"nothing but some {other} stories were told here today")
        queries.append(LabelledQuery(f"q{number}", f"where is the {word}", (short,), (long, noise)))
    return queries


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"count": 0}, "number of heads must be at least 1, not 0"),
        ({"temperature": 0.0}, "temperature must be a number above 0, not 0.0"),
        ({"temperature": float("nan")}, "temperature must be a number above 0, not nan"),
        ({"max_layers": 0}, "max_layers must be at least 1, not 0"),
    ],
)
def test_a_selection_is_checked_when_it_is_made(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Selection(**setting)


@pytest.mark.parametrize("window", [1, 2, "all"])
def test_the_planted_head_is_found_in_every_window(backend: PlantedBackend, window: Any) -> None:
    attention = measure_attention(backend, labelled(24), window=window)
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
    first, second = (measure_attention(backend, queries, window=2, seed=7) for _ in range(2))
    assert np.array_equal(first.query, second.query)
    assert first.measurement == second.measurement
    other = measure_attention(backend, queries, window=1, seed=8)
    assert np.array_equal(other.query, measure_attention(backend, queries, window=1).query)


def test_progress_counts_prompts(backend: PlantedBackend) -> None:
    seen: list[tuple[int, int]] = []
    measure_attention(backend, labelled(4), on_progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (24, 24)


def test_what_was_measured_is_kept(backend: PlantedBackend, tmp_path: Path) -> None:
    attention = measure_attention(backend, labelled(3), data="toy")
    attention.save(tmp_path / "kept.npz")
    loaded = HeadAttention.load(tmp_path / "kept.npz")
    assert loaded.measurement == attention.measurement
    for name in ("query", "null", "tokens", "positive"):
        assert np.array_equal(getattr(loaded, name), getattr(attention, name))


def test_uncalibrated_attention_cannot_be_calibrated(
    backend: PlantedBackend, tmp_path: Path
) -> None:
    attention = measure_attention(backend, labelled(1), with_null=False)
    attention.save(tmp_path / "raw.npz")
    with pytest.raises(ValueError, match="without the null query"):
        HeadAttention.load(tmp_path / "raw.npz").values(calibrated=True, per_token=False)


@pytest.mark.parametrize("content", [b"not a zip", b""])
def test_a_foreign_npz_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="does not hold attention") as caught:
        HeadAttention.load(path)
    assert "pickle" not in str(caught.value)
    assert "detect-heads --save" in str(caught.value)
    np.savez(path, other=np.zeros(2))
    with pytest.raises(ValueError, match="does not hold attention"):
        HeadAttention.load(path)


def test_the_head_set_says_where_it_comes_from(backend: PlantedBackend, tmp_path: Path) -> None:
    attention = measure_attention(backend, labelled(20), data="toy", seed=3)
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
    assert head_set.found_with["calibrated"] == "true"
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


# ---------------------------------------------------------------- the data folder


def folder(
    path: Path, candidates: Sequence[object], queries: Sequence[object] = (), corpus: object = None
) -> Path:
    corpus = corpus or [
        {"_id": name, "title": name.upper(), "text": f"text of {name}"} for name in "abc"
    ]
    for name, rows in (
        ("corpus.jsonl", corpus),
        ("queries.jsonl", queries or [{"_id": "q", "text": "what?"}]),
        ("candidates.jsonl", candidates),
    ):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]  # type: ignore[union-attr]
        (path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def row(positives: object, negatives: object, query: str = "q") -> dict[str, object]:
    return {"query-id": query, "positives": positives, "negatives": negatives}


def test_a_folder_is_read(tmp_path: Path) -> None:
    (query,) = load_labelled_queries(folder(tmp_path, [row(["b"], ["a", "c", "a"])]))
    assert (query.query_id, query.query) == ("q", "what?")
    assert query.positives == (Document("text of b", "b", "B"),)
    assert [document.doc_id for document in query.negatives] == ["a", "c"]


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    data = folder(tmp_path, [row(["a"], ["b"]), row(["b"], ["a"]), "not json"])
    assert [q.positives[0].doc_id for q in load_labelled_queries(data, 2)] == ["a", "b"]
    with pytest.raises(DataError, match="limit must be at least 1"):
        load_labelled_queries(data, 0)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ([row(["a"], [])], "line 1: query 'q' has no negatives"),
        ([row([], ["a"])], "line 1: query 'q' has no positives"),
        ([row(["a"], "b")], "'negatives' must be a list"),
        ([row(["a"], [1])], "'negatives' must be a list"),
        ([{"query-id": "q", "positives": ["a"]}], "'negatives' must be a list"),
        ([row(["x"], ["a"])], "positive 'x' of query 'q' is not in corpus.jsonl"),
        ([row(["a"], ["x"])], "negative 'x' of query 'q' is not in corpus.jsonl"),
        ([row(["a"], ["b"]), row(["a"], ["a"])], "line 2: 'a' is both"),
        ([row(["a"], ["b"], query="other")], "query 'other' has no text"),
        ([row(["a"], ["b"]), "{"], "line 2 is not JSON"),
        ([["a"]], "line 1 is not a JSON object, but list"),
        ([], "is empty"),
    ],
)
def test_unusable_candidates_are_refused(
    tmp_path: Path, candidates: list[object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_labelled_queries(folder(tmp_path, candidates))


def test_blank_documents_are_refused(tmp_path: Path) -> None:
    corpus = [{"_id": "a", "text": " "}, {"_id": "b", "text": "b"}]
    with pytest.raises(DataError, match="positive 'a' of query 'q' has no text"):
        load_labelled_queries(folder(tmp_path, [row(["a"], ["b"])], corpus=corpus))


def test_documents_and_queries_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    candidates = [row(["1"], ["b"])]
    corpus = [{"_id": name, "text": "x"} for name in (1, "b", "unused", "unused")]
    (query,) = load_labelled_queries(folder(tmp_path, candidates, corpus=corpus))
    assert query.positives == (Document("x", "1"),)
    with pytest.raises(DataError, match="line 5: document '1' is there twice"):
        load_labelled_queries(folder(tmp_path, candidates, corpus=[*corpus, corpus[0]]))
    twice = [{"_id": "q", "text": "what?"}] * 2
    with pytest.raises(DataError, match="line 2: query 'q' is there twice"):
        load_labelled_queries(folder(tmp_path, candidates, twice, corpus))


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").touch()
    with pytest.raises(DataError, match=r"lacks queries\.jsonl, candidates\.jsonl"):
        load_labelled_queries(tmp_path)
