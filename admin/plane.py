"""What the controllers work with, one of each in a process."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

from adapters.errors import AdapterRejected
from adapters.manifest import AdapterManifest, BaseModelShape
from adapters.store import LocalStore, NotInStore
from adapters.validator import CONFIG_NAME, WEIGHTS_NAME, AdapterFiles, Limits, validate
from admin import adapters
from admin.config import AdminConfig
from admin.database import Database
from admin.errors import Invalid
from admin.records import AdapterVersion, BaseModel, Tenant

MAX_VALIDATIONS = 2


class AdminPlane:
    """The database, the store, and the steps that need both."""

    def __init__(self, config: AdminConfig, database: Database, store: LocalStore) -> None:
        self.config = config
        self.database = database
        self.store = store
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
        self,
        tenant: Tenant,
        name: str,
        base_name: str,
        manifest: AdapterManifest,
        staged: Path,
        alias: str | None,
        key_id: str,
    ) -> tuple[AdapterVersion, bool]:
        """Files and row of a ready version, and whether it is new.

        The files go in under the catalog's lock, which `discard_unused` takes too: no row
        is ever without its files.
        """
        for file in staged.iterdir():
            if file.name not in (CONFIG_NAME, WEIGHTS_NAME):
                file.unlink()
        async with self.database.transaction() as connection:
            version, is_new = await adapters.add_version(
                connection, tenant.id, name, base_name, manifest
            )
            if alias:
                await adapters.set_alias(
                    connection, tenant.id, name, alias, version.version, key_id
                )
            await asyncio.to_thread(self.store.put, "adapters", manifest.digest, staged)
        return version, is_new

    async def reject(self, tenant: Tenant, name: str, rejected: AdapterRejected) -> None:
        async with self.database.transaction() as connection:
            await adapters.add_rejected(connection, tenant.id, name, rejected.to_dict())

    async def discard_unused(self, digests: set[str]) -> None:
        """Removes the files that no version of any tenant has any more."""
        async with self.database.transaction() as connection:
            for digest in await adapters.unused_digests(connection, digests):
                await asyncio.to_thread(self.store.delete, "adapters", digest)


def remove_staged(staged: Path) -> None:
    shutil.rmtree(staged, ignore_errors=True)
