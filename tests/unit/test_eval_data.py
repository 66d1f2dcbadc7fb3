"""Reading BEIR folders, and the line that an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_rerank.eval.data import DataError, load_beir
from core_rerank.types import Document

CORPUS = '{"_id": "d1", "title": "T", "text": "x"}\n\n{"_id": 2, "title": "", "text": "y"}\n'
QUERIES = '{"_id": "q1", "text": "one"}\n{"_id": "q2", "text": "two"}\n{"_id": "q9", "text": "-"}\n'
QRELS = "query-id\tcorpus-id\tscore\nq2\td1\t1\nq1\t2\t0\nq2\tgone\t2\n"


def _folder(root: Path, corpus: str = CORPUS, queries: str = QUERIES, qrels: str = QRELS) -> Path:
    folder = root / "tiny"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(corpus, encoding="utf-8")
    (folder / "queries.jsonl").write_text(queries, encoding="utf-8")
    (folder / "qrels" / "test.tsv").write_text(qrels, encoding="utf-8")
    return folder


def test_reads_documents_judged_queries_and_judgements(tmp_path: Path) -> None:
    data = load_beir(_folder(tmp_path))
    assert data.name == "tiny/test"
    assert data.corpus == {"d1": Document("x", "d1", "T"), "2": Document("y", "2", None)}
    assert list(data.queries.items()) == [("q2", "two"), ("q1", "one")]
    assert data.qrels == {"q2": {"d1": 1, "gone": 2}, "q1": {"2": 0}}


def test_first_takes_queries_in_the_order_of_the_judgements(tmp_path: Path) -> None:
    data = load_beir(_folder(tmp_path))
    assert data.first(None) is data
    assert data.first(99).queries == data.queries
    assert data.first(1).queries == {"q2": "two"}
    assert data.first(1).qrels == {"q2": {"d1": 1, "gone": 2}}
    for bad in (0, -1, True):
        with pytest.raises(ValueError, match="limit must be"):
            data.first(bad)


def test_qrels_need_no_header(tmp_path: Path) -> None:
    data = load_beir(_folder(tmp_path, qrels="q1\td1\t1\r\n"))
    assert data.qrels == {"q1": {"d1": 1}}


def test_a_pair_judged_twice_keeps_the_last_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"test\.tsv, line 2.*the last judgement counts"):
        data = load_beir(_folder(tmp_path, qrels="q1\td1\t1\nq1\td1\t3\n"))
    assert data.qrels == {"q1": {"d1": 3}}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"corpus": '{"_id": "d1", "text": "x"}\n{"_id": "d1"'}, r"corpus\.jsonl, line 2 is not"),
        ({"corpus": "[1]"}, "line 1 is not a JSON object"),
        ({"corpus": '{"_id": "d1"}'}, "line 1: 'text' must be text, but is None"),
        ({"corpus": '{"_id": "d1", "text": "x", "title": 3}'}, "'title' must be text"),
        ({"corpus": '{"_id": 1.5, "text": "x"}'}, "'_id' must be text or a whole number"),
        ({"corpus": CORPUS + CORPUS}, "line 4: document 'd1' is there twice"),
        ({"queries": QUERIES + QUERIES}, "line 4: query 'q1' is there twice"),
        (
            {"queries": '{"_id": "q1", "text": "one"}'},
            r"query 'q2' is judged in .*/qrels/test\.tsv but .*\(1 such\): add its text there",
        ),
        ({"qrels": "q1\td1\n"}, r"test\.tsv, line 1: expected query-id, corpus-id"),
        ({"qrels": "q1\td1\tyes\n"}, "line 1: expected"),
        (
            {"qrels": "query-id\tcorpus-id\tscore\n"},
            "holds no judgements: expected lines of query-id",
        ),
    ],
)
def test_errors_name_the_file_and_line(parts: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_beir(_folder(tmp_path, **parts))


def test_trecs_judgements_are_read_too(tmp_path: Path) -> None:
    folder = _folder(tmp_path, qrels="q1 0 d1 2\nq2\tQ0\td1\t0\n")
    assert load_beir(folder).qrels == {"q1": {"d1": 2}, "q2": {"d1": 0}}
    other = tmp_path / "judged.txt"
    other.write_text("q2 0 2 -1\n")
    data = load_beir(folder, qrels=other)
    assert (data.name, data.qrels) == ("tiny/judged.txt", {"q2": {"2": -1}})
    with pytest.raises(DataError, match=r"nowhere\.txt is missing: expected relevance judgements"):
        load_beir(folder, qrels=tmp_path / "nowhere.txt")
    other.write_bytes(b"q2 0 \xff 1\n")
    with pytest.raises(DataError, match=r"judged\.txt is not UTF-8 .*: save the file in UTF-8"):
        load_beir(folder, qrels=other)


def test_a_corpus_may_stay_on_disk(tmp_path: Path) -> None:
    data = load_beir(_folder(tmp_path), stream=True).first(1)
    assert data.corpus == {}
    assert [document.doc_id for document in data.documents] == ["d1", "2"]


def test_a_missing_split_or_folder_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    with pytest.raises(DataError, match=r"dev\.tsv is missing. Splits there are: test"):
        load_beir(folder, "dev")
    with pytest.raises(DataError, match=r"expected a BEIR folder\. Put the judgements there"):
        load_beir(tmp_path / "nowhere")
    (folder / "queries.jsonl").unlink()
    with pytest.raises(DataError, match=r"queries\.jsonl is missing"):
        load_beir(folder)
