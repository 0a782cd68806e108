"""Failures of the gateway with an answer, and those that workers' codes stand for."""

from __future__ import annotations

from collections.abc import Mapping

from store.errors import ApiError, Conflict, Invalid, NotFound
from web.error_answers import find_api_error, to_api_error
from web.errors import InternalError, Overloaded, TooMany
from workers.wire.client import WorkerFailed
from workers.wire.protocol import ErrorCode


class InvalidRequest(Invalid):
    """Request for something impossible or unsupported."""

    code = None


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer that together exceed the model's context."""

    code = "context_length_exceeded"


class TooManyRefusals(TooMany):
    """Too many refused requests of the tenant, or bytes of them, that had been read."""

    code = "too_many_refusals"

    def __init__(self, frees_in_s: float) -> None:
        super().__init__(
            "Too many requests of this tenant, or too many bytes of them, were refused in the last "
            "minutes. Correct what their answers name, and wait as long as 'retry-after' says "
            "before you send a request again."
        )
        self.retry_after_s = frees_in_s


class ModelNotFound(NotFound):
    """Model that the tenant does not have. The message is the same if another tenant has it."""

    code = "model_not_found"

    def __init__(self, name: str) -> None:
        shown = name if len(name) <= 128 else name[:128] + "..."
        super().__init__(
            f"The model '{shown}' does not exist or you do not have access to it.", param="model"
        )


class TemplateNotApproved(Conflict):
    """Adapter version with a chat template that no admin has approved."""

    code = "template_not_approved"


class CatalogStale(Overloaded):
    """Catalog that may be too old to use."""

    code = "catalog_stale"
    retry_after_s = 5
    is_ours = True


class QuotaExceeded(ApiError):
    """Limit of the tenant or key without room for the request."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str,
        code: str,
        frees_in_s: float | None,
        is_worth_a_retry: bool,
    ) -> None:
        """`frees_in_s` is None if a request like this never fits."""
        super().__init__(message, code, param)
        self.retry_after_s = frees_in_s
        self.should_retry = None if is_worth_a_retry else False


class QuotaUnavailable(Overloaded):
    """Limit that cannot be checked."""

    code = "quota_unavailable"
    is_ours = True


class ModelUnavailable(ApiError):
    """Base model that is unloaded or could not be loaded."""

    status = 503
    code = "model_unavailable"
    retry_after_s = 5
    is_ours = True


class TokenizerUnavailable(ModelUnavailable):
    """Tokenizer of a base model that could not be loaded."""

    retry_after_s = 1


class AdapterUnavailable(ApiError):
    """Adapter that a worker cannot load now."""

    status = 503
    code = "adapter_unavailable"
    retry_after_s = 2
    is_ours = True


class NoWorker(Overloaded):
    """Model that no ready worker has."""

    code = "no_worker"
    retry_after_s = 2
    is_ours = True


class ModelUnsatisfiable(NoWorker):
    """Model that no worker can serve with its settings."""

    code = "model_unsatisfiable"
    retry_after_s = None
    should_retry = False


class Draining(Overloaded):
    """Worker that is being stopped."""

    code = "draining"
    is_ours = True


class WorkerLost(Overloaded):
    """Worker whose connection was lost."""

    code = "worker_lost"
    is_ours = True


class WorkerFault(ApiError):
    """Unforeseen failure of a worker."""


class NumbersInvalid(ApiError):
    """Computed numbers that are not finite."""

    code = "logits_nan"
    should_retry = False


class PoisonRequest(ApiError):
    """Request that is presumed to have crashed the workers that ran it."""

    code = "poison_request"
    should_retry = False


class DeadlineExceeded(ApiError):
    """Request whose answer did not begin in time."""

    status = 504
    code = "deadline_exceeded"
    should_retry = False


class UsageUnavailable(Overloaded):
    """Request whose usage could not be recorded."""

    code = "usage_unavailable"
    retry_after_s = 5
    is_ours = True


FAILURES: Mapping[ErrorCode, type[ApiError]] = {
    ErrorCode.INVALID: InvalidRequest,
    ErrorCode.MODEL_UNKNOWN: NoWorker,
    ErrorCode.MODEL_UNAVAILABLE: ModelUnavailable,
    ErrorCode.PROMPT_TOO_LONG: ContextLengthExceeded,
    ErrorCode.ADAPTER_UNAVAILABLE: AdapterUnavailable,
    ErrorCode.OVERLOADED: Overloaded,
    ErrorCode.EXPIRED: DeadlineExceeded,
    ErrorCode.DRAINING: Draining,
    ErrorCode.WORKER_LOST: WorkerLost,
    ErrorCode.LOGITS_NAN: NumbersInvalid,
    ErrorCode.INTERNAL: WorkerFault,
}


def of_worker(error: Exception) -> Exception:
    """Returns the failure that a worker's code stands for, or the error itself if it is none of a
    worker."""
    if not isinstance(error, WorkerFailed):
        return error
    failure = FAILURES[error.code](error.message)
    if error.retry_after_s > 0 and failure.should_retry is None:
        failure.retry_after_s = error.retry_after_s
    return failure


def to_failure(error: Exception) -> ApiError:
    """Returns the failure with an answer that an exception is. Logs unforeseen ones."""
    return to_api_error(of_worker(error))


def is_our_fault(error: Exception) -> bool:
    """Returns whether the server is at fault: a status of 500 or above, or an unforeseen error."""
    return _failure_of(error).status >= 500


def error_type(error: Exception) -> str:
    """Returns the kind of failure for telemetry, from a fixed set of words."""
    failure = _failure_of(error)
    return failure.code or failure.type


def _failure_of(error: Exception) -> ApiError:
    return find_api_error(of_worker(error)) or InternalError(str(error))


def forget_frames(error: BaseException) -> None:
    """Clears the tracebacks of a handled error and of those that led to it.

    Tracebacks keep the request alive, and the request keeps the error: a reference cycle that stays
    until the garbage collector runs, whose pauses grow with the number of cycles.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
