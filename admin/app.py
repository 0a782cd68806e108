"""The admin plane as an ASGI application."""

from __future__ import annotations

from litestar import Litestar, Router
from litestar.datastructures import State

from adapters.store import Store
from admin import problems
from admin.config import AdminConfig
from admin.controllers.adapters import AdapterController
from admin.controllers.aliases import AliasController
from admin.controllers.audit import AuditController
from admin.controllers.keys import KeyController
from admin.controllers.models import ModelController
from admin.controllers.organization import OrganizationController
from admin.controllers.prices import PriceController
from admin.controllers.quotas import KeyQuotaController, TenantQuotaController
from admin.controllers.schema import SchemaController
from admin.controllers.tenants import TenantController
from admin.controllers.uploads import UploadController
from admin.controllers.usage import UsageController
from admin.controllers.workers import WorkerController
from admin.database import Database
from admin.parameters import check_parameters
from admin.plane import AdminPlane
from admin.request import AdminRequest, add_request_id

MAX_BODY_BYTES = 64 << 10
"""Of every request but an upload, which has its own bounds."""


def create_app(config: AdminConfig, *, database: Database, store: Store) -> Litestar:
    """Serves /admin/v1 and /v1/organization. The database is the caller's to open and close."""
    controllers = [
        TenantController,
        KeyController,
        ModelController,
        AdapterController,
        AliasController,
        UploadController,
        AuditController,
        UsageController,
        TenantQuotaController,
        KeyQuotaController,
        PriceController,
        WorkerController,
        SchemaController,
    ]
    return Litestar(
        route_handlers=[
            Router("/admin/v1", route_handlers=controllers),
            OrganizationController,
        ],
        state=State({"admin": AdminPlane(config, database, store)}),
        request_class=AdminRequest,
        before_request=check_parameters,
        request_max_body_size=MAX_BODY_BYTES,
        exception_handlers={Exception: problems.to_response},
        before_send=[add_request_id],
        openapi_config=None,
        logging_config=None,
    )
