"""Errors with an HTTP answer that both the gateway and the admin plane raise."""

from __future__ import annotations

from store.errors import FAILED, INVALID, ApiError


class Unauthenticated(ApiError):
    """Error for a missing or invalid API key."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(ApiError):
    """Error for a valid key without the necessary rights."""

    status = 403
    type = "permission_error"
    code = "insufficient_scope"


class Stalled(ApiError):
    """Error for a request whose remaining bytes do not arrive or arrive too slowly."""

    status = 408
    type = INVALID
    code = "request_timeout"


class PreconditionFailed(ApiError):
    """Error for an object that has changed since the caller read it."""

    status = 412
    type = INVALID
    code = "precondition_failed"
    should_retry = False


class TooLarge(ApiError):
    """Error for a body or a file with more bytes than allowed."""

    status = 413
    type = INVALID
    code = "request_too_large"


class UnsupportedEncoding(ApiError):
    """Error for a body in a content coding that is not decoded."""

    status = 415
    type = INVALID
    code = "unsupported_encoding"
    should_retry = False

    def __init__(self, message: str) -> None:
        super().__init__(message, param="content-encoding")


class IdempotencyKeyReused(ApiError):
    """Error for an Idempotency-Key that the caller has already used for another request."""

    status = 422
    type = INVALID
    code = "idempotency_key_reused"
    should_retry = False


class TooMany(ApiError):
    """Error for a caller with too many requests, or with too many operations in progress."""

    status = 429
    type = "rate_limit_error"
    code = "too_many"
    retry_after_s = 1


class RateExceeded(TooMany):
    """Error for a call that exceeds the tenant's rate limit."""

    code = "rate_limit_exceeded"


class Overloaded(ApiError):
    """Error for a request that the service cannot accept now."""

    status = 503
    code = "overloaded"
    retry_after_s = 1


class InternalError(ApiError):
    """Unforeseen failure. Its cause is logged and hidden from clients."""

    public_message = FAILED
