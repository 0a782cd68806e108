"""Fields with which an upload creates a version. The form, the OpenAPI document and the options of
`loraplex adapter push` are derived from them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from store.records import VersionFields

MODEL = "Base model (default: found by the adapter's configuration or tensors)."
ALIAS = "Alias to point to the version once it is ready."


class VersionCreate(VersionFields, frozen=True, forbid_unknown_fields=True):
    """Version of an adapter to create from an upload."""

    example: ClassVar[dict[str, Any]] = {
        "upload": "upl_000000000000000000000000",
        "name": "bot",
        "alias": "prod",
    }

    upload: str
    model: Annotated[str, msgspec.Meta(description=MODEL)] | None = None
    tenant: str | None = None
    alias: Annotated[str, msgspec.Meta(description=ALIAS)] | None = None
    sha256: str | None = None
    """SHA-256 in hex of the archive, or of the weights file if a form sends no archive."""
    signature: str | None = None
    """Base64 of the ed25519 signature of the content."""
    upload_signature: str | None = None
    """Base64 of the ed25519 signature of the content with name, model and the serving data that the
    upload contains. Required with `signature` if the tenant requires signatures."""
    approve_template: bool = False
    """Whether the chat template is approved. Only for admin keys."""
    serving: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    folder_serving: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """Serving data from files in the adapter's folder. A field is used if `serving` does not set it
    and the base model has another value."""
    folder_tokens: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """Tokens of the tokenizer in the adapter's folder: `added` has the ids of added tokens by text,
    and `end` is the text of the token that ends a text. The version's warnings name the tokens that
    the base model lacks. `end` is added to `stop_token_ids` if `serving` does not set them."""
