"""What `serve` makes before anybody can ask for anything."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from admin import keys as api_keys
from admin.database import Database
from admin.records import parse_key
from loraplex.bootstrap import Keys, ensure_keys
from loraplex.errors import BadSettings
from tests.admin.conftest import PEPPER


async def test_a_key_that_has_ended_is_made_anew(database: Database):
    """Somebody rotated it: the old one, which keys.json has, ended when its overlap was over."""
    first = await ensure_keys(database, PEPPER, Keys(), ("acme",))
    assert await ensure_keys(database, PEPPER, first, ("acme",)) == first
    for text in (first.admin, first.tenants["acme"]):
        async with database.transaction() as connection:
            await api_keys.rotate_key(connection, PEPPER, parse_key(text) or "", 0)
    second = await ensure_keys(database, PEPPER, first, ("acme",))
    for text in (second.admin, second.tenants["acme"]):
        async with database.transaction() as connection:
            key = await api_keys.get_key(connection, parse_key(text) or "")
        assert key.is_live(datetime.now(UTC))


def test_damaged_keys_are_told(tmp_path: Path):
    path = tmp_path / "keys.json"
    path.write_text('{"admin": "lpx_')
    with pytest.raises(BadSettings, match=r"keys\.json: .*made anew"):
        Keys.read(path)
