"""Records of tenants, keys, models and adapters in the database. The records are frozen, and this
module does not import torch.

An API key has the form `lpx_<id>_<secret><crc>`, with 12, 43 and 6 characters of base62. The CRC-32
covers everything before it, so that mistyped and invented keys are refused without a lookup.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import zlib
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec

from adapters.manifest import BaseModelShape

BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
KEY_PATTERN = re.compile(r"lpx_([0-9A-Za-z]{12})_[0-9A-Za-z]{43}([0-9A-Za-z]{6})", re.ASCII)
TENANT_SCOPES = frozenset({"inference", "adapters:write", "usage:read"})
ADMIN_SCOPES = frozenset({"admin"})


class NewKey(msgspec.Struct, frozen=True):
    """New key, shown once to its owner. `text` is the secret; `id` may be shown and stored."""

    id: str
    text: str


def new_key(seed: bytes | None = None) -> NewKey:
    """Returns a key of 256 random bits, or one derived from `seed`."""
    drawn = hashlib.shake_256(seed or secrets.token_bytes(32)).digest(64)
    key_id = _base62(int.from_bytes(drawn[:32], "big") % 62**12, 12)
    body = f"lpx_{key_id}_{_base62(int.from_bytes(drawn[32:], 'big'), 43)}"
    return NewKey(id=key_id, text=body + _checksum(body))


def parse_key(text: str) -> str | None:
    """Returns the id in a key's text, or None if the form or checksum is invalid. A key with this
    id need not exist."""
    found = KEY_PATTERN.fullmatch(text)
    if found is None or _checksum(text[:-6]) != found.group(2):
        return None
    return found.group(1)


def hash_key(text: str, pepper: bytes) -> bytes:
    """Returns the HMAC-SHA-256 of the whole key: 32 bytes. Compare with `hmac.compare_digest`."""
    return hmac.digest(pepper, text.encode(), hashlib.sha256)


def random_base62(length: int) -> str:
    return "".join(secrets.choice(BASE62) for _ in range(length))


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), 6)


def _base62(number: int, length: int) -> str:
    digits = ""
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits = BASE62[digit] + digits
    return digits


class AdapterState(StrEnum):
    UPLOADING = "uploading"
    VALIDATING = "validating"
    PROVING = "proving"
    AWAITING_APPROVAL = "awaiting_approval"
    """The version is verified, but an admin must still approve its chat template."""
    READY = "ready"
    REJECTED = "rejected"
    RETIRED = "retired"
    """The version serves only requests in flight, and is deleted when the last one has ended."""


class Tenant(msgspec.Struct, frozen=True):
    id: str
    """Id, `ten_` and 12 random characters. Ids are never reused, because usage refers to them."""
    name: str
    """Unique name that people use, as in `tenant/adapter`."""
    sharing_group: str | None = None
    """Group of tenants that share cached prefixes. None if the tenant shares with no other."""
    require_signature: bool = False
    """Whether only signed adapters are accepted."""
    created_at: datetime | None = None


class Caller(msgspec.Struct, frozen=True):
    """Who makes a request, as guards, the audit log and routes know it, however it has proved who
    it is."""

    id: str
    """Id under which the audit log records what the caller does, such as the id of its API key."""
    kind: Literal["key", "user", "system"]
    """What the id names: an API key, a person who has signed in, or this server."""
    tenant_id: str | None
    """Id of the only tenant that the caller may see. None for an administrator."""
    scopes: frozenset[str]


class ApiKey(msgspec.Struct, frozen=True):
    """API key. `id` is the key's public part. Only a keyed hash of the whole key is stored."""

    id: str
    tenant_id: str | None
    """Id of the key's tenant. None for an admin key, which cannot be used for inference."""
    hash: bytes
    scopes: frozenset[str]
    """Some of `TENANT_SCOPES` for a tenant's key, or of `ADMIN_SCOPES` for an admin key."""
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    name: str = ""
    created_at: datetime | None = None
    not_before: datetime | None = None
    models: frozenset[str] | None = None
    """Names of the tenant's models that the key may use for inference. None allows all of them."""
    cidrs: tuple[str, ...] | None = None
    """Networks from which clients may use the key. None allows any address."""
    replaces: str | None = None
    """Id of the key that this key was rotated from."""
    family: str | None = None
    """Id of the first key in a chain of rotated keys. None if this key is the first."""

    @property
    def caller(self) -> Caller:
        """Caller of requests that are made with the key."""
        return Caller(self.id, "key", self.tenant_id, self.scopes)

    @property
    def quota_subject(self) -> str:
        """Id under which the key's limits apply and its usage is counted. All keys of a chain of
        rotated keys share this id."""
        return self.family or self.id

    def is_live(self, now: datetime) -> bool:
        return (
            self.revoked_at is None
            and (self.not_before is None or self.not_before <= now)
            and (self.expires_at is None or now < self.expires_at)
        )

    def may_come_from(self, host: str | None) -> bool:
        """Returns whether a client's IP address is in the key's networks. None is in no network."""
        if self.cidrs is None:
            return True
        try:
            address = ipaddress.ip_address(host or "")
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return any(address in network for network in _networks(self.cidrs))


def plain_model(name: str) -> str:
    """Returns the plain name of an adapter's production alias, and any other name unchanged."""
    return name.removesuffix("@prod")


@lru_cache(maxsize=4096)
def _networks(
    cidrs: tuple[str, ...],
) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(cidr) for cidr in cidrs)


class Residency(StrEnum):
    """Whether workers load a base model."""

    AUTO = "auto"
    """Workers load the model on request."""
    PINNED = "pinned"
    """Workers always keep the model loaded."""
    UNLOADED = "unloaded"
    """Workers never load the model."""


class BaseModel(msgspec.Struct, frozen=True):
    name: str
    digest: str
    shape: BaseModelShape
    max_model_len: int
    created_at: datetime
    residency: Residency = Residency.AUTO
    source: str = ""
    """Name under which the weights were imported, such as a repository's name, or empty."""


class GenerationDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Default sampling parameters of requests to a version. They take precedence over the base
    model's defaults."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None


ToolFormat = Literal[
    "generic", "hermes", "qwen_xml", "llama_json", "pythonic", "mistral", "gemma", "gemma4"
]
"""Format in which a model writes tool calls."""


class ServingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a version's serving data that uploads, database rows and views have in common."""

    stop: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], ...],
        msgspec.Meta(max_length=16),
    ] = ()
    """Strings that are added to the stop strings of each request."""
    stop_token_ids: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...], msgspec.Meta(max_length=64)
    ] = ()
    """Tokens that end answers, in addition to the base model's."""
    defaults: GenerationDefaults = GenerationDefaults()
    pooling: Literal["last", "mean", "cls"] | None = None
    """How embeddings are pooled from the last hidden states. None uses the base model's method."""
    tool_format: ToolFormat | None = None
    """Format of tool calls. None derives it from the chat template."""
    metadata: Annotated[
        dict[
            Annotated[str, msgspec.Meta(min_length=1, max_length=64)],
            Annotated[str, msgspec.Meta(max_length=512)],
        ],
        msgspec.Meta(max_length=16),
    ] = {}


class ServingData(ServingFields, frozen=True, kw_only=True, omit_defaults=True):
    """Serving data of a version, which is part of its identity in addition to its weights. Unknown
    fields are allowed, because a newer release may have written the row. Uploads are checked in
    admin/adapters/serving_data.py."""

    chat_template: Annotated[str, msgspec.Meta(min_length=1, max_length=64 << 10)] | None = None
    """Chat template, which is rendered only after an admin has approved its text."""

    def shared(self) -> dict[str, Any]:
        """Returns the fields that a view of the version has in common with this record."""
        return {name: getattr(self, name) for name in ServingFields.__struct_fields__}

    @property
    def template_digest(self) -> str | None:
        """SHA-256 (hex) of the chat template's text."""
        if self.chat_template is None:
            return None
        return hashlib.sha256(self.chat_template.encode()).hexdigest()


class CanaryPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """Policy of rollback to the stable version, judged over the last `window_s` seconds."""

    window_s: Annotated[int, msgspec.Meta(ge=10, le=86400)] = 300
    min_requests: Annotated[int, msgspec.Meta(ge=1)] = 20
    """Minimum number of requests to the canary, and also to the stable version, in the window. With
    fewer requests, the canary is not judged."""
    max_error_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.05
    """Maximum amount by which the canary's error rate may exceed the stable version's."""
    max_ttft_ratio: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    """Maximum ratio of the canary's median time to first token to the stable version's."""


class VersionFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that an adapter version has everywhere: in an upload's form and JSON body, in its
    database row (one column each), in the admin API's answers, and at the gateways.

    Each field except the name is also an option of `loraplex adapter push`, with the `description`
    of its `msgspec.Meta` as help. Such a field must have a default, which ephemeral versions get.
    """

    name: str
    """Name of the adapter."""


class ServedVersion(VersionFields, frozen=True):
    """Ready version, as gateways need it."""

    tenant_id: str
    version: int
    created_at: datetime
    digest: str
    base_name: str
    serving: ServingData = ServingData()
    invocation_tokens: tuple[int, ...] = ()
    """Token ids that switch an activated LoRA on, from its manifest."""
    is_ephemeral: bool = False
    """Whether the version is loaded for a limited time, without verification."""
    signature: bytes | None = None
    """Signature of the version's content, which workers check. None if it is not signed."""
    public_key: bytes | None = None


class Alias(msgspec.Struct, frozen=True):
    """Name that points to `version`, or during a canary to several versions, of which `version` is
    the stable one."""

    tenant_id: str
    name: str
    alias: str
    version: int
    canary: dict[int, int] | None = None
    """Weight of each version of the canary, including `version`. None without a canary."""
    policy: CanaryPolicy | None = None
    pinned: bool = False
    change: int | None = None
    """Id of the alias's last move in its history."""


class AdapterProof(msgspec.Struct, frozen=True):
    """Record that a worker with this layout has verified an adapter's content."""

    digest: str
    base_digest: str
    layout: str
    checksum: str
    """SHA-256 (hex) of the packed image."""


ServiceClassName = Literal["interactive", "standard", "batch"]
"""Service class of a tenant's requests, by how urgent their answers are."""


class Quota(msgspec.Struct, frozen=True):
    """Limits of a tenant or of one of its keys. None sets no limit."""

    subject: str
    """Id of the tenant or key."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    spend_per_day: int | None = None
    """Limit in pico-dollars, as is `spend_per_month`."""
    spend_per_month: int | None = None
    adapters: int | None = None
    """Number of adapter names. This and the following limits apply only to tenants."""
    adapter_bytes: int | None = None
    """Bytes of all adapter versions. Each content counts once."""
    cached_weight: int = 100
    """Weight of a cached prompt token in token limits, in percent of an uncached one."""
    weight: int = 1
    """Weight of the tenant's requests on a worker, relative to other tenants."""
    service_class: ServiceClassName = msgspec.field(default="standard", name="class")


class Price(msgspec.Struct, frozen=True):
    """Price of a base model and its adapters, in pico-dollars per token or, equally, micro-dollars
    per million tokens."""

    model: str
    """Served name of the base model."""
    input: int
    cached_input: int
    """Price of cached prompt tokens. At most `input`."""
    output: int


class KnownWorker(msgspec.Struct, frozen=True):
    """Worker that has registered itself, or for which a drain was requested."""

    id: str
    """Name that the worker gives itself."""
    address: str
    is_registered: bool
    """Whether gateways connect to the worker, because it is registered."""
    draining: bool | None = None
    """Whether a drain was requested. None if neither a drain nor its end was requested."""


AdapterPlace = tuple[str, str]
"""Id of an adapter's tenant, and the adapter's name."""


class Changed(msgspec.Struct, frozen=True):
    """Tenants and adapters that an incremental snapshot includes."""

    tenants: frozenset[str]
    """Ids of tenants whose rows, except adapters, are included."""
    adapters: frozenset[AdapterPlace]


class CatalogSnapshot(msgspec.Struct, frozen=True):
    """Everything that a gateway needs to serve requests without queries, as of `generation`."""

    generation: int
    tenants: tuple[Tenant, ...]
    keys: tuple[ApiKey, ...]
    models: tuple[BaseModel, ...]
    versions: tuple[ServedVersion, ...]
    aliases: tuple[Alias, ...]
    proofs: tuple[AdapterProof, ...] = ()
    approved_templates: frozenset[str] = frozenset()
    """Digests of the approved chat templates of adapters."""
    quotas: tuple[Quota, ...] = ()
    prices: tuple[Price, ...] = ()
    workers: tuple[KnownWorker, ...] = ()
    changed: Changed | None = None
    """Tenants and adapters that an incremental snapshot includes, each with all its current rows.
    Other tenants and adapters are unchanged. None if the snapshot is complete."""


class ModelState(msgspec.Struct, frozen=True):
    """State of a base model on one worker."""

    worker: str
    tier: str
    """State on the worker: device; host or cold (must be loaded); loading or draining (in
    transition); unsatisfiable (the worker's settings cannot serve it)."""
    num_bytes: int
    """Bytes that the weights take on the device, or took when they were last there."""
    num_swaps: int
    """Number of loads to the device."""
    num_running: int
    num_waiting: int
    idle_since: datetime | None
    """Time since which the model has had no requests. null if it has requests, or never had one."""
    load_s: float
    """Seconds for a load to the device, measured or estimated. 0 if unknown."""
    error: str
    """Reason why the model could not be loaded. Empty after a successful load."""
    reported_at: datetime
