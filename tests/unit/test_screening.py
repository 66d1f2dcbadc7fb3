"""Screening documents in the pass that ranks them, on a backend without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend, Make, shared_tokens
from typer.testing import CliRunner

from core_rerank import Head, InjectionHeads, Ranking
from core_rerank.cli import app
from core_rerank.errors import HeadSetError, NotFiniteError
from core_rerank.screening import document_masses
from hook_runtime.specs import Capture, CaptureRequest

DOCUMENTS = ["the cat sat on the mat", "bark of a cat, a cat, a cat", "", "cat and dog"]
SEES = Head(3, 1)


def heads(**changes: Any) -> InjectionHeads:
    settings: dict[str, Any] = {
        "model": "test/fake",
        "num_layers": 4,
        "num_heads": 3,
        "heads": ["3-1", "1-2"],
        "weights": [10.0, 0.5],
        "intercept": -8.0,
        "threshold": 0.5,
        "method": "signed",
        "task": "document",
    }
    return InjectionHeads.model_validate(settings | changes)


@pytest.fixture
def backend(tokenizer: Any) -> FakeBackend:
    """Head 3-1's last token looks at a document if it begins with "bark", else at other things."""
    bark = tokenizer.encode(" bark")[0]

    def attention(request: CaptureRequest, head: Head) -> np.ndarray:
        if request.probe.reduction == "tokens":
            return shared_tokens(request, head)
        first, *_ = request.probe.spans
        orders = request.prompt_token_ids[first[0]] == bark
        return np.array([0.5 if orders and head == SEES else 0.1, 0.1])

    return FakeBackend(tokenizer, attention=attention)


def ranked(make: Make, **settings: Any) -> Ranking:
    return make(**settings).rerank("cat", DOCUMENTS, doc_ids=["a", "b", "blank", "d"])


def plain(ranking: Ranking) -> list[tuple[Any, ...]]:
    return [(d.doc_id, d.score, d.rank, d.blank, d.truncated) for d in ranking]


@pytest.mark.parametrize("calibrate", [True, False])
def test_ranking_is_the_same_and_its_passes_too(
    make: Make, backend: FakeBackend, calibrate: bool
) -> None:
    without = ranked(make, calibrate=calibrate)
    (before,) = backend.batches
    backend.batches.clear()
    screened = ranked(make, calibrate=calibrate, screen=True, screen_heads=heads())
    (batch,) = backend.batches  # the screen's requests are in the ranking's own batch
    assert [r for r in batch if r.probe.reduction == "tokens"] == before
    assert plain(screened) == plain(without)
    assert [(d.injection, d.flagged) for d in without] == [(None, False)] * 4
    flags = {d.doc_id: d.flagged for d in screened}
    assert flags == {"a": False, "b": True, "blank": False, "d": False}
    assert {d.doc_id for d in screened if d.injection is None} == {"blank"}
    assert screened.dropped == ()
    assert screened.prompt_tokens == without.prompt_tokens


def test_heads_are_told_apart_of_a_screened_document_too(make: Make, backend: FakeBackend) -> None:
    reranker = make(screen=True, screen_heads=heads())
    (best, *_) = reranker.rerank("cat", DOCUMENTS, explain="heads")
    assert best.head_scores is not None
    assert list(best.head_scores) == list(map(str, reranker.heads or ()))
    assert best.injection is not None


def test_the_whole_prompts_last_token_looks_at_document_and_instruction(
    make: Make, backend: FakeBackend, tokenizer: Any
) -> None:
    ranking = ranked(make, calibrate=False, screen="flag", screen_heads=heads())
    (batch,) = backend.batches
    pairs = list(zip(batch[::2], batch[1::2], strict=True))
    assert len(pairs) == 3
    for (asked, screening), text in zip(pairs, [d for d in DOCUMENTS if d], strict=True):
        ids, probe = screening.prompt_token_ids, screening.probe
        assert ids[: len(asked.prompt_token_ids)] == asked.prompt_token_ids
        assert tokenizer.decode(ids).endswith("assistant")
        assert probe.query_span == (len(ids) - 1, len(ids))
        assert probe.heads == heads().heads
        said = [tokenizer.decode(ids[a:b]).strip() for a, b in probe.spans]
        assert said[0] == text
        assert said[1].startswith("Please find information")
        assert said[1].endswith("Query:")
    drawn = {"b": (5 / 6, 0.5), "a": (0.5, 0.5)}
    for doc_id, (first, second) in drawn.items():
        (item,) = [d for d in ranking if d.doc_id == doc_id]
        logit = -8.0 + 10.0 * first + 0.5 * second
        assert item.injection == pytest.approx(1 / (1 + np.exp(-logit)))


def test_dropped_documents_are_in_no_place(make: Make) -> None:
    without = ranked(make)
    ranking = ranked(make, screen="drop", screen_heads=heads())
    assert [d.doc_id for d in ranking] == [d.doc_id for d in without if d.doc_id != "b"]
    assert [d.rank for d in ranking] == [1, 2, 3]
    assert ranking.dropped == (1,)
    assert ranking.to_dict()["dropped"] == [1]
    best = make(screen="drop", screen_heads=heads()).rerank("cat", DOCUMENTS, top_n=2)
    assert [d.index for d in best] == [d.index for d in ranking][:2]


def test_json_holds_the_screen_only_where_there_was_one(make: Make) -> None:
    screened = ranked(make, screen=True, screen_heads=heads()).to_dict()
    assert {d["flagged"] for d in screened["documents"] if "flagged" in d} == {True, False}
    without = ranked(make).to_dict()
    assert not any("flagged" in d or "injection" in d for d in without["documents"])
    assert "dropped" not in without


def test_heads_are_read_from_a_file(make: Make, tmp_path: Path) -> None:
    heads().to_yaml(tmp_path / "screen.yaml")
    reranker = make(screen=True, screen_heads=tmp_path / "screen.yaml")
    assert reranker.screen is not None
    assert reranker.screen.heads == heads()


def test_refusals(make: Make, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="screen must be"):
        make(screen="delete")
    with pytest.raises(ValueError, match="give screen=True too"):
        make(screen_heads=heads())
    with pytest.raises(ValueError, match="window=1"):
        make(screen=True, screen_heads=heads(), window="all")
    with pytest.raises(HeadSetError, match="no heads that screen documents"):
        make(screen=True)
    with pytest.raises(HeadSetError, match="for the task 'instruction'"):
        make(screen=True, screen_heads=heads(task="instruction"))
    with pytest.raises(HeadSetError, match="is for other/model"):
        make(screen=True, screen_heads=heads(model="other/model"))


@pytest.mark.parametrize(
    ("drawn", "said"), [(0.0, "a head pays no attention"), (np.nan, "attention that is not finite")]
)
def test_what_cannot_be_screened_is_named(
    make: Make, tokenizer: Any, drawn: float, said: str
) -> None:
    bark = tokenizer.encode(" bark")[0]

    def attention(request: CaptureRequest, head: Head) -> np.ndarray:
        values = np.full(request.probe.num_columns, 0.1)
        first, *_ = request.probe.spans
        barks = request.prompt_token_ids[first[0]] == bark
        return values * 0 + drawn if barks and request.probe.reduction == "documents" else values

    reranker = make(
        backend=FakeBackend(tokenizer, attention=attention), screen=True, screen_heads=heads()
    )
    with pytest.raises(NotFiniteError, match=rf"^document 1 \(id 'b'\) .*screened: .*{said}"):
        ranked(lambda **_: reranker)
    with pytest.raises(NotFiniteError, match=r"^document 1 cannot be screened") as caught:
        reranker.rerank_batch([("cat", ["a cat"]), ("cat", DOCUMENTS)])
    assert caught.value.__notes__ == ["in task 1 of the batch"]
    assert len(reranker.rerank("cat", DOCUMENTS[:1])) == 1


def test_masses_of_several_documents() -> None:
    capture = Capture((Head(0, 0), Head(0, 1)), np.array([[1, 2, 12], [3, 4, 30]], np.float32))
    masses = document_masses(capture)
    assert masses.tolist() == [[[12.0, 1.0], [12.0, 2.0]], [[30.0, 3.0], [30.0, 4.0]]]


@pytest.mark.parametrize("calibrate", [True, False])
def test_other_strategies_screen_too(make: Make, calibrate: bool) -> None:
    ranking = make(
        heads=None, strategy="icr", calibrate=calibrate, screen=True, screen_heads=heads()
    ).rerank("cat", DOCUMENTS)
    assert [d.index for d in ranking if d.flagged] == [1]


@pytest.fixture
def command(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[..., Any], list[Any]]:
    """``rerank`` of the documents on the fake backend, and the options it started with."""
    started: list[Any] = []

    @contextmanager
    def running(_model: str, _backend: str, options: Any, _verbose: bool) -> Iterator[Any]:
        started.append(options)
        kept = {name: options[name] for name in ("screen", "screen_heads") if name in options}
        yield make(**kept)

    monkeypatch.setattr("core_rerank.commands.rerank.running", running)
    heads().to_yaml(tmp_path / "screen.yaml")
    (tmp_path / "documents.txt").write_text("\n".join(d for d in DOCUMENTS if d))
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    return lambda *more: run(app, ["rerank", "cat", "documents.txt", *more]), started


def test_command(command: tuple[Callable[..., Any], list[Any]]) -> None:
    run, started = command
    screen = ["--screen", "--screen-heads", "screen.yaml"]
    flagged = run(*screen)
    assert flagged.exit_code == 0, flagged.stderr
    assert started[-1]["screen"] == "flag"
    (line,) = [line for line in flagged.stdout.splitlines() if "flagged" in line]
    assert "bark" in line
    assert "Injection" in flagged.stdout
    dropped = run(*screen, "--drop", "--json")
    found = json.loads(dropped.stdout)
    assert found["dropped"] == [1]
    assert len(found["documents"]) == 2
    assert "1 suspicious documents were left out" in dropped.stderr
    assert "Injection" not in run().stdout
    refused = run("--drop")
    assert refused.exit_code == 2
    assert "with --screen only" in refused.stderr


def test_a_cross_encoder_scores_every_pair_so_nothing_may_be_dropped(make: Make) -> None:
    from core_rerank.integrations.cross_encoder import CoreCrossEncoder

    with pytest.raises(ValueError, match="screen='flag'"):
        CoreCrossEncoder(make(screen="drop", screen_heads=heads()))
    screened = CoreCrossEncoder(make(screen="flag", screen_heads=heads()))
    plain_scores = CoreCrossEncoder(make()).predict([("cat", d) for d in DOCUMENTS])
    assert list(screened.predict([("cat", d) for d in DOCUMENTS])) == list(plain_scores)
