"""Compares the CPU time of a request on a HotRoute with the framework's own route, alternately.

python -m benchmarks.hot_route [REQUESTS] [TURNS]

Both routes decode the same chat request and send the same answer. Nothing is tokenised or
generated.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

from litestar import Litestar, post
from litestar.datastructures import State
from litestar.params import JSONBody

from benchmarks.http_floors import PATH, Canned
from gateway.dialects.chat_completions import ChatCompletionRequest
from gateway.exceptions import InvalidRequest
from gateway.http.error_answers import to_response
from gateway.http.handlers import DataPlane, HotRoute
from gateway.http.request import HttpRequest
from gateway.limits.tenant_load import BodyPace
from gateway.tracing import Tracing
from web.body_budget import HELD_BODY, BodyBudget, HeldBody
from web.headers import add_request_headers

BODY = b'{"model": "bot", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64}'
CANNED = Canned(b"{}")
OPTIONS: dict[str, Any] = {
    "state": State(
        {
            "gateway": SimpleNamespace(
                config=SimpleNamespace(tracing=Tracing()), body_pace=BodyPace()
            )
        }
    ),
    "request_class": HttpRequest,
    "exception_handlers": {Exception: to_response},
    "openapi_config": None,
    "logging_config": None,
}


async def guard(connection: Any, _handler: Any) -> None:
    connection.scope["user"] = SimpleNamespace(tenant=SimpleNamespace(id="ten_1"))


async def create(request: HttpRequest, data: JSONBody[ChatCompletionRequest]) -> Canned:
    if request.scope["query_string"]:
        raise InvalidRequest("The request is refused.")
    return CANNED


def make_apps() -> dict[str, Any]:
    hot = HotRoute(PATH, http_method="POST", guards=[guard], status_code=200)(create)
    framework = post(PATH, guards=[guard], status_code=200)(create)
    plain = Litestar([framework], before_send=[add_request_headers], **OPTIONS)
    return {
        "hot": DataPlane(cross_origin=None, route_handlers=[hot], **OPTIONS),
        "framework": plain,
    }


async def call(app: Any, budget: BodyBudget, query: bytes) -> int:
    """Sends a request to the application. Returns the status of its answer."""
    statuses: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "raw_path": PATH.encode(),
        "root_path": "",
        "query_string": query,
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(BODY)),
        ],
        "state": {HELD_BODY: HeldBody(budget)},
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "http_version": "1.1",
        "scheme": "http",
    }
    await app(scope, receive, send)
    return statuses[0]


async def main() -> None:
    num_requests, num_turns = (*map(int, sys.argv[1:]), *(2000, 20)[len(sys.argv) - 1 :])
    apps, budget = make_apps(), BodyBudget()
    for title, query, status in (("answered", b"", 200), ("refused", b"x=1", 400)):
        spent: dict[str, list[float]] = {name: [] for name in apps}
        for turn in range(num_turns + 1):
            for name in sorted(apps, reverse=bool(turn % 2)):
                began = time.process_time()
                for _ in range(num_requests):
                    assert await call(apps[name], budget, query) == status
                if turn:  # the first turn is a warm-up
                    spent[name].append((time.process_time() - began) / num_requests * 1e6)
        for name, times in spent.items():
            low, mid, high = statistics.quantiles(times, n=4)
            print(f"{title:9} {name:10} {mid:6.1f} us a request ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    asyncio.run(main())
