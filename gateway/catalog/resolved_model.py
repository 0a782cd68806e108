"""Defines what a model name stands for and how `/v1/models` describes it, and splits a canary's
requests between its versions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from adapters.reference import AdapterRef, AdapterSignature
from gateway.exceptions import TemplateNotApproved
from gateway.quota_types import FREE
from store.records import Alias, BaseModel, Price, ServedVersion, ServingData, ServingFields


class AdapterCard(ServingFields, frozen=True, kw_only=True):
    """Data of an adapter version apart from its weights."""

    version: int
    canary: dict[int, int] | None
    """Weight by version if the name is a canary. The stable version gets the rest."""
    has_chat_template: bool
    is_chat_template_approved: bool
    """Whether chats are accepted. Otherwise only completions are served. True without a
    template."""


class ModelCard(msgspec.Struct, frozen=True):
    """Card of a model. `root` is what the name stands for now, `parent` the base of an adapter."""

    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    adapter: AdapterCard | None = None
    object: str = "model"


class ModelList(msgspec.Struct, frozen=True):
    """Answer of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"
    models: list[ModelCard] = []
    """Always empty. Codex needs the key to read the answer, and then offers its configured
    models."""


NOTHING = ServingData()


class ResolvedModel(msgspec.Struct, frozen=True):
    """Base model that a model name stands for and, if it names an adapter, the adapter version."""

    name: str
    """Name in the request."""
    base: BaseModel
    price: Price = FREE
    """Price of the base model's tokens."""
    version: ServedVersion | None = None
    canary: Alias | None = None
    """Canary from which the version was chosen. None if the name is not a canary."""
    checksums: Mapping[str, str] = {}
    """Checksums of the version's packed image, by the worker layouts for which the version is
    verified."""
    is_template_approved: bool = True

    @property
    def serving(self) -> ServingData:
        """Data of the version apart from its weights."""
        return self.version.serving if self.version else NOTHING

    @property
    def page_salt(self) -> str:
        """Salt that separates an ephemeral version's KV pages from the pages of all other versions,
        even of versions with the same content. Empty if the version is not ephemeral."""
        version = self.version
        if version is None or not version.is_ephemeral:
            return ""
        return f"ephemeral {version.tenant_id}/{version.name}@{version.version}\0"

    def adapter_for(self, layout: str) -> AdapterRef | None:
        """Returns the version's reference in the form that is sent to workers with this adapter
        layout. Returns None for a base model."""
        version = self.version
        if version is None:
            return None
        name = f"{version.name}@{version.version}"
        checksum = self.checksums.get(layout, "")
        signed = None
        if version.signature is not None and version.public_key is not None:
            signed = AdapterSignature(version.public_key, version.signature)
        return AdapterRef(version.digest, name, checksum, version.is_ephemeral, signed)

    def chat_template(self) -> str | None:
        """Returns the version's own chat template, or None if the base model's template applies.
        Raises TemplateNotApproved if no admin has approved the version's template."""
        template = self.serving.chat_template
        if template is not None and not self.is_template_approved:
            raise TemplateNotApproved(
                f"The chat template that '{self.name}' brings may not be rendered yet: "
                "an admin must approve it. Completions are served.",
                param="model",
            )
        return template


def pick_version(alias: Alias, subject: str) -> int:
    """Returns the version that a caller gets. A canary's versions are chosen in proportion to their
    weights. The same `subject`, which identifies the caller, gets the same version each time.

    The range of hashes is divided among the versions in proportion to their weights. The new
    versions come first, ordered by number, and the stable version comes last, so that a new version
    whose weight is raised keeps its callers.
    """
    if alias.canary is None:
        return alias.version
    point = _draw(alias, max(alias.canary), subject) * sum(alias.canary.values()) >> 64
    for version, weight in sorted(alias.canary.items()):
        if version == alias.version:
            continue
        point -= weight
        if point < 0:
            return version
    return alias.version


def _draw(alias: Alias, newest: int, subject: str) -> int:
    """Returns a hash that is uniform in [0, 2^64). The newest version is part of the hashed text,
    because otherwise the same callers would get the new version in every canary."""
    digest = hashlib.sha256()
    fields = {"t": alias.tenant_id, "n": alias.name, "a": alias.alias, "v": newest, "s": subject}
    for tag, value in fields.items():
        encoded = str(value).encode()
        digest.update(b"%s%d:%s" % (tag.encode(), len(encoded), encoded))
    return int.from_bytes(digest.digest()[:8])
