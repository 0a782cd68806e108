"""What the admin plane takes and tells about adapters. Unknown fields are refused by name."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from admin.adapters.adapters import Adapter, ContentTier
from admin.adapters.aliases import AliasMove
from admin.adapters.stored import StoredContent
from admin.adapters.versions import MAX_VERSION, Fault, Proof, VersionDetails
from admin.records import AdapterState, Alias, CanaryPolicy, GenerationDefaults
from admin.schemas import shown

VersionNumber = Annotated[int, msgspec.Meta(ge=1, le=MAX_VERSION)]
Weight = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class PolicySet(CanaryPolicy, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """When the set goes back by itself; looks at the last `window_s`."""


class AliasSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either a version, or a canary set."""

    example: ClassVar[dict[str, Any]] = {"canary": {"7": 90, "8": 10}}

    version: VersionNumber | None = None
    canary: dict[VersionNumber, Weight] | None = None
    """Version to weight; the version that the alias points to now must be among them."""
    policy: PolicySet | msgspec.UnsetType | None = msgspec.UNSET
    """When the set goes back by itself; null: never; left out: the default policy."""
    completions_only: bool = False
    """Versions whose chat template is not approved will do: their completions are served, and their
    chats refused."""


class TemplateView(msgspec.Struct, frozen=True):
    digest: str
    approved: bool
    """Until then the version serves completions, not chats, and an alias points to it only when
    asked with `completions_only`."""
    text: str


class ServingView(msgspec.Struct, frozen=True):
    template: TemplateView | None
    stop: list[str]
    stop_token_ids: list[int]
    defaults: GenerationDefaults
    metadata: dict[str, str]


class ProofView(msgspec.Struct, frozen=True):
    layout: str
    checksum: str
    worker: str
    proved_at: datetime
    fingerprint: dict[str, Any]


class ProvingView(msgspec.Struct, frozen=True):
    detail: str | None
    """Why it is not proved yet."""
    attempts: int


class FaultView(msgspec.Struct, frozen=True):
    worker: str
    code: str
    message: str
    since: datetime


class TierView(msgspec.Struct, frozen=True):
    worker: str
    tier: str
    """device, host, or loading on its way there"""


class VersionTierView(TierView, frozen=True):
    version: int


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: int
    state: AdapterState
    served: bool
    """Ready, and every live gateway knows it."""
    model: str | None
    digest: str | None
    max_rank: int | None
    num_parameters: int | None
    file_bytes: int | None
    warnings: list[str]
    error: dict[str, Any] | None
    created_at: datetime
    aliases: list[str]
    """Those that point to it, alone or in a canary set."""
    wanted_alias: str | None
    """Given with the upload, and not pointed to it: not ready, moved since, or over the quota of
    pins."""
    uploaded_by: str | None
    retired_at: datetime | None
    expires_at: datetime | None
    """When an ephemeral version is retired; null for a version that stays."""
    effect_proof: Literal["passed", "pending", "failed", "skipped"]
    """Whether a worker has proved what the version computes; skipped for an ephemeral version."""
    serving: ServingView
    proving: ProvingView | None
    proofs: list[ProofView]
    faults: list[FaultView]
    """Errors of workers that could not load it when they last tried."""
    tiers: list[TierView]
    """Where workers have it. For admin keys; others see no worker."""
    stored: StoredContent | None = None
    """What the store has of it; looked at where one version is shown."""
    object: str = "adapter.version"

    @classmethod
    def of(
        cls,
        version: VersionDetails,
        aliases: list[Alias],
        proofs: list[Proof],
        faults: list[Fault],
        tiers: list[ContentTier],
        approved: set[str],
    ) -> VersionView:
        """All but the version may tell of others too."""
        manifest = version.manifest
        base_digest = manifest.base_digest if manifest else None
        own_proofs = [
            shown(ProofView, p)
            for p in proofs
            if (p.version, p.base_digest) == (version.version, base_digest)
        ]
        return shown(
            cls,
            version,
            model=version.base_name,
            max_rank=manifest.max_rank if manifest else None,
            num_parameters=manifest.num_parameters if manifest else None,
            file_bytes=manifest.file_bytes if manifest else None,
            warnings=list(manifest.warnings) if manifest else [],
            aliases=[a.alias for a in aliases if version.version in {a.version, *(a.canary or ())}],
            serving=_serving_view(version, approved),
            proving=_proving_view(version),
            effect_proof=_effect_proof(version, is_proved=bool(own_proofs)),
            proofs=own_proofs,
            faults=[
                shown(FaultView, f)
                for f in faults
                # What came before this upload was reported of another tenant's.
                if f.digest == version.digest and f.since >= version.created_at
            ],
            tiers=[shown(TierView, t) for t in tiers if t.digest == version.digest],
        )


def _serving_view(version: VersionDetails, approved: set[str]) -> ServingView:
    serving, digest = version.serving, version.serving.template_digest
    template = None
    if digest is not None:
        template = TemplateView(digest, digest in approved, serving.chat_template or "")
    return ServingView(
        template,
        list(serving.stop),
        list(serving.stop_token_ids),
        serving.defaults,
        serving.metadata,
    )


def _effect_proof(
    version: VersionDetails, *, is_proved: bool
) -> Literal["passed", "pending", "failed", "skipped"]:
    if version.expires_at is not None:
        return "skipped"
    if is_proved:
        return "passed"
    return "failed" if version.state is AdapterState.REJECTED else "pending"


def _proving_view(version: VersionDetails) -> ProvingView | None:
    if version.state is not AdapterState.PROVING:
        return None
    return ProvingView(version.detail, version.attempts or 0)


class AdapterFields(msgspec.Struct, frozen=True):
    """What the view of an adapter and its line in a listing begin with."""

    name: str
    tenant: str
    created_at: datetime
    aliases: dict[str, int]
    """Alias to version; of a canary set the stable one."""
    canaries: dict[str, dict[int, int]]
    """Alias to version to weight, of those that split requests."""
    pinned: list[str]
    """Aliases."""


class AdapterView(AdapterFields, frozen=True):
    versions: list[VersionView]
    object: str = "adapter"


class AdapterSummaryView(AdapterFields, frozen=True):
    """A line of a listing."""

    states: dict[str, int]
    """Number of versions in each state."""
    last_state: str
    """State of the newest version."""
    tiers: list[VersionTierView]
    """Where workers have the versions that aliases point to. For admin keys; others see no
    worker."""
    object: str = "adapter.summary"

    @classmethod
    def of(cls, adapter: Adapter, tiers: list[ContentTier]) -> AdapterSummaryView:
        """`tiers` may tell of others too."""
        return shown(
            cls,
            adapter,
            tiers=[
                VersionTierView(tier.worker, tier.tier, version)
                for version, digest in adapter.contents.items()
                for tier in tiers
                if tier.digest == digest
            ],
        )


class AliasView(msgspec.Struct, frozen=True):
    name: str
    alias: str
    version: int
    """The stable one of a canary set."""
    canary: dict[int, int] | None
    policy: CanaryPolicy | None
    pinned: bool
    change: int | None
    """Grows with each move."""
    history: list[AliasMove]
    """Newest first."""
    object: str = "adapter.alias"

    @classmethod
    def of(cls, alias: Alias, history: list[AliasMove]) -> AliasView:
        return shown(cls, alias, history=history)


class Retired(msgspec.Struct, frozen=True):
    id: str
    in_flight: int
    """Requests that still have it; they end as they would have."""
    deleted: bool = True
    object: str = "deleted"
