"""Head of a request: its id, its headers as the server has parsed them, and the address of its
client, as used for logs, rate limits and the networks of keys. Adds the headers of every answer."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from litestar.types import Message, Scope

from store.records import ApiKey
from web.errors import Forbidden

STATUS = "status"
"""Key in a request's state for the status of its answer, set when the answer is sent."""
IS_OURS = "is_ours"
"""Key in a request's state for whether the server caused the refusal."""
ON_ANSWER = "on_answer"
"""Key in a request's state for a function that is called when the answer is sent. The function gets
the answer's status and whether the server caused a refusal, and returns additional headers."""

MESSAGES = "/v1/messages"
"""Anthropic's route. Other routes of Anthropic's API are below it."""
MAX_ADDRESS_CHARS = 45
"""Number of characters of the longest IP address, which is IPv6 with an embedded IPv4 address."""
IPV6_PREFIX = 64
"""Length in bits of the IPv6 prefix that one subscriber usually has."""


OnAnswer = Callable[[int, bool], Mapping[str, str]]


def is_of_messages(path: str) -> bool:
    """Returns whether a path belongs to Anthropic's Messages API."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def find_header(scope: Scope, name: bytes) -> str | None:
    """Returns the value of the first header with this name (in lower case), or None. Searches the
    list, because an index would be slower for one or two lookups."""
    for given, value in scope["headers"]:
        if given == name:
            return value.decode("latin-1")
    return None


def find_headers(scope: Scope, name: bytes) -> list[str]:
    """Returns the values of all headers with this name (in lower case), in their order."""
    return [value.decode("latin-1") for given, value in scope["headers"] if given == name]


def bearer_key(authorization: str | None) -> str | None:
    """Returns the key in an Authorization header, or None if the header has no key."""
    scheme, _, text = (authorization or "").partition(" ")
    return (text.strip() or None) if scheme.lower() == "bearer" else None


def announced_bytes(scope: Scope) -> int:
    """Returns the Content-Length of the body, which the server has checked to be a number. Returns
    0 for a chunked body."""
    return int(find_header(scope, b"content-length") or 0)


def number_request(scope: Any) -> None:
    """Sets the id and start time of a request, unless they are already set."""
    state = scope["state"]
    if "request_id" not in state:
        state["request_id"] = f"req_{os.urandom(16).hex()}"
        state["started_at"] = time.perf_counter()


async def add_request_headers(message: Message, scope: Scope) -> None:
    """Adds headers to every answer, including refusals: the request's id, its duration, and the
    headers from `ON_ANSWER`."""
    if message["type"] != "http.response.start":
        return
    state: dict[str, Any] = scope["state"]
    state[STATUS] = message["status"]
    headers = [
        *message["headers"],
        (b"x-request-id", state["request_id"].encode()),
        (b"openai-processing-ms", b"%d" % elapsed_ms(scope)),
    ]
    if is_of_messages(scope["path"]):
        headers.append((b"request-id", state["request_id"].encode()))
    on_answer: OnAnswer | None = state.get(ON_ANSWER)
    if on_answer is not None:
        more = on_answer(message["status"], state.get(IS_OURS, False))
        headers += [(name.encode(), text.encode()) for name, text in more.items()]
    message["headers"] = headers


def elapsed_ms(scope: Any) -> int:
    """Returns the milliseconds since the request arrived."""
    return round((time.perf_counter() - scope["state"]["started_at"]) * 1000)


def client_address(scope: Mapping[str, Any]) -> str | None:
    """Returns the IP address of an ASGI scope's client. Returns None over a Unix socket.

    The address is the peer's. If the peer is one of `trusted_proxies`, the server has replaced it
    with the last address of X-Forwarded-For that is not a trusted proxy. Returns None if the
    header's text is not an address.
    """
    client = scope.get("client")
    return canonical(client[0]) if client else None


def check_address(key: ApiKey, scope: Mapping[str, Any]) -> None:
    """Raises Forbidden unless the key may be used from the client's address."""
    if not key.may_come_from(client_address(scope)):
        raise Forbidden("This API key may not be used from this address.", code="ip_not_allowed")


def canonical(host: str) -> str | None:
    """Returns the canonical form of an IP address. Returns None for other text."""
    return None if len(host) > MAX_ADDRESS_CHARS else _canonical(host)


def address_prefix(address: str | None) -> str:
    """Returns the prefix by which rate limits and log lines group addresses: the whole IPv4
    address, or the /64 of an IPv6 address."""
    if address is None:
        return "unknown"
    if ":" not in address:
        return address
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))


@lru_cache(4096)
def _canonical(host: str) -> str | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or ipaddress.IPv6Address(int(address)))
    return str(address)
