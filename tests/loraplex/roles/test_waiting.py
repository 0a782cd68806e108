"""Roles that are started while their database is away: they say so and serve when it is there; what
waiting does not mend ends them by its name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from store.database import Database
from tests.doubles import make_model
from tests.plane import Plane, product
from tests.proxy import PostgresProxy, Way, everything
from tests.waiting import eventually

AWAY = {"status": "unavailable", "reason": "the database does not answer"}


def role_over(dsn: str, folder: Path, *command: str) -> Plane:
    return product(*command, folder=folder, database_url=dsn, key_pepper="pepper")


@asynccontextmanager
async def hanging(proxy: PostgresProxy) -> AsyncIterator[None]:
    proxy.ways["client"] = Way(swallows=everything)
    yield
    proxy.ways["client"] = Way()
    proxy.reset()


Absence = Callable[[PostgresProxy], AbstractAsyncContextManager[None]]


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "absent"),
    [(["gateway", "--admin"], PostgresProxy.closed), (["admin"], hanging)],
    ids=["gateway", "admin"],
)
async def test_it_serves_when_the_database_is_there(
    arguments: list[str], absent: Absence, proxy: PostgresProxy, tmp_path: Path
) -> None:
    role = role_over(proxy.dsn, tmp_path, *arguments)
    try:
        async with absent(proxy):
            await role.launch()
            await says_that_it_waits(role)

        async def knows_its_keys() -> bool:
            return (await role.get("/admin/v1/tenants")).status_code == 401

        await eventually(knows_its_keys, 60)
        assert await role.end() == 0
    finally:
        await role.kill()


async def says_that_it_waits(role: Plane) -> None:
    answer = await role.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, AWAY)
    live = await role.get("/livez")
    assert live.status_code == 200
    ids = {each.headers["x-request-id"] for each in (answer, live)}
    assert len(ids) == 2 and all(each.startswith("req_") for each in ids)
    for path in ("/v1/models", "/admin/v1/tenants"):
        refused = await role.get(path)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "database_unavailable"


async def test_it_ends_while_it_waits(proxy: PostgresProxy, tmp_path: Path) -> None:
    role = role_over(proxy.dsn, tmp_path, "gateway")
    async with proxy.closed():
        await role.launch()
        await role.get("/readyz")
        # Clients are refused after a second, be it before the first attempt has failed.
        await eventually(lambda: "waiting for the database" in role.log_text, 60)
        assert role.log_text.count("waiting for the database") == 1, "once for each reason"
        assert await role.end() == 0, role.log_text


@pytest.mark.full
async def test_serve_brings_the_database_up_to_date_when_it_is_there(
    empty_dsn: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "tiny")
    async with PostgresProxy(empty_dsn, tmp_path / "proxy") as proxy:
        role = role_over(proxy.dsn, tmp_path, "serve", "--model", f"tiny={model}")
        try:
            async with proxy.closed():
                await role.launch()
                await says_that_it_waits(role)
                assert "migration" not in role.log_text
            await eventually(lambda: "migrations applied: 0001" in role.log_text, 60)
            assert await role.end() in (0, 130)  # 130: ended before the model was imported
        finally:
            await role.kill()


def unusable(dsn: str) -> dict[str, str]:
    """URLs by what is wrong with them."""
    head, _, tail = dsn.partition("@")
    name = tail.split("/")[1].split("?")[0]
    return {
        "password authentication failed": f"{head}not@{tail}",
        '"nowhere" does not exist': dsn.replace(name, "nowhere"),
        "the database URL cannot be read": "postgresql://u:s3cret[@/x",
    }


async def end_with(roles: dict[str, Plane]) -> None:
    """Each by its reason."""
    for role in roles.values():
        await role.launch()
    for reason, role in roles.items():
        try:
            async with asyncio.timeout(60):
                assert await role.wait() == 1
        finally:
            await role.kill()
        assert reason in role.log_text and "Traceback" not in role.log_text, role.log_text
        assert "s3cret" not in role.log_text


async def test_what_waiting_does_not_mend_ends_it(dsn: str, empty_dsn: str, tmp_path: Path) -> None:
    wrong = unusable(dsn) | {"run `loraplex migrate`": empty_dsn}
    await end_with(
        {
            reason: role_over(url, tmp_path / str(number), "gateway")
            for number, (reason, url) in enumerate(wrong.items())
        }
    )


def worker(folder: Path, dsn: str) -> Plane:
    """One that registers."""
    address = f"unix:{folder / 'w'}"
    options = ("--listen", address, "--advertise", address, "--health", f"{address}-health")
    return role_over(dsn, folder, "worker", *options)


async def test_what_waiting_does_not_mend_ends_a_worker_that_is_to_register(
    dsn: str, tmp_path: Path
) -> None:
    await end_with(
        {
            reason: worker(tmp_path / str(number), url)
            for number, (reason, url) in enumerate(unusable(dsn).items())
        }
    )


@pytest.mark.full
async def test_a_worker_registers_when_the_database_is_there(
    database: Database, proxy: PostgresProxy, tmp_path: Path
) -> None:
    async def is_registered() -> bool:
        async with database.acquire() as connection:
            return await connection.fetchval("SELECT count(*) FROM workers") == 1

    role = worker(tmp_path, proxy.dsn)
    try:
        async with proxy.closed():
            await role.launch()
            await eventually(lambda: "serving on" in role.log_text, 60)
            await eventually(lambda: "the worker is not registered" in role.log_text, 60)
            assert role.log_text.count("the worker is not registered") == 1, "once for each reason"
        await eventually(is_registered, 60)
        assert await role.end() == 0
        assert not await is_registered()
    finally:
        await role.kill()
