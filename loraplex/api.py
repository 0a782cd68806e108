"""REST client with which the command line calls a running server."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import Any

import httpx
import msgspec

from loraplex.errors import ApiFailure, BadSettings, NoAnswer, NoKey, Refused, reason_of
from loraplex.output import tell
from loraplex.private import read_private
from loraplex.running import RunningServer, find_server, find_server_at
from loraplex.settings import Settings

NOT_NOW = (502, 503, 504)
AWAY_S = 1.0
"""Seconds between retries of a call while the server is unavailable."""
ADVICE = {
    "tenant_missing": "give --tenant NAME, one of `loraplex tenant list`",
    "tenant_not_found": "see `loraplex tenant list`",
    "adapter_not_found": "see `loraplex adapter list`",
    "version_not_found": "see `loraplex adapter show NAME`",
    "alias_not_found": "see `loraplex adapter show NAME`",
    "model_not_found": "see `loraplex model list`",
    "worker_not_found": "see `loraplex workers list`",
    "key_not_found": "see `loraplex key list --tenant NAME`",
}
"""Advice for the user about a refusal, by the refusal's code."""


class Api:
    """REST client with an admin key or a tenant's key. The server checks what the key may do."""

    def __init__(self, url: str, key: str, key_source: str = "LORAPLEX_KEY") -> None:
        """`key_source` names the place in which the key was found, for error messages. Raises
        BadSettings if the key or the URL is invalid."""
        self._key_source = key_source
        self.patience_s = 0.0
        """Maximum seconds for which a failed call is retried. A call is retried if the tenant
        exceeds its rate limit (after the pause that the server asks for), or if a server that has
        answered before is unavailable."""
        self._has_answered = False
        if not (key.isascii() and key.isprintable()):
            raise BadSettings("LORAPLEX_KEY: an API key has only printable ASCII characters")
        self.url = url
        try:
            self._client = httpx.Client(
                base_url=url,
                headers={"authorization": f"Bearer {key}"},
                timeout=httpx.Timeout(120.0, connect=5.0),
            )
        except httpx.InvalidURL as error:
            raise BadSettings(f"LORAPLEX_URL: {error}") from None

    @property
    def host(self) -> str:
        return self._client.base_url.host

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> Any:
        return self._call("GET", path, params=_given(query))

    def get_tagged(self, path: str, **query: Any) -> tuple[Any, str]:
        """Sends a GET request. Returns the answer and its ETag."""
        answer = self._send("GET", path, params=_given(query))
        return answer.json(), answer.headers["etag"]

    def post(self, path: str, body: dict[str, Any] | None = None, **query: Any) -> Any:
        return self._call("POST", path, json=_given(body or {}), params=_given(query))

    def put(
        self, path: str, body: dict[str, Any], *, if_match: str | None = None, **query: Any
    ) -> Any:
        """Sends a PUT request. `if_match` is the ETag that the resource must still have."""
        headers = _given({"if-match": if_match})
        return self._call("PUT", path, json=body, params=_given(query), headers=headers)

    def patch(self, path: str, body: dict[str, Any], *, if_match: str | None = None) -> Any:
        return self._call("PATCH", path, json=body, headers=_given({"if-match": if_match}))

    def delete(self, path: str, **query: Any) -> Any:
        return self._call("DELETE", path, params=_given(query))

    def all(self, path: str, cursor: str | Sequence[str] = "name", **query: Any) -> list[Any]:
        """Returns the items of all pages of a list. The cursor of the next page is the page's
        `after` if it has one, otherwise the fields of its last item that `cursor` names."""
        parts = [cursor] if isinstance(cursor, str) else cursor
        found: list[dict[str, Any]] = []
        after = None
        while True:
            page = self.get(path, after=after, **query)
            found += page["data"]
            if not page["has_more"]:
                return found
            after = page.get("after") or "/".join(str(found[-1][part]) for part in parts)

    def upload(self, path: str, fields: dict[str, Any], files: Mapping[str, io.RawIOBase]) -> Any:
        """Uploads a form with files, which are read while they are sent."""
        parts: Any = {name: (name, file) for name, file in files.items()}
        return self._call("POST", path, data=_given(fields), files=parts)

    def append(self, path: str, offset: int, data: bytes) -> Any:
        """Sends a piece of an upload, which begins at the byte `offset`."""
        headers = {"upload-offset": str(offset)}
        return self._call("PATCH", path, content=data, headers=headers)

    def lines(self, path: str, **query: Any) -> Iterator[str]:
        """Yields the lines of a streamed answer. Raises ApiFailure, also if the stream breaks."""
        try:
            with self._client.stream("GET", path, params=_given(query)) as answer:
                if answer.is_error:
                    answer.read()
                    raise self._failure(answer)
                yield from _lines(answer)
        except httpx.HTTPError as error:
            raise NoAnswer(f"no answer from {self._client.base_url}: {reason_of(error)}") from error

    def chat(
        self, model: str, messages: list[dict[str, str]], **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Yields the events of a streamed answer. Raises ApiFailure."""
        body = {"model": model, "messages": messages, "stream": True} | _given(options)
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.is_error:
                    answer.read()
                    raise self._failure(answer)
                yield from _events(_lines(answer))
        except httpx.HTTPError as error:
            raise NoAnswer(f"no answer from {self._client.base_url}: {reason_of(error)}") from error

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        return self._send(method, path, **arguments).json()

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        deadline = monotonic() + self.patience_s
        while True:
            pause_s = None
            try:
                answer = self._client.request(method, path, **arguments)
            except httpx.HTTPError as error:
                failure = NoAnswer(f"no answer from {self._client.base_url}: {reason_of(error)}")
                failure.__cause__ = error
            else:
                if not answer.is_error:
                    self._has_answered = True
                    _report_behind(answer)
                    return answer
                failure = self._failure(answer)
                if isinstance(failure, Refused) and failure.code == "rate_limit_exceeded":
                    named = answer.headers.get("retry-after", "")
                    pause_s = float(named) if named.isdecimal() else AWAY_S
            if isinstance(failure, NoAnswer) and self._has_answered:
                pause_s = AWAY_S
            if pause_s is None or monotonic() + pause_s > deadline:
                raise failure
            sleep(pause_s)

    def _failure(self, answer: httpx.Response) -> ApiFailure:
        try:
            error: dict[str, Any] = answer.json()["error"]
            status = answer.status_code
            refused = Refused(error | self._in_our_words(status, error), status)
        except (ValueError, KeyError, TypeError, AttributeError):
            return NoAnswer(f"{answer.status_code} {answer.reason_phrase} from {self.url}")
        return NoAnswer(str(refused)) if answer.status_code in NOT_NOW else refused

    def _in_our_words(self, status: int, error: dict[str, Any]) -> dict[str, str]:
        """Returns a field `message` in words for the command line, if the error's own message names
        headers or routes, or lacks advice. Otherwise returns no field."""
        key, message, code = self._key_source, str(error.get("message")), error.get("code")
        if status == 401:
            return {"message": f"{self.url} does not know the key of {key}, or it has expired"}
        if status == 403:
            return {"message": f"{message.rstrip('.')}: use a key that may do this in {key}"}
        if code == "route_not_found":
            return {"message": f"{self.url} has no admin plane: set LORAPLEX_URL to where it is"}
        advice = ADVICE.get(str(code))
        return {"message": f"{message.rstrip('.')}; {advice}"} if advice else {}


def _lines(answer: httpx.Response) -> Iterator[str]:
    """Yields the lines of an answer. httpx also splits at other characters, such as U+2028, which
    JSON may contain."""
    rest = ""
    for piece in answer.iter_text():
        *whole, rest = (rest + piece).split("\n")
        yield from whole
    if rest:
        yield rest


def _report_behind(answer: httpx.Response) -> None:
    """Reports gateways that may not use a change yet."""
    match answer.headers.get("loraplex-gateways-behind", "0"):
        case "0":
            return
        case "unknown":
            who = "some gateways"
        case number:
            who = "1 gateway" if number == "1" else f"{number} gateways"
    tell(f"{who} may not have applied the change yet, and will when the database is reached")


def connect(settings: Settings) -> Api:
    """Returns a client of the admin plane. It uses the key of the settings, or the admin key of
    this account's running server if the settings have none. Raises ApiFailure."""
    url, server = _place(settings)
    key = settings.key or _keys_of(server).get("admin")
    if server is not None and url == server.url:
        url = server.admin_url
    return _api(settings, url, key)


def connect_tenant(settings: Settings, tenant: str | None, key: str | None = None) -> Api:
    """Returns a client for inference. It uses `key`, or the key of `tenant` in the server's
    keys.json. If neither is given, it uses the key of the settings, or the first tenant's key in
    keys.json. Raises NoKey and ApiFailure."""
    url, server = _place(settings)
    if key is not None:
        return _api(settings, url, key)
    known: dict[str, str] = _keys_of(server).get("tenants", {})
    if tenant is None:
        return _api(settings, url, settings.key or next(iter(known.values()), None))
    if tenant not in known:
        path = (server.data_dir if server else settings.home) / "keys.json"
        raise NoKey(f"{path} has no key of tenant {tenant!r}: set LORAPLEX_KEY instead")
    return _api(settings, url, known[tenant])


def endpoint(settings: Settings, url: str | None) -> tuple[str, str | None]:
    """Returns the base URL for inference, and a key for it if one is known. `url` overrides the URL
    of the settings. If both are given and differ, the key of the settings is not used. Raises
    ApiFailure."""
    if url and settings.url and url.rstrip("/") != settings.url.rstrip("/"):
        settings = msgspec.structs.replace(settings, key=None)
    place, server = _place(msgspec.structs.replace(settings, url=url or settings.url))
    if not place:
        raise _nothing_serves(settings)
    known: dict[str, str] = _keys_of(server).get("tenants", {})
    return place, settings.key or next(iter(known.values()), None)


def with_store_of_server(settings: Settings) -> Settings:
    """Returns the settings with the server's store, for imports on this machine. Raises ApiFailure
    if no server runs, or it runs on another machine and the settings have no store."""
    if settings.store is not None:
        return settings
    url, server = _place(settings)
    if server is not None:
        return msgspec.structs.replace(settings, data_dir=server.data_dir)
    with _api(settings, url, settings.key) as api:
        if api.host not in ("localhost", "127.0.0.1", "::1"):
            raise ApiFailure(
                f"{url} is another machine, which does not read {settings.store_location}: run this"
                " there, or set LORAPLEX_STORE to the store of both"
            )
    return settings


def _place(settings: Settings) -> tuple[str, RunningServer | None]:
    """Returns the server's URL, which is empty if no server is known. Also returns the server if it
    runs on this machine under this account, otherwise None."""
    if settings.url:
        # Users may have set the URL of the data plane, which ends with /v1.
        url = settings.url.rstrip("/").removesuffix("/v1")
        # Only servers of this account count, because a server of another account would learn the
        # key.
        return url, find_server_at(settings, url)
    server = find_server(settings)
    return (server.url if server else ""), server


def _api(settings: Settings, url: str, key: str | None) -> Api:
    if not url:
        raise _nothing_serves(settings)
    if not key:
        raise NoKey(f"set LORAPLEX_KEY: {settings.home} has no key for {url}")
    return Api(url, key, "LORAPLEX_KEY" if key == settings.key else "its own keys.json")


def _nothing_serves(settings: Settings) -> ApiFailure:
    return ApiFailure(
        f"nothing serves from {settings.home}: set LORAPLEX_URL and LORAPLEX_KEY,"
        " or start `loraplex serve`"
    )


def _keys_of(server: RunningServer | None) -> dict[str, Any]:
    """Returns the contents of a server's keys.json, or an empty dict if there is no server or no
    such file. Raises BadSettings, or NotPrivate if another account owns the file."""
    if server is None:
        return {}
    path = server.data_dir / "keys.json"
    try:
        return msgspec.json.decode(read_private(path), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadSettings(f"{path}: {error}") from None


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise ApiFailure(event["error"]["message"])
        yield event
