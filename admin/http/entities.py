"""Routes of things that are listed, shown, created, changed and deleted.

An `Entity` makes each route of a function. The function declares by name what it takes:

- `connection`: a transaction that sees only what the caller may see
- `request`, and the `caller` who made it
- `tenant_id`: the tenant that the caller names, in the path or in the parameter `tenant`
- `after` and `limit` of a page, and the parts of the route's path
- `data`: the body, of the type that the function declares
- `current`: the thing before its change
- `prepared`: what `prepare` has returned, and `seed`: see the entity's methods

It returns records or views. Paging, ETag, If-Match, Idempotency-Key and rows that the caller may
see are the entity's. Names, docstrings and types of functions are those of the OpenAPI document.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
from litestar import Response, Router, delete, get, patch, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, JSONBody

from admin.http.guards import ADMIN, requires, tenant_for
from admin.http.idempotency import Finish, IdempotencyKey, once
from admin.http.parameters import After, Limit, TenantName
from admin.http.plane import AdminPlane
from admin.http.preconditions import IfMatch, Tagged, check, etag
from admin.http.request import AdminRequest
from admin.schemas import Deleted, Page, shown
from store.database import Connection
from store.errors import NotFound
from store.queries import lock_catalog

V = TypeVar("V")
Step = Callable[..., Awaitable[Any]]
S = TypeVar("S", bound=Step)
Given = dict[str, Any]
Run = Callable[[Step, AdminRequest, Given], Awaitable[Any]]

_METHODS: dict[str, Any] = {"GET": get, "POST": post, "PUT": put, "PATCH": patch, "DELETE": delete}
_PART = re.compile(r"\{(\w+):str\}")
_PROVIDED = {"connection", "request", "caller", "tenant_id", "current", "prepared", "seed"}
_DEFAULTS = {"after": "", "limit": 100}


class Entity:
    """Kind of thing, with its routes. Each method returns a decorator that makes a route of a
    function. The options `name`, `text` and `scopes` take precedence over the function's name and
    docstring and the entity's scopes. The option `prepare` is a function that is called before the
    transaction."""

    def __init__(
        self,
        label: str,
        path: str,
        tag: str,
        view: Any,
        find: Step | None = None,
        *,
        scopes: tuple[str, ...] = (ADMIN,),
        covers: Callable[[Any], msgspec.Struct] = lambda view: view,
        may_be_new: bool = False,
    ) -> None:
        """`view` is the type of answers. Its method `of`, or else `shown`, makes one of a record.
        `find` returns a thing as its changes see it; without it, the thing has no ETag. `covers`
        returns the part of a view that the ETag covers. If `may_be_new` is set, a change need not
        find a thing, and `current` is then None. `label` begins the operation ids of the OpenAPI
        document."""
        self._label, self._path, self._tag, self._scopes = label, path, tag, scopes
        self._view, self._find, self._covers = view, find, covers
        self._may_be_new = may_be_new
        self._handlers: list[HTTPRouteHandler] = []

    @property
    def router(self) -> Router:
        return Router(self._path, route_handlers=self._handlers, tags=[self._tag])

    def lists(self, path: str = "", **options: Any) -> Callable[[S], S]:
        """Makes a route of a function that returns up to `limit` things after `after`."""

        async def run(step: Step, request: AdminRequest, given: Given) -> Page[Any]:
            async with request.reading() as connection:
                wanted = given | {"limit": given["limit"] + 1}
                found = await _call(step, request, wanted, connection=connection)
            return page([self._shown(each) for each in found], given["limit"])

        return self._route("GET", path, run, {"after": After, "limit": Limit}, **options)

    def shows(self, path: str = "", **options: Any) -> Callable[[S], S]:
        """Makes a route of a function that returns one thing."""

        async def run(step: Step, request: AdminRequest, given: Given) -> Any:
            async with request.reading() as connection:
                return self._answer(await _call(step, request, given, connection=connection))

        return self._route("GET", path, run, {}, **options)

    def creates(
        self,
        path: str = "",
        *,
        finish: Finish | None = None,
        answer: Any = None,
        is_change: bool = False,
        **options: Any,
    ) -> Callable[[S], S]:
        """Makes a route of a function that creates a thing, once for each Idempotency-Key.

        `finish` makes the answer, of the type `answer`, of the view and of the `seed` of its
        secret; see `once`. If `is_change` is set, the thing is made from a present one, which
        If-Match may name."""

        async def run(step: Step, request: AdminRequest, given: Given) -> Any:
            async def create(connection: Connection, seed: bytes) -> msgspec.Struct:
                if is_change:
                    await self._lock(request, connection, given)
                made = await _call(step, request, given, connection=connection, seed=seed)
                return self._shown(made)

            return await once(request, given["idempotency_key"], create, finish)

        added: Given = {"idempotency_key": IdempotencyKey}
        added |= {"if_match": IfMatch} if is_change else {}
        returns = Response[answer or self._view]
        return self._route("POST", path, run, added, returns=returns, **options)

    def changes(
        self,
        method: str,
        path: str = "",
        *,
        then: Callable[[AdminPlane], Awaitable[None]] | None = None,
        status_code: int = 200,
        **options: Any,
    ) -> Callable[[S], S]:
        """Makes a route of a function that changes a thing, and returns it or `Deleted`. `then` is
        called after the transaction."""

        async def run(step: Step, request: AdminRequest, given: Given) -> Any:
            async with request.transaction() as connection:
                if self._find is not None:
                    given["current"] = await self._lock(request, connection, given)
                found = await _call(step, request, given, connection=connection)
                answer = found if isinstance(found, Deleted) else self._answer(found)
            if then is not None:
                await then(request.plane)
            return answer

        added = {} if self._find is None else {"if_match": IfMatch}
        return self._route(method, path, run, added, status_code=status_code, **options)

    def _route(
        self,
        method: str,
        path: str,
        run: Run,
        added: Given,
        *,
        returns: Any = None,
        prepare: Step | None = None,
        name: str | None = None,
        text: str | None = None,
        scopes: tuple[str, ...] | None = None,
        **options: Any,
    ) -> Callable[[S], S]:
        """Returns a decorator that adds a route to the entity. `added` are the types of parameters
        that the route has besides those of its path, and `returns` is the type of its answer, if it
        is not the one that the function declares."""

        def decorate(step: S) -> S:
            declared = inspect.signature(step, eval_str=True)
            known: Given = dict.fromkeys(_PART.findall(self._path + path), FromPath[str])
            if "data" in declared.parameters:
                known["data"] = JSONBody[declared.parameters["data"].annotation]
            may: Given = dict(added)
            if "tenant_id" in declared.parameters and "tenant" not in known:
                may = {"tenant": TenantName, **added}

            for each, parameter in declared.parameters.items():
                if each not in _PROVIDED | known.keys() | may.keys():
                    assert parameter.default is not parameter.empty, f"{step}: nothing is {each}"

            async def handle(request: AdminRequest, **given: Any) -> Any:
                if prepare is not None:
                    given["prepared"] = await _call(prepare, request, given)
                return await run(step, request, given)

            handle.__name__ = name or step.__name__
            handle.__qualname__ = f"{self._label}.{handle.__name__}"
            handle.__doc__ = step.__doc__ if text is None else text
            handle.__annotations__ = {"request": AdminRequest, **known, **may}
            handle.__dict__["__signature__"] = inspect.Signature(
                [
                    inspect.Parameter(
                        each,
                        inspect.Parameter.KEYWORD_ONLY,
                        default=_DEFAULTS.get(each) if each in may else inspect.Parameter.empty,
                    )
                    for each in handle.__annotations__
                ]
            )
            handle.__annotations__["return"] = returns or self._type(declared.return_annotation)
            guards = [requires(*(scopes or self._scopes))]
            self._handlers.append(_METHODS[method](path, guards=guards, **options)(handle))
            return step

        return decorate

    def _type(self, declared: Any) -> Any:
        """Returns the type of the answer of a function with this return type."""
        (kind,) = get_args(declared) or (declared,)
        if kind is Deleted:
            return Deleted
        view = kind if issubclass(kind, self._view) else self._view
        if kind is not declared:
            return Page[view]
        return view if self._find is None else Tagged[view]

    async def _lock(self, request: AdminRequest, connection: Connection, given: Given) -> Any:
        """Locks the catalog, and returns the present thing, or None if there is none and need not
        be. Raises PreconditionFailed if If-Match does not match."""
        assert self._find is not None
        await lock_catalog(connection)
        found, tag = None, None
        try:
            found = await _call(self._find, request, given, connection=connection)
            tag = etag(self._covers(self._shown(found)))
        except NotFound:
            if not self._may_be_new:
                raise
        check(given["if_match"], tag)
        return found

    def _shown(self, found: Any) -> Any:
        """Returns the view of a record. A view is returned unchanged."""
        if isinstance(found, self._view):
            return found
        return self._view.of(found) if hasattr(self._view, "of") else shown(self._view, found)

    def _answer(self, found: Any) -> Any:
        view = self._shown(found)
        if self._find is None:
            return view
        return Tagged(view, headers={"etag": etag(self._covers(view))})


async def _call(step: Step, request: AdminRequest, given: Given, **more: Any) -> Any:
    """Calls a function with the arguments that it declares, and returns its result."""
    taken = _names(step)
    values = {"request": request, "caller": request.user, **given, **more}
    if "tenant_id" in taken:
        owner = await tenant_for(more["connection"], request.user, given.get("tenant"))
        values["tenant_id"] = owner.id
    return await step(**{name: values[name] for name in taken if name in values})


@cache
def _names(step: Step) -> tuple[str, ...]:
    """Returns the names of a function's parameters. Reading a signature takes longer than a look-up
    and would be done for each request."""
    return tuple(inspect.signature(step).parameters)


def page(found: list[V], limit: int) -> Page[V]:
    """Returns a page of at most `limit` items. `found` has one more if another page follows."""
    return Page(data=found[:limit], has_more=len(found) > limit)
