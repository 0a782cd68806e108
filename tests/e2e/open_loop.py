"""Requests at a given rate, whatever becomes of those before them: streamed completions over plain
sockets, light enough to share two cores with what they measure."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec
import numpy as np


@dataclass(frozen=True, slots=True)
class Ask:
    """Whose it is, for the table; and the request."""

    who: str
    key: str
    model: str
    prompt: list[int]
    num_output: int


@dataclass(slots=True)
class Outcome:
    """Of one attempt. Seconds on the client's clock."""

    who: str
    sent_s: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    first_s: float | None = None
    end_s: float = 0.0
    num_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list[float])
    """Between reads that brought tokens."""
    is_whole: bool = False

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.sent_s

    @property
    def seconds(self) -> float:
        return self.end_s - self.sent_s


async def send(url: str, ask: Ask) -> Outcome:
    parts = urlsplit(url)
    body = msgspec.json.encode(
        {
            "model": ask.model,
            "prompt": ask.prompt,
            "max_tokens": ask.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            # A token may have no text, and is an answer all the same.
            "return_token_ids": True,
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Authorization: Bearer {ask.key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    outcome = Outcome(ask.who, time.perf_counter())
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(head.encode() + body)
        outcome.status = int((await reader.readline()).split()[1])
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            outcome.headers[name.lower()] = value.strip()
        tail, last_s = b"", 0.0
        while data := await reader.read(65536):
            found = data.count(b'"text":"')
            if found:
                now_s = time.perf_counter()
                if outcome.first_s is None:
                    outcome.first_s = now_s
                else:
                    outcome.gaps_s.append(now_s - last_s)
                last_s = now_s
            outcome.num_tokens += found
            tail = (tail + data)[-64:]
        outcome.is_whole = b"data: [DONE]" in tail
    finally:
        writer.close()
    outcome.end_s = time.perf_counter()
    return outcome


async def send_until_served(url: str, ask: Ask) -> list[Outcome]:
    """A client that comes again when it is told to. All its attempts; the last was served."""
    attempts = [await send(url, ask)]
    while attempts[-1].status == 503:
        await asyncio.sleep(float(attempts[-1].headers["retry-after"]))
        attempts.append(await send(url, ask))
    return attempts


async def open_loop(
    url: str, streams: Sequence[tuple[float, Callable[[], Ask]]], seconds: float, seed: int
) -> list[Outcome]:
    """streams: requests a second, and what they are; each with arrivals at random. Nothing is
    looked through for garbage meanwhile: it would be measured with the answers."""
    rng = random.Random(seed)
    tasks: list[asyncio.Task[Outcome]] = []
    begin = time.perf_counter()

    async def run(rate: float, make: Callable[[], Ask]) -> None:
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            await asyncio.sleep(max(begin + at_s - time.perf_counter(), 0.0))
            tasks.append(asyncio.create_task(send(url, make())))
            at_s += rng.expovariate(rate)

    gc.disable()
    try:
        await asyncio.gather(*(run(rate, make) for rate, make in streams))
        return list(await asyncio.gather(*tasks))
    finally:
        gc.enable()


def p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))
