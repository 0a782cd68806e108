"""OpenAPI description of routes that take an adapter's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from litestar.openapi.spec import (
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIType,
    RequestBody,
    Schema,
)

from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME
from admin.http.openapi import AdminOperation
from admin.uploads.upload import MULTIPART, UploadForm
from web.openapi import flat

JSON = "application/json"
BINARY = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
TEXT = Schema(type=OpenAPIType.STRING)


@dataclass
class UploadOperation(AdminOperation):
    """Operation whose body is JSON, or a form with the same fields and the files."""

    form: ClassVar[UploadForm[Any]]

    def __post_init__(self) -> None:
        super().__post_init__()
        files = (CONFIG_NAME, WEIGHTS_NAME, "file")
        properties = dict.fromkeys(self.form.texts, TEXT) | dict.fromkeys(files, BINARY)
        schema = Schema(
            type=OpenAPIType.OBJECT, required=self.form.required, properties={**properties}
        )
        self.request_body = RequestBody(
            {
                MULTIPART: OpenAPIMediaType(schema),
                JSON: OpenAPIMediaType(flat(self.form.kind)),
            },
            required=True,
        )
