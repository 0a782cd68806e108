"""Uploads: an adapter's files in, a version out. An admin key says whose with `tenant`."""

from __future__ import annotations

import asyncio

from litestar import Controller, Response, post

from adapters.errors import AdapterRejected
from admin import models
from admin.adapter_views import VersionView
from admin.database import Connection
from admin.describe import describe_version
from admin.errors import Invalid
from admin.guards import ADAPTERS_WRITE, ADMIN, requires, tenant_for
from admin.plane import remove_staged
from admin.records import BaseModel
from admin.request import AdminRequest
from admin.serving_data import parse_serving
from admin.upload import receive
from admin.versions import NewVersion

OWN = [requires(ADMIN, ADAPTERS_WRITE)]


class UploadController(Controller):
    @post("/adapters", guards=OWN, request_max_body_size=None)
    async def upload(self, request: AdminRequest) -> Response[VersionView]:
        """Makes a version: multipart fields name, model, tenant, alias, serving, and the files
        peft writes. It is ready, and `alias` points to it, when it has been proved.

        201 for a new version; 200 and the existing one if its content is already there.
        """
        plane = request.plane
        staged = await asyncio.to_thread(plane.store.stage)
        try:
            limit = plane.config.max_upload_bytes
            kind = request.headers.get("content-type", "")
            given = await receive(kind, request.stream(), staged, limit)
            if not given.name:
                raise Invalid("the field name is missing", "name_missing", "name")
            serving = await asyncio.to_thread(parse_serving, given.serving)
            async with plane.database.acquire() as connection:
                tenant = await tenant_for(connection, request.user, given.tenant)
                bases = await _bases(connection, given.model)
            try:
                manifest = await plane.validate(staged, bases)
            except AdapterRejected as rejected:
                await plane.reject(tenant, given.name, rejected, request.user)
                raise
            base = next(base for base in bases if base.digest == manifest.base_digest)
            new = NewVersion(
                tenant_id=tenant.id,
                name=given.name,
                base_name=base.name,
                manifest=manifest,
                serving=serving,
                alias=given.alias,
                key_id=request.user.id,
            )
            version, is_new = await plane.publish(new, staged, request.user)
        finally:
            await asyncio.to_thread(remove_staged, staged)
        async with plane.database.acquire() as connection:
            shown = await describe_version(connection, tenant, given.name, version.version)
        return Response(shown, status_code=201 if is_new else 200)


async def _bases(connection: Connection, name: str | None) -> list[BaseModel]:
    """The one named, or all registered: then the tensors decide."""
    if name:
        return [await models.find_model(connection, name)]
    if found := await models.list_models(connection):
        return found
    raise Invalid("no base model is registered yet", "no_base_model", "model")
