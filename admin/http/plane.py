"""Database, store and operations that the controllers use, as one object for each process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from adapters.errors import AdapterRejected
from adapters.format.module_list import MODULES_NAME
from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME
from adapters.manifest import AdapterManifest, BaseModelShape
from adapters.store.folder import NotInStore, Store, hold
from admin import idempotency
from admin.adapters import contents, ephemeral, versions
from admin.adapters.ephemeral import Retention
from admin.adapters.retirement import Retirement, retirement_progress
from admin.adapters.stored import StoredContent, inspect
from admin.adapters.versions import NewVersion
from admin.audit import retention
from admin.audit.audit import Actor, changing
from admin.http.tenant_rates import TenantRates
from admin.keys.lookup import KeyLookup
from admin.models import base_choice
from admin.models.folder_tokens import FolderTokens, compare_tokens
from admin.models.own_serving import add_found, read_own_serving
from admin.quotas.schemas import TenantLimits
from admin.upkeep.reaper import PRUNE_INTERVAL_S, REAP_INTERVAL_S, Reaper
from admin.uploads.archive import StagingFolder
from admin.uploads.opened_folders import OpenedFolders
from admin.uploads.resumable import ResumableUploads
from admin.uploads.upload import OVERHEAD_BYTES, Forms
from admin.uploads.validation import NONE, Validation
from admin.usage import check as usage_check
from admin.usage import usage
from store.database import Connection, Database
from store.errors import ApiError, DatabaseUnavailable, Invalid
from store.key_uses import KeyUses
from store.periodic import repeat
from store.queries import catalog_generation, sql
from store.records import BaseModel, ServingData, Tenant
from web.errors import Overloaded
from web.refused_keys import RefusedKeys

log = logging.getLogger(__name__)

RETIREMENT_WAIT_S = 1.0
KNOWN_WAIT_S = 1.0
LAST_WRITE_S = 5.0
"""Maximum seconds for writing the last counts of refused keys at shutdown."""

T = TypeVar("T")


class AdminConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the admin plane."""

    pepper: bytes
    """Secret of the keyed hash (HMAC) of API keys."""
    max_upload_bytes: int = 1 << 30
    max_lora_rank: int = 256
    max_image_bytes: int = 1 << 30
    """Maximum bytes of an uploaded adapter's packed image in bfloat16."""
    usage_days: int = 90
    """Days for which rows of single requests are kept, including today."""
    audit_days: int = 400
    catalog_stale_s: float = 300.0
    """Seconds for which gateways without the database serve from their last catalog."""
    tenant_writes_per_minute: int = 60
    """Changes per minute that a tenant's keys may make. A burst may use five minutes' worth."""
    default_quota: TenantLimits | None = None
    """Limits of new tenants. None sets no limits."""
    default_adapter_bytes: int | None = None
    """Maximum bytes of the adapters of a tenant whose quota has no `adapter_bytes`. None sets no
    limit."""
    upload_idle_s: float = 60.0
    """Seconds of waiting for a client over which `min_upload_rate` is averaged. Also the seconds
    after which an upload in pieces is removed unless it is continued."""
    retention: Retention = Retention()
    """Limits of ephemeral versions."""
    adapter_roots: Mapping[str, Path] = {}
    """Folders on this machine from which tenants may load adapters, by tenant name. `*` stands for
    all tenants."""
    min_upload_rate: int = 16 << 10
    """Minimum bytes per second of an upload. A slower upload would occupy its slot for days. A line
    of 1 Mbit/s is 7 times as fast."""


class AdminPlane:
    """Database and store of the admin plane, and operations that need both."""

    def __init__(self, config: AdminConfig, database: Database, store: Store) -> None:
        self.config = config
        self.database = database
        self.store = store
        self.reaper = Reaper(database, store, config.catalog_stale_s)
        self.key_lookup = KeyLookup(database)
        self.key_uses = KeyUses()
        self.refused_keys = RefusedKeys("admin", config.pepper)
        self.tenant_rates = TenantRates(config.tenant_writes_per_minute)
        self.forms = Forms()
        self.uploads = ResumableUploads(
            store, config.max_upload_bytes + OVERHEAD_BYTES, config.upload_idle_s
        )
        self._verifying = asyncio.Lock()
        self.validation = Validation(
            config.max_lora_rank, config.max_upload_bytes, config.max_image_bytes
        )

    def describe_model(self, digest: str) -> tuple[BaseModelShape, int]:
        """Returns the shape of a model in the store, and its maximum context length. Raises Invalid
        if the store does not have the model."""
        config = json.loads((self._model_folder(digest) / "config.json").read_text())
        return BaseModelShape.from_config(config, digest), config["max_position_embeddings"]

    async def add_found(
        self, serving: ServingData, found: ServingData, tokens: FolderTokens, base: BaseModel
    ) -> tuple[ServingData, list[str]]:
        """Returns an upload's serving data, completed with the values `found` in the files next to
        the adapter and with the end token of its tokenizer. Found values that equal the base
        model's are not added. Also returns warnings about tokens that the base model lacks. Raises
        Invalid if a stop token is outside the model's vocabulary."""
        warnings: list[str] = []
        if found != ServingData() or tokens != FolderTokens():
            folder = await asyncio.to_thread(self._model_folder, base.digest)
            end, warnings = await asyncio.to_thread(compare_tokens, tokens, folder)
            if end is not None:
                ends = tuple(dict.fromkeys((*found.stop_token_ids, end)))
                found = msgspec.structs.replace(found, stop_token_ids=ends)
            serving = add_found(serving, found, await asyncio.to_thread(read_own_serving, folder))
        if (highest := max(serving.stop_token_ids, default=0)) >= base.shape.vocab_size:
            raise Invalid(
                f"stop_token_ids has {highest}; the ids of {base.name} are below"
                f" {base.shape.vocab_size}",
                "serving_invalid",
                "serving",
            )
        return serving, warnings

    def _model_folder(self, digest: str) -> Path:
        """Returns the folder of a model in the store. The folder need not contain the weights.
        Raises Invalid if the store does not have the model."""
        try:
            return self.store.model_folder(digest, weights=False)
        except NotInStore as error:
            raise Invalid(f"no model {digest} in the store", "not_in_store", "digest") from error

    @contextlib.asynccontextmanager
    async def staging(self) -> AsyncGenerator[StagingFolder]:
        """Yields a staging folder for one upload. Removes the folder afterwards, unless it was
        published. Raises OSError."""
        staged = await asyncio.to_thread(self.store.stage)
        try:
            with hold(staged):
                yield StagingFolder(staged, self.config.max_upload_bytes, self.store.check_room)
        finally:
            await asyncio.to_thread(shutil.rmtree, staged, ignore_errors=True)

    def opened_folders(self, tenant: Tenant) -> OpenedFolders:
        """Returns the folders of this machine from which the tenant may load adapters."""
        roots = self.config.adapter_roots
        return OpenedFolders([roots[name] for name in (tenant.name, "*") if name in roots])

    async def validate(
        self,
        tenant: Tenant,
        name: str,
        bases: list[BaseModel],
        staged: Path,
        archive: Path | None,
        actor: Actor,
        chat_templates: Mapping[str, str] = NONE,
    ) -> tuple[AdapterManifest, BaseModel]:
        """Validates the staged files of the adapter `name`, after unpacking `archive` if it is
        given, and the chat templates, which are texts by the name of the field that has them.
        Chooses among `bases` the base model that the adapter is for. Raises Invalid, TooLarge,
        OSError, and AdapterRejected after recording the rejection."""
        try:
            return await self._choose(tenant, bases, staged, archive, chat_templates)
        except AdapterRejected as rejected:
            async with self.database.transaction(actor.sees) as connection:
                error = rejected.to_dict()
                await versions.add_rejected(connection, tenant.id, name, error, actor.caller.id)
            raise

    async def _choose(
        self,
        tenant: Tenant,
        bases: list[BaseModel],
        staged: Path,
        archive: Path | None,
        chat_templates: Mapping[str, str],
    ) -> tuple[AdapterManifest, BaseModel]:
        if archive is not None:
            self.store.check_room(archive.stat().st_size)
        manifest, digests = None, set[str]()
        try:
            manifest = await self._validate(tenant, bases, staged, archive, chat_templates)
            digests = {manifest.base_digest}
        except AdapterRejected as rejected:
            if rejected.code != base_choice.AMBIGUOUS:
                raise
            digests = set(cast(list[str], rejected.allowed))
        trained_on = await asyncio.to_thread(base_choice.read_trained_on, staged / CONFIG_NAME)
        fitting = [base for base in bases if base.digest in digests]
        base = base_choice.choose_base(trained_on, bases, fitting)
        if manifest is None:
            manifest = await self._validate(tenant, [base], staged, None)
        self.store.check_room()
        if warning := base_choice.quantisation_warning(trained_on, base):
            manifest = msgspec.structs.replace(manifest, warnings=(*manifest.warnings, warning))
        return manifest, base

    async def _validate(
        self,
        tenant: Tenant,
        bases: list[BaseModel],
        staged: Path,
        archive: Path | None,
        chat_templates: Mapping[str, str] = NONE,
    ) -> AdapterManifest:
        shapes = list({base.digest: base.shape for base in bases}.values())
        return await self.validation.validate(
            tenant.id, staged, shapes, archive, self.store.min_free_bytes, chat_templates
        )

    async def inspect(
        self, digest: str | None, file_bytes: int | None, *, every_byte: bool
    ) -> StoredContent | None:
        """Returns the state of a version's content in the store, or None if it has no content.
        Raises Overloaded if `every_byte` is set while another version is being read."""
        if digest is None or file_bytes is None:
            return None
        if every_byte and self._verifying.locked():
            raise Overloaded("another version is being verified", "too_many_verifications")
        async with self._verifying if every_byte else contextlib.nullcontext():
            return await asyncio.to_thread(
                inspect, self.store, digest, file_bytes, every_byte=every_byte
            )

    async def publish(
        self, new: NewVersion, staged: Path, actor: Actor, *, approves_template: bool
    ) -> tuple[int, bool]:
        """Stores the files and adds the version. If an identical version exists, only updates its
        alias and signature. Returns the version's number and whether it is new. If
        `approves_template` is set, approves the version's template."""

        async def add(connection: Connection) -> tuple[int, bool]:
            template = new.serving.template_digest
            if template is not None and approves_template:
                await versions.approve_template(connection, template, actor.caller.id)
            return await versions.add_version(connection, new, self.config.default_adapter_bytes)

        return await self._publish(new.manifest.digest, staged, actor, add)

    async def load(self, new: NewVersion, staged: Path, actor: Actor, *, in_place: bool) -> int:
        """Stores the files and adds an ephemeral version. Returns its number. Does not sync the
        files to disk, because they need not survive a power failure. Raises the errors of
        `add_ephemeral`, and OSError."""

        async def add(connection: Connection) -> int:
            return await ephemeral.add_ephemeral(
                connection,
                new,
                self.config.retention,
                in_place=in_place,
                default_bytes=self.config.default_adapter_bytes,
            )

        return await self._publish(new.manifest.digest, staged, actor, add, durable=False)

    async def _publish(
        self,
        digest: str,
        staged: Path,
        actor: Actor,
        add: Callable[[Connection], Awaitable[T]],
        *,
        durable: bool = True,
    ) -> T:
        """Stores the files and calls `add`, which adds their version to the database."""
        for file in staged.iterdir():
            if file.name not in (CONFIG_NAME, WEIGHTS_NAME, MODULES_NAME):
                file.unlink()
        try:
            async with contents.held(self.database, digest) as holder:
                await asyncio.to_thread(self.store.put, "adapters", digest, staged, durable=durable)
                async with changing(self.database, actor) as connection:
                    added = await add(connection)
                    await contents.check_held(connection, digest, holder)
        except Exception:
            await self.reap_now()
            raise
        return added

    async def reap_now(self) -> None:
        """Makes one pass of the reaper. Only logs errors, because the reaper tries again."""
        try:
            await self.reaper.reap()
        except (ApiError, OSError) as error:
            log.warning("removing contents failed, trying again later: %s", error)

    async def settle_retirement(self, retirement: Retirement) -> int:
        """Waits until every live gateway knows of the retirement, at most `RETIREMENT_WAIT_S`
        seconds. Returns the number of requests in flight with the retired versions. Removes
        versions without such requests; the reaper removes the others later."""
        deadline = time.monotonic() + RETIREMENT_WAIT_S
        while True:
            async with self.database.acquire() as connection:
                progress = await retirement_progress(connection, retirement)
            if progress.is_known or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.05)
        await self.reap_now()
        return progress.in_flight

    async def until_known(self) -> int | None:
        """Waits until every gateway that is connected to the database uses the current catalog, at
        most `KNOWN_WAIT_S` seconds. Returns the number of gateways that may still use an earlier
        one, including those that are disconnected. Returns None if the database is unavailable."""
        deadline = time.monotonic() + KNOWN_WAIT_S
        try:
            async with self.database.acquire() as connection:
                generation = await catalog_generation(connection)
            while True:
                async with self.database.acquire() as connection:
                    args = generation, self.config.catalog_stale_s
                    state = await connection.fetchrow(sql["gateways_behind"], *args)
                assert state is not None
                if not state["connected"] or time.monotonic() > deadline:
                    return state["behind"]
                await asyncio.sleep(0.02)
        except DatabaseUnavailable:
            return None

    async def run(self) -> None:
        """Runs the background tasks until cancelled."""
        idle_s = self.config.upload_idle_s

        async def sweep() -> None:
            await asyncio.to_thread(self.store.sweep, idle_s)

        async def forget() -> None:
            await idempotency.forget(self.database)

        async def keep_usage() -> None:
            await usage.keep_days(self.database, self.config.usage_days)

        async def check() -> None:
            await usage_check.check_usage(self.database)

        async def keep_audit() -> None:
            await retention.prune_all(self.database, self.config.pepper, self.config.audit_days)

        try:
            async with asyncio.TaskGroup() as tasks:
                for what, work, interval_s in (
                    ("nothing is removed", self.reaper.reap, REAP_INTERVAL_S),
                    ("nothing is pruned", self.reaper.prune, PRUNE_INTERVAL_S),
                    ("what uploads left is not removed", sweep, idle_s / 8),
                    ("answers of creates are kept", forget, idempotency.CLEANING_INTERVAL_S),
                    ("old usage is not dropped", keep_usage, usage.UPKEEP_INTERVAL_S),
                    ("usage is not checked", check, usage_check.INTERVAL_S),
                    ("the audit log is not pruned", keep_audit, retention.INTERVAL_S),
                ):
                    tasks.create_task(repeat(what, work, interval_s))
                tasks.create_task(self.key_uses.run(self.database))
                tasks.create_task(self.refused_keys.run(self.database))
        finally:
            with contextlib.suppress(ApiError, TimeoutError):
                async with asyncio.timeout(LAST_WRITE_S):
                    await self.refused_keys.write(self.database)
            await self.validation.close()
