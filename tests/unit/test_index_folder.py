"""Index folders: whole or not at all, checked file by file, and only for their own corpus."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from core_rerank.errors import IndexFolderError
from core_rerank.retrievers import BM25Retriever, load_retriever
from core_rerank.retrievers import index_folder as module
from core_rerank.retrievers.corpus import Fingerprint
from core_rerank.retrievers.index_folder import Manifest, write_index
from core_rerank.types import Document

CORPUS = {"a": Document("ash and lava", "a"), "b": Document("bread", "b", "Baking")}
OTHER = {**CORPUS, "b": Document("bread!", "b", "Baking")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved BM25 index."""
    retriever = BM25Retriever()
    retriever.index(CORPUS)
    retriever.save(tmp_path / "index")
    return tmp_path / "index"


def test_what_is_loaded_searches_as_what_was_saved(folder: Path) -> None:
    saved = BM25Retriever()
    saved.index(CORPUS)
    loaded = BM25Retriever.load(folder, CORPUS)
    queries = {"1": "lava", "2": "baking bread", "3": "nothing"}
    assert loaded.search(queries, 5) == saved.search(queries, 5)
    assert load_retriever(folder).search(queries, 5) == saved.search(queries, 5)


def test_the_manifest_says_what_it_was_built_from(folder: Path) -> None:
    content = json.loads((folder / "index.json").read_text())
    assert content["format"] == 1
    assert content["kind"] == "bm25"
    assert content["settings"] == {"k1": 0.9, "b": 0.4, "language": "auto"}
    assert content["corpus"]["documents"] == 2
    assert content["versions"]["bm25s"]
    assert set(content["files"]) == {
        path.name for path in folder.iterdir() if path.name != "index.json"
    }


def test_no_file_needs_pickle_to_be_read(folder: Path) -> None:
    assert {path.suffix for path in folder.iterdir()} == {".json", ".npy"}
    assert b"\x80\x04" not in b"".join(path.read_bytes()[:256] for path in folder.iterdir())


def test_an_index_of_another_corpus_is_refused(folder: Path) -> None:
    with pytest.raises(IndexFolderError, match=r"another corpus \(as many documents \(2\), but"):
        BM25Retriever.load(folder, OTHER)
    with pytest.raises(IndexFolderError, match=r"another corpus \(2 documents, not 1\)"):
        BM25Retriever.load(folder, {"a": CORPUS["a"]})


def test_an_index_of_other_settings_is_refused(folder: Path) -> None:
    with pytest.raises(IndexFolderError, match=r"k1=0\.9, .*, not k1=1\.2"):
        BM25Retriever(k1=1.2).restore(folder)


@pytest.mark.parametrize("name", ["doc_ids.json", "data.csc.index.npy", "vocab.index.json"])
def test_an_altered_or_missing_file_is_named(name: str, folder: Path) -> None:
    path = folder / name
    original = path.read_bytes()
    path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    with pytest.raises(IndexFolderError, match=f"{name} is not as it was written"):
        BM25Retriever.load(folder)
    path.write_bytes(original[:-1])
    with pytest.raises(IndexFolderError, match=f"{name} is not as it was written"):
        BM25Retriever.load(folder)
    path.unlink()
    with pytest.raises(IndexFolderError, match=f"{name} is missing"):
        BM25Retriever.load(folder)


def test_a_file_that_does_not_belong_there_is_named(folder: Path) -> None:
    (folder / "note.txt").touch()
    with pytest.raises(IndexFolderError, match=r"note\.txt does not belong there"):
        BM25Retriever.load(folder)


def test_manifests_that_are_missing_altered_or_too_new_are_refused(folder: Path) -> None:
    path = folder / "index.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format": 2}))
    with pytest.raises(IndexFolderError, match=r"has format 2; this version .* reads up to 1"):
        BM25Retriever.load(folder)
    path.write_text(json.dumps({**content, "settings": {**content["settings"], "k1": 1.5}}))
    with pytest.raises(IndexFolderError, match=r"index\.json was altered"):
        BM25Retriever.load(folder)
    path.write_text(json.dumps(content)[:-5])
    with pytest.raises(IndexFolderError, match=r"index\.json is damaged"):
        BM25Retriever.load(folder)
    path.write_text("[]")
    with pytest.raises(IndexFolderError, match="not the manifest of an index"):
        BM25Retriever.load(folder)
    path.unlink()
    with pytest.raises(IndexFolderError, match="no index, or one half-written"):
        BM25Retriever.load(folder)
    with pytest.raises(IndexFolderError, match=r"expected the folder of an index\. Give the one"):
        BM25Retriever.load(folder / "nowhere")


def test_an_index_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_index(tmp_path / "i", Manifest("dense", {}, Fingerprint(1, "0"), {}), lambda path: None)
    with pytest.raises(IndexFolderError, match="of kind 'dense', not 'bm25'"):
        BM25Retriever.load(tmp_path / "i")


def test_an_index_is_replaced_and_anything_else_is_not(folder: Path, tmp_path: Path) -> None:
    retriever = BM25Retriever()
    retriever.index(OTHER)
    retriever.save(folder)
    BM25Retriever.load(folder, OTHER)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(IndexFolderError, match="exists and is not an index"):
        retriever.save(mine)
    assert (mine / "thesis.txt").read_text() == "years of work"
    with pytest.raises(IndexFolderError, match="exists and is not an index"):
        retriever.save(mine / "thesis.txt")


def test_a_failed_write_leaves_the_old_index_and_nothing_else(folder: Path) -> None:
    def fail(path: Path) -> None:
        (path / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_index(folder, Manifest("bm25", {}, Fingerprint(1, "0"), {}), fail)
    BM25Retriever.load(folder, CORPUS)
    assert [path.name for path in folder.parent.iterdir()] == ["index"]


def test_a_failed_exchange_puts_the_old_index_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no"):
        write_index(folder, Manifest("bm25", {}, Fingerprint(1, "0"), {}), lambda path: None)
    BM25Retriever.load(folder, CORPUS)


def test_a_killed_write_leaves_no_index(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "from core_rerank.retrievers.corpus import Fingerprint\n"
        "from core_rerank.retrievers.index_folder import Manifest, write_index\n"
        "def die(path):\n"
        "    (path / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_index('index', Manifest('bm25', {}, Fingerprint(1, '0'), {}), die)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False)
    assert result.returncode == -signal.SIGKILL
    assert not os.path.lexists(tmp_path / "index")
    with pytest.raises(IndexFolderError, match="expected the folder of an index"):
        BM25Retriever.load(tmp_path / "index")


def test_the_corpus_is_checked_after_the_files(folder: Path) -> None:
    (folder / "doc_ids.json").write_text("[]")
    with pytest.raises(IndexFolderError, match="not as it was written"):
        BM25Retriever.load(folder, OTHER)
    assert module.is_index(folder)
