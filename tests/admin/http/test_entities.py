"""What an entity asks of the functions of its routes; what the routes do is recorded."""

from __future__ import annotations

import pytest

from admin.http.entities import Entity
from admin.schemas import Deleted
from store.database import Connection


def test_a_function_takes_only_what_its_route_gives():
    things = Entity("Thing", "/things", "things", Deleted)

    async def show(connection: Connection, name: str) -> Deleted: ...

    things.shows("/{name:str}")(show)
    with pytest.raises(AssertionError, match="nothing is name"):
        things.shows()(show)
