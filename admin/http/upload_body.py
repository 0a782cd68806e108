"""OpenAPI description of routes that take an adapter's files."""

from __future__ import annotations

from typing import Any

from litestar.openapi.spec import (
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIType,
    RequestBody,
    Schema,
)

from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME
from admin.uploads.upload import MULTIPART, UploadForm
from web.openapi import flat

JSON = "application/json"
BINARY = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
TEXT = Schema(type=OpenAPIType.STRING)


def upload_body(form: UploadForm[Any]) -> RequestBody:
    """Returns the description of a body: JSON, or a form with the same fields and the files."""
    files = (CONFIG_NAME, WEIGHTS_NAME, "file")
    properties = dict.fromkeys(form.texts, TEXT) | dict.fromkeys(files, BINARY)
    schema = Schema(type=OpenAPIType.OBJECT, required=form.required, properties={**properties})
    content = {
        MULTIPART: OpenAPIMediaType(schema),
        JSON: OpenAPIMediaType(flat(form.kind)),
    }
    return RequestBody(content, required=True)
