"""Checks that a tenant signed the name, the base model and the serving data of an upload."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from adapters.format.signature import SIGNED_FIELDS, is_upload_signed
from admin.signing_keys.signing_keys import list_keys, parse_signature
from admin.uploads.version_create import VersionCreate
from store.database import Connection
from store.errors import Invalid
from store.records import Tenant
from web.errors import Forbidden


async def check_upload_signature(
    connection: Connection, tenant: Tenant, digest: str, given: VersionCreate
) -> list[str]:
    """Returns a warning if only the files are signed. digest: digest of the files.

    Raises Invalid unless one of the tenant's keys made the signature of the upload, and Forbidden
    if the tenant requires this signature and the upload has none.
    """
    signature = parse_signature(given.upload_signature, "upload_signature")
    if signature is None:
        if given.signature is None:
            return []
        if tenant.require_signature:
            raise Forbidden(
                "This tenant requires signed adapters, and this signature covers the files only,"
                " not the name, the base model and the serving data: push with the --sign of this"
                " release (the field upload_signature).",
                "signature_required",
            )
        return ["the signature covers the files only, not the name, base model and serving data"]
    fields = {name: _plain(getattr(given, name)) for name in SIGNED_FIELDS}
    for key in await list_keys(connection, tenant.id, "", None):
        public = base64.b64decode(key.public_key)
        if key.revoked_at is None and is_upload_signed(public, signature, digest, fields):
            return []
    raise Invalid(
        "upload_signature: made with none of the tenant's signing keys that are in force, or of an"
        f" upload with another name, model, serving data or content than {digest}",
        "signature_invalid",
        "upload_signature",
    )


def _plain(value: str | msgspec.Raw | None) -> Any:
    """Returns the value of a field that may be raw JSON."""
    if not isinstance(value, msgspec.Raw):
        return value
    return msgspec.json.decode(value) if bytes(value) else None
