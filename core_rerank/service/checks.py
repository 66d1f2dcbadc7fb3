"""What is checked of requests in every format: the model asked for, and how many texts."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import BadRequest, Invalid, TooLarge, UnknownModel
from .settings import ServiceSettings
from .workload import Workload


def check_model(model: str | None, workload: Workload, settings: ServiceSettings) -> None:
    """UnknownModel unless ``model`` is None or a name of what is served."""
    served = {workload.reranker.model_id, *settings.served_names}
    if model is not None and model not in served:
        raise UnknownModel(
            f"model {model[:100]!r} is not served here; served: {', '.join(sorted(served))}. "
            "The server takes other names with --served-model-name.",
            field="model",
        )


def check_count(
    texts: Sequence[object],
    field: str,
    empty: type[BadRequest | Invalid],
    settings: ServiceSettings,
) -> None:
    """``empty`` where there are no ``texts``; TooLarge where there are more than the limit."""
    limit = settings.max_documents
    if not texts:
        raise empty(f"{field} is empty: give at least one.", field=field)
    if len(texts) > limit:
        raise TooLarge(
            f"{field} has {len(texts)} items, and the limit is {limit} (max_documents): "
            "split the request.",
            field=field,
        )
