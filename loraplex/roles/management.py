"""Applications for operators: metrics, and the admin plane unless it is on the public port."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from litestar import Litestar, Request, Response, get
from litestar.exceptions import NotFoundException
from litestar.handlers import BaseRouteHandler

from admin.http.problems import to_response
from gateway.http.request import find_key
from gateway.http.routing import DataPlane
from loraplex.probe import answer_of
from loraplex.telemetry import content_type, render_metrics
from web import error_answers
from web.guards import HttpConnection, public
from web.request_head import find_header

METRICS = "/metrics"
MAX_PAGE_BYTES = 16 << 20
"""Maximum bytes of a worker's metrics page."""
PROBES = ("/livez", "/readyz", "/health", "/version")
ADMIN_PATHS = ("/admin/", "/v1/organization/")
LOAD_PATHS: tuple[str, ...] = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Routes of the admin plane that are always on the public port."""


class Composed:
    """Application that passes each request on by its path: to the application in `exact` for the
    whole path, otherwise to the first one in `routes` whose prefix matches, otherwise to `rest`."""

    def __init__(
        self, rest: Any, routes: Sequence[tuple[str, Any]], exact: Mapping[str, Any] | None = None
    ) -> None:
        self._rest = rest
        self._routes = tuple(routes)
        self._exact = exact or {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app = self._rest
        if scope["type"] == "http":
            path = scope["path"]
            app = self._exact.get(path) or next(
                (app for prefix, app in self._routes if path.startswith(prefix)), app
            )
        await app(scope, receive, send)


def public_app(
    data: Any,
    administration: Litestar | None,
    loading: Any = None,
    worker_health: str | None = None,
) -> Composed:
    """Returns the application of the public port. `administration` is the admin plane, or None if
    the management listener serves it. `loading` answers the routes that load adapters, or is None
    to refuse them. `worker_health` is the health address of a worker whose metrics are added to the
    metrics page."""
    routes: list[tuple[str, Any]] = []
    if administration is not None:
        routes += [(prefix, administration) for prefix in ADMIN_PATHS]
    if isinstance(data, DataPlane):
        routes.append((METRICS, _metrics_for_admins(data, worker_health)))
    exact = None if loading is None else dict.fromkeys(LOAD_PATHS, loading)
    return Composed(data, routes, exact)


def management_app(
    data: Any, administration: Litestar | None, worker_health: str | None = None
) -> Composed:
    """Returns the application of the management listener: metrics and probes without a key, and the
    admin plane if it is given. `worker_health` is the health address of a worker whose metrics are
    added to the metrics page."""
    routes = [(prefix, data) for prefix in PROBES]
    if administration is not None:
        routes += [(prefix, administration) for prefix in ADMIN_PATHS]
    return Composed(_metrics_app(public, to_response, worker_health), routes)


def _metrics_for_admins(data: DataPlane, worker_health: str | None) -> Litestar:
    """Returns the metrics application of the public port. It answers 401 without a valid key, and
    404 to a tenant's key."""
    gateway = data.gateway

    async def admins_only(connection: HttpConnection, _handler: BaseRouteHandler) -> None:
        header = find_header(connection.scope, b"authorization")
        with gateway.refused_keys.noting(connection.scope, header):
            key = find_key(gateway, connection.scope, header)
        if key.tenant_id is not None:
            raise NotFoundException()

    def refuse(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
        if isinstance(error, NotFoundException):
            error = data.not_found(request.method, request.scope["path"])
        return error_answers.to_response(request, error)

    return _metrics_app(admins_only, refuse, worker_health)


def _metrics_app(guard: Any, on_error: Any, worker_health: str | None) -> Litestar:
    @get(METRICS, guards=[guard])
    async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
        form = content_type(request.headers.get("accept", ""))
        text = await asyncio.to_thread(_page, worker_health, form)
        return Response(text, media_type=form)

    return Litestar(
        [metrics],
        exception_handlers={Exception: on_error},
        openapi_config=None,
        logging_config=None,
    )


def _page(worker_health: str | None, form: str) -> bytes:
    """Returns the metrics page. Omits the worker's metrics if the worker does not answer."""
    if worker_health is None:
        return render_metrics(form=form)
    head, _, body = answer_of(worker_health, METRICS, MAX_PAGE_BYTES).partition(b"\r\n\r\n")
    return render_metrics(body if head.startswith(b"HTTP/1.1 200 ") else b"", form)
