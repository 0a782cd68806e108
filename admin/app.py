"""The admin plane as an ASGI application."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Litestar, Router
from litestar.datastructures import State

from adapters.store.folder import Store
from admin.adapters.alias_routes import ALIASES
from admin.adapters.load_routes import LoadLoraAdapter, LoraAdapterController
from admin.adapters.routes import AdapterController
from admin.audit.routes import AuditController
from admin.http import problems
from admin.http.openapi import describe, document
from admin.http.parameters import check_parameters
from admin.http.plane import AdminConfig, AdminPlane
from admin.http.request import AdminRequest, add_headers
from admin.keys.routes import KEYS
from admin.models.routes import MODELS
from admin.overview.routes import show_overview
from admin.prices.routes import PRICES
from admin.quotas.routes import KEY_QUOTAS, OWN_QUOTA, TENANT_QUOTAS
from admin.signing_keys.routes import SIGNING_KEYS
from admin.tenants.routes import TENANTS
from admin.uploads.routes import UploadController
from admin.usage.credit_routes import CREDITS
from admin.usage.organization_routes import OrganizationController
from admin.usage.routes import UsageController
from admin.workers.routes import WORKERS
from store.database import Database
from web.openapi import REFERENCE, Requirements, StructSchemas

MAX_BODY_BYTES = 64 << 10
"""Maximum bytes of request bodies, except uploads."""


def document_of_loads() -> dict[str, Any]:
    """Returns the OpenAPI document of vLLM's routes that load and unload adapters, for a port that
    serves no other routes of the admin plane."""
    app = Litestar(
        route_handlers=[LoraAdapterController],
        request_class=AdminRequest,
        openapi_config=document(MAX_BODY_BYTES),
        plugins=[StructSchemas(), Requirements(describe)],
        logging_config=None,
    )
    made = app.openapi_schema.to_schema()
    (body,), schemas = msgspec.json.schema_components([LoadLoraAdapter], ref_template=REFERENCE)
    made["components"]["schemas"] |= schemas
    content = made["paths"]["/v1/load_lora_adapter"]["post"]["requestBody"]["content"]
    content["application/json"]["schema"] = body
    return made


def create_app(config: AdminConfig, *, database: Database, store: Store) -> Litestar:
    """Creates the application of /admin/v1, /v1/organization, and vLLM's routes that load adapters.
    The caller must open and close the database."""
    controllers = [
        TENANTS.router,
        KEYS.router,
        MODELS.router,
        AdapterController,
        ALIASES.router,
        UploadController,
        AuditController,
        UsageController,
        CREDITS.router,
        OWN_QUOTA.router,
        TENANT_QUOTAS.router,
        KEY_QUOTAS.router,
        PRICES.router,
        SIGNING_KEYS.router,
        WORKERS.router,
        show_overview,
    ]
    return Litestar(
        route_handlers=[
            Router("/admin/v1", route_handlers=controllers),
            OrganizationController,
            LoraAdapterController,
        ],
        state=State({"admin": AdminPlane(config, database, store)}),
        request_class=AdminRequest,
        before_request=check_parameters,
        request_max_body_size=MAX_BODY_BYTES,
        exception_handlers={Exception: problems.to_response},
        before_send=[add_headers],
        openapi_config=document(MAX_BODY_BYTES),
        plugins=[StructSchemas(), Requirements(describe)],
        logging_config=None,
    )
