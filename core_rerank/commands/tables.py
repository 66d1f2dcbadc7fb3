"""Rankings as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core_rerank.html import format_score, replace_surrogates, strongest_tokens
from core_rerank.types import RankedDocument, Ranking

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

BAR = 12
SNIPPET = 160
SNIPPET_BESIDE_TOKENS = 50
TOKENS_SHOWN = 5


def ranking_table(ranking: Ranking, *, mark: str | None = None) -> Table:
    """Rank, score, bar and document; the strongest tokens too where they are known.

    ``mark`` is the id of a document to tick.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    explained = any(item.token_scores for item in ranking)
    title = Text(_one_line(ranking.query), style="bold")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("Score", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=BAR)
    screened = any(item.injection is not None for item in ranking)
    if screened:
        table.add_column("Injection", no_wrap=True)
    table.add_column("Document", ratio=3 if explained else 1)
    if explained:
        table.add_column("Tokens that earned it", ratio=2)
    peak = max((abs(item.score) for item in ranking), default=0.0)
    for item in ranking:
        row = [
            Text(str(item.rank)),
            Text(format_score(item.score)),
            _bar(item.score, peak),
            *([_injection(item)] if screened else []),
            _document(
                item,
                length=SNIPPET_BESIDE_TOKENS if explained else SNIPPET,
                ticked=item.doc_id is not None and item.doc_id == mark,
            ),
        ]
        if explained:
            row.append(Text(" ".join(_words(item)[:TOKENS_SHOWN]), style="yellow"))
        table.add_row(*row)
    return table


def _injection(item: RankedDocument) -> Text:
    from rich.text import Text

    if item.injection is None:
        return Text("")
    told = f"{item.injection:.2f}"
    return Text(f"{told} flagged", style="bold red") if item.flagged else Text(told)


def _bar(score: float, peak: float) -> Text:
    from rich.text import Text

    length = round(BAR * abs(score) / peak) if peak else 0
    return Text("█" * max(length, 1 if score else 0), style="blue" if score < 0 else "dark_orange")


def _words(item: RankedDocument) -> list[str]:
    """The strongest tokens that are more than punctuation, each spelling once."""
    words = (_one_line(text) for text, _ in strongest_tokens(item))
    return list(dict.fromkeys(word for word in words if any(c.isalnum() for c in word)))


def _document(item: RankedDocument, *, length: int, ticked: bool) -> Text:
    from rich.text import Text

    document = item.document
    text = Text()
    if ticked:
        text.append("✓ ", style="green")
    name = document.title or ("" if item.doc_id is None else str(item.doc_id))
    if name:
        text.append(_one_line(name), style="bold")
        text.append("  ")
    for flag, shown in (("blank", item.blank), ("truncated", item.truncated)):
        if shown:
            text.append(f"[{flag}] ", style="magenta")
    snippet = _one_line(document.text)
    text.append(snippet[:length] + ("…" if len(snippet) > length else ""), style="dim")
    return text


def _one_line(text: str) -> str:
    """The text on one line, without characters that would steer the terminal."""
    words = " ".join(replace_surrogates(text).split())
    return "".join(c if c.isprintable() else " " for c in words)
