"""The one table from our exceptions and the worker's error codes to OpenAI-shaped problems."""

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
    """How a kind of failure looks from outside."""

    status: int
    type: str
    code: str | None = None
    retry_after_s: float | None = None
    """None: waiting does not help."""
    is_final: bool = False
    """Clients that would repeat such a status are told not to."""
    is_ours: bool = False
    """Whether the cause is on the server's side, so that the request is given back to its limit."""


class ApiError(Exception):
    """A failure with an answer: its class finds the `Problem`, it adds words and the field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(ApiError):
    """The request asks for something impossible or unsupported."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer together do not fit the model's context."""


class TooManyRequests(ApiError):
    """Requests without a key come too often from the client's address."""


class TooManyRefusals(ApiError):
    """Too many of the tenant's requests, or of their bytes, were refused after they were read."""

    def __init__(self, frees_in_s: float) -> None:
        super().__init__(
            "Too many requests of this tenant, or too many bytes of them, were refused in the last "
            "minutes. Correct what their answers name, and wait as long as 'retry-after' says "
            "before you send a request again."
        )
        self.frees_in_s = frees_in_s


class Unauthenticated(ApiError):
    """No API key, or not a valid one."""


class Forbidden(ApiError):
    """The key is valid and may not do this."""


class ModelNotFound(ApiError):
    """The tenant has no such model. The words are the same whether or not another tenant has it."""

    def __init__(self, name: str) -> None:
        shown = name if len(name) <= 128 else name[:128] + "..."
        super().__init__(
            f"The model '{shown}' does not exist or you do not have access to it.", param="model"
        )


class BodyTimeout(ApiError):
    """The body of the request does not come, or too slowly."""


class TemplateNotApproved(ApiError):
    """The adapter version brings a chat template that no admin has approved."""


class Overloaded(ApiError):
    """The service cannot take this now."""


class CatalogStale(Overloaded):
    """What the gateway knows of keys and models may be too old to go by."""


class QuotaExceeded(ApiError):
    """A limit of the tenant or of the key leaves no room for the request."""

    def __init__(
        self,
        message: str,
        *,
        param: str,
        code: str,
        frees_in_s: float | None,
        is_worth_a_retry: bool,
    ) -> None:
        """frees_in_s None: never, for a request like this."""
        super().__init__(message, param=param, code=code)
        self.frees_in_s = frees_in_s
        self.is_worth_a_retry = is_worth_a_retry


class QuotaUnavailable(Overloaded):
    """Whether a limit leaves room cannot be found out."""


class TokenizerUnavailable(ApiError):
    """The tokenizer of the base model could not be loaded."""


class NoWorker(Overloaded):
    """No ready worker has the model."""


class ModelUnsatisfiable(NoWorker):
    """No worker, as they are set up, can ever serve the model."""


class PoisonRequest(ApiError):
    """The request is taken for what its workers were lost of."""


class DeadlineExceeded(ApiError):
    """No answer began within the time that the request had."""


class UsageUnavailable(Overloaded):
    """What a request uses could not be recorded."""


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
    """The table's row for an error and the words to show; unknown errors show nothing of theirs."""
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
    """Whether the caller could not have asked better."""
    problem = _find_problem(error)
    return problem is None or problem.status >= 500


def _find_problem(error: Exception) -> Problem | None:
    """None for an unforeseen error."""
    if isinstance(error, WorkerFailed):
        return PROBLEMS[error.code]
    if isinstance(error, ApiError):
        return next(PROBLEMS[cls] for cls in type(error).__mro__ if cls in PROBLEMS)
    if isinstance(error, HTTPException) and error.status_code < 500:
        return PROBLEMS.get(error.status_code) or Problem(error.status_code, INVALID)
    return None


def error_body(error: Exception, problem: Problem, message: str) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}` as OpenAI shapes it."""
    param = error.param if isinstance(error, ApiError) else None
    code = code_of(error, problem)
    return {"error": {"message": message, "type": problem.type, "param": param, "code": code}}


def code_of(error: Exception, problem: Problem) -> str | None:
    """The error's own code, or else its problem's."""
    return (error.code if isinstance(error, ApiError) else None) or problem.code


def error_type(error: Exception) -> str:
    """One of a fixed set of words for the kind of failure, for telemetry."""
    problem = _find_problem(error) or PROBLEMS[500]
    return code_of(error, problem) or problem.type


def retry_headers(problem: Problem, error: Exception) -> dict[str, str]:
    """What the official clients read before they try again."""
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
    """Clears the frames of an error that is over, and of those that led to it.

    They hold the request and all it came with, which hold the error: a circle that stays until the
    collector of cycles comes, and the more of them there are the longer it holds up all requests.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
