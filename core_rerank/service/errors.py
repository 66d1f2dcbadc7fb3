"""What a request is refused or fails with: a status, a sentence, and what is at fault."""

from __future__ import annotations


class ServiceError(Exception):
    """Answered with ``status``; ``error_type`` is TEI's name for the kind of error.

    ``field`` is the part of the request at fault; ``retry_after_s`` when to come back.
    """

    status = 500
    error_type = "Backend"

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class BadRequest(ServiceError):
    """The request cannot be read at all, or is empty."""

    status = 400
    error_type = "Validation"


class EmptyRequest(BadRequest):
    """No documents, where the format wants 400."""

    error_type = "Empty"


class Invalid(ServiceError):
    """A field has a wrong type or value."""

    status = 422
    error_type = "Validation"


class UnknownModel(ServiceError):
    """The request names a model that is not served here."""

    status = 404
    error_type = "Validation"


class UnknownProgram(ServiceError):
    """The request names a program that is not loaded."""

    status = 404
    error_type = "Validation"


class NotServed(ServiceError):
    """What is asked for was not turned on when the service started."""

    status = 404
    error_type = "Validation"


class TooLarge(ServiceError):
    """A limit is exceeded; the message names it."""

    status = 413
    error_type = "Validation"


class NotJSON(ServiceError):
    """The body is said to be something else, or nothing is said of it."""

    status = 415
    error_type = "Validation"


class TooSlow(ServiceError):
    """The body did not arrive in time."""

    status = 408
    error_type = "Validation"


class NoKey(ServiceError):
    """The API key is missing or wrong."""

    status = 401
    error_type = "Validation"


class QueueFull(ServiceError):
    """As many requests wait as may."""

    status = 429
    error_type = "Overloaded"


class Unavailable(ServiceError):
    """The service stops, or its engine is gone."""

    status = 503
    error_type = "Unhealthy"


class DeadlineExceeded(ServiceError):
    """The request took longer than it may; its work was dropped."""

    status = 504
    error_type = "Overloaded"


class ClientGone(ServiceError):
    """The caller closed the connection; nobody reads this."""

    status = 499
    error_type = "Backend"


class InferenceFailed(ServiceError):
    """The engine failed on this request."""

    status = 500
    error_type = "Backend"


class TEIInferenceFailed(InferenceFailed):
    """As TEI answers it."""

    status = 424
