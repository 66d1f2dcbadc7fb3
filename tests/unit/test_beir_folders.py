"""From a collection's name to its folder, with and without a network."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from core_rerank.errors import DataError
from core_rerank.eval.beir_folders import NAMES, find_collection


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for the network: beir's downloader gets this archive; the addresses it asked for."""
    asked: list[str] = []

    def download(url: str, save_path: str, chunk_size: int) -> None:
        asked.append(url)
        with zipfile.ZipFile(save_path, "w") as packed:
            packed.writestr("nfcorpus/corpus.jsonl", "{}")

    monkeypatch.setattr("beir.util.download_url", download)
    return asked


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_collection(tmp_path) == tmp_path
    (tmp_path / "home" / "nq").mkdir(parents=True)
    assert find_collection("nq", tmp_path / "home") == tmp_path / "home" / "nq"


def test_a_name_is_fetched_once_and_whole(tmp_path: Path, archive: list[str]) -> None:
    home = tmp_path / "home"
    folder = find_collection("nfcorpus", home)
    assert (folder / "corpus.jsonl").read_text() == "{}"
    assert find_collection("nfcorpus", home) == folder
    assert [url.rpartition("/")[2] for url in archive] == ["nfcorpus.zip"]
    assert [path.name for path in home.iterdir()] == ["nfcorpus"]


def test_without_a_network_the_expected_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from requests.exceptions import ConnectionError as NoNetwork

    def fail(*_: object) -> None:
        raise NoNetwork("no route")

    monkeypatch.setattr("beir.util.download_url", fail)
    with pytest.raises(DataError, match="no route") as raised:
        find_collection("scifact", tmp_path)
    assert str(tmp_path / "scifact") in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_an_answer_that_is_no_archive_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "beir.util.download_url", lambda url, path, _: Path(path).write_text("<html>404</html>")
    )
    with pytest.raises(DataError, match="BadZipFile"):
        find_collection("scifact", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is neither a folder nor a collection of BEIR"):
        find_collection("nowhere", tmp_path)
    assert "scifact" in NAMES
