"""Forwards requests that load adapters by vLLM's routes to the admin plane. Used by a gateway
without an admin plane."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from functools import partial
from typing import Any

import httpx
from litestar import Litestar, Response, post
from litestar.handlers import BaseRouteHandler

from admin.adapters.load_routes import to_vllm_response
from admin.http.guards import ADAPTERS_WRITE, OPERATOR
from admin.http.plane import AdminConfig
from admin.uploads.upload import OVERHEAD_BYTES, Forms
from gateway.http.request import find_key
from gateway.requests.services import Gateway
from loraplex.roles.management import LOAD_PATHS
from web.errors import Forbidden, Overloaded
from web.guards import HttpConnection
from web.held_bytes import held_body
from web.request import PlaneRequest, UploadPace, check_bytes
from web.request_head import client_address, find_header

CONNECT_S = 5.0
ANSWER_S = 180.0
"""Maximum seconds from the end of a request's body to the admin plane's answer. Validation alone
may take 120 seconds."""
MAX_ANSWER_BYTES = 64 << 10
SENT = ("content-type", "content-length", "authorization", "traceparent")
"""Request headers that are forwarded to the admin plane."""
RETURNED = (
    *("content-type", "loraplex-adapter-version", "loraplex-effect-proof", "server-timing"),
    *("loraplex-gateways-behind", "x-request-id"),
    *("retry-after", "retry-after-ms", "x-should-retry", "www-authenticate"),
)
"""Headers of the admin plane's answer that are returned to the client."""


class Forwarding:
    """Forwarder to the admin plane, for requests that load adapters. The client gets the admin
    plane's answer.

    The key is checked here first, so that requests without a valid key never reach the admin plane.
    Bodies have the same limits as at the admin plane.
    """

    def __init__(self, url: str, gateway: Gateway, config: AdminConfig) -> None:
        """`config` is the admin plane's configuration, which has the limits of uploads."""
        self._gateway = gateway
        self._max_bytes = config.max_upload_bytes + OVERHEAD_BYTES
        self._pace = partial(UploadPace, config.upload_idle_s, config.min_upload_rate)
        self._forms = Forms()
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            # A proxy that the environment names must not see a tenant's weights and key.
            trust_env=False,
            verify=ssl.create_default_context(),
        )

    async def close(self) -> None:
        await self._client.aclose()

    def app(self) -> Litestar:
        """Returns an application with the forwarded routes."""

        async def with_key(connection: HttpConnection, _handler: BaseRouteHandler) -> None:
            self._check_key(connection)

        @post(list(LOAD_PATHS), guards=[with_key], status_code=200, request_max_body_size=None)
        async def forward(request: PlaneRequest[Any]) -> Response[bytes]:
            return await self._forward(request)

        return Litestar(
            [forward],
            request_class=PlaneRequest,
            exception_handlers={Exception: to_vllm_response},
            openapi_config=None,
            logging_config=None,
        )

    def _check_key(self, connection: HttpConnection) -> None:
        """Stores the key as `user`. Raises Unauthenticated, Forbidden or Overloaded."""
        scope = connection.scope
        header = find_header(scope, b"authorization")
        with self._gateway.refused_keys.noting(scope, header):
            key = find_key(self._gateway, scope, header)
            if key.tenant_id is not None and ADAPTERS_WRITE not in key.scopes:
                raise Forbidden(f"This API key lacks the scope {ADAPTERS_WRITE}.")
        held_body(scope).charge(key.tenant_id or OPERATOR)
        scope["user"] = key

    async def _forward(self, request: PlaneRequest[Any]) -> Response[bytes]:
        check_bytes(request.num_body_bytes, self._max_bytes)
        async with self._forms.taking(request.user.tenant_id):
            try:
                async with self._client.stream(
                    "POST",
                    request.scope["path"],
                    params=request.scope["query_string"],
                    headers=_sent(request),
                    content=request.stream(self._max_bytes, self._pace()),
                ) as answer:
                    body = b""
                    async for chunk in answer.aiter_bytes():
                        body += chunk
                        if len(body) > MAX_ANSWER_BYTES:
                            raise _unavailable("answers with too many bytes")
            except httpx.HTTPError as error:
                raise _unavailable("does not answer") from error
        headers = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
        media_type = headers.pop("content-type", "application/octet-stream")
        return Response(
            body, status_code=answer.status_code, headers=headers, media_type=media_type
        )


def _sent(request: PlaneRequest[Any]) -> Mapping[str, str]:
    headers = {name: request.headers[name] for name in SENT if name in request.headers}
    address = client_address(request.scope)
    return headers if address is None else {**headers, "x-forwarded-for": address}


def _unavailable(what: str) -> Overloaded:
    return Overloaded(f"The admin plane {what}. Try again.", "admin_unavailable")
