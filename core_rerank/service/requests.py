"""The bodies of requests: Cohere v1 and v2, Jina, TEI, vLLM's score, our explain and detect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from core_rerank.types import Document

from .errors import Invalid

_TITLED = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"text": {"type": "string"}, "title": {"type": "string"}},
        },
    ]
}


def _text_or_object(value: Any) -> str | dict[str, Any]:
    if isinstance(value, str):
        return _utf8(value)
    if isinstance(value, dict):
        return value
    kind = "null" if value is None else type(value).__name__
    raise ValueError(f"is {kind}: expected a string or an object with a text")


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no Unicode text") from None
    return text


Text = Annotated[StrictStr, AfterValidator(_utf8)]
DocumentIn = Annotated[Any, PlainValidator(_text_or_object), WithJsonSchema(_TITLED)]
TopN = Annotated[StrictInt, Field(ge=1, description="How many to return; all by default.")]
Screen = Annotated[
    Literal["flag", "drop"] | StrictBool,
    Field(
        description="Ours: score documents for orders planted in them. true or 'flag' marks "
        "suspicious ones, 'drop' leaves them out. Needs a service started with --screen."
    ),
]
Priority = Annotated[StrictInt, Field(ge=0, le=999, description="0 is the most urgent.")]


class _Fields(BaseModel):
    """Unknown fields are ignored: clients send what other services know, and null for defaults."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        if body.get("screen") and "screen" not in cls.model_fields:
            # Unlike other unknown fields: whoever asks relies on it.
            raise Invalid(
                "screen: this format cannot say which documents are suspicious. Send documents to "
                "/v1/rerank, /v2/rerank or /v1/explain.",
                field="screen",
            )
        needed = {
            name
            for name, field in cls.model_fields.items()
            if field.is_required() and field.validation_alias is None  # else under another name
        }
        return {name: v for name, v in body.items() if v is not None or name in needed}


class _Body(_Fields):
    """What all requests have that rank documents for one query."""

    query: Text
    priority: Priority = 0

    @field_validator("query")
    @classmethod
    def _has_text(cls, query: str) -> str:
        if not query.strip():
            raise ValueError("is blank: give a query with text")
        return query


class CohereV2Request(_Body):
    """``POST /v2/rerank``, as Cohere has it."""

    model: Text
    documents: list[DocumentIn]
    top_n: TopN | None = None
    max_tokens_per_doc: Annotated[StrictInt, Field(ge=1)] | None = None
    screen: Screen = False


class RerankRequest(_Body):
    """``/v1/rerank`` and ``/rerank`` with ``documents``: Cohere v1, Jina, vLLM and infinity.

    ``raw_scores`` gives sums of attention instead of numbers from 0 to 1.
    """

    documents: list[DocumentIn]
    model: Text | None = None
    top_n: Annotated[StrictInt, Field(ge=0, description="0 means all.")] | None = None
    return_documents: StrictBool = True
    rank_fields: list[Text] | None = None
    max_tokens_per_doc: Annotated[StrictInt, Field(ge=0, description="0 is off.")] | None = None
    raw_scores: StrictBool = False
    screen: Screen = False


class TEIRequest(_Body):
    """``/rerank`` with ``texts``, as text-embeddings-inference has it."""

    texts: list[Text]
    raw_scores: StrictBool = False
    return_text: StrictBool = False
    truncate: StrictBool | None = None
    truncation_direction: Literal["Right", "right"] = "Right"


class ExplainRequest(_Body):
    """``POST /v1/explain``: a ranking with what every token earned, ``by_head`` too if asked."""

    documents: list[DocumentIn]
    model: Text | None = None
    top_n: TopN | None = None
    max_tokens_per_doc: Annotated[StrictInt, Field(ge=1)] | None = None
    by_head: StrictBool = False
    screen: Screen = False


class DetectRequest(_Fields):
    """``POST /v1/detect``: whether data, read under a trusted instruction, holds orders."""

    instruction: Text
    data: Text | list[Text]
    model: Text | None = None
    threshold: (
        Annotated[
            StrictFloat | StrictInt,
            Field(
                ge=0, le=1, description="A score above it is flagged; by default the heads' own."
            ),
        ]
        | None
    ) = None
    priority: Priority = 0

    @field_validator("instruction")
    @classmethod
    def _has_text(cls, instruction: str) -> str:
        if not instruction.strip():
            raise ValueError("is blank: give the task that the model has")
        return instruction

    def texts(self) -> list[str]:
        """The data as a list."""
        return _listed(self.data)


class ScoreRequest(_Fields):
    """``/score``, as vLLM has it: 1:1, 1:N or N:N."""

    queries: Text | list[Text] = Field(validation_alias=AliasChoices("queries", "text_1", "data_1"))
    documents: Text | list[Text] = Field(
        validation_alias=AliasChoices("documents", "text_2", "items", "data_2")
    )
    model: Text | None = None
    use_activation: StrictBool | None = None
    priority: Priority = 0

    @model_validator(mode="after")
    def _lengths_fit(self) -> ScoreRequest:
        queries, documents = self.sides()
        if len(queries) not in (1, len(documents)):
            raise ValueError(
                f"has {len(queries)} queries (text_1) for {len(documents)} documents (text_2): "
                "give one query, or as many queries as documents"
            )
        if any(not query.strip() for query in queries):
            raise ValueError("has a blank query (text_1): give queries with text")
        return self

    def sides(self) -> tuple[list[str], list[str]]:
        """Queries and documents as lists."""
        return _listed(self.queries), _listed(self.documents)


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _shape(body: Any) -> str | None:
    if not isinstance(body, Mapping):
        return None
    given = [name for name in ("texts", "documents") if body.get(name) is not None]
    return None if len(given) == 2 else "".join(given) or "documents"


PlainRerankRequest = Annotated[
    Annotated[TEIRequest, Tag("texts")] | Annotated[RerankRequest, Tag("documents")],
    Discriminator(
        _shape,
        custom_error_type="texts_or_documents",
        custom_error_message="must be an object with either 'texts' (TEI) or 'documents' (Jina)",
    ),
]


def texts_of(documents: Sequence[Any], rank_fields: Sequence[str] | None = None) -> list[str]:
    """What the model reads of each document: the string, ``text``, or the fields named.

    Raises:
        Invalid: a document has no text to read.
    """
    return [_text(item, f"documents[{i}]", rank_fields) for i, item in enumerate(documents)]


def titled(documents: Sequence[Any]) -> list[Document]:
    """The documents with their titles, which the model reads before the text."""
    made = []
    for i, item in enumerate(documents):
        title = item.get("title") if isinstance(item, Mapping) else None
        if title is not None:
            title = _string(title, f"documents[{i}].title")
        made.append(Document(_text(item, f"documents[{i}]", None), title=title))
    return made


def _text(item: Any, place: str, rank_fields: Sequence[str] | None) -> str:
    if isinstance(item, str):
        return item
    if not rank_fields:
        if "text" not in item:
            raise Invalid(f"{place} has no 'text'; this model reads text alone.", field=place)
        return _string(item["text"], f"{place}.text")
    found = {name: item[name] for name in rank_fields if item.get(name) is not None}
    if not found:
        raise Invalid(
            f"{place} has none of the rank_fields ({', '.join(rank_fields)}): give it one, or "
            "leave rank_fields out to rank 'text'.",
            field=place,
        )
    texts = [_string(value, f"{place}.{name}") for name, value in found.items()]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{name}: {text}" for name, text in zip(found, texts, strict=True))


def _string(value: Any, place: str) -> str:
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise Invalid(f"{place} is {kind}: expected a string.", field=place)
    try:
        return _utf8(value)
    except ValueError as error:
        raise Invalid(f"{place} {error}.", field=place) from None
