"""Errors of ranking: each says what was given, what was expected and how to fix it.

CoreRerankError
├── HeadSetError (ValueError)            a head set is malformed, unknown, or another model's
├── ModelError                           no such model, or its weights cannot be had
├── PromptError (ValueError)             query, documents and instruction do not fit together
├── DataError (ValueError)               a data folder is incomplete or malformed
├── IndexFolderError (ValueError)        an index is damaged, or another corpus's or model's
├── NotFiniteError (ArithmeticError)     the engine returned NaN or infinity for a document
├── MissingDependencyError (ImportError) an extra is not installed; names the command
├── RemoteError                          a rerank server refused, failed or did not answer
└── ClosedError (hook_runtime's too)     a reranker was used after close()

Arguments of a wrong type or value raise plain TypeError and ValueError; what the engine refuses
raises ``hook_runtime.errors.HookRuntimeError``.
"""

from __future__ import annotations

from hook_runtime.errors import ClosedError as _RuntimeClosedError


class CoreRerankError(Exception):
    """Base of every error class of ``core_rerank``."""


class HeadSetError(CoreRerankError, ValueError):
    """A head set is malformed, is not to be found, or belongs to another model."""


class ModelError(CoreRerankError):
    """The model a user named does not exist, or its weights cannot be fetched or unpacked."""


class PromptError(CoreRerankError, ValueError):
    """A prompt cannot be built: it would not fit, or the tokenizer or template is unsuitable."""


class DataError(CoreRerankError, ValueError):
    """A data folder is incomplete or malformed; names the file and line."""


class IndexFolderError(CoreRerankError, ValueError):
    """A saved index cannot be used: half-written, altered, too new, or not for this corpus."""


class NotFiniteError(CoreRerankError, ArithmeticError):
    """The engine returned NaN or infinity; names the document it belongs to."""


class MissingDependencyError(CoreRerankError, ImportError):
    """An optional package is missing; names the command that installs it."""


class RemoteError(CoreRerankError):
    """A rerank server could not be reached, refused a request, or answered something else.

    ``status`` is the HTTP status, or None without an answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ClosedError(CoreRerankError, _RuntimeClosedError):
    """A reranker was used after ``close()``."""
