"""A request to the data plane, with what its handlers need at hand."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any

from litestar import Request
from litestar.datastructures import State
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.types import Message, Scope

from gateway.auth import CHARGE, Principal
from gateway.errors import InvalidRequest
from gateway.headers import find_header
from gateway.schemas import MAX_BODY_BYTES

if TYPE_CHECKING:
    from gateway.admission import RequestCharge
    from gateway.app import Gateway

MAX_TIMEOUT_S = 86_400
_SECONDS = re.compile(r"[0-9]{1,5}(\.[0-9]{1,9})?")


class GatewayRequest(Request[Principal, Any, State]):
    """Numbered and timed from its first moment. The id is always ours: usage is counted by it."""

    def __init__(self, scope: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(scope, *args, **kwargs)
        self.gateway: Gateway = self.app.state["gateway"]
        self.num_bytes = 0
        """Of the body, once it is read."""
        state = scope["state"]
        if "request_id" not in state:
            state["request_id"] = f"req_{os.urandom(16).hex()}"
            state["started_at"] = time.perf_counter()

    async def body(self) -> bytes:
        """As the framework's own, which indexes all headers and goes through a generator. Raises
        RequestEntityTooLarge, at once where the length is announced; InvalidRequest, which nobody
        reads, if the client leaves."""
        announced = find_header(self.scope, b"content-length")
        if announced is not None and int(announced) > MAX_BODY_BYTES:
            raise RequestEntityTooLarge
        body, is_whole = bytearray(), False
        while not is_whole:
            message: Any = await self.receive()
            if message["type"] == "http.disconnect":
                raise InvalidRequest("The client left before its request was whole.")
            body += message["body"]
            if len(body) > MAX_BODY_BYTES:
                raise RequestEntityTooLarge
            is_whole = not message["more_body"]
        self.num_bytes = len(body)
        return bytes(body)

    @property
    def request_id(self) -> str:
        return self.scope["state"]["request_id"]

    @property
    def traceparent(self) -> str | None:
        return find_header(self.scope, b"traceparent")

    @property
    def deadline(self) -> float:
        """Of the first output, of time.perf_counter(): as the header `x-request-timeout` has it, in
        seconds. Raises InvalidRequest."""
        given = find_header(self.scope, b"x-request-timeout")
        if given is None:
            return self.started_at + self.gateway.config.request_timeout_s
        if not _SECONDS.fullmatch(given) or not 0 < float(given) <= MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"The header 'x-request-timeout' takes seconds, more than 0 and at most "
                f"{MAX_TIMEOUT_S}.",
                param="x-request-timeout",
            )
        return self.started_at + float(given)

    @property
    def started_at(self) -> float:
        """Of time.perf_counter()."""
        return self.scope["state"]["started_at"]

    @property
    def elapsed_ms(self) -> int:
        return _elapsed_ms(self.scope)


async def add_request_headers(message: Message, scope: Scope) -> None:
    """Hook before each send: every answer, refusals included, says its id, how long it took and
    what is left of the caller's limits."""
    if message["type"] != "http.response.start":
        return
    state: dict[str, Any] = scope["state"]
    headers = [
        *message["headers"],
        (b"x-request-id", state["request_id"].encode()),
        (b"openai-processing-ms", b"%d" % _elapsed_ms(scope)),
    ]
    charge: RequestCharge | None = state.get(CHARGE)
    if charge is not None:
        charge.settle(message["status"])
        headers += [(name.encode(), text.encode()) for name, text in charge.headers().items()]
    message["headers"] = headers


def keep_charge(scope: Any) -> None:
    """Settles the charge of a request that has got no answer because its client left."""
    charge: RequestCharge | None = scope.get("state", {}).get(CHARGE)
    if charge is not None:
        charge.settle()


def _elapsed_ms(scope: Any) -> int:
    return round((time.perf_counter() - scope["state"]["started_at"]) * 1000)
