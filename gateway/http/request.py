"""Request to the data plane over HTTP: the check of its caller, and its body, decoded to a struct
with errors that name a field. Routes that need no key are public."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from litestar.types import Receive
from msgspec import inspect

from gateway.catalog.catalog import Principal, authenticate, authorize, may_be_newer
from gateway.dialects.dropped import LONE_SURROGATES
from gateway.dialects.history import is_absent
from gateway.exceptions import InvalidRequest, error_type
from gateway.limits.bounds import MAX_TOKEN_IDS
from gateway.limits.tenant_load import MAX_DELAY_S
from gateway.requests.request_scope import RequestScope
from gateway.requests.services import Gateway
from store.errors import ApiError
from store.records import ApiKey
from web.decoding import Fault, find_fault, first_step, members
from web.error_answers import CLOSES
from web.errors import Forbidden, Overloaded, Unauthenticated
from web.held_bytes import held_answer
from web.lone_surrogates import replace_lone_surrogates
from web.request import BodyReader
from web.request_head import (
    ON_ANSWER,
    STATUS,
    check_address,
    client_address,
    find_header,
    number_request,
)

INFERENCE = "inference"
UNCONFIRMED = "This API key is not known yet, and the gateway cannot reach its database to look."
MAX_BODY_BYTES = 10 << 20
MAX_NESTED = 1 << 16
"""Maximum number of `[`, `{` and `:` in a body, because each may become a Python object, which
takes 0.5 µs to create. A body that contains 1 MiB of JSON in a string has about this many."""
SMALL_BYTES = 1 << 16
"""Maximum bytes of a body that is decoded without counting its values. A body of this size cannot
have too many values."""
MAX_SEARCHED = 1024
"""Maximum entries of a mapping that are searched for the invalid one."""
MAX_TIMEOUT_S = 86_400
REPLACEMENT = "\ufffd"
CONTAINERS = (inspect.AnyType, inspect.CollectionType, inspect.DictType, inspect.StructType)
_SECONDS = re.compile(r"[0-9]{1,5}(\.[0-9]{1,9})?")

T = TypeVar("T")


class MalformedBody(InvalidRequest):
    """Error for a body that is not JSON."""


class HttpRequest(BodyReader):
    """Request over HTTP. Its context ends with it."""

    def __init__(self, gateway: Gateway, scope: Any, receive: Receive) -> None:
        number_request(scope)
        state = scope["state"]
        self.gateway = gateway
        self.scope = scope
        self.receive = receive
        self.dropped: tuple[str, ...] = ()
        """Names of what was replaced in the body to decode it."""
        self.context = RequestScope(
            gateway,
            state["request_id"],
            started_at=state["started_at"],
            answer=held_answer(scope),
            trace=gateway.config.tracing.begin(scope),
            address=client_address(scope),
        )
        self.context.hold(self._end_trace)

    @property
    def caller(self) -> Principal:
        return self.context.caller

    async def check_caller(self, needs: str, *, on_worker: bool) -> None:
        """Accepts a tenant's key with the scope `needs`, and charges the request to the key's and
        the tenant's limits. `on_worker`: whether a worker runs the request, so that it also counts
        as a concurrent request."""
        gateway, scope, context = self.gateway, self.scope, self.context
        header, num_bytes = _authorization(scope), self.num_body_bytes
        view = gateway.catalog.current
        try:
            key = find_key(gateway, scope, header)
            principal = authorize(view, key, needs)
        except (Unauthenticated, Forbidden) as error:
            is_unknown = isinstance(error, Unauthenticated)
            if is_unknown and gateway.catalog.unconfirmed_s > 0 and may_be_newer(view, header):
                raise Overloaded(UNCONFIRMED, code="key_unconfirmed") from error
            gateway.refused_keys.note(scope, header, error)
            raise
        scope["user"] = principal
        gateway.key_uses.note(key.id)
        # The charge is there before it is taken, so that a refusal also reports the limits.
        charge = context.begin(principal)
        state = scope["state"]
        state[ON_ANSWER] = charge.settle
        try:
            await charge.take(num_bytes, on_worker=on_worker)
        except ApiError:
            # A delayed refusal keeps the body in memory, so it is delayed only if there is room.
            if context.body.excess is None:
                await _wait_for_turn(gateway, principal.tenant.id, state)
            raise

    async def decode(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Returns the body as a struct. Delays large bodies of a tenant that sends many. Raises the
        errors of `read` and `decode_request`, and InvalidRequest if the body is empty."""
        body = await self.read(MAX_BODY_BYTES)
        if not body:
            raise InvalidRequest("The body is not valid JSON: Input data was truncated")
        self.context.num_bytes = len(body)
        if delay_s := self.gateway.body_pace.delay_s(self.caller.tenant.id, len(body)):
            await asyncio.sleep(delay_s)
        try:
            return decode_request(decoder, body)
        except MalformedBody:
            whole = replace_lone_surrogates(body)
            if whole is body:
                raise
        data = decode_request(decoder, whole)
        if REPLACEMENT in getattr(data, "model", ""):
            raise InvalidRequest(
                "Invalid value for 'model': it has half a surrogate pair.", param="model"
            )
        self.dropped = (LONE_SURROGATES,)
        return data

    def read_deadline(self) -> None:
        """Sets the time by which the first output is due, if the client sends the seconds in the
        header `x-request-timeout`. Raises InvalidRequest if the header is invalid."""
        given = find_header(self.scope, b"x-request-timeout")
        if given is None:
            return
        if not _SECONDS.fullmatch(given) or not 0 < float(given) <= MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"The header 'x-request-timeout' takes seconds, more than 0 and at most "
                f"{MAX_TIMEOUT_S}.",
                param="x-request-timeout",
            )
        self.context.deadline = self.context.started_at + float(given)

    def _end_trace(self) -> None:
        trace, failure = self.context.trace, self.context.failure
        if failure is not None:
            trace.fail(error_type(failure))
        trace.end(self.scope["state"].get(STATUS))


def find_key(gateway: Gateway, scope: Any, authorization: str | None) -> ApiKey:
    """Returns the valid key of an Authorization header. Raises Unauthenticated, or Forbidden if the
    key may not be used from the client's address."""
    view, now = gateway.catalog.current, gateway.clock.moment
    key = authenticate(view, gateway.config.pepper, authorization, now)
    check_address(key, scope)
    return key


def _authorization(scope: Any) -> str | None:
    """Returns the `authorization` header, made from Anthropic's `x-api-key` if it is missing."""
    given = find_header(scope, b"authorization")
    if given is None and (key := find_header(scope, b"x-api-key")) is not None:
        return f"Bearer {key}"
    return given


async def _wait_for_turn(gateway: Gateway, tenant_id: str, state: dict[str, Any]) -> None:
    """Delays the refusal of a request whose body is not read, to limit the tenant's rate of such
    refusals. If the delay is `MAX_DELAY_S`, the connection is closed after the refusal."""
    delay_s = gateway.refusals.delay_s(tenant_id)
    if delay_s >= MAX_DELAY_S:
        state[CLOSES] = True
    if delay_s:
        await asyncio.sleep(delay_s)


def decode_request(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decodes and checks a body. Raises InvalidRequest, which names the invalid, missing or unknown
    field, or says that the body has too many values to be decoded on the event loop."""
    if len(body) > SMALL_BYTES:
        _check_size(body)
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            given = msgspec.json.decode(body)
            asked = _without_absent(given, decoder.type)
            if asked == given:
                raise _explain(find_fault(error, decoder.type), decoder.type, given) from None
        try:
            return msgspec.convert(asked, decoder.type, str_keys=True)
        except msgspec.ValidationError as error:
            raise _explain(find_fault(error, decoder.type), decoder.type, asked) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedBody(f"The body is not valid JSON: {error}") from None


def _without_absent(given: Any, kind: Any) -> Any:
    """Returns `given` without null in fields that the schema lacks or that do not allow null.
    Removes [] and {} likewise, but not from fields that take neither a list nor an object. Does the
    same in nested objects. `kind`: type that `given` is decoded to."""
    structs = _structs_of(kind)
    if not structs or not isinstance(given, dict):
        return given
    fields, types = cast(dict[str, Any], given), dict[str, Any]()
    for struct, inner in structs:
        if struct.tag_field is None or fields.get(struct.tag_field, struct.tag) == struct.tag:
            types |= inner
    return {
        name: _without_absent(value, types.get(name))
        for name, value in fields.items()
        if not is_absent(value) or (name in types and _is_kept(value, types[name]))
    }


@cache
def _structs_of(kind: Any) -> list[tuple[inspect.StructType, dict[str, Any]]]:
    """Returns the structs of a type, each with the types of its fields by name."""
    return [
        (each, {field.encode_name: field.type for field in msgspec.structs.fields(each.cls)})
        for each in members(kind)
        if isinstance(each, inspect.StructType)
    ]


def _is_kept(value: Any, kind: Any) -> bool:
    """Returns whether an empty value is an allowed value of the field, or one of a wrong type."""
    return _fits(value, kind) or (value is not None and not _takes_containers(kind))


@cache
def _takes_containers(kind: Any) -> bool:
    return any(isinstance(each, CONTAINERS) for each in members(kind))


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError:
        return False
    return True


def _check_size(body: bytes) -> None:
    """Raises InvalidRequest if decoding the body would create too many objects."""
    num_values = body.count(b",")
    num_nested = body.count(b"[") + body.count(b"{") + body.count(b":")
    if num_values > MAX_TOKEN_IDS or num_nested > MAX_NESTED:
        raise InvalidRequest(
            f"A body may have at most {MAX_TOKEN_IDS} commas and {MAX_NESTED} brackets and colons; "
            f"yours has {num_values} and {num_nested}. Send fewer prompts in one request.",
            code="request_too_large",
        )


def _explain(fault: Fault, kind: Any, given: Any) -> InvalidRequest:
    """Returns an error that names the wrong, missing or unknown field."""
    if (name := fault.unknown) is not None:
        if not fault.path:
            message, param = f"Unsupported parameter: '{name}'.", name
        else:
            message, param = (
                f"Unsupported field '{name}' in '{fault.path}'.",
                first_step(fault.path),
            )
        return InvalidRequest(message, param=param, code="unsupported_parameter")
    if fault.path is not None:
        field = first_step(fault.path)
        key = _wrong_key(given, kind, field)
        place = f"'{fault.path or 'body'}'" if key is None else f"the key '{key[:64]}' of '{field}'"
        return InvalidRequest(f"Invalid value for {place}: {fault.reason}.", param=field or None)
    if (name := fault.missing) is not None:
        hint = " GET /v1/models lists those of your key." if name == "model" else ""
        return InvalidRequest(f"Missing required parameter: '{name}'.{hint}", param=name)
    return InvalidRequest(f"{fault.reason}.")


def _wrong_key(given: Any, kind: Any, field: str) -> str | None:
    """Returns the key of the first invalid entry in a field that is a mapping. Returns None if the
    field is not a mapping or has too many entries."""
    entries: Any = given.get(field) if isinstance(given, dict) else None  # pyright: ignore
    if not isinstance(entries, dict) or len(entries) > MAX_SEARCHED:  # pyright: ignore
        return None
    types = {name: each for _, fields in _structs_of(kind) for name, each in fields.items()}
    mapping, entries = types.get(field), cast(dict[str, Any], entries)
    if not any(isinstance(each, inspect.DictType) for each in members(mapping)):
        return None
    return next((key for key in entries if not _fits({key: entries[key]}, mapping)), None)
