"""Dense retrieval: unit vectors of a sentence-transformers model, searched by faiss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Self

from core_rerank.errors import IndexFolderError
from core_rerank.inputs import check_count

from . import vectors
from .base import Run, versions
from .corpus import Corpus, CorpusPass, Fingerprint, searchable_text
from .encoder import DEFAULT_MODEL, Encoder, SentenceEncoder, unit_vectors
from .index_folder import Manifest, read_ids, read_index, read_manifest, write_ids, write_index
from .vectors import FaissSettings

_VECTORS = "vectors.faiss"
# The model sorts a chunk by length, so that batches pad little; the bar moves chunk by chunk.
_CHUNK = 256


class DenseRetriever:
    """Cosine similarity of a query's and a document's vector (title and text, as BEIR joins them).

    Documents and queries without text are left out. Documents with equal scores keep corpus order.
    """

    def __init__(
        self,
        model: str | Path | Encoder = DEFAULT_MODEL,
        *,
        revision: str | None = None,
        device: str | None = None,
        batch_size: int = 32,
        faiss: FaissSettings | None = None,
    ) -> None:
        """``model`` is a folder, a Hugging Face id, or an encoder of one's own.

        ``revision``, ``device`` and ``batch_size`` go to ``SentenceEncoder``.

        Raises:
            MissingDependencyError: sentence-transformers or faiss is not installed.
            ModelError: there is no such model.
        """
        vectors.import_faiss()
        self._encoder: Encoder = (
            SentenceEncoder(model, revision, device, batch_size)
            if isinstance(model, str | Path)
            else model
        )
        self._faiss = faiss or FaissSettings()
        self._doc_ids: list[str] = []
        self._index: Any = None
        self._corpus = Fingerprint(0, "")

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of ``FaissSettings``; the model is apart, in the manifest."""
        return asdict(self._faiss)

    @property
    def model(self) -> dict[str, str | None]:
        """The model's name, revision and hash."""
        return self._encoder.identity

    def index(self, corpus: Corpus, *, progress: bool = False) -> None:
        """Embed the corpus; replaces what was indexed before. Texts are not kept.

        In memory are the ids and the vectors, 4 bytes a number (with ivf, twice for a while).

        Raises:
            DataError, ValueError: the corpus is malformed, has an id twice, or has no text.
            NotFiniteError: the model gave a document NaN, infinity or zeros.
        """
        reading = CorpusPass(corpus, "dense: embedding", progress=progress)
        doc_ids: list[str] = []
        batches = self._embedded(iter(reading), doc_ids)
        index = vectors.build(batches, self._encoder.dimension, self._faiss)
        if not doc_ids:
            raise ValueError("none of the documents of the corpus has text.")
        self._doc_ids, self._index, self._corpus = doc_ids, index, reading.fingerprint()

    def search(self, queries: Mapping[str, str], depth: int, *, progress: bool = False) -> Run:
        """At most ``depth`` documents for each query, best first; every query is in the run.

        Scores are cosines, from -1 to 1. A query without text gets an empty result.
        """
        self._need_index("search")
        depth = check_count("depth", depth)
        from tqdm import tqdm

        run: Run = {query_id: {} for query_id in queries}
        asked = [query_id for query_id in queries if queries[query_id].strip()]
        with tqdm(total=len(asked), desc="dense", unit="query", disable=not progress) as bar:
            for start in range(0, len(asked), _CHUNK):
                part = asked[start : start + _CHUNK]
                encoded = self._encoder.encode_queries([queries[query_id] for query_id in part])
                found = vectors.search(self._index, unit_vectors(encoded, part), depth, self._faiss)
                for query_id, rows in zip(part, found, strict=True):
                    run[query_id] = {self._doc_ids[row]: score for row, score in rows}
                bar.update(len(part))
        return run

    def save(self, folder: str | Path) -> None:
        """Write the index, in faiss's own format, whole or not at all; replaces one that is there.

        Raises:
            IndexFolderError: something that is not an index is there.
        """
        self._need_index("save")
        built_by = versions("faiss-cpu", "sentence-transformers", "transformers", "torch")
        manifest = Manifest("dense", self.settings, self._corpus, built_by, self.model)
        write_index(folder, manifest, self._write)

    def restore(self, folder: str | Path, corpus: Corpus | None = None) -> None:
        """Take over an index that ``save`` wrote, in place of ``index``.

        Raises:
            IndexFolderError: it is damaged, of other settings, or of another corpus than
                ``corpus``, or another model embedded it.
        """
        manifest = read_index(folder, "dense", self.settings, corpus)
        built_with = manifest.model or {}
        if self.model["sha256"] != built_with.get("sha256"):
            raise IndexFolderError(
                f"{folder} was embedded by {built_with.get('model')!r}, not by "
                f"{self.model['model']!r} as it is loaded here: weights, prompts or modules "
                "differ. Load the model that built it, or index the corpus again."
            )
        self._index = vectors.import_faiss().read_index(str(Path(folder) / _VECTORS))
        self._doc_ids = read_ids(folder)
        self._corpus = manifest.corpus

    @classmethod
    def load(
        cls,
        folder: str | Path,
        corpus: Corpus | None = None,
        *,
        model: str | Path | Encoder | None = None,
        device: str | None = None,
        batch_size: int = 32,
    ) -> Self:
        """An index that ``save`` wrote, with its model, or the same one from elsewhere (``model``).

        Raises:
            IndexFolderError: see ``restore``.
        """
        manifest = read_manifest(folder, "dense")
        built_with = manifest.model or {}
        retriever = cls(
            built_with["model"] if model is None else model,
            revision=built_with["revision"],
            device=device,
            batch_size=batch_size,
            faiss=FaissSettings(**manifest.settings),
        )
        retriever.restore(folder, corpus)
        return retriever

    def _embedded(self, documents: Iterator[Any], doc_ids: list[str]) -> Iterator[Any]:
        """float32 [documents, dimension] of each chunk; fills ``doc_ids`` as it goes."""
        pairs = ((doc_id, searchable_text(document)) for doc_id, document in documents)
        filled = ((doc_id, text) for doc_id, text in pairs if text)
        while chunk := list(islice(filled, _CHUNK)):
            names = [doc_id for doc_id, _ in chunk]
            encoded = self._encoder.encode_documents([text for _, text in chunk])
            doc_ids += names
            yield unit_vectors(encoded, names)

    def _write(self, folder: Path) -> None:
        vectors.import_faiss().write_index(self._index, str(folder / _VECTORS))
        write_ids(folder, self._doc_ids)

    def _need_index(self, what: str) -> None:
        if self._index is None:
            raise RuntimeError(f"DenseRetriever.{what} was called before index(corpus).")
