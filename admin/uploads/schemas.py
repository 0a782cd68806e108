"""The bodies of uploads."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar

import msgspec


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
