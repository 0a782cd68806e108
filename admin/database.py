"""The one door to Postgres: pool, transactions, notifications; driver errors end here."""

# asyncpg carries no types; `Connection` below states what is used of it.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal, Protocol, cast

import asyncpg
import msgspec

from admin.errors import (
    AdminError,
    AlreadyExists,
    Conflict,
    DatabaseUnavailable,
    Invalid,
    NotFound,
)

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
Isolation = Literal["read_committed", "repeatable_read", "serializable"]

RECONNECT_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0)


class Connection(Protocol):
    """What this project uses of an asyncpg connection."""

    async def fetch(self, query: str, *args: Any) -> Sequence[Row]: ...
    async def fetchrow(self, query: str, *args: Any) -> Row | None: ...
    async def fetchval(self, query: str, *args: Any) -> Any: ...
    async def execute(self, query: str, *args: Any) -> str: ...
    def transaction(
        self, *, isolation: Isolation | None = None, readonly: bool = False
    ) -> AbstractAsyncContextManager[Any]: ...


class Database:
    """A pool of connections, and one for each listener. Errors leave it as `admin.errors`."""

    def __init__(self, pool: Any, dsn: str) -> None:
        self._pool = pool
        self._dsn = dsn
        self._listeners: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls,
        dsn: str,
        *,
        min_size: int = 1,
        max_size: int = 10,
        command_timeout: float = 30.0,
        application_name: str = "loraplex",
        statement_cache_size: int = 100,
    ) -> Database:
        """Opens the pool. `statement_cache_size=0` suits a transaction-pooling proxy.

        Raises DatabaseUnavailable.
        """
        with translated_errors():
            pool = await asyncpg.create_pool(
                dsn,
                min_size=min_size,
                max_size=max_size,
                command_timeout=command_timeout,
                statement_cache_size=statement_cache_size,
                server_settings={
                    "application_name": application_name,
                    "statement_timeout": str(int(command_timeout * 1000)),
                    "idle_in_transaction_session_timeout": "60000",
                },
                init=_use_json,
            )
        return cls(pool, dsn)

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[Connection, None]:
        """A connection outside any transaction."""
        with translated_errors():
            async with self._pool.acquire(timeout=10.0) as connection:
                yield cast(Connection, connection)

    @asynccontextmanager
    async def transaction(
        self, *, isolation: Isolation | None = None, readonly: bool = False
    ) -> AsyncGenerator[Connection, None]:
        """A connection in a transaction that commits on leaving, rolls back on an exception."""
        async with (
            self.acquire() as connection,
            connection.transaction(isolation=isolation, readonly=readonly),
        ):
            yield connection

    async def listen(self, channel: str, callback: Callable[[str], None]) -> None:
        """Calls `callback(payload)` for each notification until `close`, on its own connection.

        Calls it with "" each time the connection was made: what was sent before went unheard.
        Returns when the first connection listens. Raises DatabaseUnavailable if that fails.
        """
        connection = await self._open_listener(channel, callback)
        task = asyncio.create_task(self._keep_listening(connection, channel, callback))
        self._listeners.add(task)

    async def _open_listener(self, channel: str, callback: Callable[[str], None]) -> Any:
        def heard(_connection: object, _pid: object, _channel: object, payload: object) -> None:
            callback(str(payload))

        with translated_errors():
            connection: Any = await asyncpg.connect(
                self._dsn, timeout=10, server_settings={"application_name": "loraplex-listen"}
            )
            await connection.add_listener(channel, heard)
        callback("")
        return connection

    async def _keep_listening(
        self, connection: Any, channel: str, callback: Callable[[str], None]
    ) -> None:
        try:
            while True:
                lost = asyncio.Event()
                connection.add_termination_listener(_setter(lost))
                if not connection.is_closed():
                    await lost.wait()
                log.warning("lost the connection that listens on %s; reconnecting", channel)
                connection = await self._reopen_listener(channel, callback)
        finally:
            connection.terminate()

    async def _reopen_listener(self, channel: str, callback: Callable[[str], None]) -> Any:
        attempt = 0
        while True:
            await asyncio.sleep(RECONNECT_SECONDS[min(attempt, len(RECONNECT_SECONDS) - 1)])
            attempt += 1
            with contextlib.suppress(AdminError):
                return await self._open_listener(channel, callback)

    async def close(self) -> None:
        for task in self._listeners:
            task.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        try:
            await asyncio.wait_for(self._pool.close(), timeout=10.0)
        except TimeoutError:
            self._pool.terminate()


@contextlib.contextmanager
def translated_errors() -> Generator[None, None, None]:
    """Turns what the driver raises into `admin.errors`; the one place that does."""
    try:
        yield
    except asyncpg.PostgresError as error:
        raise _translate(error) from error
    except (asyncpg.InterfaceError, OSError, TimeoutError) as error:
        if isinstance(error, ValueError):
            raise Invalid(f"not a value the database can hold: {error}") from error
        raise DatabaseUnavailable(f"the database does not answer: {error}") from error


def _translate(error: asyncpg.PostgresError) -> AdminError:
    text = str(error)
    match error:
        case asyncpg.UniqueViolationError():
            return AlreadyExists(text)
        case asyncpg.ForeignKeyViolationError():
            return NotFound(text) if "is not present" in _detail(error) else Conflict(text)
        case asyncpg.IntegrityConstraintViolationError() | asyncpg.DataError():
            return Invalid(text)
        case asyncpg.TransactionRollbackError():
            return Conflict("another change came in between; try again")
        case (
            asyncpg.PostgresConnectionError()
            | asyncpg.InsufficientResourcesError()
            | asyncpg.OperatorInterventionError()
            | asyncpg.InvalidAuthorizationSpecificationError()
            | asyncpg.InvalidCatalogNameError()
        ):
            return DatabaseUnavailable(text)
        case _:
            return AdminError(f"the database refused: {text}")


def _setter(event: asyncio.Event) -> Callable[[object], None]:
    return lambda _connection: event.set()


def _detail(error: asyncpg.PostgresError) -> str:
    return str(getattr(error, "detail", None) or "")


async def _use_json(connection: Any) -> None:
    await connection.set_type_codec(
        "jsonb",
        schema="pg_catalog",
        encoder=lambda value: msgspec.json.encode(value).decode(),  # pyright: ignore[reportUnknownLambdaType]
        decoder=msgspec.json.decode,
    )
