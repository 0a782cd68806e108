"""The admin plane as an ASGI application."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Litestar, Router
from litestar.datastructures import State

from adapters.store.folder import Store
from admin.database import Database
from admin.http import problems
from admin.http.controllers.adapters import AdapterController
from admin.http.controllers.aliases import AliasController
from admin.http.controllers.audit import AuditController
from admin.http.controllers.keys import KeyController
from admin.http.controllers.lora_adapters import LoadLoraAdapter, LoraAdapterController
from admin.http.controllers.models import ModelController
from admin.http.controllers.organization import OrganizationController
from admin.http.controllers.overview import show_overview
from admin.http.controllers.prices import PriceController
from admin.http.controllers.quotas import (
    KeyQuotaController,
    OwnQuotaController,
    TenantQuotaController,
)
from admin.http.controllers.tenants import TenantController
from admin.http.controllers.uploads import UploadController
from admin.http.controllers.usage import UsageController
from admin.http.controllers.workers import WorkerController
from admin.http.openapi import describe, document
from admin.http.parameters import check_parameters
from admin.http.plane import AdminConfig, AdminPlane
from admin.http.request import AdminRequest, add_request_id
from admin.openapi import REFERENCE, Requirements, StructSchemas

MAX_BODY_BYTES = 64 << 10
"""Maximum bytes of request bodies, except uploads."""


def document_of_loads() -> dict[str, Any]:
    """Returns the OpenAPI document of vLLM's routes, for a port that has only those."""
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
    The caller opens and closes the database."""
    controllers = [
        TenantController,
        KeyController,
        ModelController,
        AdapterController,
        AliasController,
        UploadController,
        AuditController,
        UsageController,
        OwnQuotaController,
        TenantQuotaController,
        KeyQuotaController,
        PriceController,
        WorkerController,
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
        before_send=[add_request_id],
        openapi_config=document(MAX_BODY_BYTES),
        plugins=[StructSchemas(), Requirements(describe)],
        logging_config=None,
    )
