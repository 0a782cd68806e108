"""Exceptions of the gateway, and the table from them and workers' codes to OpenAI's errors."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from litestar.exceptions import HTTPException

from workers.wire.client import WorkerFailed
from workers.wire.protocol import ErrorCode

log = logging.getLogger(__name__)


class Problem(msgspec.Struct, frozen=True):
    """HTTP form of a kind of failure."""

    status: int
    type: str
    code: str | None = None
    retry_after_s: float | None = None
    """None if waiting does not help."""
    is_final: bool = False
    """Whether clients are told not to retry, although they usually would for this status."""
    is_ours: bool = False
    """Whether the server caused the failure, so that the request is returned to its limit."""


class ApiError(Exception):
    """Failure with an answer. Its class determines the `Problem`; it adds message and field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(ApiError):
    """Request for something impossible or unsupported."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer that together exceed the model's context."""


class TooManyRequests(ApiError):
    """Too many requests without a key from the client's address."""


class TooManyRefusals(ApiError):
    """Too many refused requests of the tenant, or bytes of them, that had been read."""

    def __init__(self, frees_in_s: float) -> None:
        super().__init__(
            "Too many requests of this tenant, or too many bytes of them, were refused in the last "
            "minutes. Correct what their answers name, and wait as long as 'retry-after' says "
            "before you send a request again."
        )
        self.frees_in_s = frees_in_s


class Unauthenticated(ApiError):
    """Missing or invalid API key."""


class Forbidden(ApiError):
    """Valid key without the necessary rights."""


class ModelNotFound(ApiError):
    """Model that the tenant does not have. The message is the same if another tenant has it."""

    def __init__(self, name: str) -> None:
        shown = name if len(name) <= 128 else name[:128] + "..."
        super().__init__(
            f"The model '{shown}' does not exist or you do not have access to it.", param="model"
        )


class BodyTimeout(ApiError):
    """Body of a request that does not arrive, or too slowly."""


class TemplateNotApproved(ApiError):
    """Adapter version with a chat template that no admin has approved."""


class Overloaded(ApiError):
    """Request that the service cannot accept now."""


class CatalogStale(Overloaded):
    """Catalog that may be too old to use."""


class QuotaExceeded(ApiError):
    """Limit of the tenant or key without room for the request."""

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
        super().__init__(message, param=param, code=code)
        self.frees_in_s = frees_in_s
        self.is_worth_a_retry = is_worth_a_retry


class QuotaUnavailable(Overloaded):
    """Limit that cannot be checked."""


class TokenizerUnavailable(ApiError):
    """Tokenizer of a base model that could not be loaded."""


class NoWorker(Overloaded):
    """Model that no ready worker has."""


class ModelUnsatisfiable(NoWorker):
    """Model that no worker can serve with its settings."""


class PoisonRequest(ApiError):
    """Request that is presumed to have crashed the workers that ran it."""


class DeadlineExceeded(ApiError):
    """Request whose answer did not begin in time."""


class UsageUnavailable(Overloaded):
    """Request whose usage could not be recorded."""


INVALID = "invalid_request_error"
SERVER = "server_error"

PROBLEMS: Mapping[type[Exception] | ErrorCode | int, Problem] = {
    InvalidRequest: Problem(400, INVALID),
    ContextLengthExceeded: Problem(400, INVALID, "context_length_exceeded"),
    TooManyRequests: Problem(429, "rate_limit_error", retry_after_s=1),
    TooManyRefusals: Problem(429, "rate_limit_error", "too_many_refusals"),
    Unauthenticated: Problem(401, "authentication_error", "invalid_api_key"),
    Forbidden: Problem(403, "permission_error", "insufficient_scope"),
    ModelNotFound: Problem(404, "not_found_error", "model_not_found"),
    BodyTimeout: Problem(408, INVALID, "request_timeout"),
    TemplateNotApproved: Problem(409, INVALID, "template_not_approved", is_final=True),
    Overloaded: Problem(503, SERVER, "overloaded", retry_after_s=1),
    QuotaExceeded: Problem(429, "rate_limit_error", "rate_limit_exceeded"),
    QuotaUnavailable: Problem(503, SERVER, "quota_unavailable", retry_after_s=1, is_ours=True),
    CatalogStale: Problem(503, SERVER, "catalog_stale", retry_after_s=5, is_ours=True),
    TokenizerUnavailable: Problem(503, SERVER, "model_unavailable", retry_after_s=1, is_ours=True),
    NoWorker: Problem(503, SERVER, "no_worker", retry_after_s=2, is_ours=True),
    ModelUnsatisfiable: Problem(503, SERVER, "model_unsatisfiable", is_final=True, is_ours=True),
    UsageUnavailable: Problem(503, SERVER, "usage_unavailable", retry_after_s=5, is_ours=True),
    PoisonRequest: Problem(500, SERVER, "poison_request", is_final=True),
    DeadlineExceeded: Problem(504, SERVER, "deadline_exceeded", is_final=True),
    ErrorCode.INVALID: Problem(400, INVALID),
    ErrorCode.MODEL_UNKNOWN: Problem(503, SERVER, "no_worker", retry_after_s=2, is_ours=True),
    ErrorCode.MODEL_UNAVAILABLE: Problem(
        503, SERVER, "model_unavailable", retry_after_s=5, is_ours=True
    ),
    ErrorCode.PROMPT_TOO_LONG: Problem(400, INVALID, "context_length_exceeded"),
    ErrorCode.ADAPTER_UNAVAILABLE: Problem(
        503, SERVER, "adapter_unavailable", retry_after_s=2, is_ours=True
    ),
    ErrorCode.OVERLOADED: Problem(503, SERVER, "overloaded", retry_after_s=1),
    ErrorCode.EXPIRED: Problem(504, SERVER, "deadline_exceeded", is_final=True),
    ErrorCode.DRAINING: Problem(503, SERVER, "draining", retry_after_s=1, is_ours=True),
    ErrorCode.WORKER_LOST: Problem(503, SERVER, "worker_lost", retry_after_s=1, is_ours=True),
    ErrorCode.LOGITS_NAN: Problem(500, SERVER, "logits_nan", is_final=True),
    ErrorCode.INTERNAL: Problem(500, SERVER, "internal_error"),
    400: Problem(400, INVALID),
    404: Problem(404, "not_found_error", "route_not_found"),
    405: Problem(405, INVALID, "method_not_allowed"),
    413: Problem(413, INVALID, "request_too_large"),
    500: Problem(500, SERVER, "internal_error"),
}


def problem_of(error: Exception) -> tuple[Problem, str]:
    """Returns the problem of an error and the message to show. Unknown errors reveal nothing."""
    problem = _find_problem(error)
    match error:
        case WorkerFailed() | ApiError() if problem is not None:
            return problem, error.message
        case HTTPException() if problem is not None:
            return problem, error.detail
        case _:
            log.error("unexpected failure", exc_info=error)
            return PROBLEMS[500], "The server had an error while processing your request."


def is_our_fault(error: Exception) -> bool:
    """Returns whether the server is at fault: a status of 500 or above, or an unforeseen error."""
    problem = _find_problem(error)
    return problem is None or problem.status >= 500


def _find_problem(error: Exception) -> Problem | None:
    """Returns the problem of an error, or None if the error is unforeseen."""
    if isinstance(error, WorkerFailed):
        return PROBLEMS[error.code]
    if isinstance(error, ApiError):
        return next(PROBLEMS[cls] for cls in type(error).__mro__ if cls in PROBLEMS)
    if isinstance(error, HTTPException) and error.status_code < 500:
        return PROBLEMS.get(error.status_code) or Problem(error.status_code, INVALID)
    return None


def error_body(error: Exception, problem: Problem, message: str) -> dict[str, Any]:
    """Returns the error's body in OpenAI's form, `{"error": {message, type, param, code}}`."""
    param = error.param if isinstance(error, ApiError) else None
    code = code_of(error, problem)
    return {"error": {"message": message, "type": problem.type, "param": param, "code": code}}


def code_of(error: Exception, problem: Problem) -> str | None:
    """Returns the error's own code, or that of its problem."""
    return (error.code if isinstance(error, ApiError) else None) or problem.code


def error_type(error: Exception) -> str:
    """Returns the kind of failure for telemetry, from a fixed set of words."""
    problem = _find_problem(error) or PROBLEMS[500]
    return code_of(error, problem) or problem.type


def retry_headers(problem: Problem, error: Exception) -> dict[str, str]:
    """Returns the headers by which official clients decide whether and when to retry."""
    if isinstance(error, QuotaExceeded):
        headers = _retry_after(error.frees_in_s)
        if not error.is_worth_a_retry:
            headers["x-should-retry"] = "false"
        return headers
    if isinstance(error, TooManyRefusals):
        return _retry_after(error.frees_in_s)
    if problem.is_final:
        return {"x-should-retry": "false"}
    if isinstance(error, WorkerFailed) and error.retry_after_s > 0:
        return _retry_after(error.retry_after_s)
    return _retry_after(problem.retry_after_s)


def _retry_after(seconds: float | None) -> dict[str, str]:
    if seconds is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
    }


def forget_frames(error: BaseException) -> None:
    """Clears the tracebacks of a handled error and of those that led to it.

    Tracebacks keep the request alive, and the request keeps the error: a reference cycle that stays
    until the garbage collector runs, whose pauses grow with the number of cycles.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
