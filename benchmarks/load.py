"""A closed-loop load generator for streamed completions, light enough to share two cores with the
server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec
import numpy as np


@dataclass(frozen=True, slots=True)
class Job:
    """One request: token ids in, `num_output` tokens out, greedy, end token ignored."""

    model: str
    prompt: list[int]
    num_output: int


@dataclass(slots=True)
class Timing:
    """Times in seconds on the client's monotonic clock."""

    start_s: float
    arrivals_s: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class _Chunk(msgspec.Struct):
    usage: _Usage | None = None


_last_chunk = msgspec.json.Decoder(_Chunk)


async def _request(host: str, port: int, key: str, job: Job) -> Timing:
    body = msgspec.json.encode(
        {
            "model": job.model,
            "prompt": job.prompt,
            "max_tokens": job.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    timing = Timing(time.perf_counter())
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r}: {(await reader.read())[-600:]!r}")
    tail = b""
    done = False
    while data := await reader.read(65536):
        now = time.perf_counter()
        timing.arrivals_s += [now] * data.count(b'"text":"')
        tail = (tail + data)[-4096:]
        done = done or b"data: [DONE]" in tail
    writer.close()
    if not done:
        raise RuntimeError(f"stream ended without [DONE]: {tail[-400:]!r}")
    usage = _last_chunk.decode(tail[: tail.rindex(b"data: [DONE]")].split(b"data: ")[-1]).usage
    assert usage is not None
    timing.num_prompt, timing.num_output = usage.prompt_tokens, usage.completion_tokens
    timing.num_cached = (usage.prompt_tokens_details or {}).get("cached_tokens", 0)
    return timing


async def run_load(url: str, key: str, jobs: Sequence[Job], concurrency: int) -> list[Timing]:
    """Sends all jobs, at most `concurrency` at a time, each on a connection of its own."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    waiting = list(reversed(jobs))
    timings: list[Timing] = []

    async def client() -> None:
        while waiting:
            timings.append(
                await _request(parts.hostname or "", parts.port or 0, key, waiting.pop())
            )

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return timings


@dataclass(frozen=True, slots=True)
class Summary:
    """Rates in tokens a second over the whole run; times in milliseconds."""

    seconds: float
    output_per_s: float
    total_per_s: float
    cached_share: float
    ttft_ms: tuple[float, float, float]
    itl_ms: tuple[float, float, float]


def summarise(timings: Sequence[Timing]) -> Summary:
    """Percentiles are p50, p90, p99."""
    seconds = max(t.arrivals_s[-1] for t in timings) - min(t.start_s for t in timings)
    outputs = sum(t.num_output for t in timings)
    prompts = sum(t.num_prompt for t in timings)
    ttft = [t.arrivals_s[0] - t.start_s for t in timings]
    gaps = np.concatenate([np.diff(t.arrivals_s) for t in timings if len(t.arrivals_s) > 1])

    def percentiles(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
        p50, p90, p99 = np.percentile(np.asarray(values) * 1000, [50, 90, 99])
        return float(p50), float(p90), float(p99)

    return Summary(
        seconds=seconds,
        output_per_s=outputs / seconds,
        total_per_s=(outputs + prompts) / seconds,
        cached_share=sum(t.num_cached for t in timings) / prompts,
        ttft_ms=percentiles(ttft),
        itl_ms=percentiles(gaps),
    )
