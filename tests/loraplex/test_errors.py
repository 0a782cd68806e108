"""Causes of errors are told in words."""

from __future__ import annotations

import errno
import ssl

import httpx
import pytest

from loraplex.errors import reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ECONNREFUSED, "Connect call failed ('::1', 9)"), "Connection refused"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"), "No such file or dir"),
        (OSError(-2, "Name or service not known"), "Name or service not known"),
        (OSError("no connection within 10 s"), "no connection within 10 s"),
        (httpx.ConnectError("[Errno 111] Connection refused"), "Connection refused"),
        (ssl.SSLError(1, "[SSL: BAD_KEY] bad key (_ssl.c:4048)"), "bad key"),
    ],
)
def test_a_reason_has_no_numbers(error: Exception, reason: str) -> None:
    assert reason_of(error).startswith(reason) and not {"[", "("} & set(reason_of(error))
