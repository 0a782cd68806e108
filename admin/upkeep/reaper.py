"""Removes retired versions, adapters of deleted tenants, adapters without versions, contents that
no version has, reports of faults in such contents, and lost workers. Several processes may do this
at the same time, and each of them may crash at any moment."""

from __future__ import annotations

import asyncio

from adapters.store.folder import Store
from admin.adapters import contents, versions
from admin.workers import workers
from store.database import EVERYTHING, Connection, Database
from store.queries import lock_catalog, sql

REAP_INTERVAL_S = 2.0
VERSIONS_AT_ONCE = 1000
"""Maximum number of versions of deleted tenants that are deleted in one pass, which holds the
catalog's lock for some tenths of a second."""
PRUNE_INTERVAL_S = 60.0


class Reaper:
    def __init__(self, database: Database, store: Store, stale_s: float = 300.0) -> None:
        """`stale_s` is the setting `catalog_stale_s` of the gateways."""
        self._database = database
        self._stale_s = stale_s
        self._store = store

    async def reap(self) -> None:
        """Makes one pass that removes everything that is no longer needed. Changes the catalog only
        if there is something to remove."""
        async with self._database.transaction(EVERYTHING) as connection:
            await connection.execute(sql["gateways_gone"], self._stale_s)
            has_versions = await connection.fetchrow(sql["versions_to_reap"]) is not None
            has_adapters = await connection.fetchrow(sql["adapters_to_reap"]) is not None
            has_tenants = await connection.fetchrow(sql["tenants_to_reap"]) is not None
            has_expired: bool = await connection.fetchval(sql["ephemeral_expired"])
        if has_versions or has_adapters or has_tenants or has_expired:
            await self._reap_catalog()
        await contents.remove_due(self._database, self._remove)
        await workers.forget_lost(self._database)

    async def _reap_catalog(self) -> None:
        async with self._database.transaction(EVERYTHING) as connection:
            await lock_catalog(connection)
            await _reap_tenants(connection, VERSIONS_AT_ONCE)
            await connection.execute(sql["ephemeral_retire_expired"])
            for row in await connection.fetch(sql["versions_to_reap"]):
                key = (row["tenant_id"], row["name"], row["version"])
                await connection.execute(sql["version_delete"], *key)
                if row["digest"] is not None:
                    await contents.leave(connection, row["digest"])
            for row in await connection.fetch(sql["adapters_to_reap"]):
                await connection.execute(sql["adapter_delete"], row["tenant_id"], row["name"])

    async def _remove(self, digest: str) -> None:
        await asyncio.to_thread(self._store.delete, "adapters", digest)

    async def prune(self) -> None:
        """Deletes old refused uploads, old versions that failed verification, and reports of faults
        in contents that no version has."""
        async with self._database.transaction(EVERYTHING) as connection:
            await connection.execute(sql["faults_prune"])
            await versions.prune_rejected(connection)


async def _reap_tenants(connection: Connection, limit: int) -> None:
    """Deletes up to `limit` adapter versions of deleted tenants, and the tenants that have none
    left. Marks the versions' contents as due for removal."""
    for row in await connection.fetch(sql["tenants_to_reap"]):
        tenant_id = row["id"]
        doomed = await connection.fetch(sql["tenant_reap_versions"], tenant_id, limit)
        if doomed:
            names = [version["name"] for version in doomed]
            numbers = [version["version"] for version in doomed]
            digests = [version["digest"] for version in doomed]
            await connection.execute(sql["tenant_reap_names"], tenant_id, list(set(names)))
            await connection.execute(sql["tenant_reap"], tenant_id, names, numbers, digests)
        await connection.execute(sql["tenant_reap_adapters"], tenant_id)
        limit -= len(doomed)
        if limit <= 0:
            return
        await connection.execute(sql["tenant_forget"], tenant_id)
