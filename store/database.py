"""Access to Postgres: pool, transactions and notifications. Translates the driver's errors."""

# asyncpg has no type annotations. `Connection` therefore declares the methods that we use.
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

from store.errors import (
    AlreadyExists,
    ApiError,
    Conflict,
    DatabaseMisconfigured,
    DatabaseRefused,
    DatabaseUnavailable,
    Invalid,
    NotFound,
    Overtaken,
)
from store.sql_states import Meaning, meaning_of
from store.stored_text import REASON

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
Isolation = Literal["read_committed", "repeatable_read", "serializable"]

APP_ROLE = "loraplex_app"
"""Role of every process except migrations. The role owns no database objects."""
EVERYTHING = "*"
"""Value of `sees` for all rows. Used for operators, and for work that no request caused."""
NOTHING = ""

CONNECT_TIMEOUT_S = 10
LOCK_TIMEOUT_S = 10
IDLE_IN_TRANSACTION_TIMEOUT_S = 60
CHECK_INTERVAL_S = 10.0
"""Seconds between checks of listening connections, which a network may drop silently."""
CHECK_TIMEOUT_S = 5.0

BAD_URL = (
    "the database URL cannot be read: it is postgresql://USER:PASSWORD@HOST/DATABASE, and"
    " characters such as / or [ in a password are written %2F or %5B"
)
_NAME = "letters, digits, '.', '_' and '-', the first a letter or digit"
FORMS = {
    "entity_name_form": f"a name is 1 to 128 {_NAME}",
    "alias_name_form": f"an alias is 1 to 64 {_NAME}, and not a number",
}
"""Error messages for CHECK constraints of the schema, by constraint name."""
RECONNECT_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0)


_SEE = "SELECT set_config('loraplex.tenant', $1, true)"
_ROLE = "SELECT current_user AS role, current_setting('loraplex.tenant', true) AS sees"
_IS_READ_ONLY = "SELECT current_setting('transaction_read_only')::boolean"
_ROUTE: dict[str, Any] = {"target_session_attrs": "read-write", "timeout": CONNECT_TIMEOUT_S}
"""Only servers that accept writes are used, of those that the URL names. After a fail-over, these
are neither standbys nor the primary of before."""
READ_ONLY = "the server accepts no writes: it is a standby, or read-only"


class Connection(Protocol):
    """Methods of an asyncpg connection that this project uses."""

    async def fetch(self, query: str, *args: Any) -> Sequence[Row]: ...
    async def fetchrow(self, query: str, *args: Any) -> Row | None: ...
    async def fetchval(self, query: str, *args: Any) -> Any: ...
    async def execute(self, query: str, *args: Any) -> str: ...
    def transaction(
        self, *, isolation: Isolation | None = None, readonly: bool = False
    ) -> AbstractAsyncContextManager[Any]: ...


class Database:
    """Pool of connections, plus one connection for each listener. Raises only `store.errors`.

    Row-level security limits the rows that a connection sees. `sees` is EVERYTHING, NOTHING, or the
    id of the tenant whose rows are seen. The pool has a default, which a transaction may override.
    """

    def __init__(self, pool: Any, dsn: str, role: str | None, acquire_timeout: float) -> None:
        self._pool = pool
        self._acquire_timeout = acquire_timeout
        self._dsn = dsn
        self._role = role
        self._listeners: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls,
        dsn: str,
        *,
        sees: str = NOTHING,
        role: str | None = APP_ROLE,
        min_size: int = 1,
        max_size: int = 10,
        command_timeout: float | None = 30.0,
        acquire_timeout: float = 10.0,
        application_name: str = "loraplex",
        statement_cache_size: int = 100,
    ) -> Database:
        """Opens the pool. Connections act as `role`, or as the login itself if `role` is None.
        `statement_cache_size` must be 0 behind a proxy that pools transactions.

        Raises DatabaseUnavailable; DatabaseMisconfigured if the login, database or role does not
        exist, or a proxy ignores the settings; Invalid if the URL cannot be parsed.
        """
        settings = {
            "application_name": application_name,
            "statement_timeout": _milliseconds(command_timeout or 0),
            "lock_timeout": _milliseconds(LOCK_TIMEOUT_S),
            "idle_in_transaction_session_timeout": _milliseconds(IDLE_IN_TRANSACTION_TIMEOUT_S),
            "loraplex.tenant": sees,
            # UTC, because the database formats times in JSON in the session's time zone.
            "timezone": "UTC",
        }
        with translated_errors():
            try:
                pool = await asyncpg.create_pool(
                    dsn,
                    min_size=min_size,
                    max_size=max_size,
                    **_ROUTE,
                    command_timeout=command_timeout,
                    statement_cache_size=statement_cache_size,
                    server_settings=settings | _as_role(role),
                    init=_use_json,
                )
            except (
                asyncpg.InvalidParameterValueError,
                asyncpg.InsufficientPrivilegeError,
            ) as error:
                raise DatabaseMisconfigured(
                    f"cannot work as {role}: {error}; has `loraplex migrate` been run?"
                ) from error
            except ValueError:
                # The driver's error quotes text that may contain parts of the password.
                raise Invalid(BAD_URL, "database_url") from None
        database = cls(pool, dsn, role, acquire_timeout)
        try:
            await database._check(sees)
        except BaseException:
            await database.close()
            raise
        return database

    async def _check(self, sees: str) -> None:
        """Raises DatabaseMisconfigured if a proxy has dropped the connection's settings."""
        async with self.acquire() as connection:
            row = await connection.fetchrow(_ROLE)
        assert row is not None
        if row["sees"] != sees or self._role not in (None, row["role"]):
            raise DatabaseMisconfigured(
                f"the connection works as {row['role']}, not as {self._role}:"
                " a proxy drops its settings; see docs/operate/postgres.md"
            )

    async def check_writable(self) -> None:
        """Raises DatabaseUnavailable unless the server answers and accepts writes."""
        async with self.acquire() as connection:
            await _check_writable(connection)

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[Connection, None]:
        """Acquires a connection outside any transaction. If the server turns out to be one that
        accepts no writes, or is ending, all connections are replaced before their next use."""
        with translated_errors():
            async with self._pool.acquire(timeout=self._acquire_timeout) as connection:
                try:
                    yield cast(Connection, connection)
                except (TimeoutError, asyncio.CancelledError):
                    # A server that hangs would not answer an orderly close either, so the
                    # connection is dropped.
                    connection.terminate()
                    raise
                except asyncpg.PostgresError as error:
                    if meaning_of(_state(error)) is Meaning.LOST:
                        connection.terminate()
                        await self._pool.expire_connections()
                    raise

    @asynccontextmanager
    async def transaction(
        self,
        sees: str | None = None,
        *,
        isolation: Isolation | None = None,
        readonly: bool = False,
    ) -> AsyncGenerator[Connection, None]:
        """Acquires a connection in a transaction, which commits at the end and rolls back on an
        exception. If `sees` is None, the pool's default applies."""
        async with (
            self.acquire() as connection,
            connection.transaction(isolation=isolation, readonly=readonly),
        ):
            if sees is not None:
                await connection.execute(_SEE, sees)
            yield connection

    async def listen(
        self,
        channel: str,
        callback: Callable[[str], None],
        check_interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        """Calls `callback(payload)` for each notification, on a separate connection, until `close`.

        Also calls `callback("")` whenever the connection is established or lost, because
        notifications are missed in between. Returns once the connection listens for the first time.
        Raises DatabaseUnavailable if that fails.
        """
        connection = await self._open_listener(channel, callback)
        task = asyncio.create_task(
            self._keep_listening(connection, channel, callback, check_interval_s)
        )
        self._listeners.add(task)

    async def _open_listener(self, channel: str, callback: Callable[[str], None]) -> Any:
        def heard(_connection: object, _pid: object, _channel: object, payload: object) -> None:
            callback(str(payload))

        with translated_errors():
            connection: Any = await asyncpg.connect(
                self._dsn,
                **_ROUTE,
                server_settings={"application_name": "loraplex-listen"} | _as_role(self._role),
            )
            await connection.add_listener(channel, heard)
        callback("")
        return connection

    async def _keep_listening(
        self,
        connection: Any,
        channel: str,
        callback: Callable[[str], None],
        check_interval_s: float,
    ) -> None:
        try:
            while True:
                await _until_lost(connection, check_interval_s)
                log.warning("lost the connection that listens on %s; reconnecting", channel)
                callback("")
                connection = await self._reopen_listener(channel, callback)
        finally:
            connection.terminate()

    async def _reopen_listener(self, channel: str, callback: Callable[[str], None]) -> Any:
        attempt = 0
        while True:
            await asyncio.sleep(RECONNECT_SECONDS[min(attempt, len(RECONNECT_SECONDS) - 1)])
            attempt += 1
            with contextlib.suppress(ApiError):
                return await self._open_listener(channel, callback)

    async def close(self) -> None:
        for task in self._listeners:
            task.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        try:
            async with asyncio.timeout(10.0):
                await self._pool.close()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            # Closing the pool took too long, or its connections are lost.
            self._pool.terminate()


@contextlib.contextmanager
def translated_errors() -> Generator[None, None, None]:
    """Translates the driver's errors to `store.errors`."""
    try:
        yield
    except asyncpg.PostgresError as error:
        raise _translate(error) from error
    except asyncpg.TargetServerAttributeNotMatched as error:
        raise DatabaseUnavailable(READ_ONLY) from error
    except (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError) as error:
        # The driver raises InternalClientError if a connection is lost during a call.
        if isinstance(error, ValueError):
            raise Invalid(f"not a value the database can hold: {error}") from error
        reason = str(error) or "in time"
        raise DatabaseUnavailable(f"the database does not answer: {reason}") from error


def _translate(error: asyncpg.PostgresError) -> ApiError:
    text = str(error)
    match error:
        case asyncpg.UniqueViolationError():
            return AlreadyExists(text)
        case asyncpg.ForeignKeyViolationError():
            return NotFound(text) if "is not present" in _detail(error) else Conflict(text)
        case asyncpg.CheckViolationError() if form := FORMS.get(_constraint(error)):
            return Invalid(form)
        case asyncpg.CheckViolationError() if not _constraint(error):
            # Postgres reports a missing partition so. The row is right, and can be stored later.
            return DatabaseRefused(f"the database refused: {text}")
        case asyncpg.UntranslatableCharacterError() | asyncpg.CharacterNotInRepertoireError():
            return Invalid(REASON)
        case asyncpg.IntegrityConstraintViolationError() | asyncpg.DataError():
            return Invalid(text)
        case asyncpg.InvalidCachedStatementError():
            # A migration has changed the result of a prepared statement, which the driver forgets.
            return Overtaken()
        case _:
            pass
    match meaning_of(_state(error)):
        case Meaning.LOST | Meaning.BUSY:
            return DatabaseUnavailable(text)
        case Meaning.OVERTAKEN:
            return Overtaken()
        case Meaning.MISCONFIGURED:
            return DatabaseMisconfigured(text)
        case None:
            return DatabaseRefused(f"the database refused: {text}")


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


def _as_role(role: str | None) -> dict[str, str]:
    return {} if role is None else {"role": role}


async def _until_lost(connection: Any, check_interval_s: float) -> None:
    lost = asyncio.Event()

    def end(_connection: object) -> None:
        lost.set()

    connection.add_termination_listener(end)
    while not connection.is_closed():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(check_interval_s):
                await lost.wait()
                return
        try:
            with translated_errors():
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    await _check_writable(connection)
        except ApiError:
            connection.terminate()


async def _check_writable(connection: Connection) -> None:
    if await connection.fetchval(_IS_READ_ONLY):
        raise asyncpg.ReadOnlySQLTransactionError(READ_ONLY)


def _state(error: asyncpg.PostgresError) -> str:
    return str(getattr(error, "sqlstate", None) or "")


def _constraint(error: asyncpg.PostgresError) -> str:
    return str(getattr(error, "constraint_name", None) or "")


def _detail(error: asyncpg.PostgresError) -> str:
    return str(getattr(error, "detail", None) or "")


async def _use_json(connection: Any) -> None:
    await connection.set_type_codec(
        "jsonb",
        schema="pg_catalog",
        encoder=lambda value: msgspec.json.encode(value).decode(),  # pyright: ignore[reportUnknownLambdaType]
        decoder=msgspec.json.decode,
    )
