"""BM25's terms: words by language, pairs of characters where no spaces are written."""

from __future__ import annotations

import sys

import pytest

from core_rerank.errors import MissingDependencyError
from core_rerank.retrievers import BM25Retriever
from core_rerank.retrievers.analysis import LANGUAGES, Analyzer
from core_rerank.types import Document


@pytest.mark.parametrize(
    ("language", "text", "terms"),
    [
        ("auto", "The volcanoes were erupting!", ["volcano", "were", "erupt"]),
        ("en", "The volcanoes were erupting!", ["volcano", "were", "erupt"]),
        ("none", "The volcanoes were erupting!", ["the", "volcanoes", "were", "erupting"]),
        ("de", "Die Häuser und die Gärten", ["haus", "gart"]),
        ("fr", "les maisons continuaient", ["maison", "continu"]),
        ("ru", "Красивые дома", ["красив", "дом"]),
        ("tr", "IŞIKLAR", ["ışık"]),
        ("fi", "taloissa", ["talo"]),
    ],
)
def test_stop_words_and_stems_are_the_languages(language: str, text: str, terms: list[str]) -> None:
    assert Analyzer(language).terms(text) == terms


def test_auto_stems_only_where_the_script_tells_the_language() -> None:
    auto = Analyzer()
    # Cyrillic may be Russian, Serbian, Ukrainian...; Arabic letters Arabic, Persian, Urdu.
    assert auto.terms("Красивые дома") == ["красивые", "дома"]
    assert auto.terms("الكتب") == ["الكتب"]
    assert auto.terms("άνθρωποι") == Analyzer("el").terms("άνθρωποι") != ["άνθρωποι"]


def test_marks_do_not_cut_words() -> None:
    assert Analyzer("none").terms("हिन्दी में") == ["हिन्दी", "में"]
    assert Analyzer("none").terms("cafe\u0301") == ["café"]


@pytest.mark.parametrize("language", ["auto", "none", "de", "zh"])
def test_unspaced_scripts_become_pairs_in_every_language(language: str) -> None:
    analyzer = Analyzer(language)
    assert analyzer.terms("地方銀行") == ["地方", "方銀", "銀行"]
    assert analyzer.terms("전환시") == ["전환", "환시"]
    assert analyzer.terms("カタカナー") == ["カタ", "タカ", "カナ", "ナー"]
    # A vowel sign stays with its consonant.
    assert analyzer.terms("ที่นี่") == ["ที่นี่"]


def test_mixed_scripts_are_cut_where_the_script_changes() -> None:
    analyzer = Analyzer()
    assert analyzer.terms("갤럭시S24는 prices") == [
        "s24",
        "price",
        "갤럭",
        "럭시",
        "는",
    ]
    assert analyzer.terms("B2B거래") == ["b2b", "거래"]


def test_full_width_letters_and_half_width_kana_are_the_usual_ones() -> None:
    assert Analyzer().terms("ＡＢＣ ｶﾅ") == ["abc", "カナ"]
    decomposed = "한국"
    assert Analyzer().terms(decomposed) == ["한국"]


def test_one_character_alone_finds_longer_words_but_not_the_other_way_round() -> None:
    retriever = BM25Retriever()
    corpus = {"tea": Document("紅茶を飲む", "tea"), "red": Document("紅葉", "red")}
    retriever.index(corpus)
    assert list(retriever.search({"q": "茶"}, 5)["q"]) == ["tea"]
    assert list(retriever.search({"q": "紅茶"}, 5)["q"]) == ["tea"]
    assert list(retriever.search({"q": "紅"}, 5)["q"]) == ["red", "tea"]
    assert retriever.search({"q": "茶色"}, 5)["q"] == {}
    # Beside anything else that is known, a lone character counts only where it stands alone.
    assert list(retriever.search({"q": "紅葉 茶"}, 5)["q"]) == ["red"]


def test_nothing_to_count_is_no_terms() -> None:
    assert Analyzer().terms("") == Analyzer().terms(" ... \ud800 \n") == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_is_there(language: str) -> None:
    assert Analyzer(language).terms("2024") == ["2024"]


def test_an_unknown_language_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no language 'german': expected one of auto, none, ar,"):
        Analyzer("german")


@pytest.mark.parametrize("package", ["bm25s", "Stemmer", "regex"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'core-rerank\[bm25\]'"):
        Analyzer()
