"""Routes of uploads, in one request or in pieces. A complete upload becomes a version."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import msgspec
from litestar import Controller, Response, delete, get, patch, post
from litestar.enums import ParamType
from litestar.openapi import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIType, Parameter, RequestBody, Schema
from litestar.params import FromPath, JSONBody

from admin.adapters import versions
from admin.adapters.schemas import VersionView
from admin.adapters.serving_data import check_names, parse_serving
from admin.adapters.versions import NewVersion, RejectedUploadView
from admin.http.entities import page
from admin.http.guards import ADAPTERS_WRITE, ADMIN, requires, tenant_for
from admin.http.openapi import AdminOperation
from admin.http.parameters import TenantName
from admin.http.request import AdminRequest
from admin.http.upload_body import BINARY, JSON, upload_body
from admin.models import models
from admin.models.folder_tokens import parse_folder_tokens
from admin.schemas import Deleted, Page, shown
from admin.signing_keys.signing_keys import parse_signature
from admin.uploads.schemas import UploadCreate, UploadView
from admin.uploads.upload import MULTIPART, UploadForm, media_type
from admin.uploads.upload_signature import check_upload_signature
from admin.uploads.version_create import VersionCreate
from store.errors import Invalid
from store.records import BaseModel, ServingData, Tenant
from web.errors import Forbidden
from web.openapi import refused

OWN = [requires(ADMIN, ADAPTERS_WRITE)]
PARTS = [requires(ADMIN, ADAPTERS_WRITE, changes_rows=False)]
"""Guards of routes that receive an upload's bytes. Requests to these routes do not count as
changes, because uploads have limits of their own."""
FORM = UploadForm(VersionCreate, absent={"upload": ""})
MAX_JSON_BYTES = 1 << 20
UPLOADING = (404, 408, 409, 413, 507)
"""Error statuses of routes that receive files."""


class VersionOperation(AdminOperation):
    body = upload_body(FORM)


OFFSET = Schema(type=OpenAPIType.INTEGER, minimum=0, maximum=10**15 - 1)


class AppendOperation(AdminOperation):
    """Operation whose body is bytes, with a header for their offset in the upload."""

    more_parameters = (Parameter("upload-offset", ParamType.HEADER, schema=OFFSET, required=True),)
    body = RequestBody({"application/octet-stream": OpenAPIMediaType(BINARY)}, required=True)


class UploadController(Controller):
    tags = ("adapters",)

    @post(
        "/adapters",
        guards=OWN,
        request_max_body_size=None,
        operation_class=VersionOperation,
        responses={
            200: ResponseSpec(VersionView, generate_examples=False, description="Already there."),
            **refused(*UPLOADING, 429),
        },
    )
    async def create_version(self, request: AdminRequest) -> Response[VersionView]:
        """Creates a version from the files of a form, or from an upload that was sent before.

        A form has the files that peft writes, or one archive, and the fields name, model, tenant,
        alias, sha256, serving, folder_serving, folder_tokens, signature,
        upload_signature and approve_template.
        `folder_tokens` names tokens of the tokenizer in the adapter's folder. `folder_serving` is
        serving data from other files in the adapter's folder. Each of its fields is used if
        `serving` does not set it and the base model has another value. A JSON body has the same
        fields, and `upload`, the upload's id. The version is ready, and `alias` points to it, once
        it is verified and its chat template, if it has one, is approved. 201 for a new version. 200
        with the existing version if its content is the same.
        """
        plane = request.plane
        kind, options = media_type(request.headers.get("content-type", ""))
        async with plane.staging() as staged:
            if kind == JSON:
                given = await request.decode(VersionCreate, MAX_JSON_BYTES)
                async with plane.uploads.completing(
                    request.user, given.upload, given.sha256
                ) as upload:
                    return await _make(request, given, staged.path, upload.data)
            if kind == MULTIPART and options.get("boundary"):
                async with plane.forms.taking(request.user.tenant_id):
                    given, archive = await request.receive_form(
                        options["boundary"], staged, FORM, partial(_check_first, request)
                    )
                    return await _make(request, given, staged.path, archive)
        raise Invalid(f"send {MULTIPART}, or {JSON} with an upload", "content_type")

    @post("/uploads", guards=OWN, responses=refused(507))
    async def create_upload(
        self, request: AdminRequest, data: JSONBody[UploadCreate]
    ) -> UploadView:
        """Announces an archive that will be sent in pieces."""
        made = await request.plane.uploads.create(request.user, data.bytes, data.filename)
        return shown(UploadView, made)

    @get("/uploads/rejected", guards=OWN)
    async def list_rejected(
        self, request: AdminRequest, tenant: TenantName = None
    ) -> Page[RejectedUploadView]:
        """Lists uploads whose files were refused, the newest first, with the reason. The last 20
        are kept for 7 days."""
        async with request.with_tenant(tenant) as (connection, owner):
            found = await versions.list_rejected(connection, owner.id)
        return page(found, versions.MAX_REJECTED)

    @get("/uploads/{upload_id:str}", guards=OWN)
    async def show_upload(self, request: AdminRequest, upload_id: FromPath[str]) -> UploadView:
        return shown(UploadView, await request.plane.uploads.find(request.user, upload_id))

    @patch(
        "/uploads/{upload_id:str}",
        guards=PARTS,
        request_max_body_size=None,
        operation_class=AppendOperation,
        responses=refused(*UPLOADING),
    )
    async def append(self, request: AdminRequest, upload_id: FromPath[str]) -> UploadView:
        """Appends the body at the offset in the header `upload-offset`. 409 with the right offset
        if the header has another.

        The answer counts only bytes that are on the disk. If a request breaks off, the bytes
        received so far are kept.
        """
        given = request.headers.get("upload-offset", "")
        if not (given.isascii() and given.isdigit() and len(given) < 16):
            raise Invalid("the header upload-offset is missing", "upload_offset", "upload-offset")
        length = request.num_body_bytes
        appended = await request.plane.uploads.append(
            request.user, upload_id, int(given), length, request.upload()
        )
        return shown(UploadView, appended)

    @delete("/uploads/{upload_id:str}", guards=OWN, status_code=200)
    async def delete_upload(self, request: AdminRequest, upload_id: FromPath[str]) -> Deleted:
        await request.plane.uploads.delete(request.user, upload_id)
        return Deleted(upload_id)


async def _make(
    request: AdminRequest, given: VersionCreate, staged: Path, archive: Path | None
) -> Response[VersionView]:
    plane = request.plane
    tenant, bases, serving, found = await _check(request, given)
    templates = {"serving": serving.chat_template, "folder_serving": found.chat_template}
    given_templates = {field: text for field, text in templates.items() if text is not None}
    manifest, base = await plane.validate(
        tenant, given.name, bases, staged, archive, request.actor, given_templates
    )
    tokens = parse_folder_tokens(given.folder_tokens)
    async with request.reading() as connection:
        covered = await check_upload_signature(connection, tenant, manifest.digest, given)
    serving, warnings = await plane.add_found(serving, found, tokens, base)
    warnings += covered
    together = (*manifest.warnings, *warnings)
    manifest = msgspec.structs.replace(manifest, warnings=together)
    new = shown(
        NewVersion,
        given,
        tenant_id=tenant.id,
        base_name=base.name,
        manifest=manifest,
        serving=serving,
        wanted_alias=given.alias,
        uploaded_by=request.user.id,
        signature=parse_signature(given.signature),
    )
    number, is_new = await plane.publish(
        new, staged, request.actor, approves_template=given.approve_template
    )
    if not is_new:
        await request.until_known()
    async with request.reading() as connection:
        view = await versions.find_version(connection, tenant.id, given.name, number)
    return Response(view, status_code=201 if is_new else 200)


async def _check_first(request: AdminRequest, given: VersionCreate) -> None:
    """Checks the fields that precede the files. A missing field may still follow them."""
    try:
        await _check(request, given)
    except Invalid as error:
        if error.code not in ("name_missing", "tenant_missing"):
            raise


async def _check(
    request: AdminRequest, given: VersionCreate
) -> tuple[Tenant, list[BaseModel], ServingData, ServingData]:
    """Checks the fields without the files. Returns the tenant, the base models, the serving data of
    the field `serving`, and the serving data of the field `folder_serving`. Raises Invalid,
    Forbidden or NotFound."""
    if not given.name:
        raise Invalid("the field name is missing", "name_missing", "name")
    check_names(given.name, given.model, given.alias)
    serving = await asyncio.to_thread(parse_serving, given.serving)
    found = await asyncio.to_thread(parse_serving, given.folder_serving, "folder_serving")
    parse_folder_tokens(given.folder_tokens)
    parse_signature(given.signature)
    parse_signature(given.upload_signature, "upload_signature")
    if given.approve_template and request.user.tenant_id is not None:
        raise Forbidden("only an admin key may approve a chat template")
    async with request.reading() as connection:
        tenant = await tenant_for(connection, request.user, given.tenant)
        await models.check_not_a_model(connection, given.name)
        bases = await models.candidate_bases(connection, given.model)
    return tenant, bases, serving, found
