"""Attacks of one tenant and of clients without a key: coroutines that do one bounded round each."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import httpx

from tests.e2e.tiny import MAX_MODEL_LEN, NAME
from tests.hostile_grammars import (
    DOUBLES,
    RULES,
    WRAPS,
    chain,
    deep,
    hidden,
    pattern,
    properties,
    rules,
)

BODY_BYTES = 9 << 20
"""A little below what a body may have."""
NUM_HEADS = 40
NUM_BODIES = 20
NUM_LONG_PROMPTS = 40
LINGER_S = 2.0
"""How long connections that send nothing more are kept, in seconds."""

Attack = Callable[["Attacker"], Awaitable[None]]


class Attacker:
    """Attacks one gateway, with the key of one tenant, until it is told to stop."""

    def __init__(self, url: str, key: str) -> None:
        self.statuses: dict[str, Counter[int]] = {}
        """Of the answers to each attack, by its name. 0: the connection was closed instead."""
        self._ended: set[str] = set()
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self._authorization = {"authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=20)
        self._client = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)

    @property
    def has_tried_all(self) -> bool:
        """Whether every attack has ended once."""
        return len(self._ended) == len(ATTACKS)

    async def run(self, stopping: asyncio.Event) -> None:
        """All attacks beside each other, each again and again."""
        async with self._client, asyncio.TaskGroup() as attacks:
            for attack in ATTACKS:
                attacks.create_task(self._repeat(attack, stopping))

    async def _repeat(self, attack: Attack, stopping: asyncio.Event) -> None:
        self.statuses[attack.__name__] = Counter()
        while not stopping.is_set():
            await attack(self)
            self._ended.add(attack.__name__)
            await asyncio.sleep(0.05)

    async def post(self, attack: Attack, path: str, body: bytes, **headers: str) -> None:
        headers = {**self._authorization, "content-type": "application/json", **headers}
        await self._send(attack, "POST", path, headers, body)

    async def get(self, attack: Attack, path: str, **headers: str) -> None:
        await self._send(attack, "GET", path, headers, b"")

    async def _send(
        self, attack: Attack, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        status = 0
        with contextlib.suppress(httpx.TransportError):
            answer = await self._client.request(method, path, headers=headers, content=body)
            status = answer.status_code
        self.statuses[attack.__name__][status] += 1

    async def hold(self, sent: bytes, count: int) -> None:
        """Opens connections, sends the same on each, and lingers."""
        writers: list[asyncio.StreamWriter] = []
        try:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(self._host, self._port)
                    writers.append(writer)
                    writer.write(sent)
            await asyncio.sleep(LINGER_S)
        finally:
            for writer in writers:
                writer.transport.abort()

    def head(self, path: str, length: int) -> bytes:
        """Of a request of the tenant whose body is still to come."""
        authorization = self._authorization["authorization"]
        return (
            f"POST {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: {authorization}\r\n"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        ).encode()


def _completion(**fields: object) -> bytes:
    return json.dumps({"model": NAME, "max_tokens": 1, **fields}).encode()


MANY_IDS = json.dumps({"model": NAME, "tokens": [7] * (BODY_BYTES // 3)}).encode()
LONG_TEXT = json.dumps({"model": NAME, "prompt": "word " * (BODY_BYTES // 5)}).encode()
MANY_PROMPTS = _completion(prompt=[[7] * 16_000] * 100, echo=True)
ECHO = _completion(
    prompt=[list(range(200)) * 10], echo=True, logprobs=20, n=8, max_tokens=1, temperature=1.0
)
COSTLY_SAMPLING = _completion(
    prompt=[[1, 2, 3]],
    n=32,
    max_tokens=16,
    logprobs=20,
    logit_bias={str(token): 1.0 for token in range(200)},
    presence_penalty=1.0,
    frequency_penalty=1.0,
    repetition_penalty=1.2,
    top_p=0.9,
    min_p=0.01,
    top_k=200,
    stop=[f"never said {number}" for number in range(16)],
    ignore_eos=True,
)

# Compiled for seconds; with `$dynamicRef` they are refused, once they were looked at.
MANY_LISTS = [[]] * 64_000
SCHEMAS: tuple[object, ...] = (
    {"enum": [0] * 130_000},
    {"enum": MANY_LISTS, "$dynamicRef": "#"},
    {"enum": [{"": 0}] * 30_000, "$dynamicRef": "#"},
    {"enum": [str(number) for number in range(30_000)]},
    {"enum": ["x" * (1 << 20)]},
    json.dumps({"enum": MANY_LISTS, "$dynamicRef": "#"}),
    '{"items":' * 2_000 + "{}" + "}" * 2_000,
)
COSTLY_SCHEMAS = [_completion(prompt="x", guided_json=schema) for schema in SCHEMAS]

# Each would end a process by its stack, or take gigabytes.
HOSTILE_GRAMMARS = [
    _completion(prompt="x", **{field: text})
    for field, text in (
        ("guided_json", chain("%s", 2_500)),
        ("guided_json", chain(deep(WRAPS["items"], 4), 1_000)),
        ("guided_json", chain(DOUBLES["allOf"], 30, pattern("a"))),
        ("guided_json", properties(9_000)),
        ("guided_json", hidden(pattern("a?" * 2_000))),
        ("guided_regex", "a?" * 20_000),
        ("guided_regex", "a?" * 8_000),
        ("guided_grammar", rules(RULES["rules"], 2_700)),
        ("guided_grammar", rules(RULES["two terminals"], 16)),
    )
]


async def many_ids_to_detokenize(attacker: Attacker) -> None:
    await attacker.post(many_ids_to_detokenize, "/detokenize", MANY_IDS)


async def long_text_to_tokenize(attacker: Attacker) -> None:
    await attacker.post(long_text_to_tokenize, "/tokenize", LONG_TEXT)


async def prompts_far_beyond_the_context(attacker: Attacker) -> None:
    await attacker.post(prompts_far_beyond_the_context, "/v1/completions", MANY_PROMPTS)


async def echo_with_all_logprobs(attacker: Attacker) -> None:
    await attacker.post(echo_with_all_logprobs, "/v1/completions", ECHO)


async def costly_sampling(attacker: Attacker) -> None:
    await attacker.post(costly_sampling, "/v1/completions", COSTLY_SAMPLING)


async def costly_schemas(attacker: Attacker) -> None:
    for body in COSTLY_SCHEMAS:
        await attacker.post(costly_schemas, "/v1/completions", body)


async def hostile_grammars(attacker: Attacker) -> None:
    for body in HOSTILE_GRAMMARS:
        await attacker.post(hostile_grammars, "/v1/completions", body)


async def bursts_of_long_prompts(attacker: Attacker) -> None:
    bodies = [
        _completion(prompt=[number % 200] * (MAX_MODEL_LEN - 100))
        for number in range(NUM_LONG_PROMPTS)
    ]
    await asyncio.gather(
        *(attacker.post(bursts_of_long_prompts, "/v1/completions", body) for body in bodies)
    )


async def half_sent_heads(attacker: Attacker) -> None:
    await attacker.hold(b"GET /v1/models HTTP/1.1\r\nhost: gate", NUM_HEADS)


async def half_sent_bodies(attacker: Attacker) -> None:
    head = attacker.head("/v1/completions", BODY_BYTES)
    await attacker.hold(head + b" " * (BODY_BYTES // 2), NUM_BODIES)


async def anonymous_documents(attacker: Attacker) -> None:
    paths = ("/schema/openapi.json", "/version", "/no/such/path") * 4
    await asyncio.gather(*(attacker.get(anonymous_documents, path) for path in paths))


async def made_up_keys(attacker: Attacker) -> None:
    headers = [{"authorization": f"Bearer lpx_{number:043}"} for number in range(20)]
    await asyncio.gather(*(attacker.get(made_up_keys, "/v1/models", **each) for each in headers))


async def disguised_paths(attacker: Attacker) -> None:
    for path in ("/%61dmin/v1/tenants", "//admin/v1/tenants", "/v1/../admin/v1/tenants"):
        await attacker.get(disguised_paths, path)


ATTACKS: tuple[Attack, ...] = (
    many_ids_to_detokenize,
    long_text_to_tokenize,
    prompts_far_beyond_the_context,
    echo_with_all_logprobs,
    costly_sampling,
    costly_schemas,
    hostile_grammars,
    bursts_of_long_prompts,
    half_sent_heads,
    half_sent_bodies,
    anonymous_documents,
    made_up_keys,
    disguised_paths,
)
