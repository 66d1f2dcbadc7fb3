"""RerankBatches: reranks a Ray Dataset, on many machines, as a ``map_batches`` stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from core_rerank.errors import DataError
from core_rerank.inputs import check_tasks, check_top_n
from core_rerank.reranker import DEFAULT_MODEL, Reranker

if TYPE_CHECKING:
    import pyarrow

RANKING, SCORES = "ranking", "scores"


class RerankBatches:
    """For ``Dataset.map_batches``; every actor of the stage has an engine of its own.

        rows.map_batches(
            RerankBatches,
            fn_constructor_kwargs={"top_n": 10},
            batch_format="pyarrow",
            batch_size=32,
            concurrency=2,  # engines
            num_gpus=1,  # for each of them
        )

    A row has a query and its documents, a list of texts. It comes out with two columns more:
    ``ranking``, a list of places in its documents, best first, and ``scores``, theirs.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        query: str = "query",
        documents: str = "documents",
        top_n: int | None = None,
        **settings: Any,
    ) -> None:
        """Start the engine.

        Args:
            model: an alias, a Hugging Face id or a local folder, found where the actor runs.
            query: name of the column with the queries.
            documents: name of the column with their documents.
            top_n: how many to return for each query; all by default.
            **settings: further arguments of `Reranker`; they travel to the actor by pickle.
        """
        self._columns = query, documents
        self._top_n = check_top_n(top_n)
        self._reranker = Reranker(model, **settings)

    def __call__(self, rows: pyarrow.Table) -> pyarrow.Table:
        """One batch, ranked in one engine call.

        Raises:
            DataError: a column is missing, or one of the new ones is there already; or a row has
                no query, a blank one, or no list of texts.
        """
        import pyarrow

        if not isinstance(rows, pyarrow.Table):
            raise DataError(
                f"a batch is {type(rows).__name__}: give map_batches(..., batch_format='pyarrow')."
            )
        for name in self._columns:
            if name not in rows.column_names:
                raise DataError(f"there is no column {name!r}; there are {rows.column_names}.")
        for name in (RANKING, SCORES):
            if name in rows.column_names:
                raise DataError(
                    f"there is a column {name!r} already, which the result would have twice: drop "
                    "or rename it before."
                )
        queries, documents = (rows.column(name).to_pylist() for name in self._columns)
        tasks = list(zip(queries, documents, strict=True))
        try:
            # Only what this raises is a row's fault; the engine has TypeErrors of its own.
            check_tasks(tasks)
        except (TypeError, ValueError) as error:
            notes = ", ".join(getattr(error, "__notes__", []))
            raise DataError(f"a row of the batch cannot be ranked ({notes}): {error}") from error
        rankings = self._reranker.rerank_batch(tasks, top_n=self._top_n)
        places = [[item.index for item in ranking] for ranking in rankings]
        scores = [[item.score for item in ranking] for ranking in rankings]
        ranked = rows.append_column(RANKING, pyarrow.array(places, pyarrow.list_(pyarrow.int64())))
        return ranked.append_column(SCORES, pyarrow.array(scores, pyarrow.list_(pyarrow.float64())))
