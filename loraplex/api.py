"""The command line's way to a running server: its REST interface and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from loraplex.errors import ApiFailure
from loraplex.settings import Settings

FILES = ("adapter_config.json", "adapter_model.safetensors")


class Api:
    """`key` may be an admin's or a tenant's; the server decides what it may do."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(120.0, connect=5.0),
        )

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> Any:
        return self._call("GET", path, params=_given(query))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._call("POST", path, json=_given(body))

    def put(self, path: str, body: dict[str, Any], **query: Any) -> Any:
        return self._call("PUT", path, json=body, params=_given(query))

    def delete(self, path: str, **query: Any) -> Any:
        return self._call("DELETE", path, params=_given(query))

    def all(self, path: str, cursor: str = "name", **query: Any) -> list[dict[str, Any]]:
        """Every page of a listing."""
        found: list[dict[str, Any]] = []
        while True:
            after = found[-1][cursor] if found else None
            page = self.get(path, after=after, **query)
            found += page["data"]
            if not page["has_more"]:
                return found

    def push(self, folder: Path, **fields: str | None) -> dict[str, Any]:
        """Uploads what peft saved in `folder` and returns the version."""
        with _Files(folder) as files:
            return self._call("POST", "/admin/v1/adapters", data=_given(fields), files=files)

    def chat(self, model: str, messages: list[dict[str, str]], **options: Any) -> Iterator[str]:
        """The pieces of the answer as they come."""
        body = {"model": model, "messages": messages, "stream": True} | _given(options)
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.is_error:
                    answer.read()
                    raise ApiFailure(_explain(answer))
                yield from _pieces(answer.iter_lines())
        except httpx.HTTPError as error:
            raise ApiFailure(f"no answer from {self._client.base_url}: {error}") from error

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        try:
            answer = self._client.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise ApiFailure(f"no answer from {self._client.base_url}: {error}") from error
        if answer.is_error:
            raise ApiFailure(_explain(answer))
        return answer.json()


def connect(settings: Settings) -> Api:
    """For managing: by settings, else by what `serve` wrote into the data directory."""
    return _connect(settings, _written(settings.home / "keys.json").get("admin"))


def connect_tenant(settings: Settings, tenant: str | None) -> Api:
    """For inference: the same with the key of this tenant, or of the first there is."""
    known: dict[str, str] = _written(settings.home / "keys.json").get("tenants", {})
    return _connect(settings, known.get(tenant) if tenant else next(iter(known.values()), None))


def _connect(settings: Settings, known_key: str | None) -> Api:
    url = settings.url or _written(settings.home / "serve.json").get("url")
    key = settings.key or known_key
    if not url or not key:
        raise ApiFailure(
            f"nothing serves from {settings.home}: set LORAPLEX_URL and LORAPLEX_KEY,"
            " or start `loraplex serve`"
        )
    return Api(url, key)


def _written(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _explain(answer: httpx.Response) -> str:
    """The server's words, and for a refused adapter what it found and would take."""
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.reason_phrase}"
    hints = [f"{name}: {error[name]}" for name in ("allowed", "hint") if error.get(name)]
    return "\n".join([str(error["message"]), *hints])


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise ApiFailure(event["error"]["message"])
        for choice in event["choices"]:
            if piece := choice["delta"].get("content"):
                yield piece


class _Files:
    """The two files of an adapter, open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def __enter__(self) -> dict[str, Any]:
        missing = [name for name in FILES if not (self._folder / name).is_file()]
        if missing:
            raise ApiFailure(f"{self._folder} has no {missing[0]}")
        self._open = {name: (self._folder / name).open("rb") for name in FILES}
        return {name: (name, file) for name, file in self._open.items()}

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
