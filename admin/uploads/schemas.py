"""The bodies of uploads."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar

import msgspec

from admin.adapters.versions import RejectedUpload
from admin.schemas import shown
from admin.uploads.upload import VersionFields
from store.errors import Invalid


class UploadCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    example: ClassVar[dict[str, Any]] = {"bytes": 1048576, "filename": "bot.tar"}
    bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
    filename: Annotated[str, msgspec.Meta(max_length=255)]
    """Name of the archive, whose extension gives the format: .tar or .zip."""


class UploadView(msgspec.Struct, frozen=True):
    id: str
    bytes: int
    filename: str
    offset: int
    """Number of bytes received so far, which is where the next piece begins."""
    expires_at: datetime
    """Time at which the upload is deleted unless another piece arrives first."""
    object: str = "upload"


class RejectedUploadView(RejectedUpload, frozen=True):
    object: str = "upload.rejected"

    @classmethod
    def of(cls, rejected: RejectedUpload) -> RejectedUploadView:
        return shown(cls, rejected)


class VersionCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Version of an adapter to create from an upload."""

    example: ClassVar[dict[str, Any]] = {
        "upload": "upl_000000000000000000000000",
        "name": "bot",
        "alias": "prod",
    }

    upload: str
    name: str
    model: str | None = None
    tenant: str | None = None
    alias: str | None = None
    sha256: str | None = None
    """SHA-256 of the archive in hex."""
    signature: str | None = None
    """Base64 of the ed25519 signature of the content."""
    approve_template: bool = False
    """Whether the chat template is approved. Only for admin keys."""
    serving: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    folder_serving: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """Serving data from files in the adapter's folder. A field is used if `serving` does not set it
    and the base model has another value."""

    def fields(self) -> VersionFields:
        """Returns the fields as those of a form. Raises Invalid."""
        return VersionFields(
            name=self.name,
            model=self.model,
            tenant=self.tenant,
            alias=self.alias,
            signature=self.signature,
            serving=_text(self.serving, "serving"),
            folder_serving=_text(self.folder_serving, "folder_serving"),
            approve_template="true" if self.approve_template else None,
        )


def _text(raw: msgspec.Raw, field: str) -> str | None:
    try:
        return bytes(raw).decode() or None
    except UnicodeDecodeError as error:
        raise Invalid(f"{field}: {error}", "serving_invalid", field) from None
