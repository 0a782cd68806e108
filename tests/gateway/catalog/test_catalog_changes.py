"""What has changed of the catalog, loaded by itself, comes to what all of it does, loaded anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import msgspec
import pytest

from admin.adapters import aliases, retirement, versions
from admin.keys import keys
from admin.models import models
from admin.prices import prices
from admin.quotas import quotas
from admin.quotas.quotas import QuotaDetails
from admin.tenants import tenants
from gateway.catalog.view import CatalogView
from gateway.exceptions import ModelNotFound
from store.database import EVERYTHING, Connection, Database
from store.errors import ApiError
from store.queries import load_catalog
from store.records import TENANT_SCOPES, Changed, Price, Residency, ServingData
from tests.adapters.files import BASE
from tests.admin.lifecycle import DIGITS, add, claim, prove
from tests.gateway.pepper import PEPPER
from tests.postgres import fresh_database

pytestmark = pytest.mark.full

NUM_CHANGES = 200
SERVING = ServingData(stop=("END",), chat_template="{{ 1 }}")
NAMES = ("acme", "globex", "initech")
INSERT_PROOF = (
    "INSERT INTO adapter_proofs (digest, base_digest, layout, checksum, fingerprint, worker)"
    " VALUES ($1, $2, $3, $4, '{}', 'w')"
)


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    with fresh_database() as dsn:
        database = await Database.connect(dsn, sees=EVERYTHING)
        async with database.transaction() as connection:
            await models.register_model(connection, "tiny", BASE, 512)
        yield database
        await database.close()


class Changes:
    """One at random, of all that a gateway must know. Many are refused: then nothing changes."""

    def __init__(self, connection: Connection, random: Random) -> None:
        self._connection = connection
        self._random = random
        self.kinds: list[Callable[[], Awaitable[Any]]] = [
            *(self.tenant, self.group, self.key, self.admin_key, self.revoked, self.rotated),
            *([self.version] * 3),
            *(self.proof, self.template, self.alias, self.canary, self.pin, self.no_alias),
            *(self.rolled_back, self.retired, self.no_adapter, self.quota, self.quota_of_key),
            *(self.no_quota, self.price, self.residency, self.no_tenant),
        ]

    async def tenant(self) -> None:
        await tenants.create_tenant(self._connection, self._random.choice(NAMES))

    async def group(self) -> None:
        tenant = await tenants.find_tenant(self._connection, await self._tenant())
        group = self._random.choice([None, "family"])
        tenant = msgspec.structs.replace(tenant, sharing_group=group)
        await tenants.change_tenant(self._connection, tenant)

    async def no_tenant(self) -> None:
        tenant = await tenants.find_tenant(self._connection, await self._tenant())
        await tenants.delete_tenant(self._connection, tenant)

    async def key(self) -> None:
        await keys.create_key(self._connection, PEPPER, await self._tenant(), TENANT_SCOPES)

    async def admin_key(self) -> None:
        await keys.create_key(self._connection, PEPPER, None)

    async def revoked(self) -> None:
        await keys.revoke_key(self._connection, await self._key())

    async def rotated(self) -> None:
        await keys.rotate_key(self._connection, PEPPER, await self._key(), 3600)

    async def version(self) -> None:
        """Proved, or not yet."""
        name, digit = self._name(), self._random.choice(DIGITS)
        await add(self._connection, await self._tenant(), digit, name=name, serving=SERVING)
        if self._random.random() < 0.8:
            for found in await claim(self._connection):
                await prove(self._connection, found)

    async def proof(self) -> None:
        """Of a further layout."""
        digest = self._random.choice(DIGITS) * 64
        layout = self._random.choice(["cuda/1", "cuda/2"])
        if await self._one("SELECT digest FROM adapter_versions WHERE digest = $1", digest):
            await self._connection.execute(INSERT_PROOF, digest, BASE.digest, layout, "f" * 64)

    async def template(self) -> None:
        digest = SERVING.template_digest
        assert digest is not None
        await versions.approve_template(self._connection, digest, None)

    async def alias(self) -> None:
        place = (await self._tenant(), self._name(), self._random.choice(["prod", "next"]))
        await aliases.set_alias(self._connection, *place, self._random.randint(1, 3))

    async def canary(self) -> None:
        place = (await self._tenant(), self._name(), "prod")
        await aliases.set_canary(self._connection, *place, {1: 90, 2: 10}, None)

    async def pin(self) -> None:
        await self._connection.execute("UPDATE tenants SET pin_bytes = 1000000")
        place = (await self._tenant(), self._name(), "prod")
        await aliases.pin_alias(self._connection, *place, self._random.random() < 0.5)

    async def no_alias(self) -> None:
        await aliases.delete_alias(self._connection, await self._tenant(), self._name(), "next")

    async def rolled_back(self) -> None:
        await aliases.roll_back(self._connection, await self._tenant(), self._name(), "prod")

    async def retired(self) -> None:
        place = (await self._tenant(), self._name())
        await retirement.retire_version(self._connection, *place, self._random.randint(1, 3))

    async def no_adapter(self) -> None:
        await retirement.retire_adapter(self._connection, await self._tenant(), self._name())

    async def quota(self) -> None:
        limits = QuotaDetails("", requests_per_minute=self._random.randint(1, 9), weight=2)
        await quotas.set_quota(self._connection, await self._tenant(), None, limits)

    async def quota_of_key(self) -> None:
        key = await keys.get_key(self._connection, await self._key())
        limits = QuotaDetails("", tokens_per_day=self._random.randint(1, 9))
        if key.tenant_id is not None:
            await quotas.set_quota(self._connection, key.tenant_id, key.id, limits)

    async def no_quota(self) -> None:
        await quotas.clear_quota(self._connection, await self._tenant(), None)

    async def price(self) -> None:
        await prices.set_price(self._connection, Price("tiny", self._random.randint(5, 9), 1, 1))

    async def residency(self) -> None:
        residency = self._random.choice(list(Residency))
        await models.set_residency(self._connection, "tiny", residency)

    def _name(self) -> str:
        return self._random.choice(["bot", "helper"])

    async def _tenant(self) -> str:
        return await self._one("SELECT id FROM tenants")

    async def _key(self) -> str:
        return await self._one("SELECT id FROM api_keys")

    async def _one(self, query: str, *args: Any) -> Any:
        """Any of its values."""
        rows = await self._connection.fetch(query, *args)
        if not rows:
            raise ApiError("there is none")
        return self._random.choice([next(iter(row.values())) for row in rows])


def contents(view: CatalogView) -> dict[str, Any]:
    """All that it knows."""
    tenants = {tenant_id: vars(part) for tenant_id, part in view._tenants.items()}
    adapters = {
        (tenant_id, name): vars(part)
        for tenant_id, parts in view._adapters.items()
        for name, part in parts.items()
    }
    return vars(view) | {"_tenants": tenants, "_adapters": adapters}


@pytest.mark.parametrize("seed", range(3))
async def test_changes_come_to_what_is_loaded_anew(database: Database, seed: int) -> None:
    random, made = Random(seed), Counter[str]()
    async with database.acquire() as connection:
        view = CatalogView(await load_catalog(connection))
        for _ in range(NUM_CHANGES):
            for _ in range(random.choice([1, 1, 4])):
                try:
                    async with database.transaction() as changing:
                        kind = random.choice(Changes(changing, random).kinds)
                        await kind()
                    made[kind.__name__] += 1
                except ApiError:
                    pass
            view = CatalogView(await load_catalog(connection, view.generation), view)
            assert contents(view) == contents(CatalogView(await load_catalog(connection)))
    assert len(made) >= 17, made


async def test_only_what_has_changed_is_loaded(database: Database) -> None:
    async with database.acquire() as connection:
        made = [await tenants.create_tenant(connection, name) for name in NAMES]
        for tenant in made:
            await keys.create_key(connection, PEPPER, tenant.id, TENANT_SCOPES)
        admin, _ = await keys.create_key(connection, PEPPER, None)
        generation = (await load_catalog(connection)).generation
        key, _ = await keys.create_key(connection, PEPPER, made[1].id, TENANT_SCOPES)
        snapshot = await load_catalog(connection, generation)
    assert snapshot.changed == Changed(frozenset({made[1].id}), frozenset())
    assert snapshot.tenants == (made[1],)
    assert len(snapshot.keys) == 3 and {admin.id, key.id} <= {each.id for each in snapshot.keys}


async def test_of_a_tenant_with_many_adapters_the_one_that_changed_is_loaded(
    database: Database,
) -> None:
    async with database.acquire() as connection:
        acme, globex = [await tenants.create_tenant(connection, name) for name in NAMES[:2]]
        for number, tenant in enumerate((acme, globex)):
            for place, name in enumerate(("bot", "helper")):
                await add(connection, tenant.id, DIGITS[2 * number + place], name=name)
        for found in await claim(connection):
            await prove(connection, found)
        before = CatalogView(await load_catalog(connection))
        await aliases.set_alias(connection, acme.id, "bot", "next", 1)
        snapshot = await load_catalog(connection, before.generation)
        assert snapshot.changed == Changed(frozenset(), frozenset({(acme.id, "bot")}))
        assert [(each.tenant_id, each.name) for each in snapshot.versions] == [(acme.id, "bot")]
        assert snapshot.tenants == () and len(snapshot.proofs) == 1
        view = CatalogView(snapshot, before)
    assert view.resolve(acme, "bot@next").version == view.resolve(acme, "bot@1").version
    with pytest.raises(ModelNotFound):
        before.resolve(acme, "bot@next")
    assert view.resolve(globex, "helper@1") == before.resolve(globex, "helper@1")
