"""A ranking as one self-contained page: every document's tokens shaded by their attention."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .types import RankedDocument, Ranking, TokenScore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Template

SHADES = 9
STRONGEST_TOKENS = 6
_ZERO_WIDTH_JOINER = "\u200d"
_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a document's text that is shaded alike: usually one token.

    ``shade`` is a CSS class (``p1``..``p9`` positive, ``n1``..``n9`` negative, empty for about
    zero); ``score`` is None for text that no token covers.
    """

    text: str
    score: float | None = None
    shade: str = ""
    kept: bool = True


@dataclass(frozen=True, slots=True)
class _Card:
    item: RankedDocument
    name: str
    doc_id: str
    pieces: tuple[Piece, ...]
    unread: str
    strongest: tuple[Piece, ...]
    bar_left: float
    bar_width: float


@dataclass(frozen=True, slots=True)
class _Section:
    query: str
    model: str
    strategy: str
    cards: tuple[_Card, ...]
    dropped: tuple[int, ...]
    zero: float
    explained: bool
    filtered: bool
    negative: bool
    peak: float


def render(ranking: Ranking) -> str:
    """The page for one ranking; see `render_all`."""
    return render_all([ranking])


def render_all(rankings: Sequence[Ranking]) -> str:
    """One page for several rankings: HTML that needs no network, no script and no other file.

    Tokens are shaded where a ranking carries token scores (``explain=True``). Every text is
    escaped. The shade grows with the square root of a token's share of the strongest token that
    counts in its ranking, so shades compare across the documents of one ranking.

    Raises:
        ValueError: there is no ranking, or a score is not a finite number.
    """
    if not rankings:
        raise ValueError("a page needs at least one ranking.")
    sections = [_section(ranking) for ranking in rankings]
    return _template().render(sections=sections, shades=range(SHADES, 0, -1)) + "\n"


def _section(ranking: Ranking) -> _Section:
    scores = [item.score for item in ranking]
    if not all(map(math.isfinite, scores)):
        raise ValueError(f"cannot draw scores that are not finite numbers: {scores}.")
    kept = (t for item in ranking for t in item.token_scores or () if t.kept)
    peak = max((abs(token.score) for token in kept), default=0.0)
    low, high = min([0.0, *scores]), max([0.0, *scores])
    cards = tuple(_card(item, peak, low, high) for item in ranking)
    return _Section(
        query=_clean(ranking.query),
        model=_clean(ranking.model),
        strategy=ranking.strategy,
        cards=cards,
        dropped=ranking.dropped,
        zero=_percent(-low, high - low),
        explained=any(item.token_scores is not None for item in ranking),
        filtered=any(not piece.kept for card in cards for piece in card.pieces),
        negative=any(piece.shade.startswith("n") for card in cards for piece in card.pieces),
        peak=peak,
    )


@lru_cache(maxsize=1)
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("core_rerank"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["score"] = format_score
    return environment.get_template("ranking.html.j2")


def format_score(value: float) -> str:
    """A score in four significant digits with a true minus sign: ``0.01234``, ``−1.5e-06``."""
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}", 1) if value < 0 else f"{value:.4g}"


def replace_surrogates(text: str) -> str:
    """The text with U+FFFD for every lone surrogate, which JSON may hold and UTF-8 may not."""
    return _SURROGATES.sub("\ufffd", text)


def strongest_tokens(item: RankedDocument) -> list[tuple[str, float]]:
    """The tokens that earned a document its score, highest first: (text, score).

    Only tokens that count (positive and kept); characters that several tokens share appear once,
    with the sum. Empty without token scores.
    """
    pieces = _pieces(item.document.full_text, item.token_scores or (), 0.0)
    return [(_clean(piece.text), piece.score or 0.0) for piece in _strongest(pieces)]


def _card(item: RankedDocument, peak: float, low: float, high: float) -> _Card:
    document = item.document
    doc_id = "" if item.doc_id is None else str(item.doc_id)
    text = document.full_text
    pieces = _pieces(text, item.token_scores or (), peak)
    read = sum(len(piece.text) for piece in pieces)
    unread = text[read:]
    pieces = [Piece(_clean(p.text), p.score, p.shade, p.kept) for p in pieces]
    strongest = _strongest(pieces)
    return _Card(
        item=item,
        name=_clean(document.title or (doc_id or f"Document {item.index + 1}")),
        doc_id=_clean(doc_id),
        pieces=tuple(pieces),
        unread=_clean(unread),
        strongest=tuple(strongest[:STRONGEST_TOKENS]),
        bar_left=_percent(min(item.score, 0.0) - low, high - low),
        bar_width=_percent(abs(item.score), high - low),
    )


def _pieces(text: str, tokens: Sequence[TokenScore], peak: float) -> list[Piece]:
    """Cut ``text`` at token borders, never inside a grapheme such as an emoji sequence.

    Tokens that share characters (the bytes of one emoji) become one piece whose score is their
    sum; blanks before a word stay unshaded. Text after the last token is left out: the model
    did not read it.
    """
    spans: list[tuple[int, int, float, bool]] = []
    for token in sorted(tokens, key=lambda t: (t.start, t.end)):
        start, end = max(token.start, 0), min(token.end, len(text))
        if end <= start and not spans:
            continue
        if spans and (start < spans[-1][1] or end <= start or _joined(text, start)):
            left, right, score, kept = spans[-1]
            spans[-1] = (left, max(right, end), score + token.score, kept or token.kept)
        else:
            spans.append((start, end, token.score, token.kept))
    pieces: list[Piece] = []
    cursor = 0
    for start, end, score, kept in spans:
        blanks = len(text[start:end]) - len(text[start:end].lstrip())
        if start + blanks < end:
            start += blanks
        if cursor < start:
            pieces.append(Piece(text[cursor:start]))
        pieces.append(Piece(text[start:end], score, _shade(score, peak), kept))
        cursor = end
    return pieces


def _strongest(pieces: Sequence[Piece]) -> list[Piece]:
    counted = [p for p in pieces if p.kept and (p.score or 0.0) > 0 and p.text.strip()]
    return sorted(counted, key=lambda p: -(p.score or 0.0))


def _joined(text: str, start: int) -> bool:
    """Whether a browser draws ``text[start]`` together with the character before it."""
    if not 0 < start < len(text):
        return False
    char, before = text[start], text[start - 1]
    return (
        char == _ZERO_WIDTH_JOINER
        or before == _ZERO_WIDTH_JOINER
        or unicodedata.category(char) in ("Mn", "Me", "Mc")
        or "\U0001f3fb" <= char <= "\U0001f3ff"
        or (_regional(char) and _regional(before))
    )


def _regional(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def _shade(score: float, peak: float) -> str:
    if peak <= 0:
        return ""
    level = round(math.sqrt(min(abs(score) / peak, 1.0)) * SHADES)
    return f"{'p' if score > 0 else 'n'}{level}" if level else ""


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 3) if whole > 0 else 0.0


def _clean(text: str) -> str:
    """Replace what an HTML file cannot hold: lone surrogates and control characters."""
    return _CONTROLS.sub("\ufffd", replace_surrogates(text))
