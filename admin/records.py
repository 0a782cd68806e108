"""Tenants, keys, models and adapters as the database holds them. Frozen; torch-free.

An API key reads `lpx_<id>_<secret><crc>`: 12, 43 and 6 characters of base62. The CRC-32 covers
everything before it, so a mistyped or made-up key is refused without a look-up.
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
from typing import Annotated, Literal

import msgspec

from adapters.manifest import BaseModelShape

BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
KEY_PATTERN = re.compile(r"lpx_([0-9A-Za-z]{12})_[0-9A-Za-z]{43}([0-9A-Za-z]{6})", re.ASCII)
TENANT_SCOPES = frozenset({"inference", "adapters:write", "usage:read"})
ADMIN_SCOPES = frozenset({"admin"})


class NewKey(msgspec.Struct, frozen=True):
    """A key as its owner sees it, once. `text` is the secret; `id` may be shown and stored."""

    id: str
    text: str


def new_key(seed: bytes | None = None) -> NewKey:
    """A key of 256 random bits, or of those of `seed`: from the same comes the same."""
    drawn = hashlib.shake_256(seed or secrets.token_bytes(32)).digest(64)
    key_id = _base62(int.from_bytes(drawn[:32], "big") % 62**12, 12)
    body = f"lpx_{key_id}_{_base62(int.from_bytes(drawn[32:], 'big'), 43)}"
    return NewKey(id=key_id, text=body + _checksum(body))


def parse_key(text: str) -> str | None:
    """The key's id if form and checksum are right, else None; it may never have been issued."""
    found = KEY_PATTERN.fullmatch(text)
    if found is None or _checksum(text[:-6]) != found.group(2):
        return None
    return found.group(1)


def hash_key(text: str, pepper: bytes) -> bytes:
    """HMAC-SHA-256 of the whole key: 32 bytes. Compare with `hmac.compare_digest`."""
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
    """Proved, and an admin has not approved the chat template that it brings."""
    READY = "ready"
    REJECTED = "rejected"
    RETIRED = "retired"
    """Serves the requests that already have it; gone when the last has ended."""


class Tenant(msgspec.Struct, frozen=True):
    id: str
    """`ten_` and 12 random characters; never used again: usage is told by it."""
    name: str
    """Unique; what people write, also in `tenant/adapter`."""
    sharing_group: str | None = None
    """Tenants of one group share cached prefixes; None: the tenant shares none."""
    created_at: datetime | None = None
    deleted_at: datetime | None = None


class ApiKey(msgspec.Struct, frozen=True):
    """id is the public part of the key; only a keyed hash of the whole is kept."""

    id: str
    tenant_id: str | None
    """None: an admin key, which cannot infer."""
    hash: bytes
    scopes: frozenset[str]
    """inference, adapters:write, usage:read (tenant keys); admin (admin keys)."""
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    name: str = ""
    created_at: datetime | None = None
    not_before: datetime | None = None
    models: frozenset[str] | None = None
    """What it may infer with, as its tenant calls it; None: all that the tenant may."""
    cidrs: tuple[str, ...] | None = None
    """Networks that its users are in; None: anywhere."""
    replaces: str | None = None
    """Id of the key that it was rotated from."""
    family: str | None = None
    """Id of the first of the keys that it descends from; None: it is that itself."""

    @property
    def quota_subject(self) -> str:
        """Whose limits it is held to, and whose use it adds to: rotated keys share them."""
        return self.family or self.id

    def is_live(self, now: datetime) -> bool:
        return (
            self.revoked_at is None
            and (self.not_before is None or self.not_before <= now)
            and (self.expires_at is None or now < self.expires_at)
        )

    def may_use(self, model: str) -> bool:
        """`bot` is listed as itself, which is its alias `prod`; `bot@*` lists all of its versions
        and aliases."""
        if self.models is None:
            return True
        name = plain_model(model)
        return name in self.models or f"{name.partition('@')[0]}@*" in self.models

    def may_come_from(self, host: str | None) -> bool:
        """host: the client's IP address. What has none is in no network."""
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
    """The shorter of the two names of an adapter's production alias; all others as they are."""
    return name.removesuffix("@prod")


@lru_cache(maxsize=4096)
def _networks(
    cidrs: tuple[str, ...],
) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(cidr) for cidr in cidrs)


class Residency(StrEnum):
    """Whether a base model is to be on devices."""

    AUTO = "auto"
    """As it is asked for."""
    PINNED = "pinned"
    """At once and always."""
    UNLOADED = "unloaded"
    """Not at all."""


class BaseModel(msgspec.Struct, frozen=True):
    name: str
    digest: str
    shape: BaseModelShape
    max_model_len: int
    created_at: datetime
    residency: Residency = Residency.AUTO
    source: str = ""
    """Name under which its weights were imported, such as that of a repository; may be empty."""


class GenerationDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a version's requests leave out is taken from here before the base model's own."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None


ToolFormat = Literal[
    "generic", "hermes", "qwen_xml", "llama_json", "pythonic", "mistral", "gemma", "gemma4"
]
"""How a model writes its calls of tools."""


class ServingData(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a version brings besides its weights; part of what makes it that version. An upload's
    fields are all known (admin/adapters/serving_data.py); a row may be of a newer release than its
    reader.
    """

    chat_template: Annotated[str, msgspec.Meta(min_length=1, max_length=64 << 10)] | None = None
    """Rendered only once an admin has approved this text."""
    stop: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], ...],
        msgspec.Meta(max_length=16),
    ] = ()
    """Beside those of the request."""
    stop_token_ids: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...], msgspec.Meta(max_length=64)
    ] = ()
    """Tokens that end answers beside the base model's own."""
    defaults: GenerationDefaults = GenerationDefaults()
    pooling: Literal["last", "mean", "cls"] | None = None
    """How embeddings are made of the last hidden states; None: as the base model's are."""
    tool_format: ToolFormat | None = None
    """How the version writes calls; None: as its chat template tells."""
    metadata: Annotated[
        dict[
            Annotated[str, msgspec.Meta(min_length=1, max_length=64)],
            Annotated[str, msgspec.Meta(max_length=512)],
        ],
        msgspec.Meta(max_length=16),
    ] = {}

    @property
    def template_digest(self) -> str | None:
        """SHA-256 (hex) of the chat template's text."""
        if self.chat_template is None:
            return None
        return hashlib.sha256(self.chat_template.encode()).hexdigest()


class CanaryPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """When a canary set goes back to its stable version by itself; looks at the last `window_s`."""

    window_s: Annotated[int, msgspec.Meta(ge=10, le=86400)] = 300
    min_requests: Annotated[int, msgspec.Meta(ge=1)] = 20
    """Requests of the canary and of the stable version in the window, before anything is judged."""
    max_error_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.05
    """Error rate of the canary above the stable version's own."""
    max_ttft_ratio: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    """Ratio of the median times to first token, canary to stable."""


class ServedVersion(msgspec.Struct, frozen=True):
    """A ready version, as serving needs it."""

    tenant_id: str
    name: str
    version: int
    created_at: datetime
    digest: str
    base_name: str
    serving: ServingData = ServingData()
    invocation_tokens: tuple[int, ...] = ()
    """Token ids that switch an activated LoRA on, from its manifest."""
    is_ephemeral: bool = False
    """Whether it was loaded for a while, without an effect proof."""


class Alias(msgspec.Struct, frozen=True):
    """Points to `version`, or as a canary set to several, of which that is the stable one."""

    tenant_id: str
    name: str
    alias: str
    version: int
    canary: dict[int, int] | None = None
    """Version to weight, `version` among them."""
    policy: CanaryPolicy | None = None
    pinned: bool = False
    change: int | None = None
    """Id of its last move in the history."""


class AdapterProof(msgspec.Struct, frozen=True):
    """What a worker of this layout computed with the content was right."""

    digest: str
    base_digest: str
    layout: str
    checksum: str
    """SHA-256 (hex) of the packed image."""


ServiceClassName = Literal["interactive", "standard", "batch"]
"""How soon answers are wanted."""


class Quota(msgspec.Struct, frozen=True):
    """Limits of a tenant or of one of its keys; None: no limit of its own."""

    subject: str
    """Id of the tenant or of the key."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    spend_per_day: int | None = None
    """Pico-dollars."""
    spend_per_month: int | None = None
    adapters: int | None = None
    """For tenants only, as are the following."""
    adapter_bytes: int | None = None
    """Each content once."""
    cached_weight: int = 100
    """Percent of a token that a prompt token found in a cache counts, for all of its keys."""
    weight: int = 1
    """Weight of its requests among those of other tenants that wait for the same worker."""
    service_class: ServiceClassName = msgspec.field(default="standard", name="class")


class Price(msgspec.Struct, frozen=True):
    """What a base model and its adapters cost: pico-dollars a token, or micro-dollars a million."""

    model: str
    """Served name of the base model."""
    input: int
    cached_input: int
    """At most `input`."""
    output: int


class KnownWorker(msgspec.Struct, frozen=True):
    """A worker that has registered itself, or of which something is wanted."""

    id: str
    """Its name for itself."""
    address: str
    is_registered: bool
    """It is to be connected to."""
    draining: bool | None = None
    """Whether it was asked to drain; None: nothing was asked."""


AdapterPlace = tuple[str, str]
"""Whose adapter, by id, and its name."""


class Changed(msgspec.Struct, frozen=True):
    """What a snapshot is of, where it is not of everything."""

    tenants: frozenset[str]
    """What is theirs beside their adapters."""
    adapters: frozenset[AdapterPlace]


class CatalogSnapshot(msgspec.Struct, frozen=True):
    """All the gateway needs to serve without a query on the request path, as of `generation`."""

    generation: int
    tenants: tuple[Tenant, ...]
    keys: tuple[ApiKey, ...]
    models: tuple[BaseModel, ...]
    versions: tuple[ServedVersion, ...]
    aliases: tuple[Alias, ...]
    proofs: tuple[AdapterProof, ...] = ()
    approved_templates: frozenset[str] = frozenset()
    """Digests of the adapters' chat templates that may be rendered."""
    quotas: tuple[Quota, ...] = ()
    prices: tuple[Price, ...] = ()
    workers: tuple[KnownWorker, ...] = ()
    changed: Changed | None = None
    """Everything else of tenants is as before, and adapters that are here all the same are whole.
    None: all of it is here."""


class ModelState(msgspec.Struct, frozen=True):
    """A base model on one worker."""

    worker: str
    tier: str
    """device; host, cold: it would have to come; loading, draining: on its way here or away;
    unsatisfiable: the worker, as it is set up, cannot serve it"""
    num_bytes: int
    """Bytes of its weights on the device, now or when it was there last."""
    num_swaps: int
    """How often it came to the device."""
    num_running: int
    num_waiting: int
    idle_since: datetime | None
    """Null: it has requests, or never had one."""
    load_s: float
    """How long it takes to come to the device, as measured or estimated; 0: not known."""
    error: str
    """Why it could not be loaded, until it is."""
    reported_at: datetime
