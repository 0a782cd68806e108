"""Parameters of routes. Unknown parameter names are refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request
from litestar.handlers import BaseRouteHandler
from litestar.params import HeaderParameter, ParameterKwarg, PathParameter, QueryParameter
from litestar.typing import FieldDefinition

from store.errors import Invalid
from store.stored_text import check_text

TenantName = Annotated[
    str | None,
    QueryParameter(
        description="Whose, by id or name; an admin key must say, a tenant's may only name its own."
    ),
]
After = Annotated[str, QueryParameter(description="Where the page before ended.")]
Limit = Annotated[int, QueryParameter(ge=1, le=1000, description="Of what a page holds.")]

READS_QUERY = "reads_query"
"""Key in a handler's `opt`. If it is set, the handler checks its query parameters itself."""
_PLACES: dict[type[ParameterKwarg], str] = {
    QueryParameter: "query",
    HeaderParameter: "header",
    PathParameter: "path",
}


def parameters(handler: BaseRouteHandler) -> list[tuple[str, str, FieldDefinition]]:
    """Returns the name, the place (query, header or path) and the definition of each parameter."""
    found: list[tuple[str, str, FieldDefinition]] = []
    for name, field in handler.parsed_fn_signature.parameters.items():
        kwarg = field.kwarg_definition
        if isinstance(kwarg, ParameterKwarg) and type(kwarg) in _PLACES:
            found.append((kwarg.name or name, _PLACES[type(kwarg)], field))
    return found


async def check_parameters(request: Request[Any, Any, Any]) -> None:
    """Raises Invalid for unknown or repeated parameters. Called before each handler and after its
    guard.

    Also refuses If-Match on routes that do not check it, because clients would rely on it.
    """
    handler = request.route_handler
    known = parameters(handler)
    if "if-match" in request.headers and not any(name == "If-Match" for name, _, _ in known):
        raise Invalid("If-Match is not supported here", "unsupported_header", "If-Match")
    for name, text in request.query_params.multi_items():
        check_text(text, name[:64])
    if handler.opt.get(READS_QUERY):
        return
    names = [name for name, place, _ in known if place == "query"]
    for name in request.query_params:
        shown = name[:64]
        if name not in names:
            raise Invalid(f"{shown!r} is not a parameter here", "unsupported_parameter", shown)
        if len(request.query_params.getall(name)) > 1:
            raise Invalid(f"{shown!r} is given twice", "repeated_parameter", shown)
