"""Request to the data plane, with the values that its handlers need."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec

from gateway.catalog.auth import Principal
from gateway.exceptions import InvalidRequest
from gateway.http.decoding import MAX_BODY_BYTES, decode_request
from gateway.http.guards import CHARGE
from gateway.http.services import Gateway
from gateway.limits.admission import RequestCharge
from gateway.tracing import Untraced
from store.errors import INVALID
from web.decoding import decoder_of
from web.error_answers import REFUSAL
from web.headers import STATUS, find_header
from web.request import PlaneRequest

T = TypeVar("T")

MAX_TIMEOUT_S = 86_400
TRACE = "trace"
"""Key in a request's state for its trace."""
_SECONDS = re.compile(r"[0-9]{1,5}(\.[0-9]{1,9})?")


class HttpRequest(PlaneRequest[Principal]):
    """Request whose `user` is a tenant with its key, and which has a trace."""

    def __init__(self, scope: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(scope, *args, **kwargs)
        self.gateway: Gateway = self.app.state["gateway"]
        self.num_bytes = 0
        """Size of the body in bytes, once it is read."""
        self._whole: bytes | None = None
        state = scope["state"]
        if TRACE not in state:
            state[TRACE] = self.gateway.config.tracing.begin(scope)
        self.trace: Untraced = state[TRACE]

    async def body(self) -> bytes:
        """Returns the body, and keeps it until it is decoded. Raises InvalidRequest if it is empty,
        and the errors of `stream`."""
        if self._whole is None:
            self._whole = b"".join([chunk async for chunk in self.stream(MAX_BODY_BYTES)])
            if not self._whole:
                raise InvalidRequest("The body is not valid JSON: Input data was truncated")
            self.num_bytes = len(self._whole)
        return self._whole

    async def json(self) -> Any:
        """Returns the handler's `data`, decoded from the body. Raises the errors of `decode`."""
        data: Any = self.route_handler.parsed_data_field
        return await self.decode(decoder_of(data.annotation))

    async def decode(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Returns the body as a struct. Delays large bodies of a tenant that sends many. Raises the
        errors of `body` and `decode_request`."""
        body = await self.body()
        if delay_s := self.gateway.body_pace.delay_s(self.user.tenant.id, len(body)):
            await asyncio.sleep(delay_s)
        self._whole = b""
        return decode_request(decoder, body)

    @property
    def deadline(self) -> float:
        """Time of time.perf_counter() by which the first output is due. The seconds are set by the
        header `x-request-timeout`, or else by the settings. Raises InvalidRequest if the header is
        invalid."""
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
        """Time of time.perf_counter() at which the request arrived."""
        return self.scope["state"]["started_at"]


def end_trace(scope: Any) -> None:
    """Ends the trace of a request to a route that is not a HotRoute, if the caller is known."""
    state = scope.get("state", {})
    trace: Untraced | None = state.get(TRACE)
    if trace is None or not isinstance(caller := scope.get("user"), Principal):
        return
    trace.tenant = caller.tenant
    trace.drop_phases()
    if REFUSAL in state:
        trace.fail(state[REFUSAL] or INVALID)
    trace.end(state.get(STATUS))


def end_charge(scope: Any) -> None:
    """Ends the RequestCharge of a request that has ended, whether or not it was answered."""
    charge: RequestCharge | None = scope.get("state", {}).get(CHARGE)
    if charge is not None:
        charge.end()
