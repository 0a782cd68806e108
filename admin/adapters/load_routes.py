"""vLLM's routes that load and unload an adapter, as training loops and scripts call them."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
from litestar import Controller, MediaType, Request, Response, post
from litestar.openapi import ResponseSpec
from litestar.params import JSONBody

from admin.adapters import ephemeral
from admin.adapters.serving_data import check_entity_name
from admin.adapters.versions import NewVersion
from admin.http import problems
from admin.http.guards import ADAPTERS_WRITE, ADMIN, requires
from admin.http.openapi import AdminOperation
from admin.http.parameters import TenantName
from admin.http.request import AdminRequest
from admin.http.upload_body import JSON, upload_body
from admin.models import models
from admin.uploads.archive import StagingFolder
from admin.uploads.upload import MULTIPART, UploadForm, media_type
from store.errors import Invalid, NotFound
from store.records import BaseModel, Tenant

MAX_JSON_BYTES = 64 << 10
TYPES = {400: "InvalidUserInput", 404: "NotFoundError", 500: "InternalServerError"}
"""Type of an error in vLLM's answers, by status."""
SKIPPED = {"loraplex-effect-proof": "skipped"}


class VllmErrorDetails(msgspec.Struct, frozen=True):
    """Details of an error. For a refused adapter, also has field, got, allowed and hint."""

    message: str
    type: str
    param: str | None
    """Name of the wrong field, parameter or header."""
    code: int
    """HTTP status."""
    reason: str | None
    """Error code, the same as on the other routes."""


class VllmErrorBody(msgspec.Struct, frozen=True):
    """Body of an error in vLLM's format, with our error code as `reason`."""

    error: VllmErrorDetails


class LoadLoraAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request to load an adapter. Has vLLM's fields, and `model`."""

    example: ClassVar[dict[str, Any]] = {
        "lora_name": "policy",
        "lora_path": "/checkpoints/policy/step-120",
        "load_inplace": True,
    }

    lora_name: str
    lora_path: str
    """Absolute path of a folder on the admin plane's machine, under one of `adapter_roots`."""
    load_inplace: bool = False
    """Whether to replace a loaded adapter of this name."""
    is_3d_lora_weight: Annotated[bool, msgspec.Meta(extra_json_schema={"const": False})] = False
    """Must be false, because adapters of mixture-of-experts layers are not supported."""
    model: str | None = None
    """Served name of the base model. Required if the adapter fits several base models."""


class UnloadLoraAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request to unload an adapter. Has vLLM's fields."""

    example: ClassVar[dict[str, Any]] = {"lora_name": "policy"}

    lora_name: str
    lora_int_id: int | None = None
    """Accepted as vLLM does, but has no effect."""


FORM = UploadForm(LoadLoraAdapter, absent={"lora_path": "(in the body)"})


class _Stages:
    """Durations of the stages of a load."""

    def __init__(self) -> None:
        self._stages: list[str] = []
        self._began = time.perf_counter()

    def end(self, name: str) -> None:
        """Records the duration of the current stage under this name, and begins the next stage."""
        now = time.perf_counter()
        self._stages.append(f"{name};dur={(now - self._began) * 1000:.1f}")
        self._began = now

    @property
    def header(self) -> str:
        """Returns the durations as the value of the header `server-timing`, in milliseconds."""
        return ", ".join(self._stages)


class LoadOperation(AdminOperation):
    body = upload_body(FORM)


def _answered(*statuses: int) -> dict[int, ResponseSpec]:
    return {
        status: ResponseSpec(VllmErrorBody, generate_examples=False, description="As vLLM's.")
        for status in statuses
    }


def to_vllm_response(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Returns the answer to an error in vLLM's format: `code` holds the HTTP status, and `reason`
    holds our error code."""
    answer = problems.to_response(request, error)
    status = answer.status_code or 500
    problem = answer.content["error"]
    problem["reason"] = problem["code"]
    problem["code"] = status
    problem["type"] = TYPES.get(status, problem["type"])
    return answer


class LoraAdapterController(Controller):
    path = "/v1"
    tags = ("adapters",)
    guards = (requires(ADMIN, ADAPTERS_WRITE),)
    exception_handlers: ClassVar[Any] = {Exception: to_vllm_response}

    @post(
        "/load_lora_adapter",
        status_code=200,
        media_type=MediaType.TEXT,
        request_max_body_size=None,
        operation_class=LoadOperation,
        responses=_answered(400, 401, 403, 404, 408, 409, 413, 429, 503, 507),
    )
    async def load_lora_adapter(
        self, request: AdminRequest, tenant: TenantName = None
    ) -> Response[str]:
        """Loads an adapter as an ephemeral version. From then on, `"model": lora_name` refers to
        it.

        A JSON body names a folder that the operator has opened to the tenant. A form
        (multipart/form-data) contains the files, or one .tar or .zip of them. The files are checked
        like the files of every upload. The version's effect is not verified. The newest few
        versions of a name are kept for a limited time, and never become `prod`.
        """
        plane = request.plane
        kind, options = media_type(request.headers.get("content-type", ""))
        stages = _Stages()
        async with plane.forms.taking(request.user.tenant_id), plane.staging() as staged:
            if kind == JSON:
                given = await request.decode(LoadLoraAdapter, MAX_JSON_BYTES)
                owner, bases = await _check(request, given, tenant)
                await _copy(request, owner, given, staged)
                archive = None
            elif kind == MULTIPART and options.get("boundary"):
                given, archive = await request.receive_form(
                    options["boundary"], staged, FORM, partial(_check_first, request, tenant)
                )
                owner, bases = await _check(request, given, tenant)
            else:
                raise Invalid(
                    f"send {JSON} with a lora_path, or {MULTIPART} with the files",
                    "content_type",
                )
            stages.end("receive")
            manifest, base = await plane.validate(
                owner, given.lora_name, bases, staged.path, archive, request.actor
            )
            new = NewVersion(
                tenant_id=owner.id,
                name=given.lora_name,
                base_name=base.name,
                manifest=manifest,
                uploaded_by=request.user.id,
            )
            stages.end("check")
            number = await plane.load(new, staged.path, request.actor, in_place=given.load_inplace)
            await request.until_known()
            stages.end("publish")
        return Response(
            f"Success: LoRA adapter '{given.lora_name}' added successfully.",
            headers={
                **SKIPPED,
                "loraplex-adapter-version": str(number),
                "server-timing": stages.header,
            },
        )

    @post(
        "/unload_lora_adapter",
        status_code=200,
        media_type=MediaType.TEXT,
        responses=_answered(400, 401, 403, 404, 408, 409, 413, 429, 503),
    )
    async def unload_lora_adapter(
        self,
        request: AdminRequest,
        data: JSONBody[UnloadLoraAdapter],
        tenant: TenantName = None,
    ) -> str:
        """Retires all ephemeral versions of an adapter. Requests in flight with them end normally.
        Versions that were pushed stay."""
        if not data.lora_name:
            raise Invalid(
                "'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name"
            )
        async with request.with_tenant(tenant, changes=True) as (connection, owner):
            retired = await ephemeral.retire_ephemeral(connection, owner.id, data.lora_name)
        await request.plane.settle_retirement(retired)
        return f"Success: LoRA adapter '{data.lora_name}' removed successfully."


async def _check_first(request: AdminRequest, tenant: str | None, given: LoadLoraAdapter) -> None:
    """Checks the fields that precede the files in a form, so that a wrong request is refused before
    its files are read. Does nothing if the fields follow the files."""
    if given.lora_name:
        await _check(request, given, tenant)


async def _check(
    request: AdminRequest, given: LoadLoraAdapter, reference: str | None
) -> tuple[Tenant, list[BaseModel]]:
    """Checks everything that can be checked without the files. `reference` is the name or id of the
    tenant, or None to use the tenant of the caller's key. Returns the tenant, and the base models
    that the adapter may be for. Raises ApiError."""
    if not given.lora_name or not given.lora_path:
        raise Invalid("Both 'lora_name' and 'lora_path' must be provided.", param="lora_name")
    if given.is_3d_lora_weight:
        raise Invalid(
            "is_3d_lora_weight is not supported: adapters of mixture-of-experts layers are not"
            " served",
            "unsupported",
            "is_3d_lora_weight",
        )
    check_entity_name("lora_name", given.lora_name)
    async with request.with_tenant(reference) as (connection, tenant):
        await models.check_not_a_model(connection, given.lora_name)
        await ephemeral.check_name(
            connection, tenant.id, given.lora_name, in_place=given.load_inplace
        )
        return tenant, await models.candidate_bases(connection, given.model)


async def _copy(
    request: AdminRequest, tenant: Tenant, given: LoadLoraAdapter, staged: StagingFolder
) -> None:
    folders = request.plane.opened_folders(tenant)
    try:
        await asyncio.to_thread(folders.copy, given.lora_path, staged)
    except NotFound as error:
        message = f"Loading lora {given.lora_name} failed: No adapter found for {given.lora_path}"
        raise NotFound(message, error.code, error.param) from None
