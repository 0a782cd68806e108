"""What the controllers work with, one of each in a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from pathlib import Path

from adapters.errors import AdapterRejected
from adapters.manifest import AdapterManifest, BaseModelShape
from adapters.store import NotInStore, Store
from adapters.validator import CONFIG_NAME, WEIGHTS_NAME, AdapterFiles, Limits, validate
from admin import contents, versions
from admin.config import AdminConfig
from admin.database import Database
from admin.errors import AdminError, Conflict, Invalid
from admin.reaper import Reaper
from admin.records import ApiKey, BaseModel, Tenant
from admin.retirement import Retirement, retirement_progress
from admin.versions import NewVersion, VersionDetails

MAX_VALIDATIONS = 2
RETIREMENT_WAIT_S = 2.0


class AdminPlane:
    """The database, the store, and the steps that need both."""

    def __init__(self, config: AdminConfig, database: Database, store: Store) -> None:
        self.config = config
        self.database = database
        self.store = store
        self.reaper = Reaper(database, store)
        self._validations = asyncio.Semaphore(MAX_VALIDATIONS)

    def describe_model(self, digest: str) -> tuple[BaseModelShape, int]:
        """Shape and longest sequence of a model in the store. Raises Invalid if it is not there."""
        try:
            text = (self.store.model_folder(digest) / "config.json").read_text()
        except NotInStore as error:
            raise Invalid(f"no model {digest} in the store", "not_in_store", "digest") from error
        config = json.loads(text)
        return BaseModelShape.from_config(config, digest), config["max_position_embeddings"]

    async def validate(self, staged: Path, bases: list[BaseModel]) -> AdapterManifest:
        """Raises AdapterRejected."""
        limits = Limits(self.config.max_lora_rank, self.config.max_upload_bytes)
        shapes = list({base.digest: base.shape for base in bases}.values())
        async with self._validations:
            return await asyncio.to_thread(validate, AdapterFiles.in_folder(staged), shapes, limits)

    async def publish(
        self, new: NewVersion, staged: Path, key: ApiKey
    ) -> tuple[VersionDetails, bool]:
        """Files and row of a version, and whether it is new. An admin's upload lets its chat
        template run."""
        for file in staged.iterdir():
            if file.name not in (CONFIG_NAME, WEIGHTS_NAME):
                file.unlink()
        try:
            return await self._publish(new, staged, key)
        except Exception:
            # What was stored for a version that could not be made goes at once, or later.
            with contextlib.suppress(AdminError, OSError):
                await self.reaper.reap()
            raise

    async def _publish(
        self, new: NewVersion, staged: Path, key: ApiKey
    ) -> tuple[VersionDetails, bool]:
        digest = new.manifest.digest
        async with contents.held(self.database, digest):
            await asyncio.to_thread(self.store.put, "adapters", digest, staged)
            async with self.database.transaction() as connection:
                version, is_new = await versions.add_version(connection, new)
                if not await asyncio.to_thread(self.store.exists, "adapters", digest):
                    raise Conflict("the store lost the files meanwhile; upload them again")
                template = new.serving.template_digest
                if template is not None and key.tenant_id is None:
                    await versions.approve_template(connection, template, key.id)
        return version, is_new

    async def reject(
        self, tenant: Tenant, name: str, rejected: AdapterRejected, key: ApiKey
    ) -> None:
        async with self.database.transaction() as connection:
            error = rejected.to_dict()
            await versions.add_rejected(connection, tenant.id, name, error, key.id)

    async def settle_retirement(self, retirement: Retirement) -> int:
        """How many requests are in flight with what was retired, once every live gateway knows of
        it, or after `RETIREMENT_WAIT_S`. What has none is removed now, the rest later."""
        deadline = time.monotonic() + RETIREMENT_WAIT_S
        while True:
            async with self.database.acquire() as connection:
                progress = await retirement_progress(connection, retirement)
            if progress.is_known or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.05)
        await self.reaper.reap()
        return progress.in_flight

    async def run(self) -> None:
        """What goes on beside the requests; for ever."""
        await self.reaper.run()


def remove_staged(staged: Path) -> None:
    shutil.rmtree(staged, ignore_errors=True)
