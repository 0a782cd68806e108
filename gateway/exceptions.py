"""Defines the errors that the gateway sends to clients, and maps workers' error codes to them."""

from __future__ import annotations

from collections.abc import Mapping

from store.errors import INVALID, ApiError, Conflict, Invalid, NotFound
from web.error_answers import to_api_error, to_logged_error
from web.errors import Overloaded, TooMany
from workers.wire.client import WorkerFailed
from workers.wire.protocol import ErrorCode


class InvalidRequest(Invalid):
    """Error for a request that is invalid or asks for something unsupported."""

    code = None


class ContextLengthExceeded(InvalidRequest):
    """Error for a prompt and an answer that together exceed the model's context."""

    code = "context_length_exceeded"


class TooManyRefusals(TooMany):
    """Error for a tenant of which too many requests, or too large ones, were refused recently after
    their bodies had been read."""

    code = "too_many_refusals"

    def __init__(self, frees_in_s: float) -> None:
        super().__init__(
            "Too many requests of this tenant, or too many bytes of them, were refused in the last "
            "minutes. Correct what their answers name, and wait as long as 'retry-after' says "
            "before you send a request again.",
            retry_after_s=frees_in_s,
        )


class ModelNotFound(NotFound):
    """Error for a model that the tenant does not have. The message is the same whether or not
    another tenant has it."""

    code = "model_not_found"

    def __init__(self, name: str) -> None:
        shown = name if len(name) <= 128 else name[:128] + "..."
        super().__init__(
            f"The model '{shown}' does not exist or you do not have access to it.", param="model"
        )


class TemplateNotApproved(Conflict):
    """Error for an adapter version whose chat template no admin has approved."""

    code = "template_not_approved"


class CatalogStale(Overloaded):
    """Error for a gateway whose catalog has not been confirmed for too long to be used."""

    code = "catalog_stale"
    retry_after_s = 5
    is_ours = True


class QuotaExceeded(ApiError):
    """Error for a request that needs more than is left of a limit of its tenant or API key."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class QuotaUnavailable(Overloaded):
    """Error for a limit that cannot be checked now."""

    code = "quota_unavailable"
    is_ours = True


class ModelUnavailable(ApiError):
    """Error for a base model that is unloaded or could not be loaded."""

    status = 503
    code = "model_unavailable"
    retry_after_s = 5
    is_ours = True


class TokenizerUnavailable(ModelUnavailable):
    """Error for a base model whose tokenizer could not be loaded."""

    retry_after_s = 1


class AdapterUnavailable(ApiError):
    """Error for an adapter that a worker cannot load now."""

    status = 503
    code = "adapter_unavailable"
    retry_after_s = 2
    is_ours = True


class NoWorker(Overloaded):
    """Error for a model that no ready worker has."""

    code = "no_worker"
    retry_after_s = 2
    is_ours = True


class ModelUnsatisfiable(NoWorker):
    """Error for a model that no worker can serve as the workers are configured."""

    code = "model_unsatisfiable"
    retry_after_s = None
    should_retry = False


class Draining(Overloaded):
    """Error of a worker that is shutting down."""

    code = "draining"
    is_ours = True


class WorkerLost(Overloaded):
    """Error for a sequence whose worker was lost."""

    code = "worker_lost"
    is_ours = True


class WorkerFault(ApiError):
    """Unforeseen failure of a worker."""


class NumbersInvalid(ApiError):
    """Error for logits that are not finite numbers."""

    code = "logits_nan"
    should_retry = False


class PoisonRequest(ApiError):
    """Error for a request that is presumed to have crashed the workers that ran it."""

    code = "poison_request"
    should_retry = False


class DeadlineExceeded(ApiError):
    """Error for a request whose answer did not begin in time."""

    status = 504
    code = "deadline_exceeded"
    should_retry = False


class UsageUnavailable(Overloaded):
    """Error for a request whose usage could not be recorded."""

    code = "usage_unavailable"
    retry_after_s = 5
    is_ours = True


class RouteNotFound(ApiError):
    """Error for a path that is not served."""

    status = 404
    type = "not_found_error"
    code = "route_not_found"


class MethodNotAllowed(ApiError):
    """Error for a method with which a path is not served."""

    status = 405
    type = INVALID
    code = "method_not_allowed"

    def __init__(self, allowed: str) -> None:
        """`allowed` is the value of the header `allow`."""
        super().__init__("Method Not Allowed")
        self.headers = {"allow": allowed}


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
    """Returns the API error that corresponds to a WorkerFailed, and any other error unchanged."""
    if not isinstance(error, WorkerFailed):
        return error
    failure = FAILURES[error.code](error.message)
    if error.retry_after_s > 0 and failure.should_retry is None:
        failure.retry_after_s = error.retry_after_s
    return failure


def to_failure(error: Exception) -> ApiError:
    """Returns the API error that a client gets for an exception. Logs unforeseen exceptions."""
    return to_logged_error(of_worker(error))


def is_our_fault(error: Exception) -> bool:
    """Returns whether the server caused the error: its status is 5xx, or it is unforeseen."""
    return to_api_error(of_worker(error)).status >= 500


def error_type(error: Exception) -> str:
    """Returns the error's code or type for telemetry. It is one of a fixed set of words."""
    failure = to_api_error(of_worker(error))
    return failure.code or failure.type


def forget_frames(error: BaseException) -> None:
    """Clears the tracebacks of a handled error and of the errors that led to it.

    A traceback refers to the request, and the request refers to the error. This reference cycle
    would stay in memory until the garbage collector runs, and the collector's pauses grow with the
    number of cycles.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
