"""Creates what must exist before the first call of the REST API: schema, keys, models."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from adapters.manifest import BaseModelShape
from adapters.store.folder import Store
from admin.keys import keys as api_keys
from admin.migrate import check_schema, migrate
from admin.models import models
from admin.quotas import quotas
from admin.quotas.schemas import TenantLimits, quota_of
from admin.tenants import tenants
from loraplex.errors import AdminKeyExists, BadSettings
from loraplex.private import make_private, read_private, write_private
from loraplex.settings import Settings
from store.database import EVERYTHING, Connection, Database
from store.errors import Invalid, NotFound
from store.records import TENANT_SCOPES, hash_key, parse_key

PAGE = 1000
"""Number of admin keys read at a time."""
TENANTS_OF_A_DISK = 4
"""Number of tenants that together fill a store's disk if none has a limit of its own."""


class Keys(msgspec.Struct, forbid_unknown_fields=True):
    """Contents of keys.json in the data directory, for scripts and the command line."""

    admin: str = ""
    tenants: dict[str, str] = {}

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Reads the keys from the file. Returns no keys if it does not exist. Raises BadSettings,
        or NotPrivate if another account owns the file."""
        try:
            return msgspec.json.decode(read_private(path), type=cls)
        except FileNotFoundError:
            return cls()
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadSettings(f"{path}: {error}; without this file, new keys are created") from None

    def write(self, path: Path) -> None:
        write_private(path, msgspec.json.format(msgspec.json.encode(self)).decode() + "\n")


async def migrate_database(
    dsn: str, report: Callable[[str], None] = lambda name: None, *, with_post: bool = False
) -> list[str]:
    """Applies migrations as the user in the URL, and returns their names. Calls `report` with each
    name before the migration. `with_post` also applies migrations that must wait until the previous
    version no longer runs."""
    database = await Database.connect(
        dsn, role=None, max_size=1, command_timeout=None, application_name="loraplex-migrate"
    )
    try:
        return await migrate(database, report=report, with_post=with_post)
    finally:
        await database.close()


async def registered_models(dsn: str) -> dict[str, str]:
    """Returns the digest of each base model in the database by served name."""
    database = await Database.connect(dsn, sees=EVERYTHING, application_name="loraplex-serve")
    try:
        async with database.acquire() as connection:
            found = await models.list_models(connection)
    finally:
        await database.close()
    return {model.name: model.digest for model in found}


def load_pepper(settings: Settings) -> bytes:
    """Returns the pepper (the secret of the keyed hash of API keys) from the settings, otherwise
    from the data directory, which gets a new one at the first start. Raises NotPrivate if another
    account owns the file."""
    if settings.key_pepper:
        return settings.key_pepper.encode()
    path = settings.home / "pepper"
    if not os.path.lexists(path):
        make_private(path, secrets.token_urlsafe(32))
    return read_private(path)


def default_quota(settings: Settings) -> TenantLimits | None:
    """Returns the limits of new tenants, or None. Raises BadSettings."""
    if not settings.default_tenant_quota:
        return None
    try:
        limits = msgspec.convert(settings.default_tenant_quota, TenantLimits, strict=False)
        quota_of("", limits)
    except (msgspec.ValidationError, Invalid) as error:
        raise BadSettings(f"default_tenant_quota: {error}") from None
    return limits


def disk_share(settings: Settings) -> int | None:
    """Returns the bytes of adapters that a tenant without a limit may store: a part of the disk, so
    that one tenant does not fill it. Returns None if the store is a bucket."""
    if "://" in settings.store_location:
        return None
    folder = Path(settings.store_location)
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).total // TENANTS_OF_A_DISK


async def ensure_keys(
    database: Database,
    pepper: bytes,
    known: Keys,
    tenant_names: tuple[str, ...],
    limits: TenantLimits | None = None,
) -> Keys:
    """Returns an admin key and a key for each tenant in `tenant_names`. A known key is kept if it
    is valid, and replaced by a new one otherwise. `limits` are the limits of new tenants."""
    async with database.transaction() as connection:
        keys = Keys(known.admin, dict(known.tenants))
        if not await _works(connection, pepper, keys.admin):
            _, keys.admin = await api_keys.create_key(connection, pepper, None, name="serve")
        for name in tenant_names:
            if not await _works(connection, pepper, keys.tenants.get(name, "")):
                tenant_id = await _ensure_tenant(connection, name, limits)
                _, keys.tenants[name] = await api_keys.create_key(
                    connection, pepper, tenant_id, TENANT_SCOPES, name="serve"
                )
    return keys


async def make_first_admin_key(dsn: str, pepper: bytes) -> str:
    """Creates an admin key and returns its text. Raises AdminKeyExists if a valid one exists."""
    database = await Database.connect(
        dsn, sees=EVERYTHING, max_size=1, application_name="loraplex-bootstrap"
    )
    try:
        await check_schema(database)
        async with database.transaction() as connection:
            now, after = datetime.now(UTC), ""
            while page := await api_keys.list_keys(connection, None, after, PAGE):
                if any(key.is_live(now) for key in page):
                    raise AdminKeyExists(
                        "there is a valid admin key: create others by `loraplex key create --admin`"
                    )
                after = page[-1].id
            _, key = await api_keys.create_key(connection, pepper, None, name="bootstrap")
            return key
    finally:
        await database.close()


async def _works(connection: Connection, pepper: bytes, text: str) -> bool:
    key_id = parse_key(text)
    key = await api_keys.find_key(connection, key_id) if key_id else None
    return (
        key is not None
        and key.is_live(datetime.now(UTC))
        and hmac.compare_digest(key.hash, hash_key(text, pepper))
    )


async def _ensure_tenant(connection: Connection, name: str, limits: TenantLimits | None) -> str:
    try:
        return (await tenants.find_tenant(connection, name)).id
    except NotFound:
        made = await tenants.create_tenant(connection, name)
        if limits is not None:
            await quotas.set_quota(connection, made.id, None, quota_of(made.id, limits))
        return made.id


async def register(
    database: Database,
    store: Store,
    name: str,
    digest: str,
    max_model_len: int | None,
    source: str = "",
) -> None:
    """Registers a model of the store under its served name; see `models.register_model`."""
    config = json.loads((store.model_folder(digest, weights=False) / "config.json").read_text())
    longest: int = config["max_position_embeddings"]
    shape = BaseModelShape.from_config(config, digest)
    async with database.transaction() as connection:
        length = min(longest, max_model_len or longest)
        await models.register_model(connection, name, shape, length, source)
