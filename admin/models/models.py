"""Base models: register, list, change, delete. The key of a model is its served name."""

from __future__ import annotations

from adapters.manifest import BaseModelShape
from store.database import Connection
from store.errors import AlreadyExists, Conflict, Invalid, NotFound
from store.queries import fetch_all, fetch_one, sql
from store.records import BaseModel, Residency


async def register_model(
    connection: Connection, name: str, shape: BaseModelShape, max_model_len: int, source: str = ""
) -> BaseModel:
    """Registers the weights of `shape.digest` under a name.

    `source` is the name under which the weights were imported. If it is empty, weights that already
    have this name keep their source, and other weights have an unknown source. A name may move to
    other weights as long as no adapter is bound to the name. Must be called in a transaction.
    Raises Conflict if adapters are bound, AlreadyExists if an adapter has the name, and Invalid.
    """
    known = await connection.fetchrow(sql["model_find"], name)
    values = (name, shape.digest, shape, max_model_len, source)
    if known is None:
        return await fetch_one(connection, BaseModel, "model_insert", *values)
    changed = await fetch_one(connection, BaseModel, "model_update", *values)
    if known["digest"] != shape.digest and await connection.fetchval(sql["model_in_use"], name):
        raise Conflict(
            f"adapters are bound to the weights that are served as {name!r};"
            " register the new ones under another name",
            "model_in_use",
            "digest",
        )
    return changed


async def set_residency(connection: Connection, name: str, residency: Residency) -> BaseModel:
    """Sets a model's residency. Raises NotFound."""
    query, missing = "model_set_residency", _missing(name)
    return await fetch_one(connection, BaseModel, query, name, residency, missing=missing)


async def list_models(
    connection: Connection, after: str = "", limit: int | None = None
) -> list[BaseModel]:
    """Returns models by name, beginning after the name `after`. Returns all if `limit` is None."""
    return await fetch_all(connection, BaseModel, "model_list", after, limit)


async def delete_model(connection: Connection, name: str) -> None:
    """Deletes a model and its price, but not its weights. Must be called in a transaction that
    holds the catalog's lock. Raises NotFound, or Conflict if adapters are bound to the model."""
    await find_model(connection, name)
    if await connection.fetchval(sql["model_in_use"], name):
        raise Conflict(f"adapters are bound to {name!r}: delete them first", "model_in_use")
    await connection.execute(sql["model_delete"], name)


async def find_model(connection: Connection, name: str) -> BaseModel:
    """Returns a model. Raises NotFound."""
    return await fetch_one(connection, BaseModel, "model_find", name, missing=_missing(name))


async def candidate_bases(connection: Connection, name: str | None) -> list[BaseModel]:
    """Returns the base models that an adapter may be for: the named one, or all if none is named.
    The adapter's tensors then decide. Raises NotFound, or Invalid if no model is registered."""
    if name:
        return [await find_model(connection, name)]
    if found := await list_models(connection):
        return found
    raise Invalid("no base model is registered yet", "no_base_model", "model")


async def check_not_a_model(connection: Connection, name: str) -> None:
    """Raises AlreadyExists if a base model has the name, which an adapter cannot share."""
    if await connection.fetchrow(sql["model_find"], name) is not None:
        raise AlreadyExists(f"a base model is named {name}", param="name")


def _missing(name: str) -> NotFound:
    return NotFound(f"no base model {name[:128]!r}", "model_not_found", "model")
