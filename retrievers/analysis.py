"""From text to the terms that BM25 counts: words by language, character bigrams by script."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from core_rerank.errors import MissingDependencyError

#: ISO 639-1 code -> the Snowball stemmer's name. English has the older Porter stemmer, Anserini's.
SNOWBALL = {
    "ar": "arabic",
    "ca": "catalan",
    "da": "danish",
    "de": "german",
    "el": "greek",
    "en": "porter",
    "es": "spanish",
    "eu": "basque",
    "fi": "finnish",
    "fr": "french",
    "ga": "irish",
    "hi": "hindi",
    "hu": "hungarian",
    "hy": "armenian",
    "id": "indonesian",
    "it": "italian",
    "lt": "lithuanian",
    "ne": "nepali",
    "nl": "dutch",
    "no": "norwegian",
    "pt": "portuguese",
    "ro": "romanian",
    "ru": "russian",
    "sr": "serbian",
    "sv": "swedish",
    "ta": "tamil",
    "tr": "turkish",
}
#: Languages that are written in bigrams; their Latin words are treated as under "auto".
BIGRAM_LANGUAGES = ("ja", "ko", "zh")
LANGUAGES = ("auto", "none", *sorted([*SNOWBALL, *BIGRAM_LANGUAGES]))

# Scripts that Snowball knows one language of, and that hardly any other language is written in.
_SAFE_SCRIPTS = {"el": "Greek", "hy": "Armenian", "ta": "Tamil"}
_STOP_WORDS = {
    "da": "DANISH",
    "de": "GERMAN",
    "en": "EN",
    "es": "SPANISH",
    "fr": "FRENCH",
    "it": "ITALIAN",
    "nl": "DUTCH",
    "no": "NORWEGIAN",
    "pt": "PORTUGUESE",
    "ru": "RUSSIAN",
    "sv": "SWEDISH",
    "tr": "TURKISH",
}
# Written without spaces between words.
_UNSPACED = (
    r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}々ー"
)
_TURKISH_CAPITALS = str.maketrans({"I": "ı", "İ": "i"})


class Analyzer:
    """Turns text into terms.

    Runs of Chinese, Japanese, Korean, Thai, Lao, Khmer and Burmese characters become overlapping
    pairs of characters, in every language setting and also inside text of other scripts. All other
    words are lower-cased, lose the language's stop words and are stemmed.

    ``language`` is an ISO 639-1 code, ``"none"`` (no stop words, no stems) or ``"auto"``: Latin
    letters are taken for English, Greek, Armenian and Tamil ones for those languages, and words of
    every other script stay as they are, since their language cannot be told from it.
    """

    def __init__(self, language: str = "auto") -> None:
        """Raises ValueError for a language that is not in ``LANGUAGES``."""
        if language not in LANGUAGES:
            raise ValueError(
                f"no language {language!r}: expected one of {', '.join(LANGUAGES)} "
                "(ISO 639-1 codes)."
            )
        regex, stemmer = _packages()
        self.language = language
        self._runs = regex.compile(rf"(?V1)([{_UNSPACED}]\p{{M}}*)+|[\w\p{{M}}--[{_UNSPACED}]]+")
        self._unspaced = regex.compile(rf"[{_UNSPACED}]")
        self._clusters = regex.compile(r"\X")
        if language in ("auto", *BIGRAM_LANGUAGES):
            scripts = [("en", "Latin"), *_SAFE_SCRIPTS.items()]
            self._rules = [
                (regex.compile(rf"[\p{{{script}}}\p{{Common}}\p{{M}}]+"), _Words(code, stemmer))
                for code, script in scripts
            ]
        elif language == "none":
            self._rules = []
        else:
            self._rules = [(regex.compile(r"(?s).+"), _Words(language, stemmer))]

    def terms(self, text: str) -> list[str]:
        """The terms of a document or a query, with repetitions: words first, then pairs.

        A character that stands alone between other scripts, blanks or signs is a term by itself.
        """
        text = unicodedata.normalize("NFKC", text)
        if self.language == "tr":
            text = text.translate(_TURKISH_CAPITALS)
        terms: list[str] = []
        words: list[str] = []
        for match in self._runs.finditer(text.lower()):
            run = match.group()
            if self._unspaced.match(run):
                characters = self._clusters.findall(run)
                pairs = zip(characters, characters[1:], strict=False)
                terms += [first + second for first, second in pairs] or characters
            else:
                words.append(run)
        return self._stemmed(words) + terms

    def lone_characters(self, terms: Sequence[str]) -> list[str]:
        """Those of the terms that are one character of a script without spaces."""
        return [
            term
            for term in terms
            if self._unspaced.match(term) and len(self._clusters.findall(term)) == 1
        ]

    def _stemmed(self, words: list[str]) -> list[str]:
        for pattern, stem in self._rules:
            if all(pattern.fullmatch(word) for word in words):
                return stem(words)
        return [term for word in words for term in self._stemmed_word(word)]

    def _stemmed_word(self, word: str) -> list[str]:
        for pattern, stem in self._rules:
            if pattern.fullmatch(word):
                return stem([word])
        return [word]


class _Words:
    """Leaves out a language's stop words and stems the others."""

    def __init__(self, code: str, stemmer: Any) -> None:
        self._stop = frozenset(_stop_words(code))
        self._stem: Callable[[Sequence[str]], list[str]] = stemmer(SNOWBALL[code]).stemWords

    def __call__(self, words: Sequence[str]) -> list[str]:
        stop = self._stop
        return self._stem([word for word in words if word not in stop])


def _stop_words(code: str) -> tuple[str, ...]:
    from bm25s import stopwords

    return getattr(stopwords, f"STOPWORDS_{_STOP_WORDS[code]}") if code in _STOP_WORDS else ()


@contextmanager
def _without_jax() -> Iterator[None]:
    """Keep bm25s from JAX, unused here, which would take three quarters of a GPU's memory."""
    if "jax" in sys.modules:
        yield
        return
    sys.modules["jax"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["jax"]


def _packages() -> tuple[Any, Any]:
    """The regex module and Snowball's stemmer class; says how to install what is missing."""
    try:
        with _without_jax():
            import bm25s  # noqa: F401
        import regex
        import Stemmer
    except ImportError as error:
        raise MissingDependencyError(
            f"BM25 needs bm25s, PyStemmer and regex ({error}). "
            "To install them: pip install 'core-rerank[bm25]'."
        ) from None
    return regex, Stemmer.Stemmer
