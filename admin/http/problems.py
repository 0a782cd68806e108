"""Maps errors of adapters and of the adapter store to HTTP answers."""

from __future__ import annotations

import logging
from typing import Any

from litestar import Request, Response

from adapters.errors import AdapterRejected
from adapters.store.folder import StoreUnavailable, is_disk_full, is_read_only
from store.errors import ApiError, Invalid
from web import error_answers

log = logging.getLogger(__name__)


class DiskFull(ApiError):
    """Error for a full disk of the server."""

    status = 507
    code = "disk_full"


class StoreAway(ApiError):
    """Error for a store of adapters that does not answer."""

    status = 503
    code = "store_unavailable"
    retry_after_s = 1


class StoreReadOnly(StoreAway):
    """Error for a store of adapters that is read-only."""

    code = "store_read_only"
    should_retry = False


def to_response(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Returns the answer to an error of a handler or the router."""
    return error_answers.to_response(request, _of_store(error))


def _of_store(error: Exception) -> Exception:
    """Converts an error of an adapter or of the adapter store to an error that has an HTTP answer.
    Returns any other error unchanged."""
    match error:
        case AdapterRejected():
            return Invalid(str(error), error.code, error.field, error.to_dict())
        case OSError() if is_disk_full(error):
            log.error("the disk is full: %s", error)
            return DiskFull(f"The server's disk is full: {error.strerror}.")
        case OSError() if is_read_only(error):
            log.error("the store cannot be written: %s", error)
            return StoreReadOnly(f"The server's store cannot be written: {error.strerror}.")
        case StoreUnavailable():
            log.error("%s", error)
            return StoreAway(f"The server's store {error.reason}.")
        case _:
            return error
