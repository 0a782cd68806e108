"""Request and response bodies of adapters. Unknown fields are refused by name."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from admin.adapters.adapters import AdapterFields, TierView
from admin.adapters.aliases import AliasMove
from admin.adapters.stored import StoredContent
from store.records import AdapterState, CanaryPolicy, ServingFields, VersionFields

MAX_VERSION = 2**31 - 1
"""Maximum version number, which is the largest integer of the database column."""

VersionNumber = Annotated[int, msgspec.Meta(ge=1, le=MAX_VERSION)]
Weight = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class PolicySet(CanaryPolicy, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Policy of automatic rollback, judged over the last `window_s` seconds."""


class AliasSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New target of an alias: either a version or a canary."""

    example: ClassVar[dict[str, Any]] = {"canary": {"7": 90, "8": 10}}

    version: VersionNumber | None = None
    canary: dict[VersionNumber, Weight] | None = None
    """Weight of each version. The version that the alias points to now must be included."""
    policy: PolicySet | msgspec.UnsetType | None = msgspec.UNSET
    """Policy of an automatic rollback. null disables it; the default applies if it is omitted."""
    completions_only: bool = False
    """Whether versions whose chat template is not approved are accepted. Their completions are
    served, and their chats refused."""


class TemplateView(msgspec.Struct, frozen=True):
    digest: str
    approved: bool
    """Whether an admin has approved the template. Until then, the version serves completions but no
    chats, and an alias points to it only with `completions_only`."""
    text: str


class ServingView(ServingFields, frozen=True, kw_only=True):
    template: TemplateView | None


class ProofView(msgspec.Struct, frozen=True):
    layout: str
    checksum: str
    worker: str
    proved_at: datetime
    fingerprint: dict[str, Any]


class ProvingView(msgspec.Struct, frozen=True):
    detail: str | None
    """Why the version is not verified yet."""
    attempts: int


class FaultView(msgspec.Struct, frozen=True):
    worker: str
    code: str
    message: str
    since: datetime


class VersionView(VersionFields, frozen=True, kw_only=True):
    version: int
    state: AdapterState
    served: bool
    """Whether the version is ready and every live gateway knows it."""
    model: str | None
    digest: str | None
    max_rank: int | None
    num_parameters: int | None
    file_bytes: int | None
    warnings: list[str]
    error: dict[str, Any] | None
    created_at: datetime
    aliases: list[str]
    """Aliases that point to the version, alone or in a canary."""
    wanted_alias: str | None
    """Alias given with the upload, if it does not point to the version. The version is then not
    ready, the alias has moved since, or pins exceed the quota."""
    uploaded_by: str | None
    retired_at: datetime | None
    expires_at: datetime | None
    """Time at which an ephemeral version is retired. null for other versions."""
    signed_by: str | None
    """Id of the key that signed the content. null if it is not signed."""
    signing_key_revoked_at: datetime | None
    """Time at which the signing key was revoked. null if it is not revoked."""
    effect_proof: Literal["passed", "pending", "failed", "skipped"]
    """Whether a worker has verified the version's effect. `skipped` for an ephemeral version."""
    serving: ServingView
    proving: ProvingView | None
    proofs: list[ProofView]
    faults: list[FaultView]
    """Errors of workers that could not load the version on their last attempt."""
    tiers: list[TierView]
    """Tier of the version on each worker. Empty unless the caller has an admin key."""
    stored: StoredContent | None = None
    """State of the version in the store. Set only if a single version is requested."""
    object: str = "adapter.version"


class AdapterView(AdapterFields, frozen=True):
    versions: list[VersionView]
    object: str = "adapter"


class AliasView(msgspec.Struct, frozen=True):
    name: str
    alias: str
    version: int
    """Version that the alias points to. For a canary, the stable version."""
    canary: dict[int, int] | None
    policy: CanaryPolicy | None
    pinned: bool
    change: int | None
    """Id of the alias's last move. Later moves have higher ids."""
    history: list[AliasMove]
    """Moves of the alias, the newest first."""
    object: str = "adapter.alias"


class Retired(msgspec.Struct, frozen=True):
    id: str
    in_flight: int
    """Number of running requests that still use the version. They end normally."""
    deleted: bool = True
    object: str = "deleted"
