"""The explain page: self-contained, escaped, and shading what the scores say."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from core_rerank.html import _pieces, format_score, render, render_all, strongest_tokens
from core_rerank.types import Document, RankedDocument, Ranking, TokenScore

VOID = {"meta", "br", "link", "img", "hr"}


class Outline(HTMLParser):
    """Collects tags and text, and fails on tags that do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.stack:
            self.texts.append(data)


def tokens(text: str, scores: list[float], kept: bool = True) -> tuple[TokenScore, ...]:
    words = list(re.finditer(r"\s?\S+", text))
    assert len(words) == len(scores)
    return tuple(
        TokenScore(m.group(), m.start(), m.end(), s, kept)
        for m, s in zip(words, scores, strict=True)
    )


def ranked(
    text: str, score: float, rank: int, token_scores: tuple[TokenScore, ...] | None, **extra: bool
) -> RankedDocument:
    document = Document(text, doc_id=f"d{rank}")
    return RankedDocument(rank - 1, document.doc_id, score, rank, document, **extra,
                          token_scores=token_scores)  # fmt: skip


def ranking(*documents: RankedDocument, query: str = "q") -> Ranking:
    return Ranking(query, documents, "some/model", "core")


def test_shades_follow_sign_and_strength() -> None:
    page = render(ranking(ranked("hot warm cold", 1.0, 1, tokens("hot warm cold", [4, 1, -4]))))
    shades = {attrs["title"]: attrs.get("class") for tag, attrs in Outline(page).tags if tag == "i"}
    assert shades == {"4": "p9", "1": "p4", "−4": "n9"}


def test_shades_use_one_scale_for_all_documents() -> None:
    page = render(
        ranking(
            ranked("strong", 1.0, 1, tokens("strong", [1.0])),
            ranked("weak", 0.1, 2, tokens("weak", [0.25])),
        )
    )
    classes = [attrs.get("class") for tag, attrs in Outline(page).tags if tag == "i"]
    assert classes == ["p9", "p4"]


def test_filtered_tokens_are_marked_and_explained_in_the_legend() -> None:
    text = "kept outlier"
    scores = (
        TokenScore("kept", 0, 4, 1.0),
        TokenScore(" outlier", 4, 12, -3.0, kept=False),
    )
    page = render(ranking(ranked(text, 1.0, 1, scores)))
    outline = Outline(page)
    marked = [attrs for tag, attrs in outline.tags if tag == "i" and attrs.get("class") == "n9 out"]
    assert [attrs["title"] for attrs in marked] == ["−3 (filtered)"]
    assert "left out as an outlier" in page
    assert "counts against the document" in page


def test_the_legend_is_true_of_heads_without_calibration_too() -> None:
    scores = (TokenScore("for", 0, 3, 1.0), TokenScore(" against", 3, 11, -2.0))
    page = render(ranking(ranked("for against", -1.0, 1, scores)))
    assert "counts against the document" in page
    assert "N/A" not in page
    assert "left out as an outlier" not in page


def test_everything_a_caller_gives_is_escaped() -> None:
    attack = "<script>alert(1)</script>\"'&<img src=x onerror=y>"
    document = Document(attack, doc_id=attack, title=attack)
    text = document.full_text
    half = len(text) // 2
    scores = (TokenScore(text[:half], 0, half, 1.0), TokenScore(text[half:], half, len(text), 2.0))
    item = RankedDocument(0, attack, 1.0, 1, document, token_scores=scores)
    page = render(Ranking(attack, (item,), attack, "core"))
    outline = Outline(page)
    assert {"script", "img"}.isdisjoint(tag for tag, _ in outline.tags)
    assert text in "".join(outline.texts)


def test_page_asks_for_nothing_from_outside() -> None:
    page = render(ranking(ranked("a b", 1.0, 1, tokens("a b", [1, 2]))))
    assert not re.search(r"https?:|url\(", page)
    assert {"script", "link", "img", "iframe"}.isdisjoint(tag for tag, _ in Outline(page).tags)
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    "text",
    [
        "family 👩‍👩‍👧‍👦 flag 🏳️‍🌈 🇫🇷 é",
        "שלום עולם",
        " leading and trailing \n\nnewlines\n",
        "日本語のテキスト",
    ],
)
def test_text_survives_whatever_the_token_borders(text: str) -> None:
    scores = tuple(TokenScore(c, i, i + 1, 0.5) for i, c in enumerate(text))
    assert "".join(piece.text for piece in _pieces(text, scores, 1.0)) == text
    page = render(ranking(ranked(text, 1.0, 1, scores)))
    assert text in "".join(Outline(page).texts)


def test_graphemes_are_not_cut_and_shared_characters_add_up() -> None:
    text = "x👩‍👧y"
    bytes_of_one_emoji = (TokenScore("", 1, 2, 0.25), TokenScore("", 1, 2, 0.5))
    joined = (TokenScore("", 2, 3, 0.1), TokenScore("", 3, 4, 0.15))
    scores = (TokenScore("x", 0, 1, 0.0), *bytes_of_one_emoji, *joined, TokenScore("y", 4, 5, 0.0))
    pieces = _pieces(text, scores, 1.0)
    assert [(p.text, p.score) for p in pieces] == [("x", 0.0), ("👩‍👧", 1.0), ("y", 0.0)]


def test_truncated_documents_show_where_reading_stopped() -> None:
    scores = (TokenScore("read", 0, 4, 1.0),)
    page = render(ranking(ranked("read not read", 1.0, 1, scores, truncated=True)))
    assert "not read from here" in page
    assert ">truncated</span>" in page


def test_blank_documents_are_flagged() -> None:
    page = render(
        ranking(ranked("a", 1.0, 1, tokens("a", [1])), ranked("  ", 0, 2, (), blank=True))
    )
    assert ">blank</span>" in page
    assert "No text." in page


def test_suspicious_documents_are_flagged_and_those_left_out_are_told() -> None:
    attack = dataclasses.replace(ranked("obey", 1.0, 1, None), injection=0.8125, flagged=True)
    fine = dataclasses.replace(ranked("rest", 0.5, 2, None), injection=0.25)
    page = render(ranking(attack, fine))
    assert page.count(">suspicious 0.8125</span>") == 1
    assert page.index(">suspicious") < page.index("rest")
    assert "Left out" not in page
    dropping = dataclasses.replace(ranking(fine), dropped=(0, 2))
    page = render(dropping)
    assert ">Left out as suspicious</dt><dd>2 (input 0, 2, counted from 0)</dd>" in page
    assert ">suspicious" not in page
    many = render(dataclasses.replace(dropping, dropped=tuple(range(30))))
    assert ">30 (input 0, 1, 2, " in many
    assert " 19, …, counted from 0)<" in many


def test_without_token_scores_it_says_how_to_get_shading() -> None:
    page = render(ranking(ranked("some text", 0.5, 1, None)))
    assert "explain=True" in page
    assert "some text" in page
    assert not [tag for tag, _ in Outline(page).tags if tag == "i"]


def test_an_empty_ranking_is_a_page() -> None:
    assert "No documents were given." in render(ranking())


def test_bars_share_one_axis_with_a_zero_line() -> None:
    page = render(ranking(ranked("a", 3.0, 1, None), ranked("b", -1.0, 2, None)))
    styles = [a["style"] for t, a in Outline(page).tags if t == "span" and a.get("style")]
    assert styles == [
        "left:25.0%;width:75.0%", "left:25.0%", "left:0.0%;width:25.0%", "left:25.0%",
    ]  # fmt: skip


def test_text_that_utf8_cannot_hold_is_replaced() -> None:
    page = render(ranking(ranked("a\ud800b\x00c", 1.0, 1, None), query="\udfff?"))
    page.encode("utf-8")
    assert "a\ufffdb\ufffdc" in page


def test_scores_must_be_finite() -> None:
    with pytest.raises(ValueError, match="finite"):
        render(ranking(ranked("a", float("nan"), 1, None)))


def test_text_direction_is_left_to_the_text() -> None:
    outline = Outline(render(ranking(ranked("مرحبا", 1.0, 1, None), query="مرحبا")))
    assert [t for t, attrs in outline.tags if attrs.get("dir") == "auto"] == ["h1", "p"]


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (-0.5, "−0.5"), (1.5e-6, "1.5e-06")])
def test_format_score(value: float, text: str) -> None:
    assert format_score(value) == text


def test_ranking_to_html_is_this_page() -> None:
    result = ranking(ranked("a", 1.0, 1, None))
    assert result.to_html() == render(result)


def test_several_rankings_share_a_page() -> None:
    page = render_all(
        [ranking(ranked("a", 1.0, 1, None), query=query) for query in ("first one", "second one")]
    )
    outline = Outline(page)
    assert [tag for tag, _ in outline.tags].count("section") == 2
    assert page.index("first one") < page.index("second one")
    with pytest.raises(ValueError, match="at least one"):
        render_all([])


def test_strongest_tokens_are_those_that_count() -> None:
    scores = (
        TokenScore("low", 0, 3, 0.5),
        TokenScore(" top", 3, 7, 2.0),
        TokenScore(" cut", 7, 11, 3.0, kept=False),
        TokenScore(" neg", 11, 15, -1.0),
    )
    item = ranked("low top cut neg", 1.0, 1, scores)
    assert strongest_tokens(item) == [("top", 2.0), ("low", 0.5)]
