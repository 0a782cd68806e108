"""Request to the data plane, with the values that its handlers need. Decodes the bytes of its body
to a struct, with errors that name a field."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from gateway.catalog.auth import Principal
from gateway.dialects.dropped import LONE_SURROGATES
from gateway.dialects.history import is_absent
from gateway.exceptions import InvalidRequest
from gateway.http.guards import CHARGE
from gateway.limits.admission import RequestCharge
from gateway.limits.bounds import MAX_TOKEN_IDS
from gateway.requests.services import Gateway
from gateway.tracing import Untraced
from store.errors import INVALID
from web.decoding import Fault, decoder_of, find_fault, first_step, members
from web.error_answers import REFUSAL
from web.headers import STATUS, find_header
from web.lone_surrogates import replace_lone_surrogates
from web.request import PlaneRequest

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
TRACE = "trace"
"""Key in a request's state for its trace."""
CONTAINERS = (inspect.AnyType, inspect.CollectionType, inspect.DictType, inspect.StructType)
_SECONDS = re.compile(r"[0-9]{1,5}(\.[0-9]{1,9})?")

T = TypeVar("T")


class MalformedBody(InvalidRequest):
    """Error for a body that is not JSON."""


class HttpRequest(PlaneRequest[Principal]):
    """Request whose `user` is a tenant with its key, and which has a trace."""

    def __init__(self, scope: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(scope, *args, **kwargs)
        self.gateway: Gateway = self.app.state["gateway"]
        self.num_bytes = 0
        """Size of the body in bytes, once it is read."""
        self.dropped: tuple[str, ...] = ()
        """Names of what was replaced in the body to decode it."""
        self._whole: bytes | None = None
        state = scope["state"]
        if TRACE not in state:
            state[TRACE] = self.gateway.config.tracing.begin(scope)
        self.trace: Untraced = state[TRACE]

    async def body(self) -> bytes:
        """Returns the body, and keeps it until it is decoded. Raises InvalidRequest if it is empty,
        and the errors of `stream`."""
        if self._whole is None:
            self._whole = await self.read(MAX_BODY_BYTES)
            if not self._whole:
                raise InvalidRequest("The body is not valid JSON: Input data was truncated")
            self.num_bytes = len(self._whole)
        return self._whole

    async def json(self) -> Any:
        """Returns the handler's `data`, decoded from the body. Raises the errors of `decode`."""
        data: Any = self.route_handler.parsed_data_field
        return await self.decode(decoder_of(data.annotation))

    async def decode(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Returns the body as a struct. Delays large bodies of a tenant that sends many. Raises the
        errors of `body` and `decode_request`."""
        body = await self.body()
        if delay_s := self.gateway.body_pace.delay_s(self.user.tenant.id, len(body)):
            await asyncio.sleep(delay_s)
        self._whole = b""
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

    @property
    def deadline(self) -> float:
        """Time of time.perf_counter() by which the first output is due. The seconds are set by the
        header `x-request-timeout`, or else by the settings. Raises InvalidRequest if the header is
        invalid."""
        given = find_header(self.scope, b"x-request-timeout")
        if given is None:
            return self.started_at + self.gateway.config.request_timeout_s
        if not _SECONDS.fullmatch(given) or not 0 < float(given) <= MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"The header 'x-request-timeout' takes seconds, more than 0 and at most "
                f"{MAX_TIMEOUT_S}.",
                param="x-request-timeout",
            )
        return self.started_at + float(given)

    @property
    def started_at(self) -> float:
        """Time of time.perf_counter() at which the request arrived."""
        return self.scope["state"]["started_at"]


def end_trace(scope: Any) -> None:
    """Ends the trace of a request to a route that is not a HotRoute, if the caller is known."""
    state = scope.get("state", {})
    trace: Untraced | None = state.get(TRACE)
    if trace is None or not isinstance(caller := scope.get("user"), Principal):
        return
    trace.tenant = caller.tenant
    trace.drop_phases()
    if REFUSAL in state:
        trace.fail(state[REFUSAL] or INVALID)
    trace.end(state.get(STATUS))


def end_charge(scope: Any) -> None:
    """Settles what a request is charged for being received. Called once when the request has ended,
    whether or not it was answered."""
    charge: RequestCharge | None = scope.get("state", {}).get(CHARGE)
    if charge is not None:
        charge.end()


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
